// Charts over time, in SVG by hand: lines with gaps where nothing was measured, and stacked bars.
// The picture is for eyes; its label says the gist, and a table below has the figures by minute.

import { clock, NONE } from "./format.js";
import { h, keyed, s, set, table, text } from "./dom.js";

const TICKS_MIN = [0.5, 1, 2, 5]; // minutes between two of them
const LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;

export class Chart {
  // `series`: [{kind, name}], bottom first; `show(value)` for axis and tables; `top(max)` gives the axis its end.
  constructor(parent, { series, show, stacked = false, top = nice, height = 190, noun }) {
    Object.assign(this, { parent, series, show, stacked, top, height, noun });
    this.svg = s("svg", { role: "img", class: "plot" });
    this.grid = s("g", { class: "axis" });
    this.marks = s("g", { class: "marks" });
    this.cursor = s("line", { class: "cursor", visibility: "hidden" });
    this.svg.append(this.grid, this.marks, this.cursor);
    this.legend = h("ul", { class: "legend", "aria-hidden": "true" });
    this.readout = h("p", { class: "readout", "aria-hidden": "true" });
    this.details = h("details", { class: "figures" }, h("summary", {}, "Figures by minute"));
    this.table = h("table", {}, h("caption", { class: "hidden" }, `${noun} by minute`));
    this.details.append(h("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": `${noun} by minute` }, this.table));
    parent.append(this.legend, this.svg, this.readout, this.details);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.details.addEventListener("toggle", () => this.tabulate());
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  // `points`: [{at_s, values: {kind: number or null}}], oldest first, evenly spaced; `minutes` likewise.
  update(points, minutes, label) {
    Object.assign(this, { points, minutes });
    set(this.svg, "aria-label", label);
    this.draw();
    this.tabulate();
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!this.points || width < 60) return;
    this.width = width;
    set(this.svg, "viewBox", `0 0 ${width} ${this.height}`);
    const kinds = this.series.filter(({ kind }) => !this.stacked || this.points.some((point) => point.values[kind] > 0));
    keyed(this.legend, kinds, ({ kind }) => kind, ({ kind, name }) => h("li", {}, h("span", { class: `swatch fill-${kind}` }), name), () => {});
    const tall = this.points.map(({ values }) => this.reach(values));
    this.max = this.top(Math.max(0, ...tall));
    this.axes();
    if (this.stacked) this.bars(kinds);
    else this.lines();
    this.readOut(this.points.length - 1);
  }

  reach(values) {
    const all = this.series.map(({ kind }) => values[kind] || 0);
    return this.stacked ? all.reduce((sum, value) => sum + value, 0) : Math.max(...all);
  }

  x(at) {
    return LEFT + ((this.width - LEFT - RIGHT) * at) / Math.max(1, this.points.length - (this.stacked ? 0 : 1));
  }

  y(value) {
    return TOP + (this.height - TOP - BOTTOM) * (1 - Math.min(1, value / this.max));
  }

  axes() {
    const ticks = [0, 0.5, 1].map((part) => ({ key: `y${part}`, value: part * this.max }));
    const last = this.points.length - 1;
    const step = last > 0 ? this.points[1].at_s - this.points[0].at_s : 1;
    const times = [];
    const between = TICKS_MIN.find((minutes) => last * step <= minutes * 60 * (this.width < 420 ? 3 : 6)) ?? TICKS_MIN.at(-1);
    for (let minutes = 0; minutes * 60 <= last * step; minutes += between) times.push({ key: `x${minutes}`, minutes, at: last - (minutes * 60) / step });
    keyed(this.grid, [...ticks, ...times], ({ key }) => key, () => s("g", {}, s("line"), s("text")), (group, tick) => {
      const [line, words] = group.children;
      if (tick.at === undefined) {
        const y = this.y(tick.value);
        place(line, LEFT, y, this.width - RIGHT, y);
        label(words, LEFT - 6, y + 4, "end", this.show(tick.value));
      } else {
        const x = this.x(tick.at);
        place(line, x, this.height - BOTTOM, x, this.height - BOTTOM + 4);
        label(words, x, this.height - 4, tick.minutes ? "middle" : "end", tick.minutes ? `−${tick.minutes < 1 ? `${tick.minutes * 60} s` : `${tick.minutes} min`}` : "now");
      }
    });
  }

  lines() {
    keyed(this.marks, this.series, ({ kind }) => kind, ({ kind }) => s("path", { class: `line stroke-${kind}` }), (path, { kind }) => {
      let d = "", open = false;
      this.points.forEach((point, at) => {
        const value = point.values[kind];
        if (value === null || value === undefined) {
          open = false;
          return;
        }
        const spot = `${this.x(at).toFixed(1)} ${this.y(value).toFixed(1)}`;
        const alone = !open && (this.points[at + 1]?.values[kind] ?? null) === null;
        d += `${open ? "L" : "M"}${spot}${alone ? "h0.01" : ""}`;
        open = true;
      });
      set(path, "d", d);
    });
  }

  bars(kinds) {
    const width = this.x(1) - this.x(0);
    const fat = Math.max(1, width - (width > 4 ? 1 : 0.4)).toFixed(2);
    keyed(this.marks, kinds, ({ kind }) => kind, ({ kind }) => s("path", { class: `fill-${kind}` }), (path, { kind }) => {
      const below = this.series.slice(0, this.series.findIndex((each) => each.kind === kind));
      let d = "";
      this.points.forEach(({ values }, at) => {
        if (!(values[kind] > 0)) return;
        const base = below.reduce((sum, each) => sum + (values[each.kind] || 0), 0);
        const y0 = this.y(base), y1 = this.y(base + values[kind]);
        d += `M${this.x(at).toFixed(1)} ${y0.toFixed(1)}h${fat}V${y1.toFixed(1)}h-${fat}z`;
      });
      set(path, "d", d);
    });
  }

  point(event) {
    if (!this.points?.length) return;
    const span = (this.width - LEFT - RIGHT) / Math.max(1, this.points.length - (this.stacked ? 0 : 1));
    const raw = (event.clientX - this.svg.getBoundingClientRect().left - LEFT) / span;
    this.at = Math.min(this.points.length - 1, Math.max(0, this.stacked ? Math.floor(raw) : Math.round(raw)));
    const x = this.x(this.at + (this.stacked ? 0.5 : 0));
    place(this.cursor, x, TOP, x, this.height - BOTTOM);
    set(this.cursor, "visibility", "visible");
    this.readOut(this.at);
  }

  leave() {
    this.at = undefined;
    set(this.cursor, "visibility", "hidden");
    if (this.points?.length) this.readOut(this.points.length - 1);
  }

  // What the pointer is on; else the latest.
  readOut(at) {
    const point = this.points[this.at ?? at];
    if (!point) return text(this.readout, NONE);
    const shown = this.series.filter(({ kind }) => !this.stacked || point.values[kind] > 0);
    const words = shown.map(({ kind, name }) => `${name} ${this.show(point.values[kind])}`);
    text(this.readout, `${clock(point.at_s)}  ${words.join("  ·  ") || "nothing"}`);
  }

  tabulate() {
    if (!this.details.open || !this.minutes) return;
    const shown = this.series.map(({ kind, name }) => ({ name, numeric: true, value: (row) => this.show(row.values[kind]) }));
    const rows = [...this.minutes].reverse();
    table(this.table, [{ name: "From", header: true, value: (row) => clock(row.at_s) }, ...shown], rows, (row) => row.at_s, "Nothing yet.");
  }
}

// The next round figure at or above.
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value) * power;
}

function place(line, x1, y1, x2, y2) {
  for (const [name, value] of Object.entries({ x1, y1, x2, y2 })) set(line, name, value.toFixed(1));
}

function label(element, x, y, anchor, words) {
  set(element, "x", x.toFixed(1));
  set(element, "y", y.toFixed(1));
  set(element, "text-anchor", anchor);
  text(element, words);
}
