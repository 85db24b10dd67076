// How figures look: one way for each kind, so that they can be compared down a column. Nothing known is an en dash.

export const NONE = "–";
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const missing = (value) => value === null || value === undefined || Number.isNaN(value);

export function count(value) {
  return missing(value) ? NONE : Math.abs(value) < 10000 ? plain.format(value) : compact.format(value);
}

export function whole(value) {
  return missing(value) ? NONE : plain.format(value);
}

export function percent(share, digits = 1) {
  return missing(share) ? NONE : `${(100 * share).toFixed(digits)} %`;
}

export function rate(perSecond) {
  return missing(perSecond) ? NONE : perSecond < 10 ? perSecond.toFixed(1) : count(perSecond);
}

export function seconds(value) {
  if (missing(value)) return NONE;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  return value < 100 ? `${value.toFixed(1)} s` : `${plain.format(value)} s`;
}

export function millis(value) {
  return missing(value) ? NONE : seconds(value / 1000);
}

export function span(value) {
  if (missing(value)) return NONE;
  const minutes = Math.floor(value / 60);
  if (minutes < 1) return `${Math.round(value)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

export function bytes(value) {
  if (missing(value)) return NONE;
  return value < 10000 ? `${plain.format(value)} B` : `${compact.format(value / 1024)} KiB`;
}

export function clock(unixS) {
  return new Date(unixS * 1000).toLocaleTimeString("en-GB");
}

export function day(unixS) {
  return new Date(unixS * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}

// A stretch of time in words: of one day its hours, else with the days.
export function stretch(from_s, to_s) {
  const [first, last] = [from_s, to_s].map((at_s) => clock(at_s));
  return day(from_s) === day(to_s) ? `${first} – ${last}` : `${day(from_s)}, ${first} – ${day(to_s)}, ${last}`;
}

// What a replica is called: without a name by its address.
export function replicaName({ id, name }) {
  return name || id.replace(/^http:\/\//, "");
}

export function share(part, of) {
  return of > 0 ? part / of : null;
}

export const NAMED_MAX = 3;

// The first few rows in words, and how many more there are.
export function listed(rows, words) {
  const more = rows.length > NAMED_MAX ? ` and ${rows.length - NAMED_MAX} more` : "";
  return rows.slice(0, NAMED_MAX).map(words).join(", ") + more;
}
