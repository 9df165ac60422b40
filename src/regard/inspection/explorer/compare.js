import { button, chooser, clear, element, svg } from "./dom.js";
import { isDark, limitsFor } from "./colours.js";
import { chooseLevel, readBlocks } from "./excerpts.js";
import { commonLevels, differenceOf, headDivergences, reasonApart } from "./divergences.js";
import { cellAt, drawnView, panView, placeAt, wholeTicks, zoomView } from "./geometry.js";
import { heatCanvas, heatLegend, heatPlot } from "./heats.js";
import { headName } from "./passages.js";
import { formatNumber } from "./plots.js";

const COMPARE_LEFT = 46, COMPARE_BOTTOM = 34, COMPARE_BLOCKS = 512;

/** How many tokens of two sequences differ, place by place; the length of the longer when the lengths differ. */
export function tokensApart(one, other) {
  if (!one || !other || one === other) return 0;
  if (one.length !== other.length) return Math.max(one.length, other.length);
  return one.reduce((count, token, n) => count + (token === other[n] ? 0 : 1), 0);
}

/**
 * One canvas that follows the state's view; `show({layers: [{excerpt, look, from, to}], shape, read})` draws it.
 * Dragging, the wheel, + − 0 and the arrow keys move the view of every pane and of the map.
 */
function comparePane(host, state, label) {
  const canvas = element("canvas", { "aria-hidden": "true" }), read = element("output", { class: "plot-read" });
  const axes = svg("svg", { tabindex: 0, role: "img" });
  const stage = element("div", { class: "compare-stage" }, canvas, axes);
  const title = element("h4", {}, label), box = element("section", {}, title, stage, read);
  host.append(box);
  let shown = null, plot = { x: COMPARE_LEFT, y: 0, w: 0, h: 0 }, view = state.view, cell = null;

  const draw = () => {
    const wide = stage.clientWidth;
    if (!shown || !wide) return;
    const { shape, layers } = shown, ratio = globalThis.devicePixelRatio || 1;
    plot = { x: COMPARE_LEFT, y: 4, w: wide - COMPARE_LEFT - 6, h: Math.min(wide - COMPARE_LEFT, 520) };
    const tall = plot.h + plot.y + COMPARE_BOTTOM;
    view = drawnView(stretch(state.view, 1), plot, shape);
    stage.style.height = `${tall}px`;
    Object.assign(canvas, { width: wide * ratio, height: tall * ratio });
    const pen = canvas.getContext("2d"), x = plot.w / (view.k1 - view.k0), y = plot.h / (view.q1 - view.q0);
    pen.scale(ratio, ratio);
    for (const { picture, excerpt, from = 0, to = 1 } of layers) {
      const { row0, column0, rows, columns, queryBlock, keyBlock } = excerpt;
      // The last block of an axis may be cut off by its end.
      const high = Math.min((row0 + rows) * queryBlock, shape.rows) - row0 * queryBlock, broad = Math.min((column0 + columns) * keyBlock, shape.keys) - column0 * keyBlock;
      pen.save();
      pen.beginPath();
      pen.rect(plot.x + from * plot.w, plot.y, (to - from) * plot.w, plot.h);
      pen.clip();
      pen.imageSmoothingEnabled = false;
      pen.drawImage(picture, 0, 0, broad / keyBlock, high / queryBlock, plot.x + (column0 * keyBlock - view.k0) * x,
        plot.y + (row0 * queryBlock - view.q0) * y, broad * x, high * y);
      pen.restore();
    }
    axes.setAttribute("width", wide);
    axes.setAttribute("height", tall);
    axes.setAttribute("aria-label", `${title.textContent}. Arrow keys move, plus and minus zoom, 0 shows all.`);
    const right = plot.x + Math.min(plot.w, (shape.keys - view.k0) * x), foot = plot.y + Math.min(plot.h, (shape.rows - view.q0) * y);
    const across = wholeTicks(view.k0, Math.min(view.k1, shape.keys), plot.w, 64), down = wholeTicks(view.q0, Math.min(view.q1, shape.rows), plot.h, 36);
    clear(axes).append(svg("rect", { class: "compare-frame", x: plot.x, y: plot.y, width: Math.max(0, right - plot.x), height: Math.max(0, foot - plot.y) }),
      ...across.map((n) => svg("text", { x: plot.x + (n + 0.5 - view.k0) * x, y: foot + 14, "text-anchor": "middle" }, String(n + shape.keyOffset))),
      ...down.map((n) => svg("text", { x: plot.x - 5, y: plot.y + (n + 0.5 - view.q0) * y + 4, "text-anchor": "end" }, String(n + shape.queryOffset))),
      svg("text", { class: "plot-label", x: (plot.x + right) / 2, y: foot + 29, "text-anchor": "middle" }, "key"),
      svg("text", { class: "plot-label", "text-anchor": "middle", transform: `translate(10 ${(plot.y + foot) / 2}) rotate(-90)` }, "query"));
    const split = layers[0]?.to;
    if (split < 1) axes.append(svg("path", { class: "compare-divider", d: `M${plot.x + split * plot.w} ${plot.y}V${plot.y + plot.h}` }));
    if (cell) {
      axes.append(svg("rect", { class: "plot-ring", x: plot.x + (cell.key - view.k0) * x, y: plot.y + (cell.row - view.q0) * y, width: Math.max(3, x), height: Math.max(3, y) }));
    }
  };
  // Traces of different lengths show the same share of each.
  const stretch = ({ q0, q1, k0, k1 }, way) => {
    const { rows, keys } = state.shape(), q = (shown.shape.rows / (rows || 1)) ** way, k = (shown.shape.keys / (keys || 1)) ** way;
    return { q0: q0 * q, q1: q1 * q, k0: k0 * k, k1: k1 * k };
  };
  const point = (event) => {
    const frame = stage.getBoundingClientRect();
    return [event.clientX - frame.left, event.clientY - frame.top];
  };
  let grip = null;
  stage.addEventListener("pointerdown", (event) => {
    if (event.button === 0) grip = { at: point(event), view };
  });
  stage.addEventListener("pointermove", (event) => {
    const [x, y] = point(event);
    if (grip) {
      stage.setPointerCapture(event.pointerId);
      const dq = ((grip.at[1] - y) * (view.q1 - view.q0)) / plot.h, dk = ((grip.at[0] - x) * (view.k1 - view.k0)) / plot.w;
      state.set({ view: stretch(panView(grip.view, dq, dk, shown.shape), -1) });
      return;
    }
    cell = shown && cellAt(view, plot, x, y, shown.shape);
    read.textContent = cell ? shown.read(cell) : "";
  });
  const release = () => (grip = null);
  stage.addEventListener("pointerup", release);
  stage.addEventListener("pointercancel", release);
  stage.addEventListener("click", () => cell && state.set({ row: cell.row, key: cell.key }));
  const zoom = (factor, x = plot.x + plot.w / 2, y = plot.y + plot.h / 2) => {
    const { q, k } = placeAt(view, plot, x, y);
    state.set({ view: stretch(zoomView(view, factor, q, k, shown.shape), -1) });
  };
  stage.addEventListener("wheel", (event) => {
    if (!shown) return;
    event.preventDefault();
    zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), ...point(event));
  }, { passive: false });
  axes.addEventListener("keydown", (event) => {
    if (!shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const by = (n, span) => (n * span) / 8;
    if (step) state.set({ view: stretch(panView(view, by(step[0], view.q1 - view.q0), by(step[1], view.k1 - view.k0), shown.shape), -1) });
    else if (event.key === "+" || event.key === "=") zoom(0.7);
    else if (event.key === "-") zoom(1 / 0.7);
    else if (event.key === "0") state.set({ view: state.whole() });
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  new ResizeObserver(draw).observe(stage);
  return {
    box,
    show(next, name) {
      shown = next;
      title.textContent = name;
      cell = state.row !== null && state.key !== null && state.row < next.shape.rows && state.key < next.shape.keys ? { row: state.row, key: state.key } : null;
      read.textContent = cell ? next.read(cell) : "";
      draw();
    },
  };
}

/** @param {HTMLElement} host @param {import("./source.js").Source} source @param {import("./state.js").State} state */
export function mountCompare(host, source, state) {
  const traces = source.document.traces;
  host.classList.add("compare");
  if (traces.length < 2) {
    host.append(element("div", { class: "empty-state" }, element("h3", {}, "One trace only"),
      element("p", {}, "Two checkpoints, prompts, masks or kernels lie side by side here when the page is made with a second trace:"),
      element("pre", {}, 'trace.explore("page.html", compare=other)')));
    return;
  }
  // The address is written after this view is made; only then may the state read this view's fields from it.
  queueMicrotask(() => compareBuild(host, source, state));
}

function compareBuild(host, source, state) {
  const traces = source.document.traces, most = traces.length - 1, number = (text) => (/^\d+$/.test(String(text)) && Number(text) <= most ? Number(text) : undefined);
  state.declare("other", { initial: 1, hash: "b", clean: number });
  state.declare("compareMode", { initial: "swipe", hash: "cmp", clean: (mode) => (["swipe", "side", "difference"].includes(mode) ? mode : undefined) });
  const name = (n) => traces[n].title || `trace ${n + 1}`, letters = traces.map((_, n) => [String(n), name(n)]);
  const first = () => (state.other === state.t ? (state.other === 0 ? 1 : 0) : state.t);
  const modes = [["swipe", "swipe"], ["side", "side by side"], ["difference", "A − B"]].map(([mode, text]) =>
    button(text, { press: () => state.set({ compareMode: mode }) }));
  const swipe = element("input", { type: "range", min: 0, max: 100, value: 50, "aria-label": "Swipe: share of A" });
  const layer = chooser("Layer", [], "", (c) => state.set({ c: Number(c) })), head = chooser("Head", [], "", (h) => state.set({ h: Number(h) }));
  const pickA = chooser("A", letters, String(first()), (t) => state.set({ t: Number(t) })), pickB = chooser("B", letters, String(state.other), (t) => state.set({ other: Number(t) }));
  const steps = element("input", { type: "range", min: 0, max: most, "aria-label": "Checkpoint compared as B" });
  steps.addEventListener("input", () => state.set({ other: Number(steps.value) }));
  const channel = chooser("Shows", [["mass", "mass of a block"], ["max", "largest weight"]], state.channel, (value) => state.set({ channel: value }));
  const swipeField = element("label", { class: "rg-field" }, element("span", {}, "A | B"), swipe);
  const bar = element("div", { class: "compare-bar" }, pickA, pickB, most > 1 ? element("label", { class: "rg-field" }, element("span", {}, "checkpoint"), steps) : null,
    layer, head, channel, element("span", { class: "reader-switch", role: "group", "aria-label": "How to compare" }, ...modes), swipeField);
  const told = element("p", { class: "compare-told", role: "status" }), legend = element("div", { class: "plot-legend" });
  const row = element("div", { class: "compare-row" }), heads = element("div", { class: "compare-heads" });
  host.append(bar, told, legend, row);
  const panes = [comparePane(row, state, "A"), comparePane(row, state, "B")];
  row.append(heads);
  let now = 0, headPlot = null, headsOf = "";

  const optionsOf = (field, texts, value) => {
    const select = field.querySelector("select");
    if (select.length !== texts.length) clear(select).append(...texts.map((text, n) => element("option", { value: String(n), text })));
    select.value = String(value);
  };
  const draw = async () => {
    const mine = ++now, { c, h, view, other: b, compareMode: mode } = state, a = first(), pair = [a, b], calls = traces[a].calls;
    optionsOf(layer, calls.map((call, n) => `${n + 1} · ${call.name}`), c);
    optionsOf(head, Array.from({ length: calls[c]?.heads ?? 0 }, (_, n) => String(n + 1)), h);
    pickA.querySelector("select").value = String(a);
    pickB.querySelector("select").value = steps.value = String(b);
    channel.querySelector("select").value = state.channel;
    const apart = reasonApart(source, pair, c, h), known = pair.map((t) => h < (traces[t].calls[c]?.heads ?? 0));
    const levels = apart ? [] : commonLevels(source, pair, c, h, state.channel);
    const read = (t, wanted) => {
      const list = apart ? source.levels(t, c, h, state.channel) : levels;
      const { rows, keys } = traces[t].calls[c], here = state.shape(), q = rows / (here.rows || 1), k = keys / (here.keys || 1);
      const part = wanted ?? view, seen = { q0: part.q0 * q, q1: part.q1 * q, k0: part.k0 * k, k1: part.k1 * k };
      const level = chooseLevel(list, seen, COMPARE_BLOCKS);
      return level ? readBlocks(source, t, c, h, seen, state.channel, level) : null;
    };
    const parts = await Promise.all(pair.map((t, n) => (known[n] ? read(t, view) : null)));
    const tokens = await Promise.all(pair.map((t) => source.tokens(t, traces[t].calls[c]?.key_sequence ?? null)));
    const whole = apart ? null : await Promise.all(pair.map((t) => read(t, { q0: 0, q1: calls[c].rows, k0: 0, k1: calls[c].keys })));
    if (mine !== now) return;
    const linked = !apart && parts[0] && parts[1], difference = linked ? differenceOf(parts[0].values, parts[1].values) : null;
    const all = whole?.[0] && whole[1] ? { ...differenceOf(whole[0].values, whole[1].values), ...{ whole: whole[0] } } : null;
    const texts = tokensApart(...tokens), dark = isDark(host);
    told.textContent = [apart || (linked ? "" : "The two traces hold no blocks of one size, so cells cannot be subtracted."),
      all && compareSentence(all, calls[c]), texts && !apart ? `The texts differ at ${texts} of ${tokens[0].length} tokens.` : ""].filter(Boolean).join(" ");
    let largest = 0;
    for (const part of parts) for (const value of part?.values ?? []) if (value > largest) largest = value;
    const limits = limitsFor(state.scale, Math.max(...pair.map((t) => traces[t].calls[c]?.keys ?? 1)), largest);
    const look = { low: limits[0], high: limits[1], scale: state.scale, dark };
    const bound = difference?.largest || 1e-6, signed = { kind: "diverging", low: -bound, high: bound, dark };
    const shapeOf = (n) => {
      const call = traces[pair[n]].calls[c];
      return { rows: call.rows, keys: call.keys, queryOffset: call.query_offset ?? 0, keyOffset: call.key_offset ?? 0 };
    };
    const at = (part, cell) => {
      const i = Math.floor(cell.row / part.queryBlock) - part.row0, j = Math.floor(cell.key / part.keyBlock) - part.column0;
      return i >= 0 && j >= 0 && i < part.rows && j < part.columns ? part.values[i * part.columns + j] : NaN;
    };
    const tell = (cell) => (parts.every((part) => !part || Number.isNaN(at(part, cell))) ? "" : `query ${cell.row}, key ${cell.key}: ` + parts.map((part, n) => (part ? `${"AB"[n]} ${formatNumber(at(part, cell), 4)}` : "")).filter(Boolean).join(", ")
      + (linked ? `, A − B ${formatNumber(at(parts[0], cell) - at(parts[1], cell), 3)}` : ""));
    const layerOf = (n, place = {}) => ({ excerpt: parts[n], picture: heatCanvas(parts[n].values, parts[n].rows, parts[n].columns, look), ...place });
    const single = mode !== "side" && linked;
    modes.forEach((one, n) => {
      one.disabled = n !== 1 && !linked;
      one.setAttribute("aria-pressed", String(single ? ["swipe", "side", "difference"][n] === mode : n === 1));
    });
    swipeField.hidden = !single || mode !== "swipe";
    legend.replaceChildren(...heatLegend(single && mode === "difference" ? signed : { ...look }, single && mode === "difference" ? "A − B" : `weight, ${state.scale} scale`));
    panes.forEach((pane, n) => (pane.box.hidden = single ? n === 1 : !parts[n]));
    if (single) {
      const share = Number(swipe.value) / 100;
      const layers = mode === "swipe" ? [layerOf(0, { to: share }), layerOf(1, { from: share })]
        : [{ excerpt: parts[0], picture: heatCanvas(difference.values, parts[0].rows, parts[0].columns, signed) }];
      panes[0].show({ layers, shape: shapeOf(0), read: tell }, mode === "swipe" ? `A ${name(a)}  |  B ${name(b)}` : `A − B, ${headName(c, h)}`);
    } else panes.forEach((pane, n) => parts[n] && pane.show({ layers: [layerOf(n)], shape: shapeOf(n), read: tell }, `${"AB"[n]} ${name(pair[n])}`));
    drawHeads(a, b);
  };
  const drawHeads = async (a, b) => {
    if (headsOf === `${a},${b}`) return;
    headsOf = `${a},${b}`;
    const found = await headDivergences(source, a, b), columns = Math.max(1, ...found.map((one) => one.length));
    if (headsOf !== `${a},${b}`) return;
    const values = new Float32Array(found.length * columns).fill(NaN);
    found.forEach((one, c) => values.set(one, c * columns));
    heads.hidden = !values.some(Number.isFinite);
    const high = Math.max(1e-6, ...Array.from(values).filter(Number.isFinite));
    const spec = {
      title: "How far each head is apart (Jensen–Shannon)", values, rows: found.length, columns, low: 0, high, unit: "bits", xLabel: "head", yLabel: "layer",
      xText: (n) => String(n + 1), yText: (n) => String(n + 1), height: Math.min(320, Math.max(60, 22 * found.length)),
      note: "Mean over rows, on blocks of which at most 64 cover an axis; a click opens the head. Grey: nothing to compare.",
      onPick: (c, h) => state.set({ c, h }),
      table: { head: ["head", "bits"], rows: found.flatMap((one, c) => Array.from(one, (bits, h) => [headName(c, h), bits])) },
    };
    if (headPlot) headPlot.update(spec);
    else headPlot = heatPlot(heads, spec);
  };
  let planned = false;
  const plan = () => {
    if (!planned) requestAnimationFrame(() => {
      planned = false;
      if (state.tab === "compare") draw();
    });
    planned = true;
  };
  swipe.addEventListener("input", plan);
  state.on(["t", "c", "h", "view", "channel", "scale", "other", "compareMode", "row", "key", "tab"], plan);
  state.addEventListener("recolour", plan);
  draw();
}

/** The largest difference of a head in words: where, and between what. */
function compareSentence({ largest, at, whole }, call) {
  const { queryBlock, keyBlock, columns } = whole, cells = queryBlock === 1 && keyBlock === 1;
  if (at < 0) return cells ? "A and B are equal in every cell." : `A and B are equal in blocks of ${queryBlock} × ${keyBlock}.`;
  const row = Math.floor(at / columns) * queryBlock + (call.query_offset ?? 0), key = (at % columns) * keyBlock + (call.key_offset ?? 0);
  return `Largest |A − B| of the head: ${formatNumber(largest)} at query ${row}, key ${key}${cells ? "" : `, in blocks of ${queryBlock} × ${keyBlock}`}.`;
}
