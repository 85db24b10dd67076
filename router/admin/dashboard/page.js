// The page from what the router told: every part is filled in place.

import { percent, span, stretch } from "./format.js";
import { hintScrolling, set, text } from "./dom.js";
import { showAttention } from "./attention.js";
import { requestsCsv, save, seriesCsv, fileName } from "./export.js";
import { showFunnel } from "./funnel.js";
import { PromptMap } from "./map.js";
import { showSplit } from "./pairs.js";
import { Panels } from "./panels.js";
import { showReasons } from "./reasons.js";
import { Requests } from "./requests.js";
import { summed } from "./sums.js";
import { showAdvice, showGroups, showModels, showReplicas, showTenants } from "./tables.js";
import { showTiles } from "./tiles.js";
import { showLinks, Toolbar } from "./toolbar.js";

const NAMES = { "10m": "10 min", "1h": "1 h", "6h": "6 h", "24h": "24 h", all: "all data" };
const $ = (id) => document.getElementById(id);

// All figures of the page are of one router. Several have a load balancer before them, which may choose another at each load.
function scope(router) {
  if (!router?.name) return "";
  const peers = router.peers ?? [];
  const beside = peers.length ? `, beside ${peers.slice(0, 3).join(", ")}${peers.length > 3 ? ` and ${peers.length - 3} more` : ""}` : "";
  return `requests of router ${router.name} only${beside} · `;
}

export class Page {
  // `history` has the series, `open(event, path)` opens another page of the router.
  constructor(view, history, source, open) {
    Object.assign(this, { view, history, openPage: open });
    this.toolbar = new Toolbar($("toolbar"), view, () => this.drawn, this.exports());
    this.panels = new Panels(view);
    this.map = new PromptMap($("map"));
    this.requests = new Requests(view, source);
    hintScrolling($("page"));
    this.narrow = (filters) => {
      view.filter(filters);
      $("decisions-title").scrollIntoView();
      $("search").elements.id.focus({ preventScroll: true });
    };
  }

  // What the view shows now; the figures of the stretch that the charts show are summed once for all parts.
  show(seen) {
    this.seen = seen;
    const drawn = (this.drawn = this.history.drawn(seen, this.view)), sum = summed(drawn.counted);
    text($("about"), `${scope(seen.router)}${seen.build || seen.version} · up ${span(seen.uptime_s)}`);
    set($("about"), "title", $("about").textContent);
    showLinks($("links"), seen, this.openPage);
    showAttention($("attention"), seen, this.history);
    this.toolbar.update(this.history.has, drawn, seen.now_s);
    showTiles($("tiles"), seen, this.history, sum, this.named());
    this.panels.update(drawn, sum, this.history.has);
    this.sayRate(seen);
    showFunnel($("funnel-card"), $("funnel"), seen.stages, sum);
    showReasons($("reasons-table"), sum, seen.totals);
    showAdvice($("advice"), seen);
    this.map.update(seen.map, seen.replicas);
    this.tables(seen);
  }

  tables(seen) {
    const shown = this.history.has ? this.history.window : undefined;
    const when = shown ? "In the time range of the charts" : "Since the router started";
    text($("models-note"), `${when}; requests in flight and waiting are those of now. Select a model to see its requests.`);
    text($("groups-note"), `${when}, by route, tenant, use of tools, and agent step. Times and prompt lengths are of the last requests.`);
    $("models-card").hidden = !seen.models?.length;
    if (seen.models) showModels($("models"), seen.models, shown?.models, seen.replicas, this.narrow);
    showReplicas($("replicas"), seen.replicas, this.narrow);
    showSplit($("split-card"), $("split-note"), $("split"), $("pairs"), seen);
    showTenants($("tenants-card"), $("tenants"), seen.tenants, this.narrow);
    showGroups($("groups"), seen.groups, shown?.groups, this.narrow);
  }

  named() {
    const { zoom, range } = this.view;
    return zoom ? "zoomed" : NAMES[range];
  }

  // Two figures beside the hit rate: how many prompts are no replays, and what engines counted of silent answers.
  sayRate({ totals }) {
    const words = ["Share of prompt tokens that hit the cache, means over 30 s."];
    if (totals.diversity !== null) words.push(`Prompt diversity ${totals.diversity.toFixed(2)} (1: all prompts differ).`);
    if (totals.counted_tokens > 0) words.push(`By the engines' counters ${percent(totals.counted_hit_tokens / totals.counted_tokens)} for answers without a cached-token count.`);
    text($("rate-note"), words.join(" "));
  }

  exports() {
    const csv = "text/csv;charset=utf-8", now_s = () => this.seen.now_s;
    return {
      "Charts as CSV": () => save(fileName("series", now_s(), "csv"), csv, seriesCsv(this.drawn.points)),
      "Requests as CSV": () => save(fileName("requests", now_s(), "csv"), csv, requestsCsv(this.requests.rows)),
      "All as JSON": () => save(fileName("page", now_s(), "json"), "application/json", JSON.stringify({ shown: stretch(this.drawn.from_s, this.drawn.to_s), address: location.href, series: this.drawn, requests: this.requests.rows, observatory: this.seen }, null, 1)),
    };
  }
}
