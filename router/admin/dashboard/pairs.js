// Prefill apart from decode: which replicas take which legs, and the pairs that they are.

import { count, replicaName, span, NONE } from "./format.js";
import { table, text } from "./dom.js";
import { tag } from "./tables.js";

const ROLES = { prefill: "prefills", decode: "decodes", both: "both" };
const STATES = {
  warm: ["takes requests", "good", "It has handed a prompt over."],
  new: ["to be warmed", "fair", "It takes requests when it has handed over a prompt of the router's own."],
  resting: ["rests", "bad", "It failed to hand a prompt over, and is tried again then."],
};

// `split` is null where no replica shakes hands: then the card is hidden.
export function showSplit(card, note, replicasTable, pairsTable, { split, replicas }) {
  card.hidden = !split;
  if (!split) return;
  const known = new Map(replicas.map((each) => [each.id, each])), name = (id) => replicaName(known.get(id) ?? { id });
  const hidden = split.pairs_in_all - split.pairs.length;
  text(note, hidden > 0 ? `${count(hidden)} more pairs are not shown: those that rest come first, then those to be warmed, then those with most requests.` : "");
  note.hidden = !note.textContent;
  const ofReplicas = [
    { name: "Replica", header: true, value: ({ id }) => name(id) },
    { name: "Legs", value: ({ role }) => ROLES[role] ?? role },
    { name: "Handshake", fill: (cell, row) => tag(cell, row.answers ? row.handshake : `${row.handshake}, silent`, row.answers ? "good" : "bad", row.answers ? null : "It does not shake hands now: its pairs take no requests.") },
    { name: "Pairs", numeric: true, title: "that take requests", value: ({ pairs }) => count(pairs.warm) },
    { name: "To be warmed", numeric: true, value: ({ pairs }) => count(pairs.new) },
    { name: "Resting", numeric: true, value: ({ pairs }) => count(pairs.resting) },
  ];
  table(replicasTable, ofReplicas, split.replicas, ({ id }) => id, NONE);
  const ofPairs = [
    { name: "Prefills", header: true, value: ({ prefill }) => name(prefill) },
    { name: "Decodes", value: ({ decode }) => name(decode) },
    { name: "State", fill: (cell, row) => state(cell, row) },
    { name: "Requests", numeric: true, title: "sent in two legs since the two pair", value: ({ sent }) => count(sent) },
    { name: "Prefill failed", numeric: true, value: ({ prefills_failed }) => count(prefills_failed) },
    { name: "Not handed over", numeric: true, title: "requests whose blocks did not come, by all that is known", value: ({ broken }) => count(broken) },
  ];
  table(pairsTable, ofPairs, split.pairs, ({ prefill, decode }) => `${prefill}\0${decode}`, "No two replicas pair: they differ in handshake, model, block size or revision, or one of each kind is missing.");
}

function state(cell, row) {
  const [words, kind, title] = STATES[row.state];
  tag(cell, row.rests_s > 0 ? `${words} ${span(row.rests_s)}` : words, kind, title);
}
