import { histogramOf, toUnit } from "./colours.js";
import { pause } from "./connection.js";
import { element, penOf } from "./dom.js";

/** Blocks along a side of a tile. */
export const TILE = 256;
const TILES_KEPT = 160;
/** Keys that count as the first ones when they are hidden. */
export const FIRST_KEYS = 4;
const RANK_TILES = 16;
/** Milliseconds that a server is left alone while the view goes on changing. */
const TILES_CALM = 90;

/** @param {number} keyBlock @returns {number} blocks that hold the first keys */
export function hiddenBlocks(keyBlock) {
  return Math.ceil(FIRST_KEYS / keyBlock);
}

/**
 * Take the first keys out of a tile and share out what is left of each row.
 * @param {Float32Array} values TILE x TILE
 * @param {Float32Array} first mass of the same rows in the first tile column
 * @param {number} tileColumn @param {number} hidden blocks to leave out
 * @param {number} [most] what no value is above
 * @returns {Float32Array} NaN where hidden
 */
export function withoutFirst(values, first, tileColumn, hidden, most = 1) {
  const out = new Float32Array(values);
  for (let i = 0; i < TILE; i += 1) {
    let rest = 1;
    for (let j = 0; j < hidden; j += 1) rest -= first[i * TILE + j] || 0;
    for (let j = 0; j < TILE; j += 1) {
      const at = i * TILE + j;
      if (tileColumn === 0 && j < hidden) out[at] = NaN;
      else if (out[at] > 0) out[at] = rest > 1e-6 ? Math.min(most, out[at] / rest) : 0;
    }
  }
  return out;
}

/**
 * Mean or maximum of several tiles, cell by cell.
 * @param {Float32Array[]} tiles
 * @param {"mean"|"max"} how
 * @returns {Float32Array}
 */
export function combineTiles(tiles, how) {
  if (tiles.length === 1) return tiles[0];
  const out = new Float32Array(tiles[0]);
  for (const tile of tiles.slice(1)) {
    if (how === "max") for (let at = 0; at < out.length; at += 1) out[at] = Math.max(out[at], tile[at]);
    else for (let at = 0; at < out.length; at += 1) out[at] += tile[at];
  }
  if (how === "mean") for (let at = 0; at < out.length; at += 1) out[at] /= tiles.length;
  return out;
}

/**
 * Rank of each value in its row, 0 for the smallest to 1 for the largest; equal values share the lower rank.
 * @param {Float32Array[]} across the tiles side by side
 * @param {number} which tile to rank
 * @returns {Float32Array}
 */
export function ranksInRows(across, which) {
  const out = new Float32Array(TILE * TILE).fill(NaN);
  const row = new Float32Array(TILE * across.length);
  for (let i = 0; i < TILE; i += 1) {
    let count = 0;
    for (const tile of across) {
      for (let at = i * TILE; at < (i + 1) * TILE; at += 1) {
        if (tile[at] > 0) {
          row[count] = tile[at];
          count += 1;
        }
      }
    }
    const sorted = row.subarray(0, count).sort();
    for (let at = i * TILE; at < (i + 1) * TILE; at += 1) {
      const value = across[which][at];
      if (Number.isNaN(value)) continue;
      let [low, high] = [0, count];
      while (low < high) {
        const middle = (low + high) >> 1;
        if (sorted[middle] < value) low = middle + 1;
        else high = middle;
      }
      out[at] = value > 0 ? (count > 1 ? low / (count - 1) : 1) : 0;
    }
  }
  return out;
}

/** Tiles as the map draws them: fetched, combined over the selected heads, painted. */
export class TileStore {
  /** @type {Map<string, Tile>} */
  kept = new Map();
  pending = 0;
  /** @type {Map<string, number>} */
  largest = new Map();
  /** How many blocks have which weight, by group. @type {Map<string, Float64Array>} */
  histograms = new Map();
  /** Counts pictures of the map. */
  picture = 0;
  /** When the view changed last. */
  moved = -Infinity;

  /**
   * @param {Source} source
   * @param {() => void} arrived called when something new can be drawn
   */
  constructor(source, arrived) {
    this.source = source;
    this.arrived = arrived;
  }

  /**
   * Draw a picture; what the server was asked for and is not in it is given up.
   * @param {() => void} draw
   */
  inPicture(draw) {
    this.picture += 1;
    draw();
    if (!this.source.ask) return;
    for (const [name, { end, picture }] of this.kept) {
      if (!end || picture === this.picture) continue;
      this.kept.delete(name);
      end.abort();
    }
  }

  /**
   * @param {TileRequest} what
   * @param {number} tileRow @param {number} tileColumn
   * @returns {KnownTile|null} null while it is on its way
   */
  get(what, tileRow, tileColumn) {
    const group = this.group(what);
    const name = this.name(what, tileRow, tileColumn);
    const found = this.kept.get(name);
    if (found) {
      this.kept.delete(name);
      this.kept.set(name, found);
      found.picture = this.picture;
      return found.values ? /** @type {KnownTile} */ (found) : null;
    }
    const end = new AbortController();
    /** @type {Tile} */
    const entry = {
      values: null,
      canvas: null,
      painted: "",
      picture: this.picture,
      end,
    };
    this.kept.set(name, entry);
    this.pending += 1;
    const { signal } = end;
    const work = what.ranked
      ? this.rank(what, tileRow, tileColumn, signal)
      : this.fetch(what, tileRow, tileColumn, signal);
    work
      .then(
        (values) => {
          entry.values = values;
          entry.none = !values;
          if (values && !what.ranked) this.note(group, values);
        },
        () => {
          if (this.kept.get(name) === entry) this.kept.delete(name);
        },
      )
      .finally(() => {
        entry.end = null;
        this.pending -= 1;
        if (!signal.aborted) this.arrived();
      });
    this.evict();
    return null;
  }

  /**
   * Whether a tile is on its way.
   * @param {TileRequest} what @param {number} tileRow @param {number} tileColumn
   */
  awaits(what, tileRow, tileColumn) {
    return Boolean(this.kept.get(this.name(what, tileRow, tileColumn))?.end);
  }

  /** @param {TileRequest} what @param {number} tileRow @param {number} tileColumn */
  name(what, tileRow, tileColumn) {
    return `${this.group(what)} ${what.ranked ? "rank" : ""} ${tileRow} ${tileColumn}`;
  }

  /** @param {TileRequest} what */
  group({ t, heads, level, channel, aggregate, hideSink }) {
    return [
      t,
      heads.map((head) => head.join(".")).join(","),
      level.queryBlock,
      level.keyBlock,
      channel,
      heads.length > 1 ? aggregate : "",
      hideSink,
    ].join(" ");
  }

  /** Until the view has stayed as it is for a while. @param {AbortSignal} signal */
  async calm(signal) {
    let rest = TILES_CALM;
    while (rest > 0) {
      await pause(rest, signal);
      rest = this.moved + TILES_CALM - performance.now();
    }
  }

  /**
   * @param {TileRequest} what @param {number} tileRow @param {number} tileColumn @param {AbortSignal} signal
   * @returns {Promise<Float32Array | null>}
   */
  async fetch({ t, heads, level, channel, aggregate, hideSink }, tileRow, tileColumn, signal) {
    const { queryBlock, keyBlock } = level;
    const tiles = [];
    if (heads.some(([c, h]) => !this.source.holds(t, c, h, level, channel))) await this.calm(signal);
    for (const [c, h] of heads) {
      /** @param {number} column @param {Channel} name */
      const read = (column, name) =>
        this.source.tile(t, c, h, queryBlock, keyBlock, tileRow, column, name, signal);
      let tile = await read(tileColumn, channel);
      if (!tile) continue;
      if (hideSink) {
        const first = await read(0, "mass");
        const none = new Float32Array(tile.length);
        const most = channel === "value" ? Infinity : 1;
        tile = withoutFirst(tile, first ?? none, tileColumn, hiddenBlocks(keyBlock), most);
      }
      tiles.push(tile);
    }
    return tiles.length ? combineTiles(tiles, aggregate) : null;
  }

  /**
   * Ranks need the whole row, as far as that is a reasonable number of tiles.
   * @param {TileRequest} what @param {number} tileRow @param {number} tileColumn @param {AbortSignal} signal
   * @returns {Promise<Float32Array | null>}
   */
  async rank(what, tileRow, tileColumn, signal) {
    const wide = what.columns <= RANK_TILES;
    const places = wide ? Array.from({ length: what.columns }, (_, n) => n) : [tileColumn];
    const across = [];
    for (const place of places) {
      const tile = await this.fetch(what, tileRow, place, signal);
      if (!tile) return null;
      across.push(tile);
    }
    return ranksInRows(across, wide ? tileColumn : 0);
  }

  /** @param {string} group @param {Float32Array} values */
  note(group, values) {
    let largest = this.largest.get(group) ?? 0;
    for (let at = 0; at < values.length; at += 1) if (values[at] > largest) largest = values[at];
    this.largest.set(group, largest);
    this.histograms.set(group, histogramOf(values, this.histograms.get(group)));
  }

  evict() {
    for (const [name, entry] of this.kept) {
      if (this.kept.size <= TILES_KEPT) return;
      if (entry.values || entry.none) this.kept.delete(name);
    }
  }

  /**
   * The picture of a tile, one pixel a block; transparent where nothing may be attended to and beyond the edge.
   * @param {KnownTile} entry @param {SignedLook} look
   * @param {number} tileRow @param {number} tileColumn
   * @returns {HTMLCanvasElement}
   */
  paint(entry, look, tileRow, tileColumn) {
    const canvas = entry.canvas ?? element("canvas", { width: TILE, height: TILE });
    if (entry.painted === look.sign) return canvas;
    const image = new ImageData(tilePixels(entry.values, look, tileRow, tileColumn), TILE, TILE);
    penOf(canvas).putImageData(image, 0, 0);
    Object.assign(entry, { canvas, painted: look.sign });
    return canvas;
  }
}

/**
 * Red, green, blue and opacity of a tile's blocks.
 * @param {Float32Array} values @param {TileLook} look @param {number} tileRow @param {number} tileColumn
 * @returns {Uint8ClampedArray<ArrayBuffer>} TILE x TILE x 4
 */
export function tilePixels(values, look, tileRow, tileColumn) {
  const { level, mask, shape, table, none } = look;
  const pixels = new Uint8ClampedArray(4 * TILE * TILE);
  const rows = Math.min(TILE, Math.ceil(shape.rows / level.queryBlock) - tileRow * TILE);
  const keys = Math.min(TILE, Math.ceil(shape.keys / level.keyBlock) - tileColumn * TILE);
  const unitOfValue = tileScale(look);
  for (let i = 0; i < rows; i += 1) {
    const q0 = (tileRow * TILE + i) * level.queryBlock;
    if (look.isEmpty?.(q0, Math.min(shape.rows, q0 + level.queryBlock))) continue;
    for (let j = 0; j < keys; j += 1) {
      const value = values[i * TILE + j];
      const at = 4 * (i * TILE + j);
      if (!(value > 0)) {
        const k0 = (tileColumn * TILE + j) * level.keyBlock;
        const allowed = mask.of(
          q0,
          Math.min(shape.rows, q0 + level.queryBlock),
          k0,
          Math.min(shape.keys, k0 + level.keyBlock),
        );
        if (value === 0 ? allowed < 2 : allowed === 0) continue;
        if (Number.isNaN(value)) {
          [pixels[at], pixels[at + 1], pixels[at + 2]] = none;
          pixels[at + 3] = 255;
          continue;
        }
      }
      const code = 3 * Math.round(255 * unitOfValue(value));
      pixels[at] = table[code];
      pixels[at + 1] = table[code + 1];
      pixels[at + 2] = table[code + 2];
      pixels[at + 3] = 255;
    }
  }
  return pixels;
}

/**
 * `toUnit` with its logarithms taken once.
 * @param {ColourLimits} what
 * @returns {(value: number) => number}
 */
function tileScale({ scale, low, high }) {
  if (scale !== "log") return (value) => toUnit(value, scale, low, high);
  const [start, width] = [Math.log(low), Math.log(high / low)];
  return (value) => (value > low ? Math.min(1, (Math.log(value) - start) / width) : 0);
}
