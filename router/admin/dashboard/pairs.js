// Prefill apart from decode: which replicas take which legs, and the pairs that they are.

import { count, replicaName, span, NONE } from "./format.js";
import { table, text } from "./dom.js";
import { tag } from "./tables.js";

const ROLES = { prefill: "prefills", decode: "decodes", both: "both" };
const STATES = {
  warm: ["ready", "good", "A KV transfer has succeeded."],
  new: ["warming up", "fair", "The pair receives requests after a KV transfer of a probe prompt."],
  resting: ["cooldown", "bad", "A KV transfer failed. The pair is tried again after the cooldown."],
};

// `split` is null where no replica shakes hands: then the card is hidden.
export function showSplit(card, note, replicasTable, pairsTable, { split, replicas }) {
  card.hidden = !split;
  if (!split) return;
  const known = new Map(replicas.map((each) => [each.id, each])), name = (id) => replicaName(known.get(id) ?? { id });
  const hidden = split.pairs_in_all - split.pairs.length;
  text(note, hidden > 0 ? `${count(hidden)} more pairs are not shown. Order: pairs in cooldown, pairs that warm up, most requests.` : "");
  note.hidden = !note.textContent;
  const ofReplicas = [
    { name: "Replica", header: true, value: ({ id }) => name(id) },
    { name: "Legs", value: ({ role }) => ROLES[role] ?? role },
    { name: "KV connector", fill: (cell, row) => tag(cell, row.answers ? row.handshake : `${row.handshake}, silent`, row.answers ? "good" : "bad", row.answers ? null : "The transfer address does not answer: its pairs receive no requests.") },
    { name: "Pairs", numeric: true, title: "that receive requests", value: ({ pairs }) => count(pairs.warm) },
    { name: "Warming up", numeric: true, value: ({ pairs }) => count(pairs.new) },
    { name: "Resting", numeric: true, value: ({ pairs }) => count(pairs.resting) },
  ];
  table(replicasTable, ofReplicas, split.replicas, ({ id }) => id, NONE);
  const ofPairs = [
    { name: "Prefills", header: true, value: ({ prefill }) => name(prefill) },
    { name: "Decodes", value: ({ decode }) => name(decode) },
    { name: "State", fill: (cell, row) => state(cell, row) },
    { name: "Requests", numeric: true, title: "disaggregated requests since the pair exists", value: ({ sent }) => count(sent) },
    { name: "Prefill failed", numeric: true, value: ({ prefills_failed }) => count(prefills_failed) },
    { name: "Transfer failed", numeric: true, title: "requests with missing blocks, as far as observed", value: ({ broken }) => count(broken) },
  ];
  table(pairsTable, ofPairs, split.pairs, ({ prefill, decode }) => `${prefill}\0${decode}`, "No pairs: replicas differ in KV connector, model, block size or revision, or there is no prefill or no decode replica.");
}

function state(cell, row) {
  const [words, kind, title] = STATES[row.state];
  tag(cell, row.rests_s > 0 ? `${words} ${span(row.rests_s)}` : words, kind, title);
}
