// What the head view's lines are: the largest weights of some queries, or on a key, of one head.

import { readBlocks } from "./excerpts.js";
import { largestIndices } from "./passages.js";

/** Lines of a query, or into a key. */
const LINES_EACH = 24;
/** No line below this weight. */
export const LEAST_LINE = 0.01;

/** @typedef {{row: number, key: number, weight: number}} HeadLine */

/**
 * The largest weights of each of some queries; null where none is known one by one.
 * @param {Source} source @param {number} t @param {Head} head @param {number[]} rows
 * @param {number[]} sight first key and the one after the last: where a server would be asked for every row
 * @param {boolean} whole whether keys out of sight count in any case
 * @returns {Promise<HeadLine[]|null>}
 */
export async function readLines(source, t, [c, h], rows, sight, whole) {
  const exact = await source.weights(t, c, h);
  /** @param {number} row @param {Float32Array} values @param {number} [first] */
  const ofRow = (row, values, first = 0) =>
    largestIndices(values, LINES_EACH).map((key) => ({ row, key: key + first, weight: values[key] }));
  if (exact)
    return rows.flatMap((row) => ofRow(row, exact.values.subarray(row * exact.keys, (row + 1) * exact.keys)));
  if (source.ask && !whole && rows.length) {
    const view = { q0: rows[0], q1: rows[rows.length - 1] + 1, k0: sight[0], k1: sight[1] };
    const found = await readBlocks(source, t, c, h, view, "mass", { queryBlock: 1, keyBlock: 1 });
    if (!found) return null;
    const { values, columns, column0 } = found;
    return rows.flatMap((row, n) => ofRow(row, values.subarray(n * columns, (n + 1) * columns), column0));
  }
  const top = await Promise.all(rows.map((row) => source.topKeys(t, c, h, row, LINES_EACH)));
  if (top.length && top.every((one) => one === null)) return null;
  return top.flatMap((one, n) => (one ?? []).map((edge) => ({ row: rows[n], ...edge })));
}

/**
 * The largest weights on a key; null where they are not known.
 * @param {Source} source @param {number} t @param {Head} head @param {number} key
 * @returns {Promise<HeadLine[]|null>}
 */
export async function readLinesInto(source, t, [c, h], key) {
  const column = await source.column(t, c, h, key);
  if (!column?.exact) return null;
  return largestIndices(column.values, LINES_EACH).map((row) => ({ row, key, weight: column.values[row] }));
}

/**
 * The tokens that any head's lines lead to, the largest weight first, with the weight in every head.
 * @param {(HeadLine[]|null)[]} heads @param {"row"|"key"} end @param {number} most
 * @returns {{n: number, weights: (number|null)[]}[]} null: less than what is listed
 */
export function joinLines(heads, end, most) {
  /** @type {Map<number, (number|null)[]>} */
  const found = new Map();
  heads.forEach((lines, place) => {
    for (const line of lines ?? []) {
      const weights = found.get(line[end]) ?? heads.map(() => null);
      weights[place] = line.weight;
      found.set(line[end], weights);
    }
  });
  /** @param {(number|null)[]} weights */
  const largest = (weights) => Math.max(...weights.map((one) => one ?? 0));
  return [...found]
    .map(([n, weights]) => ({ n, weights }))
    .sort((a, b) => largest(b.weights) - largest(a.weights) || a.n - b.n)
    .slice(0, most);
}
