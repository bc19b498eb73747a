// Health, for who is on call: one list of what to do, the worst first, and how the nodes are.

import { post } from "./api.js";
import { cells, command, h, show, table } from "./dom.js";
import { ago, bytes, clock, count, plural, rate, short, span, UNKNOWN } from "./format.js";
import { live } from "./live.js";

export const title = "Health";
const KIND = /** @type {Record<string, string>} */ ({ error: "bad", warning: "warn", info: "own" });
const COLUMNS = [
  { title: "Node" }, { title: "State", class: "words" },
  { title: "Shards", class: "number" },
  { title: "IDs drawn", class: "number", hint: "Per second; the footnote of Rates says which are counted" },
  { title: "Lead", class: "number", hint: "The shard that is furthest ahead of its server's clock" },
  { title: "Skew", class: "number", hint: "How far the node's clock is ahead of the others'" },
  { title: "Connections", class: "number" },
  { title: "Replication lag", class: "number", hint: "The slot that is furthest behind, whatever it is for" },
  { title: "In doubt", class: "number", hint: "Parts of transactions that are prepared and not ended" },
  { title: "Layout left", class: "number", hint: "Until the time of IDs is used up" },
];

/** @param {HTMLElement} root */
export function mount(root) {
  const nodes = h("section", { class: "card", "aria-labelledby": "nodes-title" });
  const todo = h("section", { class: "card", "aria-labelledby": "todo-title" });
  const tiles = h("dl", { class: "tiles" });
  const examine = h("button", { type: "button", class: "right", on: { click: start } }, "Examine all");
  const said = h("span", { class: "soft small", role: "status" });
  const found = h("div", null);
  const rows = h("div", null);
  root.append(h("h1", { id: "title", class: "away" }, title), h("div", { class: "stack" }, tiles, todo, nodes));
  nodes.append(h("header", null, h("h2", { id: "nodes-title" }, "Nodes")), rows);
  todo.append(h("header", null, h("h2", { id: "todo-title" }, "What to do"), said, examine), found);

  async function start() {
    try {
      live.doctor = await post("doctor", {});
      live.changed("doctor");
    } catch (error) {
      show(said, /** @type {Error} */ (error).message);
    }
  }

  function update() {
    show(tiles, summary());
    show(rows, nodeTable());
    const doctor = live.doctor ?? { state: "never" };
    /** @type {HTMLButtonElement} */ (examine).disabled = doctor.state === "running";
    show(said, saidOf(live.cluster.todo, doctor));
    show(found, todoList(live.cluster.todo, doctor));
  }
  return { update };
}

/** @param {any} todo @param {any} doctor */
function saidOf(todo, doctor) {
  const rates = todo.looked_s === null ? "no rates yet" : `rates of ${span(todo.looked_s)}`;
  const skipped = doctor.skipped?.length ? ` without ${doctor.skipped.join(", ")}` : "";
  const all = doctor.state === "running" ? "examining every node and shard …"
    : todo.examined_at ? `${plural(doctor.checks ?? 0, "check")}${skipped} ${ago(live.age(todo.examined_at))}` : "all checks: not run yet";
  return `${plural(todo.checks, "check")} with each reading, ${rates}; ${all}`;
}

function summary() {
  const up = live.nodes.filter((node) => node.up);
  const down = live.nodes.filter((node) => !node.up).map((node) => node.name).join(", ");
  /** @type {Record<string, number>} */
  const states = {};
  const unread = new Set();
  (live.map?.state ?? []).forEach((at, shard) => {
    const state = live.map?.states[at ?? -1] ?? "unknown";
    states[state] = (states[state] ?? 0) + 1;
    if (state === "unknown") unread.add(live.map?.nodes[live.map.node[shard] ?? -1]);
  });
  const { active = 0, ...others } = states;
  const rest = Object.entries(others);
  const { wrong, errors } = live.toDo;
  const doubts = sum(up.map((node) => node.in_doubt));
  const { openMoves: open, knownAgo } = live;
  const years = up.map((node) => node.years_left).filter((x) => x !== null && x !== undefined);
  return [
    tile("Nodes up", [count(up.length), small(` of ${live.nodes.length}`)], down ? "bad" : "",
      down ? `${down} down` : "all answer"),
    tile("Shards active", [count(active), small(` of ${count(live.cluster.shard_count)}`)],
      rest.length ? "warn" : "", rest.map(([state, number]) => `${count(number)} ${state}${state === "unknown" ? `: ${[...unread].join(", ")} not read` : ""}`).join(", ") || "none fenced"),
    tile("IDs drawn a second", short(sum(up.map((node) => node.ticks_per_s))), "", [down && `without ${down}; `, peak()]),
    tile("To do", count(wrong), errors ? "bad" : wrong ? "warn" : "",
      errors ? plural(errors, "error") : wrong ? "no error" : "nothing is wrong"),
    tile("Moves open", count(open), "", [open ? h("a", { href: "#moves" }, "See them run") : open === null ? "not known" : "none", knownAgo && `, as of ${knownAgo}`]),
    tile("In doubt", doubts === null ? UNKNOWN : count(doubts), doubts ? "warn" : "",
      [doubts ? "shardids transactions --resolve" : doubts === null ? "not known" : "no transaction waits", down && `; not known of ${down}`]),
    tile("Layout left", years.length ? `${short(Math.min(.../** @type {number[]} */ (years)))} y` : UNKNOWN, "",
      `${live.cluster.layout.time_bits} bits of time`),
  ];
}

/** @param {(number | null | undefined)[]} values */
function sum(values) {
  const known = values.filter((x) => typeof x === "number");
  return known.length ? known.reduce((a, b) => /** @type {number} */ (a) + /** @type {number} */ (b), 0) ?? null : null;
}

function peak() {
  const lines = Object.values(live.rates?.nodes ?? {});
  const totals = (live.rates?.times ?? []).map((_, at) => sum(lines.map((line) => line[at])) ?? 0);
  return totals.length ? `most ${rate(Math.max(...totals))} in the last hour` : "no history yet";
}

/** @param {string} text */
const small = (text) => h("small", null, text);

/** @param {string} name @param {any} value @param {string} kind @param {any} note */
const tile = (name, value, kind, note) => h("div", { class: `tile ${kind}` },
  h("dt", null, name), h("dd", null, value, h("span", { class: "note" }, note)));

function nodeTable() {
  if (!live.nodes.length) {
    return h("div", { class: "empty" }, h("p", null, "The catalog knows no node yet. Make the first:"),
      command("shardids node add NAME --url postgresql://…"));
  }
  return table("Nodes", COLUMNS, live.nodes.map(nodeRow), "cards");
}

/** @param {import("./live.js").ClusterNode} node */
const why = (node) => node.error ? h("div", { class: "small bad-text why" }, node.error) : null;

/** @param {import("./live.js").ClusterNode} node @param {number} at */
function nodeRow(node, at) {
  const states = Object.entries(node.shards ?? {}).filter(([state]) => state !== "active");
  const used = node.connections !== null && node.max_connections ? node.connections / node.max_connections : null;
  const level = used === null ? "" : used > 0.9 ? "bad" : used > 0.75 ? "warn" : "";
  const meter = used === null ? null : h("span", { class: `meter ${level}`, "aria-hidden": "true" },
    h("i", { style: { width: `${Math.min(100, used * 100).toFixed(0)}%` } }));
  return cells(COLUMNS, [
    [h("i", { class: "swatch", style: { background: `var(--node-${at % 8})` } }), h("span", { class: "name", title: node.name }, node.name),
      h("span", { class: "host" }, ` ${node.host ?? ""}`, node.region ? `, region ${node.region}` : "")],
    node.up ? [h("span", { class: "chip good" }, "up"), " ", node.standby ? h("span", { class: "chip warn" }, "standby") : null,
      node.error ? [" ", h("span", { class: "chip warn" }, "not all read"), h("span", { class: "small soft" }, ` shards read ${ago(live.age(node.read_at))}`)] : null, why(node)]
      : [h("span", { class: "chip bad" }, "down"), h("span", { class: "small soft" }, ` answered ${ago(live.age(node.answered_at))}`),
        why(node)],
    [count(node.placed), states.map(([state, number]) => [" ", state === "moved"
      ? h("span", { class: "chip", title: "Left by moves, until they are purged" }, plural(number, "old copy", "old copies"))
      : h("span", { class: "chip warn" }, `${count(number)} ${state}`)]),
    node.outside_region ? [" ", h("span", { class: "chip warn", title: "Shards of other regions" }, `${count(node.outside_region)} outside their region`)] : null],
    node.up ? short(node.ticks_per_s) : UNKNOWN,
    node.up ? span(node.lead_s) : UNKNOWN,
    node.up ? span(node.clock_skew_s) : UNKNOWN,
    node.up && node.connections !== null ? [`${count(node.connections)} / ${count(node.max_connections)}`, meter] : UNKNOWN,
    node.up ? bytes(node.replication_lag_bytes) : UNKNOWN,
    node.up ? count(node.in_doubt) : UNKNOWN,
    node.years_left === null || node.years_left === undefined ? UNKNOWN : `${short(node.years_left)} y`,
  ], { class: node.up ? null : "stale", "data-node": node.name });
}

/** @param {any} todo @param {any} doctor */
function todoList(todo, doctor) {
  const failed = doctor.state === "failed" ? h("p", { class: "notice bad" }, doctor.error ?? "the examination failed") : null;
  if (!todo.entries.length) {
    return [failed, h("p", { class: "empty" }, h("b", null, "Nothing is wrong. "), "Every reading is judged by the quick checks and, after ten minutes, its rates;",
      " ", h("i", null, "Examine all"), " also looks at generators, tables, rights and leftovers. It changes nothing.")];
  }
  return [failed, h("ol", { class: "findings" }, todo.entries.map(entry)),
    todo.more ? h("p", { class: "empty" }, `And ${count(todo.more)} more: shardids doctor lists all.`) : null];
}

/** @param {any} one */
function entry(one) {
  const steps = one.do.some((/** @type {any} */ command) => command.step);
  const commands = one.do.map((/** @type {any} */ each) => steps
    ? h("li", null, each.step, ":", command(each.text, each.place)) : command(each.text, each.place));
  return h("li", { class: one.severity },
    h("p", { class: "what" }, h("span", { class: `chip ${KIND[one.severity] ?? ""}` }, one.severity),
      h("b", null, one.source === "rates" ? [oddityPlace(one), ": "] : null, one.says), h("code", { class: "soft" }, one.check)),
    one.where ? h("p", { class: "soft small" }, one.where) : null,
    one.start ? h("p", { class: "soft small" }, `From ${clock(one.start)}${one.end === null ? "" : ` to ${clock(one.end)}`}`) : null,
    one.to_do ? h("p", null, one.to_do) : null,
    steps ? h("ol", { class: "steps" }, commands) : commands);
}

/** @param {any} one */
function oddityPlace(one) {
  const [shard] = one.shards;
  if (shard === undefined) return one.check === "layout" ? "The layout" : "All shards together";
  const link = h("a", { href: `#map/${shard}` }, `Shard ${shard}`);
  const [node] = one.nodes;
  if (one.of_shards === null) return [link, node === undefined ? null : ` on ${node}`];
  return [`${plural(one.of_shards, "shard")} of ${node}, most of all `, link];
}
