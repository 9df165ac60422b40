import assert from "node:assert/strict";
import { test } from "node:test";
import { barTicks, drawColourBar } from "../../../src/regard/inspection/explorer/web/colour_bar.js";
import { sequential } from "../../../src/regard/inspection/explorer/web/colours.js";
import * as geometry from "../../../src/regard/inspection/explorer/web/geometry.js";
import * as heads from "../../../src/regard/inspection/explorer/web/heads.js";
import { labelRoom, mapLayout, matrixRect } from "../../../src/regard/inspection/explorer/web/map_layers.js";
import { minimapRect } from "../../../src/regard/inspection/explorer/web/map_marks.js";
import * as sentences from "../../../src/regard/inspection/explorer/web/sentences.js";
import { ownLimits, Thumbnails } from "../../../src/regard/inspection/explorer/web/thumbnails.js";
import * as tiles from "../../../src/regard/inspection/explorer/web/tiles.js";
import { layerNames } from "../../../src/regard/inspection/explorer/web/tools.js";

const { cellAt, drawnView, followCell, levelToDraw, MaskTiles, panView, pixelOf, zoomView } = geometry;
const { cellSentence, mapSentence, readCell } = sentences;
const { TILE, TileStore, withoutFirst } = tiles;
const PLOT = { x: 31, y: 17, w: 600, h: 400 };
const SHAPE = { rows: 1009, keys: 997 };
const box = (q0, q1, k0, k1) => ({ q0, q1, k0, k1 });
const WHOLE = box(0, 1009, 0, 997);
const near = (one, other, far = 1e-9) => assert.ok(Math.abs(one - other) <= far, `${one} ${other}`);
const inside = (view, of, far = 0) =>
  assert.ok(
    of.q0 <= view.q0 + far && of.q1 >= view.q1 - far && of.k0 <= view.k0 + far && of.k1 >= view.k1 - far,
  );
const tile = (fill) =>
  Float32Array.from({ length: TILE * TILE }, (_, at) => fill(Math.floor(at / TILE), at % TILE));
const headsOf = (...names) => names.map((name) => name.split(".").map(Number));

test("the whole map fits, with square cells, from the upper left corner", () => {
  const view = drawnView(WHOLE, PLOT, SHAPE);
  near((view.q1 - view.q0) / PLOT.h, (view.k1 - view.k0) / PLOT.w);
  assert.deepEqual([view.q0, view.k0, view.q1], [0, 0, 1009]);
  const thin = { rows: 1, keys: 131071 };
  assert.equal(geometry.hasSquareCells(thin), false);
  assert.deepEqual(drawnView(box(0, 1, 0, 131071), PLOT, thin), box(0, 1, 0, 131071));
});

test("what is drawn holds what is asked for, and asking for what is drawn draws it again", () => {
  for (const view of [box(100, 140, 10, 900), box(990, 1009, 0, 7), box(3, 4, 996, 997)]) {
    const drawn = drawnView(view, PLOT, SHAPE);
    inside(view, drawn, 1e-9);
    const cut = box(drawn.q0, Math.min(SHAPE.rows, drawn.q1), drawn.k0, Math.min(SHAPE.keys, drawn.k1));
    const again = drawnView(cut, PLOT, SHAPE);
    for (const end of ["q0", "q1", "k0", "k1"]) near(again[end], drawn[end], 1e-6);
  }
});

test("zooming keeps the cell under the pointer; out far enough it is the whole", () => {
  const view = box(200, 400, 300, 600);
  const pixel = pixelOf(view, PLOT, 250, 470);
  const closer = zoomView(view, 0.25, 250, 470, SHAPE);
  const place = geometry.placeAt(closer, PLOT, pixel.x, pixel.y);
  near(place.q, 250);
  near(place.k, 470);
  near(closer.q1 - closer.q0, 50);
  let out = closer;
  for (let n = 0; n < 30; n += 1) out = zoomView(drawnView(out, PLOT, SHAPE), 2, 250, 470, SHAPE);
  assert.deepEqual(out, WHOLE);
  let inward = view;
  for (let n = 0; n < 60; n += 1) inward = zoomView(inward, 0.5, 250, 470, SHAPE);
  assert.ok(inward.q1 - inward.q0 >= 3.99 && inward.k1 - inward.k0 >= 3.99);
  assert.deepEqual(zoomView(box(0, 1, 0, 2), 0.5, 0.5, 1, { rows: 1, keys: 2 }), box(0, 1, 0, 2));
});

test("panning stops at the edges and keeps the size", () => {
  const view = box(10, 60, 900, 990);
  assert.deepEqual(panView(view, -50, 50, SHAPE), box(0, 50, 907, 997));
  assert.deepEqual(panView(box(0, 2000, 0, 90), 5, 5, SHAPE), box(0, 1009, 5, 95));
  inside(box(100, 101, 20, 21), followCell(view, 100, 20, SHAPE));
  assert.deepEqual(followCell(view, 35, 950, SHAPE), view);
});

test("pixels and cells are each other's inverse, and there is nothing outside", () => {
  const view = box(500, 520, 700, 730);
  for (const [row, key] of headsOf("500.700", "511.713", "519.729")) {
    const { x, y } = pixelOf(view, PLOT, row + 0.5, key + 0.5);
    assert.deepEqual(cellAt(view, PLOT, x, y, SHAPE), { row, key });
  }
  assert.equal(cellAt(view, PLOT, PLOT.x - 1, PLOT.y + 5, SHAPE), null);
  assert.equal(cellAt(box(0, 2000, 0, 3000), PLOT, PLOT.x + 599, PLOT.y + 399, SHAPE), null);
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
  for (let at = 0; at < 15 * 14 * 3; at += 1) {
    const [q0, k0] = [Math.floor(at / 42), Math.floor(at / 3) % 14];
    const [q1, k1] = [Math.min(15, q0 + [1, 2, 4][at % 3]), Math.min(14, k0 + [1, 5, 3][at % 3])];
    const seen = new Set();
    for (let q = q0; q < q1; q += 1)
      for (let k = k0; k < k1; k += 1) seen.add(values[Math.floor(q / 3) * J + Math.floor(k / 2)]);
    assert.equal(mask.of(q0, q1, k0, k1), seen.has(2) ? 2 : Number(seen.has(1)));
  }
  const nothing = new MaskTiles(null),
    call = { query_offset: 3, key_offset: 0, reach: [2, 0] };
  assert.equal(nothing.of(0, 1, 0, 1), 2);
  const forbidden = [0, 1, 2, 3, 4].map((key) => nothing.forbids(call, 0, key));
  assert.deepEqual(forbidden, [true, false, false, false, true]);
});

test("without the first keys, each row's rest sums to 1 again", () => {
  const values = tile((i, j) => (j < 8 ? (j + 1 + (i % 3)) / (36 + 8 * (i % 3)) : 0));
  const out = withoutFirst(values, values, 0, tiles.hiddenBlocks(2));
  assert.deepEqual([1, 2, 4, 5, 64].map(tiles.hiddenBlocks), [4, 2, 1, 1, 1]);
  for (const i of [0, 1, 17, 255]) {
    const row = Array.from(out.subarray(i * TILE, (i + 1) * TILE));
    assert.ok(row.slice(0, 2).every(Number.isNaN));
    const sum = row.slice(2).reduce((all, value) => all + value, 0);
    near(sum, 1, 1e-6);
    near(row[5] / row[3], values[i * TILE + 5] / values[i * TILE + 3], 1e-6);
  }
  const first = tile((i, j) => Number(j === 0));
  assert.equal(withoutFirst(first, first, 0, 1)[1], 0);
  // Norms are shared out by what is left of the weights, and may be above 1.
  const [norms, quarter] = [tile(() => 6), tile((i, j) => Number(j === 0) / 4)];
  assert.equal(withoutFirst(norms, quarter, 0, 1, Infinity)[1], 8);
});

test("heads are joined by their mean or their largest", () => {
  const [a, b] = [tile((i, j) => i + j), tile((i, j) => 3 * i)];
  assert.equal(tiles.combineTiles([a, b], "mean")[5 * TILE + 7], 13.5);
  assert.equal(tiles.combineTiles([a, b], "max")[5 * TILE + 7], 15);
  assert.equal(a[5 * TILE + 7], 12);
  assert.ok(Number.isNaN(tiles.combineTiles([a, tile(() => NaN)], "max")[3]));
});

test("ranks go over the whole row: ties share, nothing stays at 0, NaN stays", () => {
  const left = tile((i, j) => [0.5, 0.1][j] ?? 0);
  const right = tile((i, j) => [0.3, 0.1, NaN][j] ?? 0);
  const [first, second] = [0, 1].map((n) => tiles.ranksInRows([left, right], n));
  assert.deepEqual(Array.from(first.subarray(0, 3)), [1, 0, 0]);
  near(second[0], 2 / 3, 1e-6);
  assert.deepEqual([second[1], second[3], Number.isNaN(second[2])], [0, 0, true]);
});

test("pixels: colours, holes where nothing may be attended to, grey for NaN, none beyond the edge", () => {
  const level = { queryBlock: 1, keyBlock: 1 };
  const mask = new MaskTiles({ values: Uint8Array.from([1, 0, 2, 1]), shape: [2, 2] }, 3, 3);
  const values = tile((i, j) => ({ 0: 1, 31: 0.001, 44: NaN })[10 * i + j] ?? 0);
  const look = { scale: "log", low: 1e-6, high: 1, table: sequential, none: [9, 8, 7] };
  const pixels = tiles.tilePixels(values, { ...look, level, mask, shape: { rows: 5, keys: 6 } }, 0, 0);
  const at = (i, j) => Array.from(pixels.subarray(4 * (i * TILE + j), 4 * (i * TILE + j) + 4));
  assert.deepEqual(at(0, 0), [...sequential.subarray(765, 768), 255]);
  assert.deepEqual(at(3, 1), [...sequential.subarray(384, 387), 255]);
  assert.deepEqual(at(3, 0), [...sequential.subarray(0, 3), 255]);
  assert.deepEqual([at(1, 1)[3], at(0, 5)[3], at(5, 0)[3], at(0, 6)[3]], [0, 0, 0, 0]);
  assert.deepEqual(at(4, 4), [9, 8, 7, 255]);
});

const QUESTION = { t: 0, channel: "mass", aggregate: "mean", hideSink: false, ranked: false, columns: 1 };
const level = (block) => ({ queryBlock: block, keyBlock: block });

test("a tile is asked for once, and again when the question differs", async () => {
  const asked = [];
  const source = {
    holds: () => true,
    tile: async (...question) => {
      asked.push(question.slice(0, 8).join(" "));
      return tile(() => question[2] / 10);
    },
  };
  let arrived = 0;
  const store = new TileStore(source, () => (arrived += 1));
  const what = { ...QUESTION, heads: headsOf("0.1", "2.3"), level: level(4) };
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

test("of a served map, what a picture leaves out is given up, and what is passed by never asked for", async () => {
  const [asked, ended] = [[], []];
  const tileOf = (...question) => {
    const signal = question.at(-1);
    asked.push(question[3]);
    return new Promise((_, fail) => {
      signal.addEventListener("abort", () => {
        ended.push(question[3]);
        fail(signal.reason);
      });
    });
  };
  const store = new TileStore({ ask: () => {}, holds: () => false, tile: tileOf }, () => {});
  const what = (block) => ({ ...QUESTION, heads: headsOf("0.0"), level: level(block) });
  for (const block of [64, 32, 16]) store.inPicture(() => store.get(what(block), 0, 0));
  await new Promise((resolve) => setTimeout(resolve, 150));
  assert.deepEqual([asked, ended], [[16], []]);
  assert.deepEqual([store.awaits(what(16), 0, 0), store.awaits(what(64), 0, 0)], [true, false]);
  store.inPicture(() => store.get(what(16), 0, 0));
  assert.deepEqual(ended, []);
  store.inPicture(() => store.get(what(8), 0, 0));
  assert.deepEqual(ended, [16]);
  await new Promise((resolve) => setTimeout(resolve, 5));
  assert.equal(store.pending, 1);
});

test("the sentence of a cell names query, key, weight and rank", () => {
  const call = { query_offset: 1000, key_offset: 0, rows: 64, keys: 64 };
  const named = (at, name) => Array.from({ length: 64 }, (_, n) => (n === at ? name : "x"));
  const tokens = { rows: named(42, " cat"), keys: named(13, "The") };
  const facts = { row: 42, key: 13, call, tokens, weight: 0.31, rank: 1, count: 1043, heads: 1 };
  const tell = (more) => cellSentence({ ...facts, aggregate: "mean", ...more });
  const block = { value: 0.125, channel: "max", queryBlock: 32, keyBlock: 8 };
  const norms = { value: 2.5, channel: "value", queryBlock: 2, keyBlock: 1 };
  const cell = "query 1042 'cat' to key 13 'The'";
  for (const [more, sentence] of [
    [{}, `${cell}, 0.31, rank 1 of 1043`],
    [{ heads: 3, aggregate: "max" }, `${cell}, 0.31, rank 1 of 1043, largest of 3 heads`],
    [
      { weight: null, block },
      `${cell}: in the block of queries 1032–1063 and keys 8–15, largest weight 0.125`,
    ],
    [{ weight: null, block: null, tokens: {} }, "query 1042 to key 13: no number is stored"],
    [
      { channel: "value", weight: 3.7, rounded: true },
      `${cell}, norm of what is added about 3.7, rank 1 of 1043`,
    ],
    [{ weight: 0, rounded: true }, `${cell}, 0; 1043 keys have weight`],
  ])
    assert.equal(tell(more), sentence);
  assert.ok(tell({ weight: null, block: norms }).endsWith("key 13, largest norm of what is added 2.5"));
  assert.deepEqual(sentences.rankIn([0.2, 0.5, 0, 0.2, 0.1], 3), { rank: 2, count: 4 });
});

test("a cell is read from exact rows, from the largest weights kept, or not at all", async () => {
  const rows = [Float32Array.of(0.1, 0.6, 0.3), Float32Array.of(0.5, 0.25, 0.25)];
  const exact = { row: async (t, c, h) => ({ values: rows[h], exact: true }), topKeys: async () => null };
  const listed = [
    { key: 9, weight: 0.7 },
    { key: 4, weight: 0.2 },
  ];
  const kept = {
    row: async () => ({ values: new Float32Array(2), exact: false }),
    topKeys: async () => listed,
  };
  const read = (source, row, key, ...names) =>
    readCell(source, { t: 0, heads: headsOf(...names), row, key, aggregate: "mean" });
  const one = await read(exact, 2, 2, "0.0");
  assert.deepEqual([one.rank, one.count], [2, 3]);
  const both = await read(exact, 2, 0, "0.0", "0.1");
  near(both.weight, 0.3, 1e-6);
  assert.equal(both.rank, 2);
  const asked = { t: 0, heads: headsOf("0.0"), row: 2, key: 9, aggregate: "mean", channel: "value" };
  assert.deepEqual(await readCell({ ...kept, row: async () => null }, asked), { weight: null });
  assert.deepEqual(await read(kept, 50, 4, "0.0"), { weight: 0.2, rank: 2, count: "2 stored" });
  assert.equal((await read(kept, 50, 5, "0.0")).weight, null);
});

test("rounded are codes and stored blocks, not the weights of a server or of half floats", () => {
  const chunks = { a: { code: "plain" }, b: { code: "log8" } };
  const areRounded = (weights, ask = null) => {
    const source = { ask, document: { chunks }, head: (t, c, h) => ({ weights: weights[h] }) };
    return sentences.areRounded(
      source,
      0,
      [...weights.keys()].map((h) => [0, h]),
    );
  };
  assert.equal(areRounded(["a"]), false);
  assert.equal(areRounded(["a", "b"]), true);
  assert.equal(areRounded([null]), true);
  assert.equal(
    areRounded([null], () => null),
    false,
  );
});

test("what was done to the numbers is said", () => {
  const calls = [{ kind: "self" }, { kind: "cross" }];
  const plain = { heads: headsOf("1.4"), left: 0, aggregate: "mean", channel: "mass", level: level(1) };
  const what = { ...plain, hideSink: false, rowRank: false, calls };
  assert.equal(mapSentence(what), "Layer 1 head 4 (cross-attention) · weights");
  const changed = { left: 1, aggregate: "max", level: { queryBlock: 8, keyBlock: 16 }, rowRank: true };
  const text = mapSentence({ ...what, ...changed, heads: headsOf("0.0", "1.2"), hideSink: true, narrow: 4 });
  for (const part of [
    "Largest of 2 heads (layer.head 0.0, 1.2)",
    "blocks of 8 × 16",
    "1 selected head of another size left out",
    "keys 0–15 hidden",
    "renormalised",
    "rank",
    "holds more than the blocks of 4 keys of heads stored finer",
  ])
    assert.ok(text.includes(part), part);
});

test("ticks are round, and those of a colour bar are inside it", () => {
  assert.deepEqual(geometry.wholeTicks(0, 60, 300, 40), [0, 10, 20, 30, 40, 50]);
  assert.deepEqual(geometry.wholeTicks(3.5, 6.2, 300, 40), [4, 5, 6]);
  assert.deepEqual(geometry.wholeTicks(5, 5, 300, 40), []);
  for (const low of [2 ** -12, 2 ** -21]) {
    const ticks = barTicks("log", low, 1);
    assert.ok(ticks.length >= 3 && ticks.every((tick) => tick >= low && tick <= 1 + 1e-9));
  }
  assert.deepEqual(barTicks("linear", 0, 0.8), [0, 0.2, 0.4, 0.8 * 0.75, 0.8]);
  near(barTicks("power", 0, 0.8)[2], 0.8 * 0.5 ** 2.5);
});

test("the plot stays inside the canvas at any size; the minimap inside the plot", () => {
  for (const [w, h, room] of [280, 600, 1900].flatMap((w) =>
    [0, 44, 130].map((room) => [w, w / 2 + 110, room]),
  )) {
    const layout = mapLayout(w, h, room);
    const { plot } = layout;
    assert.ok(plot.x > 0 && plot.y > 0 && plot.x + plot.w <= w && plot.y + plot.h < h);
    const view = drawnView(box(100, 200, 100, 200), plot, SHAPE);
    const { x, y, ...mini } = minimapRect(layout, view, SHAPE);
    assert.ok(x >= plot.x && y >= plot.y);
    assert.ok(x + mini.w <= plot.x + plot.w && y + mini.h <= plot.y + plot.h);
    assert.equal(minimapRect(layout, drawnView(WHOLE, plot, SHAPE), SHAPE), null);
    const area = matrixRect(view, plot, SHAPE);
    assert.ok(area.w <= plot.w + 1e-6 && area.h <= plot.h + 1e-6);
  }
});

test("the legend is whole, inside the canvas, at any width", () => {
  const marks = ["not attended", "no number", "entropy", "key mass"];
  for (const width of [262, 344, 482, 500, 679, 680, 1200]) {
    const { plot, bottom, below, height } = mapLayout(width, 400);
    const told = new Map();
    const methods = {
      measureText: (text) => ({ width: 6 * text.length }),
      fillText: (text, x, y) => told.set(text, [x, y]),
    };
    const pen = new Proxy({}, { set: () => true, get: (_, name) => methods[name] ?? (() => {}) });
    const place = { x: plot.x, y: height - bottom + 20, width: width - plot.x - 6, below };
    const look = { scale: "log", low: 1e-4, high: 1, table: new Uint8Array(768) };
    const words = "weight, log scale";
    drawColourBar(pen, { ...place, theme: {}, look, words, marks: marks.map((text) => [text, "grey"]) });
    for (const text of [words, ...marks]) {
      const [x, y] = told.get(text);
      assert.ok(x + 6 * text.length <= width && y + 6 <= height, `${text} at ${x}, ${y} of ${width}`);
    }
  }
});

test("heads are sorted, filtered and told in words", () => {
  const { sortHeads, numberRange } = heads;
  const labels = [[{ name: "local", value: 0.913, threshold: 0.8 }], [], []];
  const means = { entropy: [0.5, 2, null], distance: [3, 1, 9], zeta: [1, 1, 1] };
  const trace = { calls: [{ heads: 3, layer: 7, means, labels }] };
  const all = headsOf("0.0", "0.1", "0.2");
  const read = (name, c, h) => trace.calls[c].means[name][h] ?? NaN;
  assert.deepEqual(sortHeads(all, "entropy", read), headsOf("0.1", "0.0", "0.2"));
  assert.deepEqual(sortHeads(all, "-entropy", read), all);
  assert.equal(sortHeads(all, "model", read), all);
  assert.deepEqual(heads.numberNames(trace), ["entropy", "distance", "zeta"]);
  const sentence = "layer 7 head 0, distance 3 tokens back, entropy 0.5 nats, local 0.91";
  assert.equal(heads.headSentence(trace, 0, 0, "distance"), sentence);
  assert.deepEqual(numberRange("self", [0.2, 0.4], false), [0, 1]);
  assert.deepEqual(numberRange("entropy", [0.2, NaN, 4], false), [0, 4]);
  assert.deepEqual(numberRange("self", [-0.25, 0.125], true), [-0.25, 0.25]);
  assert.deepEqual(numberRange("entropy", [], false), [0, 1]);
  const brush = { e0: 1, e1: 3, d0: 0, d1: 2 };
  const chosen = all.map(([c, h]) => heads.insideBrush(brush, read("entropy", c, h), read("distance", c, h)));
  assert.deepEqual(chosen, [false, true, false]);
});

test("layers are told apart by what differs in their names", () => {
  const names = (...all) =>
    layerNames(all.map((name) => ({ name, kind: /cross/.test(name) ? "cross" : "self" })));
  assert.deepEqual(names("encoder.blocks.0.attention", "encoder.blocks.1.attention"), ["0", "1"]);
  assert.deepEqual(names("decoder.0.self", "decoder.0.cross"), ["0 · self", "1 · cross (cross)"]);
  assert.deepEqual(names("attention"), ["0"]);
  assert.deepEqual(names("a", "a"), ["0", "1"]);
  assert.deepEqual(layerNames([2, 2].map((layer) => ({ name: "a", layer }))), ["0", "1"]);
});

test("keys get as much room as their tokens are long, but for a few", () => {
  const short = Array.from({ length: 200 }, (_, n) => "abc"[n % 3]);
  assert.ok(labelRoom(short) < 50 && labelRoom(short.map(() => "international")) > 100);
  assert.equal(labelRoom([...short, "international"]), labelRoom(short));
  assert.ok(labelRoom([]) > 0);
});

test("heads beside each other are drawn by the mass of blocks of one width", () => {
  const call = { heads: 2, rows: 640, keys: 640 },
    finest = [10, 20];
  const source = {
    document: { traces: [{ calls: [call] }] },
    call: () => call,
    levels: (_t, _c, h) => [1, 2, 4].map((n) => ({ queryBlock: n * finest[h], keyBlock: n * finest[h] })),
  };
  const thumbnails = new Thumbnails(source, () => {});
  const drawn = [];
  thumbnails.paint = (...all) => drawn.push(all.at(-1));
  for (const [h, channel, own] of [
    [0, "mass"],
    [1, "mass"],
    [1, "max"],
    [1, "mass", true],
  ]) {
    thumbnails.values.set(`0 0 ${h} ${channel} 64`, { level: source.levels(0, 0, h)[0] });
    thumbnails.get(0, 0, h, channel, 64, {}, own);
  }
  assert.deepEqual(drawn, [1, 0.5, 1, 1]);
});

test("a head's own colours go from its weak to its strong weights", () => {
  const [low, high] = ownLimits(Float32Array.from({ length: 1001 }, (_, n) => n / 1000));
  near(low, 0.02, 2e-3);
  near(high, 0.995, 2e-3);
  assert.equal(ownLimits(new Float32Array(9)), null);
  const [least, most] = ownLimits(new Float32Array(9).fill(0.25));
  assert.ok(least < most && most === 0.25);
});

test("a label says what chance gives, and over how many rows", () => {
  const label = { name: "induction", value: 0.8345, threshold: 0.25, chance: 0.0625, rows: 41 };
  const words = heads.labelWords(label);
  assert.equal(words.name, "induction 0.83");
  assert.match(words.ground, /^chance 0\.06\d*, 41 rows$/);
  assert.match(words.title, /mean share 0\.83\d* over 41 rows, where even weights give 0\.06\d*; .* 0\.25/);
  assert.match(words.title, /random tokens said twice tell \(inspection\.record_repeats\)$/);
  assert.match(heads.labelWords({ ...label, name: "local" }).title, /named so from 0\.25 on$/);
  assert.match(heads.labelWords({ ...label, rows: 1 }).ground, /, 1 row$/);
});
