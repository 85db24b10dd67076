// Above the charts: how far back they reach, moving and zooming without a mouse, a pause, and what can be taken away.

import { span, stretch } from "./format.js";
import { h, set, text } from "./dom.js";
import { choice } from "./charts.js";
import { RANGES } from "./view.js";

const NAMES = { "10m": "10 min", "1h": "1 h", "6h": "6 h", "24h": "24 h", all: "All" };
const STEP = 0.5; // of what is shown, to move by
const CLOSER = 0.5;
const ALMOST_S = 60; // of the time that memory reaches back, from which it counts as full

export class Toolbar {
  // `drawn()` is what the charts show now; `exports`: {name: function that saves it}.
  constructor(parent, view, drawn, exports) {
    Object.assign(this, { view, drawn });
    this.mark = choice(parent, "Time range", NAMES, (range) => view.choose(range));
    this.ranges = parent.lastElementChild;
    const moves = h("div", { class: "choice", role: "group", "aria-label": "Move and zoom" });
    for (const [sign, name, move] of [["←", "Earlier", this.shift(-STEP)], ["→", "Later", this.shift(STEP)], ["+", "Zoom in", this.scale(CLOSER)], ["−", "Zoom out", this.scale(1 / CLOSER)]]) {
      const button = h("button", { type: "button", "aria-label": name, title: name }, sign);
      button.addEventListener("click", move);
      moves.append(button);
    }
    this.moves = moves;
    this.words = h("p", { class: "stretch", id: "stretch" });
    this.live = h("button", { type: "button", hidden: true }, "Back to now");
    this.live.addEventListener("click", () => {
      view.choose(view.range);
      this.ranges.querySelector('[aria-pressed="true"]')?.focus();
    });
    parent.append(moves, this.words, this.live, menu("Export", exports));
  }

  shift(part) {
    return () => {
      const { from_s, to_s } = this.drawn(), by_s = (to_s - from_s) * part;
      this.go(from_s + by_s, to_s + by_s);
    };
  }

  scale(factor) {
    return () => {
      const { from_s, to_s } = this.drawn(), middle = (from_s + to_s) / 2, half = ((to_s - from_s) * factor) / 2;
      this.go(middle - half, middle + half);
    };
  }

  // To a stretch that ends by now: there is nothing behind that.
  go(from_s, to_s) {
    const late_s = Math.max(0, to_s - this.now_s);
    this.view.zoomTo(from_s - late_s, to_s - late_s);
  }

  // Without series there are ten minutes, and nothing to choose.
  update(has, { from_s, to_s, step_s, kept }, now_s) {
    const { range, zoom } = this.view;
    this.now_s = now_s;
    this.mark(zoom ? "" : range);
    this.ranges.hidden = !has;
    this.moves.hidden = !has;
    this.live.hidden = !zoom;
    const words = [stretch(from_s, to_s), `steps of ${span(step_s)}`];
    const since_s = kept?.since_s, short = !zoom && since_s && now_s - since_s < RANGES[range] - step_s;
    if (short && !["10m", "all"].includes(range)) words.push(`older data is not kept${!kept.path && now_s - since_s > kept.memory_s - ALMOST_S ? " (set admin.history_path to keep it)" : ""}`);
    if (kept?.state === "failing") words.push(`history cannot be written: ${kept.why}`);
    text(this.words, words.join(" · "));
    this.words.classList.toggle("much", kept?.state === "failing");
  }
}

// A button that opens to others; it closes when one was pressed, with Escape, and when something else is pressed.
function menu(name, choices) {
  const list = h("div", { class: "choices" });
  const details = h("details", { class: "menu" }, h("summary", {}, name), list);
  for (const [words, act] of Object.entries(choices)) {
    const button = h("button", { type: "button" }, words);
    button.addEventListener("click", () => {
      details.open = false;
      details.firstElementChild.focus();
      act();
    });
    list.append(button);
  }
  details.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !details.open) return;
    details.open = false;
    details.firstElementChild.focus();
  });
  document.addEventListener("click", (event) => {
    if (!details.contains(event.target)) details.open = false;
  });
  return details;
}

// Links to other pages: those of this router that it says it has, and Grafana where the settings name it.
export function showLinks(element, seen, open) {
  const found = [["/metrics", "Metrics"], ["/runbook", "Runbook"]].filter(([path]) => (seen.pages ?? []).includes(path)).map(([path, name]) => [path.slice(1), name]);
  const grafana = seen.links?.grafana ?? "";
  if (/^https?:\/\//i.test(grafana)) found.push([grafana, "Grafana"]);
  if (element.dataset.shown === JSON.stringify(found)) return;
  element.dataset.shown = JSON.stringify(found);
  element.replaceChildren();
  for (const [to, name] of found) {
    const link = h("a", { rel: "noreferrer noopener", target: "_blank" }, name);
    set(link, "href", to);
    link.addEventListener("click", (event) => open(event, to));
    element.append(h("li", {}, link));
  }
}
