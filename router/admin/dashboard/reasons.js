// The reasons of misses: what they are called, in the order in which they are shown. Those that somebody can do
// something about come first; router/core/types/cache_misses.py says how they are told apart.

import { count, percent, share } from "./format.js";
import { h, table, text } from "./dom.js";

export const AVOIDABLE = ["diverged", "evicted", "spilled", "replica_lost", "identity", "mispredicted"];
export const UNAVOIDABLE = ["unsupported", "cold", "new", "tail"];
export const REASONS = [...AVOIDABLE, ...UNAVOIDABLE];

export const MEANING = {
  diverged: "an earlier prompt had them after a part that differs now",
  evicted: "a replica had cached them and evicted them",
  spilled: "another replica has them cached, but computing elsewhere was cheaper",
  replica_lost: "the replica with them was removed or restarted",
  identity: "cached for another model, adapter, salt or tenant",
  mispredicted: "predicted as cached, but the engine reported a miss",
  unsupported: "the router cannot parse this prompt",
  cold: "no earlier prompt has the same beginning",
  new: "after a known prefix",
  tail: "a partial block, and the last token, which engines always compute",
};

export const named = (reason) => reason.replaceAll("_", " ");

export function avoidable(misses) {
  return AVOIDABLE.reduce((sum, reason) => sum + (misses[reason] || 0), 0);
}

function swatch(cell, kind, label, meaning) {
  if (cell.childElementCount === 0) cell.append(h("span", { class: `swatch fill-${kind}`, "aria-hidden": "true" }), h("span"), h("span", { class: "meaning" }, meaning));
  text(cell.children[1], label);
}

// Of the stretch that is shown and since the start, side by side; what a reason means stands under its name.
export function showReasons(element, shown, totals) {
  const rows = REASONS.map((reason) => ({ reason, now: shown.misses[reason] || 0, all: totals.misses[reason] || 0 })).filter((row) => row.all > 0 || row.now > 0);
  const columns = [
    { name: "Reason", header: true, fill: (cell, row) => swatch(cell, row.reason, named(row.reason), MEANING[row.reason]) },
    { name: "Shown", numeric: true, title: "tokens in the time range of the charts", value: (row) => count(row.now) },
    { name: "of prompts", numeric: true, value: (row) => percent(share(row.now, shown.prompt_tokens)) },
    { name: "Since start", numeric: true, minor: true, value: (row) => count(row.all) },
  ];
  table(element, columns, rows, (row) => row.reason, "No computed tokens yet.");
}
