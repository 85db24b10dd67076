// The prompt map: prefixes that requests share, as an icicle. A branch is as wide as the prompt tokens of requests that
// go through it, stands under the prefix that it begins with, and has the colours of the replicas that hold it.

import { count, percent, replicaName, NONE } from "./format.js";
import { h, keyed, s, set, table, text } from "./dom.js";

const ROW = 44, GAP = 2, COLOURS = 8, NAMED_MAX = 16, NARROWEST = 3, SLIVER = 26, CHARACTER = 8.2;

const titled = (row) => (row.others ? `${row.others} others` : row.label || `template ${row.id.slice(0, 6)}`);

export class PromptMap {
  constructor(parent) {
    this.legend = h("ul", { class: "legend", "aria-label": "Replicas" });
    this.many = h("p", { class: "note" });
    this.svg = s("svg", { role: "img", class: "map" });
    this.readout = h("p", { class: "readout", "aria-hidden": "true" });
    this.table = h("table", {}, h("caption", { class: "hidden" }, "Shared prefixes, each below its own prefix"));
    const scroll = h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": "Shared prefixes" }, this.table);
    this.empty = h("p", { class: "empty" }, "No prefix is shared by several conversations yet.");
    parent.append(this.legend, this.many, this.svg, this.readout, this.empty, h("details", { class: "figures" }, h("summary", {}, "As a table"), scroll));
    this.svg.addEventListener("pointerover", (event) => this.hover(event.target.closest("[data-id]")?.dataset.id));
    this.svg.addEventListener("pointerleave", () => this.hover(undefined));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  update(rows, replicas) {
    this.names = new Map(replicas.map((replica, at) => [replica.id, { name: replicaName(replica), at: at % COLOURS }]));
    this.branches = arranged(rows);
    const many = replicas.length > NAMED_MAX;
    this.many.hidden = !many;
    text(this.many, `${count(replicas.length)} replicas share ${COLOURS} colours; the line below lists the replicas with the selected prefix.`);
    keyed(this.legend, many ? [] : replicas, ({ id }) => id, ({ id }) => h("li", {}, h("span", { class: `swatch fill-holder-${this.names.get(id).at}`, "aria-hidden": "true" }), h("span")), (item, replica) => {
      set(item.firstElementChild, "class", `swatch fill-holder-${this.names.get(replica.id).at}`);
      text(item.lastElementChild, replicaName(replica));
    });
    this.empty.hidden = rows.length > 0;
    const widest = this.branches.filter(({ depth }) => depth === 0).slice(0, 3).map(({ row }) => `${titled(row)}, ${count(row.served_tokens)} tokens, ${percent(row.hit_rate)} hits`);
    set(this.svg, "aria-label", `${rows.length} shared prefixes; widest: ${widest.join("; ") || NONE}`);
    this.draw();
    this.tabulate();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!this.branches || width < 60) return;
    const wide = (this.drawn = folded(this.branches, width));
    const deep = Math.max(0, ...this.drawn.map(({ depth }) => depth + 1));
    const height = Math.max(1, deep * (ROW + GAP));
    set(this.svg, "viewBox", `0 0 ${width} ${height}`);
    set(this.svg, "height", height);
    keyed(this.svg, wide, ({ row }) => row.id, ({ row }) => branchOf(row), (group, branch) => this.fill(group, branch, width));
    this.hover(this.at);
  }

  fill(group, { row, x, width, depth }, whole) {
    const wide = Math.max(1, width * whole - GAP), y = depth * (ROW + GAP);
    set(group, "transform", `translate(${(x * whole).toFixed(1)} ${y})`);
    const [back, holders, name, facts] = group.children;
    size(back, 0, 0, wide, ROW);
    set(back, "class", row.holders.length ? "branch" : "branch nobody");
    const known = row.holders.filter((id) => this.names.has(id));
    const each = wide / Math.max(1, known.length);
    keyed(holders, known, (id) => id, () => s("g", {}, s("rect", { class: "tint" }), s("rect", { class: "stripe" })), (pair, id) => {
      const at = known.indexOf(id);
      set(pair, "class", `holder-${this.names.get(id).at}`);
      size(pair.firstElementChild, at * each, 0, each, ROW);
      size(pair.lastElementChild, at * each, ROW - 6, each, 6);
    });
    const room = Math.floor((wide - 12) / CHARACTER);
    text(name, cut(titled(row), room));
    const figures = [`${count(row.served_tokens)} · ${percent(row.hit_rate, 0)}`, percent(row.hit_rate, 0)];
    text(facts, figures.find((words) => words.length <= room) ?? "");
  }

  hover(id) {
    this.at = id;
    const branch = this.drawn?.find(({ row }) => row.id === id);
    if (!branch) return text(this.readout, this.branches?.length ? "Point at a prefix for its figures." : "");
    const { row } = branch;
    if (row.others) return text(this.readout, `${row.others} prefixes are too narrow to draw: ${count(row.requests)} requests with ${count(row.served_tokens)} prompt tokens, ${percent(row.hit_rate)} hits; the table lists each.`);
    text(this.readout, `${titled(row)} — ${count(row.prompt_tokens)} tokens, ${count(row.own_tokens)} of them in this prefix only; ${count(row.requests)} requests with ${count(row.served_tokens)} prompt tokens, ${percent(row.hit_rate)} hits; cached by ${this.held(row)}`);
  }

  held(row) {
    return row.holders.map((id) => this.names.get(id)?.name ?? id).join(", ") || "no replica";
  }

  tabulate() {
    const columns = [
      { name: "Prefix", header: true, fill: (cell, { row, depth }) => { text(cell, titled(row)); set(cell, "data-depth", Math.min(depth, 6)); } },
      { name: "Tokens", numeric: true, value: ({ row }) => count(row.prompt_tokens) },
      { name: "Own tokens", numeric: true, value: ({ row }) => count(row.own_tokens) },
      { name: "Requests", numeric: true, value: ({ row }) => count(row.requests) },
      { name: "Served tokens", numeric: true, value: ({ row }) => count(row.served_tokens) },
      { name: "Hit rate", numeric: true, value: ({ row }) => percent(row.hit_rate) },
      { name: "Cached by", grow: true, value: ({ row }) => this.held(row) },
    ];
    table(this.table, columns, this.branches, ({ row }) => row.id, "No prefix is shared yet.");
  }
}

// Where each branch is, in parts of the whole width: depth first, the widest first.
function arranged(rows) {
  const ids = new Set(rows.map(({ id }) => id));
  const below = new Map();
  for (const row of rows) {
    const parent = ids.has(row.parent) && row.parent !== row.id ? row.parent : "";
    below.set(parent, [...(below.get(parent) ?? []), row]);
  }
  const found = [];
  const place = (parent, x, width, served, depth) => {
    const children = (below.get(parent) ?? []).sort((a, b) => b.served_tokens - a.served_tokens || (a.id < b.id ? -1 : 1));
    const sum = children.reduce((total, row) => total + row.served_tokens, 0);
    const unit = width / Math.max(served, sum, 1);
    for (const row of children) {
      const wide = row.served_tokens * unit;
      found.push({ row, above: parent, x, width: wide, depth });
      place(row.id, x, wide, row.served_tokens, depth + 1);
      x += wide;
    }
  };
  place("", 0, 1, 0, 0);
  return found;
}

// What can be drawn: slivers under one prefix are one branch, "others", without what stands below them.
function folded(branches, width) {
  const narrow = ({ width: part }) => part * width < SLIVER;
  const found = [], gone = new Set(), slivers = new Map();
  for (const branch of branches) {
    const { row, above } = branch;
    if (gone.has(above)) gone.add(row.id);
    else if (!narrow(branch)) found.push(branch);
    else {
      gone.add(row.id);
      if (!slivers.has(above)) slivers.set(above, []);
      slivers.get(above).push(branch);
    }
  }
  for (const [above, of] of slivers) {
    const one = of.length === 1 ? of[0] : together(above, of);
    if (one.width * width >= NARROWEST) found.push(one);
  }
  return found;
}

function together(above, of) {
  const sum = (value) => of.reduce((total, { row }) => total + value(row), 0);
  const served_tokens = sum((row) => row.served_tokens), hits = sum((row) => (row.hit_rate ?? 0) * row.served_tokens);
  const row = { id: `others ${above}`, others: of.length, served_tokens, hit_rate: served_tokens ? hits / served_tokens : null, requests: sum((each) => each.requests), holders: [...new Set(of.flatMap((each) => each.row.holders))] };
  return { row, above, x: of[0].x, width: of.reduce((total, { width }) => total + width, 0), depth: of[0].depth };
}

function branchOf(row) {
  return s("g", { "data-id": row.id }, s("rect"), s("g"), s("text", { x: 6, y: 16, class: "name" }), s("text", { x: 6, y: 31, class: "facts" }));
}

function size(rect, x, y, width, height) {
  for (const [name, value] of Object.entries({ x, y, width, height })) set(rect, name, value.toFixed(1));
}

function cut(words, room) {
  if (room < 3) return "";
  return words.length <= room ? words : `${words.slice(0, room - 1)}…`;
}
