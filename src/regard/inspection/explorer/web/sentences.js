import { shown } from "./dom.js";
import { channelNoun } from "./heads.js";
import { headCode, headName } from "./passages.js";
import { formatNumber } from "./scales.js";
import { hiddenBlocks } from "./tiles.js";

/**
 * @param {string} word @param {number} position @param {string | null | undefined} token
 * @returns {string} "query 1042 'cat'"
 */
export function nameOf(word, position, token) {
  return `${word} ${position}${token === undefined || token === null ? "" : ` '${shown(token)}'`}`;
}

/** @param {string} word @param {number} from @param {number} to */
const sentenceSpan = (word, from, to) => (to - from === 1 ? `${word} ${from}` : `${word}s ${from}–${to - 1}`);

/**
 * Rank of a weight among those above 0.
 * @param {ArrayLike<number>} values
 * @param {number} at
 * @returns {{rank: number, count: number}} equal weights share the better rank
 */
export function rankIn(values, at) {
  let [rank, count] = [1, 0];
  for (let j = 0; j < values.length; j += 1) {
    if (values[j] > 0) count += 1;
    if (values[j] > values[at]) rank += 1;
  }
  return { rank, count };
}

/**
 * What the map says of a cell.
 * @param {Cell & {call: Call, tokens: {rows: string[]|null, keys: string[]|null}, weight: number|null, rank?: number,
 *   count?: number|string, block?: (BlockSize & {value: number, channel: Channel})|null, heads: number,
 *   aggregate: Aggregate, channel?: Channel, rounded?: boolean, waiting?: boolean, forbidden?: boolean}} facts rounded: stored to 3.4 %; waiting: the
 *   block is on its way
 * @returns {string}
 */
export function cellSentence({
  row,
  key,
  call,
  tokens,
  weight,
  rank,
  count,
  block,
  heads,
  aggregate,
  channel = "mass",
  rounded = false,
  waiting = false,
  forbidden = false,
}) {
  const [rowAt, keyAt] = [row + call.query_offset, key + call.key_offset];
  const pair = `${nameOf("query", rowAt, tokens.rows?.[row])} to ${nameOf("key", keyAt, tokens.keys?.[key])}`;
  if (forbidden) return `${pair}: may not attend`;
  const over = heads > 1 ? `, ${aggregate === "max" ? "largest" : "mean"} of ${heads} heads` : "";
  if (weight !== null) {
    const place = rank
      ? weight > 0
        ? `, rank ${rank} of ${count}`
        : `; ${count === 1 ? "1 key has" : `${count} keys have`} weight`
      : "";
    const noun = channelNoun(channel, "");
    return `${pair}, ${noun}${noun && " "}${rounded && weight > 0 ? "about " : ""}${formatNumber(weight, rounded ? 2 : 3)}${place}${over}`;
  }
  if (!block || Number.isNaN(block.value))
    return `${pair}: ${waiting && !block ? "being computed …" : `no number is stored${over}`}`;
  const [i, j] = [Math.floor(row / block.queryBlock), Math.floor(key / block.keyBlock)];
  /**
   * @param {number} n @param {number} size @param {number} most
   * @returns {number[]}
   */
  const ends = (n, size, most) => [n * size, Math.min(most, (n + 1) * size)];
  const [q0, q1] = ends(i, block.queryBlock, call.rows).map((at) => at + call.query_offset);
  const [k0, k1] = ends(j, block.keyBlock, call.keys).map((at) => at + call.key_offset);
  const what =
    block.channel !== "mass" ? `largest ${channelNoun(block.channel)}` : q1 - q0 === 1 ? "mass" : "mean mass";
  return `${pair}: in the block of ${sentenceSpan("query", q0, q1).replace("querys", "queries")} and ${sentenceSpan("key", k0, k1)}, ${what} ${formatNumber(block.value, 3)}${over}`;
}

/**
 * @param {Source} source @param {number} t @param {Head[]} heads
 * @returns {boolean} whether the weights that the page holds of any of the heads are rounded to steps of 6.7 %
 */
export function areRounded(source, t, heads) {
  if (source.ask) return false;
  return heads.some(([c, h]) => {
    const { weights } = source.head(t, c, h);
    return weights === null || source.document.chunks[weights]?.code === "log8";
  });
}

/**
 * The exact weight of a cell in one or several heads, and its rank in the row, where the page knows.
 * @param {Source} source
 * @param {{ t: number, heads: Head[], row: number, key: number, aggregate: Aggregate, channel?: Channel }} options
 * @returns {Promise<{weight: number|null, rank?: number, count?: number|string}>}
 */
export async function readCell(source, { t, heads, row, key, aggregate, channel }) {
  /** @type {Float32Array[]} */
  const rows = [];
  for (const [c, h] of heads) {
    const found = await source.row(t, c, h, row, channel);
    if (!found && channel === "value") return { weight: null };
    if (!found?.exact) {
      const top = heads.length === 1 ? await source.topKeys(t, c, h, row, 32) : null;
      const place = top?.findIndex((edge) => edge.key === key) ?? -1;
      return !top || place < 0
        ? { weight: null }
        : { weight: top[place].weight, rank: place + 1, count: `${top.length} stored` };
    }
    rows.push(found.values);
  }
  if (!rows.length) return { weight: null };
  const values =
    rows.length === 1
      ? rows[0]
      : rows[0].map((_, j) => {
          const all = rows.map((one) => one[j]);
          return aggregate === "max" ? Math.max(...all) : all.reduce((sum, one) => sum + one, 0) / all.length;
        });
  return { weight: values[key], ...rankIn(values, key) };
}

/**
 * What is drawn now, in words: heads, blocks, and what was done to the numbers.
 * @param {Pick<TileRequest, "heads" | "aggregate" | "channel" | "level" | "hideSink"> & { left: number, rowRank: boolean, calls: Call[], rounded?: boolean, waiting?: boolean, narrow?: number }} what narrow: keys of the narrowest blocks of other heads
 * @returns {string}
 */
export function mapSentence({
  heads,
  left,
  aggregate,
  channel,
  level,
  hideSink,
  rowRank,
  calls,
  rounded = false,
  waiting = false,
  narrow = 0,
}) {
  const names = heads
    .slice(0, 6)
    .map((head) => headCode(calls, head))
    .join(", ");
  const who =
    heads.length === 1
      ? `L${headName(calls, ...heads[0]).slice(1)}${calls[heads[0][0]]?.kind === "cross" ? " (cross-attention)" : ""}`
      : `${aggregate === "max" ? "Largest" : "Mean"} of ${heads.length} heads (layer.head ${names}${heads.length > 6 ? ", …" : ""})`;
  const exact = level.queryBlock === 1 && level.keyBlock === 1;
  const what = exact
    ? `${channelNoun(channel, "weights")}${rounded ? " within 3.4 %" : ""}`
    : `${channel === "mass" ? "mean mass" : `largest ${channelNoun(channel)}`} in blocks of ${level.queryBlock} × ${level.keyBlock}`;
  const notes = [];
  if (waiting) notes.push("being computed …");
  if (left) notes.push(`${left} selected head${left === 1 ? "" : "s"} of another size left out`);
  if (hideSink) {
    const keys = hiddenBlocks(level.keyBlock) * level.keyBlock;
    notes.push(
      `keys 0–${keys - 1} hidden, ${exact || level.queryBlock === 1 ? "the rest renormalised" : "the rest of each block row renormalised"}`,
    );
  }
  if (narrow && narrow < level.keyBlock)
    notes.push(
      `holds more than the ${narrow === 1 ? "cells" : `blocks of ${narrow} keys`} of heads stored finer`,
    );
  if (rowRank) notes.push("coloured by rank among the blocks of a row");
  return [`${who} · ${what}`, ...notes].join(" · ");
}
