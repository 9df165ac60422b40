// Where the views get their numbers: chunks in the page or from a server, and what follows from them exactly.

import { bytesFromBase64, decodeChunk } from "./codes.js";
import { Connection } from "./connection.js";
import { largestIndices } from "./passages.js";
import { reduceMass, reduceMax } from "./pyramid.js";

const SOURCE_TILE = 256;
const SOURCE_CACHE_BYTES = 160e6;

/** @typedef {{value: Promise<any>, bytes: number}} Kept */

/** The document, and everything it names. */
export class Source {
  /**
   * @param {PageDocument} pageDocument
   * @param {(name: string) => Promise<Uint8Array>} load bytes of a chunk
   * @param {((path: string, signal?: AbortSignal) => Promise<Float32Array|null>)|null} ask the server for
   *   numbers; null: no server
   */
  constructor(pageDocument, load, ask = null) {
    this.document = pageDocument;
    this.load = load;
    this.ask = pageDocument.exact === "served" ? ask : null;
    /** @type {Map<string, Kept>} */
    this.cache = new Map();
    this.bytes = 0;
    /** What the server was asked for and has not answered. @type {Map<string, {users: number, end: AbortController}>} */
    this.asked = new Map();
    /** @type {Connection|null} */
    this.connection = null;
  }

  /**
   * Read the page that the script runs in.
   * @param {Document|Element} [root]
   * @returns {Source}
   */
  static fromPage(root = document) {
    const pageDocument = JSON.parse(root.querySelector("#regard-document")?.textContent ?? "");
    if (pageDocument.exact === "served") {
      const connection = new Connection();
      const source = new Source(
        pageDocument,
        async (name) => {
          const { ok, status, bytes } = await connection.ask(`chunk/${encodeURIComponent(name)}`);
          if (!ok) throw new Error(`the server has no chunk ${name}: ${status}`);
          return new Uint8Array(bytes);
        },
        async (path, signal) => {
          const { ok, bytes } = await connection.ask(path, signal);
          return ok ? new Float32Array(bytes) : null;
        },
      );
      source.connection = connection;
      return source;
    }
    const texts = new Map();
    for (const element of root.querySelectorAll("script.regard-chunks")) {
      for (const line of element.textContent.split("\n")) {
        const colon = line.indexOf(":");
        if (colon > 0) texts.set(line.slice(0, colon), line.slice(colon + 1));
      }
    }
    return new Source(pageDocument, async (name) => bytesFromBase64(texts.get(name)));
  }

  /**
   * A chunk, decoded.
   * @param {string|null} [name]
   * @returns {Promise<any>} as decodeChunk; null for no name
   */
  async chunk(name) {
    if (name === null || name === undefined) return null;
    const entry = this.document.chunks[name];
    if (!entry) throw new Error(`the page has no chunk ${name}`);
    return this.keep(`chunk ${name}`, async () => decodeChunk(entry, await this.load(name)));
  }

  /**
   * @param {number} t @param {number} c
   * @returns {Call}
   */
  call(t, c) {
    return this.document.traces[t].calls[c];
  }

  /**
   * @param {number} t @param {number} c @param {number} h
   * @returns {HeadRecord}
   */
  head(t, c, h) {
    return this.call(t, c).head[h];
  }

  /**
   * All weights of a head, if the page has them; of channel "value", times what a weight of 1 on the key adds.
   * @param {number} t @param {number} c @param {number} h @param {Channel} [channel]
   * @returns {Promise<{values: Float32Array, rows: number, keys: number}|null>}
   */
  async weights(t, c, h, channel = "mass") {
    const head = this.head(t, c, h);
    const { values } = (await this.chunk(head.weights)) ?? {};
    const { rows, keys } = this.call(t, c);
    if (channel !== "value" || !values) return values ? { values, rows, keys } : null;
    const norms = (await this.chunk(head.value_norms))?.values;
    if (!norms) return null;
    return this.keep(`value ${t} ${c} ${h}`, async () => ({
      values: values.map(
        (/** @type {number} */ one, /** @type {number} */ at) => one && one * norms[at % keys],
      ),
      rows,
      keys,
    }));
  }

  /**
   * Block sizes that can be drawn, finest first: each twice the one before, up to a single block.
   * @param {number} t @param {number} c @param {number} h @param {Channel} [channel]
   * @returns {BlockSize[]}
   */
  levels(t, c, h, channel = "mass") {
    const call = this.call(t, c);
    const finest = this.finest(t, c, h, channel);
    /** @type {BlockSize[]} */
    const found = [];
    if (!finest) return found;
    for (let times = 1; ; times *= 2) {
      const level = { queryBlock: finest.queryBlock * times, keyBlock: finest.keyBlock * times };
      found.push(level);
      if (level.queryBlock >= call.rows && level.keyBlock >= call.keys) return found;
    }
  }

  /**
   * The finest blocks that can be drawn, 1 x 1 where every weight is known.
   * @param {number} t @param {number} c @param {number} h @param {Channel} [channel]
   * @returns {BlockSize|null} null: nothing is known in this channel
   */
  finest(t, c, h, channel = "mass") {
    const head = this.head(t, c, h);
    if (channel === "value" ? head.value_norms : head.weights !== null || this.ask)
      return { queryBlock: 1, keyBlock: 1 };
    const stored = head.levels.find((level) => level[channel]);
    return stored ? { queryBlock: stored.query_block, keyBlock: stored.key_block } : null;
  }

  /**
   * A tile of 256 x 256 blocks, row by row; NaN beyond the edge.
   * @param {number} t @param {number} c @param {number} h @param {number} queryBlock
   * @param {number} keyBlock @param {number} tileRow @param {number} tileColumn @param {Channel} channel
   * @param {AbortSignal} [signal] that nobody waits any more
   * @returns {Promise<Float32Array|null>} null: blocks of this size do not follow from what is known
   */
  async tile(t, c, h, queryBlock, keyBlock, tileRow, tileColumn, channel, signal) {
    const level = await this.level(t, c, h, queryBlock, keyBlock, channel);
    if (level) return sourceCut(level, tileRow, tileColumn);
    signal?.throwIfAborted();
    return this.served(
      `tile/${t}/${c}/${h}/${queryBlock}/${keyBlock}/${tileRow}/${tileColumn}?channel=${channel}`,
      signal,
    );
  }

  /**
   * Whether the page itself has blocks of a size, which then are there at once.
   * @param {number} t @param {number} c @param {number} h @param {BlockSize} level @param {Channel} channel
   */
  holds(t, c, h, { queryBlock, keyBlock }, channel) {
    const { weights, levels } = this.head(t, c, h);
    return weights !== null || sourceCoarsest(levels, queryBlock, keyBlock, channel) !== null;
  }

  /**
   * Numbers of the server, asked for once, and given up as soon as nobody waits for them.
   * @param {string} path @param {AbortSignal} [signal]
   * @returns {Promise<Float32Array|null>} null without a server
   */
  async served(path, signal) {
    const { ask, asked } = this;
    if (!ask) return null;
    const value = this.keep(path, async () => {
      const request = { users: 0, end: new AbortController() };
      asked.set(path, request);
      try {
        return await ask(path, request.end.signal);
      } finally {
        if (asked.get(path) === request) asked.delete(path);
      }
    });
    const request = asked.get(path);
    if (request) {
      request.users += 1;
      signal?.addEventListener("abort", () => {
        request.users -= 1;
        if (request.users || asked.get(path) !== request) return;
        asked.delete(path);
        this.cache.delete(path);
        request.end.abort();
      });
    }
    return value;
  }

  /**
   * All blocks of one size, from what the page carries.
   * @param {number} t @param {number} c @param {number} h @param {number} queryBlock
   * @param {number} keyBlock @param {Channel} channel
   * @returns {Promise<Blocks|null>}
   */
  async level(t, c, h, queryBlock, keyBlock, channel) {
    const head = this.head(t, c, h);
    // Of stored levels, the coarsest one that the blocks are made of leaves the least to do.
    const from = head.weights === null ? sourceCoarsest(head.levels, queryBlock, keyBlock, channel) : null;
    if (channel === "value" ? !head.value_norms : !from && head.weights === null) return null;
    return this.keep(`level ${t} ${c} ${h} ${queryBlock} ${keyBlock} ${channel}`, async () => {
      const call = this.call(t, c);
      const [up, across] = from ? [from.query_block, from.key_block] : [1, 1];
      const { values, shape = [] } = from
        ? await this.chunk(from[channel])
        : await this.weights(t, c, h, channel);
      const [I, J] = from ? shape : [call.rows, call.keys];
      if (queryBlock === up && keyBlock === across) return { values, I, J };
      if (channel !== "mass") return reduceMax(values, I, J, queryBlock / up, keyBlock / across);
      const rows = from ? (await this.chunk(from.rows)).values : sourceLiving(values, I, J);
      return reduceMass(values, rows, I, J, queryBlock / up, keyBlock / across);
    });
  }

  /**
   * The weights of a query, or what is known of them.
   * @param {number} t @param {number} c @param {number} h @param {number} i @param {Channel} [channel]
   * @returns {Promise<(Line & {rows: number})|null>}
   *   with exact, a weight for each key; else for each `bin` keys their largest ("largest"), or what an
   *   average of `rows` queries around it gives to them ("mass")
   */
  async row(t, c, h, i, channel) {
    const { rows, keys } = this.call(t, c);
    if (!(i >= 0 && i < rows)) return null;
    const head = this.head(t, c, h);
    const weights = await this.weights(t, c, h, channel);
    if (channel === "value" && !weights) return null;
    const whole = { exact: true, bin: 1, of: /** @type {const} */ ("weights"), rows: 1 };
    if (weights) return { values: weights.values.slice(i * keys, (i + 1) * keys), ...whole };
    const served = await this.served(`row/${t}/${c}/${h}/${i}`);
    if (served) return { values: served, ...whole };
    if (i === rows - 1 && head.last_row !== null) {
      const { values } = await this.chunk(head.last_row);
      const bin = head.last_row_bin;
      return bin === 1 ? { values, ...whole } : { values, exact: false, bin, of: "largest", rows: 1 };
    }
    const stored = head.levels[0];
    if (!stored) return null;
    const { values, shape } = await this.chunk(stored.mass);
    const block = Math.floor(i / stored.query_block);
    const part = values.slice(block * shape[1], (block + 1) * shape[1]);
    const around = Math.min(stored.query_block, rows - block * stored.query_block);
    return { values: part, exact: false, bin: stored.key_block, of: "mass", rows: around };
  }

  /**
   * The weights on a key, or what is known of them.
   * @param {number} t @param {number} c @param {number} h @param {number} j
   * @returns {Promise<(Line & {keys: number})|null>}
   *   with exact, a weight for each query; else for each `bin` queries the mean of what they give to the
   *   `keys` keys around it
   */
  async column(t, c, h, j) {
    const { rows, keys } = this.call(t, c);
    if (!(j >= 0 && j < keys)) return null;
    const weights = await this.weights(t, c, h);
    const whole = { exact: true, bin: 1, of: /** @type {const} */ ("weights"), keys: 1 };
    if (weights) {
      const values = Float32Array.from({ length: rows }, (_, i) => weights.values[i * keys + j]);
      return { values, ...whole };
    }
    const served = await this.served(`column/${t}/${c}/${h}/${j}`);
    if (served) return { values: served, ...whole };
    const stored = this.head(t, c, h).levels[0];
    if (!stored) return null;
    const { values, shape } = await this.chunk(stored.mass);
    const block = Math.floor(j / stored.key_block);
    const part = Float32Array.from({ length: shape[0] }, (_, i) => values[i * shape[1] + block]);
    const around = Math.min(stored.key_block, keys - block * stored.key_block);
    return { values: part, exact: false, bin: stored.query_block, of: "mass", keys: around };
  }

  /**
   * The keys that a query attends to most, largest weight first, among equals the smaller key.
   * @param {number} t @param {number} c @param {number} h @param {number} i
   * @param {number} k how many at most
   * @returns {Promise<{key: number, weight: number}[]|null>} null: not known
   */
  async topKeys(t, c, h, i, k) {
    const head = this.head(t, c, h);
    if (head.weights === null && !this.ask && head.top_keys !== null) {
      const [keys, weights] = await Promise.all([this.chunk(head.top_keys), this.chunk(head.top_weights)]);
      const width = keys.shape[1];
      const found = [];
      for (let place = i * width; place < (i + 1) * width && found.length < k; place += 1) {
        if (keys.values[place] >= 0) found.push({ key: keys.values[place], weight: weights.values[place] });
      }
      return found;
    }
    const row = await this.row(t, c, h, i);
    if (!row?.exact) return null;
    return largestIndices(row.values, k).map((key) => ({ key, weight: row.values[key] }));
  }

  /**
   * @param {number} t
   * @param {number|null} sequence its number in the trace
   * @returns {Promise<string[]|null>}
   */
  async tokens(t, sequence) {
    const found = sequence === null ? null : this.document.traces[t].sequences[sequence];
    return found ? this.chunk(found.tokens) : null;
  }

  /**
   * What `make` gives, made once, for as long as there is room.
   * @template T
   * @param {string} name @param {() => Promise<T>} make
   * @returns {Promise<T>}
   */
  async keep(name, make) {
    let kept = this.cache.get(name);
    if (kept) {
      this.cache.delete(name);
      this.cache.set(name, kept);
      return kept.value;
    }
    kept = { value: make(), bytes: 0 };
    this.cache.set(name, kept);
    try {
      const value = await kept.value;
      kept.bytes = sourceBytes(value);
    } catch (error) {
      if (this.cache.get(name) === kept) this.cache.delete(name);
      throw error;
    }
    this.bytes += kept.bytes;
    this.evict(kept);
    return kept.value;
  }

  /**
   * Drop what was not asked for the longest, until there is room.
   * @param {Kept} latest
   */
  evict(latest) {
    for (const [name, kept] of this.cache) {
      if (this.bytes <= SOURCE_CACHE_BYTES) return;
      if (kept === latest || !kept.bytes) continue;
      this.cache.delete(name);
      this.bytes -= kept.bytes;
    }
  }
}

/** @param {any} value */
function sourceBytes(value) {
  const values = value?.values ?? value;
  return values?.byteLength ?? (Array.isArray(values) ? 32 * values.length : 64);
}

/**
 * @param {StoredLevel[]} levels @param {number} queryBlock @param {number} keyBlock
 * @param {Channel} channel
 * @returns {StoredLevel | null}
 */
function sourceCoarsest(levels, queryBlock, keyBlock, channel) {
  /** @param {StoredLevel} level */
  const fits = (level) => queryBlock % level.query_block === 0 && keyBlock % level.key_block === 0;
  return levels.filter((level) => level[channel] && fits(level)).at(-1) ?? null;
}

/**
 * Which rows of exact weights have any: the others may attend to nothing.
 * @param {ArrayLike<number>} values @param {number} rows @param {number} keys
 */
function sourceLiving(values, rows, keys) {
  const living = new Int32Array(rows);
  for (let i = 0; i < rows; i += 1) {
    for (let j = i * keys; j < (i + 1) * keys && !living[i]; j += 1) if (values[j] > 0) living[i] = 1;
  }
  return living;
}

/** @param {Blocks} what @param {number} tileRow @param {number} tileColumn */
function sourceCut({ values, I, J }, tileRow, tileColumn) {
  const tile = new Float32Array(SOURCE_TILE * SOURCE_TILE).fill(NaN);
  const top = tileRow * SOURCE_TILE;
  const left = tileColumn * SOURCE_TILE;
  for (let i = top; i < Math.min(I, top + SOURCE_TILE); i += 1) {
    const part = values.subarray(i * J + left, i * J + Math.min(J, left + SOURCE_TILE));
    tile.set(part, (i - top) * SOURCE_TILE);
  }
  return tile;
}
