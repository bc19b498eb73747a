// Many IDs as pictures: how many were born when, and in which shards.

import { h } from "./dom.js";
import { count, minute, plural, span, utc } from "./format.js";

const SHARDS = 24;

/** @param {any} answer */
export function overTime(answer) {
  const { histogram, left_out: left } = answer;
  const without = leftOut(left);
  if (!histogram) return without && timeCard("", without);
  const { counts, from, to, step_s: step } = histogram;
  const most = Math.max(...counts);
  const bars = counts.map((/** @type {number} */ n, /** @type {number} */ at) => h("rect", {
    x: at, y: 100 - (n / most) * 100, width: counts.length > 80 ? 1 : 0.86, height: (n / most) * 100,
  }, h("title", null, `${utc(from + at * step)}: ${plural(n, "ID")}`)));
  const at = counts.indexOf(most);
  return timeCard(`a bar for each ${span(step)}; at most ${plural(most, "ID")}`,
    h("svg", { class: "histogram", viewBox: `0 0 ${counts.length} 100`, preserveAspectRatio: "none", role: "img",
      "aria-label": `${plural(answer.count, "ID")} from ${utc(from)} to ${utc(to)}; most at ${utc(from + at * step)}` }, bars),
    h("p", { class: "ends soft small" }, h("span", null, minute(from)), h("span", null, span(to - from)), h("span", null, minute(to))), without);
}

/** @param {string} words @param {...any} body */
const timeCard = (words, ...body) => h("section", { class: "card", "aria-labelledby": "time" },
  h("header", null, h("h2", { id: "time" }, "When they were born"), h("span", { class: "soft small" }, words)), body);

/** Which IDs the bars are without, and why. @param {{future: number, far: number}} left */
function leftOut({ future, far }) {
  const said = [future && `${plural(future, "ID")} from the future`, far && `${plural(far, "ID")} long before or after all others`].filter(Boolean);
  return said.length ? h("p", { class: "warn-text small" }, `Left out: ${said.join(", and ")}.`) : null;
}

/** @param {any} answer */
export function overShards(answer) {
  const all = [...answer.shards].sort((a, b) => b[1] - a[1] || a[0] - b[0]);
  const most = all[0][1];
  const total = answer.count - (answer.old ?? 0);
  const shown = all.slice(0, SHARDS);
  return h("section", { class: "card", "aria-labelledby": "shards" },
    h("header", null, h("h2", { id: "shards" }, "Over shards"), h("span", { class: "soft small" }, plural(answer.shard_count, "shard"),
      answer.shard_count > shown.length ? `; the ${shown.length} with most` : "")),
    h("ul", { class: "bars columns" }, shown.map(([shard, n]) => h("li", null,
      h("a", { class: "label", href: `#map/${shard}` }, shard),
      h("span", { class: "progress", "aria-hidden": "true" }, h("i", { style: { width: `${((n / most) * 100).toFixed(1)}%` } })),
      h("span", { class: "number" }, count(n), h("span", { class: "soft" }, ` ${((n / total) * 100).toFixed(0)} %`))))));
}
