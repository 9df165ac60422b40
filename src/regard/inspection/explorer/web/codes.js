// Chunks: bytes on a log or linear scale, differenced, deflated and in base64, as codes.py writes them.

const CODES_OCTAVES = 24;
const CODES_STEPS = 254;

/**
 * The number that each log8 code stands for.
 * @returns {Float32Array} 256 numbers
 */
export function log8Table() {
  const table = new Float32Array(256);
  for (let code = 1; code < 256; code += 1) {
    table[code] = 2 ** ((CODES_OCTAVES * (code - 255)) / CODES_STEPS);
  }
  return table;
}

/**
 * Read bytes in the zlib format.
 * @param {Uint8Array} bytes
 * @returns {Promise<Uint8Array>}
 */
export async function inflate(bytes) {
  const stream = new Blob([/** @type {BlobPart} */ (bytes)])
    .stream()
    .pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * @param {string} text base64
 * @returns {Uint8Array}
 */
export function bytesFromBase64(text) {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/**
 * Numbers from the bits of float16.
 * @param {Uint16Array} bits
 * @returns {Float32Array}
 */
export function decodeHalf(bits) {
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i += 1) {
    const half = bits[i];
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 31;
    const fraction = half & 1023;
    if (exponent === 0) values[i] = sign * fraction * 2 ** -24;
    else if (exponent === 31) values[i] = fraction ? NaN : sign * Infinity;
    else values[i] = sign * (1024 + fraction) * 2 ** (exponent - 25);
  }
  return values;
}

/**
 * Read a chunk: an array, or what JSON holds.
 * @param {ChunkEntry} entry of the document's chunks
 * @param {Uint8Array} bytes
 * @returns {Promise<any>} {shape, values: Float32Array|Int32Array|Uint8Array}; of dtype json, its value
 */
export async function decodeChunk(entry, bytes) {
  const raw = entry.deflate ? await inflate(bytes) : bytes;
  if (raw.length !== entry.bytes) throw new Error(`a chunk of ${raw.length} bytes, not ${entry.bytes}`);
  if (entry.dtype === "json") return JSON.parse(new TextDecoder().decode(raw));
  const shape = entry.shape;
  if (entry.dtype !== "u8") return { shape, values: codesWords(entry.dtype, raw) };
  const codes = entry.delta ? codesSummed(raw, shape[shape.length - 1]) : raw;
  if (entry.code === "log8") {
    const table = log8Table();
    const values = new Float32Array(codes.length);
    for (let i = 0; i < codes.length; i += 1) values[i] = table[codes[i]];
    return { shape, values };
  }
  if (entry.code === "linear8") return { shape, values: codesLinear(entry, codes) };
  return { shape, values: codes };
}

/**
 * Rows of sums modulo 256.
 * @param {Uint8Array} bytes @param {number} width
 */
function codesSummed(bytes, width) {
  const codes = new Uint8Array(bytes.length);
  let sum = 0;
  for (let i = 0; i < bytes.length; i += 1) {
    sum = i % width === 0 ? bytes[i] : (sum + bytes[i]) & 255;
    codes[i] = sum;
  }
  return codes;
}

/**
 * Each row between its own bounds.
 * @param {ChunkEntry} entry @param {Uint8Array} codes
 */
function codesLinear(entry, codes) {
  const [lows, highs] = [entry.low, entry.high].map((ends) => [ends ?? []].flat());
  const width = entry.shape[entry.shape.length - 1] || 1;
  const values = new Float32Array(codes.length);
  for (let i = 0; i < codes.length; i += 1) {
    const row = lows.length > 1 ? Math.floor(i / width) : 0;
    const span = Math.max(highs[row] - lows[row], 0);
    values[i] = codes[i] === 0 ? NaN : lows[row] + (span * (codes[i] - 1)) / CODES_STEPS;
  }
  return values;
}

/**
 * Little-endian words, as every browser's machine has them; whole numbers stay whole.
 * @param {string} dtype @param {Uint8Array} raw
 */
function codesWords(dtype, raw) {
  const aligned = raw.slice().buffer;
  if (dtype === "f16") return decodeHalf(new Uint16Array(aligned));
  if (dtype === "u16") return Int32Array.from(new Uint16Array(aligned));
  if (dtype === "i32") return new Int32Array(aligned);
  if (dtype === "f32") return new Float32Array(aligned);
  throw new Error(`unknown dtype ${dtype}`);
}
