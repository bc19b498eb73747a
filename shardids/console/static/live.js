// What is known of the cluster now: read once, then kept up to date by the server's events.

import { get } from "./api.js";

/**
 * @typedef {{name: string, up: boolean, error: string | null, host: string, shards: Record<string, number>,
 *   ticks_per_s: number | null, lead_s: number | null, clock_skew_s: number | null, connections: number | null,
 *   max_connections: number | null, years_left: number | null, replication_lag_bytes: number | null,
 *   in_doubt: number | null, standby: boolean, read_at: number | null}} ClusterNode
 * @typedef {{first: number, nodes: string[], states: string[], revisions: string[], node: (number | null)[],
 *   state: (number | null)[], ticks_per_s: (number | null)[], lead_s: (number | null)[], size_bytes: (number | null)[],
 *   lag_bytes: (number | null)[], revision: (number | null)[], region: (number | null)[], sizes_at: number | null}} ShardMap
 * @typedef {{times: number[], nodes: Record<string, (number | null)[]>, shards: Record<string, (number | null)[]>}} Rates
 */

const POINTS = 720;

class Live extends EventTarget {
  /** @type {any} */ cluster = null;
  /** @type {ClusterNode[]} */ nodes = [];
  /** @type {ShardMap | null} */ map = null;
  /** @type {Rates | null} */ rates = null;
  /** @type {any[]} */ moves = [];
  /** @type {string[]} */ steps = [];
  /** @type {any} */ job = null;
  /** @type {any} */ doctor = null;
  /** @type {"connecting" | "open" | "lost"} */ connection = "connecting";
  /** @type {string} */ problem = "";
  #server = 0;
  #arrived = 0;

  /** The server's clock now, in seconds since 1970; the browser's own may differ from it. */
  now() {
    return this.#server ? this.#server + (performance.now() - this.#arrived) / 1000 : Date.now() / 1000;
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

  /** @param {any} answer */
  #heard(answer) {
    if (typeof answer.now !== "number") return;
    this.#server = answer.now;
    this.#arrived = performance.now();
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
    this.#heard(cluster);
    this.cluster = cluster;
    const part = (/** @type {string} */ path, /** @type {(answer: any) => void} */ take) => get(path).then(take, () => {});
    // What cannot be read now stays as it was: a part that fails is no reason to show nothing.
    await Promise.all([
      part("nodes", (nodes) => { this.nodes = nodes; }),
      part("map", (map) => { this.map = map; }),
      part("rates", (rates) => { this.rates = rates; }),
      part("moves", (moves) => this.#took(moves)),
      part("doctor", (doctor) => { this.doctor = doctor; }),
    ]);
    this.changed("all");
  }

  async reloadMap(path = "map") {
    this.map = await get(path);
    this.changed("map");
  }

  async reloadMoves() {
    this.#took(await get("moves"));
    this.changed("moves");
  }

  /** @param {any} moves */
  #took(moves) {
    this.moves = moves.moves ?? moves;
    this.steps = moves.steps ?? this.steps;
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
    source.addEventListener("tick", (event) => this.#tick(JSON.parse(/** @type {MessageEvent} */ (event).data)));
  }

  /** @param {any} tick */
  #tick(tick) {
    this.#heard(tick);
    const running = this.job?.state;
    if (tick.read_at) this.cluster.read_at = tick.read_at;
    if (tick.catalog) Object.assign(this.cluster.catalog, tick.catalog);
    if (tick.nodes) this.nodes = tick.nodes;
    if (tick.rates) this.#append(tick.rates);
    if (tick.map?.refetch) this.reloadMap().catch(() => {});
    else if (tick.map && this.map) Object.assign(this.map, tick.map);
    if (tick.doctor) this.doctor = tick.doctor;
    if (tick.job !== undefined) this.job = tick.job;
    const over = tick.moves ? this.#merge(tick.moves) : false;
    this.changed("tick");
    if (over || (running === "running" && this.job?.state !== "running")) {
      this.reloadMoves().catch(() => {});
      this.reloadMap().catch(() => {});
    }
  }

  /** Takes the moves that are open. Returns whether one that was is not any more. @param {any[]} open */
  #merge(open) {
    const now = new Set(open.map((move) => move.id));
    const known = new Map(this.moves.map((move) => [move.id, move]));
    const over = this.moves.some((move) => !move.done && !now.has(move.id));
    for (const move of open) known.set(move.id, { ...known.get(move.id), ...move });
    this.moves = [...known.values()];
    return over;
  }

  /** @param {{time: number, nodes: Record<string, number | null>, shards: Record<string, number | null>}} point */
  #append(point) {
    const rates = this.rates;
    if (!rates || point.time <= (rates.times.at(-1) ?? 0)) return;
    const before = rates.times.length;
    rates.times.push(point.time);
    for (const kind of /** @type {("nodes" | "shards")[]} */ (["nodes", "shards"])) {
      for (const name of new Set([...Object.keys(rates[kind]), ...Object.keys(point[kind] ?? {})])) {
        (rates[kind][name] ??= Array(before).fill(null)).push(point[kind]?.[name] ?? null);
      }
    }
    const over = rates.times.length - POINTS;
    if (over <= 0) return;
    for (const line of [rates.times, ...Object.values(rates.nodes), ...Object.values(rates.shards)]) line.splice(0, over);
    for (const [shard, line] of Object.entries(rates.shards)) if (line.every((x) => x === null)) delete rates.shards[shard];
  }
}

export const live = new Live();
