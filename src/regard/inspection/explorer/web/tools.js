import { button, chooser, clear, element, partOf, tickbox } from "./dom.js";
import { numberNames } from "./heads.js";
import { layerNumber } from "./passages.js";

/**
 * Layers in a list: their numbers, and what of their names tells them apart beyond a number.
 * @param {Array<{name: string, kind: string, layer?: number}>} calls
 * @returns {string[]}
 */
export function layerNames(calls) {
  const names = calls.map(({ name }) => String(name ?? ""));
  /** @param {string[]} texts */
  const shared = (texts) => {
    let length = 0;
    while (
      texts.length > 1 &&
      length < texts[0].length &&
      texts.every((text) => text[length] === texts[0][length])
    )
      length += 1;
    return length;
  };
  /** @param {string} text */
  const turn = (text) => Array.from(text).reverse().join("");
  const front = shared(names);
  const back = shared(names.map((name) => turn(name.slice(front))));
  return names.map((name, n) => {
    const own = name.slice(front, name.length - back);
    const short = own.length > 24 ? `…${own.slice(-23)}` : own;
    const more = calls.length > 1 && !/^\d*$/.test(own) ? ` · ${short}` : "";
    return `${layerNumber(calls, n)}${more}${calls[n].kind === "cross" ? " (cross)" : ""}`;
  });
}

/** @param {State} state @returns {HTMLElement[]} what stands beside the map's title */
export function mapTools(state) {
  const zoom = element(
    "span",
    { class: "rg-group" },
    button("−", { title: "zoom out", keys: "-", press: () => state.ask("zoom-out") }),
    button("+", { title: "zoom in", keys: "+", press: () => state.ask("zoom-in") }),
    button("fit", { title: "show the whole map", keys: "0", press: () => state.ask("fit") }),
  );
  const overlays = element(
    "details",
    { class: "rg-overlays" },
    element("summary", { text: "Overlays" }),
    element(
      "div",
      { class: "rg-pop" },
      ...[
        ["borders", "document borders"],
        ["band", "window of the mask"],
        ["tiles", "tiles of the kernel"],
      ].map(([name, text]) =>
        tickbox(text, Boolean(state.plain()[name]), (value) => state.set({ [name]: value }), {
          data: { field: name },
        }),
      ),
    ),
  );
  state.on(["borders", "band", "tiles"], () => {
    const now = state.plain();
    for (const input of overlays.querySelectorAll("input")) input.checked = now[input.dataset.field ?? ""];
  });
  return [overlays, zoom];
}

/**
 * The bar above the map: layer, head, colours, and the tools that are keys elsewhere.
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountTools(host, source, state) {
  const traces = source.document.traces;
  /** @param {"c" | "h"} name @param {string} word @param {string[]} keys */
  const stepper = (name, word, keys) => {
    const select = element("select", {
      "aria-label": word,
      on: { change: () => state.set({ [name]: Number(select.value) }) },
    });
    /** @param {number} by */
    const go = (by) => () => state.set({ [name]: Math.max(0, state[name] + by) });
    const node = element(
      "span",
      { class: "rg-stepper" },
      element("span", { class: "rg-word", text: word }),
      button("‹", { title: `previous ${word.toLowerCase()}`, keys: keys[0], press: go(-1) }),
      select,
      button("›", { title: `next ${word.toLowerCase()}`, keys: keys[1], press: go(1) }),
    );
    return { node, select };
  };
  const layer = stepper("c", "Layer", ["[", "]"]);
  const head = stepper("h", "Head", [",", "."]);
  const trace =
    traces.length > 1
      ? chooser(
          "Trace",
          traces.map(({ title }, n) => [String(n), `${"AB"[n] ?? n + 1}: ${title}`]),
          String(state.t),
          (t) => state.set({ t: Number(t) }),
        )
      : null;
  const channel = chooser(
    "Shows",
    [
      ["mass", "mass of a block"],
      ["max", "largest weight"],
      .../** @type {[string, string][]} */ (
        traces.some((trace) => numberNames(trace).includes("largest_addition"))
          ? [["value", "weight × value"]]
          : []
      ),
    ],
    state.channel,
    (value) => state.set({ channel: value }),
    { "aria-keyshortcuts": "m", title: "m" },
  );
  const scale = chooser(
    "Scale",
    [
      ["log", "log"],
      ["linear", "linear"],
      ["power", "power"],
      ["rank", "rank in row"],
    ],
    state.scale,
    (value) => state.set(value === "rank" ? { rowRank: true } : { scale: value, rowRank: false }),
    { "aria-keyshortcuts": "l r", title: "l; r for rank in row" },
  );
  const range = chooser(
    "Range",
    [
      ["all", "all heads"],
      ["head", "this head"],
      ["locked", "locked"],
    ],
    state.range,
    (value) => {
      const { low, high } = state.views.map?.look().limits ?? { low: 0, high: 1 };
      state.set({
        range: value === "locked" ? [low, high].map((end) => Number(end.toPrecision(4))).join(":") : value,
      });
    },
    { title: "Ends of the colours: the same for all heads, from this one, or kept as they are now" },
  );
  const several = chooser(
    "Selection",
    [
      ["mean", "mean"],
      ["max", "largest"],
    ],
    state.aggregate,
    (value) => state.set({ aggregate: value }),
  );
  const sink = tickbox("hide first keys", state.hideSink, (hideSink) => state.set({ hideSink }), {
    title: "Leave out the first four keys and share out what is left",
  });
  const edges = element(
    "span",
    { class: "rg-group" },
    button("‹ edge", { title: "previous far edge", keys: "p", press: () => state.ask("previous-edge") }),
    button("edge ›", { title: "next far edge", keys: "n", press: () => state.ask("next-edge") }),
  );
  const wipe = button("clear", {
    title: "clear crosshair, selection and filter",
    keys: "Escape",
    press: () => {
      state.set({ row: null, key: null, brush: null, selection: [[state.c, state.h]] });
      state.ask("clear");
    },
  });
  if (trace) host.append(trace);
  host.append(layer.node, head.node, channel, scale, range, several, sink, edges, wipe);

  let listed = -1;
  const refresh = () => {
    const calls = traces[state.t]?.calls ?? [];
    if (listed !== state.t) {
      listed = state.t;
      clear(layer.select).append(
        ...layerNames(calls).map((text, n) => element("option", { value: String(n), text })),
      );
    }
    layer.select.value = String(state.c);
    layer.select.title = calls[state.c]?.name ?? "";
    const heads = calls[state.c]?.heads ?? 0;
    if (head.select.length !== heads) {
      clear(head.select).append(
        ...Array.from({ length: heads }, (_, n) => element("option", { value: String(n), text: String(n) })),
      );
    }
    head.select.value = String(state.h);
    if (trace) partOf(trace, "select").value = String(state.t);
    partOf(channel, "select").value = state.channel;
    partOf(scale, "select").value = state.rowRank ? "rank" : state.scale;
    partOf(range, "select").value = state.range.includes(":") ? "locked" : state.range;
    several.hidden = state.selection.length < 2;
    partOf(several, "select").value = state.aggregate;
    partOf(sink, "input").checked = state.hideSink;
  };
  state.on(
    ["t", "c", "h", "channel", "scale", "range", "rowRank", "aggregate", "selection", "hideSink"],
    refresh,
  );
  refresh();
}
