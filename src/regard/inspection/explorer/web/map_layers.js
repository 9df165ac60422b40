import { toUnit } from "./colours.js";
import { shown } from "./dom.js";
import { pixelOf, pixelsPerCell, wholeTicks } from "./geometry.js";

/** CSS pixels a token needs for its label. */
export const LAYER_LABEL = 10;
/** CSS pixels from which on keys are written across. */
const LAYER_WIDE = 44;
/** CSS pixels of a letter, and how steep keys are written that are narrower. */
const LAYER_LETTER = 6.6;
const LAYER_SLOPE = Math.sin(Math.PI / 3);
/** Letters of a key's label. */
const LAYER_LONGEST = 16;
const LAYER_FONT = "system-ui, sans-serif";

/**
 * Where the parts of the map lie, in CSS pixels.
 * @param {number} width @param {number} height
 * @param {number} [room] for tokens above the keys; 0: numbers
 */
export function mapLayout(width, height, room = 60) {
  const small = width < 480;
  // The legend, else beside its bar.
  const below = width < 680;
  const [left, strip] = small ? [44, 14] : [76, 22];
  const bottom = small ? 94 : below ? 80 : 54;
  const top = room ? Math.min(room, small ? 72 : 120) : 20;
  const x = left + strip + 3;
  const y = top + strip + 3;
  const plot = { x, y, w: Math.max(20, width - x - (small ? 6 : 12)), h: Math.max(20, height - y - bottom) };
  return { plot, strip, bottom, below, width, height, small, labels: room > 0 };
}

/**
 * The same picture without the room that the matrix leaves free.
 * @param {MapLayout} layout @param {View} view as drawn @param {Shape} shape
 * @returns {MapLayout}
 */
export function printLayout(layout, view, shape) {
  const { x, y, w, h } = matrixRect(view, layout.plot, shape);
  // The last keys' tokens stand out at the right, and the colour bar needs some width.
  const width = Math.min(layout.width, Math.max(480, x + w + 60));
  const below = layout.below || width < 680,
    bottom = below && !layout.below ? 80 : layout.bottom;
  return { ...layout, width, height: y + h + bottom, below, bottom, plot: { x, y, w, h } };
}

/**
 * Room that tokens take that stand above their keys: as high as all but the longest few.
 * @param {string[]} tokens
 * @returns {number} CSS pixels
 */
export function labelRoom(tokens) {
  const lengths = tokens.map((token) => shown(token, LAYER_LONGEST).length).sort((a, b) => a - b);
  const longest = lengths[Math.floor(0.98 * (lengths.length - 1))] ?? 0;
  return 36 + longest * LAYER_LETTER * LAYER_SLOPE;
}

/**
 * The part of the plot that shows the matrix.
 * @param {View} view @param {Rect} plot @param {Shape} shape
 * @returns {Rect}
 */
export function matrixRect(view, plot, shape) {
  const start = pixelOf(view, plot, Math.max(0, view.q0), Math.max(0, view.k0));
  const end = pixelOf(view, plot, Math.min(shape.rows, view.q1), Math.min(shape.keys, view.k1));
  return { x: start.x, y: start.y, w: Math.max(0, end.x - start.x), h: Math.max(0, end.y - start.y) };
}

/**
 * Numbers or tokens along both sides.
 * @param {CanvasRenderingContext2D} pen
 * @param {MapFrame & { rowTokens: string[] | null, keyTokens: string[] | null, rowOffset: number, keyOffset: number }} options
 */
export function drawAxes(pen, { layout, view, shape, theme, rowTokens, keyTokens, rowOffset, keyOffset }) {
  const { plot, strip } = layout;
  const { perRow, perKey } = pixelsPerCell(view, plot);
  const area = matrixRect(view, plot, shape);
  pen.textBaseline = "middle";
  const small = `11px ${LAYER_FONT}`;
  /** @param {string} text @param {number} width */
  const cut = (text, width) => {
    let most = Math.max(2, Math.floor(width / 5));
    let short = shown(text, most);
    while (most > 2 && pen.measureText(short).width > width) {
      most -= 1;
      short = shown(text, most);
    }
    return short;
  };
  const ends = {
    q: [Math.max(0, Math.floor(view.q0)), Math.min(shape.rows, Math.ceil(view.q1))],
    k: [Math.max(0, Math.floor(view.k0)), Math.min(shape.keys, Math.ceil(view.k1))],
  };
  /** @param {number} from @param {number} to @param {(at: number) => void} each */
  const along = (from, to, each) => {
    for (let at = from; at < to; at += 1) each(at);
  };
  pen.save();
  pen.beginPath();
  pen.rect(0, area.y - 1, plot.x, area.h + 2);
  pen.clip();
  pen.textAlign = "right";
  const right = plot.x - strip - 6;
  if (rowTokens && perRow >= LAYER_LABEL) {
    pen.font = `${Math.min(13, Math.max(9, perRow * 0.8))}px ${LAYER_FONT}`;
    pen.fillStyle = theme.ink;
    along(ends.q[0], ends.q[1], (row) =>
      pen.fillText(cut(rowTokens[row] ?? "", right - 4), right, pixelOf(view, plot, row + 0.5, 0).y),
    );
  } else {
    pen.font = small;
    pen.fillStyle = theme.muted;
    for (const tick of wholeTicks(ends.q[0] + rowOffset, ends.q[1] + rowOffset, area.h, 40)) {
      const { y } = pixelOf(view, plot, tick - rowOffset + 0.5, 0);
      pen.fillText(
        layerCount(tick, layout.small),
        right,
        Math.min(Math.max(y, area.y + 6), area.y + area.h - 6),
      );
      pen.fillRect(plot.x - strip - 4, y - 0.5, 3, 1);
    }
  }
  pen.restore();
  pen.save();
  pen.beginPath();
  pen.rect(area.x - 10, 0, Math.min(layout.width - area.x + 10, area.w + 70), plot.y);
  pen.clip();
  const base = plot.y - strip - 6;
  if (keyTokens && layout.labels && perKey >= LAYER_LABEL) {
    pen.font = `${Math.min(13, Math.max(9, perKey * 0.8))}px ${LAYER_FONT}`;
    pen.fillStyle = theme.ink;
    pen.textAlign = "left";
    along(ends.k[0], ends.k[1], (key) => {
      const { x } = pixelOf(view, plot, 0, key + 0.5);
      if (x > area.x + area.w) return;
      pen.save();
      pen.translate(x + 2, base);
      const across = perKey > LAYER_WIDE;
      pen.rotate(across ? 0 : -Math.PI / 3);
      if (across) pen.textAlign = "center";
      pen.fillText(cut(keyTokens[key] ?? "", across ? perKey - 4 : (base - 4) / LAYER_SLOPE), 0, -3);
      pen.restore();
    });
  } else {
    pen.font = small;
    pen.fillStyle = theme.muted;
    pen.textAlign = "center";
    for (const tick of wholeTicks(ends.k[0] + keyOffset, ends.k[1] + keyOffset, area.w, 56)) {
      const { x } = pixelOf(view, plot, 0, tick - keyOffset + 0.5);
      const text = layerCount(tick, layout.small);
      pen.fillText(text, Math.max(x, area.x - 8 + pen.measureText(text).width / 2), base - 6);
      pen.fillRect(x - 0.5, base, 1, 3);
    }
  }
  pen.restore();
  pen.font = `600 11px ${LAYER_FONT}`;
  pen.fillStyle = theme.muted;
  pen.textAlign = "left";
  pen.textBaseline = "alphabetic";
  pen.textAlign = "right";
  pen.fillText(layout.small ? "q ↓" : "queries ↓", right, plot.y - 6);
  pen.fillText(layout.small ? "k →" : "keys →", right, plot.y - strip - 10);
}

/** @param {number} number @param {boolean} small */
const layerCount = (number, small) =>
  small && number >= 10000 ? `${number / 1000}k` : number.toLocaleString("en");

/**
 * Entropy of rows and mass of keys, as means over heads.
 * @param {Source} source @param {number} t @param {Head[]} heads @param {string[]} [names]
 * @returns {Promise<Strips>}
 */
export async function readStrips(source, t, heads, names = ["entropy"]) {
  const read = await Promise.all(
    heads.map(async ([c, h]) => {
      const head = source.head(t, c, h);
      const [stats, mass] = await Promise.all([source.chunk(head.row_stats), source.chunk(head.key_mass)]);
      const bins = stats.shape[1];
      const at = Math.max(0, names.indexOf("entropy")) * bins;
      /** @type {Strips} */
      const strips = {
        entropy: stats.values.subarray(at, at + bins),
        keyMass: mass.values,
        rowBin: head.row_bin,
        keyBin: head.key_bin,
      };
      return strips;
    }),
  );
  const [first] = read;
  const alike = read.filter(({ rowBin, keyBin }) => rowBin === first.rowBin && keyBin === first.keyBin);
  /** @param {"entropy" | "keyMass"} name */
  const mean = (name) =>
    first[name].map((_, n) =>
      layerMean(
        alike.map((one) => one[name][n]),
        0,
        alike.length,
      ),
    );
  return { entropy: mean("entropy"), keyMass: mean("keyMass"), rowBin: first.rowBin, keyBin: first.keyBin };
}

/**
 * The left strip (entropy of the rows, 0 to that of an even spread) and the top strip (mass of the keys, log).
 * @param {CanvasRenderingContext2D} pen
 * @param {MapFrame & { strips: Strips | null, barLimits: Limits }} options
 */
export function drawStrips(pen, { layout, view, shape, theme, strips, barLimits }) {
  const { plot, strip } = layout;
  const area = matrixRect(view, plot, shape);
  const [x, y] = [plot.x - strip - 2, plot.y - strip - 2];
  pen.fillStyle = theme.well;
  pen.fillRect(x, area.y, strip, area.h);
  pen.fillRect(area.x, y, area.w, strip);
  if (!strips) return;
  const { perRow, perKey } = pixelsPerCell(view, plot);
  pen.fillStyle = theme.entropy;
  const most = Math.log(Math.max(2, shape.keys));
  /** @param {number} from @param {number} to */
  const rows = (from, to) => layerMean(strips.entropy, from / strips.rowBin, to / strips.rowBin);
  for (let at = 0; at < area.h; at += 1) {
    const q = view.q0 + (area.y + at - plot.y) / perRow;
    const value = rows(q, q + 1 / perRow);
    if (Number.isNaN(value)) continue;
    pen.fillRect(x, area.y + at, Math.max(0.5, strip * Math.min(1, value / most)), Math.min(1, area.h - at));
  }
  pen.fillStyle = theme.keymass;
  for (let at = 0; at < area.w; at += 1) {
    const k = view.k0 + (area.x + at - plot.x) / perKey;
    const value = layerMean(strips.keyMass, k / strips.keyBin, (k + 1 / perKey) / strips.keyBin);
    const tall = strip * toUnit(value, "log", ...barLimits);
    if (tall > 0) pen.fillRect(area.x + at, y + strip - tall, Math.min(1, area.w - at), tall);
  }
}

/**
 * @param {ArrayLike<number>} values @param {number} from @param {number} to
 * @returns {boolean} whether all bins of a range hold NaN: rows that may attend to nothing
 */
export function areNone(values, from, to) {
  return Number.isNaN(layerMean(values, from, to));
}

/**
 * Mean of the entries that a range of bins touches, leaving out NaN.
 * @param {ArrayLike<number>} values @param {number} from @param {number} to
 */
function layerMean(values, from, to) {
  const last = Math.min(values.length, Math.max(Math.floor(from) + 1, Math.ceil(to - 1e-6)));
  let [sum, count] = [0, 0];
  for (let at = Math.max(0, Math.floor(from)); at < last; at += 1) {
    if (Number.isNaN(values[at])) continue;
    sum += values[at];
    count += 1;
  }
  return count ? sum / count : NaN;
}

/**
 * Borders of documents, the window of the mask, and the tiles that the kernel works in.
 * @param {CanvasRenderingContext2D} pen
 * @param {MapFrame & { call: Call, state: State }} options
 */
export function drawOverlays(pen, { layout, view, shape, theme, call, state }) {
  const { plot } = layout;
  const area = matrixRect(view, plot, shape);
  /** @param {number} x0 @param {number} y0 @param {number} x1 @param {number} y1 */
  const line = (x0, y0, x1, y1) => {
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
  };
  pen.save();
  pen.beginPath();
  pen.rect(area.x, area.y, area.w, area.h);
  pen.clip();
  if (state.tiles && call.tile_rows) {
    const { perRow, perKey } = pixelsPerCell(view, plot);
    pen.strokeStyle = theme.grid;
    pen.lineWidth = 1;
    pen.beginPath();
    for (const { size, per, from, to, across } of [
      { size: call.tile_rows, per: perRow, from: view.q0, to: view.q1, across: true },
      { size: call.tile_keys, per: perKey, from: view.k0, to: view.k1, across: false },
    ]) {
      if (size * per < 4) continue;
      for (let at = Math.ceil(Math.max(0, from) / size) * size; at < to; at += size) {
        const { x, y } = pixelOf(view, plot, at, at);
        if (across) line(area.x, Math.round(y) + 0.5, area.x + area.w, Math.round(y) + 0.5);
        else line(Math.round(x) + 0.5, area.y, Math.round(x) + 0.5, area.y + area.h);
      }
    }
    pen.stroke();
  }
  if (state.borders && call.borders?.length) {
    pen.strokeStyle = theme.border;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const border of call.borders) {
      const { x, y } = pixelOf(view, plot, border, border);
      line(area.x, y, area.x + area.w, y);
      if (call.kind === "self") line(x, area.y, x, area.y + area.h);
    }
    pen.stroke();
  }
  if (state.band && call.window) {
    const shift = call.query_offset - call.key_offset;
    pen.strokeStyle = theme.border;
    pen.setLineDash([5, 4]);
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const [by, edge] of [
      [-call.window[0], 0],
      [call.window[1], 1],
    ]) {
      if (!Number.isFinite(by)) continue;
      const [from, to] = [
        pixelOf(view, plot, 0, shift + by + edge),
        pixelOf(view, plot, shape.rows, shape.rows + shift + by + edge),
      ];
      line(from.x, from.y, to.x, to.y);
    }
    pen.stroke();
  }
  pen.restore();
  pen.strokeStyle = theme.line;
  pen.lineWidth = 1;
  pen.strokeRect(area.x - 0.5, area.y - 0.5, area.w + 1, area.h + 1);
}
