// What is looked at: a range of time, a stretch that was zoomed into, and filters of requests. All of it is in the
// address behind "#", so that it can be sent to somebody; names of parts of the page ("#replicas-title") stay anchors.

export const RANGES = { "10m": 600, "1h": 3600, "6h": 21600, "24h": 86400, all: Infinity };
export const FILTERS = ["id", "model", "tenant", "replica", "reason", "status", "session"];
const SHORTEST_S = 30; // stretch that can be zoomed to: six steps
const OLDEST_S = 1e9; // Unix seconds; anything before is no time of a request
const VALUE_MAX = 256; // characters of a filter

export class View {
  constructor(changed) {
    this.changed = changed;
    this.read();
    addEventListener("hashchange", () => {
      if (location.hash.includes("=")) {
        this.read();
        this.changed();
      } else this.write();
    });
  }

  read() {
    const said = new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
    this.range = said.get("range") in RANGES ? said.get("range") : "10m";
    const [from_s, to_s] = [Number(said.get("from")), Number(said.get("to"))];
    this.zoom = from_s > OLDEST_S && to_s - from_s >= SHORTEST_S ? { from_s, to_s } : null;
    this.filters = Object.fromEntries(FILTERS.map((name) => [name, (said.get(name) ?? "").slice(0, VALUE_MAX)]));
  }

  get hash() {
    const said = new URLSearchParams();
    if (this.range !== "10m") said.set("range", this.range);
    if (this.zoom) {
      said.set("from", this.zoom.from_s);
      said.set("to", this.zoom.to_s);
    }
    for (const [name, value] of Object.entries(this.filters)) if (value) said.set(name, value);
    return String(said) ? `#${said}` : "";
  }

  write() {
    history.replaceState(null, "", this.hash || location.pathname + location.search);
  }

  get filtered() {
    return Object.values(this.filters).some(Boolean);
  }

  change(what) {
    Object.assign(this, what);
    this.write();
    this.changed();
  }

  choose(range) {
    this.change({ range, zoom: null });
  }

  // To a stretch of time, in whole seconds; one too short is made as long as it may be, about its middle.
  zoomTo(from_s, to_s) {
    const middle = (from_s + to_s) / 2, half = Math.max(SHORTEST_S, to_s - from_s) / 2;
    this.change({ zoom: { from_s: Math.floor(middle - half), to_s: Math.ceil(middle + half) } });
  }

  filter(filters) {
    this.change({ filters: { ...this.filters, ...filters } });
  }

  clear() {
    this.change({ filters: Object.fromEntries(FILTERS.map((name) => [name, ""])) });
  }
}
