// How far two traces are apart: cell by cell, and head by head.
import { chooseLevel, readBlocks, sharedLevels } from "./excerpts.js";
import { layerNumber } from "./passages.js";

const DIVERGENCE_BLOCKS = 64;

/**
 * Jensen-Shannon divergence in bits of two rows of mass; what is missing to 1 counts as one more entry, the
 * sink's.
 * 0 for equal rows, 1 for rows without an entry in common; NaN when both rows are empty.
 * @param {ArrayLike<number>} p @param {ArrayLike<number>} q
 * @param {number} [from] first entry @param {number} [to] end
 * @returns {number}
 */
export function rowDivergence(p, q, from = 0, to = p.length) {
  let [left, right, sum] = [0, 0, 0];
  /** @param {number} a @param {number} b */
  const add = (a, b) => {
    const middle = (a + b) / 2;
    if (a > 0) sum += (a * Math.log2(a / middle)) / 2;
    if (b > 0) sum += (b * Math.log2(b / middle)) / 2;
  };
  for (let n = from; n < to; n++) {
    left += p[n];
    right += q[n];
  }
  if (Number.isNaN(left + right) || (left === 0 && right === 0)) return NaN;
  // Rounded codes may sum to a little more than 1: those rows are scaled, not given a negative rest.
  const [a, b] = [Math.max(1, left), Math.max(1, right)];
  for (let n = from; n < to; n++) add(p[n] / a, q[n] / b);
  add(1 - left / a, 1 - right / b);
  return Math.min(1, Math.max(0, sum));
}

/**
 * Mean of `rowDivergence` over the rows of two matrices of one shape.
 * @param {ArrayLike<number>} a @param {ArrayLike<number>} b @param {number} rows @param {number} columns
 * @returns {number} NaN without a row
 */
export function blockDivergence(a, b, rows, columns) {
  let sum = 0,
    count = 0;
  for (let i = 0; i < rows; i++) {
    const one = rowDivergence(a, b, i * columns, (i + 1) * columns);
    if (Number.isNaN(one)) continue;
    sum += one;
    count++;
  }
  return count ? sum / count : NaN;
}

/**
 * a - b with the largest difference and where it is; NaN where either is unknown.
 * @param {ArrayLike<number>} a @param {ArrayLike<number>} b
 * @returns {{values: Float32Array, largest: number, at: number}} at: -1 for none
 */
export function differenceOf(a, b) {
  let largest = 0,
    at = -1;
  const values = Float32Array.from(a, (one, n) => {
    const apart = one - b[n];
    if (Math.abs(apart) > largest) [largest, at] = [Math.abs(apart), n];
    return apart;
  });
  return { values, largest, at };
}

/**
 * Block sizes that both traces can be drawn in, finest first.
 * @param {Source} source @param {[number, number]} pair traces
 * @param {number} c @param {number} h @param {Channel} channel
 * @returns {BlockSize[]}
 */
export function commonLevels(source, [a, b], c, h, channel) {
  return sharedLevels([a, b].map((t) => source.levels(t, c, h, channel)));
}

/**
 * Why cells of two traces do not correspond; "" when they do.
 * @param {Source} source @param {[number, number]} pair @param {number} c
 * @param {number} h
 * @returns {string}
 */
export function reasonApart(source, [a, b], c, h) {
  const one = source.document.traces[a]?.calls[c],
    other = source.document.traces[b]?.calls[c];
  if (!one || !other)
    return `${one ? "B" : "A"} has no layer ${layerNumber(source.document.traces[one ? a : b]?.calls ?? [], c)}.`;
  if (h >= one.heads || h >= other.heads)
    return `A has ${one.heads} heads here and B ${other.heads}: there is no head ${h} to compare.`;
  if (one.rows !== other.rows || one.keys !== other.keys) {
    const sizes = `A holds ${one.rows} queries × ${one.keys} keys and B ${other.rows} × ${other.keys}`;
    return `${sizes}: their cells do not correspond, so there is no difference.`;
  }
  return "";
}

/**
 * Jensen-Shannon divergence of every head between two traces, on blocks of which at most 64 cover an axis.
 * @param {Source} source @param {number} [a] trace @param {number} [b] trace
 * @returns {Promise<Float32Array[]>} bits by call of A and head; NaN where there is nothing to compare
 */
export async function headDivergences(source, a = 0, b = 1) {
  const found = [];
  let heads = 0;
  for (const [c, call] of (source.document.traces[a]?.calls ?? []).entries()) {
    const values = new Float32Array(call.heads).fill(NaN);
    for (let h = 0; h < call.heads; h++) {
      if (reasonApart(source, [a, b], c, h)) continue;
      const view = { q0: 0, q1: call.rows, k0: 0, k1: call.keys };
      const level = chooseLevel(commonLevels(source, [a, b], c, h, "mass"), view, DIVERGENCE_BLOCKS);
      if (!level) continue;
      // The page stays alive meanwhile.
      if (++heads % 24 === 0) await new Promise((go) => setTimeout(go));
      const [one, other] = await Promise.all(
        [a, b].map((t) => readBlocks(source, t, c, h, view, "mass", level)),
      );
      if (one && other) values[h] = blockDivergence(one.values, other.values, one.rows, one.columns);
    }
    found.push(values);
  }
  return found;
}
