import assert from "node:assert/strict";
import test from "node:test";
import {
  alignCells,
  alignedColumns,
  alignTokens,
  sharedText,
} from "../../../src/regard/inspection/explorer/web/alignment.js";
import {
  blockDivergence,
  commonLevels,
  differenceOf,
  headDivergences,
  reasonApart,
  rowDivergence,
} from "../../../src/regard/inspection/explorer/web/divergences.js";

test("divergence of rows is the one known by hand", () => {
  assert.equal(rowDivergence([0.5, 0.5], [0.5, 0.5]), 0);
  assert.equal(rowDivergence([1, 0], [0, 1]), 1);
  const direct =
    0.5 * (1 * Math.log2(1 / 0.75)) + 0.5 * (0.5 * Math.log2(0.5 / 0.75) + 0.5 * Math.log2(0.5 / 0.25));
  assert.ok(Math.abs(rowDivergence([1, 0], [0.5, 0.5]) - direct) < 1e-12);
  assert.ok(Math.abs(rowDivergence([0.7, 0.1], [0.2, 0.3]) - rowDivergence([0.2, 0.3], [0.7, 0.1])) < 1e-15);
});

test("what a row lacks to 1 went to the sink, and empty rows are no rows", () => {
  assert.equal(rowDivergence([0.5, 0], [0.5, 0]), 0);
  assert.equal(rowDivergence([0, 0], [1, 0]), 1);
  assert.ok(rowDivergence([0.5, 0], [1, 0]) > 0.1);
  assert.ok(Number.isNaN(rowDivergence([0, 0], [0, 0])));
  assert.ok(Number.isNaN(rowDivergence([NaN, 1], [0, 1])));
  assert.equal(rowDivergence([1.02, 0], [1.01, 0]), 0);
  assert.ok(Number.isNaN(blockDivergence([], [], 0, 7)));
  assert.equal(blockDivergence([1, 0, 0, 0], [0, 1, 0, 0], 2, 2), 1);
});

test("differences keep their sign and know their largest", () => {
  const { values, largest, at } = differenceOf([0.5, 0.25, NaN], [0.25, 1, 0]);
  assert.deepEqual([...values.slice(0, 2), largest, at], [0.25, -0.75, 0.75, 1]);
  assert.ok(Number.isNaN(values[2]));
  assert.deepEqual(differenceOf([0.5], [0.5]), { values: Float32Array.of(0), largest: 0, at: -1 });
});

test("texts are aligned by their longest common subsequence", () => {
  const [one, other] = ["the old cat sat on the mat", "the cat sat quietly on a mat"].map((text) =>
    text.split(" "),
  );
  const places = alignTokens(one, other);
  assert.deepEqual([...places], [0, -1, 1, 2, 4, -1, 6]);
  const columns = alignedColumns(places, other.length).map((pair) => pair.map((n) => n ?? "x").join(""));
  assert.equal(columns.join(" "), "00 1x 21 32 x3 44 5x x5 66");
  const sentence = "5 tokens are the same in both texts, in order; A has 2 of its own and B 2.";
  assert.equal(sharedText(places, other.length), sentence);
  assert.equal(sharedText(alignTokens(one, one), one.length), "");
  assert.deepEqual([...alignTokens([], other)], []);
  // Random texts: rising places of equal tokens, as many as the plain recursion finds.
  let seed = 7;
  const draw = (most) => {
    seed = (seed * 16807) % 2147483647;
    return seed % most;
  };
  for (let round = 0; round < 40; round += 1) {
    const [a, b] = [draw(12), draw(12)].map((n) => Array.from({ length: n }, () => "abc"[draw(3)]));
    const most = (i, j) =>
      i === a.length || j === b.length
        ? 0
        : a[i] === b[j]
          ? 1 + most(i + 1, j + 1)
          : Math.max(most(i + 1, j), most(i, j + 1));
    const found = [...alignTokens(a, b).entries()].filter(([, place]) => place >= 0);
    assert.ok(found.every(([n, place], at) => a[n] === b[place] && (!at || place > found[at - 1][1])));
    assert.equal(found.length, most(0, 0));
  }
  const long = Array.from({ length: 5000 }, (_, n) => `${n}`);
  const turned = [...long].reverse();
  assert.equal(alignTokens(long, [...turned.slice(0, -1), "x"]).length, 5000);
});

test("cells of B stand where A has the same tokens", () => {
  const frame = { rows: 3, columns: 3, row0: 0, column0: 0, queryBlock: 1, keyBlock: 1 };
  const part = (values) => ({ ...frame, values: Float32Array.from(values) });
  const b = part([1, 2, 3, 4, 5, 6, 7, 8, 9]);
  const { values } = alignCells(part(Array(9).fill(0)), b, [1, -1, 2], [1, -1, 2]);
  assert.deepEqual([...values].map(String), ["5", "NaN", "6", "NaN", "NaN", "NaN", "8", "NaN", "9"]);
});

/** Two traces of two calls: the first alike in shape, the second not. */
function twoTraces() {
  const call = (heads, rows, keys) => ({ heads, rows, keys });
  const weights = (t, h) =>
    Float32Array.from({ length: 15 }, (_, n) => ((n + h) % 5 === (t && h ? 2 : 0) ? 1 : 0));
  return {
    document: {
      traces: [{ calls: [call(2, 3, 5), call(1, 3, 5)] }, { calls: [call(3, 3, 5), call(1, 4, 5)] }],
    },
    call(t, c) {
      return this.document.traces[t].calls[c];
    },
    levels: (t) => [1, t ? 2 : 4].map((block) => ({ queryBlock: block, keyBlock: Math.min(block, 2) })),
    async tile(t, c, h) {
      const tile = new Float32Array(65536).fill(NaN),
        values = weights(t, h);
      for (let i = 0; i < 3; i++) tile.set(values.subarray(5 * i, 5 * i + 5), 256 * i);
      return tile;
    },
  };
}

test("heads are compared where their cells correspond", async () => {
  const source = twoTraces();
  assert.deepEqual(commonLevels(source, [0, 1], 0, 0, "mass"), [{ queryBlock: 1, keyBlock: 1 }]);
  const found = await headDivergences(source);
  assert.equal(found.map((one) => Array.from(one).join()).join(";"), "0,1;NaN");
  assert.equal(reasonApart(source, [0, 1], 0, 1), "");
  assert.match(reasonApart(source, [0, 1], 0, 2), /A has 2 heads here and B 3/);
  assert.match(reasonApart(source, [0, 1], 1, 0), /3 queries × 5 keys and B 4 × 5/);
  assert.match(reasonApart(source, [1, 0], 2, 0), /no layer 2/);
});
