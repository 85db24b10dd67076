// Charts over time, drawn by uPlot: lines with gaps where nothing was measured, and stacked bars. Dragging over one
// zooms all of them, and the pointer on one reads out all of them. The picture is for eyes; its label says the gist, a
// table below has the figures, and buttons above the charts move and zoom as dragging does.
/* global uPlot */

import { clock, day, NONE } from "./format.js";
import { h, keyed, set, table, text } from "./dom.js";

const AXIS = 52, DRAG_MIN = 6; // pixels
const CLOSE = 200; // bars, above which they stand without gaps
const FONT = "12px system-ui, sans-serif";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  // `series`: [{kind, name, colour, width?, dash?}], of bars the bottom one first; `show(value)` for axis, readout and
  // table; `top(max)` gives the axis its end; `zoomed(from_s, to_s)` and `back()` are called as somebody drags.
  constructor(parent, { series, show, noun, stacked = false, top = nice, height = 190, zoomed, back }) {
    Object.assign(this, { series, show, noun, stacked, top, height, zoomed, back, off: new Set() });
    this.legend = h("ul", { class: "legend" });
    this.plot = h("div", { class: "plot", role: "img" });
    this.readout = h("p", { class: "readout", "aria-hidden": "true" });
    this.details = h("details", { class: "figures" }, h("summary", {}, "As a table"));
    this.table = h("table", {}, h("caption", { class: "hidden" }, noun));
    this.details.append(h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `${noun}, as a table` }, this.table));
    parent.append(this.legend, this.plot, this.readout, this.details);
    this.details.addEventListener("toggle", () => this.tabulate());
    new ResizeObserver(() => this.size()).observe(this.plot);
  }

  // `points`: [{at_s, values: {kind: number or null}}], oldest first, evenly spaced by `step_s`; `rows` likewise, for
  // the table, made when it is open. The axis reaches from `from_s` to `to_s`.
  update({ points, rows, from_s, to_s, step_s, label }) {
    Object.assign(this, { points, rows, from_s, to_s, step_s });
    set(this.plot, "aria-label", `${label} ${clock(from_s)} to ${clock(to_s)}.`);
    this.draw();
    this.tabulate();
  }

  // Series that have a figure, in their order; those that somebody switched off stay in the legend.
  get known() {
    return this.series.filter(({ kind }) => this.points.some(({ values }) => (this.stacked ? values[kind] > 0 : values[kind] !== null && values[kind] !== undefined)));
  }

  draw() {
    if (!this.points) return;
    keyed(this.legend, this.known, ({ kind }) => kind, (each) => this.switch(each), (item, { kind }) => set(item.firstElementChild, "aria-pressed", String(!this.off.has(kind))));
    const width = this.plot.clientWidth;
    if (width < 60) return;
    if (this.chart) this.chart.setData(this.data());
    else this.chart = new uPlot(this.options(width), this.data(), this.plot);
    this.readOut();
  }

  switch({ kind, name }) {
    const button = h("button", { type: "button", class: "switch" }, h("span", { class: `swatch fill-${kind}`, "aria-hidden": "true" }), name);
    button.addEventListener("click", () => {
      if (!this.off.delete(kind)) this.off.add(kind);
      this.draw();
    });
    return h("li", {}, button);
  }

  size() {
    const width = this.plot.clientWidth;
    if (this.chart && width >= 60) this.chart.setSize({ width, height: this.height });
    else this.draw();
  }

  repaint() {
    this.chart?.redraw(false);
  }

  // What uPlot draws: times, and a row of values for each series. Of bars the sums up to each, the highest first, so
  // that each is drawn over those that it stands on.
  data() {
    const times = this.points.map(({ at_s }) => at_s);
    const shown = (kind, values) => (this.off.has(kind) ? null : (values[kind] ?? null));
    if (!this.stacked) return [times, ...this.series.map(({ kind }) => this.points.map(({ values }) => shown(kind, values)))];
    const below = times.map(() => 0);
    const sums = this.series.map(({ kind }) => this.points.map(({ values }, at) => (values[kind] > 0 && !this.off.has(kind) ? (below[at] += values[kind]) : null)));
    return [times, ...sums.reverse()];
  }

  options(width) {
    const grid = { stroke: () => css("--line"), width: 1 };
    const axis = { stroke: () => css("--faint"), font: FONT, grid, ticks: { ...grid, size: 4 } };
    const drawn = this.stacked ? [...this.series].reverse() : this.series;
    return {
      width, height: this.height, legend: { show: false }, padding: [8, 30, 0, 0],
      scales: { x: { time: true, range: () => [this.from_s, this.to_s] }, y: { range: (_, __, max) => [0, this.top(Math.max(0, max ?? 0))] } },
      axes: [
        { ...axis, grid: { show: false }, size: 26, space: 72, values: (_, times, __, ___, apart_s) => times.map((at_s) => tick(at_s, apart_s)) },
        { ...axis, size: AXIS, ticks: { show: false }, space: 44, values: (_, values) => values.map((value) => this.show(value)) },
      ],
      series: [{}, ...drawn.map((each) => this.drawn(each))],
      cursor: { y: false, points: { show: !this.stacked, size: 7 }, drag: { x: true, y: false, setScale: false, dist: DRAG_MIN }, sync: { key: "warmroute", filters: { pub: (kind) => ["mousemove", "mouseleave"].includes(kind) } }, bind: { dblclick: () => () => this.back() } },
      hooks: { setCursor: [() => this.readOut()], setSelect: [(chart) => this.selected(chart)] },
    };
  }

  drawn({ colour, width = 2, dash }) {
    const paint = () => css(colour);
    if (!this.stacked) return { stroke: paint, width, dash, points: { show: false, size: 4, fill: paint, filter: (chart, at) => lonely(chart.data[at]) } };
    const [apart, close] = [1, 0].map((gap) => uPlot.paths.bars({ align: 1, size: [1], gap }));
    return { fill: paint, width: 0, points: { show: false }, paths: (...all) => (this.points.length > CLOSE ? close : apart)(...all) };
  }

  selected(chart) {
    const { left, width } = chart.select;
    if (width < DRAG_MIN) return;
    const [from_s, to_s] = [left, left + width].map((x) => chart.posToVal(x, "x"));
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.zoomed(from_s, to_s);
  }

  // What the pointer is on; else the latest.
  readOut() {
    const at = this.chart?.cursor.idx, point = this.points[at ?? this.points.length - 1];
    if (!point) return text(this.readout, NONE);
    const shown = this.known.filter(({ kind }) => !this.off.has(kind) && (!this.stacked || point.values[kind] > 0));
    const words = shown.map(({ kind, name }) => `${name} ${this.show(point.values[kind])}`);
    text(this.readout, `${this.step_s >= 3600 ? `${day(point.at_s)} ` : ""}${clock(point.at_s)}  ${words.join("  ·  ") || "nothing"}`);
  }

  tabulate() {
    if (!this.details.open || !this.rows) return;
    const figures = this.series.map(({ kind, name }) => ({ name, numeric: true, value: (row) => this.show(row.values[kind]) }));
    const from = { name: "From", header: true, value: ({ at_s }) => (this.to_s - this.from_s > 86400 ? `${day(at_s)} ${clock(at_s)}` : clock(at_s)) };
    table(this.table, [from, ...figures], this.rows().reverse(), ({ at_s }) => at_s, "Nothing yet.");
  }
}

// Buttons of which one is on: what a chart shows.
export function choice(parent, label, options, chosen) {
  const group = h("div", { class: "choice", role: "group", "aria-label": label });
  for (const [value, words] of Object.entries(options)) {
    const button = h("button", { type: "button", "aria-pressed": "false", "data-value": value }, words);
    button.addEventListener("click", () => chosen(value));
    group.append(button);
  }
  parent.append(group);
  return (value) => {
    for (const button of group.children) set(button, "aria-pressed", String(button.dataset.value === value));
  };
}

// The next round figure at or above.
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

function tick(at_s, apart_s) {
  if (apart_s >= 86400) return day(at_s);
  return apart_s < 60 ? clock(at_s) : clock(at_s).slice(0, 5);
}

// Points that stand alone between gaps: a line of one point would not be seen.
function lonely(values) {
  const known = (at) => (values[at] ?? null) !== null;
  const found = values.map((_, at) => at).filter((at) => known(at) && !known(at - 1) && !known(at + 1));
  return found.length ? found : null;
}
