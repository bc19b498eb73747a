// Report: how the ways to make keys compare, as shardids compare measured them.

import { command, h, show } from "./dom.js";
import { minute } from "./format.js";
import { live } from "./live.js";

export const title = "Report";

/** @param {HTMLElement} root */
export function mount(root) {
  const body = h("div", null, h("p", { class: "empty" }, "Looking for a report …"));
  root.append(h("h1", { id: "title", class: "away" }, title),
    h("section", { class: "card", "aria-labelledby": "report" }, h("header", null, h("h2", { id: "report" }, "Key schemes, side by side")), body));
  return {
    update() {
      const made = live.cluster.report;
      show(body, made ? [h("p", null, "Speed, size, order and what goes wrong: shardids beside the other ways to make keys, measured on real servers."),
        h("p", { class: "soft" }, `Made ${minute(made)}.`),
        h("p", { class: "open" }, h("a", { class: "button", href: new URL("api/report", document.baseURI).href, target: "_blank", rel: "noopener" }, "Open the report"))]
        : h("div", { class: "empty" }, h("p", null, "No comparison was kept where the console looks. To make one, rough, in a minute:"), command("shardids compare --quick")));
    },
  };
}
