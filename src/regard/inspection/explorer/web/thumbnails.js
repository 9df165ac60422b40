import { limitsFor, toUnit } from "./colours.js";
import { penOf } from "./dom.js";
import { MaskTiles } from "./geometry.js";

/** @typedef {Blocks & {level: BlockSize, picture: string|null}} Thumbnail picture: the chunk of the mask's tiles */

/** Small pictures of heads, read and painted once. */
export class Thumbnails {
  /** @type {Map<string, Thumbnail|null>} */
  values = new Map();
  /** @type {Map<string, HTMLCanvasElement>} */
  pictures = new Map();
  /** @type {Map<string, MaskTiles>} */
  masks = new Map();
  /** @type {Map<string, number>} */
  blocks = new Map();
  /** @type {{t: number, c: number, h: number, channel: Channel, most: number, name: string}[]} */
  queue = [];
  busy = 0;

  /** @param {Source} source @param {() => void} arrived */
  constructor(source, arrived) {
    this.source = source;
    this.arrived = arrived;
  }

  /**
   * @param {number} t @param {number} c @param {number} h @param {Channel} channel
   * @param {number} size pixels there are for it
   * @param {Paper} look @param {boolean} [own] colours from the head's own weights, not the same for all
   * @returns {HTMLCanvasElement|null} null while it is on its way, or when nothing is stored
   */
  get(t, c, h, channel, size, look, own = false) {
    const most = Math.min(64, Math.max(16, 2 ** Math.ceil(Math.log2(size * 1.5))));
    const name = [t, c, h, channel, most].join(" ");
    const sign = `${name} ${look.dark} ${own}`;
    const picture = this.pictures.get(sign);
    if (picture) return picture;
    const found = this.values.get(name);
    if (found === undefined) {
      this.values.set(name, null);
      this.queue.push({ t, c, h, channel, most, name });
      this.work();
    }
    if (!found) return null;
    // Wide blocks hold more mass than narrow ones: each is drawn as if it were as wide as the narrowest.
    const part = own || channel === "max" ? 1 : this.narrowest(t, channel, most) / found.level.keyBlock;
    const painted = this.paint(found, look, this.source.call(t, c), own, part);
    this.pictures.set(sign, painted);
    return painted;
  }

  /**
   * Keys of the narrowest blocks that heads of a trace are drawn in.
   * @param {number} t @param {Channel} channel @param {number} most
   */
  narrowest(t, channel, most) {
    const name = `${t} ${channel} ${most}`;
    const known = this.blocks.get(name);
    if (known) return known;
    let least = Infinity;
    for (const [c, { heads }] of this.source.document.traces[t].calls.entries())
      for (let h = 0; h < heads; h += 1)
        least = Math.min(least, thumbnailLevel(this.source, t, c, h, channel, most)?.keyBlock ?? Infinity);
    this.blocks.set(name, least);
    return least;
  }

  async work() {
    if (this.busy >= 4) return;
    this.busy += 1;
    let since = performance.now();
    for (let next = this.queue.shift(); next; next = this.queue.shift()) {
      const { t, c, h, channel, most, name } = next;
      try {
        this.values.set(name, await this.read(t, c, h, channel, most));
      } catch {
        this.values.set(name, null);
      }
      if (performance.now() - since > 24) {
        this.arrived();
        await new Promise((resolve) => setTimeout(resolve));
        since = performance.now();
      }
    }
    this.busy -= 1;
    this.arrived();
  }

  /**
   * @param {number} t @param {number} c @param {number} h @param {Channel} channel @param {number} most
   * @returns {Promise<Thumbnail | null>}
   */
  async read(t, c, h, channel, most) {
    const {
      rows,
      keys,
      mask_picture: picture,
      tile_rows: tileRows,
      tile_keys: tileKeys,
    } = this.source.call(t, c);
    if (!rows || !keys) return null;
    const level = thumbnailLevel(this.source, t, c, h, channel, most);
    if (!level) return null;
    const { queryBlock, keyBlock } = level;
    if (picture && !this.masks.has(picture))
      this.masks.set(picture, new MaskTiles(await this.source.chunk(picture), tileRows, tileKeys));
    const [I, J] = [Math.ceil(rows / queryBlock), Math.ceil(keys / keyBlock)];
    const whole = await this.source.level(t, c, h, queryBlock, keyBlock, channel);
    if (whole) return { ...whole, level, picture };
    const tile = await this.source.tile(t, c, h, queryBlock, keyBlock, 0, 0, channel);
    if (!tile) return null;
    const values = new Float32Array(I * J);
    for (let i = 0; i < I; i += 1) values.set(tile.subarray(256 * i, 256 * i + J), i * J);
    return { values, I, J, level, picture };
  }

  /** @param {Thumbnail} what @param {Paper} options @param {Shape} options @param {boolean} own @param {number} part */
  paint({ values, I, J, level, picture }, { table, none }, { rows, keys }, own, part) {
    const canvas = Object.assign(document.createElement("canvas"), { width: J, height: I });
    const image = new ImageData(J, I);
    const [low, high] = (own && ownLimits(values)) || limitsFor("log", keys, 1);
    const mask = picture ? this.masks.get(picture) : undefined;
    for (let i = 0; i < I; i += 1) {
      for (let j = 0; j < J; j += 1) {
        const value = values[i * J + j];
        if (value === 0 && mask) {
          const [q, k] = [i * level.queryBlock, j * level.keyBlock];
          if (mask.of(q, Math.min(rows, q + level.queryBlock), k, Math.min(keys, k + level.keyBlock)) < 2)
            continue;
        }
        const unit = toUnit(part * value, "log", low, high);
        const at = 4 * (i * J + j);
        const code = 3 * Math.round(255 * unit);
        for (let part = 0; part < 3; part += 1)
          image.data[at + part] = Number.isNaN(unit) ? none[part] : table[code + part];
        image.data[at + 3] = 255;
      }
    }
    penOf(canvas).putImageData(image, 0, 0);
    return canvas;
  }
}

/**
 * The finest blocks of a head of which there are few enough.
 * @param {Source} source @param {number} t @param {number} c @param {number} h @param {Channel} channel @param {number} most
 * @returns {BlockSize|undefined}
 */
export function thumbnailLevel(source, t, c, h, channel, most) {
  const { rows, keys } = source.call(t, c),
    levels = source.levels(t, c, h, channel);
  return (
    levels.find(
      ({ queryBlock, keyBlock }) =>
        Math.ceil(rows / queryBlock) <= most && Math.ceil(keys / keyBlock) <= most,
    ) ?? levels.at(-1)
  );
}

/**
 * Ends of a log scale between which most of what is above 0 lies.
 * @param {ArrayLike<number>} values
 * @returns {Limits|null} null where nothing is
 */
export function ownLimits(values) {
  const known = Float32Array.from(values)
    .filter((one) => one > 0)
    .sort();
  if (!known.length) return null;
  /** @param {number} part */
  const at = (part) => known[Math.floor(part * (known.length - 1))];
  const high = at(0.995);
  return [Math.min(at(0.02), high / 2), high];
}
