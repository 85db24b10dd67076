// What is wrong, since when, and what to do: a few sentences, drawn from the same figures as everything below them.

import { clock, count, listed, percent, replicaName, seconds, share, span } from "./format.js";
import { h, keyed, set, text } from "./dom.js";
import { dominant, fallingGrades, idleReplicas, restarted, SETTLED_S, slowReplicas, unservedModels } from "./unevenness.js";
import { countAccepting, stateOf } from "./tables.js";
import { WEAK } from "./tiles.js";
import { summed, verification } from "./sums.js";

const SHOWN_MAX = 7;
const RECENT = 12; // steps: a minute of 5 s
const BEFORE_MIN = 12; // steps with traffic that there must be to compare with
const FELL = 0.1; // of the hit rate: ten points
const ROSE = 2; // times the time to first token
const TTFT_S = 0.2; // below it nobody minds
const REPLAYS = 0.5; // of all hits
const ADVISED_MIN = 5; // requests that lost by something, before that stands above everything
const OFF = 0.1; // of verified prompt tokens, between what was predicted and what engines said
const FAILING = 0.01, FAILED_MIN = 3; // of the last minute's requests
const WAITED_S = 1; // in the queue, by one in ten of those that waited

// Rows {key, kind, words, to?} by importance: one row of kind "good" if nothing needs attention. The steps of the last
// minute and its percentiles are known if the router keeps series.
export function findAttention(page, history) {
  const { step_s, points } = page.timeline;
  const seen = { ...page, timeline: { step_s, points: points.filter(({ at_s }) => at_s + step_s <= page.now_s) } };
  const minute = history.has ? history.lastMinute(page).points : [], last = history.lastPercentiles();
  const strained = [...queued(minute, last), ...slow(seen.timeline.points), ...full(seen)];
  const all = [...replicasDown(seen), ...unservedModels(seen), ...failing(minute), ...dominant(seen, strained.length > 0), ...strained, ...slowReplicas(seen), ...idleReplicas(seen), ...unshared(seen), ...fell(seen.timeline.points), ...fallingGrades(seen), ...mispredicted(seen), ...advised(seen), ...flattered(seen)];
  if (all.length) all.splice(SHOWN_MAX - 1, 0, ...restarted(seen));
  return all.length ? all.slice(0, SHOWN_MAX) : [{ key: "fine", kind: "good", words: quiet(seen) }];
}

export function showAttention(element, page, history) {
  keyed(element, findAttention(page, history), ({ key }) => key, () => h("li", {}, h("span", { class: "tag" }), h("span"), h("a")), (item, row) => {
    const [mark, words, link] = item.children;
    set(mark, "class", `tag ${row.kind}`);
    text(mark, { bad: "critical", fair: "warning", good: "ok" }[row.kind]);
    text(words, row.words);
    link.hidden = !row.to;
    if (row.to) {
      set(link, "href", `#${row.to[0]}`);
      text(link, row.to[1]);
    }
  });
}

function quiet(seen) {
  if (!seen.totals.requests) return "No requests yet.";
  const since = seen.uptime_s < SETTLED_S ? `since this router started ${span(seen.uptime_s)} ago` : `for ${span(SETTLED_S)}`;
  return `No problems ${since}: replicas are ready, and hit rate and times are steady.`;
}

function replicasDown({ replicas }) {
  const down = replicas.filter((replica) => stateOf(replica)[1] === "bad");
  if (replicas.length === 0) return [{ key: "none", kind: "bad", words: "No replicas: no request can be served.", to: ["replicas-title", "Replicas"] }];
  if (down.length === 0) return [];
  const named = listed(down, (each) => `${replicaName(each)} (${each.why || stateOf(each)[0]})`);
  return [{ key: "down", kind: "bad", words: `${down.length} of ${replicas.length} replicas receive no requests: ${named}. ${countAccepting(replicas)} take requests.`, to: ["replicas-title", "Replicas"] }];
}

function failing(minute) {
  const sum = summed(minute), failed = sum.errors_5xx + sum.broken, part = share(failed, sum.requests);
  if (failed < FAILED_MIN || part < FAILING) return [];
  return [{ key: "failing", kind: "bad", words: `${percent(part)} of the last minute's requests failed: ${count(failed)} of ${count(sum.requests)}.`, to: ["traffic-title", "Requests"] }];
}

function queued(minute, last) {
  const { shed } = summed(minute), waited_s = last?.waited_p90_s ?? 0;
  if (shed > 0) return [{ key: "shed", kind: "bad", words: `${count(shed)} requests of the last minute were rejected: the fleet is full.`, to: ["traffic-title", "Requests"] }];
  if (waited_s < WAITED_S) return [];
  return [{ key: "queued", kind: "fair", words: `Requests wait in the router's queue: the 90th percentile is ${seconds(waited_s)}.`, to: ["load-title", "Load"] }];
}

// Other routers, or clients of the engines, whose work this router does not see.
function unshared({ router }) {
  if (!router?.unshared) return [];
  return [{ key: "unshared", kind: "bad", words: `Routers share no state, so prompts that another router placed are recomputed: ${router.unshared}. Set peering.redis_url for all routers.` }];
}

const hits = (points) => {
  const { hit_tokens, prompt_tokens } = summed(points);
  return share(hit_tokens, prompt_tokens);
};

// The last minute against what was usual before it; and the last moment at which it was nearer to the usual.
function fell(points) {
  const busy = points.filter((point) => point.prompt_tokens > 0);
  const before = busy.slice(0, -RECENT), now = hits(busy.slice(-RECENT));
  if (before.length < BEFORE_MIN) return [];
  const usual = median(before.map((point) => hits([point])));
  if (usual - now < FELL) return [];
  const since = turned(busy, (at) => hits(busy.slice(Math.max(0, at - 5), at + 1)) >= (usual + now) / 2);
  return [{ key: "fell", kind: "bad", words: `Hit rate is ${percent(now, 0)}, usually ${percent(usual, 0)}; it fell at ${clock(since.at_s)}.`, to: ["reasons-title", "Reasons"] }];
}

function slow(points) {
  const busy = points.filter((point) => point.ttft_p90_s !== null);
  const before = busy.slice(0, -RECENT), recent = busy.slice(-RECENT);
  if (before.length < BEFORE_MIN) return [];
  const usual = median(before.map((point) => point.ttft_p90_s)), now = median(recent.map((point) => point.ttft_p90_s));
  if (now < TTFT_S || now < ROSE * usual) return [];
  const since = turned(busy, (at) => median(busy.slice(Math.max(0, at - 5), at + 1).map((point) => point.ttft_p90_s)) <= (usual + now) / 2);
  return [{ key: "slow", kind: "bad", words: `The 90th percentile of the time to first token is ${seconds(now)}, usually ${seconds(usual)}; since ${clock(since.at_s)}.`, to: ["ttft-title", "Times"] }];
}

function full({ replicas }) {
  const serving = replicas.filter((replica) => stateOf(replica)[1] === "good");
  const tight = serving.filter((replica) => replica.kv_usage >= 0.95 || (replica.window && replica.in_flight >= replica.window));
  if (tight.length === 0) return [];
  const all = tight.length === serving.length;
  return [{ key: "full", kind: all ? "bad" : "fair", words: `${all ? "All serving" : `${tight.length} of ${serving.length} serving`} replicas are at their limit of KV memory or open requests.`, to: ["replicas-title", "Replicas"] }];
}

function mispredicted({ timeline }) {
  const { share: part, high } = verification(summed(timeline.points.slice(-5 * RECENT)));
  if (part === null || part < WEAK || high < OFF) return [];
  return [{ key: "off", kind: "fair", words: `Engines find ${percent(high, 0)} fewer cached tokens than predicted: check the confidence in the replicas' cache state.`, to: ["replicas-title", "Replicas"] }];
}

// A loss without a case in the last minute may be mended. It stays in the list of advice, in grey, until it has faded.
// Spilled tokens are a choice that saved waiting; if the fleet is strained, other rows say so.
function advised({ advice }) {
  const worst = advice.find((row) => row.change !== "spilled" && row.lost_tokens > 0 && row.requests >= ADVISED_MIN && row.recent !== false);
  if (!worst) return [];
  const lost = worst.lost_tokens_per_h > 0 ? `${count(worst.lost_tokens_per_h)} tokens an hour can be saved` : `${worst.cost || `${count(worst.lost_tokens)} tokens`} were recomputed`;
  return [{ key: "advice", kind: "fair", words: `${lost}: ${worst.text}`, to: ["advice-title", "Advice"] }];
}

function flattered({ timeline }) {
  const { replay_tokens, hit_tokens, genuine_tokens, prompt_tokens } = summed(timeline.points);
  const replays = share(replay_tokens, hit_tokens);
  if (replays === null || replays < REPLAYS) return [];
  return [{ key: "replays", kind: "fair", words: `${percent(replays, 0)} of hits are replays of identical prompts, as in a load test; the genuine hit rate is ${percent(share(genuine_tokens, prompt_tokens), 0)}.`, to: ["rate-title", "Hit rate"] }];
}

// The point behind the last one that was as usual.
function turned(points, usual) {
  for (let at = points.length - 1; at >= 0; at--) if (usual(at)) return points[Math.min(at + 1, points.length - 1)];
  return points[0];
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}
