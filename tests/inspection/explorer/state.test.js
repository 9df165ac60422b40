import assert from "node:assert/strict";
import { test } from "node:test";
import { State } from "../../../src/regard/inspection/explorer/web/state.js";

const same = { heads: 3, rows: 11, keys: 11 };
const SHAPES = [[same, { ...same, heads: 5 }, { heads: 2, rows: 7, keys: 1300 }], [same]];
const make = () => new State(SHAPES);
const box = (q0, q1, k0, k1) => ({ q0, q1, k0, k1 });

test("it starts whole, says what changed, and only to those who asked for it", () => {
  const state = make();
  assert.deepEqual(state.view, box(0, 11, 0, 11));
  assert.deepEqual([...state.set({ c: 1, h: 4 })].sort(), ["c", "h", "selection"]);
  assert.deepEqual(state.selection, [[1, 4]]);
  assert.deepEqual([...state.set({ c: 1, h: 4 })], []);
  const heard = [];
  const stop = state.on(["row", "key"], (_, changed) => heard.push([...changed]));
  state.set({ channel: "max" });
  state.set({ row: 3, scale: "linear" });
  stop();
  state.set({ row: 4 });
  assert.deepEqual(heard, [["row", "scale"]]);
});

test("numbers are brought into range, and what makes no sense is refused", () => {
  const state = make();
  state.set({ c: 99, h: 99, row: 99, key: 99 });
  assert.deepEqual([state.c, state.h, state.row, state.key], [2, 1, 6, 99]);
  const wrong = { channel: "both", scale: "rank", tab: "<script>", rowRank: "maybe", sort: "a b" };
  state.set({ c: -1, h: 0.5, row: "7e1", ...wrong });
  assert.deepEqual(
    [state.c, state.h, state.row, state.channel, state.scale, state.tab, state.rowRank, state.sort],
    [2, 1, 6, "mass", "log", "attention", false, "model"],
  );
  state.set({ row: null });
  assert.equal(state.row, null);
});

test("a smaller call takes its own view, row and head", () => {
  const state = make();
  state.set({ c: 2, h: 1, key: 1200, view: box(1, 5, 100, 900) });
  state.set({ c: 0 });
  assert.deepEqual(state.view, box(0, 11, 0, 11));
  assert.deepEqual([state.h, state.key], [1, 10]);
  state.set({ c: 1, h: 4 });
  state.set({ t: 1 });
  assert.deepEqual([state.t, state.c, state.h, state.selection], [1, 0, 2, [[0, 2]]]);
});

test("a view stays inside and a cell wide", () => {
  const state = make();
  for (const [view, shown] of [
    [box(-5, 400, 3.25, 3.5), box(0, 11, 2.875, 3.875)],
    [box(9, 2, 0, 4), box(2, 9, 0, 4)],
    [box(NaN, 2, 0, 4), box(2, 9, 0, 4)],
  ]) {
    state.set({ view });
    assert.deepEqual(state.view, shown);
  }
});

test("the address goes there and back", () => {
  const state = make();
  const selection = [1, 0].map((h) => [2, h]);
  const place = { row: 5, key: 1299, view: box(1, 6.5, 200, 1000.25) };
  const look = { channel: "max", scale: "power", hideSink: true, rowRank: true, aggregate: "max" };
  const rest = { direction: "in", sort: "-previous-token", show: "entropy", tab: "compare" };
  state.set({ c: 2, h: 1, selection, ...place, ...look, ...rest, other: 0, compareMode: "side" });
  const hash = state.toHash();
  assert.match(hash, /^l=2&h=1&sel=2\.1,2\.0&q=1-6\.5&k=200-1000\.25&row=5&key=1299&.*b=0&cmp=side$/);
  const other = make();
  other.fromHash(`#${hash}`);
  assert.deepEqual(other.plain(), state.plain());
  other.fromHash("#l=1");
  assert.equal(other.toHash(), "l=1&h=0");
  const hybrid = new State([[2, 5].map((layer) => ({ ...same, layer }))]);
  hybrid.fromHash("#l=5&h=1&sel=5.1,2.0");
  assert.deepEqual([hybrid.c, hybrid.selection.join()], [1, "1,1,0,0"]);
  assert.equal(hybrid.toHash(), "l=5&h=1&sel=5.1,2.0");
});

test("a hostile address changes nothing it should not", () => {
  const bad = [
    "l=-1&h=1e9&q=abc&k=5-&row=<img>&key=__proto__",
    "sel=9.9,0.0.0,x&t=99999999999999999999",
    "ch=constructor&scale=toString&tab=__proto__&sort=%3Cscript%3E",
    "q=1e308-1e309&k=NaN-Infinity",
    "%E0%A4%A&l=%",
    `sel=${"0.1,".repeat(5000)}`,
    "rank=2&sink=yes&dir=up&agg=sum&b=x&cmp=below",
  ];
  for (const hash of bad) {
    const state = make();
    state.fromHash(hash);
    const { rows, keys, heads } = state.shape();
    const { q0, q1, k0, k1 } = state.view;
    assert.ok(state.h < heads && state.selection.every(([c, h]) => h < SHAPES[state.t][c].heads), hash);
    assert.ok(q0 >= 0 && q1 <= rows && k0 >= 0 && k1 <= keys && q1 > q0, hash);
    assert.ok(["mass", "max"].includes(state.channel), hash);
    assert.ok(["log", "linear", "power"].includes(state.scale), hash);
    assert.deepEqual(
      [state.tab, state.sort, state.other, state.compareMode],
      ["attention", "model", 1, "swipe"],
    );
    assert.ok((state.row === null || Number.isInteger(state.row)) && state.key === null, hash);
  }
  const state = make();
  state.fromHash("#l=1&h=4&ch=nonsense&q=2-6&k=0-99");
  assert.deepEqual([state.c, state.h, state.channel], [1, 4, "mass"]);
  assert.deepEqual(state.view, box(2, 6, 0, 11));
});

test("no trace, no call, no row: nothing throws", () => {
  for (const shapes of [[], [[]], [[{ heads: 0, rows: 0, keys: 0 }]], [[{ heads: 1, rows: 0, keys: 5 }]]]) {
    const state = new State(shapes);
    state.set({ t: 3, c: 3, h: 3, row: 1, key: 1, view: box(0, 1, 0, 1) });
    state.fromHash("#l=4&h=2&q=1-2&row=3");
    assert.equal(state.row, null);
    assert.ok(state.toHash().startsWith("l=0&h=0"));
  }
});
