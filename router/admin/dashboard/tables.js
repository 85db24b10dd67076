// Replicas, groups of requests, advice.

import { count, listed, millis, percent, rate, replicaName, seconds, share, span, NONE } from "./format.js";
import { bar, h, keyed, set, table, text } from "./dom.js";

const GRADES = {
  exact: "known from KV events",
  "catching-up": "KV events are catching up",
  estimated: "estimated from forwarded requests",
  unseen: "estimated from forwarded requests; answers do not pass the router",
};

function gauge(cell, share, words, hot) {
  if (cell.childElementCount === 0) cell.append(h("span", { class: "gauge", "aria-hidden": "true" }), h("span", { class: "gauged" }));
  bar(cell.firstElementChild, [{ class: "gauge-fill", share: share ?? 0 }]);
  cell.firstElementChild.classList.toggle("hot", (share ?? 0) >= hot);
  text(cell.lastElementChild, words);
}

export function tag(cell, words, kind, title) {
  if (cell.childElementCount === 0) cell.append(h("span"));
  set(cell.firstElementChild, "class", `tag ${kind}`);
  set(cell.firstElementChild, "title", title);
  text(cell.firstElementChild, words);
}

// How a replica stands: [words, kind of tag]; `bad` takes no requests.
export function stateOf(replica) {
  if (replica.warming) return ["warming", "fair"];
  if (!replica.ready) return ["not ready", "bad"];
  if (replica.state && replica.state !== "closed") return [replica.state, "bad"];
  return ["ready", replica.slow ? "fair" : "good"];
}

// Of all replicas, those that take requests.
export function countAccepting(replicas) {
  return `${replicas.filter((replica) => stateOf(replica)[1] !== "bad" && !replica.warming).length} of ${replicas.length}`;
}

// Why a replica needs a look: it takes no requests, or is slower than its peers, or its cache is not known exactly.
function reasons(replica) {
  if (replica.warming || stateOf(replica)[1] === "bad") return replica.why || "";
  return [replica.slow, replica.idle, replica.grade === "exact" ? "" : replica.grade_why].filter(Boolean).join("; ");
}

export const UNNAMED = new Set([NONE, "none", "other"]); // labels that stand for no tenant, or for many

// A cell that narrows the list of requests to what it names; `chosen(filters)` does it.
function narrowing(words, filters, chosen) {
  return (cell, row) => {
    const value = words(row);
    if (!value || UNNAMED.has(value)) return text(cell, value || NONE);
    if (cell.firstElementChild?.tagName !== "BUTTON") {
      const button = h("button", { type: "button", class: "link", title: "Show its requests" });
      button.addEventListener("click", () => chosen(filters(cell.row)));
      cell.replaceChildren(button);
    }
    cell.row = row;
    text(cell.firstElementChild, value);
  };
}

export function showReplicas(element, replicas, chosen) {
  element.classList.toggle("one-model", new Set(replicas.flatMap(({ models }) => models ?? [])).size < 2);
  const columns = [
    { name: "Replica", header: true, fill: narrowing(replicaName, ({ id }) => ({ replica: id }), chosen) },
    { name: "State", fill: (cell, row) => tag(cell, ...stateOf(row), row.why || null) },
    { name: "Models", value: (row) => (row.models ?? []).join(", ") || NONE, minor: true },
    { name: "Open", title: "open requests and their limit, which adapts to the engine's speed", fill: (cell, row) => gauge(cell, row.window ? row.in_flight / row.window : 0, row.window ? `${row.in_flight} (limit ${row.window})` : count(row.in_flight), 1) },
    { name: "Requests/s", numeric: true, title: "requests that ended in the last minutes", value: (row) => rate(row.requests_per_s) },
    { name: "Share", numeric: true, title: "of all requests of the last minutes", value: (row) => percent(row.request_share, 0) },
    { name: "TTFT p50", numeric: true, title: "time to first token, of the last minutes", value: (row) => seconds(row.ttft_p50_s) },
    { name: "TTFT p90", numeric: true, title: "time to first token, of the last minutes", value: (row) => seconds(row.ttft_p90_s) },
    { name: "Prefill ahead", numeric: true, value: (row) => millis(row.pending_prefill_ms) },
    { name: "Running", numeric: true, minor: true, value: (row) => count(row.running) },
    { name: "Waiting", numeric: true, value: (row) => count(row.waiting) },
    { name: "KV in use", fill: (cell, row) => gauge(cell, row.kv_usage, percent(row.kv_usage, 0), 0.95) },
    { name: "Blocks known", fill: (cell, row) => gauge(cell, row.blocks_max ? row.blocks / row.blocks_max : 0, count(row.blocks), 2), minor: true },
    { name: "Cache state", fill: (cell, row) => tag(cell, row.grade, row.grade === "exact" ? "good" : "fair", GRADES[row.grade]) },
    { name: "Why", grow: true, minor: true, value: reasons },
  ];
  const troubled = (row) => stateOf(row)[1] !== "good";
  const rows = [...replicas.filter(troubled), ...replicas.filter((row) => !troubled(row))];
  table(element, columns, rows, (row) => row.id, "No replicas.");
}

const NO_SUMS = { requests: 0, failed: 0, shed: 0, prompt_tokens: 0, completion_tokens: 0, hit_tokens: 0, verified_tokens: 0 };

function readyReplicas(cell, model, replicas) {
  if (UNNAMED.has(model)) return text(cell, NONE);
  const serving = replicas.filter((each) => each.models?.includes(model)), ready = serving.filter((each) => each.ready).length;
  tag(cell, serving.length === ready ? count(ready) : `${ready} of ${serving.length}`, ready ? "good" : "bad");
}

// Per model: its requests now, and sums over the range of the charts, or since the start of a router without series.
// Models without a request then or now are left out.
export function showModels(element, models, shown, replicas, chosen) {
  const of = new Map(shown?.map((row) => [row.model, row]));
  const rows = shown ? models.map((row) => ({ ...row, ...NO_SUMS, ...of.get(row.model) })).filter((row) => row.requests + row.shed + row.in_flight + row.waiting > 0) : models;
  const columns = [
    { name: "Model", header: true, fill: narrowing(({ model }) => model, ({ model }) => ({ model }), chosen) },
    { name: "Replicas", title: "ready replicas with this model", fill: (cell, row) => readyReplicas(cell, row.model, replicas) },
    { name: "In flight", numeric: true, value: (row) => count(row.in_flight) },
    { name: "Waiting", numeric: true, value: (row) => count(row.waiting) },
    { name: "Requests", numeric: true, value: (row) => count(row.requests) },
    { name: "Failed", numeric: true, title: "5xx", value: (row) => (row.failed ? `${count(row.failed)} (${percent(share(row.failed, row.requests))})` : "0") },
    { name: "Rejected", numeric: true, title: "429", value: (row) => count(row.shed) },
    { name: "Hit rate", fill: (cell, row) => gauge(cell, share(row.hit_tokens, row.prompt_tokens), percent(share(row.hit_tokens, row.prompt_tokens)), 2) },
    { name: "Verified", numeric: true, minor: true, title: "share of prompt tokens with an engine-reported cached-token count", value: (row) => percent(share(row.verified_tokens, row.prompt_tokens), 0) },
    { name: "Prompt tokens", numeric: true, value: (row) => count(row.prompt_tokens) },
    { name: "Output tokens", numeric: true, value: (row) => count(row.completion_tokens) },
  ];
  rows.sort((a, b) => b.requests - a.requests);
  table(element, columns, rows, ({ model }) => model, "No requests in this time.");
}

// Per tenant, now and in the last two minutes; hidden while no tenant is named.
export function showTenants(card, element, tenants = [], chosen) {
  card.hidden = !tenants.some(({ tenant }) => !UNNAMED.has(tenant));
  const columns = [
    { name: "Tenant", header: true, fill: narrowing(({ tenant }) => tenant, ({ tenant }) => ({ tenant }), chosen) },
    { name: "In flight", numeric: true, title: "requests placed or in the queue", value: (row) => count(row.in_flight) },
    { name: "Waiting", numeric: true, title: "requests in the queue", value: (row) => count(row.waiting) },
    { name: "Requests/s", numeric: true, value: (row) => rate(row.requests_per_s) },
    { name: "Share", numeric: true, title: "of all requests", value: (row) => percent(row.request_share, 0) },
    { name: "Computed", numeric: true, title: "share of the prompt tokens that engines computed", value: (row) => percent(row.computed_share, 0) },
  ];
  const most = [...tenants].sort((a, b) => b.in_flight - a.in_flight || b.computed_share - a.computed_share);
  table(element, columns, most, ({ tenant }) => tenant, "No requests in the last minutes.");
}

const groupOf = (row) => [row.route, row.tenant, row.tools, row.step, row.agent].join("\0");

// Per group: sums over the range of the charts, and times of its last requests.
export function showGroups(element, groups, shown, chosen) {
  const of = new Map(groups.map((row) => [groupOf(row), row]));
  const rows = shown ? shown.map((row) => ({ ...of.get(groupOf(row)), ...row, hit_rate: share(row.hit_tokens, row.prompt_tokens), genuine_hit_rate: share(row.hit_tokens - row.replay_tokens, row.prompt_tokens) })) : groups;
  const columns = [
    { name: "Route", header: true, value: (row) => row.route },
    { name: "Tenant", fill: narrowing((row) => row.tenant || NONE, ({ tenant }) => ({ tenant }), chosen) },
    { name: "Tools", value: (row) => (row.tools ? "yes" : "no") },
    { name: "Step", value: (row) => row.step || NONE },
    { name: "Agent", minor: true, value: (row) => row.agent || NONE },
    { name: "Requests", numeric: true, value: (row) => count(row.requests) },
    { name: "Prompt tokens", numeric: true, minor: true, value: (row) => count(row.prompt_tokens) },
    { name: "Hit rate", fill: (cell, row) => gauge(cell, row.hit_rate, percent(row.hit_rate), 2) },
    { name: "Genuine", numeric: true, value: (row) => percent(row.genuine_hit_rate) },
    { name: "TTFT p50", numeric: true, value: (row) => seconds(row.ttft_p50_s) },
    { name: "TTFT p90", numeric: true, value: (row) => seconds(row.ttft_p90_s) },
    { name: "Median prompt", numeric: true, minor: true, value: (row) => count(row.prompt_tokens_p50) },
    { name: "Tool calls", numeric: true, minor: true, title: "mean per prompt", value: (row) => row.tool_calls_mean?.toFixed(1) ?? NONE },
  ];
  table(element, columns, rows, groupOf, "No requests in this time.");
}

// Where in a prompt: message, path, byte.
export function place(row) {
  const where = [row.message >= 0 ? `message ${row.message}${row.role ? ` (${row.role})` : ""}` : "before the messages"];
  if (row.path) where.push(row.path);
  if (row.at_bytes !== null && row.at_bytes !== undefined) where.push(`byte ${row.at_bytes}`);
  return where.join(", ");
}

// What stood there and what stands there now; only its shape where excerpts are off.
export function showDifference(element, row) {
  const quoted = [["before", row.before], ["now", row.after]].filter(([, words]) => words);
  const rows = quoted.length || !row.shape ? quoted : [["shape", row.shape]];
  keyed(element, rows, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd", {}, h("code"))), (pair, [, words]) => text(pair.querySelector("code"), words));
  element.hidden = rows.length === 0;
}

const nameOf = (row) => [row.template, row.change, row.message, row.path].join("\0");

// What a piece of advice is about: by the hour where enough is known of that, else what was lost so far.
function costOf(row) {
  if (row.lost_tokens_per_h > 0) return `${count(row.lost_tokens_per_h)} tokens/h`;
  return row.cost || (row.lost_tokens > 0 ? `${count(row.lost_tokens)} tokens` : "No loss");
}

export function showAdvice(element, { advice, now_s, no_advice }) {
  if (advice.length === 0) {
    keyed(element, [{}], () => "\0empty", () => h("li", { class: "empty" }, no_advice ?? "Nothing above 0.1 % of prompt tokens was lost for an avoidable reason."), () => {});
    return;
  }
  const make = () => h("li", {}, h("p", { class: "cost" }, h("strong"), " ", h("span")), h("p", { class: "do" }), h("p", { class: "where" }), h("dl", { class: "difference" }));
  keyed(element, advice, nameOf, make, (item, row) => {
    const [cost, words, where, difference] = item.children;
    const gpu = row.gpu_s_per_h >= 0.05 ? `${row.gpu_s_per_h < 10 ? row.gpu_s_per_h.toFixed(1) : count(row.gpu_s_per_h)} GPU-s/h · ` : "";
    text(cost.firstElementChild, costOf(row));
    text(cost.lastElementChild, `${gpu}${row.requests === 1 ? "1 request" : `${count(row.requests)} requests`}`);
    text(words, row.text);
    const facts = [row.label || (row.template ? `template ${String(row.template).slice(0, 6)}` : "")];
    if (row.path || row.message >= 0) facts.push(place(row));
    if (row.tenants?.length) facts.push(`${row.tenants.length === 1 ? "tenant" : "tenants"} ${listed(row.tenants, (each) => each)}`);
    if (row.last_at_s) facts.push(`last ${span(Math.max(0, now_s - row.last_at_s))} ago`);
    text(where, facts.filter(Boolean).join(" · "));
    where.hidden = !where.textContent;
    showDifference(difference, row);
    item.classList.toggle("plain", difference.hidden);
    item.classList.toggle("past", row.recent === false);
  });
}
