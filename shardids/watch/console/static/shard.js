// One shard: where it is, how it does, its highest ID, its tables, its moves, and what can be done with it.

import { openAction } from "./actions.js";
import { get } from "./api.js";
import { bitPicture } from "./bits.js";
import { lines } from "./chart.js";
import { cells, command, h, show, table } from "./dom.js";
import { ago, bytes, count, local, minute, UNKNOWN } from "./format.js";
import { live } from "./live.js";
import { facts } from "./map_colours.js";

const TABLES = [{ title: "Table" }, { title: "Rows, about", class: "number" }, { title: "Size", class: "number" }];
const MOVES = [{ title: "From" }, { title: "To" }, { title: "When" }, { title: "Outcome" }];
const KEYS = [{ title: "Key" }, { title: "Kind" }, { title: "Since" }];
/** The server sends one more if there are more. */
const MOST_KEYS = 50;
/** What is wrong with a shard in a state in which it can't be used, nor moved or fenced. */
const WRONG = /** @type {Record<string, string>} */ ({
  broken: "The shard is broken: its schema or its sequences are gone from its node.",
  missing: "The shard is missing: its node does not have it, where the catalog places it.",
  lost: "The shard was lost with its node.",
  copy: "The shard was not activated on this server: it looks like a copy.",
});

/** @param {HTMLElement} root @param {() => void} close */
export function mountShard(root, close) {
  /** @type {number | null} */ let shard = null;
  /** @type {any} */ let answer = null;
  let problem = "";
  let read = 0;
  let basis = "";
  let asking = new AbortController();
  const heading = h("h2", { id: "shard-title" });
  const head = h("header", null, heading,
    h("button", { type: "button", class: "plain right", on: { click: close } }, "Close", h("span", { class: "away" }, " the shard"), " ", h("kbd", { "aria-hidden": "true" }, "Esc")));
  const known = h("div", null);
  const place = h("div", { class: "chart small", role: "img", "aria-label": "IDs that the shard drew per second, over time" });
  const rates = h("div", { hidden: true }, h("h3", null, "IDs drawn per second"), place);
  const more = h("div", null);
  const actions = h("div", { class: "actions" });
  root.append(head, known, actions, rates, more);
  /** @type {ReturnType<typeof lines> | null} */ let chart = null;

  const state = () => live.map?.states[live.map.state[/** @type {number} */ (shard)] ?? -1] ?? "unknown";
  /** With another basis, what was read of the shard may have become known, or be out of date. */
  const basisNow = () => `${shard} ${state()} ${live.cluster?.catalog.up}`;

  async function load() {
    basis = basisNow();
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
    if (basis !== basisNow()) load();
    show(heading, `Shard ${shard}`);
    show(known, h("dl", { class: "facts" }, [...facts(shard, answer?.size_bytes ?? null), ...placeOf(answer)].map(([name, words]) => [h("dt", null, name), h("dd", null, words)])),
      WRONG[state()] ? h("div", { class: "notice bad" }, h("p", null, WRONG[state()], " What to do:"), command("shardids doctor")) : null);
    showActions();
    showRates();
    show(more, problem ? h("p", { class: "notice bad" }, h("b", null, "The shard can't be read now. "), problem) : null,
      answer ? details(answer, state(), (performance.now() - read) / 1000) : problem ? null : h("p", { class: "empty" }, "Reading the shard …"));
  }

  function showActions() {
    const button = (/** @type {string} */ action, /** @type {string} */ words) =>
      h("button", { type: "button", "data-key": `${action} ${shard}`, on: { click: () => openAction(action, shard) } }, words);
    const [other, words] = state() === "fenced" ? ["unfence", "Activate …"] : ["fence", "Fence …"];
    const may = live.cluster.actions && ["active", "fenced"].includes(state());
    show(actions, !may ? null : live.cluster.catalog.up ? [button("move", "Move …"), button(other, words)]
      : h("p", { class: "soft small" }, "It can be moved and fenced again once the catalog answers."));
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
      problem = basis = "";
      asking.abort();
      if (shard === null) return;
      root.setAttribute("aria-labelledby", "shard-title");
      update();
      if (!live.known) load(); // no update did
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
const placeOf = (answer) => !answer ? [] : [["Schema", answer.schema],
  ...(!answer.is_read && answer.last_state ? [/** @type {[string, string]} */ (["Last read", `${answer.last_state}, ${ago(live.age(answer.read_at))}`])] : [])];

/** @param {any} answer @param {string} state @param {number} age */
function details(answer, state, age) {
  const highest = answer.highest_id;
  return [
    (answer.errors ?? []).map((/** @type {string} */ error) => h("p", { class: "notice bad" }, h("b", null, "Not all could be read. "), error)),
    h("h3", null, "Highest ID"),
    highest ? h("div", { class: "last" },
      h("p", null, h("code", null, highest.id), " ", h("button", { type: "button", class: "plain", "data-copy": highest.id, "aria-label": `Copy: ${highest.id}` }, "Copy")),
      bitPicture(highest.id),
      h("p", { class: "soft small" }, `${local(highest.time)}, ${ago(live.nowOfIds() - highest.time)}. It had issued none above this one when it was read, ${ago(live.age(answer.read_at))}.`))
      : h("p", { class: "empty" }, answer.is_read ? "None is known: it has drawn none singly since it came here, or it is not active." : "Not known: the shard was not read."),
    h("h3", null, "Tables"),
    !answer.tables ? h("p", { class: "empty" }, "Not known: the shard's node can't be read now.")
      : answer.tables.length ? table("Tables", TABLES, answer.tables.map((/** @type {any} */ one) => cells(TABLES, [h("span", { class: "name", title: one.name }, one.name),
        one.rows_estimate === null || one.rows_estimate < 0 ? UNKNOWN : count(one.rows_estimate), bytes(one.size_bytes)])))
      : h("p", { class: "empty" }, WRONG[state] ? "None was found." : ["It has no tables. They come with ", h("code", null, "shardids migrate"), "."]),
    answer.keys?.length ? [h("h3", null, "Keys that live here by the directory"),
      table("Keys", KEYS, answer.keys.slice(0, MOST_KEYS).map((/** @type {any} */ one) => cells(KEYS, [h("span", { class: "name", title: one.key }, one.key), one.kind, minute(one.since)]))),
      answer.keys.length > MOST_KEYS ? h("p", { class: "soft small" }, "There are more: ", h("code", null, `shardids tenant list --shard ${answer.shard}`)) : null] : null,
    answer.pins?.length ? [h("h3", null, "Pinned"), answer.pins.map((/** @type {any} */ pin) => h("p", null,
      pin.key !== null ? `Key ${pin.key} lives here, which is pinned` : pin.node ? `To node ${pin.node}` : "Where it is", `, since ${minute(pin.since)}. To let it move: `, h("code", null, pin.do)))] : null,
    h("h3", null, "Moves"),
    !answer.moves ? h("p", { class: "empty" }, "Not known: the catalog can't be read now.")
      : answer.moves.length ? table("Moves", MOVES, answer.moves.map((/** @type {any} */ move) => cells(MOVES, [move.from, move.to, minute(move.started),
        move.done ? move.state : `${move.state}, at ${move.step}`])))
      : h("p", { class: "empty" }, "It was never moved."),
    h("p", { class: "soft small" }, `Read ${ago(age)}.`),
  ];
}
