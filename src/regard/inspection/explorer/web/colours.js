// Colour maps: a few anchors joined in OKLab and walked at even steps, so equal steps of value look equal.

/** @param {number} part sRGB 0..1 @returns {number} linear light */
const linearLight = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
/** @param {number} part */
const displayLight = (part) => (part <= 0.0031308 ? 12.92 * part : 1.055 * part ** (1 / 2.4) - 0.055);

/** @param {string} hex "#rrggbb" @returns {number[]} red, green, blue in 0..255 */
export function rgbOfHex(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** @param {ArrayLike<number>} rgb 0..255 @returns {number[]} OKLab lightness, a, b */
export function oklab(rgb) {
  const [r, g, b] = [0, 1, 2].map((at) => linearLight(rgb[at] / 255));
  const l = Math.cbrt(0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b);
  const m = Math.cbrt(0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b);
  const s = Math.cbrt(0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b);
  return [
    0.2104542553 * l + 0.793617785 * m - 0.0040720468 * s,
    1.9779984951 * l - 2.428592205 * m + 0.4505937099 * s,
    0.0259040371 * l + 0.7827717662 * m - 0.808675766 * s,
  ];
}

/** @param {number[]} lab OKLab @returns {number[]} 0..255, clipped to what a screen shows */
export function rgbOfOklab([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((part) => Math.round(255 * displayLight(Math.min(1, Math.max(0, part)))));
}

/**
 * 256 colours through the anchors, at equal distances in OKLab along the way.
 * @param {string[]} anchors "#rrggbb", at least two
 * @returns {Uint8Array} 256 x 3
 */
export function ramp(anchors) {
  const points = anchors.map((hex) => oklab(rgbOfHex(hex)));
  const lengths = points
    .slice(1)
    .map((point, at) => Math.hypot(...point.map((x, axis) => x - points[at][axis])));
  const total = lengths.reduce((sum, length) => sum + length, 0);
  const table = new Uint8Array(768);
  let [leg, before] = [0, 0];
  for (let code = 0; code < 256; code += 1) {
    const way = (code / 255) * total;
    while (leg < lengths.length - 1 && way > before + lengths[leg]) {
      before += lengths[leg];
      leg += 1;
    }
    const part = Math.min(1, (way - before) / lengths[leg]);
    const lab = points[leg].map((x, axis) => x + part * (points[leg + 1][axis] - x));
    table.set(rgbOfOklab(lab), 3 * code);
  }
  return table;
}

/**
 * Two ramps that meet between codes 127 and 128, so that 0 takes on the colour of neither sign.
 * @param {string[]} anchors an odd number; the middle one is that of 0
 * @returns {Uint8Array} 256 x 3
 */
export function signedRamp(anchors) {
  const middle = (anchors.length - 1) / 2;
  const [below, above] = [ramp(anchors.slice(0, middle + 1)), ramp(anchors.slice(middle))];
  const table = new Uint8Array(768);
  for (let code = 0; code < 256; code += 1) {
    const at = 3 * (code < 128 ? 2 * code : 2 * code - 255);
    table.set((code < 128 ? below : above).subarray(at, at + 3), 3 * code);
  }
  return table;
}

/** Weights on a light page: paper for nothing, night for all; lightness falls all the way. */
export const sequential = ramp(["#fbf8f1", "#fbd7a5", "#f4976c", "#d2567c", "#8f3a93", "#4b2a80", "#171239"]);
/** Weights on a dark page: night for nothing; lightness rises all the way. */
export const sequentialDark = ramp([
  "#1b1b27",
  "#3a2c68",
  "#83388f",
  "#cf557f",
  "#f4976c",
  "#fbd7a5",
  "#fffaf0",
]);
/** Signed numbers: blue below 0, paper at 0, orange above. */
export const diverging = signedRamp([
  "#0b3c78",
  "#3f83c4",
  "#a9cbe6",
  "#f6f4f0",
  "#f2c08c",
  "#cf7422",
  "#7a3403",
]);
export const divergingDark = signedRamp([
  "#9fd0ff",
  "#4f90d0",
  "#27466b",
  "#1b1c22",
  "#6a4420",
  "#d07f2e",
  "#ffd39b",
]);

/** Cells that hold no number (NaN), on a light and on a dark page: in neither map. */
export const missing = { light: [158, 163, 160], dark: [98, 104, 101] };
/** Where nothing may attend, which is -Infinity among values that are drawn. */
export const masked = { light: [219, 220, 216], dark: [52, 55, 54] };

/** @param {Element} [node] @returns {boolean} whether the explorer around it is dark now */
export function isDark(node) {
  const theme = /** @type {HTMLElement|null|undefined} */ (node?.closest?.(".regard"))?.dataset.theme;
  if (theme) return theme === "dark";
  return typeof matchMedia === "function" && matchMedia("(prefers-color-scheme: dark)").matches;
}

/** @param {Element} node @returns {(name: string) => string} what the page's style says of a colour */
export function pageColours(node) {
  const style = getComputedStyle(node);
  return (name) => style.getPropertyValue(`--${name}`).trim() || "#888";
}

/** @param {"sequential"|"diverging"} kind @param {boolean} dark @returns {Uint8Array} */
export function tableFor(kind, dark) {
  if (kind === "diverging") return dark ? divergingDark : diverging;
  return dark ? sequentialDark : sequential;
}

/**
 * Where a value lies on the colour bar.
 * @param {number} value
 * @param {Scale} scale "power" is the root that shows weak weights; "rank" takes ranks in 0..1
 * @param {number} low value of the bar's lower end; "log" needs it above 0
 * @param {number} high value of its upper end
 * @returns {number} 0..1, clamped; NaN for NaN
 */
export function toUnit(value, scale, low, high) {
  if (Number.isNaN(value)) return NaN;
  if (!(high > low)) return value >= high ? 1 : 0;
  let unit;
  if (scale === "log") unit = value > 0 ? Math.log(value / low) / Math.log(high / low) : 0;
  else unit = (value - low) / (high - low);
  unit = Math.min(1, Math.max(0, unit));
  return scale === "power" ? unit ** 0.4 : unit;
}

/**
 * The value at a place of the colour bar: the inverse of `toUnit` inside the bar.
 * @param {number} unit 0..1
 * @param {Scale} scale @param {number} low @param {number} high
 */
export function fromUnit(unit, scale, low, high) {
  if (scale === "log") return low * (high / low) ** unit;
  return low + (high - low) * (scale === "power" ? unit ** 2.5 : unit);
}

/**
 * @param {number} unit 0..1, or NaN
 * @param {Uint8Array} [table]
 * @returns {number[]} red, green, blue
 */
export function colourOf(unit, table = sequential) {
  if (Number.isNaN(unit)) return missing.light;
  const code = Math.round(255 * Math.min(1, Math.max(0, unit)));
  return [table[3 * code], table[3 * code + 1], table[3 * code + 2]];
}

/** @param {number[]} rgb @returns {string} */
export function cssOf([r, g, b], alpha = 1) {
  return alpha === 1 ? `rgb(${r} ${g} ${b})` : `rgb(${r} ${g} ${b} / ${alpha})`;
}

/**
 * The nearest place on a map of a colour; NaN where the missing colour is nearer.
 * @param {ArrayLike<number>} rgb 0..255
 * @param {Uint8Array} [table]
 * @returns {number} 0..1 or NaN
 */
export function unitOf(rgb, table = sequential) {
  let [best, least] = [0, Infinity];
  for (let code = 0; code < 256; code += 1) {
    const far =
      (rgb[0] - table[3 * code]) ** 2 +
      (rgb[1] - table[3 * code + 1]) ** 2 +
      (rgb[2] - table[3 * code + 2]) ** 2;
    if (far < least) [best, least] = [code, far];
  }
  for (const none of Object.values(missing)) {
    if ((rgb[0] - none[0]) ** 2 + (rgb[1] - none[1]) ** 2 + (rgb[2] - none[2]) ** 2 < least) return NaN;
  }
  return best / 255;
}

/**
 * Ends of a colour bar that hold for every head: fixed, not stretched to what one head happens to hold.
 * @param {Scale} scale
 * @param {number} keys keys of the call: the weakest colour is a sixteenth of an even share of them
 * @param {number} largest largest value drawn, for the scales that start at 0
 * @param {number} [top] what no value is above
 * @returns {[number, number]}
 */
export function limitsFor(scale, keys, largest, top = 1) {
  if (scale === "log") return [top * 2 ** -Math.max(12, Math.ceil(Math.log2(Math.max(1, keys))) + 4), top];
  if (scale === "rank") return [0, 1];
  if (!(largest > 0)) return [0, 1];
  const step = 10 ** (Math.floor(Math.log10(largest)) - 1);
  return [
    0,
    Math.min(Math.max(1, largest), Number((Math.ceil(largest / step - 1e-9) * step).toPrecision(2))),
  ];
}

/** Bins of a histogram: quarters of an octave up to 2^16, and that of 1. */
const HISTOGRAM_BINS = 161,
  HISTOGRAM_ONE = 96;

/**
 * How many values lie where on a log scale, added to what was counted before.
 * @param {ArrayLike<number>} values @param {Float64Array} [counts]
 */
export function histogramOf(values, counts = new Float64Array(HISTOGRAM_BINS)) {
  for (let at = 0; at < values.length; at += 1) if (values[at] > 0) counts[histogramBin(values[at])] += 1;
  return counts;
}

/** The bin of a value above 0. @param {number} value */
export function histogramBin(value) {
  return Math.min(HISTOGRAM_BINS - 1, Math.max(0, Math.round(HISTOGRAM_ONE + 4 * Math.log2(value))));
}

/**
 * Ends of the colour bar.
 * @param {string} range "all": the same for all heads; "head": from what is drawn; "low:high": these, locked
 * @param {Scale} scale @param {number} keys
 * @param {{all: number, head: number, counts: Float64Array|undefined, channel?: Channel}} known largest value of any
 *   head, largest drawn, and a histogram of what is drawn
 * @returns {Limits}
 */
export function barLimits(range, scale, keys, { all, head, counts, channel }) {
  const top = channel === "value" ? all || 1 : 1;
  if (scale === "rank") return [0, 1];
  if (range.includes(":")) {
    const [low, high] = range.split(":").map(Number);
    return [scale === "log" ? Math.max(low, 2 ** -24, high * 2 ** -24) : low, high];
  }
  if (range === "all") return limitsFor(scale, keys, all, top);
  if (!(head > 0) || !counts) return limitsFor(scale, keys, head, top);
  if (scale !== "log") return [0, head];
  // The first bin holds what is as good as nothing.
  const least = 0.05 * counts.subarray(1).reduce((sum, one) => sum + one, 0);
  let [bin, sum] = [1, counts[1]];
  while (sum < least) {
    bin += 1;
    sum += counts[bin];
  }
  return [Math.min(head / 2, 2 ** ((bin - HISTOGRAM_ONE) / 4)), head];
}
