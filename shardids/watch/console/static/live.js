// What is known of the cluster now: read once, then kept up to date by the server's events.

import { get, post } from "./api.js";
import { ago } from "./format.js";

/**
 * @typedef {{name: string, up: boolean, error: string | null, host: string, shards: Record<string, number>, placed: number,
 *   ticks_per_s: number | null, lead_s: number | null, clock_skew_s: number | null, connections: number | null,
 *   max_connections: number | null, years_left: number | null, replication_lag_bytes: number | null,
 *   in_doubt: number | null, standby: boolean, region: string | null, outside_region: number, answered_at: number | null, read_at: number | null}} ClusterNode
 * @typedef {{first: number, nodes: string[], states: string[], revisions: string[], node: (number | null)[],
 *   state: (number | null)[], ticks_per_s: (number | null)[], lead_s: (number | null)[], size_bytes: (number | null)[],
 *   lag_bytes: (number | null)[], revision: (number | null)[], regions: string[], region: (number | null)[], sizes_at: number | null,
 *   sizes_tried_at: number | null, sizes_errors: string[]}} ShardMap
 * @typedef {{times: number[], nodes: Record<string, (number | null)[]>, shards: Record<string, (number | null)[]>, note?: string,
 *   source?: string}} Rates
 */

/** The server's clock, and when it showed that: the browser's own may be wrong, and so may a proxy's, which writes `Date`. */
const clock = { s: Date.now() / 1000, heard: performance.now() };
/** From so many seconds on, the server's clock was set, or the browser slept. */
const CLOCK_STEP_S = 5;

class Live extends EventTarget {
  /** @type {any} */ cluster = null;
  /** @type {ClusterNode[]} */ nodes = [];
  /** @type {ShardMap | null} */ map = null;
  /** @type {Rates | null} */ rates = null;
  /** Null until they were read. @type {any[] | null} */ moves = null;
  /** @type {any} */ job = null;
  /** @type {any} */ doctor = null;
  /** @type {"connecting" | "open" | "lost"} */ connection = "connecting";
  /** @type {string} */ problem = "";

  /** The server's clock now, in seconds since 1970; the browser's own may differ from it. */
  now() {
    return clock.s + (performance.now() - clock.heard) / 1000;
  }

  /** The nodes' clocks now, which IDs tell: the server's own may be off. */
  nowOfIds() {
    return this.now() + (this.cluster?.clock_offset_s ?? 0);
  }

  /** How old a reading is, in seconds. @param {number | null | undefined} at */
  age(at) {
    return at === null || at === undefined ? null : Math.max(0, this.now() - at);
  }

  /** The age of what the page shows, and whether that is more than some missed readings. */
  staleness() {
    const age = this.age(this.cluster?.read_at);
    return { age, stale: age !== null && age > 3 * (this.cluster?.interval_s ?? 5) + 2 };
  }

  /** Whether the catalog ever answered: until then not even the layout is known. */
  get known() {
    return Boolean(this.cluster?.layout);
  }

  /** How much there is to do: what is wrong, and how much of that is an error. */
  get toDo() {
    const wrong = (this.cluster?.todo.entries ?? []).filter((/** @type {any} */ one) => one.severity !== "info");
    return { wrong: wrong.length, errors: wrong.filter((/** @type {any} */ one) => one.severity === "error").length };
  }

  /** How many moves are not over, as far as is known. @returns {number | null} */
  get openMoves() {
    return this.moves ? this.moves.filter((move) => !move.done).length : this.cluster?.moves_open ?? null;
  }

  /** How long ago placement and moves were known, in words; nothing while the catalog answers. */
  get knownAgo() {
    const { up, answered_at: at } = this.cluster.catalog;
    return up ? "" : ago(this.age(at));
  }

  /** @param {string} what */
  changed(what) {
    this.dispatchEvent(new CustomEvent("change", { detail: what }));
  }

  async start() {
    try {
      await this.reload();
      this.#listen();
    } catch (error) {
      this.connection = "lost";
      this.problem = /** @type {Error} */ (error).message;
      this.changed("connection");
      setTimeout(() => this.start(), 3000);
    }
  }

  /** Reads everything again; also after the connection was lost, as events were missed. */
  async reload() {
    const cluster = await get("cluster");
    this.cluster = cluster;
    Object.assign(clock, { s: cluster.now, heard: performance.now() });
    const part = (/** @type {string} */ path, /** @type {(answer: any) => void} */ take) => get(path).then(take, () => {});
    // What cannot be read now stays as it was: a part that fails is no reason to show nothing.
    await Promise.all([
      part("nodes", (nodes) => { this.nodes = nodes; }),
      part("map", (map) => { this.map = map; }),
      part("rates", (rates) => { this.rates = rates; }),
      part("moves", (moves) => { this.moves = moves; }),
      part("job", (job) => { this.job = job; }),
      part("doctor", (doctor) => { this.doctor = doctor; }),
    ]);
    this.changed("all");
  }

  async reloadMap() {
    this.map = await get("map");
    this.changed("map");
  }

  /** Lets sizes and revisions be read again; a tick tells when they are there. */
  async reloadSizes() {
    this.map = await post("map", {});
    this.changed("map");
  }

  async reloadRates() {
    this.rates = await get("rates");
    this.changed("rates");
  }

  async reloadMoves() {
    this.moves = await get("moves");
    this.changed("moves");
  }

  async reloadDoctor() {
    this.doctor = await get("doctor");
    this.changed("doctor");
  }

  #listen() {
    const source = new EventSource(new URL("api/events", document.baseURI));
    source.addEventListener("open", () => {
      const back = this.connection === "lost";
      this.connection = "open";
      this.changed("connection");
      if (back) this.reload().catch(() => {});
    });
    source.addEventListener("error", () => {
      this.connection = "lost";
      this.problem = "the console's server does not answer";
      this.changed("connection");
      if (source.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
      setTimeout(() => this.start(), 3000);
    });
    const on = (/** @type {string} */ name, /** @type {(data: any) => void} */ then) =>
      source.addEventListener(name, (event) => then(JSON.parse(/** @type {MessageEvent} */ (event).data)));
    on("tick", (tick) => this.#tick(tick));
    on("job", (job) => this.#work(job));
  }

  /** @param {any} tick */
  #tick(tick) {
    const wasKnown = this.known || !tick.catalog.up;
    const placed = this.cluster.placement_version;
    for (const key of ["read_at", "catalog", "placement_version", "moves_open", "todo", "clock_offset_s"]) this.cluster[key] = tick[key] ?? this.cluster[key];
    this.nodes = tick.nodes;
    const gap = tick.rates.time - (this.rates?.times.at(-1) ?? tick.rates.time);
    // What a page did not hear the console may know; Prometheus has its own times.
    const missed = this.rates?.source === "memory" && gap > 3 * this.cluster.interval_s + 5;
    const isSet = Math.abs(tick.now - this.now()) > CLOCK_STEP_S;
    if (this.map) Object.assign(this.map, tick.map);
    this.#append(tick.rates, tick.map.ticks_per_s);
    const unknown = this.rates && tick.rates.first.some((/** @type {number} */ shard) => !(shard in (this.rates?.shards ?? {})));
    const over = tick.moves ? this.#merge(tick.moves) : false;
    if (tick.job) this.#work(tick.job);
    this.changed("tick");
    const ignore = () => {}; // the next tick asks again
    if (!wasKnown || missed || isSet || placed !== tick.placement_version) this.reload().catch(ignore);
    else if (unknown) this.reloadRates().catch(ignore);
    else if (over) {
      this.reloadMoves().catch(ignore);
      this.reloadMap().catch(ignore);
    } else if (tick.sizes_tried_at !== this.map?.sizes_tried_at) this.reloadMap().catch(ignore);
    if (tick.doctor !== this.doctor?.state) this.reloadDoctor().catch(ignore);
  }

  /** Takes what the console's own work has come to. @param {any} job */
  #work(job) {
    const ended = this.job?.state === "running" && job.state !== "running";
    this.job = job;
    this.changed("job");
    if (!ended) return;
    this.reloadMoves().catch(() => {});
    this.reloadMap().catch(() => {});
  }

  /** Takes the moves that are open. Returns whether one that was is not any more. @param {any[]} open */
  #merge(open) {
    const now = new Set(open.map((move) => move.id));
    const before = this.moves;
    if (!before) return true; // those that are over are to be read, too
    const known = new Map(before.map((move) => [move.id, move]));
    const over = before.some((move) => !move.done && !now.has(move.id));
    for (const move of open) known.set(move.id, { ...known.get(move.id), ...move });
    this.moves = [...known.values()];
    return over;
  }

  /** Adds a reading to all series; a gap is a time at which nothing was read.
   *  @param {{time: number, nodes: Record<string, number | null>}} point @param {(number | null)[]} ofShards */
  #append(point, ofShards) {
    const rates = this.rates;
    if (!rates || point.time <= (rates.times.at(-1) ?? 0)) return;
    const before = rates.times.length;
    rates.times.push(point.time);
    for (const name of new Set([...Object.keys(rates.nodes), ...Object.keys(point.nodes)])) {
      (rates.nodes[name] ??= Array(before).fill(null)).push(point.nodes[name] ?? null);
    }
    for (const [shard, line] of Object.entries(rates.shards)) line.push(ofShards[Number(shard)] ?? null);
    const over = rates.times.findIndex((time) => time >= point.time - this.cluster.history_s);
    if (over <= 0) return;
    for (const line of [rates.times, ...Object.values(rates.nodes), ...Object.values(rates.shards)]) line.splice(0, over);
    for (const [shard, line] of Object.entries(rates.shards)) if (line.every((x) => x === null)) delete rates.shards[shard];
  }
}

export const live = new Live();
