import { readNotes, writeNotes } from "./head_notes.js";

// What the fields of a state may hold.

/** Tabs in their order. */
export const TABS = ["attention", "lines", "positions", "compare", "training"];
const SCALES = ["log", "linear", "power"];

/** @param {any} value @param {number} most */
export const stateWhole = (value, most) => {
  const number = typeof value === "string" ? (/^\d{1,12}$/.test(value) ? Number(value) : NaN) : value;
  return Number.isInteger(number) && number >= 0 ? Math.min(number, Math.max(0, most)) : undefined;
};
/**
 * @param {string[]} choices
 * @returns {(value: any) => any}
 */
const stateOneOf = (choices) => (value) => (choices.includes(value) ? value : undefined);
/** @param {any} value */
const stateFlag = (value) => ({ true: true, false: false, 1: true, 0: false })[String(value)];
/** @param {any} value */
const stateName = (value) => (/^[A-Za-z0-9_.:-]{0,64}$/.test(String(value)) ? String(value) : undefined);

/** Panes that are folded; plain: all but heads and text. @param {any} value */
const stateFold = (value) => {
  const names = String(value).split(",");
  return ["heads", "text", "profiles", "plain"].filter((name) => names.includes(name)).join(",");
};
/** Pixels of the panes; 0: as they come. @param {any} value */
const stateSizes = (value) => (/^\d{1,4}(-\d{1,4}){2}$/.test(String(value)) ? String(value) : undefined);

/** Queries whose lines are drawn together. @param {any} value */
const stateAsked = (value) => {
  const rows = String(value)
    .split(",")
    .filter((one) => /^\d{1,9}$/.test(one));
  return [...new Set(rows)].slice(0, 32).join(",");
};
/** First query and key in sight beside the lines. @param {any} value */
const stateAt = (value) => (/^\d{1,7}-\d{1,7}$/.test(String(value)) ? String(value) : undefined);

/** Four parts of a question for heads. @param {any} value */
const stateFind = (value) => {
  const text = String(value);
  try {
    decodeURIComponent(text);
  } catch {
    return undefined;
  }
  return /^(|([^,]{0,200},){2}(-?\d{1,7})?,[a-z-]{0,20})$/.test(text) ? text : undefined;
};

/** Ends of the colours: of all heads, of one, or numbers. @param {any} value */
const stateRangeOfColours = (value) => {
  if (["all", "head"].includes(value)) return value;
  const ends = /^([\d.]+(?:e-\d+)?):([\d.]+(?:e-\d+)?)$/.exec(String(value))?.slice(1).map(Number);
  return ends && ends[0] < ends[1] && ends[1] < 1e6 ? ends.join(":") : undefined;
};

/** @param {any} value @param {State} state */
const stateTrace = (value, state) =>
  /^\d{1,4}$/.test(String(value)) && Number(value) < state.shapes.length ? Number(value) : undefined;

/**
 * Fields that any view may set: the name in the address (null: not kept there), and what a value means;
 * `undefined` refuses it.
 * @type {Record<string, {hash: string|null, clean: (value: any, state: State) => any}>}
 */
export const STATE_FIELDS = {
  tab: { hash: "tab", clean: stateOneOf(TABS) },
  channel: { hash: "ch", clean: stateOneOf(["mass", "max", "value"]) },
  scale: { hash: "scale", clean: stateOneOf(SCALES) },
  range: { hash: "range", clean: stateRangeOfColours },
  rowRank: { hash: "rank", clean: stateFlag },
  hideSink: { hash: "sink", clean: stateFlag },
  rollout: { hash: "rollout", clean: stateFlag },
  aggregate: { hash: "agg", clean: stateOneOf(["mean", "max"]) },
  direction: { hash: "dir", clean: stateOneOf(["out", "in"]) },
  sort: { hash: "sort", clean: stateName },
  show: { hash: "show", clean: stateName },
  versus: { hash: "versus", clean: stateFlag },
  contrast: { hash: "contrast", clean: stateFlag },
  borders: { hash: null, clean: stateFlag },
  band: { hash: null, clean: stateFlag },
  tiles: { hash: null, clean: stateFlag },
  brush: { hash: null, clean: (value) => value },
  other: { hash: "b", clean: stateTrace },
  fold: { hash: "fold", clean: stateFold },
  sizes: { hash: "sizes", clean: stateSizes },
  asked: { hash: "asked", clean: stateAsked },
  at: { hash: "at", clean: stateAt },
  find: { hash: "find", clean: stateFind },
  notes: { hash: "notes", clean: (value) => writeNotes(readNotes(value)) },
  compareMode: { hash: "cmp", clean: stateOneOf(["swipe", "side", "difference"]) },
};
