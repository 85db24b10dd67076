// The reasons of misses: what they are called, in the order in which they are shown. Those that somebody can do
// something about come first; see router/core/miss.py.

import { count, percent, share } from "./format.js";
import { h, keyed, table, text } from "./dom.js";

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

// Sums of steps: what the headline figures are made of.
export function summed(points) {
  const total = { requests: 0, prompt_tokens: 0, predicted_tokens: 0, hit_tokens: 0, genuine_tokens: 0, replay_tokens: 0, misses: {} };
  for (const point of points) {
    for (const name of Object.keys(total)) if (name !== "misses") total[name] += point[name];
    for (const [reason, tokens] of Object.entries(point.misses)) total.misses[reason] = (total.misses[reason] || 0) + tokens;
  }
  return total;
}

export function swatch(cell, kind, label) {
  if (cell.childElementCount === 0) cell.append(h("span", { class: `swatch fill-${kind}`, "aria-hidden": "true" }), h("span"));
  text(cell.lastElementChild, label);
}

// Of the last ten minutes and since the start, side by side.
export function showReasons(element, recent, totals) {
  const rows = REASONS.map((reason) => ({ reason, now: recent.misses[reason] || 0, all: totals.misses[reason] || 0 }));
  const shown = rows.filter((row) => row.all > 0 || row.now > 0);
  const columns = [
    { name: "Reason", header: true, fill: (cell, row) => swatch(cell, row.reason, named(row.reason)) },
    { name: "Last 10 min", numeric: true, value: (row) => count(row.now) },
    { name: "of prompts", numeric: true, value: (row) => percent(share(row.now, recent.prompt_tokens)) },
    { name: "Since start", numeric: true, minor: true, value: (row) => count(row.all) },
    { name: "of prompts", numeric: true, minor: true, value: (row) => percent(share(row.all, totals.prompt_tokens)) },
    { name: "What it means", grow: true, minor: true, value: (row) => MEANING[row.reason] },
  ];
  table(element, columns, shown, (row) => row.reason, "Nothing was computed yet.");
}

// A breakdown as one bar and a line of words.
export function legend(parent, kinds, label = named) {
  keyed(parent, kinds, (kind) => kind, (kind) => h("li", {}, h("span", { class: `swatch fill-${kind}`, "aria-hidden": "true" }), label(kind)), () => {});
}
