// Replicas, groups of requests, advice.

import { count, millis, percent, replicaName, seconds, span, NONE } from "./format.js";
import { bar, h, keyed, set, table, text } from "./dom.js";

const GRADES = {
  exact: "known from its events",
  "catching-up": "its events are being caught up with",
  estimated: "guessed from what was sent there",
};

function gauge(cell, share, words, hot) {
  if (cell.childElementCount === 0) cell.append(h("span", { class: "gauge", "aria-hidden": "true" }), h("span", { class: "gauged" }));
  bar(cell.firstElementChild, [{ class: "gauge-fill", share: share ?? 0 }]);
  cell.firstElementChild.classList.toggle("hot", (share ?? 0) >= hot);
  text(cell.lastElementChild, words);
}

function tag(cell, words, kind, title) {
  if (cell.childElementCount === 0) cell.append(h("span"));
  set(cell.firstElementChild, "class", `tag ${kind}`);
  set(cell.firstElementChild, "title", title);
  text(cell.firstElementChild, words);
}

// How a replica stands: [words, kind of tag]; `bad` takes no requests.
export function standing(replica) {
  if (replica.warming) return ["warming", "fair"];
  if (!replica.ready) return ["not ready", "bad"];
  if (replica.state && replica.state !== "closed") return [replica.state, "bad"];
  return ["ready", "good"];
}

export function showReplicas(element, replicas) {
  const columns = [
    { name: "Replica", header: true, value: replicaName },
    { name: "State", fill: (cell, row) => tag(cell, ...standing(row), row.why || null) },
    { name: "Requests", fill: (cell, row) => gauge(cell, row.window ? row.in_flight / row.window : 0, row.window ? `${row.in_flight} of ${row.window}` : count(row.in_flight), 1) },
    { name: "Prefill ahead", numeric: true, value: (row) => millis(row.pending_prefill_ms) },
    { name: "Running", numeric: true, minor: true, value: (row) => count(row.running) },
    { name: "Waiting", numeric: true, value: (row) => count(row.waiting) },
    { name: "KV in use", fill: (cell, row) => gauge(cell, row.kv_usage, percent(row.kv_usage, 0), 0.95) },
    { name: "Blocks known", fill: (cell, row) => gauge(cell, row.blocks_max ? row.blocks / row.blocks_max : 0, count(row.blocks), 2), minor: true },
    { name: "Cache known", fill: (cell, row) => tag(cell, row.grade, row.grade === "exact" ? "good" : "fair", GRADES[row.grade]) },
    { name: "Why", grow: true, minor: true, value: (row) => (standing(row)[1] === "good" ? "" : row.why || "") },
  ];
  const troubled = (row) => standing(row)[1] !== "good";
  const rows = [...replicas.filter(troubled), ...replicas.filter((row) => !troubled(row))];
  table(element, columns, rows, (row) => row.id, "No replicas are known.");
}

export function showGroups(element, groups) {
  const columns = [
    { name: "Route", header: true, value: (row) => row.route },
    { name: "Tenant", value: (row) => row.tenant || NONE },
    { name: "Tools", value: (row) => (row.tools ? "yes" : "no") },
    { name: "Step", value: (row) => row.step || NONE },
    { name: "Requests", numeric: true, value: (row) => count(row.requests) },
    { name: "Prompt tokens", numeric: true, minor: true, value: (row) => count(row.prompt_tokens) },
    { name: "Hit rate", fill: (cell, row) => gauge(cell, row.hit_rate, percent(row.hit_rate), 2) },
    { name: "Genuine", numeric: true, value: (row) => percent(row.genuine_hit_rate) },
    { name: "TTFT p50", numeric: true, value: (row) => seconds(row.ttft_p50_s) },
    { name: "TTFT p90", numeric: true, value: (row) => seconds(row.ttft_p90_s) },
    { name: "Median prompt", numeric: true, minor: true, value: (row) => count(row.prompt_tokens_p50) },
    { name: "Tool calls", numeric: true, minor: true, title: "in a prompt's history, on average", value: (row) => (row.tool_calls_mean ?? 0).toFixed(1) },
  ];
  table(element, columns, groups, (row) => [row.route, row.tenant, row.tools, row.step].join("\0"), "No requests yet.");
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

export function showAdvice(element, advice, now_s) {
  if (advice.length === 0) {
    keyed(element, [{}], () => "\0empty", () => h("li", { class: "empty" }, "Nothing: no tokens were lost to anything that can be changed."), () => {});
    return;
  }
  const key = (row) => [row.template, row.change, row.message, row.path].join("\0");
  const make = () => h("li", {}, h("p", { class: "cost" }, h("strong"), " ", h("span")), h("p", { class: "do" }), h("p", { class: "where" }), h("dl", { class: "difference" }));
  keyed(element, advice, key, make, (item, row) => {
    const [cost, words, where, difference] = item.children;
    text(cost.firstElementChild, row.lost_tokens_per_h > 0 ? `${count(row.lost_tokens_per_h)} tokens/h` : "No loss");
    text(cost.lastElementChild, `${row.gpu_s_per_h >= 0.05 ? `${row.gpu_s_per_h < 10 ? row.gpu_s_per_h.toFixed(1) : count(row.gpu_s_per_h)} GPU-s/h · ` : ""}${count(row.requests)} requests`);
    text(words, row.text);
    const facts = [row.label || (row.template ? `template ${String(row.template).slice(0, 6)}` : "")];
    if (row.path || row.message >= 0) facts.push(place(row));
    if (row.last_at_s) facts.push(`last ${span(Math.max(0, now_s - row.last_at_s))} ago`);
    text(where, facts.filter(Boolean).join(" · "));
    where.hidden = !where.textContent;
    showDifference(difference, row);
  });
}
