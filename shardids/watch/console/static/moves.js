// Moves and migrations as they run, and what the console itself was asked to do.

import { get } from "./api.js";
import { cells, command, h, show, table } from "./dom.js";
import { ago, bytes, minute, plural, span, UNKNOWN } from "./format.js";
import { live } from "./live.js";

export const title = "Moves";
const UNREAD = "Not known: the catalog has not told its moves yet.";
const PINS = [{ title: "Shard" }, { title: "Pinned" }, { title: "Since" }, { title: "To let it move" }];
const PAST = [{ title: "Shard" }, { title: "From" }, { title: "To" }, { title: "Began" }, { title: "Took", class: "number" }, { title: "Outcome" }];

/** @param {HTMLElement} root */
export function mount(root) {
  const job = h("section", { class: "card", "aria-labelledby": "job", hidden: true });
  const open = part("open", "Moves that are not over");
  const balance = part("balance", "Rebalance");
  const migrations = part("migrations", "Migrations");
  const past = part("past", "Moves that are over");
  root.append(h("h1", { id: "title", class: "away" }, "Moves and migrations"), h("div", { class: "stack" }, job, open.card, balance.card, migrations.card, past.card));
  /** @type {any} */ let migrated = null;
  /** @type {any} */ let balanced = null;
  let problem = "";

  async function load() {
    try {
      balanced = await get("rebalance");
      migrated = await get("migrations");
      problem = "";
    } catch (error) {
      problem = /** @type {Error} */ (error).message;
    }
    update();
  }

  function update() {
    const moves = [...live.moves ?? []].sort((a, b) => b.id - a.id);
    const running = moves.filter((move) => !move.done);
    const over = moves.filter((move) => move.done).slice(0, 50);
    job.hidden = !live.job;
    if (live.job) show(job, jobOf(live.job));
    show(open.body, running.length ? h("ul", { class: "moving" }, running.map(moving)) : noneOpen());
    show(past.body, over.length ? pastTable(over) : h("p", { class: "empty" },
      !live.moves ? UNREAD : live.knownAgo ? `When the catalog answered last, ${live.knownAgo}, no shard had been moved yet.` : "No shard was moved yet."));
    show(balance.body, balanced ? balanceOf(balanced) : h("p", { class: "empty" }, problem || "Reading pins …"));
    show(migrations.body, problem ? h("p", { class: "notice bad" }, problem) : null,
      migrated ? migrationsOf(migrated) : problem ? null : h("p", { class: "empty" }, "Reading revisions …"));
  }
  load();
  live.reloadMoves().catch(() => {});
  const timer = setInterval(load, 5000);
  return { update, end: () => clearInterval(timer) };
}

function noneOpen() {
  const { openMoves: open, knownAgo } = live;
  if (!live.moves) return h("p", { class: "empty" }, UNREAD, open ? ` ${plural(open, "move")} open when the catalog answered last.` : null);
  if (knownAgo) return h("p", { class: "empty" }, `When the catalog answered last, ${knownAgo}, no move was open.`);
  return h("div", { class: "empty" }, h("p", null, "No move is open. To move a shard, or to see what would even the nodes out:"),
    command("shardids shard move SHARD --to NODE --dry-run"), command("shardids rebalance --dry-run"));
}

/** @param {string} id @param {string} heading */
function part(id, heading) {
  const body = h("div", null);
  return { body, card: h("section", { class: "card", "aria-labelledby": id }, h("header", null, h("h2", { id }, heading)), body) };
}

/** @param {any} job */
function jobOf(job) {
  const kind = /** @type {Record<string, string>} */ ({ running: "own", done: "good", failed: "bad", interrupted: "warn" })[job.state] ?? "";
  const { progress, lines = [] } = job;
  return [
    h("header", null, h("h2", { id: "job" }, job.title), h("span", { class: `chip ${kind}` }, job.state),
      h("span", { class: "soft small" }, `begun from this console ${ago(live.age(job.started))}`, job.ended ? `, took ${span(job.ended - job.started)}` : "")),
    progress ? h("p", { class: "small" }, `Shard ${progress.shard}: ${progress.step}`, progressWords(progress)) : null,
    progress?.total ? bar(progress.done / progress.total, job.title) : null,
    job.error ? h("p", { class: "notice bad" }, job.error) : null,
    lines.length ? h("pre", { class: "lines", tabindex: "0", "aria-label": "Progress" }, lines.slice(-14).join("\n")) : null,
  ];
}

/** @param {any} progress */
function progressWords(progress) {
  if (progress.total) return `, ${bytes(progress.done)} of ${bytes(progress.total)}${progress.seconds_left ? `, about ${span(progress.seconds_left)} left` : ""}`;
  return progress.lag_bytes === undefined ? "" : `, ${bytes(progress.lag_bytes)} behind`;
}

/** @param {number} share @param {string} label */
const bar = (share, label) => h("span", {
  class: "progress", role: "progressbar", "aria-label": label, "aria-valuenow": Math.round(share * 100), "aria-valuemin": 0, "aria-valuemax": 100,
}, h("i", { style: { width: `${(share * 100).toFixed(0)}%` } }));

/** @param {any} move */
function moving(move) {
  const interrupted = move.state === "interrupted";
  return h("li", { "data-move": move.id },
    h("p", { class: "what" }, h("a", { href: `#map/${move.shard}` }, h("b", null, `Shard ${move.shard}`)),
      h("span", null, h("span", { class: "name" }, move.from), " → ", h("span", { class: "name" }, move.to)),
      h("span", { class: "chip own" }, move.step), h("span", { class: interrupted ? "chip warn" : "chip" }, move.state),
      h("span", { class: "soft small" }, `begun ${ago(live.age(move.started))}`, move.how === "offline" ? ", without writes" : "", move.at ? `, step ${move.at} of ${move.steps}` : "")),
    move.at ? bar((move.at - 0.5) / move.steps, `Move of shard ${move.shard}`) : null,
    interrupted ? [h("p", { class: "small" }, "Its process ended before the move did. To resume it, or to undo it:"),
      command(`shardids shard move ${move.shard} --resume`), command(`shardids shard move ${move.shard} --abort`)] : null);
}

/** @param {any[]} moves */
function pastTable(moves) {
  const kind = /** @type {Record<string, string>} */ ({ moved: "good", aborted: "warn" });
  return table("Moves that are over", PAST, moves.map((move) => cells(PAST, [h("a", { href: `#map/${move.shard}` }, move.shard), move.from, move.to, minute(move.started),
      typeof move.done === "number" ? span(move.done - move.started) : UNKNOWN,
      h("span", { class: `chip ${kind[move.state] ?? ""}` }, move.state)])), "snug");
}

/** @param {any} answer */
function balanceOf(answer) {
  const { pins, moves } = answer;
  const done = moves ? moves.moved + moves.aborted : 0;
  return [
    answer.running ? h("p", null, h("span", { class: "chip own" }, live.knownAgo ? "not known" : "running"), " ", answer.running)
      : h("div", { class: "empty" }, h("p", null, "No rebalance runs. To see what one that runs on would do:"), command("shardids rebalance --watch --dry-run")),
    done ? h("p", { class: "soft small" }, `Moves by rebalance --watch so far: ${plural(moves.moved, "shard")} moved, ${moves.aborted} undone.`) : null,
    answer.error ? h("p", { class: "notice bad" }, `The pins can't be read: ${answer.error}`) : null,
    pins?.length ? table("Pinned shards", PINS, pins.map((/** @type {any} */ pin) => cells(PINS, [h("a", { href: `#map/${pin.shard}` }, pin.shard),
      pin.key === null ? pin.node ?? "where it is" : h("span", { class: "name" }, `key ${pin.key}`), minute(pin.since), h("code", null, pin.do)])), "snug")
      : pins ? h("p", { class: "soft small" }, "No shard is pinned.") : null,
  ];
}

/** @param {any} answer */
function migrationsOf(answer) {
  const revisions = answer.revisions ?? [];
  const runs = answer.running ?? [];
  const all = revisions.reduce((/** @type {number} */ total, /** @type {any} */ one) => total + one.shards, 0);
  const unread = (answer.errors ?? []).map((/** @type {string} */ sentence) => h("p", { class: "notice bad" }, `Not all revisions were read: ${sentence}`));
  const asked = answer.running_error ? h("p", { class: "warn-text" }, answer.running
    ? `When the catalog answered last, ${ago(live.age(answer.running_at))}, ${runs.length ? "a run was under way:" : "no run was under way."}`
    : "Whether a run is under way is not known: the catalog does not answer.") : null;
  if (!answer.read_at && !unread.length) return [asked, h("p", { class: "empty" }, "Reading revisions …")];
  if (!revisions.some((/** @type {any} */ one) => one.revision !== null) && !runs.length && !unread.length) {
    return [asked, h("div", { class: "empty" }, h("p", null, "No shard has a revision: the application's tables were not migrated by shardids. To begin:"), command("shardids migrate init --help"))];
  }
  return [
    unread,
    revisions.length > 1 ? h("p", { class: "warn-text" }, `The shards are at ${plural(revisions.length, "revision")}.`) : null,
    h("ul", { class: "bars" }, revisions.map((/** @type {any} */ one) => h("li", null,
      h("span", { class: "label" }, h("code", null, one.revision ?? "none")),
      h("span", { class: "progress", "aria-hidden": "true" }, h("i", { style: { width: `${((one.shards / Math.max(1, all)) * 100).toFixed(1)}%` } })),
      h("span", { class: "number" }, plural(one.shards, "shard"))))),
    asked,
    runs.map((/** @type {string} */ run) => h("p", null, h("span", { class: "chip own" }, answer.running_error ? "not known" : "running"), " ", run)),
    answer.read_at ? h("p", { class: "soft small" }, `Read ${ago(live.age(answer.read_at))}.`) : null,
  ];
}
