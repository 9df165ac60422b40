// Blocks of weights: means of sums and maxima over blocks, and which size of block suits a zoom.

/**
 * Join blocks: rows weighted by how many of them live, keys summed.
 *
 * A block of the result takes `up` x `across` of the given ones; the last ones of an axis may be fewer.
 * @param {Float32Array} values (I, J) means over living rows of sums over keys
 * @param {Int32Array|null} rows (I) how many rows live in each; null: all of them, one per block
 * @param {number} I
 * @param {number} J
 * @param {number} [up] how many along the rows
 * @param {number} [across] how many along the keys
 * @returns {{values: Float32Array, rows: Int32Array, I: number, J: number}}
 */
export function reduceMass(values, rows, I, J, up = 2, across = 2) {
  const height = Math.ceil(I / up);
  const width = Math.ceil(J / across);
  const sums = new Float64Array(height * width);
  const living = new Int32Array(height);
  for (let i = 0; i < I; i += 1) {
    const to = Math.floor(i / up);
    const count = rows ? rows[i] : 1;
    living[to] += count;
    if (count) pyramidAdd(values, i * J, J, across, count, sums, to * width);
  }
  const means = new Float32Array(sums.length);
  for (let at = 0; at < means.length; at += 1) {
    means[at] = sums[at] / Math.max(living[Math.floor(at / width)], 1);
  }
  return { values: means, rows: living, I: height, J: width };
}

/**
 * Join blocks: the largest of their maxima.
 * @param {Float32Array} values (I, J)
 * @param {number} I
 * @param {number} J
 * @param {number} [up] how many along the rows
 * @param {number} [across] how many along the keys
 * @returns {{values: Float32Array, I: number, J: number}}
 */
export function reduceMax(values, I, J, up = 2, across = 2) {
  const height = Math.ceil(I / up);
  const width = Math.ceil(J / across);
  const largest = new Float32Array(height * width);
  for (let i = 0; i < I; i += 1) {
    const row = Math.floor(i / up) * width;
    for (let j = 0; j < J; j += 1) {
      const to = row + Math.floor(j / across);
      const value = values[i * J + j];
      if (value > largest[to]) largest[to] = value;
    }
  }
  return { values: largest, I: height, J: width };
}

/**
 * @param {Float32Array} values @param {number} from @param {number} J @param {number} across
 * @param {number} count @param {Float64Array} sums @param {number} to
 */
function pyramidAdd(values, from, J, across, count, sums, to) {
  for (let j = 0; j < J; j += 1) sums[to + Math.floor(j / across)] += values[from + j] * count;
}
