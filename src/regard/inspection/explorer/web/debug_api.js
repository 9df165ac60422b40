import { isDark, tableFor, unitOf } from "./colours.js";

const ROW_STATS = ["entropy", "max_weight", "first_mass", "local_mass", "distance", "sink_mass"];

/**
 * Return what a test or a curious reader may ask of an explorer; nothing here changes it.
 * @param {Promise<{root: HTMLElement, source: Source, state: State}>} opened
 * @returns {Readonly<Record<string, any>>} `ready` settles when everything in sight is drawn
 */
export function describeExplorer(opened) {
  /** @type {Awaited<typeof opened>|null} */
  let whole = null;
  opened.then(
    (value) => {
      whole = value;
    },
    () => {},
  );
  const source = async () => (await opened).source;
  return Object.freeze({
    ready: opened.then(async ({ state }) => {
      await state.views.map?.settled();
      return true;
    }),
    /** Settles when the map has drawn what the state asks for now. */
    drawn: async () => (await opened).state.views.map?.settled(),
    /**
     * The weight of query i on key j; null where the page does not hold it.
     * @param {number} t @param {number} c @param {number} h @param {number} i @param {number} j
     */
    cell: async (t, c, h, i, j) => {
      const from = await source();
      const weights = await from.weights(t, c, h);
      if (weights) return weights.values[i * weights.keys + j];
      const row = await from.row(t, c, h, i);
      return row?.exact ? row.values[j] : null;
    },
    /**
     * @param {number} t @param {number} c @param {number} h @param {number} queryBlock
     * @param {number} keyBlock @param {number} i @param {number} j @param {Channel} [channel]
     */
    block: async (t, c, h, queryBlock, keyBlock, i, j, channel = "mass") => {
      const tile = await (await source()).tile(t, c, h, queryBlock, keyBlock, i >> 8, j >> 8, channel);
      return tile ? tile[(i & 255) * 256 + (j & 255)] : null;
    },
    /**
     * 256 x 256 blocks, NaN beyond the edge; null where they do not follow from what the page holds.
     * @param {number} t @param {number} c @param {number} h @param {number} queryBlock
     * @param {number} keyBlock @param {number} tileRow @param {number} tileColumn
     * @param {Channel} [channel]
     */
    tile: async (t, c, h, queryBlock, keyBlock, tileRow, tileColumn, channel = "mass") =>
      (await source()).tile(t, c, h, queryBlock, keyBlock, tileRow, tileColumn, channel),
    /** @param {number} t @param {number} c @param {number} h */
    rowStats: async (t, c, h) => {
      const from = await source();
      const { values, shape } = await from.chunk(from.head(t, c, h).row_stats);
      const names = from.call(t, c).row_stats ?? ROW_STATS;
      const stats = names.map((name, k) => [
        name,
        Array.from(values.subarray(k * shape[1], (k + 1) * shape[1])),
      ]);
      return { ...Object.fromEntries(stats), bin: from.head(t, c, h).row_bin };
    },
    /** @param {number} t @param {number} c @param {number} h @param {Channel} [channel] */
    levels: async (t, c, h, channel = "mass") => (await source()).levels(t, c, h, channel),
    state: () =>
      whole && { ...whole.state.plain(), hash: whole.state.toHash(), ...whole.state.views.map?.look() },
    /** @param {number} i @param {number} j */
    pixel: (i, j) => whole?.state.views.map?.pixel(i, j) ?? null,
    /** @param {number} r @param {number} g @param {number} b */
    unit: (r, g, b) => unitOf([r, g, b], tableFor("sequential", isDark(whole?.root))),
  });
}
