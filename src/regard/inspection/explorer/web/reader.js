import { button, clear, element, say } from "./dom.js";
import { MaskTiles } from "./geometry.js";
import { patchPane, textPane } from "./panes.js";
import { findMatches, headName, largestIndices, rankEdges } from "./passages.js";
import { countLayers, rolledLayers, rolledWords, rollOut } from "./rollout.js";
import { formatNumber } from "./scales.js";
import { nameToken, sidesOf } from "./sides.js";

const READER_TOP = 16;

/** @typedef {"both" | "query" | "key"} Which */

/**
 * Weights of the chosen row ("out") or key ("in") by index of the other side; bins are spread out.
 * @param {Source} source @param {State} state
 * @returns {Promise<{values: Float32Array, exact: boolean, bin: number, of: string, blocked: number}|null>}
 */
export async function readChosen(source, state) {
  const { t, c, h, row, key, direction } = state,
    out = direction === "out",
    n = out ? row : key;
  if (row !== null && rolledLayers(source, state)) {
    const values = await rollOut(source, t, c, row);
    return values && { values, exact: true, bin: 1, of: "rollout", blocked: 1 };
  }
  const found = n === null ? null : await (out ? source.row(t, c, h, n) : source.column(t, c, h, n));
  if (!found) return null;
  const { exact, bin, of } = found,
    blocked = "rows" in found ? found.rows : found.keys;
  if (exact) return { values: found.values, exact, bin, of, blocked };
  const call = source.call(t, c),
    { keys, rows, mask_picture, tile_rows, tile_keys } = call;
  const mask = new MaskTiles(await source.chunk(mask_picture), tile_rows, tile_keys);
  const values = Float32Array.from({ length: out ? keys : rows }, (_, at) => {
    // Blocks reach beyond the mask; what they hold does not.
    if (out ? mask.forbids(call, Number(n), at) : mask.forbids(call, at, Number(n))) return 0;
    const place = Math.floor(at / bin),
      share = out ? Math.min(bin, keys - place * bin) : blocked;
    return found.values[place] / (of === "mass" ? share : 1);
  });
  return { values, exact, bin, of, blocked };
}

/**
 * Long-range edges of a head from its stored top keys or its exact weights; null when neither is known.
 * @param {Source} source @param {number} t @param {number} c @param {number} h
 * @returns {Promise<Edge[] | null>}
 */
async function readEdges(source, t, c, h) {
  const head = source.head(t, c, h),
    call = source.call(t, c);
  const shift = call.query_offset - call.key_offset;
  if (head.top_keys) {
    const [keys, weights] = await Promise.all([source.chunk(head.top_keys), source.chunk(head.top_weights)]);
    return rankEdges(keys.values, weights.values, keys.shape[1], { shift });
  }
  const exact = await source.weights(t, c, h);
  if (!exact) return null;
  const keys = new Int32Array(4 * exact.rows).fill(-1),
    weights = new Float32Array(4 * exact.rows);
  for (let i = 0; i < exact.rows; i++) {
    const row = exact.values.subarray(i * exact.keys, (i + 1) * exact.keys);
    largestIndices(row, 4).forEach((key, place) => {
      keys[4 * i + place] = key;
      weights[4 * i + place] = row[key];
    });
  }
  return rankEdges(keys, weights, 4, { shift });
}

/**
 * Pixels between tokens: some where none brings white space of its own, as numbers and pieces of words do.
 * @param {Side} what
 */
const gapOf = ({ kind, tokens }) =>
  kind === "index" || (tokens.length > 1 && !tokens.some((text) => /^\s|\s$/.test(text))) ? 8 : 2;

/**
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountReader(host, source, state) {
  const outward = button("reads", { title: "Tint what the chosen token reads", press: () => turn("out") });
  const inward = button("is read by", { title: "Tint who reads the chosen token", press: () => turn("in") });
  const down = button("rollout", {
    title: "Tint what reaches the chosen token through this layer and those below, residual stream included",
    press: () => turn("out", true),
  });
  const arcs = element("input", { type: "checkbox", on: { change: () => refresh() } });
  arcs.checked = true;
  const arcsField = element("label", { class: "rg-tick" }, arcs, element("span", {}, "arcs"));
  const find = element("input", {
    type: "search",
    placeholder: "text or :37",
    "aria-label": "Find in the text",
    "aria-keyshortcuts": "/",
  });
  const count = element("output", { class: "reader-count" }),
    status = element("p", { class: "reader-status" });
  /** @param {string} text @param {string} title @param {string} keys @param {() => void} press */
  const step = (text, title, keys, press) => button(text, { title, keys, press });
  const bar = element(
    "div",
    { class: "reader-bar" },
    element(
      "span",
      { class: "reader-switch", role: "group", "aria-label": "Direction" },
      outward,
      inward,
      down,
    ),
    element(
      "span",
      { class: "reader-find" },
      find,
      step("‹", "Previous match", "Shift+Enter", () => goMatch(-1)),
      step("›", "Next match", "Enter", () => goMatch(1)),
      count,
    ),
    arcsField,
  );
  const body = element("div", { class: "reader-panes" });
  host.classList.add("reader");
  host.append(bar, status, body);

  /** @type {Sides|null} */
  let sides = null;
  /** @type {Partial<Record<Which, Pane>>} */
  let panes = {};
  /** @type {{first: number, last: number}[]} */
  let matches = [];
  /** @type {Edge[]|null} */
  let edges = null;
  let drawn = "",
    match = -1,
    edge = -1,
    edgesOf = "",
    searched = "",
    shownFor = "",
    builds = 0,
    draws = 0;

  /** @param {Direction} direction */
  const turn = (direction, rollout = false) => {
    const from = direction === "out" ? state.key : state.row;
    const name = direction === "out" ? "row" : "key",
      changes = /** @type {Record<string, any>} */ ({ direction, rollout });
    if (sides?.same && state[name] === null && from !== null) {
      const here = sides[direction === "out" ? "query" : "key"],
        there = sides[direction === "out" ? "key" : "query"];
      const n = here.indexAt(there.tokenAt(from));
      if (n >= 0) changes[name] = n;
    }
    state.set(changes);
  };
  /**
   * @param {Which} which
   * @returns {(token: number) => void}
   */
  const choose = (which) => (token) => {
    const direction = which === "both" ? state.direction : which === "query" ? "out" : "in";
    const side = sides?.[direction === "out" ? "query" : "key"],
      n = side?.indexAt(token) ?? -1;
    if (n < 0)
      return say(`Token ${token} is not in this call's ${direction === "out" ? "queries" : "keys"}.`, host);
    state.set({ direction, [direction === "out" ? "row" : "key"]: n });
  };
  /**
   * @param {Which} which @param {Side} side @param {string} label
   * @returns {Promise<Pane>}
   */
  const makePane = async (which, side, label) => {
    const box = element("section", { "aria-label": label });
    if (which !== "both") box.append(element("h3", {}, label));
    body.append(box);
    const onChoose = choose(which);
    box.addEventListener("pointerover", ({ target }) => {
      const token = /** @type {HTMLElement} */ (target).closest("bdi")?.dataset.token;
      if (token && state.fold.includes("plain")) onChoose(Number(token));
    });
    const options = { tokens: side.tokens, label, onChoose };
    const { about } = side;
    const grid = side.kind === "patches" && about?.patch_grid;
    if (!grid) return textPane(box, { ...options, gap: gapOf(side) });
    const picture = await source.chunk(about.picture);
    return patchPane(box, { ...options, grid, first: about.first_patch ?? 0, picture });
  };
  const rebuild = async () => {
    const { t, c } = state,
      call = source.call(t, c),
      build = ++builds;
    const key = call
      ? [
          t,
          call.query_sequence,
          call.key_sequence,
          call.rows,
          call.keys,
          call.query_offset,
          call.key_offset,
        ].join()
      : "none";
    if (key !== drawn && call) {
      const next = await sidesOf(source, t, c);
      if (build !== builds) return;
      drawn = key;
      sides = next;
      clear(body);
      panes = {};
      if (sides.same)
        panes.both = await makePane(
          "both",
          sides.query.tokens.length >= sides.key.tokens.length ? sides.query : sides.key,
          "Text",
        );
      else {
        panes.query = await makePane("query", sides.query, "Queries");
        panes.key = await makePane("key", sides.key, "Keys");
      }
      arcsField.hidden = !panes.both || sides.query.kind === "patches";
      search();
    }
    await refresh();
    if (key !== shownFor) follow();
    shownFor = key;
  };

  const follow = () => {
    const which = state.direction === "out" ? "query" : "key",
      n = which === "query" ? state.row : state.key;
    if (sides && n !== null) (panes.both ?? panes[which])?.goTo(sides[which].tokenAt(n));
  };

  const refresh = async () => {
    if (!sides) return;
    const { t, c, h, row, key, direction } = state,
      now = ++draws,
      out = direction === "out";
    const layers = rolledLayers(source, state);
    down.hidden = !countLayers(source, t, c);
    down.setAttribute("aria-pressed", String(layers > 0));
    outward.setAttribute("aria-pressed", String(out && !layers));
    inward.setAttribute("aria-pressed", String(!out));
    const asks = out ? sides.query : sides.key,
      answers = out ? sides.key : sides.query,
      n = out ? row : key;
    const found = await readChosen(source, state);
    const top = !found
      ? []
      : found.exact
        ? largestIndices(found.values, READER_TOP).map((at) => [at, found.values[at]])
        : out && row !== null
          ? ((await source.topKeys(t, c, h, row, READER_TOP)) ?? []).map((one) => [one.key, one.weight])
          : [];
    if (now !== draws) return;
    let largest = 0;
    for (const value of found?.values ?? []) if (value > largest) largest = value;
    const weights = found && new Float32Array(answers.tokens.length);
    if (found && weights)
      for (let at = 0; at < found.values.length; at++) weights[answers.tokenAt(at)] = found.values[at];
    const least = 0.01 * Math.max(largest, top[0]?.[1] ?? 0);
    const targets = new Map(
      top.filter(([, weight]) => weight >= least).map(([at, weight]) => [answers.tokenAt(at), weight]),
    );
    if (weights) for (const [at, weight] of targets) weights[at] = weight;
    const found2 = new Set();
    for (const one of matches.slice(0, 2000)) for (let at = one.first; at <= one.last; at++) found2.add(at);
    const chosen = n === null ? null : asks.tokenAt(n);
    const whole = {
      chosen,
      weights,
      largest: found?.exact === false && top.length ? Math.max(largest, top[0][1]) : largest,
      targets,
      matches: found2,
      arcs: arcs.checked,
    };
    const asking = { ...whole, weights: null, targets: new Map(), arcs: false };
    const answering = { ...whole, chosen: null, arcs: false, matches: new Set() };
    panes.both?.show(whole);
    panes.query?.show(out ? asking : answering);
    panes.key?.show(out ? answering : asking);
    const one = state.selection.length > 1 && !layers ? `${headName(state.calls(), c, h)}: ` : "";
    const name = n === null ? "" : `${one}${out ? "Query" : "Key"} ${nameToken(asks, n)}`;
    const each = found?.of === "largest" ? ", largest of each" : "";
    const plain = state.fold.includes("plain"),
      reads = layers ? rolledWords(layers) : out ? "reads" : "is read by";
    const largestOnes = top.slice(0, 3).map(([at, by]) => `${nameToken(answers, at)} ${formatNumber(by, 2)}`);
    const blocks = found?.exact === false ? `, in blocks of ${found.bin}${each}` : "";
    status.textContent =
      n === null
        ? `${plain ? "Point at" : "Choose"} a token to see what it reads and who reads it.`
        : !found
          ? `${name}: nothing is known about its weights at this level.`
          : plain && top.length
            ? `${name} ${reads} ${largestOnes.join(", ")}.`
            : `${name} ${reads}; tint: root of the ${layers ? "share" : "weight"}, full at ` +
              `${formatNumber(whole.largest)}${blocks}.`;
  };

  const search = () => {
    const side =
      sides &&
      (sides.same
        ? panes.both && (sides.query.tokens.length >= sides.key.tokens.length ? sides.query : sides.key)
        : sides[state.direction === "out" ? "query" : "key"]);
    matches = side ? findMatches(side.tokens, find.value) : [];
    // `:37` and `#37` name a position, besides texts that read so.
    const at = side && /^[:#]\d+$/.test(find.value) ? side.tokenAt(+find.value.slice(1) - side.offset) : -1;
    if (side && at in side.tokens) matches.unshift({ first: at, last: at });
    match = -1;
    searched = find.value;
    count.textContent = find.value ? (matches.length ? `${matches.length} found` : "none") : "";
    refresh();
  };
  /** @param {number} by */
  const goMatch = (by) => {
    if (!sides || !matches.length) return;
    match = match < 0 ? (by > 0 ? 0 : matches.length - 1) : (match + by + matches.length) % matches.length;
    count.textContent = `${match + 1} / ${matches.length}`;
    const which = sides.same ? "both" : state.direction === "out" ? "query" : "key";
    choose(which)(matches[match].last);
    panes[which]?.goTo(matches[match].last);
  };
  /** @param {string} text */
  const tell = (text) => {
    status.textContent = text;
    say(text, host);
  };
  /** @param {number} by */
  const goEdge = async (by) => {
    const { t, c, h } = state,
      name = `${t},${c},${h}`;
    if (!sides || !source.call(t, c)?.heads) return;
    if (edgesOf !== name) {
      edges = await readEdges(source, t, c, h);
      [edgesOf, edge] = [name, -1];
    }
    if (!edges?.length)
      return tell(
        edges
          ? "No weight of 0.05 or more in this head goes far."
          : "The largest weights of this head are not in this file: pin it (pinned= of trace.explore).",
      );
    edge = edge < 0 ? (by > 0 ? 0 : edges.length - 1) : (edge + by + edges.length) % edges.length;
    const { row, key, weight, distance } = edges[edge];
    state.set({ row, key, direction: "out" });
    await refresh();
    tell(
      `Edge ${edge + 1} of ${edges.length}: query ${nameToken(sides.query, row)} to key ${nameToken(sides.key, key)}, ` +
        `weight ${formatNumber(weight)}, ${Math.abs(distance)} tokens ${distance < 0 ? "ahead" : "back"}`,
    );
    (panes.both ?? panes.query)?.goTo(sides.query.tokenAt(row));
    panes.key?.goTo(sides.key.tokenAt(key));
  };

  let waiting = 0;
  find.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(search, 150);
  });
  find.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !find.value)
      return /** @type {HTMLElement|null} */ (host.querySelector(".reader-text, canvas"))?.focus();
    if (event.key === "Escape") find.value = "";
    else if (event.key !== "Enter") return event.stopPropagation();
    clearTimeout(waiting);
    if (find.value !== searched) search();
    if (event.key === "Enter") goMatch(event.shiftKey ? -1 : 1);
    event.stopPropagation();
    event.preventDefault();
  });
  state.addEventListener("find", () => find.focus());
  state.addEventListener("next-edge", () => goEdge(1));
  state.addEventListener("previous-edge", () => goEdge(-1));
  state.addEventListener("recolour", refresh);
  state.on(["t", "c", "h", "row", "key", "direction", "rollout", "selection", "fold"], (_, changed) => {
    rebuild().then(() => {
      if (!changed.has("row") && !changed.has("key")) return;
      if (!host.contains(document.activeElement)) follow();
    });
  });
  rebuild();
}
