import { alignedColumns, sharedText } from "./alignment.js";
import { button, clear, element } from "./dom.js";
import { displayToken } from "./passages.js";

/** Aligned tokens that are shown at once. */
const ALIGNED_TOKENS = 48;

/**
 * Both texts, one above the other, around the chosen key or the first token that one of them has alone.
 * @param {HTMLElement} strip @param {State} state
 * @param {Int32Array|null} places of the tokens of A in B @param {(string[]|null)[]} tokens
 */
export function drawTokens(strip, state, places, [ofA, ofB]) {
  strip.hidden = !places || !ofA || !ofB || !sharedText(places, ofB.length);
  if (!places || !ofA || !ofB || strip.hidden) return;
  const columns = alignedColumns(places, ofB.length);
  /** @param {[number|null, number|null]} column */
  const alone = ([a, b]) => a === null || b === null;
  const own = columns.findIndex(alone),
    held = state.key === null ? -1 : columns.findIndex(([a]) => a === state.key),
    middle = held >= 0 ? held : Math.max(0, own);
  const start = Math.max(0, Math.min(middle - ALIGNED_TOKENS / 2, columns.length - ALIGNED_TOKENS)),
    seen = columns.slice(start, start + ALIGNED_TOKENS);
  /** @param {number} n @param {string[]} texts */
  const line = (n, texts) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, "AB"[n]),
      ...seen.map((column) => {
        const place = column[n];
        const names = [alone(column) && "alone", column[0] !== null && column[0] === state.key && "current"];
        return element(
          "td",
          { class: names.filter(Boolean).join(" ") || null, title: place === null ? null : String(place) },
          place === null ? "" : element("bdi", {}, displayToken(texts[place]).text),
        );
      }),
    );
  /** @param {number} by */
  const jump = (by) => () => {
    const found = columns.flatMap((column, n) => (alone(column) ? [n] : []));
    const next = by > 0 ? found.find((n) => n > middle) : found.findLast((n) => n < middle);
    const key = columns[next ?? middle]?.[0] ?? columns.slice(next ?? middle).find(([a]) => a !== null)?.[0];
    if (key !== null && key !== undefined) state.set({ key });
  };
  clear(strip).append(
    element(
      "span",
      { class: "rg-group" },
      button("‹", { title: "previous token of one text alone", press: jump(-1) }),
      button("›", { title: "next token of one text alone", press: jump(1) }),
    ),
    element(
      "div",
      { tabindex: 0, role: "region", "aria-label": "Tokens of A and B, aligned" },
      element("table", {}, line(0, ofA), line(1, ofB)),
    ),
  );
}
