// Two texts beside each other: which token of one is which of the other.

/** Pairs of tokens that are looked at; of longer texts, places are compared. */
const ALIGNMENT_PAIRS = 4e6;

/**
 * The longest common subsequence of two texts.
 * @param {string[]} one @param {string[]} other
 * @returns {Int32Array} for each token of one, its place in the other; -1 where it has none
 */
export function alignTokens(one, other) {
  const places = new Int32Array(one.length).fill(-1);
  const shorter = Math.min(one.length, other.length);
  let [front, back] = [0, 0];
  while (front < shorter && one[front] === other[front]) front += 1;
  while (back < shorter - front && one.at(-1 - back) === other.at(-1 - back)) back += 1;
  for (let n = 0; n < front; n += 1) places[n] = n;
  for (let n = 1; n <= back; n += 1) places[one.length - n] = other.length - n;
  const [rows, columns] = [one.length - front - back, other.length - front - back];
  if (rows * columns > ALIGNMENT_PAIRS) {
    for (let n = front; n < front + Math.min(rows, columns); n += 1) if (one[n] === other[n]) places[n] = n;
    return places;
  }
  const wide = columns + 1,
    longest = new Uint16Array((rows + 1) * wide);
  for (let i = rows - 1; i >= 0; i -= 1)
    for (let j = columns - 1; j >= 0; j -= 1)
      longest[i * wide + j] =
        one[front + i] === other[front + j]
          ? longest[(i + 1) * wide + j + 1] + 1
          : Math.max(longest[(i + 1) * wide + j], longest[i * wide + j + 1]);
  for (let i = 0, j = 0; i < rows && j < columns; ) {
    if (one[front + i] === other[front + j]) {
      places[front + i] = front + j;
      [i, j] = [i + 1, j + 1];
    } else if (longest[(i + 1) * wide + j] >= longest[i * wide + j + 1]) i += 1;
    else j += 1;
  }
  return places;
}

/**
 * What two texts have in common, in words.
 * @param {Int32Array|null} places of the tokens of A in B @param {number} count tokens of B
 * @returns {string} "" where they are the same
 */
export function sharedText(places, count) {
  if (!places) return "";
  const shared = places.reduce((sum, place) => sum + Number(place >= 0), 0);
  const [ownA, ownB] = [places.length - shared, count - shared];
  if (!ownA && !ownB) return "";
  return `${shared} tokens are the same in both texts, in order; A has ${ownA} of its own and B ${ownB}.`;
}

/**
 * Columns of two aligned texts: a place of each, null where a text has no token.
 * @param {Int32Array} places @param {number} count tokens of the other text
 * @returns {[number|null, number|null][]}
 */
export function alignedColumns(places, count) {
  /** @type {[number|null, number|null][]} */
  const columns = [];
  let next = 0;
  places.forEach((place, n) => {
    for (; next < place; next += 1) columns.push([null, next]);
    columns.push([n, place < 0 ? null : place]);
    if (place >= 0) next = place + 1;
  });
  for (; next < count; next += 1) columns.push([null, next]);
  return columns;
}

/**
 * Cells of B where A has the same queries and keys; NaN where B has none.
 * @param {Excerpt} one @param {Excerpt} other both of exact cells
 * @param {ArrayLike<number>} rows places of the queries of A in B @param {ArrayLike<number>} keys
 * @returns {Excerpt} in the frame of A
 */
export function alignCells(one, other, rows, keys) {
  const values = new Float32Array(one.values.length).fill(NaN);
  for (let i = 0; i < one.rows; i += 1) {
    const row = rows[one.row0 + i] - other.row0;
    if (!(row >= 0 && row < other.rows)) continue;
    for (let j = 0; j < one.columns; j += 1) {
      const column = keys[one.column0 + j] - other.column0;
      if (column >= 0 && column < other.columns)
        values[i * one.columns + j] = other.values[row * other.columns + column];
    }
  }
  return { ...one, values };
}
