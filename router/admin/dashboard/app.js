// Asks the router for what it knows every two seconds, while somebody looks; says so where that fails.

import { clock, span } from "./format.js";
import { text } from "./dom.js";
import { History } from "./history.js";
import { Page } from "./page.js";
import { Refusal, Silence, Source } from "./source.js";
import { View } from "./view.js";

const EVERY_MS = 2000;
const STALE_S = 7; // without an answer
const THEME = "warmroute-theme";
const OPENED_MS = 60000; // for which a page that was had with a token stays to be loaded

const $ = (id) => document.getElementById(id);
const source = new Source();
const view = new View(() => changed());
const history = new History(source);
let page, timer, asking, heard, asked = 0, failure = "", paused = false;

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  asked = Date.now();
  try {
    const seen = await source.get("admin/observatory", {}, { signal: mine.signal });
    await history.refresh(seen, view, mine.signal);
    page ??= begun();
    await page.requests.refresh(seen, mine.signal);
    if (asking === mine) heardOf(seen);
  } catch (error) {
    if (asking !== mine) return; // asked again meanwhile
    failed(error);
  } finally {
    if (asking === mine && !document.hidden && !paused) timer = setTimeout(ask, EVERY_MS);
  }
}

function begun() {
  $("page").hidden = false; // before the charts measure how wide they are
  return new Page(view, history, source, opened);
}

function failed(error) {
  if (error instanceof Refusal) return turnedAway(error);
  const silent = error instanceof Silence || ["AbortError", "TimeoutError"].includes(error.name);
  failure = error instanceof SyntaxError ? "The answer is not JSON" : silent ? "The router does not answer" : `The page failed: ${error.message}`;
  if (!silent) console.error(error);
  state("gone");
}

function heardOf(seen) {
  $("page").hidden = false;
  $("notice").hidden = true;
  page.show(seen);
  heard = Date.now();
  failure = "";
  $("forget").hidden = !source.token;
  state(paused ? "paused" : "live");
}

// Somebody looks at another stretch, or for other requests: what is known is shown at once, the rest is asked for.
function changed() {
  page?.requests.changed();
  if (page?.seen) page.show(page.seen);
  ask();
}

// Statuses of access_control.py, and of a router without an observatory.
function turnedAway({ status, message }) {
  const said = {
    400: ["Invalid search", message],
    401: source.token ? ["Wrong token", "The admin token is `admin.token` or `admin.token_file` in the settings."] : ["This router requires the admin token", "It is `admin.token` or `admin.token_file` in the settings."],
    404: ["This router has no observatory", "insights.enabled is false, or the router has an older version."],
    421: ["Open this page by address", "Without an admin token the router answers only to localhost or its IP address, such as http://127.0.0.1:8001/dashboard."],
  }[status] ?? [`The router answered ${status}`, "The page retries every two seconds."];
  const first = $("notice").hidden || $("notice-title").textContent !== said[0];
  text($("notice-title"), said[0]);
  text($("notice-text"), said[1].replaceAll("`", ""));
  $("notice").hidden = false;
  $("token-form").hidden = status !== 401;
  if (status === 401) $("page").hidden = true;
  if (status === 401 && first) $("token").focus();
  failure = said[0];
  state("refused");
}

function state(kind) {
  const words = { live: "Live", stale: "Stale", gone: failure, refused: failure, connecting: "Connecting", paused: "Paused" }[kind];
  if ($("status").dataset.state !== kind) $("status").dataset.state = kind;
  text($("status-text"), words);
  document.body.classList.toggle("old", !["live", "paused"].includes(kind) && heard !== undefined);
  age();
}

// What is shown is never older than this says.
function age() {
  const old = heard === undefined ? Infinity : (Date.now() - heard) / 1000;
  const now = $("status").dataset.state;
  if (now === "live" && old > STALE_S) return state("stale");
  const since = heard === undefined ? "" : now === "live" ? `${Math.max(0, Math.round(old))} s ago` : `data of ${clock(heard / 1000)}, ${span(old)} ago`;
  text($("age"), since);
  if (now === "connecting" && Date.now() - asked > STALE_S * 1000) text($("status-text"), "Still connecting");
}

// Metrics need the token as well, which a link cannot send: they are had with it, and opened from here.
async function opened(event, path) {
  if (!source.token || path !== "metrics") return;
  event.preventDefault();
  try {
    const url = URL.createObjectURL(await source.get(path, {}, { as: "blob" }));
    window.open(url, "_blank");
    setTimeout(() => URL.revokeObjectURL(url), OPENED_MS);
  } catch (error) {
    failed(error);
  }
}

function stop() {
  clearTimeout(timer);
  asking?.abort();
  asking = undefined;
  state("paused");
}

function themed() {
  const now = document.documentElement.dataset.theme ?? "system";
  text($("theme"), `Theme: ${now}`);
  page?.panels.repaint();
}

$("theme").addEventListener("click", () => {
  const next = { system: "light", light: "dark", dark: "system" }[document.documentElement.dataset.theme ?? "system"];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(THEME, next);
  } catch {
    // it holds until the page is loaded again
  }
  themed();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);

$("pause").addEventListener("click", () => {
  paused = !paused;
  text($("pause"), paused ? "Resume" : "Pause");
  if (paused) stop();
  else ask();
});

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  source.keep($("token").value.trim());
  $("token").value = "";
  ask();
});

$("forget").addEventListener("click", () => {
  source.keep("");
  history.forget();
  ask();
});

document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else if (!paused) ask();
});

themed();
setInterval(age, 1000);
ask();
