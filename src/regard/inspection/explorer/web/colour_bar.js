import { fromUnit, histogramBin, toUnit } from "./colours.js";
import { channelNoun } from "./heads.js";
import { formatNumber } from "./scales.js";

/**
 * Values at which a colour bar is labelled.
 * @param {Scale} scale @param {number} low @param {number} high
 * @returns {number[]}
 */
export function barTicks(scale, low, high) {
  if (scale === "rank") return [0, 0.5, 1];
  if (scale === "log") {
    const first = Math.ceil(Math.log10(low) - 1e-9);
    const last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first) / 4));
    const powers = Array.from(
      { length: Math.floor((last - first) / every) + 1 },
      (_, n) => 10 ** (last - n * every),
    ).reverse();
    return powers[0] > low ? [low, ...powers] : powers;
  }
  return [0, 0.25, 0.5, 0.75, 1].map((unit) => fromUnit(unit, scale, low, high));
}

/**
 * @param {ColourLimits} what @param {BlockSize} options @param {Channel} channel
 * @returns {string} what the colours stand for
 */
export function barWords({ scale }, { queryBlock, keyBlock }, channel) {
  if (scale === "rank") return "rank in its row";
  const what =
    queryBlock === 1 && keyBlock === 1
      ? channelNoun(channel)
      : channel !== "mass"
        ? `largest ${channelNoun(channel)} of a block`
        : "mean mass of a block";
  return `${what}, ${scale} scale`;
}

/**
 * The colours with their numbers, and what the other marks mean.
 * @param {CanvasRenderingContext2D} pen
 * @param {{ x: number, y: number, width: number, below: boolean, theme: MapTheme, look: ColourLimits & { table: Uint8Array }, words: string, marks: [text: string, swatch: string | CanvasPattern][], counts?: Float64Array }} options
 *   below: whether the words stand under the bar; counts: a histogram of what is drawn, which stands above its colours
 */
export function drawColourBar(pen, { x, y, width, below, theme, look, words, marks, counts }) {
  const bar = Math.min(230, width * 0.62);
  if (counts && look.scale !== "rank") {
    const root = Math.sqrt(counts.subarray(1).reduce((most, one) => Math.max(most, one), 1));
    pen.fillStyle = theme.muted;
    for (let at = 0; at < bar; at += 1) {
      const value = fromUnit(at / Math.max(1, bar - 1), look.scale, look.low, look.high);
      const bin = value > 0 ? histogramBin(value) : 0;
      const tall = bin > 0 ? (14 * Math.sqrt(counts[bin])) / root : 0;
      pen.fillRect(x + at, y - 2 - tall, 1, tall);
    }
  }
  for (let at = 0; at < bar; at += 1) {
    const code = 3 * Math.round((255 * at) / Math.max(1, bar - 1));
    pen.fillStyle = `rgb(${look.table[code]} ${look.table[code + 1]} ${look.table[code + 2]})`;
    pen.fillRect(x + at, y, 1.5, 9);
  }
  pen.strokeStyle = theme.line;
  pen.lineWidth = 1;
  pen.strokeRect(x - 0.5, y - 0.5, bar + 1, 10);
  pen.font = "10.5px system-ui, sans-serif";
  pen.textBaseline = "top";
  pen.fillStyle = theme.muted;
  let free = -Infinity;
  for (const tick of barTicks(look.scale, look.low, look.high)) {
    const unit = toUnit(tick, look.scale, look.low, look.high);
    const text =
      look.scale === "rank"
        ? ["lowest", "middle", "highest"][Math.round(tick * 2)]
        : barPower(tick, look.scale);
    const wide = pen.measureText(text).width;
    const left = Math.min(x + bar - wide, Math.max(x - 6, x + unit * bar - wide / 2));
    pen.fillRect(x + unit * (bar - 1), y + 10, 1, 3);
    if (left < free) continue;
    pen.textAlign = "left";
    pen.fillText(text, left, y + 15);
    free = left + wide + 6;
  }
  pen.textBaseline = "middle";
  const start = below ? x : x + bar + 14;
  const most = x + width;
  let at = start;
  if (below) y += 31;
  /** @param {string} text @param {string | CanvasPattern | null} swatch */
  const put = (text, swatch) => {
    const wide = pen.measureText(text).width + (swatch ? 18 : 0) + 12;
    if (at > start && at + wide - 12 > most) {
      at = start;
      y += 15;
    }
    if (swatch) {
      pen.fillStyle = swatch;
      pen.fillRect(at, y - 1, 12, 11);
      pen.strokeRect(at - 0.5, y - 1.5, 13, 12);
    }
    pen.fillStyle = theme.muted;
    pen.fillText(text, at + (swatch ? 18 : 0), y + 5);
    at += wide;
  };
  put(words, null);
  at = start;
  y += 17;
  for (const [text, swatch] of marks) put(text, swatch);
}

/** @param {number} value @param {Scale} scale */
function barPower(value, scale) {
  if (scale !== "log" || value >= 0.01 || Math.abs(Math.log10(value) - Math.round(Math.log10(value))) > 1e-9)
    return formatNumber(value, 2);
  const digits = String(Math.round(-Math.log10(value)));
  return `10⁻${Array.from(digits, (digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)]).join("")}`;
}
