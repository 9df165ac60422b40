// What is cut on the live page: its words, which heads and cells a button means, and what each token costs then.

import { element, shown } from "./dom.js";
import { formatNumber } from "./scales.js";

/** @typedef {"heads" | "cell" | "query"} CutKind */

/** What is said of a way to cut: its field, an example, and two buttons with titles. @param {string} by */
export function cutWords(by) {
  if (by === "patch") {
    const title = "Give the head that is looked at the output that it has on the source";
    const query = ["Patch this query", `${title}, at the chosen query alone`];
    return ["B: A, with heads’ output on the source", "3.1:7", "Patch this head", title, ...query];
  }
  const scales = by === "half" || by === "double",
    verb = scales ? "Scale" : "Cut";
  const head = [`${verb} this head`, `${verb} the head that is looked at`];
  const cell = [`${verb} this cell`, `${verb} what the chosen key hands to the chosen query by this head`];
  return [
    scales ? "B, with heads or cells scaled" : "B, without heads or cells",
    "3.1:7-2",
    ...head,
    ...cell,
  ];
}

/** @param {string} cut */
const cutNames = (cut) => cut.split(/[\s,]+/).filter(Boolean);

/**
 * The names of what an explorer looks at: its heads, the weight of its cell, or its head at the query.
 * @param {string} place address part of the explorer @param {CutKind} [what]
 */
export function namesAt(place, what = "heads") {
  const said = new URLSearchParams(place.replace(/^#/, ""));
  const head = `${said.get("l") ?? 0}.${said.get("h") ?? 0}`;
  if (what === "heads") return said.get("sel")?.split(",") ?? [head];
  return [`${head}:${said.get("row")}${what === "cell" ? `-${said.get("key")}` : ""}`];
}

/** Whether all of some names are cut. @param {string} cut @param {string[]} names */
export const isCut = (cut, names) => names.length > 0 && names.every((name) => cutNames(cut).includes(name));

/** What is cut, with names among it, or no longer. @param {string} cut @param {string[]} names */
export function toggleCut(cut, names) {
  const has = isCut(cut, names);
  const all = has ? cutNames(cut).filter((name) => !names.includes(name)) : [...cutNames(cut), ...names];
  return [...new Set(all)].join(" ");
}

/** What a button means: what is looked at, or what it cut last, until somebody looks elsewhere than the page does. */
export class CutTarget {
  /** @type {string|null} Where the page stood when somebody began to look around. */
  touched = null;

  /** @param {string[]} last names that were cut last */
  constructor(last) {
    this.last = last;
  }

  /** @param {string} cut @param {string} place @param {CutKind} what */
  names(cut, place, what) {
    const stays = this.touched === null || this.touched === namesAt(place).join();
    return stays && isCut(cut, this.last) ? this.last : namesAt(place, what);
  }

  /** Cut or restore: what is cut then. @param {string} cut @param {string} place @param {CutKind} what */
  press(cut, place, what) {
    this.last = this.names(cut, place, what);
    this.touched = null;
    return toggleCut(cut, this.last);
  }
}

/**
 * What comes after the texts, and what each token of them costs, one after the other; then after a source.
 * @param {Array<{loss: number|null, next: Array<[string, number|null]>}>} predicted
 */
export function tellPredictions(predicted) {
  /** @param {[string, number|null]} likeliest */
  const word = ([token, share]) => `‘${shown(token)}’ ${formatNumber(share)}`;
  const [before, after, source] = predicted;
  if (!after) return `next: ${before.next.map(word).join(", ")}`;
  const losses = [before.loss, after.loss].map((loss) => (loss === null ? "–" : formatNumber(loss)));
  const asked = [before, ...(source ? [source] : [])].map(({ next }) => next[0][0]);
  const now = after.next.filter(([token], n) => !n || asked.includes(token)).map(word);
  const there = source ? `; of the source ${word(source.next[0])}` : "";
  return `loss ${losses.join(" → ")}, next ${word(before.next[0])} → ${now.join(", ")}${there}`;
}

/**
 * What each token of two texts of one length costs; tint: of how much more than before, -1 to 1.
 * @param {Array<{costs?: Array<[string, number|null]>}>} predicted before and after
 */
export function tokenCosts([before, after]) {
  const [one, other] = [before?.costs ?? [], after?.costs ?? []];
  if (one.length !== other.length) return [];
  const more = other.map(([, cost], n) => (cost ?? NaN) - (one[n][1] ?? NaN));
  const most = Math.max(0.1, ...more.map((by) => Math.abs(by) || 0));
  return other.map(([text, cost], n) => ({ text, costs: [one[n][1], cost], tint: (more[n] || 0) / most }));
}

/** @param {Parameters<typeof tokenCosts>[0]} predicted @returns {HTMLElement[]} a token with its costs each */
export function drawCosts(predicted) {
  return tokenCosts(predicted).map(({ text, costs, tint }) =>
    element(
      "span",
      { class: tint < 0 ? "live-less" : null, style: { "--tint": Math.abs(tint) } },
      element("bdi", { text: shown(text) }),
      element("small", { text: costs.map((cost) => formatNumber(cost ?? NaN, 2)).join(" → ") }),
    ),
  );
}
