// What is shown, as a file: series and requests as CSV for a spreadsheet, and all of it as JSON for a ticket.

const FORMULA = /^[=+\-@\t\r]/; // a spreadsheet would run a cell that begins so; names are clients' words
const KEEP_MS = 10000; // until the browser has read what it saves

// A row of fields, by RFC 4180; what only looks like a formula is marked as text.
function line(values) {
  return values.map((value) => {
    const words = value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
    const safe = typeof value === "number" || !FORMULA.test(words) ? words : `'${words}`;
    return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }).join(",");
}

const time = (unixS) => new Date(unixS * 1000).toISOString();

const TABLES = { misses: "missed", places: "ended", held: "held" };

// Points of a series, one a line: its own fields, then tokens by reason of the miss, by place, and by cause of those
// held elsewhere.
export function seriesCsv(points) {
  const fields = [...new Set(points.flatMap((point) => Object.keys(point)))].filter((name) => !(name in TABLES) && name !== "at_s");
  const columns = Object.keys(TABLES).flatMap((table) => [...new Set(points.flatMap((point) => Object.keys(point[table] ?? {})))].sort().map((kind) => [table, kind]));
  const rows = points.map((point) => [time(point.at_s), point.at_s, ...fields.map((name) => point[name]), ...columns.map(([table, kind]) => (point.known ? (point[table]?.[kind] ?? 0) : ""))]);
  return [["time", "at_s", ...fields, ...columns.map(([table, kind]) => `${TABLES[table]}_${kind}`)], ...rows].map((row) => `${line(row)}\r\n`).join("");
}

const OF_REQUESTS = ["id", "at_s", "route", "model", "tenant", "session", "status", "ending", "error", "detail", "replica", "reason", "grade", "prompt_tokens", "predicted_cached_tokens", "hit_tokens", "hit", "verified", "ttft_s", "inter_token_s", "duration_s", "queued_s", "turn", "step", "template", "conversation"];

export function requestsCsv(rows) {
  const fields = OF_REQUESTS.filter((name) => rows.some((row) => row[name] !== undefined));
  const lines = rows.map((row) => [time(row.at_s), ...fields.map((name) => row[name]), row.usage?.completion_tokens, row.usage?.cached_tokens, row.miss]);
  return [["time", ...fields, "completion_tokens", "engine_cached_tokens", "miss"], ...lines].map((row) => `${line(row)}\r\n`).join("");
}

// Have the browser save a file.
export function save(name, kind, content) {
  const url = URL.createObjectURL(new Blob([content], { type: kind }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), KEEP_MS);
}

export function fileName(what, now_s, suffix) {
  return `warmroute-${what}-${time(now_s).slice(0, 19).replaceAll(":", "")}.${suffix}`;
}
