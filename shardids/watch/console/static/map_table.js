// The map as a table: shards by number, node or state, a page at a time, sorted by a column.

import { h, show } from "./dom.js";
import { bytes, count, rate, span, UNKNOWN } from "./format.js";
import { live } from "./live.js";

const PAGE = 64;
/** @typedef {{key: string, title: string, number?: boolean, words: (value: any) => string}} Column */
/** @type {Column[]} */
const COLUMNS = [
  { key: "shard", title: "Shard", number: true, words: String },
  { key: "node", title: "Node", words: (at) => named("nodes", at) },
  { key: "state", title: "State", words: (at) => named("states", at) },
  { key: "region", title: "Region", words: (at) => named("regions", at) },
  { key: "ticks_per_s", title: "IDs drawn", number: true, words: rate },
  { key: "lead_s", title: "Lead", number: true, words: span },
  { key: "size_bytes", title: "Size", number: true, words: bytes },
  { key: "lag_bytes", title: "Move lag", number: true, words: bytes },
  { key: "revision", title: "Revision", words: (at) => named("revisions", at) },
];

/** @param {string} names @param {number | null} at */
const named = (names, at) => at === null || at === undefined ? UNKNOWN : /** @type {any} */ (live.map)[names]?.[at] ?? UNKNOWN;

/** @param {HTMLElement} root */
export function mountTable(root) {
  let sort = "shard";
  let down = false;
  let first = 0;
  const field = /** @type {HTMLInputElement} */ (h("input", {
    type: "search", "aria-label": "Show shards", placeholder: "17, 100-120, a node, a state …", spellcheck: "false",
    on: { input: () => { first = 0; update(); } },
  }));
  const said = h("span", { class: "soft small", role: "status" });
  const pages = h("span", { class: "right" });
  const body = h("div", null);
  root.append(h("header", null, field, said, pages), body);

  /** @param {Column} column */
  function order(column) {
    down = sort === column.key ? !down : Boolean(column.number && column.key !== "shard");
    sort = column.key;
    first = 0;
    update();
  }

  function update() {
    if (!live.map) return;
    const map = /** @type {any} */ (live.map);
    const value = (/** @type {string} */ key, /** @type {number} */ shard) => key === "shard" ? shard : map[key]?.[shard] ?? null;
    const wanted = filter(field.value);
    const shards = Array.from({ length: live.cluster.shard_count }, (_, shard) => shard).filter(wanted);
    const sign = down ? -1 : 1;
    shards.sort((a, b) => {
      const [x, y] = [value(sort, a), value(sort, b)];
      if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1;
      return sign * (x - y) || a - b;
    });
    first = Math.min(first, Math.max(0, Math.floor((shards.length - 1) / PAGE) * PAGE));
    const shown = shards.slice(first, first + PAGE);
    show(said, shards.length ? `${count(first + 1)}–${count(first + shown.length)} of ${count(shards.length)}` : "");
    show(pages, turn("Previous", -PAGE, first === 0), turn("Next", PAGE, first + PAGE >= shards.length));
    show(body, shards.length ? tableOf(shown, value) : h("p", { class: "empty" }, `No shard is like “${field.value}”.`));
  }

  /** @param {string} name @param {number} by @param {boolean} disabled */
  const turn = (name, by, disabled) => h("button", { type: "button", class: "plain", disabled, "data-key": name, on: { click: () => { first += by; update(); } } }, name);

  /** @param {number[]} shards @param {(key: string, shard: number) => any} value */
  function tableOf(shards, value) {
    return h("div", { class: "scroll", role: "group", "aria-label": "Shards", tabindex: "0" }, h("table", { class: "shards" },
      h("thead", null, h("tr", null, COLUMNS.map((column) => h("th", {
        scope: "col", class: column.number ? "number" : null, "aria-sort": sort === column.key ? (down ? "descending" : "ascending") : "none",
      }, h("button", { type: "button", "data-key": column.key, on: { click: () => order(column) } }, column.title, sort === column.key ? (down ? " ↓" : " ↑") : ""))))),
      h("tbody", null, shards.map((shard) => h("tr", null, COLUMNS.map((column) => column.key === "shard"
        ? h("th", { scope: "row", class: "number" }, h("a", { href: `#map/${shard}` }, shard))
        : h("td", { class: column.number ? "number" : null }, column.words(value(column.key, shard)))))))));
  }
  return { update };
}

/** Returns what a typed filter admits: numbers, ranges, or words in the names of node, state, region and revision.
 *  @param {string} text @returns {(shard: number) => boolean} */
function filter(text) {
  const parts = text.split(/[\s,]+/).filter(Boolean).map((part) => part.toLowerCase());
  if (!parts.length) return () => true;
  const tests = parts.map((part) => {
    const range = /^(\d+)(?:[-–](\d+))?$/.exec(part);
    if (range) return (/** @type {number} */ shard) => shard >= Number(range[1]) && shard <= Number(range[2] ?? range[1]);
    return (/** @type {number} */ shard) => COLUMNS.filter((column) => !column.number)
      .some((column) => column.words(/** @type {any} */ (live.map)[column.key]?.[shard] ?? null).toLowerCase().includes(part));
  });
  return (shard) => tests.some((test) => test(shard));
}
