import assert from "node:assert/strict";
import test from "node:test";
import { constants, deflateSync } from "node:zlib";
import { inflateNow } from "../../src/regard/inspection/explorer/web/boot.js";

function returns(bytes, options) {
  const found = inflateNow(new Uint8Array(deflateSync(bytes, options)));
  assert.equal(Buffer.compare(Buffer.from(found), Buffer.from(bytes)), 0);
}

const text = Buffer.from(
  Array.from({ length: 4000 }, (_, n) => `const name${n % 97} = ${n * n};\n`).join(""),
);
const noise = Uint8Array.from({ length: 70001 }, (_, n) => (Math.imul(n, 2654435761) >>> 13) & 255);
const samples = { text, noise, nothing: Buffer.alloc(0), one: Buffer.from("a"), zeros: Buffer.alloc(300000) };

for (const [name, bytes] of Object.entries(samples)) {
  test(`${name} comes back from every kind of block`, () => {
    for (const level of [0, 1, 6, 9]) returns(bytes, { level });
    const { Z_FIXED, Z_HUFFMAN_ONLY, Z_RLE } = constants;
    for (const strategy of [Z_FIXED, Z_HUFFMAN_ONLY, Z_RLE]) returns(bytes, { strategy });
  });
}

test("copies reach back over the whole window, at every length", () => {
  const parts = [noise.slice(0, 32000)];
  for (let length = 3; length < 300; length += 1) {
    parts.push(noise.slice(7 * length, 8 * length), noise.slice(40000, 40002));
  }
  returns(Buffer.concat(parts), { level: 9, memLevel: 9 });
});

test("a damaged page says so", () => {
  const bytes = new Uint8Array(deflateSync(text));
  for (let end = 10; end < 600; end += 7) assert.throws(() => inflateNow(bytes.slice(0, end)), /damaged/);
});
