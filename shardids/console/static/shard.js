// One shard: where it is, how it does, its highest ID, its tables, its moves, and what can be done with it.

import { openAction } from "./actions.js";
import { get } from "./api.js";
import { bitPicture } from "./bits.js";
import { lines } from "./chart.js";
import { cells, h, show, table } from "./dom.js";
import { ago, bytes, count, local, minute, UNKNOWN } from "./format.js";
import { live } from "./live.js";
import { facts } from "./map_colours.js";

const TABLES = [{ title: "Table" }, { title: "Rows, about", class: "number" }, { title: "Size", class: "number" }];
const MOVES = [{ title: "From" }, { title: "To" }, { title: "When" }, { title: "Outcome" }];

/** @param {HTMLElement} root @param {() => void} close */
export function mountShard(root, close) {
  /** @type {number | null} */ let shard = null;
  /** @type {any} */ let answer = null;
  let problem = "";
  let read = 0;
  let asking = new AbortController();
  const heading = h("h2", { id: "shard-title" });
  const head = h("header", null, heading,
    h("button", { type: "button", class: "plain right", "aria-label": "Close the shard", on: { click: close } }, "Close", " ", h("kbd", { "aria-hidden": "true" }, "Esc")));
  const known = h("div", null);
  const place = h("div", { class: "chart small", role: "img", "aria-label": "Ticks a second of the shard over time" });
  const rates = h("div", { hidden: true }, h("h3", null, "Ticks a second"), place);
  const more = h("div", null);
  const actions = h("div", { class: "actions" });
  root.append(head, known, actions, rates, more);
  /** @type {ReturnType<typeof lines> | null} */ let chart = null;

  async function load() {
    asking.abort();
    asking = new AbortController();
    try {
      answer = await get(`shards/${shard}`, asking.signal);
      problem = "";
      read = performance.now();
    } catch (error) {
      if (error instanceof DOMException) return;
      problem = [/** @type {Error} */ (error).message, /** @type {any} */ (error).hint].filter(Boolean).join(". ");
    }
    update();
  }

  function update() {
    if (shard === null || !live.known) return;
    show(heading, `Shard ${shard}`);
    show(known, h("dl", { class: "facts" }, [...facts(shard), ...placeOf(answer)].map(([name, words]) => [h("dt", null, name), h("dd", null, words)])));
    showActions();
    showRates();
    show(more, problem ? h("p", { class: "notice bad" }, h("b", null, "The shard can't be read now. "), problem) : null,
      answer ? details(answer, (performance.now() - read) / 1000) : problem ? null : h("p", { class: "empty" }, "Reading the shard …"));
  }

  function showActions() {
    const state = live.map?.states[live.map.state[/** @type {number} */ (shard)] ?? -1];
    const button = (/** @type {string} */ action, /** @type {string} */ words) =>
      h("button", { type: "button", "data-key": `${action} ${shard}`, on: { click: () => openAction(action, shard) } }, words);
    show(actions, live.cluster.actions ? [button("move", "Move …"),
      state === "fenced" ? button("unfence", "Activate …") : button("fence", "Fence …")] : null);
  }

  function showRates() {
    const { times = [], ticks_per_s: values = [] } = answer ?? {};
    const usable = times.length > 1 && values.some((/** @type {number | null} */ x) => x !== null);
    rates.hidden = !usable;
    if (!usable) return;
    chart ??= lines(place, { height: 120, legend: false });
    chart.draw(times, [{ name: `Shard ${shard}`, colour: "--own", values }]);
  }
  return {
    update,
    /** @param {number | null} wanted */
    open(wanted) {
      if (wanted === shard) return;
      shard = wanted;
      answer = null;
      problem = "";
      asking.abort();
      if (shard === null) return;
      root.setAttribute("aria-labelledby", "shard-title");
      update();
      load();
    },
    /** Reads the shard again, once something was done with it. */
    again: load,
    end() {
      asking.abort();
      chart?.end();
    },
  };
}

/** @param {any} answer @returns {[string, string][]} */
const placeOf = (answer) => answer?.schema ? [["Schema", answer.schema]] : [];

/** @param {any} answer @param {number} age */
function details(answer, age) {
  const highest = answer.highest_id;
  return [
    (answer.errors ?? []).map((/** @type {string} */ error) => h("p", { class: "notice bad" }, h("b", null, "Not all could be read. "), error)),
    h("h3", null, "Highest ID"),
    highest ? h("div", { class: "last" },
      h("p", null, h("code", null, highest.id), " ", h("button", { type: "button", class: "plain", "data-copy": highest.id, "aria-label": `Copy: ${highest.id}` }, "Copy")),
      bitPicture(highest.id),
      h("p", { class: "soft small" }, `${local(highest.time)}, ${ago(live.age(highest.time))}. It has issued none above this one.`),
)
      : h("p", { class: "empty" }, "None is known: it has drawn none singly since it came here, or it is not active."),
    h("h3", null, "Tables"),
    (answer.tables ?? []).length ? table("Tables", TABLES, answer.tables.map((/** @type {any} */ one) => cells(TABLES, [h("span", { class: "name", title: one.name }, one.name),
        one.rows_estimate === null || one.rows_estimate < 0 ? UNKNOWN : count(one.rows_estimate), bytes(one.size_bytes)])))
      : h("p", { class: "empty" }, "It has no tables. They come with ", h("code", null, "shardids migrate"), "."),
    h("h3", null, "Moves"),
    (answer.moves ?? []).length ? table("Moves", MOVES, answer.moves.map((/** @type {any} */ move) => cells(MOVES, [move.from, move.to, minute(move.started),
        move.done ? move.state : `${move.state}, at ${move.step}`])))
      : h("p", { class: "empty" }, "It was never moved."),
    h("p", { class: "soft small" }, `Read ${ago(age)}.`),
  ];
}
