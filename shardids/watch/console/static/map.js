// Map: every shard a cell, coloured by what is chosen; the same as a table; and what one shard is, beside it.

import { h, onTheme, say, show } from "./dom.js";
import { ago, count, plural } from "./format.js";
import { live } from "./live.js";
import { draw, layout, shardAt } from "./map_canvas.js";
import { CHOICES, facts, isKnown } from "./map_colours.js";
import { mountTable } from "./map_table.js";
import { openAction } from "./actions.js";
import { mountShard } from "./shard.js";

export const title = "Map";
/** What was chosen stays while other sections are looked at. */
const chosen = { by: "node", as: "map" };

/** @param {HTMLElement} root @param {string} argument */
export function mount(root, argument) {
  /** @type {number | null} */ let at = null; // under the pointer, or moved to by keys
  /** @type {number | null} */ let open = null;
  let wanted = "";
  /** @type {string | null} */ let only = null;
  let grid = layout(1, 600, 400);
  let waiting = 0;

  const by = choice("Colour by", Object.entries(CHOICES).map(([key, { name }]) => [key, name]), (key) => {
    chosen.by = key;
    only = null;
    update();
  });
  const as = choice("Show as", [["map", "Map"], ["table", "Table"]], (key) => {
    chosen.as = key;
    update();
  });
  const actions = h("span", { class: "right" });
  const canvas = /** @type {HTMLCanvasElement} */ (/** @type {unknown} */ (h("canvas", {
    tabindex: "0", role: "application", "aria-roledescription": "map of shards",
    "aria-label": "Shards. Arrow keys go from one to the next, Enter opens it, Escape closes it. The same as a table: Show as Table.",
    on: {
      pointermove: (/** @type {PointerEvent} */ event) => point(shardUnder(event), event),
      pointerleave: () => point(null, null),
      click: (/** @type {PointerEvent} */ event) => go(shardUnder(event)),
      blur: () => point(null, null),
    },
  })));
  const tip = h("div", { class: "tip", role: "tooltip", hidden: true });
  const legend = h("div", { class: "legend", role: "group", "aria-label": "Legend: choose one to see it alone" });
  const note = h("p", { class: "soft small" });
  const place = h("div", { class: "place" }, canvas, tip);
  const picture = h("div", { class: "card picture" }, legend, place, note);
  const tablePlace = h("div", { class: "card", hidden: true });
  const table = mountTable(tablePlace);
  const none = h("p", { class: "notice warn", role: "status", hidden: true });
  const drawer = h("aside", { class: "card drawer", "aria-label": "Shard", hidden: true, tabindex: "-1" });
  const shard = mountShard(drawer, close);
  const columns = h("div", { class: "map-columns" }, h("div", { class: "stack" }, picture, tablePlace), drawer);
  root.append(h("div", { class: "head" }, h("h1", { id: "title" }, "Shards"), by.group, as.group, actions), none, columns);

  const total = () => live.cluster?.shard_count ?? 0;

  /** @param {PointerEvent} event */
  function shardUnder(event) {
    const box = canvas.getBoundingClientRect();
    return shardAt(grid, total(), event.clientX - box.left, event.clientY - box.top);
  }

  /** @param {number | null} where @param {PointerEvent | null} event */
  function point(where, event) {
    if (at === where && event) return;
    at = where;
    showTip();
    redraw();
  }

  function showTip() {
    tip.hidden = at === null;
    canvas.classList.toggle("over", at !== null);
    if (at === null) return;
    show(tip, h("b", null, `Shard ${at}`), h("dl", { class: "facts" }, facts(at).map(([name, words]) => [h("dt", null, name), h("dd", null, words)])));
    const x = grid.left + (at % grid.columns) * grid.cell;
    const y = Math.floor(at / grid.columns) * grid.cell;
    const right = x + grid.cell + 10 + tip.offsetWidth < place.clientWidth;
    tip.style.left = `${Math.max(0, right ? x + grid.cell + 10 : x - tip.offsetWidth - 10)}px`;
    tip.style.top = `${Math.max(0, Math.min(y, place.clientHeight - tip.offsetHeight))}px`;
  }

  /** @param {number | null} where */
  function go(where) {
    if (where !== null) location.hash = `map/${where}`;
  }

  function close() {
    location.hash = "map";
    (chosen.as === "map" ? canvas : tablePlace.querySelector("input"))?.focus();
  }

  /** @param {string} argument */
  function route(argument) {
    wanted = argument;
    const number = /^\d+$/.test(wanted) ? Number(wanted) : null;
    const isBeyond = number !== null && total() > 0 && number >= total(); // checked again once they are counted
    open = isBeyond ? null : number;
    none.hidden = !isBeyond;
    show(none, isBeyond ? `There is no shard ${wanted} in this cluster: it has shards 0 to ${total() - 1}.` : "");
    columns.classList.toggle("opened", open !== null);
    drawer.hidden = open === null;
    shard.open(open);
    if (open !== null) drawer.focus({ preventScroll: innerWidth > 900 });
    resize();
  }

  function redraw() {
    if (waiting) return;
    waiting = requestAnimationFrame(() => {
      waiting = 0;
      if (!live.map || picture.hidden) return;
      draw(canvas, grid, {
        shards: total(), colouring: /** @type {any} */ (CHOICES)[chosen.by].colouring(), only, region: live.map.region, at, open,
      });
    });
  }

  function resize() {
    const fresh = layout(total(), place.clientWidth, Math.max(320, innerHeight - 330));
    if (JSON.stringify(fresh) !== JSON.stringify(grid)) grid = fresh;
    redraw();
  }

  function update() {
    by.choose(chosen.by);
    as.choose(chosen.as);
    by.group.hidden = picture.hidden = chosen.as !== "map";
    tablePlace.hidden = chosen.as !== "table";
    show(actions, !live.cluster.actions ? null : live.cluster.catalog.up
      ? h("button", { type: "button", "data-key": "rebalance", on: { click: () => openAction("rebalance", null) } }, "Rebalance …")
      : h("span", { class: "soft small" }, "They can be rebalanced once the catalog answers."));
    if (chosen.as === "table") table.update();
    else showLegend();
    if (open !== null && open >= total()) route(wanted);
    shard.update();
    resize();
    if (at !== null) showTip();
  }

  function showLegend() {
    const { groups } = /** @type {any} */ (CHOICES)[chosen.by].colouring();
    const named = /** @type {any[]} */ (groups).filter((group) => group.count);
    if (only !== null && !named.some((group) => group.key === only)) only = null;
    show(legend, named.map((group) => h("button", {
      type: "button", class: "plain", "data-key": group.key, "aria-pressed": String(group.key === only),
      on: { click: () => { only = only === group.key ? null : group.key; update(); } },
    }, h("i", { class: group.mark ? "swatch striped" : "swatch", style: { background: `var(${group.colour})` } }), group.words,
    h("span", { class: "soft" }, ` ${count(group.count)}`))), regionWords());
    show(note, noteOf());
  }

  function regionWords() {
    const regions = live.cluster.regions ?? [];
    return regions.length ? h("span", { class: "soft regions" }, "Outlined: ",
      regions.map((/** @type {any} */ region, /** @type {number} */ n) => `${n ? ", " : ""}${region.name} ${region.first}–${region.last}`)) : null;
  }

  function noteOf() {
    if (!live.map) return "The map was not read yet.";
    const seldom = chosen.by === "size" || chosen.by === "revision";
    const unread = live.map.sizes_errors.map((sentence) => h("span", { class: "warn-text" }, `Not all was read: ${sentence} `));
    if (seldom && !isKnown(chosen.by)) {
      return [...unread, chosen.by === "size" ? "Sizes were not read yet. " : "No revision is known: the shards were not migrated by shardids, or not read yet. ", again()];
    }
    if (seldom) return [...unread, `Sizes and revisions were read ${ago(live.age(live.map.sizes_at))}. `, again()];
    if (chosen.by === "lag" && !isKnown("lag")) return "No shard is being moved: there is nothing that could lag.";
    if (chosen.by === "rate" && !isKnown("rate")) return "Rates are known from the second reading on.";
    return "";
  }

  const again = () => h("button", { type: "button", class: "plain", "data-key": "again", on: { click: readAgain } }, "Read them again");

  async function readAgain() {
    show(note, "Reading sizes and revisions …");
    await live.reloadSizes().catch((error) => show(note, error.message));
  }

  /** @param {KeyboardEvent} event */
  function key(event) {
    if (event.key === "Escape" && open !== null) {
      close();
      return true;
    }
    if (event.target !== canvas) return false;
    const page = grid.columns * 8;
    const by = /** @type {Record<string, number>} */ ({
      ArrowRight: 1, ArrowLeft: -1, ArrowDown: grid.columns, ArrowUp: -grid.columns, PageDown: page, PageUp: -page,
    })[event.key];
    if (event.key === "Enter" || event.key === " ") go(at);
    else if (event.key === "Home" || event.key === "End") walk(event.key === "Home" ? 0 : total() - 1);
    else if (by) walk(at === null ? open ?? 0 : at + by);
    else return false;
    event.preventDefault();
    return true;
  }

  /** @param {number} where */
  function walk(where) {
    if (where < 0 || where >= total()) return;
    at = where;
    showTip();
    redraw();
    tip.scrollIntoView?.({ block: "nearest" });
    say(`Shard ${at}, ${facts(at).map(([name, words]) => `${name} ${words}`).join(", ")}`);
  }

  const watcher = new ResizeObserver(resize);
  watcher.observe(place);
  const stop = onTheme(redraw);
  if (live.known) say(plural(total(), "shard"));
  route(argument);
  return {
    update, route, key,
    end: () => { watcher.disconnect(); stop(); shard.end(); },
  };
}

/** Returns buttons of which one is chosen. @param {string} label @param {string[][]} options @param {(key: string) => void} then */
function choice(label, options, then) {
  const group = h("div", { class: options.length > 4 ? "choice long" : "choice", role: "group", "aria-label": label },
    options.map(([key, name]) => h("button", { type: "button", "data-choice": key, on: { click: () => then(key) } }, name)));
  return {
    group,
    /** @param {string} chosen */
    choose(chosen) {
      for (const button of group.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.choice === chosen));
    },
  };
}
