// IDs taken apart: one as a picture of its bits, many as a table, over time and over shards.

import { post } from "./api.js";
import { bitPicture } from "./bits.js";
import { cells, h, say, show, table } from "./dom.js";
import { ago, count, local, plural, utc, UNKNOWN } from "./format.js";
import { overShards, overTime } from "./inspector_many.js";
import { live } from "./live.js";
import { takeSought } from "./search.js";

export const title = "IDs";
const COLUMNS = [{ title: "ID" }, { title: "Born (UTC)", class: "wide" }, { title: "Shard", class: "number" }, { title: "Sequence", class: "number" },
  { title: "Node" }, { title: "Row" }, { title: "Note", class: "wide" }];
const LONGEST = 1_000_000;
/** What was written stays while other sections are looked at. */
const kept = { text: "", look: true, answer: /** @type {any} */ (null), chosen: 0 };

/** @param {HTMLElement} root */
export function mount(root) {
  const field = /** @type {HTMLTextAreaElement} */ (h("textarea", {
    id: "ids", rows: "3", spellcheck: "false", autocomplete: "off", "aria-describedby": "ids-help", class: "mono",
    placeholder: "382529960780272642", on: {
      beforeinput: (/** @type {InputEvent} */ event) => tooLong(event.data ?? "") && event.preventDefault(),
      input: (/** @type {InputEvent} */ event) => tooLong(field.value) || (event.inputType === "insertFromPaste" ? now() : later()),
    },
  }));
  const look = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", on: { change: () => { kept.look = look.checked; now(); } } }));
  const said = h("span", { class: "soft small", role: "status" });
  const body = h("div", { class: "stack" });
  const clear = h("button", { type: "button", on: { click: () => { field.value = ""; now(); field.focus(); } } }, "Clear");
  const form = h("form", { class: "card ask", on: { submit: (/** @type {Event} */ event) => { event.preventDefault(); now(); } } },
    h("header", null, h("label", { for: "ids" }, h("h1", { id: "title" }, "Take IDs apart")),
      h("span", { class: "soft small", id: "ids-help" }, "One or many, in any text: decimal, 0x and hexadecimal, or 13 characters of base 32")),
    field,
    h("div", { class: "below" }, h("button", { type: "submit", class: "main" }, "Take apart"), clear,
      h("label", null, look, "Look whether the rows are there"), said));
  root.append(h("div", { class: "stack" }, form, body));
  field.value = kept.text;
  look.checked = kept.look;
  let timer = 0;
  let asking = new AbortController();

  function later() {
    clearTimeout(timer);
    timer = setTimeout(now, 350);
  }

  /** Forgets what was asked, and its answer. @param {string} text what the field has instead */
  function begin(text) {
    clearTimeout(timer);
    asking.abort();
    asking = new AbortController();
    Object.assign(kept, { text, chosen: 0, answer: null });
  }

  /** Returns whether a text is refused for its length; then it is not in the field: a browser takes seconds to lay it out. @param {string} text */
  function tooLong(text) {
    if (text.length <= LONGEST && new Blob([text]).size <= LONGEST) return false;
    begin("");
    field.value = "";
    show(said, h("b", { class: "bad-text" }, "More than 1 MB. "), "Read files with ", h("code", null, "shardids id stats FILE"));
    draw();
    return true;
  }

  async function now() {
    const before = kept.answer;
    begin(field.value);
    if (!field.value.trim()) {
      show(said, "");
      return draw();
    }
    kept.answer = before; // shown until the next answer is there
    show(said, "…");
    try {
      kept.answer = await post("inspect", { text: field.value, look: look.checked }, asking.signal);
      show(said, summary(kept.answer));
    } catch (error) {
      if (error instanceof DOMException) return undefined;
      const { message, hint } = /** @type {any} */ (error);
      show(said, h("b", { class: "bad-text" }, message), hint ? ` ${hint}` : "");
      kept.answer = null;
    }
    return draw();
  }

  function draw() {
    const answer = kept.answer;
    if (!live.known) return;
    if (!answer) {
      show(body, h("p", { class: "empty" }, "An ID tells when and in which shard its row was born. Paste IDs from a log, an error message or a table: what is no ID is listed with the reason."));
      return;
    }
    const one = answer.ids[kept.chosen];
    show(body, one ? picture(one) : null,
      answer.ids.length > 1 ? list(answer) : null,
      answer.count > 1 ? overTime(answer) : null,
      (answer.shards ?? []).length > 1 ? overShards(answer) : null,
      anomalies(answer), bad(answer));
  }

  /** @param {any} answer */
  function list(answer) {
    const more = answer.count - answer.ids.length;
    return h("section", { class: "card", "aria-labelledby": "list" },
      h("header", null, h("h2", { id: "list" }, plural(answer.count, "ID")), more > 0 ? h("span", { class: "soft small" }, `the first ${answer.ids.length} are listed; all are in the figures below`) : null),
      h("div", { class: "tall" }, table("IDs", COLUMNS, answer.ids.map((/** @type {any} */ one, /** @type {number} */ at) => cells(COLUMNS, [
          h("button", { type: "button", class: "link mono", "data-key": `${one.id} ${at}`, on: { click: () => choose(at) } }, one.id),
          one.time === null ? UNKNOWN : utc(one.time).replace(" UTC", ""), one.shard === null ? UNKNOWN : h("a", { href: `#map/${one.shard}` }, one.shard), count(one.sequence), one.node ?? UNKNOWN,
          foundWords(one), one.note ? h("span", { class: "remark" }, one.note) : "",
        ], { "aria-current": at === kept.chosen ? "true" : null })), "cards")));
  }

  /** @param {number} at */
  function choose(at) {
    kept.chosen = at;
    draw();
    body.firstElementChild?.scrollIntoView({ block: "nearest" });
    say(`ID ${kept.answer.ids[at].id}`);
  }

  function route() {
    const sought = takeSought();
    if (sought) {
      if (tooLong(sought)) return;
      field.value = sought;
      now();
    }
  }
  let begun = false;
  return {
    route,
    update() {
      if (begun) return; // what was taken apart does not change with the cluster's readings
      begun = true;
      draw();
      route();
      if (kept.answer) show(said, summary(kept.answer));
      if (!field.value) field.focus({ preventScroll: true });
    },
    end: () => { clearTimeout(timer); asking.abort(); },
  };
}

/** @param {any} answer */
function summary(answer) {
  const wrong = (answer.bad ?? []).length;
  const unread = answer.unread ?? [];
  return [plural(answer.count, "ID"), wrong ? h("span", { class: "warn-text" }, `, and ${plural(answer.bad_count, "entry", "entries")} without one`) : null,
    unread.map((/** @type {string} */ sentence) => h("span", { class: "warn-text" }, ` Not looked everywhere: ${sentence}.`))];
}

/** @param {any} one */
function foundWords(one) {
  if (one.found === true) return [h("span", { class: "chip good" }, "found"), " ", h("code", null, one.table ?? "")];
  if (one.found === false) return h("span", { class: "chip warn" }, "in no table");
  return one.table ? h("code", null, one.table) : h("span", { class: "soft" }, "not looked");
}

/** @param {any} one */
function picture(one) {
  const known = [
    ["Born", one.time === null ? UNKNOWN : [utc(one.time), h("span", { class: "soft" }, ` ${ago(live.nowOfIds() - one.time)}`)]],
    ["Here", one.time === null ? null : local(one.time)],
    ["Shard", one.shard === null ? UNKNOWN : [h("a", { href: `#map/${one.shard}` }, one.shard), one.region ? ` in region ${one.region}` : ""]],
    ["Node", one.node ? [one.node, one.origin_differs ? h("span", { class: "soft" }, ` now; born on ${one.born_on}`) : null] : h("span", { class: "warn-text" }, "none")],
    ["Row", foundWords(one)],
    ["Base 32", one.text ? h("code", null, one.text) : null],
    ["Note", one.note ? h("span", { class: "warn-text" }, one.note) : null],
  ];
  return h("section", { class: "card one", "aria-labelledby": "one" },
    h("header", null, h("h2", { id: "one", class: "mono" }, one.id), h("button", { type: "button", class: "plain", "data-copy": one.id, "aria-label": `Copy: ${one.id}` }, "Copy")),
    bitPicture(one.id),
    h("dl", { class: "facts" }, known.filter(([, words]) => words !== null).map(([name, words]) => [h("dt", null, name), h("dd", null, words)])));
}

/** @param {any} answer */
function anomalies(answer) {
  if (answer.count < 2) return null;
  const all = answer.anomalies ?? [];
  return h("section", { class: "card", "aria-labelledby": "anomalies" }, h("header", null, h("h2", { id: "anomalies" }, "Anomalies")),
    all.length ? h("ul", { class: "sentences" }, all.map((/** @type {any} */ one) => h("li", null, typeof one === "string" ? one : one.message)))
      : h("p", { class: "empty" }, "Nothing is unusual in these IDs."));
}

/** @param {any} answer */
function bad(answer) {
  const all = answer.bad ?? [];
  if (!all.length) return null;
  const columns = [{ title: "Text" }, { title: "Why it is no ID" }];
  return h("section", { class: "card", "aria-labelledby": "bad" }, h("header", null, h("h2", { id: "bad" }, "Not IDs")),
    h("div", { class: "tall" }, table("Not IDs", columns, all.map((/** @type {any} */ one) => cells(columns, [h("code", null, one.text), one.why])), "snug")));
}
