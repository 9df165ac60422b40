import { button, chooser, element, partOf } from "./dom.js";
import { HEAD_LABELS } from "./heads.js";
import { headName } from "./passages.js";
import { formatNumber } from "./scales.js";
import { sidesOf } from "./sides.js";

const SEARCH_LISTED = 10;
const SEARCH_BEST = 4;

/** A text without white space around it, as vocabularies write it, too, and without case. @param {string} text */
const searchFold = (text) =>
  (text.replace(/^[ \t\r\n\u2581\u0120]+|[ \t\r\n\u2581\u0120]+$/g, "") || text).toLowerCase();

/**
 * Which tokens of a side are one of the words of a text; null: all.
 * @param {Side} side @param {string} text
 */
function searchMatches(side, text) {
  const words = new Set(text.split(/\s+/).filter(Boolean).map(searchFold));
  if (!words.size) return null;
  return Array.from({ length: side.size }, (_, n) => n).filter((n) => words.has(searchFold(side.textAt(n))));
}

/**
 * The heads of a trace that answer a question, the largest mean weight first: the numbers of `inspection.find_heads`.
 * @param {Source} source @param {number} t @param {HeadQuestion} question
 * @returns {Promise<{found: FoundHead[], unknown: number}>} unknown: heads whose weights the page does not have
 */
export async function findHeads(source, t, { query, key, offset, label }) {
  /** @type {FoundHead[]} */
  const found = [];
  let unknown = 0;
  for (const [c, call] of source.document.traces[t].calls.entries()) {
    /** @param {number} h */
    const labelOf = (h) => (call.labels?.[h] ?? []).find(({ name }) => name === label);
    const heads = Array.from({ length: call.heads }, (_, h) => h).filter((h) => !label || labelOf(h));
    if (!query.trim() && !key.trim() && !offset) {
      for (const h of heads) {
        const one = labelOf(h);
        if (one) found.push({ c, h, weight: one.value, pairs: one.rows });
      }
      continue;
    }
    const sides = await sidesOf(source, t, c);
    const rows = searchMatches(sides.query, query) ?? Array.from({ length: call.rows }, (_, n) => n);
    const keys = searchMatches(sides.key, key);
    const wanted = new Uint8Array(call.keys);
    for (const n of keys ?? wanted.keys()) wanted[n] = 1;
    const bits = await source.chunk(call.permitted ?? null);
    for (const h of heads) {
      const exact = await source.weights(t, c, h);
      if (!exact) {
        unknown += 1;
        continue;
      }
      const wide = Math.ceil(call.keys / 8),
        start = bits?.shape[0] > 1 ? h * call.rows : 0;
      let [sum, pairs] = [0, 0];
      /** @param {number} i @param {number} j */
      const add = (i, j) => {
        if (!wanted[j] || (bits && !((bits.values[(start + i) * wide + (j >> 3)] >> (7 - (j & 7))) & 1)))
          return;
        const weight = exact.values[i * call.keys + j];
        if (Number.isNaN(weight)) return;
        sum += weight;
        pairs += 1;
      };
      for (const i of rows) {
        const j = i + call.query_offset - call.key_offset - Number(offset);
        if (!offset) for (let at = 0; at < call.keys; at += 1) add(i, at);
        else if (j >= 0 && j < call.keys) add(i, j);
      }
      if (pairs) found.push({ c, h, weight: sum / pairs, pairs });
    }
  }
  found.sort((a, b) => b.weight - a.weight || a.c - b.c || a.h - b.h);
  return { found, unknown };
}

/** @param {string} find @returns {HeadQuestion} as the address holds it */
export function readQuestion(find) {
  const [query = "", key = "", offset = "", label = ""] = find.split(",").map(decodeURIComponent);
  return { query, key, offset, label };
}

/**
 * A form that finds the heads that read one kind of token from another, and what it found.
 * @param {HTMLElement} host @param {Source} source @param {State} state
 */
export function mountHeadSearch(host, source, state) {
  /** @param {string} word @param {Record<string, any>} [more] */
  const field = (word, more) =>
    element(
      "label",
      { class: "rg-field" },
      element("span", { text: word }),
      element("input", { ...more, on: { change: () => ask() } }),
    );
  const key = field("read", { type: "search", placeholder: "any token" }),
    query = field("from", { type: "search", placeholder: "any token" }),
    offset = field("positions back", { type: "number", step: 1, placeholder: "any" });
  /** @type {[string, string][]} */
  const labels = ["", ...HEAD_LABELS].map((name) => [name, name || "any"]);
  const label = chooser("label", labels, "", () => ask());
  const told = element("p", { class: "details-note", role: "status" });
  const body = element("tbody");
  const head = element(
    "tr",
    {},
    ...["head", "mean weight", "pairs"].map((text) => element("th", { scope: "col", text })),
  );
  const table = element("table", { class: "details-table" }, element("thead", {}, head), body);
  const best = button(`show the first ${SEARCH_BEST}`, { press: () => show(answers.slice(0, SEARCH_BEST)) });
  const fields = { query, key, offset, label };
  /** @type {FoundHead[]} */
  let answers = [];
  let now = 0;
  const ask = () => {
    const said = Object.values(fields).map((one) =>
      encodeURIComponent(partOf(one, one === label ? "select" : "input").value.trim()),
    );
    state.set({ find: said.some(Boolean) ? said.join(",") : "" });
  };
  /** @param {FoundHead[]} heads */
  const show = (heads) => {
    if (heads.length) state.set({ c: heads[0].c, h: heads[0].h, selection: heads.map(({ c, h }) => [c, h]) });
  };
  const answer = async () => {
    const mine = ++now,
      question = readQuestion(state.find);
    for (const [name, one] of Object.entries(fields)) {
      const input = partOf(one, one === label ? "select" : "input");
      if (input !== document.activeElement) input.value = question[/** @type {keyof HeadQuestion} */ (name)];
    }
    const { found, unknown } = state.find
      ? await findHeads(source, state.t, question)
      : { found: [], unknown: 0 };
    if (mine !== now) return;
    answers = found;
    table.hidden = best.hidden = !found.length;
    body.replaceChildren(
      ...found.slice(0, SEARCH_LISTED).map((one) =>
        element(
          "tr",
          {},
          element(
            "td",
            {},
            button(headName(state.calls(), one.c, one.h), {
              title: `Show ${headName(state.calls(), one.c, one.h)}`,
              press: () => show([one]),
            }),
          ),
          element("td", { text: formatNumber(one.weight) }),
          element("td", { text: one.pairs.toLocaleString("en") }),
        ),
      ),
    );
    told.textContent = !state.find
      ? "Mean weight over all pairs of such tokens that may attend; several words: any of them."
      : unknown
        ? `Of ${unknown} heads this page does not have every weight: ask inspection.find_heads in Python.`
        : found.length > SEARCH_LISTED
          ? `The first ${SEARCH_LISTED} of ${found.length} heads.`
          : found.length
            ? ""
            : "No head has such a pair.";
  };
  host.append(
    element(
      "section",
      { class: "lines-search", role: "search", "aria-label": "Heads by what they read" },
      element("h2", { text: "Heads that" }),
      element("div", { class: "lines-bar" }, key, query, offset, label),
      table,
      best,
      told,
    ),
  );
  state.on(["find", "t"], answer);
  answer();
}
