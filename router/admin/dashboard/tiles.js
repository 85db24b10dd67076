// Headline figures. Each says what it is of: the time that the charts show, the last minute, or now.

import { count, percent, rate, seconds, share } from "./format.js";
import { bar, h, keyed, set, text } from "./dom.js";
import { avoidable } from "./reasons.js";
import { ratesOf, summed, verification } from "./sums.js";
import { countAccepting } from "./tables.js";

const MUCH = 0.05; // of prompt tokens, to be lost without need
const FAILING = 0.01; // of requests
export const WEAK = 0.2; // of prompt tokens verified, below which that says little

const NO_SERIES = "this router has no time series";

export function showTiles(element, seen, history, shown, named) {
  const minute = history.lastMinute(seen), last = history.lastPercentiles();
  const rows = [hits(seen, shown, named), lost(shown, named), errors(seen, history, shown, named), waiting(seen, history, last), ...traffic(seen, history, minute), ...times(seen, last)];
  const make = ({ id }) => h("div", { id: `tile-${id}`, class: "tile" }, h("dt"), h("dd", { class: "value" }), h("dd", { class: "strip", "aria-hidden": "true" }), h("dd"), h("dd", { class: "more" }), h("dd", { class: "more" }));
  keyed(element, rows, ({ id }) => id, make, (tile, row) => {
    const [name, value, strip, ...notes] = tile.children;
    text(name, row.name);
    text(value, row.value);
    value.classList.toggle("much", Boolean(row.bad));
    strip.hidden = !row.parts;
    if (row.parts) bar(strip, row.parts);
    notes.forEach((note, at) => {
      text(note, row.notes[at] ?? "");
      note.hidden = at === 2 && row.notes.length < 3;
      note.classList.toggle("weak", at === row.weak);
    });
    set(tile, "title", row.title);
  });
}

function hits(seen, shown, named) {
  const { hit, genuine, replay } = ratesOf(shown), { totals } = seen;
  const parts = [{ class: "fill-genuine", share: genuine }, { class: "fill-replay", share: replay }];
  const notes = [`genuine ${percent(genuine)} · replay ${percent(replay)}`, `${percent(share(totals.hit_tokens, totals.prompt_tokens))} since start`, verified(shown)];
  const title = "Share of prompt tokens that hit the cache: by the engine's count if an answer has it, else as predicted.";
  return { id: "hit", name: `Hit rate, ${named}`, value: percent(hit), parts, notes, weak: (verification(shown).share ?? 0) < WEAK ? 2 : undefined, title };
}

function verified(sum) {
  const { share: part, high } = verification(sum);
  if (!part) return "no engine reported cached tokens";
  const off = Math.abs(100 * high).toFixed(1);
  return `engines verified ${percent(part, 0)}: ${off === "0.0" ? "as predicted" : `${off} points too ${high > 0 ? "high" : "low"}`}`;
}

function lost(shown, named) {
  const part = share(avoidable(shown.misses), shown.prompt_tokens), { hit } = ratesOf(shown);
  return { id: "avoidable", name: `Avoidable misses, ${named}`, bad: part >= MUCH, value: percent(part), notes: ["of prompt tokens", hit === null ? "" : `${percent(hit + part)} is possible`] };
}

// 5xx, and streams that began well and broke. Requests that were turned away (429) or left count apart.
function errors(seen, history, shown, named) {
  if (!history.has) {
    const models = seen.models ?? [], [requests, failed] = ["requests", "failed"].map((name) => models.reduce((sum, model) => sum + model[name], 0));
    const part = share(failed, requests);
    return { id: "errors", name: "Errors, since start", bad: part >= FAILING, value: percent(part), notes: models.length ? [`${count(failed)} of ${count(requests)} requests`, ""] : [NO_SERIES, ""] };
  }
  const failed = shown.errors_5xx + shown.broken, part = share(failed, shown.requests);
  const others = [[shown.errors_4xx, "4xx"], [shown.shed, "rejected"], [shown.left, "disconnected"]].filter(([number]) => number).map(([number, name]) => `${count(number)} ${name}`);
  return { id: "errors", name: `Errors, ${named}`, bad: part >= FAILING, value: percent(part), notes: [`${count(failed)} of ${count(shown.requests)} requests`, others.join(" · ") || "none rejected"], title: "Answers with 5xx, and broken streams" };
}

// In the router's queue; those that are served and those that wait within engines stand beside it.
function waiting({ models, replicas }, history, last) {
  const ours = models?.reduce((sum, model) => sum + model.waiting, 0) ?? history.recent?.points.findLast(({ known, waiting }) => known && waiting !== undefined)?.waiting;
  const sum = (name) => replicas.reduce((total, replica) => total + (replica[name] ?? 0), 0);
  const waited = last?.waited_p90_s ? ` · waited p90 ${seconds(last.waited_p90_s)}` : "";
  return { id: "waiting", name: "Waiting, now", value: count(ours === undefined ? ours : Math.round(ours)), notes: [`${count(sum("waiting"))} more in engines${waited}`, `${count(sum("in_flight"))} in flight · ${countAccepting(replicas)} take requests`], title: "Requests in the router's queue" };
}

function traffic(seen, history, { points, over_s }) {
  const sum = summed(points), over = seen.uptime_s < 60 ? `over ${Math.round(over_s)} s` : "over the last minute", { totals } = seen;
  return [
    { id: "requests", name: "Requests/s", value: rate(sum.requests / over_s), notes: [over, `${count(totals.requests)} since start`] },
    { id: "output", name: "Output tokens/s", value: rate(history.has ? sum.completion_tokens / over_s : null), notes: history.has ? [over, `${rate(sum.prompt_tokens / over_s)} prompt tokens/s`] : [NO_SERIES, ""] },
  ];
}

function times({ totals }, last) {
  const of = (id, name, stem) => ({ id, name, value: seconds(last?.[`${stem}_p50_s`]), notes: [`p90 ${seconds(last?.[`${stem}_p90_s`])} · p99 ${seconds(last?.[`${stem}_p99_s`])}`, "p50 of the last minute"] });
  const rows = [of("ttft", "Time to first token", "ttft"), of("e2e", "End to end", "e2e"), of("itl", "Between tokens", "itl")];
  if (last) return rows;
  rows[0].value = seconds(totals.ttft_p50_s);
  rows[0].notes = [`p90 ${seconds(totals.ttft_p90_s)} · p99 ${seconds(totals.ttft_p99_s)}`, "p50 of the last 10 min"];
  return rows;
}
