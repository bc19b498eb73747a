// Rates: IDs drawn per second of every node, and of the shards that draw most, over the last hour.

import { lines } from "./chart.js";
import { cells, h, show, table } from "./dom.js";
import { plural, rate, short, span, UNKNOWN } from "./format.js";
import { live } from "./live.js";

export const title = "Rates";
const SPANS = [{ name: "5 min", seconds: 300 }, { name: "15 min", seconds: 900 }, { name: "1 h", seconds: 3600 }];
const DASHES = [undefined, [6, 3], [2, 3]];
const COLUMNS = ["Line", "Now", "Mean", "Most", "Share"].map((name, at) => ({ title: name, class: at ? "number" : "" }));

/** @param {HTMLElement} root */
export function mount(root) {
  let seconds = 3600;
  const buttons = h("div", { class: "choice right", role: "group", "aria-label": "How much of the past" },
    SPANS.map((one) => h("button", { type: "button", "data-seconds": one.seconds, on: { click: () => choose(one.seconds) } }, one.name)));
  const said = h("span", { class: "soft small" });
  const nodes = part("nodes", "Nodes");
  const shards = part("shards", "Shards that draw most");
  const empty = h("p", { class: "empty", hidden: true });
  const foot = h("p", { class: "soft small" }, "Counted are IDs that are drawn one by one: the first one after a pause counts twice, and blocks are not counted.");
  root.append(h("div", { class: "head" }, h("h1", { id: "title" }, "IDs drawn per second"), said, buttons),
    h("div", { class: "stack" }, empty, nodes.card, shards.card), foot);

  /** @param {number} wanted */
  function choose(wanted) {
    seconds = wanted;
    update();
  }

  function update() {
    for (const button of buttons.children) {
      button.setAttribute("aria-pressed", String(Number(/** @type {HTMLElement} */ (button).dataset.seconds) === seconds));
    }
    const rates = live.rates ?? { times: [], nodes: {}, shards: {}, note: "" };
    const from = rates.times.findIndex((time) => time >= live.now() - seconds);
    const times = from < 0 ? [] : rates.times.slice(from);
    empty.hidden = times.length > 1;
    nodes.card.hidden = shards.card.hidden = times.length < 2;
    show(empty, h("b", null, "No history yet. "), `The console reads rates every ${span(live.cluster.interval_s)} and keeps an hour of them`,
      " while it runs; with ", h("code", null, "--prometheus URL"), " the hour before comes from Prometheus.");
    show(said, rates.note ? h("span", { class: "warn-text" }, `${rates.note}; these are the console's own readings`) : times.length > 1 ? `${plural(times.length, "reading")}, one in ${span(live.cluster.interval_s)}` : "");
    if (times.length < 2) return;
    const names = live.nodes.map((node) => node.name);
    const listed = [...new Set([...names, ...Object.keys(rates.nodes)])].filter((name) => rates.nodes[name]);
    nodes.show(times, listed.map((name) => ({
      name, href: null, colour: `--node-${Math.max(0, names.indexOf(name)) % 8}`,
      values: rates.nodes[name].slice(from),
      down: live.nodes.some((node) => node.name === name && !node.up),
    })));
    const means = new Map(Object.entries(rates.shards).map(([shard, line]) => [shard, mean(line.slice(from)) ?? -1]));
    const of = (/** @type {string} */ shard) => means.get(shard) ?? -1;
    const top = [...means.keys()].sort((a, b) => of(b) - of(a) || Number(a) - Number(b)).slice(0, 10);
    shards.show(times, top.map((shard, at) => ({
      name: `Shard ${shard}`, href: `#map/${shard}`, colour: `--node-${at % 8}`, dash: DASHES[Math.floor(at / 8) % 3],
      values: rates.shards[shard].slice(from), down: false,
    })));
  }
  return { update, end: () => { nodes.chart.end(); shards.chart.end(); } };
}

/** The mean of the readings that there are. @param {(number | null)[]} values */
function mean(values) {
  const known = /** @type {number[]} */ (values.filter((x) => x !== null));
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}

/** @param {string} id @param {string} heading */
function part(id, heading) {
  const place = h("div", { class: "chart", role: "img", "aria-label": `${heading}: IDs drawn per second over time; the table below has the figures` });
  const rows = h("div", null);
  const card = h("section", { class: "card", "aria-labelledby": id },
    h("header", null, h("h2", { id }, heading)), h("div", { class: "side" }, place, rows));
  const chart = lines(place, { height: 270, legend: false });
  return {
    card, chart,
    /** @param {number[]} times @param {{name: string, href: string | null, colour: string, dash?: number[], values: (number | null)[], down: boolean}[]} series */
    show(times, series) {
      chart.draw(times, series);
      const all = live.nodes.reduce((total, node) => total + (node.ticks_per_s ?? 0), 0);
      show(rows, table(`${heading}: figures`, COLUMNS, series.map((one) => row(one, all))));
    },
  };
}

/** @param {{name: string, href: string | null, colour: string, values: (number | null)[], down: boolean}} one @param {number} all */
function row(one, all) {
  const known = /** @type {number[]} */ (one.values.filter((x) => x !== null));
  const now = one.values.at(-1) ?? null;
  const words = h("span", { class: "name", title: one.name }, one.name);
  return cells(COLUMNS, [
    [h("i", { class: "swatch", style: { background: `var(${one.colour})` } }), one.href ? h("a", { href: one.href }, words) : words],
    one.down ? h("span", { class: "chip bad" }, "down") : rate(now), rate(mean(one.values)), known.length ? rate(Math.max(...known)) : UNKNOWN,
    now === null || !all ? UNKNOWN : `${short((now / all) * 100)} %`,
  ]);
}
