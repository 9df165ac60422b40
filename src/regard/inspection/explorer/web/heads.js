import { headName } from "./passages.js";
import { formatNumber } from "./scales.js";

// Numbers of a head: what they are called, their unit, and whether they are shares of 1.
/** @type {Record<string, string[]>} */
const HEAD_NUMBERS = {
  entropy: ["entropy", "nats"],
  largest_weight: ["largest weight", "share"],
  largest_addition: ["largest norm added", ""],
  max_weight: ["mean of row maxima", "share"],
  distance: ["distance back", "tokens"],
  first_mass: ["mass of first keys", "share"],
  sink_mass: ["mass of learned sink", "share"],
  self: ["self", "share"],
  "previous-token": ["previous token", "share"],
  local: ["local", "share"],
  "next-token": ["next token", "share"],
  "duplicate-token": ["duplicate token", "share"],
  induction: ["induction", "share"],
  delimiter: ["delimiter", "share"],
  uniform: ["evenness", "share"],
  sink: ["sink", "share"],
  max_score: ["largest score", ""],
  coverage90: ["keys holding 90 %", "keys"],
};

/** Labels that heads may have. */
export const HEAD_LABELS = [
  "self",
  "previous-token",
  "next-token",
  "sink",
  "duplicate-token",
  "induction",
  "delimiter",
  "local",
  "uniform",
];

/**
 * How far sums of weights are from 1.
 * @param {Array<number|null>} trusts of each head; null where rows have no number
 * @returns {{good: boolean, text: string}}
 */
export function tellSums(trusts) {
  const sums = trusts.filter((trust) => trust !== null);
  const broken = trusts.length - sums.length;
  const largest = Math.max(0, ...sums);
  const told = sums.length ? [`weights sum to 1 within ${formatNumber(largest, 1)}`] : [];
  if (broken) told.unshift(`${broken} of ${trusts.length} heads have rows without a number`);
  return { good: !broken && largest <= 1e-3, text: told.join(", elsewhere ") };
}

/** @param {string} name of a number @returns {{name: string, title: string, unit: string, share: boolean}} */
export function numberOf(name) {
  const known = Object.hasOwn(HEAD_NUMBERS, name);
  const [title, unit] = known ? HEAD_NUMBERS[name] : [name.replaceAll("_", " "), ""];
  return { name, title, unit: unit === "share" ? "" : unit, share: unit === "share" };
}

/**
 * @param {Trace} trace
 * @returns {string[]} the numbers that any call of a trace has, in a fixed order
 */
export function numberNames(trace) {
  const there = new Set(
    trace.calls.flatMap(({ means = {} }) => Object.keys(means).filter((name) => means[name])),
  );
  const known = Object.keys(HEAD_NUMBERS).filter((name) => there.has(name));
  return [...known, ...[...there].filter((name) => !known.includes(name)).sort()];
}

/**
 * A head's number; with `other`, how much larger it is than there.
 * @param {Trace} trace @param {number} c @param {number} h @param {string} name
 * @param {Trace | null} [other]
 * @returns {number} NaN where there is none
 */
export function readNumber(trace, c, h, name, other = null) {
  const value = trace.calls[c]?.means?.[name]?.[h];
  const own = typeof value === "number" ? value : NaN;
  return other ? own - readNumber(other, c, h, name) : own;
}

/**
 * Heads in the order of a number.
 * @param {Head[]} heads in the model's order
 * @param {string} sort "model", a number's name (largest first), or the name after "-" (smallest first)
 * @param {(name: string, c: number, h: number) => number} read
 * @returns {Head[]} heads without the number come last
 */
export function sortHeads(heads, sort, read) {
  if (sort === "model") return heads;
  const [name, sign] = sort.startsWith("-") ? [sort.slice(1), -1] : [sort, 1];
  const numbers = new Map(heads.map(([c, h]) => [`${c}.${h}`, read(name, c, h)]));
  /** @param {Head} what */
  const of = ([c, h]) => {
    const value = numbers.get(`${c}.${h}`) ?? NaN;
    return Number.isNaN(value) ? -Infinity : sign * value;
  };
  return [...heads].sort((one, other) => of(other) - of(one) || one[0] - other[0] || one[1] - other[1]);
}

/**
 * Ends of the colours of a number over all heads: shares 0 to 1, others from 0 or the smallest.
 * @param {string} name @param {number[]} values @param {boolean} difference
 * @returns {[number, number]}
 */
export function numberRange(name, values, difference) {
  const known = values.filter(Number.isFinite);
  if (difference) {
    const most = Math.max(0, ...known.map(Math.abs)) || 1;
    return [-most, most];
  }
  if (numberOf(name).share) return [0, 1];
  const [low, high] = [Math.min(0, ...known), Math.max(0, ...known)];
  return high > low ? [low, high] : [low, low + 1];
}

/**
 * Whether a head is inside the brushed part of the scatter.
 * @param {Brush | null} brush @param {number} entropy @param {number} distance
 */
export function insideBrush(brush, entropy, distance) {
  if (!brush) return true;
  return entropy >= brush.e0 && entropy <= brush.e1 && distance >= brush.d0 && distance <= brush.d1;
}

/**
 * @param {Trace} trace @param {number} c @param {number} h @param {string} shown
 * @returns {string} a head in words: place, numbers, labels
 */
export function headSentence(trace, c, h, shown) {
  const call = trace.calls[c];
  const parts = [headName(trace.calls, c, h)];
  const names = [...new Set([shown, "entropy", "distance"])].filter((name) => call.means?.[name]);
  for (const name of names) {
    const { title, unit } = numberOf(name),
      value = readNumber(trace, c, h, name);
    parts.push(
      name === "distance"
        ? `distance ${distanceWords(value)}`
        : `${title} ${formatNumber(value)}${unit ? ` ${unit}` : ""}`,
    );
  }
  parts.push(...(call.labels?.[h] ?? []).map((label) => labelWords(label).name));
  return parts.join(", ");
}

/** @param {number} value tokens from a key on to its query @returns {string} "13.3 tokens back" */
export const distanceWords = (value) =>
  `${formatNumber(Math.abs(value))} token${Math.abs(value) === 1 ? "" : "s"} ${value < 0 ? "ahead" : "back"}`;

/** The numbers of a channel, one by one, in words. @param {Channel} channel @param {string} [weights] their word */
export const channelNoun = (channel, weights = "weight") =>
  channel === "value" ? "norm of what is added" : weights;

/**
 * The largest number that blocks of any head of a trace may hold.
 * @param {Trace} trace @param {Channel} channel @param {BlockSize} level
 */
export function largestOfAll({ calls }, channel, { queryBlock, keyBlock }) {
  // The mass of a block may be more than any weight in it.
  if (channel === "mass" && queryBlock * keyBlock > 1) return 1;
  const [name, unknown] = channel === "value" ? ["largest_addition", 0] : ["largest_weight", 1];
  return calls
    .flatMap(({ means }) => means?.[name] ?? unknown)
    .reduce((/** @type {number} */ most, one) => Math.max(most, one ?? 0), 0);
}

/**
 * @param {Label} label
 * @returns {{ name: string, ground: string, title: string }} a label's name and mean share, what it stands on,
 * and both in a sentence
 */
export function labelWords({ name, value, threshold, chance, rows }) {
  const counted = `${rows} ${rows === 1 ? "row" : "rows"}`;
  return {
    name: `${name} ${value.toFixed(2)}`,
    ground: `chance ${formatNumber(chance)}, ${counted}`,
    title:
      `${name}: mean share ${formatNumber(value)} over ${counted}, where even weights give ` +
      `${formatNumber(chance)}; named so from ${formatNumber(threshold)} on` +
      (name === "induction"
        ? "; whether it is one, random tokens said twice tell (inspection.record_repeats)"
        : ""),
  };
}
