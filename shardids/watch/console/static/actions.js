// Moves, rebalances, fences: what will be done is shown first, then confirmed by typing the shard's number.

import { post } from "./api.js";
import { h, say, show } from "./dom.js";
import { live } from "./live.js";

/** How long the server keeps a plan. */
const CONFIRM_MS = 60_000;
const WORDS = /** @type {Record<string, {title: string, about: string, begin: string}>} */ ({
  move: { title: "Move shard", about: "The shard's rows go to another node while applications use them; writes stop for the cutover only.", begin: "Move it" },
  rebalance: { title: "Rebalance the shards", about: "Shards are moved, one after another, until every node has its share.", begin: "Rebalance" },
  fence: { title: "Fence shard", about: "The shard stops issuing IDs, at once and for every session: inserts into it fail until it is activated again.", begin: "Fence it" },
  unfence: { title: "Activate shard", about: "The shard issues IDs again.", begin: "Activate it" },
});

/** Opens the dialog of an action. Nothing happens until its plan was shown and confirmed.
 *  @param {string} action @param {number | null} shard null for all */
export function openAction(action, shard) {
  const words = WORDS[action];
  const name = shard === null ? words.title : `${words.title} ${shard}`;
  const dialog = /** @type {HTMLDialogElement} */ (h("dialog", { "aria-labelledby": "action-title" }));
  const form = h("form", { method: "dialog" });
  const said = h("p", { class: "bad-text", role: "alert" });
  const step = h("div", { class: "stack" });
  const cancel = h("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel");
  const begin = /** @type {HTMLButtonElement} */ (h("button", { type: "submit", class: "danger", disabled: true }, words.begin));
  const plan = /** @type {HTMLButtonElement} */ (h("button", { type: "button", class: "main", on: { click: showPlan } }, "Show the plan"));
  const wishes = wishesOf(action, shard);
  const isHopeless = wishes.some(({ field }) => field instanceof HTMLSelectElement && !field.options.length);
  let confirm = "";
  let typed = "";
  let expiry = 0;

  form.append(h("h2", { id: "action-title" }, name), h("p", { class: "soft" }, words.about), step, said,
    h("div", { class: "buttons" }, cancel, plan, begin));
  dialog.append(form);
  begin.hidden = true;
  step.append(...isHopeless ? ["There is no other node that may hold the shard."] : wishes.map(({ label }) => label));
  plan.disabled = isHopeless;
  form.addEventListener("submit", carryOut);
  dialog.addEventListener("close", () => { clearTimeout(expiry); dialog.remove(); });
  document.body.append(dialog);
  dialog.showModal();
  if (!wishes.length) showPlan();

  async function showPlan() {
    plan.disabled = true;
    show(said, "");
    const given = Object.fromEntries(wishes.map(({ name, value }) => [name, value()]));
    try {
      const answer = await post(`actions/${action}`, shard === null ? given : { shard, ...given });
      confirm = answer.confirm;
      askToType(answer);
    } catch (error) {
      refuse(error);
      plan.disabled = false;
    }
  }

  /** @param {any} answer */
  function askToType(answer) {
    if (!answer.confirm) {
      show(step, h("p", null, answer.plan.join("\n")));
      plan.remove();
      return;
    }
    const wanted = String(shard ?? action);
    const field = /** @type {HTMLInputElement} */ (h("input", { name: "typed", autocomplete: "off", spellcheck: "false", on: {
      input: () => { typed = field.value.trim(); begin.disabled = typed !== wanted; },
    } }));
    for (const { field } of wishes) field.disabled = true;
    step.append(h("pre", { class: "plan", tabindex: "0", "aria-label": "Plan" }, answer.plan.join("\n")),
      h("label", { class: "typed" }, h("span", null, "To go on, type ", h("b", null, wanted)), field));
    plan.hidden = true;
    begin.hidden = false;
    field.focus();
    expiry = setTimeout(() => {
      begin.disabled = field.disabled = true;
      show(said, "The plan is out of date. Close this, and begin again.");
    }, CONFIRM_MS);
  }

  /** @param {SubmitEvent} event */
  async function carryOut(event) {
    event.preventDefault();
    if (begin.hidden || begin.disabled) return;
    begin.disabled = true;
    try {
      live.job = await post(`actions/${action}`, { confirm });
      live.changed("job");
      dialog.close();
      say(`${name}: begun`);
      if (action === "move" || action === "rebalance") location.hash = "moves";
    } catch (error) {
      refuse(error);
    }
  }

  /** @param {any} error */
  const refuse = (error) => show(said, h("b", null, `${error.message}.`), error.hint ? h("span", { class: "soft" }, ` ${error.hint}`) : null);
}

/**
 * Returns the fields of what an action can be told: names, labels, and what reads their values.
 *
 * @param {string} action @param {number | null} shard
 * @returns {{name: string, label: HTMLElement, field: HTMLSelectElement | HTMLInputElement, value: () => string | boolean}[]}
 */
function wishesOf(action, shard) {
  /** @param {string} name @param {string} words @param {HTMLElement[]} options */
  const choice = (name, words, options) => {
    const field = /** @type {HTMLSelectElement} */ (h("select", { name }, options));
    return { name, field, label: h("label", null, `${words} `, field), value: () => field.value };
  };
  if (action === "rebalance") {
    return [choice("by", "Even out the nodes by", ["size", "rows", "writes"].map((by) => h("option", { value: by }, by)))];
  }
  if (action !== "move") return [];
  const owner = live.map?.nodes[live.map.node[shard ?? -1] ?? -1];
  const region = live.map?.regions[live.map.region[shard ?? -1] ?? -1] ?? null;
  // A shard of no region goes to nodes of none.
  const others = live.nodes.filter((node) => node.name !== owner && node.region === region);
  const back = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", name: "back" }));
  return [
    choice("to", "To node", others.map((node) => h("option", { value: node.name, disabled: !node.up }, node.up ? node.name : `${node.name} (down)`))),
    { name: "back", field: back, label: h("label", null, back, "Replace an old copy that a move has left there"), value: () => back.checked },
  ];
}
