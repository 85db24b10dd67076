// Series over time, for the charts: the last ten minutes as they come, and the range or stretch that is looked at.
// A router that keeps no series (its answer's `pages` does not name the page) has ten minutes in its observatory.

import { RANGES } from "./view.js";

const SERIES = "/admin/series";
const STEP_S = 5; // of the last ten minutes
const STEPS_S = [5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400];
const POINTS_MAX = 370; // of a chart: more than one a pixel is noise
const RECENT_S = 600;
const SHORTEST_S = 120; // axis of a router that has only begun
const OFTEN_S = 4; // between two looks at the last minute, or at any range of short steps
const SELDOM_S = 30; // between two looks at a range of long steps

export class History {
  constructor(source) {
    this.source = source;
    this.forget();
  }

  forget() {
    this.recent = this.minute = this.window = undefined;
    this.due = {};
  }

  // Ask for what is due; `seen` is the answer of the observatory, `view` what is looked at.
  async refresh(seen, view, signal) {
    this.has = (seen.pages ?? []).includes(SERIES);
    if (!this.has) {
      this.recent = ofObservatory(seen);
      this.window = this.recent;
      return;
    }
    const { now_s } = seen, ask = (parameters) => this.source.get("admin/series", parameters, { signal });
    const asked = [ask({})]; // with every look, so that all figures of the page are of one moment
    if (this.isDue("minute", "", now_s)) asked.push(ask({ from_s: Math.floor(now_s) - 120, to_s: Math.floor(now_s), step_s: 60 }));
    const [recent, minute] = await Promise.all(asked);
    this.recent = recent;
    if (minute) {
      this.minute = minute;
      this.next("minute", "", now_s, OFTEN_S);
    }
    if (!view.zoom && view.range === "10m") {
      this.window = this.recent;
      return;
    }
    const what = view.zoom ? `${view.zoom.from_s} ${view.zoom.to_s}` : view.range;
    if (!this.isDue("window", what, now_s)) return;
    this.window = await this.stepped(this.stretch(view, now_s), ask);
    const over = view.zoom && view.zoom.to_s < now_s - this.window.step_s;
    this.next("window", what, now_s, over ? Infinity : Math.min(SELDOM_S, Math.max(OFTEN_S, this.window.step_s)));
  }

  // Steps so short may not be kept so far back: then those that the router chooses.
  async stepped(stretch, ask) {
    try {
      return await ask(stretch);
    } catch (error) {
      if (error.status !== 400) throw error;
      return ask({ ...stretch, step_s: "" });
    }
  }

  isDue(name, what, now_s) {
    const due = this.due[name];
    return !due || due.what !== what || now_s >= due.at_s;
  }

  next(name, what, now_s, after_s) {
    this.due[name] = { what, at_s: now_s + after_s };
  }

  // What is asked for: no more than is kept, and never less than an axis can show, in steps that lines can be told by.
  stretch(view, now_s) {
    if (view.zoom) return stepped(view.zoom.from_s, Math.max(view.zoom.from_s + STEP_S, Math.min(view.zoom.to_s, Math.ceil(now_s))));
    const since_s = this.recent?.kept?.since_s ?? now_s;
    const from_s = Math.max(now_s - RANGES[view.range], Math.min(since_s, now_s - SHORTEST_S));
    return stepped(Math.floor(from_s), Math.ceil(now_s));
  }

  // What is drawn: {points that are over, step_s, from_s, to_s, kept}; the axis fits what there is. `counted` are all
  // points of that time, with the step under way.
  drawn(seen, view) {
    const { points, step_s, kept } = this.window ?? { points: [], step_s: STEP_S };
    const over = points.filter(({ at_s }) => at_s + step_s <= seen.now_s); // the step under way says nothing yet
    const to_s = view.zoom ? view.zoom.to_s : (over.at(-1)?.at_s ?? seen.now_s) + step_s;
    if (view.zoom) return { points: over, counted: points, step_s, kept, from_s: view.zoom.from_s, to_s };
    const known_s = kept ? (kept.since_s ?? seen.now_s) : seen.now_s - seen.uptime_s;
    const from_s = Math.max(over[0]?.at_s ?? to_s - RECENT_S, Math.min(known_s - step_s, to_s - SHORTEST_S));
    return { points: over.filter(({ at_s }) => at_s >= from_s), counted: points, step_s, kept, from_s, to_s };
  }

  // The last minute, step by step, and for how many seconds of it the router was there.
  lastMinute(seen) {
    const { points, step_s } = this.recent ?? { points: [], step_s: STEP_S };
    const first_s = Math.floor(seen.now_s / step_s) * step_s - 60 + step_s;
    const last = points.filter(({ at_s }) => at_s >= first_s);
    return { points: last, over_s: Math.max(1, Math.min(seen.uptime_s, seen.now_s - first_s)) };
  }

  // Percentiles of the last whole minute; while the first one has not ended, of that.
  lastPercentiles() {
    const known = (this.minute?.points ?? []).filter((point) => point.known && point.requests > 0);
    const whole = known.filter(({ at_s }) => at_s + 60 <= this.minute.now_s);
    return whole.at(-1) ?? known.at(-1);
  }
}

function stepped(from_s, to_s) {
  return { from_s, to_s, step_s: STEPS_S.find((step_s) => (to_s - from_s) / step_s <= POINTS_MAX) ?? STEPS_S.at(-1) };
}

function ofObservatory({ timeline, now_s }) {
  return { now_s, step_s: timeline.step_s, points: timeline.points.map((point) => ({ known: true, ...point })) };
}
