import assert from "node:assert/strict";
import test from "node:test";
import { deflateSync } from "node:zlib";
import {
  bytesFromBase64,
  decodeChunk,
  decodeHalf,
  inflate,
  log8Table,
} from "../../../src/regard/inspection/explorer/web/codes.js";

test("log8 codes are steps from 2^-24 to 1", () => {
  const table = log8Table();
  assert.equal(table[0], 0);
  assert.equal(table[1], 2 ** -24);
  assert.equal(table[255], 1);
  for (let code = 2; code < 256; code += 1)
    assert.ok(Math.abs(table[code] / table[code - 1] / 2 ** (24 / 254) - 1) < 1e-6);
});

test("half floats of every kind are read", () => {
  const bits = Uint16Array.from([0x0000, 0x3c00, 0xc000, 0x0001, 0x7bff, 0x7c00, 0xfc00, 0x3555, 0x03ff]);
  const expected = [0, 1, -2, 2 ** -24, 65504, Infinity, -Infinity, 0.333251953125, 1023 * 2 ** -24];
  assert.deepEqual([...decodeHalf(bits)], expected);
  assert.ok(Number.isNaN(decodeHalf(Uint16Array.from([0x7e00]))[0]));
});

test("base64 and deflate are undone", async () => {
  const bytes = Uint8Array.from({ length: 1000 }, (_, i) => (i * 7) % 256);
  assert.deepEqual(bytesFromBase64(`\n${Buffer.from(bytes).toString("base64")}\n`), bytes);
  assert.deepEqual(await inflate(new Uint8Array(deflateSync(bytes))), bytes);
  assert.equal(bytesFromBase64("").length, 0);
});

test("differences are summed along rows alone", async () => {
  const entry = { dtype: "u8", shape: [2, 3], code: "plain", delta: true, bytes: 6 };
  const { values } = await decodeChunk(entry, Uint8Array.from([250, 5, 5, 1, 255, 0]));
  assert.deepEqual([...values], [250, 255, 4, 1, 0, 0]);
});

test("linear8 has bounds of its own for each row, and NaN", async () => {
  const entry = { dtype: "u8", shape: [2, 3], code: "linear8", low: [0, -1], high: [254, -1], bytes: 6 };
  const { values } = await decodeChunk(entry, Uint8Array.from([1, 0, 255, 1, 77, 0]));
  assert.deepEqual([...values], [0, NaN, 254, -1, -1, NaN]);
});

test("words are little endian, from any place of a buffer", async () => {
  const bytes = new Uint8Array([9, 1, 0, 0, 0, 254, 255, 255, 255]).subarray(1);
  const { values } = await decodeChunk({ dtype: "i32", shape: [2], code: "plain", bytes: 8 }, bytes);
  assert.deepEqual([...values], [1, -2]);
});

test("nothing is an array, too", async () => {
  const entry = { dtype: "u8", shape: [0, 5], code: "log8", delta: true, bytes: 0 };
  const none = await decodeChunk(entry, new Uint8Array());
  assert.deepEqual(none, { shape: [0, 5], values: new Float32Array() });
});

test("a chunk of another length is refused", async () => {
  const entry = { dtype: "u8", shape: [2], code: "plain", bytes: 2 };
  await assert.rejects(decodeChunk(entry, Uint8Array.from([1, 2, 3])), /3 bytes, not 2/);
  await assert.rejects(decodeChunk({ ...entry, dtype: "f64" }, Uint8Array.from([1, 2])), /unknown dtype f64/);
});
