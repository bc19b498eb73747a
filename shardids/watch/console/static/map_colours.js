// What the map can be coloured by: for each shard a group, for each group a colour and words.

import { bytes, lead, rate, span } from "./format.js";
import { live } from "./live.js";

/**
 * @typedef {{key: string, words: string, colour: string, count: number, mark?: boolean}} Group
 * @typedef {{groups: Group[], of: Int16Array}} Colouring `of` has the index of each shard's group
 */

const UNKNOWN = { key: "unknown", words: "not known", colour: "--unknown" };
const STATES = /** @type {Record<string, [string, boolean]>} */ ({
  active: ["--state-active", false], creating: ["--state-busy", false], arriving: ["--state-busy", false],
  copy: ["--state-busy", true], moved: ["--state-busy", true], fenced: ["--state-fenced", true],
  lost: ["--state-bad", true], missing: ["--state-bad", true], broken: ["--state-bad", true],
  unreadable: ["--state-bad", true], none: ["--ramp-0", false], unknown: ["--unknown", false],
});

/** What is shown by each choice: a name for the button, and the colouring. */
export const CHOICES = {
  node: { name: "Node", colouring: () => named("node", "nodes", (_, at) => `--node-${at % 8}`, (at) => at >= 8) },
  state: { name: "State", colouring: () => named("state", "states", (state) => STATES[state]?.[0] ?? "--unknown", (_, state) => STATES[state]?.[1] ?? false) },
  rate: { name: "Rate", colouring: () => scaled("ticks_per_s", rate, "idle") },
  lead: { name: "Lead", colouring: () => scaled("lead_s", span, "not ahead of its clock") },
  size: { name: "Size", colouring: () => scaled("size_bytes", bytes, "empty") },
  lag: { name: "Move lag", colouring: () => scaled("lag_bytes", bytes, "no lag") },
  revision: { name: "Revision", colouring: () => named("revision", "revisions", (_, at) => `--node-${at % 8}`, (at) => at >= 8) },
};

/** Returns the figures that a colouring depends on, to tell whether it has any. @param {string} choice */
export function isKnown(choice) {
  const map = /** @type {any} */ (live.map);
  const column = { node: "node", state: "state", rate: "ticks_per_s", lead: "lead_s", size: "size_bytes", lag: "lag_bytes", revision: "revision" }[choice];
  return Boolean(column && map?.[column]?.some((/** @type {any} */ x) => x !== null));
}

/** Groups by name: of nodes, states, revisions. @param {string} column @param {string} names
 *  @param {(name: string, at: number) => string} colour @param {(at: number, name: string) => boolean} mark @returns {Colouring} */
function named(column, names, colour, mark) {
  const map = /** @type {any} */ (live.map);
  const values = map?.[column] ?? [];
  const groups = (map?.[names] ?? []).map((/** @type {string} */ name, /** @type {number} */ at) =>
    ({ key: name, words: name, colour: colour(name, at), count: 0, mark: mark(at, name) }));
  return counted([...groups, { ...UNKNOWN, words: column === "node" ? "on no node" : UNKNOWN.words, count: 0 }], values.length || shards(),
    (shard) => values[shard] ?? groups.length);
}

/** Groups by size, in steps of 1, 3, 10 …, at most six. @param {string} column
 *  @param {(value: number) => string} words @param {string} none @returns {Colouring} */
function scaled(column, words, none) {
  const values = /** @type {any} */ (live.map)?.[column] ?? [];
  const some = values.filter((/** @type {number | null} */ x) => x !== null && x > 0);
  const low = some.reduce((/** @type {number} */ a, /** @type {number} */ b) => Math.min(a, b), Infinity);
  const high = some.reduce((/** @type {number} */ a, /** @type {number} */ b) => Math.max(a, b), 0);
  const bounds = steps(low, high);
  const groups = bounds.map((from, at) => ({
    key: `step ${at}`, count: 0,
    words: at + 1 < bounds.length ? `${words(from)} – ${words(bounds[at + 1])}` : `${words(from)} and more`,
    colour: `--ramp-${6 - (bounds.length - 1 - at)}`,
  }));
  const all = [{ key: "none", words: none, colour: "--ramp-0", count: 0 }, ...groups, { ...UNKNOWN, count: 0 }];
  return counted(all, values.length || shards(), (shard) => {
    const value = values[shard];
    if (value === null || value === undefined) return all.length - 1;
    if (value <= 0) return 0;
    let at = bounds.length - 1;
    while (at > 0 && value < bounds[at]) at -= 1;
    return at + 1;
  });
}

/** Bounds of at most six steps that hold all from `low` to `high`. @param {number} low @param {number} high */
function steps(low, high) {
  if (!high) return [];
  for (const power of [1, 2, 4, 6]) { // of half a decade each: 1, 3, 10, 30 …
    const first = Math.floor(Math.log10(low) * 2 / power) * power;
    const last = Math.floor(Math.log10(high) * 2 / power) * power;
    if ((last - first) / power < 6) {
      return Array.from({ length: (last - first) / power + 1 }, (_, at) => bound(first + at * power));
    }
  }
  const last = Math.floor(Math.log10(high));
  return Array.from({ length: 6 }, (_, at) => 10 ** (last - 5 + at));
}

/** @param {number} halves */
const bound = (halves) => halves % 2 === 0 ? 10 ** (halves / 2) : 3 * 10 ** ((halves - 1) / 2);

/** Counts the shards of each group; those of a node that is down are of one more, in red, whatever is shown.
 *  @param {Group[]} groups @param {number} size @param {(shard: number) => number} group @returns {Colouring} */
function counted(groups, size, group) {
  const of = new Int16Array(size);
  const down = downNodes();
  const all = [...groups, ...[...down.values()].map((name) => ({
    key: `down ${name}`, words: `${name} is down`, colour: "--state-bad", count: 0, mark: true,
  }))];
  const places = new Map([...down.keys()].map((node, at) => [node, groups.length + at]));
  const nodes = /** @type {any} */ (live.map)?.node ?? [];
  for (let shard = 0; shard < size; shard += 1) {
    of[shard] = places.get(nodes[shard]) ?? group(shard);
    all[of[shard]].count += 1;
  }
  return { groups: all, of };
}

/** The nodes that do not answer, by their place in the map. @returns {Map<number, string>} */
function downNodes() {
  const names = /** @type {any} */ (live.map)?.nodes ?? [];
  return new Map(live.nodes.filter((node) => !node.up).map((node) => [names.indexOf(node.name), node.name]));
}

const shards = () => live.cluster?.shard_count ?? 0;

/** What the map knows of a shard, as words. @param {number} shard @param {number | null} size newer than the map's
 *  @returns {[string, string][]} */
export function facts(shard, size = null) {
  const map = /** @type {any} */ (live.map);
  const at = (/** @type {string} */ column) => map?.[column]?.[shard] ?? null;
  const nameOf = (/** @type {string} */ names, /** @type {string} */ column) => at(column) === null ? null : map[names]?.[at(column)];
  /** @type {[string, string | null | undefined][]} */
  const known = [
    ["Node", nameOf("nodes", "node") ?? "none"],
    ["State", nameOf("states", "state")],
    ["Region", nameOf("regions", "region")],
    ["IDs drawn", at("ticks_per_s") === null ? null : rate(at("ticks_per_s"))],
    ["Lead", at("lead_s") === null ? null : lead(at("lead_s"))],
    ["Size", (size ?? at("size_bytes")) === null ? null : bytes(size ?? at("size_bytes"))],
    ["Move lag", at("lag_bytes") ? bytes(at("lag_bytes")) : null],
    ["Revision", nameOf("revisions", "revision")],
  ];
  return /** @type {[string, string][]} */ (known.filter(([, words]) => words !== null && words !== undefined));
}
