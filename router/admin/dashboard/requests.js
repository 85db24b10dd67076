// Requests: the last ones as they come, or those that filters find; one by its id. Filters are in the address, and the
// router looks for them: in memory, and in its history where it keeps one. One without that search (its answer has no
// `kept`) gives what it has in memory, and the page looks through that.

import { clock, day } from "./format.js";
import { h, set, text } from "./dom.js";
import { Decisions } from "./decisions.js";
import { AVOIDABLE, named, UNAVOIDABLE } from "./reasons.js";

const PAGE = 20; // requests shown at once, and added by "Older"
const OFTEN_MS = 4000; // between two searches for the same
const NAMES_MAX = 500; // of a list to choose from
const NOBODY = ["none", "other"]; // labels of groups that stand for no tenant, or for many
const STATUSES = ["200", "4xx", "400", "404", "429", "499", "5xx", "502", "503", "504"];
const PLACED = ["warm", "spill", "cold", "tie", "only", "policy", "retry", "pull", "split"];
const $ = (id) => document.getElementById(id);

export class Requests {
  constructor(view, source) {
    Object.assign(this, { view, source, known: { model: new Set(), tenant: new Set() }, shown: PAGE, older: [] });
    this.decisions = new Decisions($("decisions"), $("newer"), linked);
    this.form = $("search");
    this.field = (name) => this.form.elements[name];
    fill(this.field("status"), [["", "any status"], ...STATUSES.map((each) => [each, each])]);
    fill(this.field("reason"), [["", "any reason"]]);
    for (const [label, reasons] of [["Placed because", PLACED], ["Tokens lost to", [...AVOIDABLE, ...UNAVOIDABLE]]]) {
      this.field("reason").append(h("optgroup", { label }, ...reasons.map((reason) => h("option", { value: reason }, named(reason)))));
    }
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      view.filter({ id: this.field("id").value.trim() });
    });
    this.form.addEventListener("change", (event) => {
      if (event.target.name !== "id") view.filter({ [event.target.name]: event.target.value });
    });
    $("clear").addEventListener("click", () => view.clear());
    $("older").addEventListener("click", () => this.more());
    $("newest").addEventListener("click", () => {
      this.changed();
      view.changed();
    });
    this.changed();
  }

  // What the router is asked for; without a filter or a stretch of time the page's own answer has the last requests.
  get asked() {
    const { filters, zoom } = this.view;
    const named = Object.entries(filters).filter(([, value]) => value);
    const times = zoom && !filters.id ? Object.entries({ from_s: zoom.from_s, to_s: zoom.to_s }) : [];
    return Object.fromEntries([...named, ...times]);
  }

  get searching() {
    return Object.keys(this.asked).length > 0;
  }

  changed() {
    for (const [name, value] of Object.entries(this.view.filters)) {
      const field = this.field(name);
      if (!field) continue;
      if (field.tagName === "SELECT" && value && ![...field.options].some((option) => option.value === value)) field.append(h("option", { value }, value));
      if (field !== document.activeElement || field.tagName === "SELECT") field.value = value;
    }
    $("clear").hidden = !this.view.filtered;
    Object.assign(this, { at: 0, shown: PAGE, older: [], found: undefined });
    text($("found"), this.searching ? "Searching…" : "");
    this.decisions.close();
  }

  // Names to choose from: what the page was told of so far, and the replicas that there are.
  learn(seen) {
    const { model, tenant } = this.known;
    const told = [...(seen.models ?? []).map((row) => [model, row.model]), ...seen.decisions.flatMap((row) => [[model, row.model], [tenant, row.tenant]]), ...seen.groups.map((row) => [tenant, row.tenant])];
    for (const [names, name] of told) if (name && !NOBODY.includes(name) && names.size < NAMES_MAX) names.add(name);
    const choices = { model: sorted(model), tenant: sorted(tenant), replica: [...this.decisions.names] };
    for (const [name, values] of Object.entries(choices)) fill(this.field(name), [["", `any ${name}`], ...values], this.view.filters[name]);
  }

  async refresh(seen, signal) {
    this.decisions.name(seen.replicas);
    this.learn(seen);
    if (this.older.length) return;
    if (!this.searching) return this.show(seen.decisions, seen);
    if (Date.now() < this.at + OFTEN_MS) return;
    this.at = Date.now();
    try {
      this.found = await this.search({ limit: PAGE }, signal);
    } catch (error) {
      if (error.status !== 400) throw error; // a filter of the address that is none
      this.show([], seen);
      return text($("found"), error.message);
    }
    this.show(this.found.decisions, seen);
  }

  async search(parameters, signal) {
    const answer = await this.source.get("admin/decisions", { ...this.asked, ...parameters }, { signal });
    if (answer.kept) return answer;
    const fitting = answer.decisions.filter((row) => fits(row, this.asked));
    return { decisions: fitting.slice(0, this.shown), more: fitting.length > this.shown, all: answer.decisions };
  }

  show(rows, seen) {
    this.rows = rows;
    const one = this.view.filters.id && rows.length === 1;
    this.decisions.update(rows, this.searching ? "No matching requests." : "No requests yet.");
    if (one && this.opened !== rows[0].id) this.decisions.open((this.opened = rows[0].id));
    if (!this.view.filters.id) this.opened = undefined;
    $("newest").hidden = !this.older.length;
    $("older").hidden = this.found ? !this.found.more : rows.length < PAGE;
    text($("found"), this.said(rows, seen));
  }

  said(rows, seen) {
    if (!this.searching) return this.older.length ? `The list is not updated: ${rows.length} requests.` : "The latest requests.";
    const { kept } = this.found ?? {};
    const since_s = kept?.decisions_since_s ?? this.found?.all?.at(-1)?.at_s;
    const reach = (since_s ? ` Requests are available since ${day(since_s)}, ${clock(since_s).slice(0, 5)}.` : "") + (kept?.why ? ` The search is incomplete: ${kept.why}.` : "");
    const within = this.view.zoom && !this.view.filters.id ? ` of ${clock(this.view.zoom.from_s)} to ${clock(this.view.zoom.to_s)}` : "";
    const many = this.found?.more ? `The last ${rows.length}` : `All ${rows.length}`;
    const fitting = rows.length === 1 ? `1 match${within}.` : `${rows.length ? many : "No"} matches${within}.`;
    return fitting + (seen ? reach : "");
  }

  // The next page; the list then stands still until filters change or newer ones are asked for.
  async more() {
    this.shown += PAGE;
    const last = this.rows.at(-1);
    const found = await this.search({ limit: PAGE, before: this.found?.next_before ?? last?.number }).catch((error) => ({ error }));
    if (found.error) return text($("found"), `Older requests could not be loaded: ${found.error.message || found.error.status}.`);
    const ids = new Set(this.rows.map(({ id }) => id));
    this.found = found;
    this.older = [...this.rows, ...found.decisions.filter(({ id }) => !ids.has(id))];
    this.show(this.older);
  }
}

// The address of the page with requests that fit.
function linked(filters) {
  return `#${new URLSearchParams(filters)}`;
}

const sorted = (names) => [...names].sort().map((name) => [name, name]);

function fill(select, options, chosen = "") {
  const wanted = chosen && !options.some(([value]) => value === chosen) ? [...options, [chosen, chosen]] : options;
  const now = JSON.stringify(wanted);
  if (select.dataset.options === now) return;
  select.dataset.options = now;
  select.replaceChildren(...wanted.map(([value, words]) => h("option", { value }, words)));
  set(select, "data-options", now);
  select.value = chosen;
}

// Whether a request fits filters, as the router's own search judges.
function fits(row, asked) {
  const tests = {
    id: (value) => row.id === value,
    model: (value) => row.model === value,
    tenant: (value) => row.tenant === value,
    replica: (value) => row.replica === value,
    session: (value) => row.session === value || row.conversation === value,
    reason: (value) => row.reason === value || (row.miss?.[value] ?? 0) > 0,
    status: (value) => (value.endsWith("xx") ? String(row.status)[0] === value[0] : String(row.status) === value),
    from_s: (value) => row.at_s >= value,
    to_s: (value) => row.at_s < value,
  };
  return Object.entries(asked).every(([name, value]) => tests[name](value));
}
