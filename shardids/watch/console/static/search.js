// The field in the bar: a shard by its number, or IDs to take apart.

import { say } from "./dom.js";
import { live } from "./live.js";

let pending = "";

/** Returns the IDs that were sought in the bar, once. */
export function takeSought() {
  const sought = pending;
  pending = "";
  return sought;
}

/** Goes to what was typed: a number that a shard has is a shard, all else is taken as IDs. @param {HTMLInputElement} field */
export function searched(field) {
  const text = field.value.trim();
  if (!text) return;
  const named = /^(?:shard[_ ]?)?0*(\d{1,9})$/i.exec(text);
  if (named && Number(named[1]) < (live.cluster?.shard_count ?? 0)) {
    location.hash = `map/${Number(named[1])}`;
    say(`Shard ${Number(named[1])}`);
  } else {
    pending = text;
    const same = location.hash === "#ids/sought";
    location.hash = "ids/sought";
    if (same) dispatchEvent(new HashChangeEvent("hashchange"));
  }
  field.value = "";
  field.blur();
}
