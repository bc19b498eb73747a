// Health: what is up, how the nodes are, what is unusual in the rates, and what shardids doctor found, with what to do.

import { post } from "./api.js";
import { cells, command, h, show, table } from "./dom.js";
import { ago, bytes, clock, count, plural, rate, short, span, UNKNOWN } from "./format.js";
import { live } from "./live.js";

export const title = "Health";
const RANK = /** @type {Record<string, number>} */ ({ error: 0, warning: 1, info: 2 });
const KIND = /** @type {Record<string, string>} */ ({ error: "bad", warning: "warn", info: "own" });
const COLUMNS = [
  { title: "Node" }, { title: "State", class: "words" },
  { title: "Shards", class: "number" },
  { title: "Ticks/s", class: "number", hint: "An ID takes one tick, or two if its shard had been idle; blocks are not counted" },
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
  const findings = h("section", { class: "card", "aria-labelledby": "findings-title" });
  const unusual = h("section", { class: "card", "aria-labelledby": "unusual-title" });
  const looked = h("span", { class: "soft small" });
  const odd = h("div", null);
  const tiles = h("dl", { class: "tiles" });
  const examine = h("button", { type: "button", class: "right", on: { click: start } }, "Examine now");
  const said = h("span", { class: "soft small", role: "status" });
  const found = h("div", null);
  const rows = h("div", null);
  root.append(h("h1", { id: "title", class: "away" }, title), h("div", { class: "stack" }, tiles, nodes, unusual, findings));
  nodes.append(h("header", null, h("h2", { id: "nodes-title" }, "Nodes")), rows);
  unusual.append(h("header", null, h("h2", { id: "unusual-title" }, "Unusual rates"), looked), odd);
  findings.append(h("header", null, h("h2", { id: "findings-title" }, "Findings of doctor"), said, examine), found);

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
    const { looked_s, found: oddities } = live.cluster.unusual;
    show(looked, looked_s === null ? "" : `in ${span(looked_s)}`);
    show(odd, oddityList(looked_s, oddities));
    const doctor = live.doctor ?? { state: "never", findings: [] };
    /** @type {HTMLButtonElement} */ (examine).disabled = doctor.state === "running";
    show(said, saidOf(doctor));
    show(found, findingList(doctor));
  }
  return { update };
}

/** @param {any} doctor */
function saidOf(doctor) {
  if (doctor.state === "running") return "examining every node and shard …";
  if (!doctor.read_at) return "";
  const skipped = doctor.skipped?.length ? ` without ${doctor.skipped.join(", ")}` : "";
  const checks = doctor.checks ? `${plural(doctor.checks, "check")}${skipped}, ` : "";
  return `${checks}examined ${ago(live.age(doctor.read_at))}`;
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
  const wrong = (live.doctor?.findings ?? []).filter((/** @type {any} */ f) => f.severity !== "info");
  const errors = wrong.filter((/** @type {any} */ f) => f.severity === "error").length;
  const doubts = sum(up.map((node) => node.in_doubt));
  const { openMoves: open, knownAgo } = live;
  const years = up.map((node) => node.years_left).filter((x) => x !== null && x !== undefined);
  return [
    tile("Nodes up", [count(up.length), small(` of ${live.nodes.length}`)], down ? "bad" : "",
      down ? `${down} down` : "all answer"),
    tile("Shards active", [count(active), small(` of ${count(live.cluster.shard_count)}`)],
      rest.length ? "warn" : "", rest.map(([state, number]) => `${count(number)} ${state}${state === "unknown" ? `: ${[...unread].join(", ")} not read` : ""}`).join(", ") || "none fenced"),
    tile("Ticks a second", short(sum(up.map((node) => node.ticks_per_s))), "", [down && `without ${down}; `, peak()]),
    tile("Findings", live.doctor?.read_at ? count(wrong.length) : UNKNOWN, errors ? "bad" : wrong.length ? "warn" : "",
      !live.doctor?.read_at ? "not examined yet" : errors ? plural(errors, "error") : wrong.length ? "no error" : "nothing is wrong"),
    tile("Moves open", count(open), "", [open ? h("a", { href: "#moves" }, "See them run") : open === null ? "not known" : "none", knownAgo && `, as of ${knownAgo}`]),
    tile("In doubt", doubts === null ? UNKNOWN : count(doubts), doubts ? "warn" : "",
      [doubts ? "shardids transaction resolve" : doubts === null ? "not known" : "no transaction waits", down && `; not known of ${down}`]),
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

/** @param {number | null} looked @param {any[]} found */
function oddityList(looked, found) {
  if (looked === null) return h("p", { class: "empty" }, "Told once the rates of ten whole minutes are known, or of ten longer spans in a large cluster.");
  if (!found.length) return h("p", { class: "empty" }, h("b", null, "Nothing is unusual. "), "No shard is hot, silent, or in a burst, and none is far from the others' time.");
  return h("ol", { class: "findings" }, found.map((one) => h("li", { class: "warning" },
    h("p", { class: "what" }, h("span", { class: "chip warn" }, one.kind), h("b", null, oddityPlace(one)), one.says),
    one.start === null ? null : h("p", { class: "soft small" }, `From ${clock(one.start)}${one.end === null ? "" : ` to ${clock(one.end)}`}`),
    one.to_do ? h("p", null, one.to_do) : null)));
}

/** @param {any} one */
function oddityPlace(one) {
  if (one.shard === null) return one.kind === "layout" ? "The layout" : "All shards together";
  const link = h("a", { href: `#map/${one.shard}` }, `Shard ${one.shard}`);
  if (one.shards === null) return [link, one.node === null ? null : ` on ${one.node}`];
  return [`${plural(one.shards, "shard")} of ${one.node}, most of all `, link];
}

/** @param {any} doctor */
function findingList(doctor) {
  if (doctor.state === "failed") return h("p", { class: "notice bad" }, doctor.error ?? "the examination failed");
  const findings = [...(doctor.findings ?? [])].sort((a, b) => RANK[a.severity] - RANK[b.severity]);
  if (!doctor.read_at) {
    return h("p", { class: "empty" }, doctor.state === "running" ? "The first examination is running."
      : "Not examined yet. An examination reads every node and shard, changes nothing, and takes some seconds.");
  }
  if (!findings.length) return h("p", { class: "empty" }, h("b", null, "Nothing is wrong. "), "Nodes, shards, generators, tables and leftovers are as the catalog says.");
  return h("ol", { class: "findings" }, findings.map((finding) => h("li", { class: finding.severity },
    h("p", { class: "what" }, h("span", { class: `chip ${KIND[finding.severity] ?? ""}` }, finding.severity),
      h("b", null, finding.says), h("code", { class: "soft" }, finding.check)),
    finding.where ? h("p", { class: "soft small" }, finding.where) : null,
    finding.to_do ? h("p", null, finding.to_do) : null,
    (finding.do ?? []).map((/** @type {any} */ one) => typeof one === "string" ? command(one) : command(one.text, one.place)))));
}

