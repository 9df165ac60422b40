import assert from "node:assert/strict";
import { test } from "node:test";
import { State } from "../../../src/regard/inspection/explorer/web/state.js";

const SHAPES = [
  [
    { heads: 3, rows: 11, keys: 11 },
    { heads: 5, rows: 11, keys: 11 },
    { heads: 2, rows: 7, keys: 1300 },
  ],
  [{ heads: 3, rows: 11, keys: 11 }],
];
const make = () => new State(SHAPES);

test("it starts whole, and says what changed", () => {
  const state = make();
  assert.deepEqual(state.view, { q0: 0, q1: 11, k0: 0, k1: 11 });
  assert.deepEqual([...state.set({ c: 1, h: 4 })].sort(), ["c", "h", "selection"]);
  assert.deepEqual(state.selection, [[1, 4]]);
  assert.deepEqual([...state.set({ c: 1, h: 4 })], []);
});

test("callbacks hear their own names alone, until they stop", () => {
  const state = make();
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
  state.set({
    c: -1,
    h: 0.5,
    row: "7e1",
    channel: "both",
    scale: "rank",
    tab: "<script>",
    rowRank: "maybe",
    sort: "a b",
  });
  assert.deepEqual(
    [state.c, state.h, state.row, state.channel, state.scale, state.tab, state.rowRank, state.sort],
    [2, 1, 6, "mass", "log", "attention", false, "model"],
  );
  state.set({ row: null });
  assert.equal(state.row, null);
});

test("a smaller call takes its own view, row and head", () => {
  const state = make();
  state.set({ c: 2, h: 1, key: 1200, view: { q0: 1, q1: 5, k0: 100, k1: 900 } });
  state.set({ c: 0 });
  assert.deepEqual(state.view, { q0: 0, q1: 11, k0: 0, k1: 11 });
  assert.deepEqual([state.h, state.key], [1, 10]);
  state.set({ c: 1, h: 4 });
  state.set({ t: 1 });
  assert.deepEqual([state.t, state.c, state.h, state.selection], [1, 0, 2, [[0, 2]]]);
});

test("a view stays inside and a cell wide", () => {
  const state = make();
  state.set({ view: { q0: -5, q1: 400, k0: 3.25, k1: 3.5 } });
  assert.deepEqual(state.view, { q0: 0, q1: 11, k0: 2.875, k1: 3.875 });
  state.set({ view: { q0: 9, q1: 2, k0: 0, k1: 4 } });
  assert.deepEqual(state.view, { q0: 2, q1: 9, k0: 0, k1: 4 });
  state.set({ view: { q0: NaN, q1: 2, k0: 0, k1: 4 } });
  assert.deepEqual(state.view, { q0: 2, q1: 9, k0: 0, k1: 4 });
});

test("the address goes there and back", () => {
  const state = make();
  state.set({
    c: 2,
    h: 1,
    selection: [
      [2, 1],
      [2, 0],
    ],
    channel: "max",
    scale: "power",
    hideSink: true,
    rowRank: true,
    row: 5,
    key: 1299,
    view: { q0: 1, q1: 6.5, k0: 200, k1: 1000.25 },
    direction: "in",
    sort: "-previous-token",
    show: "entropy",
    tab: "compare",
    aggregate: "max",
  });
  const hash = state.toHash();
  assert.match(hash, /^l=2&h=1&sel=2\.1,2\.0&q=1-6\.5&k=200-1000\.25&row=5&key=1299&/);
  const other = make();
  other.fromHash(`#${hash}`);
  assert.deepEqual(other.plain(), state.plain());
  other.fromHash("#l=1");
  assert.equal(other.toHash(), "l=1&h=0");
});

test("a hostile address changes nothing it should not", () => {
  const bad = [
    "l=-1&h=1e9&q=abc&k=5-&row=<img>&key=__proto__",
    "sel=9.9,0.0.0,x&t=99999999999999999999",
    "ch=constructor&scale=toString&tab=__proto__&sort=%3Cscript%3E",
    "q=1e308-1e309&k=NaN-Infinity",
    "%E0%A4%A&l=%",
    `sel=${"0.1,".repeat(5000)}`,
    "rank=2&sink=yes&dir=up&agg=sum",
  ];
  for (const hash of bad) {
    const state = make();
    state.fromHash(`#${hash}`);
    const { rows, keys, heads } = state.shape();
    assert.ok(state.h < heads && state.selection.every(([c, h]) => h < SHAPES[state.t][c].heads), hash);
    assert.ok(
      state.view.q0 >= 0 &&
        state.view.q1 <= rows &&
        state.view.k0 >= 0 &&
        state.view.k1 <= keys &&
        state.view.q1 > state.view.q0,
      hash,
    );
    assert.ok(
      ["mass", "max"].includes(state.channel) &&
        ["log", "linear", "power"].includes(state.scale) &&
        state.tab === "attention" &&
        state.sort === "model",
      hash,
    );
    assert.ok((state.row === null || Number.isInteger(state.row)) && state.key === null, hash);
  }
  const state = make();
  state.fromHash("#l=1&h=4&ch=nonsense&q=2-6&k=0-99");
  assert.deepEqual(
    [state.c, state.h, state.channel, state.view],
    [1, 4, "mass", { q0: 2, q1: 6, k0: 0, k1: 11 }],
  );
});

test("the trace compared with is kept in the address", () => {
  const state = make();
  state.set({ other: 0, compareMode: "side" });
  assert.match(state.toHash(), /b=0&cmp=side$/);
  state.fromHash("#b=x&cmp=below");
  assert.deepEqual([state.other, state.compareMode], [1, "swipe"]);
});

test("commands reach whoever answers them", () => {
  const state = make();
  const heard = [];
  state.addEventListener("find", (event) => heard.push(event.detail));
  state.ask("find", 7);
  assert.deepEqual(heard, [7]);
});

test("no trace, no call, no row: nothing throws", () => {
  for (const shapes of [[], [[]], [[{ heads: 0, rows: 0, keys: 0 }]], [[{ heads: 1, rows: 0, keys: 5 }]]]) {
    const state = new State(shapes);
    state.set({ t: 3, c: 3, h: 3, row: 1, key: 1, view: { q0: 0, q1: 1, k0: 0, k1: 1 } });
    state.fromHash("#l=4&h=2&q=1-2&row=3");
    assert.equal(state.row, null);
    assert.ok(state.toHash().startsWith("l=0&h=0"));
  }
});
