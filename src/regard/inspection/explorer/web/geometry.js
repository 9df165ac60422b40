// Where cells lie on the map: views are ranges of cells (floats), plots are rectangles of CSS pixels.

/** Side ratios up to which cells stay square; beyond, a map of 1 x 100,000 cells would be a line. */
const GEOMETRY_SQUARE = 4;
/** CSS pixels of a cell at the deepest zoom. */
const GEOMETRY_LARGEST = 72;

/** @param {Shape} shape @returns {boolean} whether cells are drawn as squares */
export function hasSquareCells({ rows, keys }) {
  return rows > 0 && keys > 0 && Math.max(rows / keys, keys / rows) <= GEOMETRY_SQUARE;
}

/** @param {number} low @param {number} high @param {number} span @param {number} size */
const geometryPlace = (low, high, span, size) => {
  if (span >= size) return 0;
  return Math.min(Math.max(0, (low + high) / 2 - span / 2), size - span);
};

/**
 * The range that is drawn: what is asked for, and as much more as the plot has room for.
 * @param {View} view inside the matrix
 * @param {{w: number, h: number}} plot
 * @param {Shape} shape
 * @returns {View} may end beyond the matrix, below and at the right
 */
export function drawnView(view, plot, shape) {
  if (!hasSquareCells(shape) || plot.w <= 0 || plot.h <= 0) return { ...view };
  const scale = Math.max((view.q1 - view.q0) / plot.h, (view.k1 - view.k0) / plot.w, 1 / GEOMETRY_LARGEST);
  const [tall, wide] = [scale * plot.h, scale * plot.w];
  const q0 = geometryPlace(view.q0, view.q1, tall, shape.rows);
  const k0 = geometryPlace(view.k0, view.k1, wide, shape.keys);
  return { q0, q1: q0 + tall, k0, k1: k0 + wide };
}

/**
 * A factor to zoom by that makes no cell larger than one may be: a cell that is zoomed about stays in its place.
 * @param {number} factor @param {{perRow: number, perKey: number}} scale @param {Shape} shape
 */
export function zoomFactor(factor, { perRow, perKey }, shape) {
  return hasSquareCells(shape) && factor < 1
    ? Math.min(1, Math.max(factor, Math.min(perRow, perKey) / GEOMETRY_LARGEST))
    : factor;
}

/**
 * Zoom about a cell that stays where it is.
 * @param {View} view as drawn
 * @param {number} factor below 1 zooms in
 * @param {number} q @param {number} k the cell
 * @param {Shape} shape
 * @returns {View} inside the matrix
 */
export function zoomView(view, factor, q, k, shape) {
  const most = Math.max(
    (view.q1 - view.q0) / Math.max(1, shape.rows),
    (view.k1 - view.k0) / Math.max(1, shape.keys),
  );
  if (
    factor > 1 &&
    most >= 1 &&
    factor * Math.min(view.q1 - view.q0 - shape.rows, view.k1 - view.k0 - shape.keys) >= 0
  ) {
    return { q0: 0, q1: shape.rows, k0: 0, k1: shape.keys };
  }
  /**
   * @param {number} low @param {number} high @param {number} at @param {number} size
   * @returns {Limits}
   */
  const axis = (low, high, at, size) => {
    const span = Math.min(size, Math.max((high - low) * factor, Math.min(size, 4)));
    const share = high > low ? (at - low) / (high - low) : 0.5;
    return geometryInside(at - share * span, span, size);
  };
  const [q0, q1] = axis(view.q0, view.q1, q, shape.rows);
  const [k0, k1] = axis(view.k0, view.k1, k, shape.keys);
  return { q0, q1, k0, k1 };
}

/**
 * @param {number} low @param {number} span @param {number} size
 * @returns {Limits}
 */
const geometryInside = (low, span, size) => {
  const from = Math.min(Math.max(0, low), Math.max(0, size - span));
  return [from, Math.min(size, from + span)];
};

/**
 * Move a view by cells, and keep it inside.
 * @param {View} view @param {number} rows @param {number} keys @param {Shape} shape
 * @returns {View}
 */
export function panView(view, rows, keys, shape) {
  const [q0, q1] = geometryInside(view.q0 + rows, view.q1 - view.q0, shape.rows);
  const [k0, k1] = geometryInside(view.k0 + keys, view.k1 - view.k0, shape.keys);
  return { q0, q1, k0, k1 };
}

/**
 * The level to draw: the finest whose blocks take a CSS pixel at least, so that no block is left out.
 * @param {BlockSize[]} levels finest first
 * @param {number} perRow CSS pixels a row takes @param {number} perKey
 * @returns {number} its place, -1 without levels
 */
export function levelToDraw(levels, perRow, perKey) {
  /** @param {BlockSize} what */
  const fits = ({ queryBlock, keyBlock }) => Math.min(queryBlock * perRow, keyBlock * perKey) >= 0.999;
  const found = levels.findIndex(fits);
  return found < 0 ? levels.length - 1 : found;
}

/**
 * @param {View} view @param {Pick<Rect, "w" | "h">} plot
 * @returns {{perRow: number, perKey: number}} CSS pixels
 */
export function pixelsPerCell(view, plot) {
  return {
    perRow: plot.h / Math.max(1e-9, view.q1 - view.q0),
    perKey: plot.w / Math.max(1e-9, view.k1 - view.k0),
  };
}

/**
 * @param {View} view @param {Rect} plot @param {number} x @param {number} y
 * @returns {{q: number, k: number}} the place under a pixel, in cells (floats)
 */
export function placeAt(view, plot, x, y) {
  const { perRow, perKey } = pixelsPerCell(view, plot);
  return { q: view.q0 + (y - plot.y) / perRow, k: view.k0 + (x - plot.x) / perKey };
}

/**
 * @param {View} view @param {Rect} plot @param {number} x @param {number} y @param {Shape} shape
 * @returns {Cell|null} the cell under a pixel; null outside the matrix or the plot
 */
export function cellAt(view, plot, x, y, shape) {
  if (x < plot.x || y < plot.y || x >= plot.x + plot.w || y >= plot.y + plot.h) return null;
  const { q, k } = placeAt(view, plot, x, y);
  const [row, key] = [Math.floor(q), Math.floor(k)];
  return row >= 0 && key >= 0 && row < shape.rows && key < shape.keys ? { row, key } : null;
}

/**
 * @param {View} view @param {Rect} plot @param {number} q @param {number} k
 * @returns {Point} the pixel of a place in cells
 */
export function pixelOf(view, plot, q, k) {
  const { perRow, perKey } = pixelsPerCell(view, plot);
  return { x: plot.x + (k - view.k0) * perKey, y: plot.y + (q - view.q0) * perRow };
}

/**
 * A view moved so little that a cell comes inside with room around it.
 * @param {View} view @param {number} row @param {number} key @param {Shape} shape
 */
export function followCell(view, row, key, shape) {
  /** @param {number} at @param {number} low @param {number} high */
  const move = (at, low, high) => {
    const room = Math.min(0.1 * (high - low), 8);
    if (at < low + room) return at - room - low;
    return at + 1 > high - room ? at + 1 + room - high : 0;
  };
  return panView(view, move(row, view.q0, view.q1), move(key, view.k0, view.k1), shape);
}

/**
 * Round numbers between two ends.
 * @param {number} low @param {number} high @param {number} pixels @param {number} gap
 * @returns {number[]} whole numbers at steps of 1, 2 or 5 times a power of ten, apart by `gap` pixels at least
 */
export function wholeTicks(low, high, pixels, gap) {
  if (!(high > low)) return [];
  const least = (gap / Math.max(1, pixels)) * (high - low);
  let step = 10 ** Math.max(0, Math.floor(Math.log10(Math.max(1, least))));
  for (const times of [1, 2, 5, 10]) {
    if (step * times >= least) {
      step *= times;
      break;
    }
  }
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick < high; tick += step) ticks.push(tick);
  return ticks;
}

/**
 * What the tiles of a mask say of any block of cells, in constant time.
 */
export class MaskTiles {
  /**
   * @param {{values: ArrayLike<number>, shape: number[]}|null} picture 0 empty, 1 partial, 2 full; null: not known
   * @param {number} [tileRows] @param {number} [tileKeys]
   */
  constructor(picture, tileRows = 1, tileKeys = 1) {
    this.known = Boolean(picture);
    this.tileRows = tileRows;
    this.tileKeys = tileKeys;
    const [I, J] = picture?.shape ?? [0, 0];
    this.I = I;
    this.J = J;
    const wide = J + 1;
    this.some = new Int32Array((I + 1) * wide);
    this.full = new Int32Array((I + 1) * wide);
    if (!picture) return;
    /** @param {Int32Array} table @param {number} at @param {boolean} counts */
    const add = (table, at, counts) => {
      table[at] = Number(counts) + table[at - 1] + table[at - wide] - table[at - wide - 1];
    };
    for (let i = 0; i < I; i += 1) {
      for (let j = 0; j < J; j += 1) {
        const value = picture.values[i * J + j];
        add(this.some, (i + 1) * wide + j + 1, value > 0);
        add(this.full, (i + 1) * wide + j + 1, value === 2);
      }
    }
  }

  /**
   * @param {number} q0 @param {number} q1 @param {number} k0 @param {number} k1
   * @returns {number} 0: no cell may be attended to; 1: no tile of it is full; 2: some tile is full, or nothing is known
   */
  of(q0, q1, k0, k1) {
    if (!this.known) return 2;
    const [i0, i1] = [Math.floor(q0 / this.tileRows), Math.min(this.I, Math.ceil(q1 / this.tileRows))];
    const [j0, j1] = [Math.floor(k0 / this.tileKeys), Math.min(this.J, Math.ceil(k1 / this.tileKeys))];
    const wide = this.J + 1;
    /** @param {Int32Array} table */
    const count = (table) =>
      table[i1 * wide + j1] - table[i0 * wide + j1] - table[i1 * wide + j0] + table[i0 * wide + j0];
    if (count(this.some) === 0) return 0;
    return count(this.full) > 0 ? 2 : 1;
  }

  /**
   * Whether a query, or a block of them, is known not to attend to a key, however coarse the tiles are.
   * @param {Pick<Call, "query_offset" | "key_offset" | "reach">} call @param {number} row @param {number} key
   * @param {number} [rows] @param {number} [keys]
   */
  forbids({ query_offset, key_offset, reach }, row, key, rows = 1, keys = 1) {
    const ahead = key + key_offset - row - query_offset,
      [before, after] = reach ?? [null, null];
    if (before !== null && ahead + keys - 1 < -before) return true;
    if (after !== null && ahead - rows + 1 > after) return true;
    return this.of(row, row + rows, key, key + keys) === 0;
  }
}
