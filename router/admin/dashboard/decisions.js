// The last decisions: one line each, and when opened who else could have taken the request, at what cost, why its
// tokens were computed, and where its prompt first differs. While one is open the list stands still.

import { bytes, clock, count, millis, percent, replicaName, seconds, share, whole, NONE } from "./format.js";
import { bar, h, keyed, set, table, text } from "./dom.js";
import { named, REASONS } from "./reasons.js";
import { place, showDifference } from "./tables.js";

const WHY = {
  warm: "it has the longest cached prefix",
  spill: "another replica has a longer cached prefix, but waiting there would cost more than computing",
  cold: "no replica has any part of the prompt cached",
  tie: "prices were nearly equal, and the hash ring decided",
  only: "it was the only candidate",
  policy: "the policy ignores caches",
  retry: "the first replica failed",
};

// Terms of a price, in the order of the formula: column, and what waits for this time.
const TERMS = {
  wait_ms: ["Wait", "time for queued prefill or for free KV memory"],
  uncached_ms: ["Prefill", "prefill of the tokens that are not cached"],
  transfer_ms: ["Transfer", "transfer of cached blocks from another replica"],
  load_ms: ["Delays queue", "delay of the requests in the queue"],
  room_ms: ["Occupies", "delay of requests that wait for KV memory in the meantime"],
  evicted_ms: ["Evicts", "work that other requests would repeat"],
  evicted_again_ms: ["Evicts again", "work that the repeated work would evict"],
  stalled_ms: ["Stalls", "delay that the prefill causes for other answers"],
  decode_ms: ["Decode", "time of the answer after its first token, as weighted"],
  slowed_ms: ["Slows", "delay that the answer causes for other answers, as weighted"],
};

export class Decisions {
  // `linked(filters)` is the address of the page with requests that fit.
  constructor(element, newer, linked) {
    Object.assign(this, { element, newer, linked, rows: [], latest: [], names: new Map(), empty: "" });
    newer.addEventListener("click", () => {
      this.close();
      this.show(this.latest);
      element.querySelector("summary")?.focus();
    });
    element.addEventListener("toggle", () => this.update(this.latest, this.empty), true);
  }

  close() {
    for (const open of this.element.querySelectorAll("details[open]")) open.open = false;
  }

  open(id) {
    const found = [...this.element.children].find((each) => each.dataset.id === id);
    if (!found) return;
    found.open = true;
    found.scrollIntoView({ block: "center" });
  }

  name(replicas) {
    this.names = new Map(replicas.map((replica) => [replica.id, replicaName(replica)]));
  }

  // One that has left meanwhile has no name any more.
  named(id) {
    return this.names.get(id) ?? (id && replicaName({ id }));
  }

  // Newest first; `empty` is said where there are none.
  update(rows, empty) {
    Object.assign(this, { latest: rows, empty });
    if (!this.element.querySelector("details[open]")) return this.show(this.latest);
    const known = new Set(this.rows.map(({ id }) => id)), newest_s = this.rows[0]?.at_s ?? 0;
    const fresh = this.latest.filter(({ id, at_s }) => !known.has(id) && at_s >= newest_s).length;
    this.newer.hidden = fresh === 0;
    text(this.newer, fresh === 1 ? "Show 1 newer request" : `Show ${fresh} newer requests`);
  }

  show(rows) {
    this.rows = rows;
    this.newer.hidden = true;
    if (rows.length === 0) {
      keyed(this.element, [{}], () => "\0empty", () => h("p", { class: "empty" }), (said) => text(said, this.empty));
      return;
    }
    keyed(this.element, rows, ({ id }) => id, (row) => this.make(row), () => {});
  }

  // A request has ended when it is listed: its row does not change, and what it opens to is made when it is opened.
  make(row) {
    const hit = share(row.hit_tokens, row.prompt_tokens);
    const strip = h("span", { class: "strip", "aria-hidden": "true" });
    bar(strip, parts(row));
    const cell = (kind, words, title) => h("span", { class: kind, title }, words);
    const summary = h("summary", {},
      cell("when", clock(row.at_s)),
      cell("what", row.model || row.route, row.route),
      cell("whereto", this.named(row.replica) ?? "no replica", row.replica),
      cell("tokens", `${count(row.prompt_tokens)} tokens`),
      h("span", { class: "hits" }, strip, h("span", {}, `${percent(hit, 0)} hit`)),
      cell("took", seconds(row.ttft_s), "time to first token"),
      cell(row.status >= 400 || row.error ? "ended tag bad" : "ended", row.error || (row.status >= 400 ? String(row.status) : verdict(row))),
    );
    const details = h("details", { "data-id": row.id }, summary);
    details.addEventListener("toggle", () => {
      if (details.open && details.childElementCount === 1) details.append(this.opened(row));
    });
    return details;
  }

  opened(row) {
    const why = row.reason ? `Placed on ${this.named(row.replica)} because ${WHY[row.reason] ?? row.reason}.` : "Not placed.";
    const saved = row.saved_ms > 0 ? ` This saved ${millis(row.saved_ms)} of the time to first token.` : "";
    const body = h("div", { class: "opened" }, h("p", { class: "why" }, why + saved), this.candidates(row), breakdown(row));
    if (row.difference) body.append(first(row.difference));
    body.append(facts(row, (id) => this.named(id)), this.links(row));
    return body;
  }

  // Addresses that can be sent to others: of the request, and of all that came before and after it.
  links(row) {
    const found = [[{ id: row.id }, "Link to this request"]];
    const session = row.session || row.conversation;
    if (session) found.push([{ session }, "All requests of this session"]);
    return h("ul", { class: "links" }, ...found.map(([filters, words]) => h("li", {}, h("a", { href: this.linked(filters) }, words))));
  }

  candidates(row) {
    const candidates = row.candidates ?? [];
    const terms = Object.entries(TERMS).filter(([term]) => candidates.some((c) => c.price_terms?.[term]));
    const columns = [
      { name: "Candidate", header: true, fill: (cell, c) => { text(cell, this.named(c.id)); set(cell, "class", c.id === row.replica ? "chosen" : null); } },
      { name: "Cached", numeric: true, title: "tokens of this prompt", value: (c) => whole(c.cached_tokens) },
      { name: "To compute", numeric: true, value: (c) => whole(c.uncached_tokens) },
      ...terms.map(([term, [name, title]]) => ({ name, numeric: true, title, value: (c) => millis(c.price_terms?.[term]) })),
      { name: "Price", numeric: true, title: "sum of the times before it", value: (c) => millis(c.price_ms) },
      { name: "Open", numeric: true, title: "requests", value: (c) => whole(c.in_flight) },
      { name: "Grade", value: (c) => c.grade },
    ];
    const shown = candidates.length;
    const caption = row.weighed > shown ? `Candidates: ${shown} of ${row.weighed}` : "Candidates";
    const element = h("table", {}, h("caption", {}, caption));
    table(element, columns, candidates, (c) => c.id, "No candidates.");
    return h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Candidates" }, element);
  }
}

// The stretches of its prompt: hits, then reasons in their order.
function parts(row) {
  const kind = row.hit === "replay" ? "fill-replay" : "fill-genuine";
  const misses = Object.keys(row.miss ?? {}).sort((a, b) => REASONS.indexOf(a) - REASONS.indexOf(b));
  return [{ class: kind, share: share(row.hit_tokens, row.prompt_tokens) }, ...misses.map((reason) => ({ class: `fill-${reason}`, share: share(row.miss[reason], row.prompt_tokens) }))];
}

// Its greatest miss, in a word.
function verdict(row) {
  const [reason] = Object.entries(row.miss ?? {}).sort((a, b) => b[1] - a[1])[0] ?? [];
  return reason ? named(reason) : "";
}

function breakdown(row) {
  const strip = h("div", { class: "strip tall", "aria-hidden": "true" });
  bar(strip, parts(row));
  const items = parts(row).filter((part) => part.share > 0).map((part) => {
    const reason = part.class.slice(5);
    const tokens = row.miss?.[reason] ?? row.hit_tokens;
    return h("li", {}, h("span", { class: `swatch ${part.class}`, "aria-hidden": "true" }), `${reason in (row.miss ?? {}) ? named(reason) : `${reason} hit`} ${whole(tokens)}`);
  });
  return h("div", {}, h("h3", {}, "Its prompt"), strip, h("ul", { class: "legend" }, ...items));
}

function first(difference) {
  const pieces = h("dl", { class: "difference" });
  showDifference(pieces, difference);
  const words = `${named(difference.change)} in ${place(difference)}: ${bytes(difference.lost_bytes)} behind it were computed again.`;
  return h("div", {}, h("h3", {}, "First difference from an earlier prompt"), h("p", {}, words), pieces);
}

function facts(row, nameOf) {
  const usage = row.usage ?? {};
  const known = [
    ["request", row.id],
    ["route", row.route],
    ["model", row.model],
    ["tenant", row.tenant],
    ["session", row.session],
    ["agent", row.agent],
    ["agent's conversation", row.agent_id],
    ["started by", row.agent_parent],
    ["conversation ended", row.agent_final ? "yes" : null],
    ["step", row.step],
    ["policy", row.policy],
    ["predicted", `${whole(row.predicted_cached_tokens)} of ${whole(row.prompt_tokens)} tokens (${row.grade ?? NONE})${row.predicted_tier_tokens ? `, ${whole(row.predicted_tier_tokens)} of them to load` : ""}`],
    ["engine reported", usage.cached_tokens === null || usage.cached_tokens === undefined ? "nothing" : `${whole(usage.cached_tokens)} cached`],
    ["cached on other replica", row.places?.cached_on_other_replica ? [`${whole(row.places.cached_on_other_replica)} tokens`, row.held_by && `at ${nameOf(row.held_by)}`, row.spill && `not placed there: ${named(row.spill)}`].filter(Boolean).join(", ") : ""],
    ["evicted by others", row.places?.evicted_by_others ? `${whole(row.places.evicted_by_others)} tokens` : ""],
    ["answer", usage.completion_tokens ? `${whole(usage.completion_tokens)} tokens in ${seconds(row.duration_s)}` : seconds(row.duration_s)],
    ["between tokens", row.inter_token_s ? seconds(row.inter_token_s) : ""],
    ["queued", row.queued_s > 0 ? seconds(row.queued_s) : ""],
    ["trace", row.trace_id],
    ["repairs", (row.repairs ?? []).join(", ")],
    ["warning", row.warning],
    ["turn", row.turn || ""],
    ["retries", (row.retries ?? []).map(({ kind, replica }) => `${kind} at ${replica}`).join(", ")],
    ["ending", row.ending === "ok" ? "" : [row.ending, row.detail].filter(Boolean).join(": ")],
  ].filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return h("dl", { class: "facts" }, ...known.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
}
