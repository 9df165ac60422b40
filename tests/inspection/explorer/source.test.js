import assert from "node:assert/strict";
import test from "node:test";
import { log8Table } from "../../../src/regard/inspection/explorer/web/codes.js";
import { Connection } from "../../../src/regard/inspection/explorer/web/connection.js";
import { readChosen } from "../../../src/regard/inspection/explorer/web/reader.js";
import { Source } from "../../../src/regard/inspection/explorer/web/source.js";

const T = 300;
const S = 5;

/** The nearest code of a weight. */
const encodeLog8 = (x) => (x > 0 ? Math.max(1, Math.round(255 + (254 / 24) * Math.log2(x))) : 0);

/** One head of T x S weights; row 1 is empty. */
function weightsOf() {
  const weights = new Float32Array(T * S);
  for (let i = 0; i < T; i += 1) {
    if (i === 1) continue;
    let sum = 0;
    for (let j = 0; j < S; j += 1) sum += weights[i * S + j] = 1 + ((i * 7 + j * 3) % 5);
    for (let j = 0; j < S; j += 1) weights[i * S + j] /= sum;
  }
  return weights;
}

function page(exact) {
  const bytes = {};
  const chunks = {};
  const add = (name, dtype, shape, data, code = "plain") => {
    bytes[name] = new Uint8Array(data.buffer ?? Uint8Array.from(data).buffer);
    chunks[name] = { dtype, shape, code, bytes: bytes[name].length };
    return name;
  };
  const log8 = (name, shape, values) => {
    const codes = Uint8Array.from(values, (x) => encodeLog8(x));
    return add(name, "u8", shape, codes, "log8");
  };
  const i32 = (name, shape, of) => {
    const length = shape.reduce((all, n) => all * n);
    return add(
      name,
      "i32",
      shape,
      Int32Array.from({ length }, (_, i) => of(i)),
    );
  };
  const head = {
    weights: exact ? add("weights", "f32", [T, S], weightsOf()) : null,
    levels: [
      {
        query_block: 2,
        key_block: 1,
        mass: log8("fine", [150, 5], Array(750).fill(0.2)),
        max: log8("most", [150, 5], Array(750).fill(0.25)),
        rows: i32("fineRows", [150], (i) => (i === 0 ? 1 : 2)),
      },
      {
        query_block: 8,
        key_block: 4,
        mass: log8("coarse", [38, 2], Array(76).fill(0.5)),
        max: null,
        rows: i32("coarseRows", [38], (i) => ({ 0: 7, 37: 4 })[i] ?? 8),
      },
    ],
    last_row: log8("last", [3], [1, 0.5, 0.25]),
    last_row_bin: 2,
    top_keys: i32("top", [T, 2], (i) => (i === 3 ? -1 : i % 2)),
    top_weights: log8("topWeights", [T, 2], Array(2 * T).fill(0.5)),
  };
  const text = new TextEncoder().encode(JSON.stringify(["a", "</script>"]));
  const pageDocument = {
    exact: exact ?? "none",
    chunks: { ...chunks, tokens: { dtype: "json", shape: [], code: "plain", bytes: text.length } },
    traces: [{ sequences: [{ tokens: "tokens" }], calls: [{ rows: T, keys: S, head: [head] }] }],
  };
  const asked = [];
  const load = async (name) => {
    asked.push(name);
    if (name === "tokens") return text;
    return bytes[name];
  };
  return { pageDocument, load, asked };
}

function near(found, expected) {
  assert.ok(Math.abs(found - expected) <= 0.035 * expected, `${found} is not ${expected}`);
}

test("exact weights can be drawn in blocks of any size", async () => {
  const { pageDocument, load } = page("embedded");
  const source = new Source(pageDocument, load);
  const weights = weightsOf();
  assert.deepEqual(source.finest(0, 0, 0), { queryBlock: 1, keyBlock: 1 });
  assert.equal(source.levels(0, 0, 0).length, 10);
  assert.deepEqual(source.levels(0, 0, 0).at(-1), { queryBlock: 512, keyBlock: 512 });
  const first = await source.tile(0, 0, 0, 1, 1, 0, 0, "mass");
  const second = await source.tile(0, 0, 0, 1, 1, 1, 0, "max");
  assert.equal(first.length, 65536);
  assert.equal(first[255 * 256 + 4], weights[255 * S + 4]);
  assert.equal(second[0], weights[256 * S]);
  assert.ok(Number.isNaN(first[5]) && Number.isNaN(second[44 * 256]) && !Number.isNaN(second[43 * 256 + 4]));
  const blocks = await source.tile(0, 0, 0, 4, 2, 0, 0, "mass");
  const sum = [0, 2, 3].reduce((all, i) => all + weights[i * S] + weights[i * S + 1], 0);
  assert.ok(Math.abs(blocks[0] - sum / 3) < 1e-6, "an empty row does not count");
});

test("without them, blocks follow from stored ones, and from no others", async () => {
  const { pageDocument, load, asked } = page();
  const source = new Source(pageDocument, load);
  assert.deepEqual(source.finest(0, 0, 0), { queryBlock: 2, keyBlock: 1 });
  assert.deepEqual(source.levels(0, 0, 0, "max")[1], { queryBlock: 4, keyBlock: 2 });
  assert.equal(await source.tile(0, 0, 0, 1, 1, 0, 0, "mass"), null);
  assert.equal(await source.tile(0, 0, 0, 3, 1, 0, 0, "mass"), null);
  near((await source.tile(0, 0, 0, 4, 2, 0, 0, "mass"))[0], 0.4);
  near((await source.tile(0, 0, 0, 8, 4, 0, 0, "max"))[0], 0.25);
  assert.ok(!asked.includes("coarse"));
  near((await source.tile(0, 0, 0, 16, 8, 0, 0, "mass"))[0], 1);
  assert.ok(asked.includes("coarse"), "the coarsest level that fits is read");
});

test("rows and columns say how exact they are", async () => {
  const exact = new Source(...Object.values(page("embedded")).slice(0, 2));
  const weights = weightsOf();
  const row = await exact.row(0, 0, 0, 7);
  assert.deepEqual([...row.values], [...weights.slice(35, 40)]);
  assert.deepEqual([row.exact, row.bin], [true, 1]);
  const column = await exact.column(0, 0, 0, 3);
  assert.deepEqual([column.values.length, column.values[7], column.exact], [T, weights[38], true]);
  const source = new Source(...Object.values(page()).slice(0, 2));
  const blocks = await source.row(0, 0, 0, 7);
  assert.equal(blocks.values.length, 5);
  assert.deepEqual([blocks.exact, blocks.bin, blocks.of, blocks.rows], [false, 1, "mass", 2]);
  const last = await source.row(0, 0, 0, T - 1);
  assert.deepEqual([last.values.length, last.exact, last.bin, last.of], [3, false, 2, "largest"]);
  const part = await source.column(0, 0, 0, 4);
  assert.deepEqual([part.values.length, part.exact, part.bin, part.keys], [150, false, 2, 1]);
  for (const outside of [-1, T, NaN]) assert.equal(await source.row(0, 0, 0, outside), null);
  assert.equal(await source.column(0, 0, 0, S), null);
});

test("blocks at the end hold fewer queries and keys", async () => {
  const { pageDocument, load } = page();
  pageDocument.traces[0].calls[0].head[0].levels.shift();
  const source = new Source(pageDocument, load);
  assert.deepEqual([(await source.row(0, 0, 0, 297)).rows, (await source.column(0, 0, 0, 4)).keys], [4, 1]);
  const { values } = await readChosen(source, { t: 0, c: 0, h: 0, row: 297, key: null, direction: "out" });
  assert.deepEqual([values.length, values[0] / values[4]], [S, 0.25]);
});

test("the largest weights come from the weights, or from the list", async () => {
  const exact = new Source(...Object.values(page("embedded")).slice(0, 2));
  const weights = weightsOf();
  const top = await exact.topKeys(0, 0, 0, 4, 3);
  const sorted = [...weights.slice(20, 25)].map((weight, key) => ({ key, weight }));
  sorted.sort((a, b) => b.weight - a.weight || a.key - b.key);
  assert.deepEqual(top, sorted.slice(0, 3));
  assert.deepEqual(await exact.topKeys(0, 0, 0, 1, 3), []);
  const source = new Source(...Object.values(page()).slice(0, 2));
  const listed = async (row, count) => (await source.topKeys(0, 0, 0, row, count)).map(({ key }) => key);
  assert.deepEqual([await listed(0, 8), await listed(0, 1), await listed(1, 8)], [[0, 1], [0], [0]]);
});

test("a server is asked for what is finer, by its protocol", async () => {
  const { pageDocument, load } = page();
  const asked = [];
  const ask = async (path) => {
    asked.push(path);
    return path.startsWith("column") ? null : Float32Array.from([0.1, 0.6, 0.3]);
  };
  const source = new Source({ ...pageDocument, exact: "served" }, load, ask);
  assert.deepEqual(source.finest(0, 0, 0), { queryBlock: 1, keyBlock: 1 });
  await source.tile(0, 0, 0, 1, 1, 1, 0, "max");
  await source.tile(0, 0, 0, 1, 1, 1, 0, "max");
  await source.tile(0, 0, 0, 4, 2, 0, 0, "mass");
  assert.deepEqual(
    (await source.topKeys(0, 0, 0, 9, 2)).map(({ key }) => key),
    [1, 2],
  );
  assert.equal((await source.column(0, 0, 0, 3)).exact, false);
  assert.deepEqual(asked, ["tile/0/0/0/1/1/1/0?channel=max", "row/0/0/0/9", "column/0/0/0/3"]);
  // A page in a file asks nobody.
  const file = new Source(pageDocument, load, ask);
  assert.equal(await file.tile(0, 0, 0, 1, 1, 0, 0, "max"), null);
});

test("chunks are decoded once, and dropped when there is no room", async () => {
  const { pageDocument, load, asked } = page("embedded");
  const source = new Source(pageDocument, load);
  const [a, b] = await Promise.all([source.chunk("weights"), source.chunk("weights")]);
  assert.equal(a, b);
  assert.deepEqual(asked, ["weights"]);
  source.bytes = 200e6;
  await source.chunk("last");
  await source.chunk("weights");
  assert.deepEqual(asked, ["weights", "last", "weights"]);
  assert.equal(await source.chunk(null), null);
  await assert.rejects(source.chunk("nothing"), /no chunk nothing/);
});

test("what fails is asked for again", async () => {
  const { pageDocument, load } = page();
  let times = 0;
  const source = new Source(pageDocument, async (name) => {
    times += 1;
    if (times === 1) throw new Error("offline");
    return load(name);
  });
  await assert.rejects(source.chunk("last"), /offline/);
  near((await source.chunk("last")).values[1], log8Table()[244]);
});

test("a request ends with the last one that waits for it, and can be made anew", async () => {
  const ends = [];
  const { pageDocument, load } = page();
  const source = new Source({ ...pageDocument, exact: "served" }, load, (path, signal) => {
    return new Promise((give, fail) => {
      ends.push({ path, give });
      signal.addEventListener("abort", () => fail(signal.reason));
    });
  });
  const [one, other] = [new AbortController(), new AbortController()];
  const asked = [one, other].map(({ signal }) => source.served("tile/7", signal).catch(() => "given up"));
  one.abort();
  assert.equal(source.asked.get("tile/7").users, 1);
  other.abort();
  const again = source.served("tile/7", new AbortController().signal);
  assert.deepEqual(await Promise.all(asked), ["given up", "given up"]);
  assert.equal(ends.length, 2);
  ends[1].give(Float32Array.of(3));
  assert.deepEqual([...(await again)], [3]);
  assert.equal(await source.served("tile/7"), await again);
});

test("a server that is gone is asked less and less often, and all goes on as it is back", async (t) => {
  let alive = true;
  t.after(() => {
    alive = true;
  });
  const [asked, probes] = [[], []];
  const send = async (path, { method } = {}) => {
    if (method) probes.push(performance.now());
    else asked.push(path);
    if (!alive) throw new TypeError("Failed to fetch");
    return new Response(method ? null : path);
  };
  const connection = new Connection(send, [5, 10, 20]);
  const told = [];
  for (const name of ["lost", "found"]) connection.addEventListener(name, () => told.push(name));
  const text = async (path) => new TextDecoder().decode((await connection.ask(path)).bytes);
  assert.equal(await text("a"), "a");
  alive = false;
  const waiting = Array.from({ length: 50 }, (_, n) => text(`b${n}`));
  while (probes.length < 4) await new Promise((done) => setTimeout(done, 1));
  // A timer is late on a busy machine, and never early but for a millisecond.
  for (const [n, least] of [10, 20, 20].entries()) assert.ok(probes[n + 1] - probes[n] >= least - 1.5);
  assert.equal(asked.length, 1 + 50);
  assert.deepEqual(told, ["lost"]);
  const given = new AbortController();
  const refused = assert.rejects(connection.ask("c", given.signal));
  given.abort();
  alive = true;
  assert.deepEqual(
    await Promise.all(waiting),
    Array.from({ length: 50 }, (_, n) => `b${n}`),
  );
  await refused;
  assert.deepEqual(told, ["lost", "found"]);
});

test("of channel value, weights are multiplied by what their keys add, and blocks hold the largest", async () => {
  const { pageDocument, load } = page("embedded");
  const before = new Source(pageDocument, load);
  assert.deepEqual(before.levels(0, 0, 0, "value"), []);
  assert.equal(await before.level(0, 0, 0, 1, 1, "value"), null);
  assert.equal(await before.row(0, 0, 0, 9, "value"), null);
  const norms = Float32Array.from([3, 0, NaN, 0.5, 20]);
  pageDocument.chunks.norms = { dtype: "f32", shape: [S], code: "plain", bytes: 4 * S };
  pageDocument.traces[0].calls[0].head[0].value_norms = "norms";
  const source = new Source(pageDocument, async (name) =>
    name === "norms" ? new Uint8Array(norms.buffer) : load(name),
  );
  const weights = weightsOf();
  assert.deepEqual(source.levels(0, 0, 0, "value"), source.levels(0, 0, 0));
  const tile = await source.tile(0, 0, 0, 1, 1, 0, 0, "value");
  for (const at of [0, 7 * S + 3, 9 * S + 4])
    assert.equal(tile[256 * Math.floor(at / S) + (at % S)], Math.fround(weights[at] * norms[at % S]));
  // Nothing is added with a weight of 0, and a length that is no number makes none.
  assert.deepEqual(Array.from(tile.subarray(256, 256 + S)), [0, 0, 0, 0, 0]);
  assert.ok(Number.isNaN(tile[2]) && tile[1] === 0);
  const blocks = await source.tile(0, 0, 0, 4, 2, 0, 0, "value");
  assert.equal(blocks[2], Math.fround(Math.max(...[0, 2, 3].map((i) => weights[i * S + 4] * norms[4]))));
  const { values, exact } = await source.row(0, 0, 0, 9, "value");
  assert.ok(exact && values[4] === tile[256 * 9 + 4]);
  assert.equal((await source.row(0, 0, 0, 9)).values[4], weights[9 * S + 4]);
});
