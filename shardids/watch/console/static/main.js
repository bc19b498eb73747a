// The frame: sections by the address's hash, the bar, alerts, keys. Each section is a module of its own.

import { h, say, show } from "./dom.js";
import { ago, count, plural } from "./format.js";
import { live } from "./live.js";
import { searched } from "./search.js";

/** @typedef {{title: string, mount: (root: HTMLElement, argument: string) => View}} Section
 *  @typedef {{update: (what: string) => void, route?: (argument: string) => void, key?: (event: KeyboardEvent) => boolean,
 *    end?: () => void}} View */

/** @type {Record<string, {title: string, load: () => Promise<Section>}>} */
const SECTIONS = {
  health: { title: "Health", load: () => import("./health.js") },
  rates: { title: "Rates", load: () => import("./rates.js") },
  map: { title: "Map", load: () => import("./map.js") },
  ids: { title: "IDs", load: () => import("./inspector.js") },
  moves: { title: "Moves", load: () => import("./moves.js") },
};
const NAMES = Object.keys(SECTIONS);

const byId = (/** @type {string} */ id) => /** @type {HTMLElement} */ (document.getElementById(id));
const main = byId("main");
/** @type {View | null} */
let view = null;
let current = "";
let mounted = "";

function address() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return { name: NAMES.includes(name) ? name : "health", argument: rest.join("/") };
}

async function route() {
  const { name, argument } = address();
  if (name === current) {
    if (name === mounted) view?.route?.(argument);
    return; // if it is being loaded, it takes the argument that there is then
  }
  current = name;
  showTabs();
  const section = await SECTIONS[name].load();
  if (current !== name) return; // another was chosen while this one was loaded
  const now = address().argument;
  if (mounted === name) {
    view?.route?.(now);
    return;
  }
  mounted = name;
  view?.end?.();
  main.replaceChildren();
  document.title = `${SECTIONS[name].title} – shardids console`;
  const root = h("section", { "aria-labelledby": "title", class: `view ${name}` });
  main.append(root);
  view = section.mount(root, now);
  if (live.known) view.update("all");
  else showWaiting(root);
}

/** @param {HTMLElement} root */
function showWaiting(root) {
  root.append(h("p", { class: "empty waiting" }, "Nothing is known of the cluster yet: its catalog is being asked."));
}

function showTabs() {
  const { wrong, errors } = live.toDo;
  const open = live.openMoves ?? 0;
  const counts = /** @type {Record<string, [number, string, string]>} */ ({
    health: [wrong, errors ? "bad" : "warn", "to do"],
    moves: [open, "own", "not over"],
  });
  show(byId("tabs"), NAMES.map((name, at) => h("a", {
    href: `#${name}`, "aria-current": name === current ? "page" : null, "aria-keyshortcuts": String(at + 1),
    title: `Key ${at + 1}`,
  }, SECTIONS[name].title, counts[name]?.[0]
    ? [h("span", { class: `count ${counts[name][1]}`, "aria-hidden": "true" }, count(counts[name][0])),
      h("span", { class: "away" }, `, ${counts[name][0]} ${counts[name][2]}`)]
    : null)));
}

function showStatus() {
  const { age, stale } = live.staleness();
  const lost = live.connection === "lost";
  const { wrong, errors } = live.toDo;
  const ill = errors ? "bad" : wrong || stale ? "warn" : "";
  const state = lost ? "bad" : live.connection === "open" ? ill : "off";
  const word = lost ? "lost" : stale ? "stale" : live.connection === "open" ? "live" : "connecting";
  byId("status").setAttribute("aria-label", `Connection: ${word}${lost || !wrong ? "" : `; ${wrong} to do`}`);
  show(byId("status"), h("i", { class: `dot ${state}` }), `${word}${age === null ? "" : ` · ${ago(age)}`}`);
}

function showContext() {
  const cluster = live.cluster;
  if (!cluster) return undefined;
  const { catalog, layout } = cluster;
  const at = h("span", null, "Catalog ", h("b", null, `${catalog.host}/${catalog.dbname}`));
  if (!live.known) return show(byId("context"), at);
  const spare = 64 - layout.time_bits - layout.shard_bits - layout.sequence_bits;
  return show(byId("context"), at,
    h("span", null, h("b", null, plural(cluster.shard_count, "shard")), ` on ${plural(live.nodes.length, "node")}`),
    h("span", { class: "more", title: `Bits of time, shard and sequence${spare ? `; ${spare} unused` : ""}` }, "Layout ",
      h("b", null, `${layout.name ? `${layout.name} ` : ""}${layout.time_bits}-${layout.shard_bits}-${layout.sequence_bits}`)),
    h("span", { class: "more" }, "shardids ", h("b", null, cluster.version)),
    h("span", null, cluster.actions ? h("b", null, "actions allowed") : "read-only"),
    cluster.login ? h("form", { method: "post", action: "logout" }, h("button", { type: "submit", class: "plain" }, "Log out")) : null);
}

function showAlerts() {
  const alerts = [];
  const { age, stale } = live.staleness();
  const shown = age === null ? "Nothing was read yet." : `What is shown was read ${ago(age)}.`;
  if (live.connection === "lost") {
    alerts.push(notice("bad", `Connection lost: ${live.problem}. Trying again by itself.`, shown));
  } else if (live.cluster && !live.cluster.catalog.up) {
    const { error, answered_at: read } = live.cluster.catalog;
    alerts.push(notice("bad", `The catalog does not answer: ${error ?? "no reason given"}`,
      read ? `Placement and moves are those of ${ago(live.age(read))}. Shards issue IDs without the catalog, too.` : "It has not answered since the console was started."));
  } else if (stale) {
    alerts.push(notice("warn", "The server is behind with reading the cluster.", shown));
  }
  const down = live.nodes.filter((node) => !node.up);
  if (down.length && current !== "health") {
    alerts.push(h("div", { class: "notice bad" }, h("p", null, h("b", null, `${plural(down.length, "node")} down: `),
      down.map((node) => node.name).join(", "), ". ", h("a", { href: "#health" }, "What to do"))));
  }
  show(byId("alerts"), alerts);
}

/** @param {string} kind @param {string} first @param {string} second */
const notice = (kind, first, second) => h("div", { class: `notice ${kind}` }, h("p", null, h("b", null, first)), h("p", null, second));

/** @param {KeyboardEvent} event */
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const target = /** @type {HTMLElement} */ (event.target);
  const writing = target.matches("input, textarea, select");
  if (event.key === "Escape") {
    if (writing) target.blur();
    else view?.key?.(event);
    return;
  }
  if (writing || view?.key?.(event)) return;
  if (event.key === "/") {
    event.preventDefault();
    byId("find-text").focus();
  } else if (/^[1-9]$/.test(event.key) && NAMES[Number(event.key) - 1]) {
    location.hash = NAMES[Number(event.key) - 1];
    main.focus({ preventScroll: true });
  }
}

/** @param {MouseEvent} event */
async function onCopy(event) {
  const button = /** @type {HTMLElement} */ (event.target).closest?.("[data-copy]");
  if (!(button instanceof HTMLElement)) return;
  const done = await copy(button.dataset.copy ?? "");
  button.textContent = done ? "Copied" : "Press Ctrl+C";
  say(done ? "Copied" : "Could not copy");
  setTimeout(() => { button.textContent = "Copy"; }, 1600);
}

/** @param {string} text */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // without TLS a browser has no clipboard but on loopback
    const field = h("textarea", { class: "away" });
    document.body.append(field);
    /** @type {HTMLTextAreaElement} */ (field).value = text;
    /** @type {HTMLTextAreaElement} */ (field).select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

/** @param {Event} event */
function onChange(event) {
  const what = /** @type {CustomEvent} */ (event).detail;
  if (live.known) main.querySelector(".waiting")?.remove();
  showTabs();
  showStatus();
  showContext();
  showAlerts();
  if (live.known) view?.update(what);
}

addEventListener("hashchange", route);
addEventListener("keydown", onKey);
document.addEventListener("click", onCopy);
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  searched(/** @type {HTMLInputElement} */ (byId("find-text")));
});
live.addEventListener("change", onChange);
setInterval(() => { showStatus(); showAlerts(); }, 1000);
showStatus();
route();
live.start();
