import assert from "node:assert/strict";
import test from "node:test";
import { deflateSync } from "node:zlib";
import { bytesFromBase64, decodeChunk, inflate } from "../../../src/regard/inspection/explorer/web/codes.js";

// That every code is read as Python writes it: test_payload.py.

test("base64 and deflate are undone", async () => {
  const bytes = Uint8Array.from({ length: 1000 }, (_, i) => (i * 7) % 256);
  assert.deepEqual(bytesFromBase64(`\n${Buffer.from(bytes).toString("base64")}\n`), bytes);
  assert.deepEqual(await inflate(new Uint8Array(deflateSync(bytes))), bytes);
  assert.equal(bytesFromBase64("").length, 0);
});

test("words are little endian, from any place of a buffer", async () => {
  const bytes = new Uint8Array([9, 1, 0, 0, 0, 254, 255, 255, 255]).subarray(1);
  const { values } = await decodeChunk({ dtype: "i32", shape: [2], code: "plain", bytes: 8 }, bytes);
  assert.deepEqual([...values], [1, -2]);
});

test("a chunk of another length is refused", async () => {
  const entry = { dtype: "u8", shape: [2], code: "plain", bytes: 2 };
  await assert.rejects(decodeChunk(entry, Uint8Array.from([1, 2, 3])), /3 bytes, not 2/);
  await assert.rejects(decodeChunk({ ...entry, dtype: "f64" }, Uint8Array.from([1, 2])), /unknown dtype f64/);
});
