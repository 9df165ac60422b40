import assert from "node:assert/strict";
import test from "node:test";
import * as lineRows from "../../../src/regard/inspection/explorer/web/line_rows.js";
import { State } from "../../../src/regard/inspection/explorer/web/state.js";

const { joinLines, readLines, readLinesInto } = lineRows;

/** 3 queries, 5 keys, one head. */
const values = Float32Array.from([1, 0, 0, 0, 0, 0.25, 0.75, 0, 0, 0, 0.1, 0.2, 0.3, 0, 0.4]);
const exact = {
  ask: null,
  weights: async () => ({ values, rows: 3, keys: 5 }),
  column: async (_t, _c, _h, j) => ({
    values: Float32Array.from([0, 1, 2], (i) => values[5 * i + j]),
    exact: true,
  }),
};
const told = (lines) => lines.map(({ row, key }) => `${row}-${key}`).join(" ");

test("lines are the largest weights of the queries asked for", async () => {
  const lines = await readLines(exact, 0, [0, 0], [0, 2], [0, 5], true);
  assert.equal(told(lines), "0-0 2-4 2-2 2-1 2-0");
  assert.deepEqual(
    lines.map(({ weight }) => Number(weight.toFixed(3))),
    [1, 0.4, 0.3, 0.2, 0.1],
  );
  assert.equal(told(await readLinesInto(exact, 0, [0, 0], 1)), "1-1 2-1");
});

test("without weights there are the largest ones listed, or none", async () => {
  const listed = {
    ask: null,
    weights: async () => null,
    column: async () => ({ exact: false }),
    topKeys: async (_t, _c, _h, i) => (i ? [{ key: 1, weight: 0.75 }] : null),
  };
  assert.deepEqual(await readLines(listed, 0, [0, 0], [1], [0, 5], true), [{ row: 1, key: 1, weight: 0.75 }]);
  assert.equal(await readLines(listed, 0, [0, 0], [0], [0, 5], true), null);
  assert.equal(await readLinesInto(listed, 0, [0, 0], 1), null);
});

test("a server is asked for what is in sight, and for whole rows of chosen queries alone", async () => {
  const asked = [];
  const served = {
    ask: () => {},
    call: () => ({ rows: 3, keys: 5 }),
    weights: async () => null,
    tile: async (...where) => {
      asked.push(where.slice(0, 7).join());
      const tile = new Float32Array(256 * 256).fill(NaN);
      for (let i = 0; i < 3; i++) tile.set(values.subarray(5 * i, 5 * i + 5), 256 * i);
      return tile;
    },
    topKeys: async (_t, _c, _h, i) => {
      asked.push(i);
      return [];
    },
  };
  assert.equal(told(await readLines(served, 0, [0, 0], [1, 2], [1, 4], false)), "1-1 2-2 2-1");
  await readLines(served, 0, [0, 0], [2], [1, 4], true);
  assert.deepEqual(asked, ["0,0,0,1,1,0,0", 2]);
});

test("the ends of several heads' lines are joined, the strongest first", () => {
  const line = (key, weight) => ({ row: 7, key, weight });
  const [one, other] = [[line(3, 0.5), line(1, 0.25)], [line(1, 0.75)]];
  assert.deepEqual(joinLines([one, null, other], "key", 8), [
    { n: 1, weights: [0.25, null, 0.75] },
    { n: 3, weights: [0.5, null, null] },
  ]);
  assert.equal(joinLines([one, other], "key", 1).length, 1);
});

test("queries that are kept and what is in sight stay in the address", () => {
  const [state, again] = [0, 1].map(() => new State([[{ heads: 2, rows: 1300, keys: 1300 }]]));
  state.set({ asked: "3,x,17,3,1299", at: "40-7", tab: "lines" });
  assert.equal(state.asked, "3,17,1299");
  again.fromHash(state.toHash());
  assert.deepEqual([again.asked, again.at, again.tab], ["3,17,1299", "40-7", "lines"]);
  again.fromHash("asked=<b>&at=1-x");
  assert.deepEqual([again.asked, again.at], ["", "0-0"]);
});
