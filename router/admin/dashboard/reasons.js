// The reasons of misses: what they are called, in the order in which they are shown. Those that somebody can do
// something about come first; router/core/types/misses.py says how they are told apart.

import { count, percent, share } from "./format.js";
import { h, table, text } from "./dom.js";

export const AVOIDABLE = ["diverged", "evicted", "spilled", "replica_lost", "identity", "mispredicted"];
export const UNAVOIDABLE = ["unsupported", "cold", "new", "tail"];
export const REASONS = [...AVOIDABLE, ...UNAVOIDABLE];

export const MEANING = {
  diverged: "an earlier prompt had them too, behind something that differs now",
  evicted: "a replica held them, and dropped them",
  spilled: "another replica holds them, and it was cheaper to go elsewhere",
  replica_lost: "whoever held them is gone or was restarted",
  identity: "held for another model, adapter, salt or tenant",
  mispredicted: "the router said held, the engine said no",
  unsupported: "the router cannot read this prompt",
  cold: "nothing like it was seen before",
  new: "behind a prefix that was seen before",
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
    { name: "Shown", numeric: true, title: "tokens in the time that the charts show", value: (row) => count(row.now) },
    { name: "of prompts", numeric: true, value: (row) => percent(share(row.now, shown.prompt_tokens)) },
    { name: "Since start", numeric: true, minor: true, value: (row) => count(row.all) },
  ];
  table(element, columns, rows, (row) => row.reason, "Nothing was computed yet.");
}
