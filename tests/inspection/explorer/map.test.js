import assert from "node:assert/strict";
import { test } from "node:test";
import { barTicks, drawColourBar } from "../../../src/regard/inspection/explorer/web/colour_bar.js";
import { sequential } from "../../../src/regard/inspection/explorer/web/colours.js";
import { shown } from "../../../src/regard/inspection/explorer/web/dom.js";
import {
  cellAt,
  drawnView,
  followCell,
  hasSquareCells,
  levelToDraw,
  MaskTiles,
  panView,
  pixelOf,
  placeAt,
  wholeTicks,
  zoomView,
} from "../../../src/regard/inspection/explorer/web/geometry.js";
import {
  headSentence,
  insideBrush,
  labelWords,
  numberNames,
  numberRange,
  sortHeads,
} from "../../../src/regard/inspection/explorer/web/heads.js";
import { labelRoom, mapLayout, matrixRect } from "../../../src/regard/inspection/explorer/web/map_layers.js";
import { minimapRect } from "../../../src/regard/inspection/explorer/web/map_marks.js";
import {
  areRounded,
  cellSentence,
  mapSentence,
  rankIn,
  readCell,
} from "../../../src/regard/inspection/explorer/web/sentences.js";
import { ownLimits } from "../../../src/regard/inspection/explorer/web/thumbnails.js";
import {
  combineTiles,
  hiddenBlocks,
  ranksInRows,
  TILE,
  TileStore,
  tilePixels,
  withoutFirst,
} from "../../../src/regard/inspection/explorer/web/tiles.js";
import { layerNames } from "../../../src/regard/inspection/explorer/web/tools.js";

const PLOT = { x: 31, y: 17, w: 600, h: 400 };
const SHAPE = { rows: 1009, keys: 997 };
const near = (one, other, far = 1e-9) => assert.ok(Math.abs(one - other) <= far, `${one} ${other}`);
const tile = (fill) =>
  Float32Array.from({ length: TILE * TILE }, (_, at) => fill(Math.floor(at / TILE), at % TILE));

test("the whole map fits, with square cells, from the upper left corner", () => {
  const view = drawnView({ q0: 0, q1: 1009, k0: 0, k1: 997 }, PLOT, SHAPE);
  near((view.q1 - view.q0) / PLOT.h, (view.k1 - view.k0) / PLOT.w);
  assert.deepEqual([view.q0, view.k0, view.q1], [0, 0, 1009]);
  const thin = { rows: 1, keys: 131071 };
  assert.equal(hasSquareCells(thin), false);
  assert.deepEqual(drawnView({ q0: 0, q1: 1, k0: 0, k1: 131071 }, PLOT, thin), {
    q0: 0,
    q1: 1,
    k0: 0,
    k1: 131071,
  });
});

test("what is drawn holds what is asked for, and asking for what is drawn draws it again", () => {
  for (const view of [
    { q0: 100, q1: 140, k0: 10, k1: 900 },
    { q0: 990, q1: 1009, k0: 0, k1: 7 },
    { q0: 3, q1: 4, k0: 996, k1: 997 },
    { q0: 0, q1: 700, k0: 400, k1: 997 },
  ]) {
    const drawn = drawnView(view, PLOT, SHAPE);
    assert.ok(
      drawn.q0 <= view.q0 + 1e-9 &&
        drawn.q1 >= view.q1 - 1e-9 &&
        drawn.k0 <= view.k0 + 1e-9 &&
        drawn.k1 >= view.k1 - 1e-9,
    );
    const inside = {
      q0: drawn.q0,
      q1: Math.min(SHAPE.rows, drawn.q1),
      k0: drawn.k0,
      k1: Math.min(SHAPE.keys, drawn.k1),
    };
    const again = drawnView(inside, PLOT, SHAPE);
    for (const end of ["q0", "q1", "k0", "k1"]) near(again[end], drawn[end], 1e-6);
  }
});

test("zooming keeps the cell under the pointer; out far enough it is the whole", () => {
  const view = { q0: 200, q1: 400, k0: 300, k1: 600 };
  const pixel = pixelOf(view, PLOT, 250, 470);
  const closer = zoomView(view, 0.25, 250, 470, SHAPE);
  const place = placeAt(closer, PLOT, pixel.x, pixel.y);
  near(place.q, 250);
  near(place.k, 470);
  near(closer.q1 - closer.q0, 50);
  let out = closer;
  for (let n = 0; n < 30; n += 1) out = zoomView(drawnView(out, PLOT, SHAPE), 2, 250, 470, SHAPE);
  assert.deepEqual(out, { q0: 0, q1: 1009, k0: 0, k1: 997 });
  let inward = view;
  for (let n = 0; n < 60; n += 1) inward = zoomView(inward, 0.5, 250, 470, SHAPE);
  assert.ok(inward.q1 - inward.q0 >= 3.99 && inward.k1 - inward.k0 >= 3.99);
  const tiny = zoomView({ q0: 0, q1: 1, k0: 0, k1: 2 }, 0.5, 0.5, 1, { rows: 1, keys: 2 });
  assert.deepEqual(tiny, { q0: 0, q1: 1, k0: 0, k1: 2 });
});

test("panning stops at the edges and keeps the size", () => {
  const view = { q0: 10, q1: 60, k0: 900, k1: 990 };
  assert.deepEqual(panView(view, -50, 50, SHAPE), { q0: 0, q1: 50, k0: 907, k1: 997 });
  assert.deepEqual(panView({ q0: 0, q1: 2000, k0: 0, k1: 90 }, 5, 5, SHAPE), {
    q0: 0,
    q1: 1009,
    k0: 5,
    k1: 95,
  });
  const moved = followCell(view, 100, 20, SHAPE);
  assert.ok(moved.q0 <= 100 && moved.q1 >= 101 && moved.k0 <= 20 && moved.k1 >= 21);
  assert.deepEqual(followCell(view, 35, 950, SHAPE), view);
});

test("pixels and cells are each other's inverse, and there is nothing outside", () => {
  const view = { q0: 500, q1: 520, k0: 700, k1: 730 };
  for (const [row, key] of [
    [500, 700],
    [511, 713],
    [519, 729],
  ]) {
    const { x, y } = pixelOf(view, PLOT, row + 0.5, key + 0.5);
    assert.deepEqual(cellAt(view, PLOT, x, y, SHAPE), { row, key });
  }
  assert.equal(cellAt(view, PLOT, PLOT.x - 1, PLOT.y + 5, SHAPE), null);
  assert.equal(cellAt({ q0: 0, q1: 2000, k0: 0, k1: 3000 }, PLOT, PLOT.x + 599, PLOT.y + 399, SHAPE), null);
});

test("the level: the finest whose blocks take a pixel on both axes", () => {
  const levels = [1, 2, 4, 8].map((size) => ({ queryBlock: size, keyBlock: 2 * size }));
  assert.equal(levelToDraw(levels, 3, 3), 0);
  assert.equal(levelToDraw(levels, 0.5, 3), 1);
  assert.equal(levelToDraw(levels, 0.26, 0.2), 2);
  assert.equal(levelToDraw(levels, 0.01, 0.01), 3);
  assert.equal(levelToDraw([], 1, 1), -1);
});

test("tiles of the mask: any block against a count of its cells", () => {
  const [I, J, tileRows, tileKeys] = [5, 7, 3, 2];
  const values = Uint8Array.from({ length: I * J }, (_, at) => (at * 7 + 3) % 3);
  const mask = new MaskTiles({ values, shape: [I, J] }, tileRows, tileKeys);
  for (let q0 = 0; q0 < 15; q0 += 1) {
    for (let k0 = 0; k0 < 14; k0 += 1) {
      for (const [h, w] of [
        [1, 1],
        [2, 5],
        [4, 3],
      ]) {
        const seen = new Set();
        for (let q = q0; q < Math.min(15, q0 + h); q += 1)
          for (let k = k0; k < Math.min(14, k0 + w); k += 1)
            seen.add(values[Math.floor(q / 3) * J + Math.floor(k / 2)]);
        assert.equal(
          mask.of(q0, Math.min(15, q0 + h), k0, Math.min(14, k0 + w)),
          seen.has(2) ? 2 : seen.has(1) ? 1 : 0,
        );
      }
    }
  }
  assert.equal(new MaskTiles(null).of(0, 1, 0, 1), 2);
});

test("without the first keys, each row's rest sums to 1 again", () => {
  const values = tile((i, j) => (j < 8 ? (j + 1 + (i % 3)) / (36 + 8 * (i % 3)) : 0));
  const out = withoutFirst(values, values, 0, hiddenBlocks(2));
  assert.deepEqual([1, 2, 4, 5, 64].map(hiddenBlocks), [4, 2, 1, 1, 1]);
  for (const i of [0, 1, 17, 255]) {
    const row = Array.from(out.subarray(i * TILE, (i + 1) * TILE));
    assert.ok(row.slice(0, 2).every(Number.isNaN));
    near(
      row.slice(2).reduce((sum, value) => sum + value, 0),
      1,
      1e-6,
    );
    near(row[5] / row[3], values[i * TILE + 5] / values[i * TILE + 3], 1e-6);
  }
  const all = withoutFirst(
    tile((i, j) => Number(j === 0)),
    tile((i, j) => Number(j === 0)),
    0,
    1,
  );
  assert.equal(all[1], 0);
  // Norms are shared out by what is left of the weights, and may be above 1.
  const norms = withoutFirst(
    tile(() => 6),
    tile((i, j) => Number(j === 0) / 4),
    0,
    1,
    Infinity,
  );
  assert.equal(norms[1], 8);
});

test("heads are joined by their mean or their largest", () => {
  const [a, b] = [tile((i, j) => i + j), tile((i, j) => 3 * i)];
  assert.equal(combineTiles([a, b], "mean")[5 * TILE + 7], 13.5);
  assert.equal(combineTiles([a, b], "max")[5 * TILE + 7], 15);
  assert.equal(a[5 * TILE + 7], 12);
  assert.ok(Number.isNaN(combineTiles([a, tile(() => NaN)], "max")[3]));
});

test("ranks go over the whole row: ties share, nothing stays at 0, NaN stays", () => {
  const left = tile((i, j) => (j === 0 ? 0.5 : j === 1 ? 0.1 : 0));
  const right = tile((i, j) => (j === 0 ? 0.3 : j === 1 ? 0.1 : j === 2 ? NaN : 0));
  const [first, second] = [ranksInRows([left, right], 0), ranksInRows([left, right], 1)];
  assert.deepEqual(Array.from(first.subarray(0, 3)), [1, 0, 0]);
  near(second[0], 2 / 3, 1e-6);
  assert.deepEqual([second[1], second[3], Number.isNaN(second[2])], [0, 0, true]);
});

test("pixels of a tile: colours, holes where nothing may be attended to, grey for NaN, nothing beyond the edge", () => {
  const level = { queryBlock: 1, keyBlock: 1 };
  const mask = new MaskTiles({ values: Uint8Array.from([1, 0, 2, 1]), shape: [2, 2] }, 3, 3);
  const values = tile((i, j) =>
    i === 0 && j === 0 ? 1 : i === 3 && j === 1 ? 0.001 : i === 4 && j === 4 ? NaN : 0,
  );
  const pixels = tilePixels(
    values,
    {
      scale: "log",
      low: 1e-6,
      high: 1,
      table: sequential,
      none: [9, 8, 7],
      level,
      mask,
      shape: { rows: 5, keys: 6 },
    },
    0,
    0,
  );
  const at = (i, j) => Array.from(pixels.subarray(4 * (i * TILE + j), 4 * (i * TILE + j) + 4));
  assert.deepEqual(at(0, 0), [...sequential.subarray(765, 768), 255]);
  assert.deepEqual(at(3, 1), [...sequential.subarray(384, 387), 255]);
  assert.deepEqual(at(3, 0), [...sequential.subarray(0, 3), 255]);
  assert.deepEqual([at(1, 1)[3], at(0, 5)[3], at(5, 0)[3], at(0, 6)[3]], [0, 0, 0, 0]);
  assert.deepEqual(at(4, 4), [9, 8, 7, 255]);
});

test("a tile is asked for once, and again when the question differs", async () => {
  const asked = [];
  const source = {
    tile: async (...question) => {
      asked.push(question.slice(0, 8).join(" "));
      return tile(() => question[2] / 10);
    },
  };
  let arrived = 0;
  source.holds = () => true;
  const store = new TileStore(source, () => (arrived += 1));
  const what = {
    t: 0,
    heads: [
      [0, 1],
      [2, 3],
    ],
    level: { queryBlock: 4, keyBlock: 4 },
    channel: "mass",
    aggregate: "mean",
    hideSink: false,
    ranked: false,
    columns: 1,
  };
  assert.equal(store.get(what, 0, 0), null);
  assert.equal(store.get(what, 0, 0), null);
  assert.equal(store.pending, 1);
  while (store.pending) await new Promise((resolve) => setTimeout(resolve, 1));
  near(store.get(what, 0, 0).values[5], 0.2, 1e-6);
  assert.deepEqual(asked, ["0 0 1 4 4 0 0 mass", "0 2 3 4 4 0 0 mass"]);
  assert.equal(store.get({ ...what, aggregate: "max" }, 0, 0), null);
  while (store.pending) await new Promise((resolve) => setTimeout(resolve, 1));
  near(store.get({ ...what, aggregate: "max" }, 0, 0).values[5], 0.3, 1e-6);
  assert.equal(arrived, 2);
});

test("the sentence of a cell names query, key, weight and rank", () => {
  const call = { query_offset: 1000, key_offset: 0, rows: 64, keys: 64 };
  const tokens = {
    rows: Array.from({ length: 64 }, (_, n) => (n === 42 ? " cat" : "x")),
    keys: Array.from({ length: 64 }, (_, n) => (n === 13 ? "The" : "x")),
  };
  const facts = {
    row: 42,
    key: 13,
    call,
    tokens,
    weight: 0.31,
    rank: 1,
    count: 1043,
    heads: 1,
    aggregate: "mean",
  };
  assert.equal(cellSentence(facts), "query 1042 'cat' to key 13 'The', 0.31, rank 1 of 1043");
  assert.equal(
    cellSentence({ ...facts, heads: 3, aggregate: "max" }),
    "query 1042 'cat' to key 13 'The', 0.31, rank 1 of 1043, largest of 3 heads",
  );
  assert.equal(
    cellSentence({
      ...facts,
      weight: null,
      block: { value: 0.125, channel: "max", queryBlock: 32, keyBlock: 8 },
    }),
    "query 1042 'cat' to key 13 'The': in the block of queries 1032–1063 and keys 8–15, largest weight 0.125",
  );
  assert.equal(
    cellSentence({ ...facts, weight: null, block: null, tokens: {} }),
    "query 1042 to key 13: no number is stored",
  );
  const block = { value: 2.5, channel: "value", queryBlock: 2, keyBlock: 1 };
  assert.equal(
    cellSentence({ ...facts, channel: "value", weight: 3.7, rounded: true }),
    "query 1042 'cat' to key 13 'The', norm of what is added about 3.7, rank 1 of 1043",
  );
  assert.ok(
    cellSentence({ ...facts, weight: null, block }).endsWith("key 13, largest norm of what is added 2.5"),
  );
  assert.ok(cellSentence({ ...facts, rounded: true }).includes(", about 0.31, rank 1"));
  assert.ok(!cellSentence({ ...facts, weight: 0, rounded: true }).includes("about"));
  assert.deepEqual(rankIn([0.2, 0.5, 0, 0.2, 0.1], 3), { rank: 2, count: 4 });
});

test("a cell is read from exact rows, from the largest weights kept, or not at all", async () => {
  const rows = { 0: [0.1, 0.6, 0.3], 1: [0.5, 0.25, 0.25] };
  const source = {
    row: async (t, c, h) => ({ values: Float32Array.from(rows[h]), exact: true }),
    topKeys: async () => null,
  };
  const one = await readCell(source, { t: 0, heads: [[0, 0]], row: 2, key: 2, aggregate: "mean" });
  assert.deepEqual([one.rank, one.count], [2, 3]);
  const both = await readCell(source, {
    t: 0,
    heads: [
      [0, 0],
      [0, 1],
    ],
    row: 2,
    key: 0,
    aggregate: "mean",
  });
  near(both.weight, 0.3, 1e-6);
  assert.equal(both.rank, 2);
  const none = { ...source, row: async () => null, topKeys: async () => [{ key: 2, weight: 0.7 }] };
  const asked = { t: 0, heads: [[0, 0]], row: 2, key: 2, aggregate: "mean", channel: "value" };
  assert.deepEqual(await readCell(none, asked), { weight: null });
  const kept = {
    row: async () => ({ values: new Float32Array(2), exact: false }),
    topKeys: async () => [
      { key: 9, weight: 0.7 },
      { key: 4, weight: 0.2 },
    ],
  };
  assert.deepEqual(await readCell(kept, { t: 0, heads: [[0, 0]], row: 50, key: 4, aggregate: "mean" }), {
    weight: 0.2,
    rank: 2,
    count: "2 stored",
  });
  assert.equal(
    (await readCell(kept, { t: 0, heads: [[0, 0]], row: 50, key: 5, aggregate: "mean" })).weight,
    null,
  );
});

test("rounded are codes and stored blocks, not the weights of a server or of half floats", () => {
  const source = (heads, ask = null) => ({
    ask,
    document: { chunks: { a: { code: "plain" }, b: { code: "log8" } } },
    head: (t, c, h) => ({ weights: heads[h] }),
  });
  assert.equal(areRounded(source(["a"]), 0, [[0, 0]]), false);
  assert.equal(
    areRounded(source(["a", "b"]), 0, [
      [0, 0],
      [0, 1],
    ]),
    true,
  );
  assert.equal(areRounded(source([null]), 0, [[0, 0]]), true);
  assert.equal(
    areRounded(
      source([null], () => null),
      0,
      [[0, 0]],
    ),
    false,
  );
});

test("what was done to the numbers is said", () => {
  const calls = [{ kind: "self" }, { kind: "cross" }];
  const what = {
    heads: [[1, 4]],
    left: 0,
    aggregate: "mean",
    channel: "mass",
    level: { queryBlock: 1, keyBlock: 1 },
    hideSink: false,
    rowRank: false,
    calls,
  };
  assert.equal(mapSentence(what), "Layer 1 head 4 (cross-attention) · weights");
  const text = mapSentence({
    ...what,
    heads: [
      [0, 0],
      [1, 2],
    ],
    left: 1,
    aggregate: "max",
    level: { queryBlock: 8, keyBlock: 16 },
    hideSink: true,
    rowRank: true,
  });
  for (const part of [
    "Largest of 2 heads (layer.head 0.0, 1.2)",
    "blocks of 8 × 16",
    "1 selected head of another size left out",
    "keys 0–15 hidden",
    "renormalised",
    "rank",
  ]) {
    assert.ok(text.includes(part), part);
  }
});

test("ticks are round, and those of a colour bar are inside it", () => {
  assert.deepEqual(wholeTicks(0, 60, 300, 40), [0, 10, 20, 30, 40, 50]);
  assert.deepEqual(wholeTicks(3.5, 6.2, 300, 40), [4, 5, 6]);
  assert.deepEqual(wholeTicks(5, 5, 300, 40), []);
  for (const [low, high] of [
    [2 ** -12, 1],
    [2 ** -21, 1],
  ]) {
    const ticks = barTicks("log", low, high);
    assert.ok(ticks.length >= 3 && ticks.every((tick) => tick >= low && tick <= high * (1 + 1e-9)));
  }
  assert.deepEqual(barTicks("linear", 0, 0.8), [0, 0.2, 0.4, 0.8 * 0.75, 0.8]);
  near(barTicks("power", 0, 0.8)[2], 0.8 * 0.5 ** 2.5);
});

test("the plot stays inside the canvas at any size; the minimap inside the plot", () => {
  for (const [w, h] of [
    [280, 250],
    [600, 400],
    [1900, 1000],
  ]) {
    for (const room of [0, 44, 130]) {
      const layout = mapLayout(w, h, room);
      const { plot } = layout;
      assert.ok(plot.x > 0 && plot.y > 0 && plot.x + plot.w <= w && plot.y + plot.h < h);
      const view = drawnView({ q0: 100, q1: 200, k0: 100, k1: 200 }, plot, SHAPE);
      const mini = minimapRect(layout, view, SHAPE);
      assert.ok(
        mini.x >= plot.x &&
          mini.y >= plot.y &&
          mini.x + mini.w <= plot.x + plot.w &&
          mini.y + mini.h <= plot.y + plot.h,
      );
      assert.equal(
        minimapRect(layout, drawnView({ q0: 0, q1: 1009, k0: 0, k1: 997 }, plot, SHAPE), SHAPE),
        null,
      );
      const area = matrixRect(view, plot, SHAPE);
      assert.ok(area.w <= plot.w + 1e-6 && area.h <= plot.h + 1e-6);
    }
  }
});

test("the legend is whole, inside the canvas, at any width", () => {
  const marks = ["not attended", "no number", "entropy", "key mass"];
  for (const width of [262, 344, 482, 500, 679, 680, 1200]) {
    const { plot, bottom, below, height } = mapLayout(width, 400);
    const told = new Map();
    const pen = new Proxy(
      {},
      {
        set: () => true,
        get: (_, name) =>
          ({
            measureText: (text) => ({ width: 6 * text.length }),
            fillText: (text, x, y) => told.set(text, [x, y]),
          })[name] ?? (() => {}),
      },
    );
    drawColourBar(pen, {
      x: plot.x,
      y: height - bottom + 20,
      width: width - plot.x - 6,
      below,
      theme: {},
      look: { scale: "log", low: 1e-4, high: 1, table: new Uint8Array(768) },
      words: "weight, log scale",
      marks: marks.map((text) => [text, "grey"]),
    });
    for (const text of ["weight, log scale", ...marks]) {
      const [x, y] = told.get(text);
      assert.ok(x + 6 * text.length <= width && y + 6 <= height, `${text} at ${x}, ${y} of ${width}`);
    }
  }
});

test("heads are sorted, filtered and told in words", () => {
  const trace = {
    calls: [
      {
        heads: 3,
        means: { entropy: [0.5, 2, null], distance: [3, 1, 9], zeta: [1, 1, 1] },
        labels: [[{ name: "local", value: 0.913, threshold: 0.8 }], [], []],
      },
    ],
  };
  const heads = [
    [0, 0],
    [0, 1],
    [0, 2],
  ];
  const read = (name, c, h) => trace.calls[c].means[name][h] ?? NaN;
  assert.deepEqual(sortHeads(heads, "entropy", read), [
    [0, 1],
    [0, 0],
    [0, 2],
  ]);
  assert.deepEqual(sortHeads(heads, "-entropy", read), [
    [0, 0],
    [0, 1],
    [0, 2],
  ]);
  assert.equal(sortHeads(heads, "model", read), heads);
  assert.deepEqual(numberNames(trace), ["entropy", "distance", "zeta"]);
  assert.equal(
    headSentence(trace, 0, 0, "distance"),
    "layer 0 head 0, distance 3 tokens, entropy 0.5 nats, local 0.91",
  );
  assert.deepEqual(numberRange("self", [0.2, 0.4], false), [0, 1]);
  assert.deepEqual(numberRange("entropy", [0.2, NaN, 4], false), [0, 4]);
  assert.deepEqual(numberRange("self", [-0.25, 0.125], true), [-0.25, 0.25]);
  assert.deepEqual(numberRange("entropy", [], false), [0, 1]);
  const brush = { e0: 1, e1: 3, d0: 0, d1: 2 };
  assert.deepEqual(
    heads.map(([c, h]) => insideBrush(brush, read("entropy", c, h), read("distance", c, h))),
    [false, true, false],
  );
});

test("layers are told apart by what differs in their names", () => {
  const call = (name, kind = "self") => ({ name, kind });
  assert.deepEqual(layerNames([call("encoder.blocks.0.attention"), call("encoder.blocks.1.attention")]), [
    "0",
    "1",
  ]);
  assert.deepEqual(layerNames([call("decoder.0.self"), call("decoder.0.cross", "cross")]), [
    "0 · self",
    "1 · cross (cross)",
  ]);
  assert.deepEqual(layerNames([call("attention")]), ["0"]);
  assert.deepEqual(layerNames([call("a"), call("a")]), ["0", "1"]);
});

test("tokens stay on one line, in whole characters, and are never empty", () => {
  assert.equal(shown(" the"), "the");
  assert.equal(shown("  "), "␣␣");
  assert.equal(shown("a\nb"), "a⏎b");
  assert.equal(shown(""), "∅");
  assert.equal(Array.from(shown("🙂".repeat(10000), 5)).join(""), "🙂🙂🙂🙂…");
  assert.equal(shown("\u0000x"), "·x");
});

test("of a served map, what a picture leaves out is given up, and what is passed by never asked for", async () => {
  const asked = [];
  const ended = [];
  const source = {
    ask: () => {},
    holds: () => false,
    tile: (...what) => {
      const signal = what.at(-1);
      asked.push(what[3]);
      return new Promise((_, fail) => {
        signal.addEventListener("abort", () => {
          ended.push(what[3]);
          fail(signal.reason);
        });
      });
    },
  };
  const store = new TileStore(source, () => {});
  const what = (block) => ({
    t: 0,
    heads: [[0, 0]],
    level: { queryBlock: block, keyBlock: block },
    channel: "mass",
    aggregate: "mean",
    hideSink: false,
    ranked: false,
    columns: 1,
  });
  for (const block of [64, 32, 16]) store.inPicture(() => store.get(what(block), 0, 0));
  await new Promise((resolve) => setTimeout(resolve, 150));
  assert.deepEqual([asked, ended], [[16], []]);
  assert.equal(store.awaits(what(16), 0, 0), true);
  assert.equal(store.awaits(what(64), 0, 0), false);
  store.inPicture(() => store.get(what(16), 0, 0));
  assert.deepEqual(ended, []);
  store.inPicture(() => store.get(what(8), 0, 0));
  assert.deepEqual(ended, [16]);
  await new Promise((resolve) => setTimeout(resolve, 5));
  assert.equal(store.pending, 1);
});

test("keys get as much room as their tokens are long, but for a few", () => {
  const short = Array.from({ length: 200 }, (_, n) => "abc"[n % 3]);
  const long = short.map(() => "international");
  assert.ok(labelRoom(short) < 50 && labelRoom(long) > 100);
  assert.equal(labelRoom([...short, "international"]), labelRoom(short));
  assert.ok(labelRoom([]) > 0);
});

test("a head's own colours go from its weak to its strong weights", () => {
  const values = Float32Array.from({ length: 1001 }, (_, n) => n / 1000);
  const [low, high] = ownLimits(values);
  near(low, 0.02, 2e-3);
  near(high, 0.995, 2e-3);
  assert.equal(ownLimits(new Float32Array(9)), null);
  const [least, most] = ownLimits(new Float32Array(9).fill(0.25));
  assert.ok(least < most && most === 0.25);
});

test("a label says what chance gives, and over how many rows", () => {
  const label = { name: "induction", value: 0.8345, threshold: 0.25, chance: 0.0625, rows: 41 };
  const words = labelWords(label);
  assert.equal(words.name, "induction 0.83");
  assert.match(words.ground, /^chance 0\.06\d*, 41 rows$/);
  assert.match(words.title, /mean share 0\.83\d* over 41 rows, where even weights give 0\.06\d*; .* 0\.25/);
  assert.match(labelWords({ ...label, rows: 1 }).ground, /, 1 row$/);
});
