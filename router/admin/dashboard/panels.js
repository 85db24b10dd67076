// The charts of the page: which figures each has, and what is said of it.

import { count, percent, rate, seconds } from "./format.js";
import { set } from "./dom.js";
import { Chart, choice } from "./charts.js";
import { named, REASONS } from "./reasons.js";
import { highest, outcomes, ratesOf, stretches, summed, verification } from "./sums.js";
import { WEAK } from "./tiles.js";

const SMOOTH_S = 30;
const TALL = 320; // pixels: as tall as the table beside it
const COLOURS = { replica_lost: "replica-lost" };
const TIMES = { ttft: "First token", e2e: "End to end", itl: "Between tokens" };
const LOADS = { open: "Open requests", output: "Output tokens" };
const NOUNS = { ttft: "Time to first token", e2e: "Time to the last token", itl: "Time between tokens", open: "Open requests", output: "Output tokens per second" };
const $ = (id) => document.getElementById(id);

export class Panels {
  constructor(view) {
    const zoom = { zoomed: (from_s, to_s) => view.zoomTo(from_s, to_s), back: () => view.choose(view.range) };
    const share = (value) => percent(value, 0);
    this.rate = new Chart($("rate"), { ...zoom, noun: "Hit rate", show: share, top: () => 1, series: [
      { kind: "genuine", name: "genuine", colour: "--accent-soft" },
      { kind: "hit", name: "hit rate", colour: "--accent", width: 2.5 },
      { kind: "verified", name: "verified by engines", colour: "--verified", width: 1.5, dash: [3, 4] },
    ] });
    this.times = new Chart($("ttft"), { ...zoom, noun: "Times of requests", show: seconds, series: [
      { kind: "p50", name: "p50", colour: "--accent" },
      { kind: "p90", name: "p90", colour: "--faint", width: 1.5 },
      { kind: "p99", name: "p99", colour: "--line-3", width: 1 },
    ] });
    this.outcomes = new Chart($("traffic"), { ...zoom, noun: "Requests per second, by outcome", show: rate, stacked: true, series: [
      { kind: "ok", name: "served", colour: "--accent-soft" },
      { kind: "left", name: "client disconnected", colour: "--new" },
      { kind: "wrong", name: "4xx", colour: "--evicted" },
      { kind: "shed", name: "rejected (429)", colour: "--spilled" },
      { kind: "failed", name: "5xx or broken", colour: "--failed" },
    ] });
    this.load = new Chart($("load"), { ...zoom, noun: "Load", show: rate, series: [
      { kind: "in_flight", name: "in flight", colour: "--accent" },
      { kind: "waiting", name: "waiting, at most", colour: "--failed" },
      { kind: "output", name: "output tokens per second", colour: "--accent" },
    ] });
    this.reasons = new Chart($("reasons"), { ...zoom, noun: "Tokens computed per second, by reason", show: (value) => count(value ?? 0), stacked: true, height: TALL, series: REASONS.map((kind) => ({ kind, name: named(kind), colour: `--${COLOURS[kind] ?? kind}` })) });
    this.chosen = { times: "ttft", load: "open" };
    this.marks = { times: choice($("ttft-choice"), "Times", TIMES, (value) => this.choose("times", value)), load: choice($("load-choice"), "Load", LOADS, (value) => this.choose("load", value)) };
    for (const [which, mark] of Object.entries(this.marks)) mark(this.chosen[which]);
  }

  get all() {
    return [this.rate, this.times, this.outcomes, this.load, this.reasons];
  }

  repaint() {
    for (const chart of this.all) chart.repaint();
  }

  choose(which, value) {
    this.chosen[which] = value;
    this.marks[which](value);
    if (this.drawn) this.update(this.drawn, this.sum, this.has);
  }

  // `drawn`: {points, step_s, from_s, to_s}; `sum` is of all its points, `has` whether the router keeps series.
  update(drawn, sum, has) {
    Object.assign(this, { drawn, sum, has });
    this.hits();
    this.durations();
    this.requests();
    this.loads();
    this.misses();
  }

  // `values(stretch)` of steps that are known, one by one in the chart and by the minute in its table.
  fill(chart, values, label, smooth = 1) {
    const { points, step_s, from_s, to_s } = this.drawn;
    const of = (steps) => ({ steps, sum: summed(steps), over_s: steps.length * step_s });
    const shown = points.map((point, at) => ({ at_s: point.at_s, values: point.known ? values(of(points.slice(Math.max(0, at - smooth + 1), at + 1))) : {} }));
    const rows = () => stretches(points.filter(({ known }) => known), step_s).map((each) => ({ at_s: each.at_s, values: values(each) }));
    chart.update({ points: shown, rows, from_s, to_s, step_s, label });
    return shown;
  }

  hits() {
    const { genuine, hit, verified } = ratesOf(this.sum), part = verification(this.sum).share ?? 0;
    const replays = this.sum.replay_tokens > 0; // without them genuine hits are all hits, and the line would hide another
    set($("rate"), "data-verified", part < WEAK ? "weak" : "well");
    const values = ({ sum }) => ({ ...ratesOf(sum), genuine: replays ? ratesOf(sum).genuine : null });
    this.fill(this.rate, values, `Hit rate: ${percent(hit)}, genuine ${percent(genuine)}; engines verified ${percent(part, 0)} of tokens and found ${percent(verified)}.`, Math.max(1, Math.round(SMOOTH_S / this.drawn.step_s)));
  }

  durations() {
    const stem = this.chosen.times, names = { p50: `${stem}_p50_s`, p90: `${stem}_p90_s`, p99: `${stem}_p99_s` };
    const shown = this.fill(this.times, ({ steps }) => highest(steps, names), `${NOUNS[stem]}, percentiles of each step.`);
    const latest = shown.findLast(({ values }) => values.p50 !== null && values.p50 !== undefined)?.values ?? {};
    this.times.plot.setAttribute("aria-label", `${this.times.plot.getAttribute("aria-label")} Latest: median ${seconds(latest.p50)}, 90th percentile ${seconds(latest.p90)}.`);
  }

  requests() {
    const { failed, shed } = outcomes(this.sum, 1);
    const told = this.has ? ` ${count(failed)} failed, ${count(shed)} rejected.` : "";
    this.fill(this.outcomes, ({ sum, over_s }) => outcomes(sum, over_s), `Requests per second: ${count(this.sum.requests)} in all.${told}`);
  }

  loads() {
    const which = this.chosen.load, most = (steps, name) => highest(steps, { most: name }).most;
    const values = which === "output" ? ({ sum, over_s }) => ({ output: this.has ? sum.completion_tokens / over_s : null }) : ({ steps }) => ({ in_flight: most(steps, "in_flight"), waiting: most(steps, "waiting_max") });
    this.fill(this.load, values, `${NOUNS[which]} of all replicas.`);
  }

  misses() {
    const words = Object.entries(this.sum.misses).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([reason, tokens]) => `${named(reason)} ${count(tokens)}`);
    const values = ({ sum, over_s }) => Object.fromEntries(Object.entries(sum.misses).map(([reason, tokens]) => [reason, tokens / over_s]));
    this.fill(this.reasons, values, `Computed tokens; most: ${words.join(", ") || "none"}.`);
  }
}
