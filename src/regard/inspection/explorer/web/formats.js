// What leaves the page: names, tables, NumPy files and Python, as text or bytes.
import { channelNoun } from "./heads.js";
import { headCode, headName } from "./passages.js";

/**
 * A name that every file system takes.
 * @param {string} text cut where it is long @param {string} ending
 * @param {string} [own] what tells it from the others: never cut
 * @returns {string}
 */
export function safeName(text, ending, own = "") {
  /** @param {string} words */
  const plain = (words) =>
    words
      .normalize("NFKD")
      .replace(/[^A-Za-z0-9]+/g, "-")
      .replace(/^-+|-+$/g, "")
      .toLowerCase();
  const kept = plain(own);
  const room = Math.max(0, 79 - kept.length);
  const parts = [plain(text).slice(0, room).replace(/-+$/, "") || "attention", kept];
  return `${parts.filter(Boolean).join("-")}.${ending}`;
}

/**
 * The heads of a figure in words.
 * @param {Array<{layer?: number}>} calls of their trace @param {Head[]} heads @param {Aggregate} aggregate
 * @param {Channel} [channel]
 */
export function namedHeads(calls, heads, aggregate, channel = "mass") {
  const shown = channel === "value" ? `, ${channelNoun(channel)}` : "";
  if (heads.length === 1) return headName(calls, ...heads[0]) + shown;
  const names = heads.slice(0, 6).map((head) => headCode(calls, head));
  const more = heads.length > 6 ? ` and ${heads.length - 6} more` : "";
  return `${aggregate === "max" ? "largest" : "mean"} of heads ${names.join(", ")}${more}${shown}`;
}

/**
 * float32 numbers as a NumPy file, version 1.0 of the format.
 * @param {ArrayLike<number>} values row by row @param {number[]} shape @returns {Uint8Array}
 */
export function npyBytes(values, shape) {
  const sizes = shape.length === 1 ? `${shape[0]},` : shape.join(", ");
  const words = `{'descr': '<f4', 'fortran_order': False, 'shape': (${sizes}), }`;
  const header = `${words}${" ".repeat(63 - ((10 + words.length) % 64))}\n`;
  const bytes = new Uint8Array(10 + header.length + 4 * values.length),
    view = new DataView(bytes.buffer);
  bytes.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0]);
  view.setUint16(8, header.length, true);
  for (let n = 0; n < header.length; n++) bytes[10 + n] = header.charCodeAt(n);
  for (let n = 0; n < values.length; n++) view.setFloat32(10 + header.length + 4 * n, values[n], true);
  return bytes;
}

/**
 * What the numbers of an excerpt are, in a sentence.
 * @param {Pick<MapExcerpt, "exact" | "channel" | "queryBlock" | "keyBlock" | "heads">} what
 * @param {{ aggregate?: Aggregate, rounded?: boolean }} [options]
 * @returns {string}
 */
export function describeExcerpt(
  { exact, channel, queryBlock, keyBlock, heads },
  { aggregate = "mean", rounded = false } = {},
) {
  const what = exact
    ? channelNoun(channel, "attention weights")
    : channel !== "mass"
      ? `largest ${channelNoun(channel)} of each block of ${queryBlock} queries x ${keyBlock} keys`
      : `mean over ${queryBlock} queries of the weight on ${keyBlock} keys`;
  const joint = aggregate === "max" ? "largest" : "mean";
  const joined = heads.length > 1 ? `, ${joint} of ${heads.length} heads` : "";
  return `${what}${rounded ? ", rounded to 3.4 %" : ""}${joined}`;
}

/**
 * Numbers as a table for spreadsheets: a remark, the first key of each column, then the first query and the
 * numbers. Tokens stand behind positions, as JSON: on one line each, and never a formula.
 * @param {Excerpt} excerpt @param {string} remark
 * @param {Shift} [offsets]
 * @param {{query: (n: number) => string, key: (n: number) => string}|null} [tokens] by row and key
 * @returns {string}
 */
export function csvText(excerpt, remark, offsets = { query: 0, key: 0 }, tokens = null) {
  const { values, rows, columns, row0, column0, queryBlock, keyBlock } = excerpt;
  /** @param {string} text */
  const cell = (text) => `"${JSON.stringify(text).replaceAll('"', '""')}"`;
  const firsts = Array.from({ length: columns }, (_, j) => (column0 + j) * keyBlock);
  const gap = tokens ? "," : "";
  const lines = [
    `# ${remark.replace(/\s+/g, " ")}`,
    `query\\key,${gap}${firsts.map((key) => key + offsets.key).join(",")}`,
  ];
  if (tokens) lines.push(`,,${firsts.map((key) => cell(tokens.key(key))).join(",")}`);
  for (let i = 0; i < rows; i++) {
    const cells = Array.from(values.subarray(i * columns, (i + 1) * columns), (one) =>
      Number.isNaN(one) ? "" : String(Number(one.toPrecision(7))),
    );
    const first = (row0 + i) * queryBlock;
    const token = tokens ? [cell(tokens.query(first))] : [];
    lines.push([first + offsets.query, ...token, ...cells].join(","));
  }
  return `${lines.join("\n")}\n`;
}

/** Text for XML; characters that XML has no place for are left out. @param {string} text @returns {string} */
export function xmlText(text) {
  const allowed = text.replace(/[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, "\ufffd");
  return allowed.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
}

/**
 * Python that draws the same view from the trace, not from this page.
 * @param {Shape & {c: number, calls: Array<{layer?: number}>, heads: Head[], view: View, scale: string, channel: Channel, name: string}} what
 * @returns {string}
 */
export function pythonText({ c, calls, heads, view, scale, channel, name, rows, keys }) {
  const [q0, q1, k0, k1] = [
    Math.floor(view.q0),
    Math.min(rows, Math.ceil(view.q1)),
    Math.floor(view.k0),
    Math.min(keys, Math.ceil(view.k1)),
  ];
  const h = heads.at(0)?.[1] ?? 0,
    title = namedHeads(calls, [[c, h]], "mean", channel),
    looks = `scale="${scale === "log" ? "log" : "linear"}", title="${title}"`;
  const whole = q0 === 0 && k0 === 0 && q1 === rows && k1 === keys && rows * keys > 2 ** 22;
  const lines = [
    "from regard import inspection",
    "from regard.inspection import figures",
    "",
    '# A trace saved by trace.save(path, keep="qk")',
    'trace = inspection.load("trace.regard")',
    `call = trace.calls[${c}]  # ${name.replace(/[^\x20-\x7e]/g, "?")}`,
  ];
  if (whole) lines.push(`drawing = figures.head_map(call.readout(), ${h}, channel="${channel}", ${looks})`);
  else {
    lines.push(
      `weights = call.window(rows=slice(${q0}, ${q1}), columns=slice(${k0}, ${k1}), heads=[${h}])[0]`,
      ...(channel === "value" ? [`weights = weights * call.value_norms[${h}, ${k0}:${k1}]`] : []),
      "drawing = figures.head_map(",
      `    call.readout(), ${h}, weights=weights, first_row=${q0}, first_column=${k0}, ${looks}`,
      ")",
      ...(channel === "value"
        ? ["drawing.images[0].autoscale()", `drawing.colorbar.set_label("${channelNoun(channel)}")`]
        : []),
    );
  }
  return `${lines.join("\n")}\ndrawing.save("${safeName(title, "pdf")}")\n`;
}
