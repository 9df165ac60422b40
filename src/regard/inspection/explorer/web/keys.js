import { button, clear, element, say, tickbox } from "./dom.js";

/**
 * @param {"c" | "h"} name @param {number} by @param {(state: State) => number} most
 * @returns {(state: State) => void}
 */
const keyStep = (name, by, most) => (state) => {
  const last = most(state) - 1;
  state.set({ [name]: Math.min(Math.max(0, state[name] + by), Math.max(0, last)) });
};
/** @param {State} state */
const keyCalls = (state) => state.shapes[state.t]?.length ?? 0;
/** @param {State} state */
const keyHeads = (state) => state.shape().heads;
/**
 * @param {number} rows @param {number} keys
 * @returns {(state: State) => void}
 */
const keyCross = (rows, keys) => (state) => {
  const { view, row, key } = state;
  const shape = state.shape();
  if (!shape.rows || !shape.keys) return;
  if (row === null || key === null) {
    state.set({
      row: row ?? Math.floor((view.q0 + view.q1) / 2),
      key: key ?? Math.floor((view.k0 + view.k1) / 2),
    });
    return;
  }
  const step = state.views.map?.step() ?? { rows: 1, keys: 1 };
  /** @param {number} at @param {number} by @param {number} size */
  const go = (at, by, size) => Math.min(Math.max(0, at + by), size - 1);
  state.set({ row: go(row, rows * step.rows, shape.rows), key: go(key, keys * step.keys, shape.keys) });
  state.ask("follow");
};

/**
 * Commands of views that are seen on the first tab alone.
 * @param {string} command
 * @returns {(state: State) => void}
 */
const keyReader = (command) => (state) => {
  state.set({ tab: "attention" });
  state.ask(command);
};

/**
 * Every key with what it does; `place` says where it works when not everywhere.
 * @type {Array<{keys: string[], does: string, run: (state: State) => void, place?: "map"}>}
 */
export const KEYS = [
  { keys: ["ArrowUp"], does: "crosshair to the previous query", run: keyCross(-1, 0), place: "map" },
  { keys: ["ArrowDown"], does: "crosshair to the next query", run: keyCross(1, 0), place: "map" },
  { keys: ["ArrowLeft"], does: "crosshair to the previous key", run: keyCross(0, -1), place: "map" },
  { keys: ["ArrowRight"], does: "crosshair to the next key", run: keyCross(0, 1), place: "map" },
  { keys: ["["], does: "previous layer", run: keyStep("c", -1, keyCalls) },
  { keys: ["]"], does: "next layer", run: keyStep("c", 1, keyCalls) },
  { keys: [","], does: "previous head", run: keyStep("h", -1, keyHeads) },
  { keys: ["."], does: "next head", run: keyStep("h", 1, keyHeads) },
  { keys: ["+", "="], does: "zoom in", run: (state) => state.ask("zoom-in") },
  { keys: ["-"], does: "zoom out", run: (state) => state.ask("zoom-out") },
  { keys: ["0"], does: "show the whole map", run: (state) => state.ask("fit") },
  {
    keys: ["m"],
    does: "mass or largest weight of a block",
    run: (state) => state.set({ channel: state.channel === "mass" ? "max" : "mass" }),
  },
  {
    keys: ["l"],
    does: "colour scale: log, linear, power",
    run: (state) =>
      state.set({ scale: { log: "linear", linear: "power", power: "log" }[state.scale], rowRank: false }),
  },
  { keys: ["r"], does: "colour by rank in the row", run: (state) => state.set({ rowRank: !state.rowRank }) },
  {
    keys: ["c"],
    does: "compare, and back",
    run: (state) => state.set({ tab: state.tab === "compare" ? "attention" : "compare" }),
  },
  { keys: ["e"], does: "export what is seen", run: keyReader("export") },
  { keys: ["/"], does: "find a token or :37", run: keyReader("find") },
  { keys: ["n"], does: "next far edge", run: keyReader("next-edge") },
  { keys: ["p"], does: "previous far edge", run: keyReader("previous-edge") },
  { keys: ["d"], does: "light or dark", run: (state) => state.ask("theme") },
  { keys: ["?"], does: "this list", run: (state) => state.ask("help") },
  { keys: ["Escape"], does: "clear crosshair, selection and filter", run: keyClear },
];

/** Keys of a page that shows the explorer in a frame. @returns {typeof KEYS} */
const keysAround = () => /** @type {any} */ (globalThis).frameElement?.outerKeys ?? [];

/** @param {State} state */
function keyClear(state) {
  state.set({ row: null, key: null, brush: null, selection: [[state.c, state.h]] });
  state.ask("clear");
}

/**
 * What a key press means here.
 * @param {{key: string, ctrlKey?: boolean, metaKey?: boolean, altKey?: boolean}} event
 * @param {{typing: boolean, place: string}} where typing: in a field that takes text or arrows; place: "map", "page" or another part
 * @returns {typeof KEYS[number]|null} an entry of KEYS
 */
export function meaningOf(event, { typing, place }) {
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return null;
  const entry = [...KEYS, ...keysAround()].find(({ keys }) => keys.includes(event.key));
  if (!entry || (entry.place === "map" && place !== "map" && place !== "page")) return null;
  return entry;
}

const keySilent = new WeakSet();
/** The explorer used last. @type {HTMLElement|null} */
let keyLast = null;

/** @param {Element|null} node @returns {boolean} whether keys belong to it */
export function takesKeys(node) {
  return Boolean(node?.closest?.("input, textarea, select, [contenteditable], dialog"));
}

/**
 * Run the shortcuts for one explorer: keys pressed in it, or on the page when it was the last one used.
 * @param {HTMLElement} root
 * @param {State} state
 */
export function listenForKeys(root, state) {
  const claim = () => {
    keyLast = root;
  };
  keyLast ??= root;
  root.addEventListener("pointerdown", claim);
  root.addEventListener("focusin", claim);
  document.addEventListener("keydown", (event) => {
    const target = event.target instanceof Element ? event.target : null;
    const onPage = target === document.body || target === document.documentElement;
    const mine = root.contains(target) || (onPage && keyLast === root);
    if (!mine || event.defaultPrevented || keySilent.has(root)) return;
    const place = onPage ? "page" : target?.closest(".rg-map") ? "map" : "part";
    const entry = meaningOf(event, { typing: takesKeys(target), place });
    if (!entry) return;
    event.preventDefault();
    entry.run(state);
  });
}

/**
 * The list of keys as a dialog, with a switch for readers who use speech or other single keys.
 * @param {HTMLElement} root
 */
export function openKeyList(root) {
  /** @type {HTMLDialogElement|null} */
  const known = root.querySelector(":scope > .rg-keys");
  if (known?.open) {
    known.close();
    return;
  }
  const dialog = known ?? root.appendChild(element("dialog", { class: "rg-keys", "aria-label": "Keys" }));
  clear(dialog);
  const rows = [...KEYS, ...keysAround()].map(({ keys, does }) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, ...keys.map((key) => element("kbd", { text: KEY_SIGNS[key] ?? key }))),
      element("td", { text: does }),
    ),
  );
  const quiet = tickbox("single keys work", !keySilent.has(root), (works) =>
    works ? keySilent.delete(root) : keySilent.add(root),
  );
  dialog.append(
    element("h2", { text: "Keys" }),
    element("table", {}, element("tbody", {}, ...rows)),
    element("p", {
      text: "Wheel or pinch zooms the map, a drag moves it, a click sets the crosshair; shift-click on a head adds it to the selection.",
    }),
    element("div", { class: "rg-row" }, quiet, button("Close", { press: () => dialog.close() })),
  );
  dialog.showModal();
  say("List of keys", root);
}

/** @type {Record<string, string>} */
const KEY_SIGNS = { ArrowUp: "↑", ArrowDown: "↓", ArrowLeft: "←", ArrowRight: "→", Escape: "Esc" };
