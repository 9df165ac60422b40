import { shown } from "./dom.js";
import { tokenOf } from "./passages.js";

/**
 * The two sides of a call as tokens: who asks (rows) and who is read (keys).
 * @param {Source} source @param {number} t @param {number} c
 * @returns {Promise<Sides>}
 */
export async function sidesOf(source, t, c) {
  const call = source.call(t, c),
    sequences = source.document.traces[t].sequences ?? [];
  /**
   * @param {number | null} number @param {number} size @param {number} offset
   * @returns {Promise<Side>}
   */
  const side = async (number, size, offset) => {
    const about = number === null || number === undefined ? null : sequences[number];
    const tokens =
      (about && (await source.tokens(t, number))) ??
      Array.from({ length: size }, (_, n) => String(n + offset));
    const kind = about?.kind ?? "index",
      shift = tokenOf(0, size, tokens.length, offset);
    /** @param {number} token */
    const indexAt = (token) => (token - shift >= 0 && token - shift < size ? token - shift : -1);
    return {
      tokens,
      kind,
      about,
      size,
      offset,
      /** @param {number} n */
      tokenAt: (n) => n + shift,
      indexAt,
      /** @param {number} n */
      textAt: (n) => tokens[n + shift] ?? "",
    };
  };
  const same =
    call.query_sequence === call.key_sequence && (call.query_sequence !== null || call.rows === call.keys);
  const query = await side(call.query_sequence, call.rows, call.query_offset);
  return { same, query, key: await side(call.key_sequence, call.keys, call.key_offset) };
}

/**
 * "12 ‘cat’": position and token, short.
 * @param {Side} side @param {number} n
 * @returns {string}
 */
export function nameToken(side, n) {
  return `${n + side.offset}${side.kind === "index" ? "" : ` ‘${shown(side.textAt(n))}’`}`;
}
