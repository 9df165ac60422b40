// Rollout: what reaches a query's output through its layer and all below, in half by way of the residual stream.

/**
 * How many layers a rollout from this one goes through; 0 where there is none, or weights are not all known.
 * @param {Source} source @param {number} t @param {number} c
 */
export function countLayers(source, t, c) {
  const { calls } = source.document.traces[t];
  let count = 0;
  for (let at = calls[c]?.below === undefined ? -1 : c; at >= 0; at = calls[at].below ?? -1) {
    if (!source.ask && calls[at].head.some(({ weights }) => weights === null)) return 0;
    count += 1;
  }
  return count;
}

/**
 * How many layers the chosen query's rollout goes through; 0 where a head's weights are shown.
 * @param {Source} source @param {State} state
 */
export const rolledLayers = (source, { t, c, direction, rollout }) =>
  rollout && direction === "out" ? countLayers(source, t, c) : 0;

/** @param {number} layers */
export const rolledWords = (layers) =>
  layers > 1 ? `takes in through ${layers} layers` : "takes in through this layer";

/**
 * The shares of a query's output by token: half of what a position holds moves along the heads' mean weights,
 * layer by layer down; what no key gets stays.
 * @param {Source} source @param {number} t @param {number} c @param {number} row
 * @returns {Promise<Float32Array|null>} null where weights are not known
 */
export async function rollOut(source, t, c, row) {
  const path = `rollout/${t}/${c}/${row}`;
  if (source.ask) return source.served(path);
  const { calls } = source.document.traces[t];
  return source.keep(path, async () => {
    let shares = new Float64Array(calls[c].rows);
    shares[row] = 1;
    for (let at = c; at >= 0; at = calls[at].below ?? -1) {
      const next = shares.slice(),
        { head, keys } = calls[at];
      for (let h = 0; h < head.length; h++) {
        const { values } = (await source.weights(t, at, h)) ?? {};
        if (!values) return null;
        shares.forEach((share, i) => {
          const part = share / 2 / head.length;
          for (let j = 0; part && j < keys; j++) {
            const moved = part * values[i * keys + j];
            next[j] += moved;
            next[i] -= moved;
          }
        });
      }
      shares = next;
    }
    return Float32Array.from(shares);
  });
}
