// Asks the router for what it knows every two seconds, while somebody looks; says so where that fails.

import { clock, span } from "./format.js";
import { text } from "./dom.js";
import { Page } from "./page.js";

const EVERY_MS = 2000;
const ANSWER_MS = 8000; // for an answer, before the router counts as gone
const STALE_S = 7; // without an answer
const SOURCE = "admin/observatory";
const TOKEN = "warmroute-admin-token";
const THEME = "warmroute-theme";

const $ = (id) => document.getElementById(id);
let page, timer, asking, heard, asked = 0, failure = "";
let token = stored(sessionStorageOrNone(), TOKEN);

function sessionStorageOrNone() {
  try {
    return window.sessionStorage;
  } catch {
    return null;
  }
}

function stored(storage, name) {
  try {
    return storage?.getItem(name) ?? "";
  } catch {
    return "";
  }
}

async function ask() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  const late = setTimeout(() => mine.abort(), ANSWER_MS);
  asked = Date.now();
  try {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(SOURCE, { headers, cache: "no-store", credentials: "omit", signal: mine.signal });
    if (response.ok) heardOf(await response.json());
    else turnedAway(response.status);
  } catch (error) {
    if (asking !== mine) return; // asked again meanwhile
    failure = error instanceof SyntaxError ? "It answered what is no JSON" : error.name === "TypeError" || error.name === "AbortError" ? "The router does not answer" : `The page failed: ${error.message}`;
    if (error.name !== "TypeError" && error.name !== "AbortError") console.error(error);
    state("gone");
  } finally {
    clearTimeout(late);
    if (asking === mine && !document.hidden) timer = setTimeout(ask, EVERY_MS);
  }
}

function heardOf(seen) {
  $("page").hidden = false;
  $("notice").hidden = true;
  page ??= new Page();
  page.show(seen);
  heard = Date.now();
  failure = "";
  $("forget").hidden = !token;
  state("live");
}

// Statuses of guard.py, and of a router without an observatory.
function turnedAway(status) {
  const said = {
    401: token ? ["That token is not the router's", "Its admin token is `admin.token` or `admin.token_file` in the settings."] : ["This router wants its admin token", "It is `admin.token` or `admin.token_file` in the settings."],
    404: ["This router has no observatory", "Its settings have observatory.enabled off, or it is of an older version."],
    421: ["Open this page by address", "Without an admin token the router answers only to localhost or its address, as in http://127.0.0.1:8001/dashboard."],
  }[status] ?? [`The router answered ${status}`, "It is asked again every two seconds."];
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
  document.body.classList.toggle("old", kind !== "live" && heard !== undefined);
  age();
}

// What is shown is never older than this says.
function age() {
  const old = heard === undefined ? Infinity : (Date.now() - heard) / 1000;
  const now = $("status").dataset.state;
  if (now === "live" && old > STALE_S) return state("stale");
  const since = heard === undefined ? "" : now === "live" ? `${Math.max(0, Math.round(old))} s ago` : `figures of ${clock(heard / 1000)}, ${span(old)} ago`;
  text($("age"), since);
  if (now === "connecting" && Date.now() - asked > STALE_S * 1000) text($("status-text"), "Still connecting");
}

function themed() {
  const now = document.documentElement.dataset.theme ?? "system";
  text($("theme"), `Theme: ${now}`);
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

$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep($("token").value.trim());
  $("token").value = "";
  ask();
});

$("forget").addEventListener("click", () => {
  keep("");
  ask();
});

function keep(value) {
  token = value;
  try {
    if (value) sessionStorage.setItem(TOKEN, value);
    else sessionStorage.removeItem(TOKEN);
  } catch {
    // it holds until the page is loaded again
  }
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) {
    clearTimeout(timer);
    asking?.abort();
    asking = undefined;
    state("paused");
  } else ask();
});

themed();
setInterval(age, 1000);
ask();
