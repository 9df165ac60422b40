// The text of a sequence as lines, matches and edges: everything the reader computes without a page.

import { visibleText } from "./dom.js";

const PASSAGE_CUT = 32;

/**
 * What is shown of a token: all of it visible, long tokens cut with a note.
 * @param {string} text
 * @returns {{text: string, kind: ""|"space"|"lead", note: string}} kind "space": only white space
 */
export function displayToken(text) {
  const characters = Array.from(text.slice(0, 4 * PASSAGE_CUT));
  if (characters.length > PASSAGE_CUT) {
    const kept = visibleText(characters.slice(0, PASSAGE_CUT).join(""));
    return { text: `${kept}…`, kind: "", note: `cut, ${text.length} characters` };
  }
  if (text === "") return { text: "∅", kind: "space", note: "empty token" };
  const visible = visibleText(text);
  if (!text.trim()) return { text: visible.replaceAll(" ", "␣"), kind: "space", note: "" };
  return { text: visible, kind: text[0] === " " ? "lead" : "", note: "" };
}

/**
 * Cut tokens into lines no wider than `width`; a newline at a token's end ends the line.
 * @param {string[]} tokens @param {(shown: string) => number} measure width of a shown token
 * @param {number} width in the unit of `measure` @param {number} [most] tokens of a line
 * @returns {Int32Array} the first token of every line
 */
export function layoutLines(tokens, measure, width, most = Infinity) {
  const starts = tokens.length ? [0] : [],
    known = new Map();
  let used = 0,
    broken = false;
  for (let n = 0; n < tokens.length; n++) {
    let size = known.get(tokens[n]);
    if (size === undefined) {
      size = measure(displayToken(tokens[n]).text);
      known.set(tokens[n], size);
    }
    if (n > 0 && (broken || used + size > width || n - starts[starts.length - 1] >= most)) {
      starts.push(n);
      used = 0;
    }
    used += size;
    broken = tokens[n].endsWith("\n");
  }
  return Int32Array.from(starts);
}

/**
 * Index of the last entry that is at most `value`; -1 when all are larger.
 * @param {ArrayLike<number>} rising @param {number} value @returns {number}
 */
export function lastAtMost(rising, value) {
  let low = -1,
    high = rising.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (rising[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

/**
 * Where a text occurs in the joined tokens, whatever its case; occurrences do not overlap.
 * @param {string[]} tokens @param {string} wanted @param {number} [most]
 * @returns {{first: number, last: number}[]} first and last token of each occurrence
 */
export function findMatches(tokens, wanted, most = 10000) {
  if (!wanted || !tokens.length) return [];
  const starts = new Int32Array(tokens.length);
  for (let n = 1; n < tokens.length; n++) starts[n] = starts[n - 1] + tokens[n - 1].length;
  const pattern = new RegExp(
    wanted.replace(/[.*+?^${}()|[\]\\/-]/g, (sign) => `\\u{${sign.charCodeAt(0).toString(16)}}`),
    "giu",
  );
  const found = [];
  for (const match of tokens.join("").matchAll(pattern)) {
    found.push({
      first: lastAtMost(starts, match.index),
      last: lastAtMost(starts, match.index + match[0].length - 1),
    });
    if (found.length >= most) break;
  }
  return found;
}

/**
 * The edges worth a look: weight times log2(1 + distance), largest first, at most `perKey` into one key, so
 * that a key that everybody reads does not fill the list.
 * @param {ArrayLike<number>} keys rows x k, -1 for none @param {ArrayLike<number>} weights rows x k
 * @param {number} k
 * @param {{shift?: number, limit?: number, perKey?: number, least?: number}} [options] shift: position of
 *   row 0 less position of key 0
 * @returns {{row: number, key: number, weight: number, distance: number, score: number}[]}
 */
export function rankEdges(keys, weights, k, { shift = 0, limit = 200, perKey = 2, least = 0.05 } = {}) {
  const edges = [];
  for (let n = 0; n < keys.length; n++) {
    if (keys[n] < 0 || !(weights[n] >= least)) continue;
    const row = Math.floor(n / k),
      distance = row + shift - keys[n];
    const score = weights[n] * Math.log2(1 + Math.abs(distance));
    if (score > 0) edges.push({ row, key: keys[n], weight: weights[n], distance, score });
  }
  edges.sort((a, b) => b.score - a.score || a.row - b.row || a.key - b.key);
  const taken = new Map(),
    kept = [];
  for (const edge of edges) {
    const count = taken.get(edge.key) ?? 0;
    if (count >= perKey) continue;
    taken.set(edge.key, count + 1);
    kept.push(edge);
    if (kept.length >= limit) break;
  }
  return kept;
}

/**
 * The largest entries, largest first, among equals the earlier; zeros and NaN are none.
 * @param {ArrayLike<number>} values @param {number} k @returns {number[]} indices
 */
export function largestIndices(values, k) {
  /** @type {number[]} */
  const best = [];
  for (let n = 0; n < values.length; n++) {
    if (!(values[n] > 0) || (best.length === k && values[n] <= values[best[k - 1]])) continue;
    let at = best.length;
    while (at > 0 && values[best[at - 1]] < values[n]) at--;
    best.splice(at, 0, n);
    if (best.length > k) best.pop();
  }
  return best;
}

/**
 * How many of the largest weights hold a share of the row's mass (the row's own sum is the whole).
 * @param {ArrayLike<number>} values @param {number} share 0..1 @returns {number} 0 for a row without mass
 */
export function keysHolding(values, share) {
  const sorted = Float64Array.from(values)
    .filter((one) => one > 0)
    .sort()
    .reverse();
  const whole = sorted.reduce((sum, one) => sum + one, 0);
  let held = 0;
  for (let n = 0; n < sorted.length; n++) {
    held += sorted[n];
    if (held >= share * whole * (1 - 1e-7)) return n + 1;
  }
  return sorted.length;
}

/**
 * -sum p log p in nats over the keys, the sink's share as one more of them.
 * @param {ArrayLike<number>} values @param {number} [sink] @returns {number}
 */
export function entropyOf(values, sink = 0) {
  let sum = sink > 0 ? -sink * Math.log(sink) : 0;
  for (let n = 0; n < values.length; n++) if (values[n] > 0) sum -= values[n] * Math.log(values[n]);
  return sum;
}

/**
 * Which token of a sequence belongs to row or key `n`: sequences that hold more tokens than the call has rows
 * begin * at the call's offset.
 * @param {number} n @param {number} size rows or keys of the call @param {number} count tokens
 * @param {number} offset
 * @returns {number}
 */
export function tokenOf(n, size, count, offset) {
  return count > size && offset > 0 && n + offset < count ? n + offset : n;
}

/**
 * The numbers that calls go by, wherever they are read or written: those of their layers, where each call is of another
 * one; else their own.
 * @param {Array<{layer?: number}>} calls @returns {number[]}
 */
export function layerNumbers(calls) {
  const apart = new Set(calls.map(({ layer }) => layer)).size === calls.length;
  return calls.map(({ layer }, c) => (apart ? (layer ?? c) : c));
}

/** @param {Array<{layer?: number}>} calls @param {number} c @returns {number} */
export const layerNumber = (calls, c) => layerNumbers(calls)[c] ?? c;

/** A head as every list names it. @param {Array<{layer?: number}>} calls @param {number} c @param {number} h */
export const headName = (calls, c, h) => `layer ${layerNumber(calls, c)} head ${h}`;

/** A head in short: 2.5. @param {Array<{layer?: number}>} calls @param {Head} head */
export const headCode = (calls, [c, h]) => `${layerNumber(calls, c)}.${h}`;
