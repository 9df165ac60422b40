import assert from "node:assert/strict";
import test from "node:test";
import { countLayers, rollOut } from "../../../src/regard/inspection/explorer/web/rollout.js";
import { Source } from "../../../src/regard/inspection/explorer/web/source.js";

const rows = [
  [1, 0, 0],
  [1, 0, 0],
  [0, 1, 0],
];

/** A source whose first head reads the token before, and whose second leaves half to a sink. */
function sourceOf(belows, missing = -1) {
  const calls = belows.map((below, c) => ({
    rows: 3,
    keys: 3,
    below,
    head: [0, 1].map((h) => ({ weights: c === missing && h ? null : `${c}${h}` })),
  }));
  const source = new Source({ traces: [{ calls }], chunks: {} }, async () => new Uint8Array());
  source.weights = async (_, c, h) =>
    calls[c].head[h].weights && {
      values: Float32Array.from(rows.flat(), (one) => (h ? one / 2 : one)),
      rows: 3,
      keys: 3,
    };
  return source;
}

test("half of each share moves along the mean weights, layer by layer", async () => {
  // Mean weights are 3/4 of the rows: of a share, 3/8 moves and 5/8 stays, but at the first token.
  assert.deepEqual([...(await rollOut(sourceOf([-1]), 0, 0, 2))], [0, 0.375, 0.625]);
  const found = await rollOut(sourceOf([-1, undefined, 0]), 0, 2, 2);
  assert.deepEqual([...found], [0.140625, 0.46875, 0.390625]);
});

test("layers are counted where all weights are known", async () => {
  assert.deepEqual(
    [0, 1, 2].map((c) => countLayers(sourceOf([-1, undefined, 0]), 0, c)),
    [1, 0, 2],
  );
  assert.equal(countLayers(sourceOf([-1, 0], 0), 0, 1), 0);
});
