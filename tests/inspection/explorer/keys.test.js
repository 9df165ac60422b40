import assert from "node:assert/strict";
import { test } from "node:test";
import { KEYS, meaningOf } from "../../../src/regard/inspection/explorer/web/keys.js";
import { State } from "../../../src/regard/inspection/explorer/web/state.js";

const SHAPES = [[3, 2].map((heads) => ({ heads, rows: 11, keys: 13 }))];
const press = (state, ...keys) => {
  for (const key of keys) meaningOf({ key }, { typing: false, place: "page" }).run(state);
};

test("every key of the specification means something, and none means two things", () => {
  const all = KEYS.flatMap(({ keys }) => keys);
  const arrows = ["Up", "Down", "Left", "Right"].map((way) => `Arrow${way}`);
  for (const key of [...arrows, "Escape", ..."[],.+-0mlrce/np?"]) assert.ok(all.includes(key), key);
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

test("layer and head stop at their ends, and the crosshair, which moves by blocks, at the edge", () => {
  const state = new State(SHAPES);
  const where = (...keys) => {
    press(state, ...keys);
    return [state.c, state.h, state.row, state.key];
  };
  assert.deepEqual(where("[", ".", ".", "."), [0, 2, null, null]);
  assert.deepEqual(where("]", "]"), [1, 1, null, null]);
  assert.deepEqual(where(",", "ArrowDown"), [1, 0, 5, 6]);
  assert.deepEqual(where("ArrowDown", "ArrowLeft"), [1, 0, 6, 5]);
  state.views.map = { step: () => ({ rows: 4, keys: 8 }) };
  assert.deepEqual(where("ArrowDown", "ArrowDown", "ArrowRight"), [1, 0, 10, 12]);
  const empty = new State([[{ heads: 1, rows: 0, keys: 0 }]]);
  press(empty, "ArrowDown");
  assert.deepEqual([empty.row, empty.key], [null, null]);
});

test("keys choose colours and tabs, and clear", () => {
  const state = new State(SHAPES);
  const scales = Array.from({ length: 3 }, () => {
    press(state, "l");
    return state.scale;
  });
  assert.deepEqual(scales, ["linear", "power", "log"]);
  press(state, "m", "r", "c");
  assert.deepEqual([state.channel, state.rowRank, state.tab], ["max", true, "compare"]);
  press(state, "c");
  assert.equal(state.tab, "attention");
  const selection = [0, 1].map((h) => [0, h]);
  state.set({ row: 3, key: 4, selection, brush: { e0: 0, e1: 1, d0: 0, d1: 1 } });
  press(state, "Escape");
  assert.deepEqual([state.row, state.key, state.selection, state.brush], [null, null, [[0, 0]], null]);
});

test("keys of other views are sent to them as commands", () => {
  const state = new State(SHAPES);
  const heard = [];
  const commands = {
    ...{ "+": "zoom-in", "=": "zoom-in", "-": "zoom-out", 0: "fit", e: "export" },
    ...{ "/": "find", n: "next-edge", p: "previous-edge", "?": "help", d: "theme" },
  };
  for (const name of new Set(Object.values(commands))) state.addEventListener(name, () => heard.push(name));
  press(state, ...Object.keys(commands));
  assert.deepEqual(heard, Object.values(commands));
});
