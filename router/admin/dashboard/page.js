// The page from one answer of /admin/observatory: every part is filled in place.

import { count, percent, rate, seconds, share, span } from "./format.js";
import { bar, h, keyed, text } from "./dom.js";
import { showAttention } from "./attention.js";
import { Chart } from "./charts.js";
import { Decisions } from "./decisions.js";
import { PromptMap } from "./map.js";
import { avoidable, named, REASONS, showReasons, summed } from "./reasons.js";
import { showAdvice, showGroups, showReplicas } from "./tables.js";

const SMOOTH = 6; // steps: half a minute
const MINUTE_S = 60;
const AXIS_S_MIN = 120; // of a router that has only begun
const MUCH = 0.05; // of prompt tokens, to be lost without need
const $ = (id) => document.getElementById(id);

export class Page {
  constructor() {
    const rates = [
      { kind: "genuine", name: "genuine" },
      { kind: "actual", name: "actual" },
      { kind: "predicted", name: "predicted" },
    ];
    const times = [{ kind: "p50", name: "p50" }, { kind: "p90", name: "p90" }];
    this.rate = new Chart($("rate"), { series: rates, show: (value) => percent(value, 0), top: () => 1, noun: "Hit rate" });
    this.ttft = new Chart($("ttft"), { series: times, show: seconds, noun: "Time to first token" });
    this.reasons = new Chart($("reasons"), { series: REASONS.map((kind) => ({ kind, name: named(kind) })), show: (value) => count(value ?? 0), stacked: true, height: 210, noun: "Tokens computed per second, by reason" });
    this.map = new PromptMap($("map"));
    this.decisions = new Decisions($("decisions"), $("newer"));
  }

  show(seen) {
    const { step_s, points: all } = seen.timeline;
    const points = all.filter((point) => point.at_s + step_s <= seen.now_s); // the step under way says nothing yet
    const recent = summed(all);
    text($("about"), `${seen.version} · up ${span(seen.uptime_s)}`);
    showAttention($("attention"), { ...seen, timeline: { step_s, points } });
    showTiles($("tiles"), seen, recent, points);
    const from_s = seen.now_s - Math.max(AXIS_S_MIN, seen.uptime_s + step_s);
    this.charts(points.filter(({ at_s }) => at_s >= from_s), step_s);
    showReasons($("reasons-table"), recent, seen.totals);
    showAdvice($("advice"), seen.advice, seen.now_s);
    this.map.update(seen.map, seen.replicas);
    showReplicas($("replicas"), seen.replicas);
    showGroups($("groups"), seen.groups);
    this.decisions.name(seen.replicas);
    this.decisions.update(seen.decisions);
  }

  charts(points, step_s) {
    const minutes = byMinute(points);
    const rates = points.map((point, at) => ({ at_s: point.at_s, values: ratesOf(summed(points.slice(Math.max(0, at - SMOOTH + 1), at + 1))) }));
    const last = rates.at(-1)?.values ?? {};
    this.rate.update(rates, minutes.map(({ at_s, sum }) => ({ at_s, values: ratesOf(sum) })), `Hit rate over the last ten minutes. Now: actual ${percent(last.actual)}, predicted ${percent(last.predicted)}, genuine ${percent(last.genuine)}.`);
    const times = points.map((point) => ({ at_s: point.at_s, values: { p50: point.ttft_p50_s, p90: point.ttft_p90_s } }));
    const latest = times.findLast(({ values }) => values.p50 !== null)?.values ?? {};
    this.ttft.update(times, minutes.map(({ at_s, steps }) => ({ at_s, values: worst(steps) })), `Time to first token over the last ten minutes. Latest: median ${seconds(latest.p50)}, 90th percentile ${seconds(latest.p90)}.`);
    const missed = points.map((point) => ({ at_s: point.at_s, values: perSecond(point.misses, step_s) }));
    const words = Object.entries(summed(points).misses).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([reason, tokens]) => `${named(reason)} ${count(tokens)}`);
    this.reasons.update(missed, minutes.map(({ at_s, sum, steps }) => ({ at_s, values: perSecond(sum.misses, steps.length * step_s) })), `Tokens computed over the last ten minutes; most: ${words.join(", ") || "none"}.`);
  }
}

function showTiles(element, seen, recent, points) {
  const hit = share(recent.hit_tokens, recent.prompt_tokens), predicted = share(recent.predicted_tokens, recent.prompt_tokens);
  const genuine = share(recent.genuine_tokens, recent.prompt_tokens), replay = share(recent.replay_tokens, recent.prompt_tokens);
  const lost = share(avoidable(recent.misses), recent.prompt_tokens);
  const { totals } = seen;
  const last = points.slice(-12), per = last.length ? summed(last).requests / (last.length * seen.timeline.step_s) : null;
  const rows = [
    { id: "hit", name: "Hit rate, last 10 min", value: percent(hit), note: `genuine ${percent(genuine)} · replay ${percent(replay)}`, more: `${percent(share(totals.hit_tokens, totals.prompt_tokens))} since start`, parts: [{ class: "fill-genuine", share: genuine }, { class: "fill-replay", share: replay }] },
    { id: "avoidable", name: "Avoidable misses", bad: lost >= MUCH, value: percent(lost), note: "of prompt tokens", more: hit === null ? "" : `${percent(hit + lost)} is within reach` },
    { id: "predicted", name: "Predicted hit rate", value: percent(predicted), note: hit === null ? "" : `${(100 * Math.abs(predicted - hit)).toFixed(1)} points too ${predicted >= hit ? "high" : "low"}`, more: `${percent(share(totals.predicted_tokens, totals.prompt_tokens))} since start` },
    { id: "ttft", name: "Time to first token", value: seconds(totals.ttft_p50_s), note: `p90 ${seconds(totals.ttft_p90_s)}`, more: `p99 ${seconds(totals.ttft_p99_s)}` },
    { id: "diversity", name: "Prompt diversity", value: totals.diversity === null ? percent(null) : totals.diversity.toFixed(2), note: "1 = all differ", more: "" },
    { id: "requests", name: "Requests per second", value: rate(per), note: "over the last minute", more: `${count(totals.requests)} since start` },
  ];
  const make = (row) => h("div", { id: `tile-${row.id}`, class: "tile" }, h("dt", {}, row.name), h("dd", { class: "value" }), h("dd", { class: "strip", "aria-hidden": "true" }), h("dd"), h("dd", { class: "more" }));
  keyed(element, rows, ({ id }) => id, make, (tile, row) => {
    const [, value, strip, note, more] = tile.children;
    text(value, row.value);
    value.classList.toggle("much", Boolean(row.bad));
    strip.hidden = !row.parts;
    if (row.parts) bar(strip, row.parts);
    text(note, row.note);
    text(more, row.more);
  });
}

function ratesOf(sum) {
  return { actual: share(sum.hit_tokens, sum.prompt_tokens), predicted: share(sum.predicted_tokens, sum.prompt_tokens), genuine: share(sum.genuine_tokens, sum.prompt_tokens) };
}

function perSecond(misses, over_s) {
  return Object.fromEntries(Object.entries(misses).map(([reason, tokens]) => [reason, tokens / over_s]));
}

function byMinute(points) {
  const found = new Map();
  for (const point of points) {
    const at_s = Math.floor(point.at_s / MINUTE_S) * MINUTE_S;
    found.set(at_s, [...(found.get(at_s) ?? []), point]);
  }
  return [...found].map(([at_s, steps]) => ({ at_s, steps, sum: summed(steps) }));
}

// Percentiles of steps cannot be added up: of a minute the highest one is told.
function worst(steps) {
  const highest = (name) => steps.reduce((max, step) => (step[name] === null ? max : Math.max(max ?? 0, step[name])), null);
  return { p50: highest("ttft_p50_s"), p90: highest("ttft_p90_s") };
}
