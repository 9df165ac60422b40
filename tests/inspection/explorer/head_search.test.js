import assert from "node:assert/strict";
import test from "node:test";
import { notesOn, readNotes, writeNotes } from "../../../src/regard/inspection/explorer/web/head_notes.js";
import { findHeads, readQuestion } from "../../../src/regard/inspection/explorer/web/head_search.js";
import { State } from "../../../src/regard/inspection/explorer/web/state.js";

const TOKENS = ["The", " cat", "\u2581the"];
/** Two heads of 3 x 3; the second has a label. */
const WEIGHTS = [
  [1, 0, 0, 0.5, 0.5, 0, 0.25, 0.25, 0.5],
  [1, 0, 0, 0.75, 0.25, 0, 0.125, 0.125, 0.75],
];
const call = {
  ...{ heads: 2, rows: 3, keys: 3, query_offset: 0, key_offset: 0, query_sequence: 0, key_sequence: 0 },
  ...{ permitted: "causal", labels: [[], [{ name: "induction", value: 0.7, rows: 5 }]] },
};
const source = {
  document: { traces: [{ calls: [call], sequences: [{ kind: "text" }] }] },
  call: () => call,
  tokens: async () => TOKENS,
  chunk: async (name) => name && { shape: [1, 3, 1], values: Uint8Array.from([0x80, 0xc0, 0xe0]) },
  weights: async (_t, _c, h) => ({ values: Float32Array.from(WEIGHTS[h]), rows: 3, keys: 3 }),
};
const any = { query: "", key: "", offset: "", label: "" };
const makeState = () => new State([[{ heads: 2, rows: 3, keys: 3 }]]);

test("weights are averaged over the pairs that may attend, and what the page lacks is counted", async () => {
  const found = async (question) => {
    const heads = (await findHeads(source, 0, { ...any, ...question })).found;
    return heads.map(({ h, weight, pairs }) => `${h}: ${weight} of ${pairs}`).join(", ");
  };
  assert.equal(await found({ key: "THE", query: "cat" }), "1: 0.75 of 1, 0: 0.5 of 1");
  assert.equal(await found({ offset: "1" }), "1: 0.4375 of 2, 0: 0.375 of 2");
  assert.equal(await found({ key: "cat the", label: "induction" }), "1: 0.5 of 6");
  assert.equal(await found({ label: "induction" }), "1: 0.7 of 5");
  assert.equal(await found({ offset: "-1" }), "");
  const values = Float32Array.from([1, 0, 0, NaN, 0.5, 0, 0.25, 0.25, 0.5]);
  const broken = { ...source, weights: async () => ({ values, rows: 3, keys: 3 }) };
  const [{ weight, pairs }] = (await findHeads(broken, 0, { ...any, key: "the" })).found;
  assert.deepEqual([weight, pairs], [1.75 / 3, 3], "without what is no number, as in Python");
  const none = { ...source, weights: async () => null };
  assert.deepEqual(await findHeads(none, 0, { ...any, key: "the" }), { found: [], unknown: 2 });
});

test("a question stays in the address, whatever its words", () => {
  const [state, again] = [makeState(), makeState()];
  const words = ["Mary, John", "100 % <b>", "-3", "sink"];
  state.set({ find: words.map(encodeURIComponent).join(",") });
  again.fromHash(state.toHash());
  assert.deepEqual(Object.values(readQuestion(again.find)), words);
  for (const wrong of ["a,b", "a,b,c,", "%,,,", "a,b,1,<i>", `${"x".repeat(300)},,,`]) {
    again.set({ find: "" });
    again.set({ find: wrong });
    assert.equal(again.find, "", wrong);
  }
});

test("notes are kept, an older address takes none away, and what is no note is left out", () => {
  const [state, again] = [makeState(), makeState()];
  state.set({ notes: writeNotes({ "0.0.1": "copies <names> & 100 %", "0.0.0": "" }) });
  assert.deepEqual(readNotes(state.notes), { "0.0.1": "copies <names> & 100 %" });
  const told = notesOn(
    state,
    [0, 1].map((h) => [0, h]),
  );
  assert.equal(told, "layer 0 head 1: copies <names> & 100 %");
  again.fromHash(state.toHash());
  assert.equal(again.notes, state.notes);
  again.fromHash("h=1");
  assert.equal(again.notes, state.notes);
  again.set({ notes: "" });
  assert.equal(again.notes, "");
  for (const wrong of ["", "null", "{", '{"a":"b"}', '{"0.0.0":7}', '{"0.0.0":""}'])
    assert.deepEqual(readNotes(wrong), {});
  assert.equal(readNotes(JSON.stringify({ "0.0.0": "x".repeat(999) }))["0.0.0"].length, 200);
});
