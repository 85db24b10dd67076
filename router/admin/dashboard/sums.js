// Sums of steps, and what is made of them: rates, shares, rows of figures.

import { share } from "./format.js";

const TOKENS = ["prompt_tokens", "predicted_tokens", "hit_tokens", "genuine_tokens", "replay_tokens", "verified_tokens", "verified_hit_tokens", "verified_predicted_tokens", "completion_tokens"];
const REQUESTS = ["requests", "errors_5xx", "errors_4xx", "shed", "left", "broken", "retries"];
const TABLES = ["misses", "places", "held"]; // tokens by reason, by place, and by the cause of those held elsewhere
const ROWS_MAX = 120; // of a table beside a chart
const MINUTE_S = 60;

// What steps add up to. A step that does not count something adds nothing to it.
export function summed(points) {
  const total = Object.fromEntries(TABLES.map((name) => [name, {}]));
  for (const name of [...REQUESTS, ...TOKENS]) total[name] = points.reduce((sum, point) => sum + (point[name] ?? 0), 0);
  for (const name of TABLES) for (const point of points) for (const [kind, tokens] of Object.entries(point[name] ?? {})) total[name][kind] = (total[name][kind] ?? 0) + tokens;
  return total;
}

// One rate, hits of all prompt tokens; and of the tokens whose engine told, what it said.
export function ratesOf(sum) {
  return { hit: share(sum.hit_tokens, sum.prompt_tokens), genuine: share(sum.genuine_tokens, sum.prompt_tokens), replay: share(sum.replay_tokens, sum.prompt_tokens), verified: share(sum.verified_hit_tokens, sum.verified_tokens) };
}

// Share of prompt tokens whose engine told how many it found, and by how much predictions of those were too high.
export function verification(sum) {
  return { share: share(sum.verified_tokens, sum.prompt_tokens), high: share(sum.verified_predicted_tokens - sum.verified_hit_tokens, sum.verified_tokens) };
}

// Steps in stretches of at least a minute, at most ROWS_MAX of them, each with its sum.
export function stretches(points, step_s) {
  const wide_s = Math.max(MINUTE_S, step_s * Math.ceil(points.length / ROWS_MAX));
  const found = new Map();
  for (const point of points) {
    const at_s = Math.floor(point.at_s / wide_s) * wide_s;
    if (!found.has(at_s)) found.set(at_s, []);
    found.get(at_s).push(point);
  }
  return [...found].map(([at_s, steps]) => ({ at_s, steps, over_s: steps.length * step_s, sum: summed(steps) }));
}

// Requests by how they ended, per second; those of a router that does not tell endings are all `ok`.
export function outcomes(sum, over_s) {
  const told = { failed: sum.errors_5xx + sum.broken, shed: sum.shed, wrong: sum.errors_4xx, left: sum.left };
  const rest = Object.values(told).reduce((total, value) => total + value, 0);
  return Object.fromEntries(Object.entries({ ok: Math.max(0, sum.requests - rest), ...told }).map(([kind, value]) => [kind, value / over_s]));
}

// Percentiles of steps cannot be added up: of a stretch the highest one is told.
export function highest(steps, names) {
  return Object.fromEntries(Object.entries(names).map(([kind, name]) => [kind, steps.reduce((max, step) => (step[name] === null || step[name] === undefined ? max : Math.max(max ?? 0, step[name])), null)]));
}
