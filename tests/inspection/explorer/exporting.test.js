import assert from "node:assert/strict";
import test from "node:test";
import { drawingLayout, svgText } from "../../../src/regard/inspection/explorer/web/drawings.js";
import {
  chooseLevel,
  drawnValues,
  readExcerpt,
} from "../../../src/regard/inspection/explorer/web/excerpts.js";
import {
  csvText,
  describeExcerpt,
  namedHeads,
  npyBytes,
  pythonText,
  safeName,
  xmlText,
} from "../../../src/regard/inspection/explorer/web/formats.js";
import { MaskTiles } from "../../../src/regard/inspection/explorer/web/geometry.js";

test("file names hold nothing that a file system refuses", () => {
  assert.equal(safeName("../../etc/passwd\u0000", "csv"), "etc-passwd.csv");
  assert.equal(safeName("Größe <Test>: layer 1", "png"), "gro-e-test-layer-1.png");
  assert.equal(safeName("שלום", "svg"), "attention.svg");
  assert.equal(safeName("", "npy"), "attention.npy");
  assert.ok(safeName("x-".repeat(500), "npy").length <= 84);
});

test("names of heads are never cut", () => {
  const long = "a run of many words ".repeat(20);
  const [one, other] = [0, 11].map((c) => [c, 1]);
  const names = [[one], [other], [one, other]].map((heads) =>
    safeName(long, "png", namedHeads([], heads, "mean")),
  );
  assert.match(names[0], /^a-run-of.*-layer-0-head-1\.png$/);
  assert.match(names[2], /-mean-of-heads-0-1-11-1\.png$/);
  assert.equal(new Set(names).size, 3);
  assert.ok(names.every((name) => name.length <= 84));
  const many = Array.from({ length: 9 }, (_, h) => [0, h]);
  // Of a hybrid, the first call is that of layer 2.
  const named = namedHeads(
    [2, 5].map((layer) => ({ layer })),
    many,
    "max",
  );
  assert.equal(named, "largest of heads 2.0, 2.1, 2.2, 2.3, 2.4, 2.5 and 3 more");
});

test("NPY files follow the format, aligned to 64 bytes", () => {
  for (const [rows, columns] of ["3 5", "0 7", "12345 1"].map((shape) => shape.split(" ").map(Number))) {
    const values = Float32Array.from({ length: rows * columns }, (_, n) => n / 7);
    const bytes = npyBytes(values, [rows, columns]);
    assert.deepEqual([...bytes.slice(0, 8)], [0x93, 78, 85, 77, 80, 89, 1, 0]);
    const length = bytes[8] + 256 * bytes[9];
    assert.equal((10 + length) % 64, 0);
    const header = new TextDecoder().decode(bytes.slice(10, 10 + length));
    assert.match(
      header,
      new RegExp(`^\\{'descr': '<f4', 'fortran_order': False, 'shape': \\(${rows}, ${columns}\\), \\} *\\n$`),
    );
    assert.deepEqual(new Float32Array(bytes.slice(10 + length).buffer), values);
  }
});

const excerpt = {
  ...{ values: Float32Array.from([0.5, NaN, 0.25, 1e-7]), rows: 2, columns: 2, row0: 3, column0: 5 },
  ...{ queryBlock: 4, keyBlock: 2, channel: "mass", heads: [[0, 0]], exact: false },
};

test("what may not attend is drawn as such, in cells and in blocks", () => {
  const mask = new MaskTiles(null),
    call = { query_offset: 0, key_offset: 0, reach: [null, 0] };
  const cells = { ...excerpt, values: new Float32Array(4), row0: 3, column0: 3, queryBlock: 1, keyBlock: 1 };
  assert.deepEqual([...drawnValues(cells, call, mask)], [0, -Infinity, 0, 0]);
  assert.deepEqual(
    [...drawnValues({ ...cells, queryBlock: 4, keyBlock: 6 }, call, mask)],
    [-Infinity, -Infinity, 0, -Infinity],
  );
  assert.deepEqual([...drawnValues({ ...cells, keyBlock: 1, queryBlock: 2 }, call, mask)], [0, 0, 0, 0]);
});

test("CSV says what it holds and where each number lies", () => {
  const lines = csvText(excerpt, `a\nb: ${describeExcerpt(excerpt)}`, { query: 100, key: 0 }).split("\n");
  assert.equal(lines[0], "# a b: mean over 4 queries of the weight on 2 keys");
  assert.deepEqual(lines.slice(1), ["query\\key,10,12", "112,0.5,", "116,0.25,1e-7", ""]);
  const both = { ...excerpt, exact: true, heads: [0, 1].map((h) => [0, h]) };
  assert.equal(describeExcerpt(both, { aggregate: "max" }), "attention weights, largest of 2 heads");
  const added = { ...excerpt, channel: "value" };
  assert.equal(describeExcerpt({ ...added, exact: true }), "norm of what is added");
  assert.ok(describeExcerpt(added).startsWith("largest norm of what is added of each block"));
});

test("CSV has tokens on one line each that no spreadsheet takes for a formula", () => {
  const tokens = { query: (n) => `q${n}`, key: (n) => ({ 10: "=1+1", 12: '"a",\nb' })[n] };
  const lines = csvText(excerpt, "a", { query: 100, key: 0 }, tokens).split("\n");
  assert.deepEqual(lines, [
    "# a",
    "query\\key,,10,12",
    ',,"""=1+1""","""\\""a\\"",\\nb"""',
    '112,"""q12""",0.5,',
    '116,"""q16""",0.25,1e-7',
    "",
  ]);
});

test("SVG text cannot become markup", () => {
  assert.equal(
    xmlText("</text><script>\u0000\ud800&\"'"),
    "&#60;/text&#62;&#60;script&#62;\ufffd\ufffd&#38;&#34;&#39;",
  );
  const plot = { x: 0, y: 0, width: 5, height: 5 };
  const texts = [{ x: 1, y: 2, text: "<b>", size: 11 }];
  const layout = { width: 10, height: 10, inks: [], plot, bar: plot, texts, lines: [], frames: [] };
  const text = svgText({ title: "</title><script>" }, layout, ["data:image/png;base64,AA==", "data:,"]);
  assert.ok(!text.includes("<script") && !text.includes("<b>"));
});

test("a figure is as wide as a column, in letters of print, with a labelled colour bar", () => {
  const blocks = { rows: 40, columns: 64, row0: 0, column0: 0, queryBlock: 1, keyBlock: 1 };
  const figure = {
    excerpt: blocks,
    title: "A head",
    remark: "",
    limits: [0.001, 1],
    scale: "log",
    noun: "weight",
  };
  const offsets = { query: 0, key: 0 };
  const words = { query: () => "cat", key: () => "sat" };
  for (const [inches, labels] of [
    [3.25, null],
    [6.75, words],
    [3.25, words],
  ]) {
    const shown = { ...figure, offsets, labels, excerpt: labels ? { ...blocks, columns: 45 } : blocks };
    const layout = drawingLayout(shown, { inches, dark: true, titled: false });
    const text = svgText(figure, layout, ["data:,", "data:,"]);
    assert.ok(Math.abs(layout.width - 72 * inches) < 1e-9);
    assert.ok(text.includes(`width="${(layout.width / 72).toFixed(3)}in"`) && text.includes("#101116"));
    assert.ok(
      layout.texts.every(
        ({ size, x, y }) => size >= 6.5 && size <= 9 && x < layout.width && y < layout.height,
      ),
    );
    assert.ok(layout.texts.some(({ text }) => text === "weight, log") && !text.includes(">A head</text>"));
    const ticks = layout.texts.filter(({ text, anchor }) => anchor === "middle" && /^\d+$/.test(text));
    assert.ok(labels && inches > 4 ? ticks.length === 0 : ticks.length >= 3, `${ticks.length} ticks`);
    assert.equal(layout.texts.filter(({ text }) => text === "cat").length, labels && inches > 4 ? 40 : 0);
  }
});

test("Python asks for the window that is seen", () => {
  const place = {
    c: 2,
    calls: [],
    heads: [[2, 3]],
    view: { q0: 8.5, q1: 17.2, k0: 0, k1: 30 },
    rows: 61,
    keys: 29,
  };
  const what = { ...place, scale: "power", channel: "mass", name: "a\nimport os" };
  const text = pythonText(what);
  assert.ok(text.includes("call.window(rows=slice(8, 18), columns=slice(0, 29), heads=[3])[0]"));
  assert.ok(text.includes('scale="linear"') && text.includes('save("layer-2-head-3.pdf")'));
  assert.ok(!text.includes("\nimport os"));
  assert.ok(!text.includes("value_norms"));
  const added = pythonText({ ...what, channel: "value" });
  assert.ok(added.includes("\nweights = weights * call.value_norms[3, 0:29]\n"));
  assert.ok(added.includes('save("layer-2-head-3-norm-of-what-is-added.pdf")'));
  const large = pythonText({ ...what, view: { q0: 0, q1: 4096, k0: 0, k1: 4096 }, rows: 4096, keys: 4096 });
  assert.ok(large.includes('head_map(call.readout(), 3, channel="mass"') && !large.includes("window("));
});

test("the finest level that is few enough", () => {
  const levels = [1, 2, 4, 8, 16].map((n) => ({ queryBlock: n, keyBlock: n }));
  assert.equal(chooseLevel(levels, { q0: 0, q1: 64, k0: 0, k1: 64 }, 64).queryBlock, 1);
  assert.equal(chooseLevel(levels, { q0: 0.5, q1: 64.5, k0: 0, k1: 64 }, 64).queryBlock, 2);
  assert.equal(chooseLevel(levels, { q0: 0, q1: 9999, k0: 0, k1: 9 }, 64).queryBlock, 16);
  assert.equal(chooseLevel([], { q0: 0, q1: 1, k0: 0, k1: 1 }, 64), null);
});

test("an excerpt stitches tiles and averages heads", async () => {
  const [rows, keys] = [601, 523];
  const value = (h, i, j) => (h + 1) * 1e-6 * (i * keys + j);
  const source = {
    call: () => ({ heads: 2, rows, keys }),
    levels: () => [1, 2].map((n) => ({ queryBlock: n, keyBlock: n })),
    tile: async (t, c, h, qb, kb, up, across) =>
      Float32Array.from({ length: 65536 }, (_, n) => value(h, up * 256 + (n >> 8), across * 256 + (n & 255))),
  };
  const selection = [0, 1].map((h) => [0, h]);
  const view = { q0: 250.5, q1: 521, k0: 200, k1: 523 };
  const state = { t: 0, c: 0, h: 1, selection, aggregate: "mean", channel: "mass", view };
  const found = await readExcerpt(source, state);
  assert.deepEqual(
    [found.rows, found.columns, found.row0, found.column0, found.exact],
    [271, 323, 250, 200, true],
  );
  for (const at of [0, 5 * 323 + 55, 6 * 323 + 56, 131 * 323 + 312, 270 * 323 + 322]) {
    assert.ok(Math.abs(found.values[at] - value(0.5, 250 + Math.floor(at / 323), 200 + (at % 323))) < 1e-6);
  }
  const one = await readExcerpt(source, { ...state, selection: [[0, 1]] });
  assert.ok(Math.abs(one.values[7] - value(1, 250, 207)) < 1e-6);
});
