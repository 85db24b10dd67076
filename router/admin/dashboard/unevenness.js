// What needs attention in one replica, one tenant, or a young router, while the sums of the fleet may look usual.

import { listed, NAMED_MAX, percent, replicaName, span } from "./format.js";
import { UNNAMED } from "./tables.js";

const FALLS_MIN = 3; // of a replica's grade, in the ten minutes for which the router counts them
const DOMINANT = 0.6; // of the computed prompt tokens of the last minutes
export const SETTLED_S = 600; // after a start: as long as the router's timeline
const REPLICAS = ["replicas-title", "Replicas"];

export function slowReplicas({ replicas }) {
  const found = replicas.filter(({ ready, slow }) => ready && slow);
  if (found.length === 0) return [];
  const words = listed(found, (each) => `${replicaName(each)} (${each.slow}; it gets ${percent(each.request_share, 0)} of all requests)`);
  return [{ key: "slow-replica", kind: "fair", words: `${found.length === 1 ? "1 replica is" : `${found.length} replicas are`} slower than the peers: ${words}.`, to: REPLICAS }];
}

export function idleReplicas({ replicas }) {
  const found = replicas.filter(({ idle, slow }) => idle && !slow);
  if (found.length === 0) return [];
  return [{ key: "idle", kind: "fair", words: `${found.length === 1 ? "1 ready replica gets" : `${found.length} ready replicas get`} almost no requests: ${listed(found, (each) => `${replicaName(each)} (${each.idle})`)}.`, to: REPLICAS }];
}

// Models that clients requested a moment ago and that no ready replica serves: each request gets 503.
export function unservedModels({ unserved_models: found = [] }) {
  return found.slice(0, NAMED_MAX).map(({ model, why }) => ({ key: `model ${model}`, kind: "bad", words: `Model ${model} has no ready replica, and its requests get 503: ${why}.`, to: ["models-title", "Models"] }));
}

// A grade that falls again and again: events are missing, and replays repair it for a while.
export function fallingGrades({ replicas }) {
  const found = replicas.filter(({ grade_falls: falls }) => falls >= FALLS_MIN);
  if (found.length === 0) return [];
  const words = listed(found, (each) => `${replicaName(each)} (${each.grade_falls} times; ${each.grade_why || each.grade})`);
  return [{ key: "grades", kind: "fair", words: `The confidence in the cache state fell repeatedly in the last 10 min: ${words}.`, to: REPLICAS }];
}

// One tenant causes most of the work while requests wait: alone it is not a problem.
export function dominant({ tenants }, strained) {
  const [first, ...others] = tenants ?? [];
  if (!strained || !first || UNNAMED.has(first.tenant) || others.length === 0 || first.computed_share < DOMINANT) return [];
  return [{ key: "tenant", kind: "fair", words: `Tenant ${first.tenant} causes ${percent(first.computed_share, 0)} of the computed prompt tokens of the last minutes, with ${percent(first.request_share, 0)} of the requests.${inFlight(first, tenants)}`, to: ["tenants-title", "Tenants"] }];
}

function inFlight({ in_flight: own }, tenants) {
  return own ? ` It has ${own} of ${tenants.reduce((sum, each) => sum + each.in_flight, 0)} requests in flight.` : "";
}

// Beside other rows only: it explains them.
export function restarted({ uptime_s }) {
  if (uptime_s >= SETTLED_S) return [];
  return [{ key: "restarted", kind: "fair", words: `This router started ${span(uptime_s)} ago: its estimates of caches and its usual values are young.` }];
}
