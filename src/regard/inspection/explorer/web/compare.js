import { alignCells, alignTokens, sharedText } from "./alignment.js";
import { isDark, limitsFor } from "./colours.js";
import { comparePane } from "./compare_pane.js";
import { drawTokens } from "./compare_tokens.js";
import { commonLevels, differenceOf, headDivergences, reasonApart } from "./divergences.js";
import { button, chooser, clear, element, emptyState, oncePerFrame, partOf, shown } from "./dom.js";
import { chooseLevel, drawnValues, readBlocks } from "./excerpts.js";
import { MaskTiles } from "./geometry.js";
import { heatCanvas, heatLegend, heatPlot } from "./heats.js";
import { headName, layerNumber } from "./passages.js";
import { formatNumber } from "./scales.js";

const COMPARE_BLOCKS = 512;

/**
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountCompare(host, source, state) {
  const traces = source.document.traces;
  host.classList.add("compare");
  if (traces.length < 2) {
    host.append(
      emptyState(
        "One trace only",
        "Two checkpoints, prompts, masks or kernels lie side by side here when a page has a second trace:",
        'trace.explore("page.html", compare=other)',
      ),
    );
    return;
  }
  compareBuild(host, source, state);
}

/** @param {HTMLElement} host @param {Source} source @param {State} state */
function compareBuild(host, source, state) {
  const traces = source.document.traces,
    most = traces.length - 1;
  /** @param {number} n */
  const name = (n) => traces[n].title || `trace ${n + 1}`;
  /** @type {[string, string][]} */
  const letters = traces.map((_, n) => [String(n), name(n)]);
  const first = () => (state.other === state.t ? (state.other === 0 ? 1 : 0) : state.t);
  const modes = [
    ["swipe", "swipe"],
    ["side", "side by side"],
    ["difference", "A − B"],
  ].map(([mode, text]) => button(text, { press: () => state.set({ compareMode: mode }) }));
  const swipe = element("input", {
    type: "range",
    min: 0,
    max: 100,
    value: 50,
    "aria-label": "Swipe: share of A",
  });
  const layer = chooser("Layer", [], "", (c) => state.set({ c: Number(c) })),
    head = chooser("Head", [], "", (h) => state.set({ h: Number(h) }));
  const pickA = chooser("A", letters, String(first()), (t) => state.set({ t: Number(t) })),
    pickB = chooser("B", letters, String(state.other), (t) => state.set({ other: Number(t) }));
  const steps = element("input", {
    type: "range",
    min: 0,
    max: most,
    "aria-label": "Checkpoint compared as B",
  });
  steps.addEventListener("input", () => state.set({ other: Number(steps.value) }));
  const channel = chooser(
    "Shows",
    [
      ["mass", "mass of a block"],
      ["max", "largest weight"],
    ],
    state.channel,
    (value) => state.set({ channel: value }),
  );
  const swipeField = element("label", { class: "rg-field" }, element("span", {}, "A | B"), swipe);
  const bar = element(
    "div",
    { class: "compare-bar" },
    pickA,
    pickB,
    most > 1 ? element("label", { class: "rg-field" }, element("span", {}, "checkpoint"), steps) : null,
    layer,
    head,
    channel,
    element("span", { class: "reader-switch", role: "group", "aria-label": "How to compare" }, ...modes),
    swipeField,
  );
  const told = element("p", { class: "compare-told", role: "status" }),
    legend = element("div", { class: "plot-legend" });
  const row = element("div", { class: "compare-row" }),
    heads = element("div", { class: "compare-heads" });
  const strip = element("div", { class: "compare-tokens" });
  host.append(bar, told, strip, legend, row);
  const panes = [comparePane(row, state, "A"), comparePane(row, state, "B")];
  row.append(heads);
  /** @type {PlotFrame<HeatSpec>|null} */
  let headPlot = null;
  let now = 0,
    headsOf = "",
    afterCut = "",
    opening = !state.chosen;

  /** @param {HTMLElement} field @param {string[]} texts @param {number} value */
  const optionsOf = (field, texts, value) => {
    const select = partOf(field, "select");
    if (select.length !== texts.length)
      clear(select).append(...texts.map((text, n) => element("option", { value: String(n), text })));
    select.value = String(value);
  };
  const draw = async () => {
    const mine = ++now,
      { c, h, view, other: b, compareMode: mode } = state,
      a = first(),
      calls = traces[a].calls;
    /** @type {[number, number]} */
    const pair = [a, b];
    optionsOf(
      layer,
      calls.map((call, n) => `${layerNumber(calls, n)} · ${call.name}`),
      c,
    );
    optionsOf(
      head,
      Array.from({ length: calls[c]?.heads ?? 0 }, (_, n) => String(n)),
      h,
    );
    partOf(pickA, "select").value = String(a);
    partOf(pickB, "select").value = steps.value = String(b);
    // Traces are compared by their weights.
    const shownChannel = state.channel === "max" ? "max" : "mass";
    partOf(channel, "select").value = shownChannel;
    const apart = reasonApart(source, pair, c, h),
      known = pair.map((t) => h < (traces[t].calls[c]?.heads ?? 0));
    const levels = apart ? [] : commonLevels(source, pair, c, h, shownChannel);
    /** @param {number} t @param {View} wanted */
    const read = (t, wanted) => {
      const list = apart ? source.levels(t, c, h, shownChannel) : levels;
      const { rows, keys } = traces[t].calls[c],
        here = state.shape(),
        q = rows / (here.rows || 1),
        k = keys / (here.keys || 1);
      const part = wanted ?? view,
        seen = { q0: part.q0 * q, q1: part.q1 * q, k0: part.k0 * k, k1: part.k1 * k };
      const level = chooseLevel(list, seen, COMPARE_BLOCKS);
      return level ? readBlocks(source, t, c, h, seen, shownChannel, level) : null;
    };
    const parts = await Promise.all(pair.map((t, n) => (known[n] ? read(t, view) : null)));
    const tokens = await Promise.all(
      pair.map((t) => source.tokens(t, traces[t].calls[c]?.key_sequence ?? null)),
    );
    const masks = await Promise.all(
      pair.map(async (t) => {
        const { mask_picture, tile_rows, tile_keys } = traces[t].calls[c] ?? {};
        return new MaskTiles(await source.chunk(mask_picture ?? null), tile_rows, tile_keys);
      }),
    );
    const whole = apart
      ? null
      : await Promise.all(pair.map((t) => read(t, { q0: 0, q1: calls[c].rows, k0: 0, k1: calls[c].keys })));
    if (mine !== now) return;
    const places = tokens[0] && tokens[1] ? alignTokens(tokens[0], tokens[1]) : null;
    // Tokens are cells where queries and keys are one text.
    const cells = pair.every((t, n) => {
      const call = traces[t].calls[c];
      return call?.query_sequence === call?.key_sequence && tokens[n]?.length === call?.keys;
    });
    const shifted = cells && places?.some((place, n) => place !== n) ? places : null;
    /** @param {Excerpt} a @param {Excerpt} b */
    const aligned = (a, b) =>
      shifted && a.queryBlock * a.keyBlock === 1 ? alignCells(a, b, shifted, shifted) : b;
    const one = parts[0],
      other = one && parts[1] && !apart ? aligned(one, parts[1]) : null;
    const linked = one && other ? { one, other, ...differenceOf(one.values, other.values) } : null;
    const all =
      whole?.[0] && whole[1]
        ? {
            ...differenceOf(whole[0].values, aligned(whole[0], whole[1]).values),
            ...{ whole: whole[0] },
          }
        : null;
    const texts = sharedText(places, tokens[1]?.length ?? 0),
      dark = isDark(host);
    drawTokens(strip, state, places, tokens);
    told.textContent = [
      apart || (linked ? "" : "The two traces hold no blocks of one size, so cells cannot be subtracted."),
      all && compareSentence(all, calls[c]),
      afterCut,
      texts,
      mode !== "side" && linked && other !== parts[1] ? "Cells of B stand where A has the same tokens." : "",
    ]
      .filter(Boolean)
      .join(" ");
    let largest = 0;
    for (const part of parts) for (const value of part?.values ?? []) if (value > largest) largest = value;
    const limits = limitsFor(
      state.scale,
      Math.max(...pair.map((t) => traces[t].calls[c]?.keys ?? 1)),
      largest,
    );
    /** @type {HeatLook} */
    const look = { low: limits[0], high: limits[1], scale: state.scale, dark };
    const bound = linked?.largest || 1e-6;
    /** @type {HeatLook} */
    const signed = { kind: "diverging", low: -bound, high: bound, dark };
    /** @param {number} n */
    const shapeOf = (n) => {
      const call = traces[pair[n]].calls[c];
      return {
        rows: call.rows,
        keys: call.keys,
        queryOffset: call.query_offset,
        keyOffset: call.key_offset,
      };
    };
    /** @param {Excerpt} part @param {Cell} cell */
    const at = (part, cell) => {
      const i = Math.floor(cell.row / part.queryBlock) - part.row0,
        j = Math.floor(cell.key / part.keyBlock) - part.column0;
      return i >= 0 && j >= 0 && i < part.rows && j < part.columns ? part.values[i * part.columns + j] : NaN;
    };
    const back = new Map(Array.from(shifted ?? [], (place, n) => [place, n]));
    /** @param {(place: number) => number} to @returns {(cell: Cell) => Cell|null} */
    const moved = (to) => (cell) => {
      const there = { row: to(cell.row), key: to(cell.key) };
      return there.row >= 0 && there.key >= 0 ? there : null;
    };
    // B alone: the cell held in A is where B has the same tokens.
    const own = shifted
      ? { ofHeld: moved((n) => shifted[n] ?? -1), toHeld: moved((n) => back.get(n) ?? -1) }
      : {};
    /**
     * The numbers of a cell of A, or of B where B stands alone.
     * @param {number} n @returns {(cell: Cell) => string}
     */
    const tell = (n) => (cell) => {
      const exact = parts.every((part) => !part || part.queryBlock * part.keyBlock === 1);
      /** @param {number} place */
      const inA = (place) => (n && shifted && exact ? (back.get(place) ?? -1) : place);
      const here = { row: inA(cell.row), key: inA(cell.key) };
      const read = [one ? at(one, here) : NaN, n && parts[1] ? at(parts[1], cell) : NaN];
      if (!n && (other ?? parts[1])) read[1] = at(/** @type {Excerpt} */ (other ?? parts[1]), here);
      if (read.every(Number.isNaN)) return "";
      /** @param {string} word @param {number} place */
      const named = (word, place) => {
        const text = cells && tokens[n]?.[place];
        return `${word} ${place}${text ? ` ‘${shown(text)}’` : ""}`;
      };
      const values = read.map((value, m) => (parts[m] ? `${"AB"[m]} ${formatNumber(value, 4)}` : ""));
      const apartBy = linked ? `, A − B ${formatNumber(read[0] - read[1], 3)}` : "";
      return `${named("query", cell.row)}, ${named("key", cell.key)}: ${values.filter(Boolean).join(", ")}${apartBy}`;
    };
    /**
     * @param {Excerpt} part @param {{from?: number, to?: number}} [place] @param {number} [n] whose mask holds
     * @param {Float32Array} [values] @param {HeatLook} [colours]
     */
    const layerOf = (part, place = {}, n = 0, values = part.values, colours = look) => {
      const drawn = drawnValues(part, traces[pair[n]].calls[c], masks[n], values);
      const picture = heatCanvas(drawn, part.rows, part.columns, colours);
      return { excerpt: part, picture, ...place };
    };
    const single = mode === "side" ? null : linked;
    modes.forEach((one, n) => {
      one.disabled = n !== 1 && !linked;
      one.setAttribute(
        "aria-pressed",
        String(single ? ["swipe", "side", "difference"][n] === mode : n === 1),
      );
    });
    swipeField.hidden = !single || mode !== "swipe";
    legend.replaceChildren(
      ...heatLegend(
        single && mode === "difference" ? signed : { ...look },
        single && mode === "difference" ? "A − B" : `weight, ${state.scale} scale`,
      ),
    );
    for (const [n, pane] of panes.entries()) pane.box.hidden = single ? n === 1 : !parts[n];
    if (single) {
      const share = Number(swipe.value) / 100;
      const layers =
        mode === "swipe"
          ? [layerOf(single.one, { to: share }), layerOf(single.other, { from: share })]
          : [layerOf(single.one, {}, 0, single.values, signed)];
      panes[0].show(
        { layers, shape: shapeOf(0), read: tell(0) },
        mode === "swipe" ? `A ${name(a)}  |  B ${name(b)}` : `A − B, ${headName(calls, c, h)}`,
      );
    } else
      for (const [n, part] of parts.entries())
        if (part)
          panes[n].show(
            { layers: [layerOf(part, {}, n)], shape: shapeOf(n), read: tell(n), ...(n ? own : {}) },
            `${"AB"[n]} ${name(pair[n])}`,
          );
    drawHeads(a, b);
  };
  /** @param {number} a @param {number} b */
  const drawHeads = async (a, b) => {
    if (headsOf === `${a},${b}`) return;
    headsOf = `${a},${b}`;
    const found = await headDivergences(source, a, b),
      columns = Math.max(1, ...found.map((one) => one.length));
    if (headsOf !== `${a},${b}`) return;
    const values = new Float32Array(found.length * columns).fill(NaN);
    for (const [c, one] of found.entries()) values.set(one, c * columns);
    heads.hidden = !values.some(Number.isFinite);
    // A page opens on what differs, unless somebody chose a head; behind what was cut, on what that changed.
    const cut = source.document.cut ?? [],
      from = cut.length ? columns * (1 + Math.min(...cut.map(([c]) => c))) : 0;
    const apart = values.map((one, n) =>
      n < from || cut.some(([c, h]) => c * columns + h === n) ? 0 : one || 0,
    );
    const most = apart.indexOf(Math.max(...apart));
    const [c, h] = [Math.floor(most / columns), most % columns];
    const changes = apart[most] > 0;
    if (opening && changes && (cut.length || !(found[state.c]?.[state.h] > 0))) state.set({ c, h });
    // No map differs: what was cut is shown itself.
    if (opening && !changes && cut.length) state.set({ c: cut[0][0], h: cut[0][1], compareMode: "side" });
    opening = false;
    if (cut.length && !heads.hidden) {
      afterCut =
        from < values.length
          ? `Of the heads after what was cut, ${changes ? `${headName(traces[a].calls, c, h)} changed most` : "none changed"}.`
          : "No head comes after what was cut: what changes is what the model predicts.";
      plan();
    }
    const high = Math.max(1e-6, ...Array.from(values).filter(Number.isFinite));
    const spec = {
      title: "How far each head is apart (Jensen–Shannon)",
      values,
      rows: found.length,
      columns,
      low: 0,
      high,
      unit: "bits",
      xLabel: "head",
      yLabel: "layer",
      /** @param {number} n */
      xText: (n) => String(n),
      /** @param {number} n */
      yText: (n) => String(layerNumber(traces[a].calls, n)),
      height: Math.min(320, Math.max(60, 22 * found.length)),
      note: "Mean over rows, on at most 64 × 64 blocks; a click opens the head. Grey: nothing to compare.",
      /** @param {number} c @param {number} h */
      onPick: (c, h) => state.set({ c, h }),
      table: {
        head: ["head", "bits"],
        rows: found.flatMap((one, c) =>
          Array.from(one, (bits, h) => [headName(traces[a].calls, c, h), bits]),
        ),
      },
    };
    if (headPlot) headPlot.update(spec);
    else headPlot = heatPlot(heads, spec, state);
  };
  const plan = oncePerFrame(() => {
    if (state.tab === "compare") draw();
  });
  swipe.addEventListener("input", plan);
  state.on(["t", "c", "h", "view", "channel", "scale", "other", "compareMode", "row", "key", "tab"], plan);
  state.addEventListener("recolour", plan);
  draw();
}

/**
 * The largest difference of a head in words: where, and between what.
 * @param {ReturnType<typeof differenceOf> & { whole: Excerpt }} what
 * @param {Call} call
 */
function compareSentence({ largest, at, whole }, call) {
  const { queryBlock, keyBlock, columns } = whole,
    cells = queryBlock === 1 && keyBlock === 1;
  if (at < 0)
    return cells
      ? "A and B are equal in every cell."
      : `A and B are equal in blocks of ${queryBlock} × ${keyBlock}.`;
  const row = Math.floor(at / columns) * queryBlock + call.query_offset,
    key = (at % columns) * keyBlock + call.key_offset;
  const blocks = cells ? "" : `, in blocks of ${queryBlock} × ${keyBlock}`;
  return `Largest |A − B| of the head: ${formatNumber(largest)} at query ${row}, key ${key}${blocks}.`;
}
