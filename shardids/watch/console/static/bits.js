// The 64 bits of an ID as coloured fields. IDs are strings and BigInts: a number of JavaScript would round them.

import { h } from "./dom.js";
import { live } from "./live.js";

/**
 * @typedef {{name: string, width: number, value: string, from: number}} Field
 */

/** Returns the fields of an ID from the highest bit, those that have bits. @param {string} id decimal, signed or not
 *  @returns {{bits: string, fields: Field[]}} */
export function fields(id) {
  const { time_bits: time, shard_bits: shard, sequence_bits: sequence } = live.cluster.layout;
  const bits = BigInt.asUintN(64, BigInt(id)).toString(2).padStart(64, "0");
  let from = 0;
  const made = /** @type {[string, number][]} */ ([["unused", 64 - time - shard - sequence], ["time", time], ["shard", shard], ["sequence", sequence]])
    .map(([name, width]) => {
      const field = { name, width, from, value: width ? BigInt(`0b${bits.slice(from, from + width)}`).toString() : "0" };
      from += width;
      return field;
    });
  return { bits, fields: made.filter((field) => field.width > 0) };
}

/** Returns the picture of an ID: each field with its name, width, bits and value. @param {string} id
 *  @param {Record<string, string>} [words] what to say below a field, in place of its value */
export function bitPicture(id, words = {}) {
  const { bits, fields: all } = fields(id);
  const spoken = all.map((field) => `${field.name} ${field.width} bits: ${field.value}`).join("; ");
  return h("div", { class: "bits", role: "img", "aria-label": `ID ${id}: ${spoken}` }, all.map((field) => h("div", {
    class: `field ${field.name}`, style: { "flex-grow": field.width },
  },
  h("span", { class: "label" }, field.name, h("small", null, ` ${field.width}`)),
  h("span", { class: "row" }, [...bits.slice(field.from, field.from + field.width)].map((bit) => h("i", { class: bit === "1" ? "set" : "clear" }, bit))),
  h("span", { class: "value" }, words[field.name] ?? (field.name === "unused" ? "" : field.value)))));
}
