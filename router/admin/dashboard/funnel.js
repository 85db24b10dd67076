// The funnel: where each prompt token ended, stage by stage, from asked for to hit. The router says which places lose
// tokens before which stage (router/core/types/cache_misses.py); a place without words here is called by its own name.

import { count, percent, share } from "./format.js";
import { bar, h, keyed, set, text } from "./dom.js";
import { named } from "./reasons.js";

const ASKED = "asked";
const STAGES = { asked: "Requested", seen: "Seen before", unchanged: "Unchanged since", kept: "Still cached", reached: "Cached at its replica", hit: "Hit" };
const MEANING = {
  unsupported: "the router cannot parse this prompt",
  never_seen: "in no earlier prompt with the same beginning",
  tail: "a partial block, and the last token, which engines always compute",
  rewritten: "an earlier prompt had them after a part that differs now",
  identity: "cached for another model, adapter, salt or tenant",
  replica_lost: "the replica with them was removed or restarted",
  evicted_here: "evicted by the replica of the request",
  evicted_by_others: "evicted by other replicas",
  cached_on_other_replica: "another replica has them cached, but computing elsewhere was cheaper",
  mispredicted: "predicted as cached, but the engine reported a miss",
  tier: "loaded from memory or files outside the GPU",
  pulled: "transferred from another replica's memory",
  replay: "in a prompt identical to an earlier one",
  gpu_hit: "in a new prompt",
};
const SHOWN_MIN = 0.0005; // of the tokens asked for: less is 0.0 %

// Stages with what reaches each, what is lost before it and, at the last one, how it was found. `stages` is the
// router's table, `sum` what the steps add up to.
export function stagesOf(stages, { places, held }) {
  const total = Object.values(places).reduce((all, tokens) => all + tokens, 0);
  const some = (names) => names.map((place) => ({ place, tokens: places[place] ?? 0 })).filter(({ tokens }) => tokens > 0);
  const lost = Object.values(stages).flat(), last = Object.keys(stages).at(-1);
  let left = total;
  const rows = Object.entries(stages).map(([stage, names]) => {
    const gone = some(names);
    left -= gone.reduce((all, { tokens }) => all + tokens, 0);
    return { stage, left, gone, found: stage === last ? some(Object.keys(places).filter((place) => !lost.includes(place))) : [], why: names.includes("cached_on_other_replica") ? held : {} };
  });
  return { total, rows: [{ stage: ASKED, left: total, gone: [], found: [], why: {} }, ...rows] };
}

export function showFunnel(card, element, stages, sum) {
  card.hidden = !stages || !Object.keys(sum.places).length;
  if (card.hidden) return;
  const { total, rows } = stagesOf(stages, sum);
  const make = () => h("li", { class: "stage" }, h("span", { class: "stage-name" }), h("span", { class: "strip tall", "aria-hidden": "true" }), h("span", { class: "stage-left" }), h("ul", { class: "legend" }));
  keyed(element, rows, ({ stage }) => stage, make, (item, row) => {
    const [name, strip, left, legend] = item.children;
    set(item, "data-stage", row.stage);
    text(name, STAGES[row.stage] ?? named(row.stage));
    const kept = row.found.length ? row.found.map(({ place, tokens }) => ({ class: `fill-${place}`, share: share(tokens, total) })) : [{ class: "fill-left-over", share: share(row.left, total) }];
    bar(strip, [...kept, ...row.gone.map(({ place, tokens }) => ({ class: `fill-${place}`, share: share(tokens, total) }))]);
    text(left, row.stage === ASKED ? `${count(total)} tokens` : percent(share(row.left, total)));
    tell(legend, row, total);
  });
}

// What is lost before a stage and how the last one was found, in words; and why not where it was held.
function tell(legend, { gone, found, why }, total) {
  const parts = [...found.map((part) => ({ ...part, sign: "" })), ...gone.map((part) => ({ ...part, sign: "−" }))].filter(({ tokens }) => tokens / total >= SHOWN_MIN);
  const make = ({ place }) => h("li", { title: MEANING[place] }, h("span", { class: `swatch fill-${place}`, "aria-hidden": "true" }), h("span"));
  keyed(legend, parts, ({ place }) => place, make, (item, { place, tokens, sign }) => {
    const whole = Object.values(why).reduce((all, each) => all + each, 0);
    const causes = Object.entries(why).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([cause, each]) => `${named(cause)} ${percent(share(each, whole), 0)}`);
    const because = place === "cached_on_other_replica" && causes.length ? ` (not placed there: ${causes.join(", ")})` : "";
    text(item.lastElementChild, `${named(place)} ${sign}${percent(share(tokens, total))}${because}`);
  });
}
