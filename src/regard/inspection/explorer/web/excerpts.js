// The visible part of a head as numbers: for files, and for laying two traces over each other.

const EXCERPT_TILE = 256;
/** Heads that are drawn together. */
const EXCERPT_HEADS = 64;

/**
 * The finest blocks of which at most `most` cover each axis of a view; the coarsest when none are few enough.
 * @param {BlockSize[]} levels finest first
 * @param {View} view in cells @param {number} most
 * @returns {BlockSize|null}
 */
export function chooseLevel(levels, view, most) {
  /** @param {BlockSize} what */
  const fits = ({ queryBlock, keyBlock }) => {
    const [rows, columns] = [
      [view.q0, view.q1, queryBlock],
      [view.k0, view.k1, keyBlock],
    ].map(([from, to, block]) => Math.ceil(to / block) - Math.floor(from / block));
    return rows <= most && columns <= most;
  };
  return levels.find(fits) ?? levels.at(-1) ?? null;
}

/** Block sizes that all lists hold, in the order of the first. @param {BlockSize[][]} lists */
export function sharedLevels([first, ...others]) {
  /** @param {BlockSize} one */
  const isShared = ({ queryBlock, keyBlock }) =>
    others.every((list) => list.some((two) => two.queryBlock === queryBlock && two.keyBlock === keyBlock));
  return first.filter(isShared);
}

/**
 * Blocks of a head under a view, cut at block borders.
 * @param {Source} source @param {number} t @param {number} c @param {number} h
 * @param {View} view @param {Channel} channel
 * @param {BlockSize} level
 * @returns {Promise<Excerpt|null>} null when blocks of this size are not known
 */
export async function readBlocks(source, t, c, h, view, channel, { queryBlock, keyBlock }) {
  const call = source.call(t, c),
    I = Math.ceil(call.rows / queryBlock),
    J = Math.ceil(call.keys / keyBlock);
  const row0 = Math.max(0, Math.floor(view.q0 / queryBlock)),
    row1 = Math.min(I, Math.ceil(view.q1 / queryBlock));
  const column0 = Math.max(0, Math.floor(view.k0 / keyBlock)),
    column1 = Math.min(J, Math.ceil(view.k1 / keyBlock));
  const rows = Math.max(0, row1 - row0),
    columns = Math.max(0, column1 - column0);
  const values = new Float32Array(rows * columns).fill(NaN);
  for (let up = Math.floor(row0 / EXCERPT_TILE); up * EXCERPT_TILE < row1; up++) {
    for (let across = Math.floor(column0 / EXCERPT_TILE); across * EXCERPT_TILE < column1; across++) {
      const tile = await source.tile(t, c, h, queryBlock, keyBlock, up, across, channel);
      if (!tile) return null;
      const top = up * EXCERPT_TILE,
        left = across * EXCERPT_TILE;
      const from = Math.max(column0, left),
        to = Math.min(column1, left + EXCERPT_TILE);
      for (let i = Math.max(row0, top); i < Math.min(row1, top + EXCERPT_TILE); i++) {
        const start = (i - top) * EXCERPT_TILE + from - left;
        values.set(tile.subarray(start, start + to - from), (i - row0) * columns + from - column0);
      }
    }
  }
  return { values, rows, columns, row0, column0, queryBlock, keyBlock };
}

/**
 * Values of an excerpt as they are drawn: -Infinity, which has a colour of its own, where nothing may attend.
 * @param {Excerpt} excerpt @param {Call} call @param {{forbids: Function}} mask
 * @param {Float32Array} [values] in place of its own
 */
export function drawnValues(excerpt, call, mask, values = excerpt.values) {
  const { columns, row0, column0, queryBlock, keyBlock } = excerpt;
  return values.map((value, n) => {
    const [row, key] = [(row0 + Math.floor(n / columns)) * queryBlock, (column0 + (n % columns)) * keyBlock];
    return mask.forbids(call, row, key, queryBlock, keyBlock) ? -Infinity : value;
  });
}

/**
 * The heads that are drawn together: those selected of the size of the one looked at.
 * @param {Source} source @param {Pick<State, "t" | "c" | "h" | "selection">} state
 * @returns {Head[]}
 */
export function headsTogether(source, { t, c, h, selection }) {
  const here = source.call(t, c);
  if (!here) return [[c, h]];
  const alike = (selection ?? []).filter(
    ([other]) => source.call(t, other).rows === here.rows && source.call(t, other).keys === here.keys,
  );
  return alike.length > 1 ? alike.slice(0, EXCERPT_HEADS) : [[c, h]];
}

/**
 * What the map shows of the heads of a state, in the finest blocks of which at most `most` cover an axis.
 * @param {Source} source
 * @param {Pick<State, "t" | "c" | "h" | "selection" | "aggregate" | "view" | "channel">} state
 * @param {number} [most]
 * @returns {Promise<MapExcerpt|null>}
 */
export async function readExcerpt(source, state, most = 1024) {
  const { t, view } = state,
    here = source.call(t, state.c);
  if (!here?.heads) return null;
  const heads = headsTogether(source, state);
  let channel = state.channel;
  /** @param {Channel} name */
  const levelsOf = (name) => heads.map(([c, h]) => source.levels(t, c, h, name));
  let levels = levelsOf(channel);
  if (levels.some((list) => !list.length)) {
    channel = "mass";
    levels = levelsOf(channel);
  }
  const level = chooseLevel(sharedLevels(levels), view, most);
  if (!level) return null;
  /** @type {Excerpt|null} */
  let whole = null;
  for (const [c, h] of heads) {
    const part = await readBlocks(source, t, c, h, view, channel, level);
    if (!part) return null;
    if (!whole) whole = { ...part, values: part.values.slice() };
    else
      for (let n = 0; n < part.values.length; n++) {
        whole.values[n] =
          state.aggregate === "max"
            ? Math.max(whole.values[n], part.values[n])
            : whole.values[n] + part.values[n];
      }
  }
  if (!whole) return null;
  if (heads.length > 1 && state.aggregate !== "max")
    for (let n = 0; n < whole.values.length; n++) whole.values[n] /= heads.length;
  return { ...whole, channel, heads, exact: level.queryBlock === 1 && level.keyBlock === 1 };
}
