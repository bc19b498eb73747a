// Report: how the ways to make keys compare, as shardids compare measured them.

import { command, h, show } from "./dom.js";
import { live } from "./live.js";

export const title = "Report";

/** @param {HTMLElement} root */
export function mount(root) {
  const body = h("div", null, h("p", { class: "empty" }, "Looking for a report …"));
  root.append(h("h1", { id: "title", class: "away" }, title),
    h("section", { class: "card", "aria-labelledby": "report" }, h("header", null, h("h2", { id: "report" }, "Key schemes, side by side")), body));
  return {
    update() {
      show(body, live.cluster.report ? [h("p", null, "Speed, size, order and what goes wrong: shardids beside the other ways to make keys, measured on real servers."),
        h("p", { class: "open" }, h("a", { class: "button", href: new URL("api/report", document.baseURI).href, target: "_blank", rel: "noopener" }, "Open the report"))]
        : h("div", { class: "empty" }, h("p", null, "This console was given no report. To make one, rough, in a minute, and to show it:"),
          command("shardids compare --quick --html report.html"), command("shardids console --report report.html")));
    },
  };
}
