import assert from "node:assert/strict";
import { test } from "node:test";
import { KEYS, meaningOf } from "../../../src/regard/inspection/explorer/web/keys.js";
import { State } from "../../../src/regard/inspection/explorer/web/state.js";

const SHAPES = [
  [
    { heads: 3, rows: 11, keys: 13 },
    { heads: 2, rows: 11, keys: 13 },
  ],
];
const press = (state, key) => meaningOf({ key }, { typing: false, place: "page" }).run(state);

test("every key of the specification means something, and none means two things", () => {
  const all = KEYS.flatMap(({ keys }) => keys);
  for (const key of [
    "ArrowUp",
    "ArrowDown",
    "ArrowLeft",
    "ArrowRight",
    "[",
    "]",
    ",",
    ".",
    "+",
    "-",
    "0",
    "m",
    "l",
    "r",
    "c",
    "e",
    "/",
    "n",
    "p",
    "?",
    "Escape",
  ]) {
    assert.ok(all.includes(key), key);
  }
  assert.equal(new Set(all).size, all.length);
  assert.ok(KEYS.every(({ does }) => does.length > 3));
});

test("no key is taken while typing, or from the browser's own shortcuts", () => {
  assert.equal(meaningOf({ key: "m" }, { typing: true, place: "map" }), null);
  for (const held of ["ctrlKey", "metaKey", "altKey"])
    assert.equal(meaningOf({ key: "c", [held]: true }, { typing: false, place: "page" }), null);
  assert.equal(meaningOf({ key: "ArrowUp" }, { typing: false, place: "part" }), null);
  assert.notEqual(meaningOf({ key: "ArrowUp" }, { typing: false, place: "map" }), null);
  assert.notEqual(meaningOf({ key: "m" }, { typing: false, place: "part" }), null);
  assert.equal(meaningOf({ key: "F5" }, { typing: false, place: "page" }), null);
});

test("layer and head stop at their ends", () => {
  const state = new State(SHAPES);
  press(state, "[");
  assert.equal(state.c, 0);
  press(state, ".");
  press(state, ".");
  press(state, ".");
  assert.equal(state.h, 2);
  press(state, "]");
  assert.deepEqual([state.c, state.h], [1, 1]);
  press(state, "]");
  assert.equal(state.c, 1);
  press(state, ",");
  assert.equal(state.h, 0);
});

test("arrows set the crosshair in the middle, then move it by blocks and stop at the edge", () => {
  const state = new State(SHAPES);
  press(state, "ArrowDown");
  assert.deepEqual([state.row, state.key], [5, 6]);
  press(state, "ArrowDown");
  press(state, "ArrowLeft");
  assert.deepEqual([state.row, state.key], [6, 5]);
  state.views.map = { step: () => ({ rows: 4, keys: 8 }) };
  press(state, "ArrowDown");
  press(state, "ArrowDown");
  press(state, "ArrowRight");
  assert.deepEqual([state.row, state.key], [10, 12]);
});

test("keys choose colours and tabs, and clear", () => {
  const state = new State(SHAPES);
  const scales = Array.from({ length: 3 }, () => {
    press(state, "l");
    return state.scale;
  });
  assert.deepEqual(scales, ["linear", "power", "log"]);
  press(state, "m");
  press(state, "r");
  press(state, "c");
  assert.deepEqual([state.channel, state.rowRank, state.tab], ["max", true, "compare"]);
  press(state, "c");
  assert.equal(state.tab, "attention");
  state.set({
    row: 3,
    key: 4,
    selection: [
      [0, 0],
      [0, 1],
    ],
    brush: { e0: 0, e1: 1, d0: 0, d1: 1 },
  });
  press(state, "Escape");
  assert.deepEqual([state.row, state.key, state.selection, state.brush], [null, null, [[0, 0]], null]);
});

test("keys of other views are sent to them as commands", () => {
  const state = new State(SHAPES);
  const heard = [];
  const commands = {
    "+": "zoom-in",
    "=": "zoom-in",
    "-": "zoom-out",
    0: "fit",
    e: "export",
    "/": "find",
    n: "next-edge",
    p: "previous-edge",
    "?": "help",
    d: "theme",
  };
  for (const name of new Set(Object.values(commands))) state.addEventListener(name, () => heard.push(name));
  for (const key of Object.keys(commands)) press(state, key);
  assert.deepEqual(
    heard,
    Object.keys(commands).map((key) => commands[key]),
  );
});

test("a call without rows: arrows do nothing", () => {
  const state = new State([[{ heads: 1, rows: 0, keys: 0 }]]);
  press(state, "ArrowDown");
  assert.deepEqual([state.row, state.key], [null, null]);
});
