// Rows of the dashboard's attention list, made by the dashboard's own modules from a router's admin pages.
// `node attention.mjs FOLDER ADMIN_URL`: each line of standard input is answered with one line of JSON.

import { createInterface } from "node:readline";

const [folder, url] = process.argv.slice(2);
const { findAttention } = await import(`${folder}/attention.js`);
const { History } = await import(`${folder}/history.js`);

async function get(path, parameters = {}) {
  const response = await fetch(`${url}/${path}?${new URLSearchParams(parameters)}`);
  if (!response.ok) throw Object.assign(new Error(`${path} answered ${response.status}`), { status: response.status });
  return response.json();
}

const history = new History({ get });
const view = { range: "10m", zoom: null };
for await (const _ of createInterface({ input: process.stdin })) {
  try {
    const page = await get("admin/observatory");
    await history.refresh(page, view);
    console.log(JSON.stringify(findAttention(page, history)));
  } catch {
    console.log("[]");
  }
}
