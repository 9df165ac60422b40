import { button, chooser, clear, element, oncePerFrame, penOf, pixelRatio } from "./dom.js";
import { headsTogether } from "./excerpts.js";
import { mountProducts } from "./feature_products.js";
import { mountHeadNotes } from "./head_notes.js";
import { mountHeadSearch } from "./head_search.js";
import { LINE_STEP, tokenColumn } from "./line_columns.js";
import { joinLines, LEAST_LINE, readLines, readLinesInto } from "./line_rows.js";
import { headName, layerNumber } from "./passages.js";
import { formatNumber } from "./scales.js";
import { nameToken, sidesOf } from "./sides.js";

/** Heads that are told apart by colour. */
const LINES_HEADS = 8;
/** Pixels of a head in the strip beside the tokens. */
const LINES_STRIP = 7;
const LINES_LISTED = 8;
/** Pixels of height that a sheet has room for. */
const LINES_PRINTED = 620;

/** @typedef {{row: number, key: number, weight: number}[]|null} HeadLines */

/**
 * Two columns of tokens, queries and keys, with a line for each large weight of each chosen head.
 * @param {HTMLElement} host @param {Source} source @param {State} state
 */
export function mountHeadLines(host, source, state) {
  const canvas = element("canvas", { "aria-hidden": "true" });
  const chips = element("div", { class: "lines-heads", role: "group", "aria-label": "Heads by colour" });
  const kept = element("div", { class: "lines-heads", role: "group", "aria-label": "Queries kept" });
  const note = element("p", { class: "details-note" });
  const caption = element("caption"),
    header = element("thead"),
    rows = element("tbody");
  const table = element("table", { class: "details-table lines-table" }, caption, header, rows);
  /** @type {{query: boolean, n: number}|null} */
  let hovered = null;
  /** @type {Sides|null} */
  let sides = null;
  /** @type {Head[]} */
  let heads = [];
  /** @type {HeadLines[]} */
  let lines = [];
  /** @type {ReturnType<typeof active>} */
  let shown = null;
  let now = 0,
    onPaper = false,
    waiting = 0;

  /** @param {boolean} query */
  const column = (query) =>
    tokenColumn(query ? "Queries" : "Keys", {
      hover: (n) => {
        const next = n === null ? null : { query, n };
        if (next?.n === hovered?.n && next?.query === hovered?.query) return;
        hovered = next;
        refresh();
      },
      choose: (n, how) => {
        if (query && how === "keep") keep(n);
        const name = query ? "row" : "key",
          direction = query ? "out" : "in";
        const again = how === "click" && state[name] === n && state.direction === direction;
        state.set({ [name]: again ? null : n, direction });
      },
      leave: () => columns[query ? 1 : 0].node.focus(),
      scrolled: () => {
        paint();
        state.set({ at: columns.map(({ node }) => Math.floor(node.scrollTop / LINE_STEP)).join("-") });
        refresh();
      },
    });
  const columns = [column(true), column(false)];
  const figure = element("div", { class: "lines-figure" }, columns[0].node, canvas, columns[1].node);

  const asked = () =>
    state.asked
      .split(",")
      .filter(Boolean)
      .map(Number)
      .filter((n) => n < state.shape().rows);
  /** @param {number} n */
  const keep = (n) => {
    const before = asked();
    state.set({ asked: (before.includes(n) ? before.filter((one) => one !== n) : [...before, n]).join(",") });
  };
  /** The token whose row or column is shown. */
  const active = () => {
    const query = state.direction === "out",
      n = query ? state.row : state.key;
    return hovered ?? (n === null ? null : { query, n });
  };

  /** Lines of what is asked for, read as soon as nothing else is asked. */
  const refresh = () => {
    clearTimeout(waiting);
    waiting = setTimeout(read, source.ask ? 80 : 0);
  };
  const read = async () => {
    const mine = ++now,
      { t } = state;
    if (!sides || !figure.clientHeight) return;
    const wanted = active(),
      own = asked(),
      [first, end] = columns[0].sight(),
      sight = columns[1].sight();
    const inSight = Array.from({ length: Math.max(0, end - first) }, (_, n) => first + n);
    const alone = wanted?.query ? (hovered ? [wanted.n] : [...new Set([...own, wanted.n])]) : own;
    const queries = alone.length ? alone : inSight;
    const found = await Promise.all(
      heads.map(async (head) => {
        if (!wanted || wanted.query) return readLines(source, t, head, queries, sight, alone.length > 0);
        const into = await readLinesInto(source, t, head, wanted.n);
        return (
          into ??
          (await readLines(source, t, head, queries, sight, false))?.filter(({ key }) => key === wanted.n)
        );
      }),
    );
    if (mine !== now) return;
    lines = found.map((one) => one ?? null);
    shown = wanted;
    tell();
    paint();
  };

  const tell = () => {
    if (!sides) return;
    const known = lines.some((one) => one !== null);
    note.textContent = known
      ? `A line is as strong as its weight; below ${LEAST_LINE} there is none.` +
        (headsTogether(source, state).length > heads.length
          ? ` The first ${heads.length} heads of the selection.`
          : "")
      : "Weights one by one are not in this file: pin the heads (pinned= of trace.explore) or serve the trace.";
    const parts = [sides.query, sides.key].flatMap(({ size }, n) => {
      const [first, end] = columns[n].sight();
      return end - first < size ? [`${n ? "keys" : "queries"} ${first} to ${end - 1} of ${size}`] : [];
    });
    if (onPaper && parts.length) note.append(` Printed are ${parts.join(" and ")}.`);
    table.hidden = !shown || !known;
    if (!shown) return;
    const { query, n } = shown;
    const from = query ? sides.query : sides.key,
      other = query ? sides.key : sides.query;
    const own = lines.map((one) => one?.filter((line) => line[query ? "row" : "key"] === n) ?? null);
    // What is not listed is less than the last that is.
    const least = own.map((one) => formatNumber(one?.at(-1)?.weight, 1));
    caption.textContent = `${query ? "Query" : "Key"} ${nameToken(from, n)} ${query ? "reads" : "is read by"}`;
    header.replaceChildren(
      element(
        "tr",
        {},
        element("th", { scope: "col", text: query ? "key" : "query" }),
        ...heads.map(([c, h], place) =>
          element(
            "th",
            { scope: "col", "aria-label": headName(state.calls(), c, h) },
            element("i", { class: `lines-swatch series-${place}` }),
            `L${layerNumber(state.calls(), c)} H${h}`,
          ),
        ),
      ),
    );
    rows.replaceChildren(
      ...joinLines(own, query ? "key" : "row", LINES_LISTED).map(({ n: at, weights }) =>
        element(
          "tr",
          {},
          element(
            "th",
            { scope: "row" },
            button(nameToken(other, at), {
              title: `Choose the pair with ${nameToken(other, at)}`,
              press: () => state.set({ [query ? "row" : "key"]: n, [query ? "key" : "row"]: at }),
            }),
          ),
          ...weights.map((weight, place) =>
            element("td", { text: weight === null ? `< ${least[place]}` : formatNumber(weight, 2) }),
          ),
        ),
      ),
    );
  };

  const draw = () => {
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width || !height) return;
    const ratio = pixelRatio(),
      pen = penOf(canvas),
      style = getComputedStyle(host);
    figure.style.setProperty("--tall", `${height}px`);
    figure.style.setProperty("--shrink", String(Math.min(1, LINES_PRINTED / height)));
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    pen.scale(ratio, ratio);
    pen.lineWidth = heads.length > 4 ? 1.5 : 2;
    const strip = shown ? LINES_STRIP * heads.length : 0;
    const left = shown && !shown.query ? strip + 2 : 0,
      right = shown?.query ? width - strip - 2 : width;
    lines.forEach((own, place) => {
      pen.strokeStyle = pen.fillStyle = style.getPropertyValue(`--series-${place}`).trim();
      const shift = 2 * (place - (heads.length - 1) / 2);
      for (const { row, key, weight } of own ?? []) {
        if (!(weight >= LEAST_LINE)) continue;
        const [from, to] = [columns[0].middle(row) + shift, columns[1].middle(key) + shift];
        pen.globalAlpha = Math.min(1, weight);
        if (shown && row === shown.n && shown.query)
          pen.fillRect(right + 2 + place * LINES_STRIP, to - shift - 8, LINES_STRIP - 1, 16);
        if (shown && key === shown.n && !shown.query)
          pen.fillRect(place * LINES_STRIP, from - shift - 8, LINES_STRIP - 1, 16);
        if (Math.max(from, to) < 0 || Math.min(from, to) > height) continue;
        pen.beginPath();
        pen.moveTo(left, from);
        pen.bezierCurveTo((left + right) / 2, from, (left + right) / 2, to, right, to);
        pen.stroke();
      }
    });
  };
  const paint = oncePerFrame(draw);

  const showHeads = () => {
    heads = headsTogether(source, state).slice(0, LINES_HEADS);
    const { t, c, h, selection } = state;
    clear(chips).append(
      ...heads.map(([layer, head], place) =>
        element(
          "span",
          { class: "lines-chip" },
          element("i", { class: `lines-swatch series-${place}` }),
          button(headName(state.calls(), layer, head), {
            pressed: layer === c && head === h,
            press: () => state.set({ c: layer, h: head, selection }),
          }),
          heads.length > 1 &&
            button("×", {
              title: `Leave out ${headName(state.calls(), layer, head)}`,
              press: () => {
                const rest = selection.filter((one) => one[0] !== layer || one[1] !== head);
                const [at] = layer === c && head === h ? rest : [[c, h]];
                state.set({ c: at[0], h: at[1], selection: rest });
              },
            }),
        ),
      ),
    );
    const shape = state.shape();
    const others = source.document.traces[t].calls
      .flatMap(({ heads: count, rows: T, keys: S }, layer) =>
        T === shape.rows && S === shape.keys
          ? Array.from({ length: count }, (_, head) => /** @type {Head} */ ([layer, head]))
          : [],
      )
      .filter(([layer, head]) => !heads.some((one) => one[0] === layer && one[1] === head));
    if (heads.length < LINES_HEADS && others.length)
      chips.append(
        chooser(
          "",
          [
            ["", "add a head"],
            ...others
              .slice(0, 1024)
              .map(
                /** @returns {[string, string]} */ ([a, b]) => [`${a}.${b}`, headName(state.calls(), a, b)],
              ),
          ],
          "",
          (value) => state.set({ selection: [...heads, value.split(".").map(Number)] }),
          { "aria-label": "Add a head" },
        ),
      );
  };
  const showKept = () => {
    const from = sides?.query;
    clear(kept);
    if (!from) return;
    const own = asked(),
      { row } = state;
    if (row !== null && !own.includes(row))
      kept.append(
        button(`keep ${nameToken(from, row)}`, {
          title: "Keep this query's lines beside others",
          keys: "Enter",
          press: () => keep(row),
        }),
      );
    kept.append(
      ...own.map((n) =>
        button(`${nameToken(from, n)} ×`, {
          title: `Keep ${nameToken(from, n)} no more`,
          pressed: true,
          press: () => keep(n),
        }),
      ),
    );
    const out = state.direction === "out";
    columns[0].mark(row, own, out);
    columns[1].mark(state.key, [], !out);
  };
  const place = () => {
    const [query, key] = state.at.split("-").map(Number);
    [query, key].forEach((n, at) => {
      const { node } = columns[at];
      if (Math.floor(node.scrollTop / LINE_STEP) !== n) node.scrollTop = n * LINE_STEP;
    });
  };
  /** Where the strongest line of a chosen query leads is brought into sight. */
  const follow = async () => {
    const { t, row, direction } = state;
    if (direction !== "out" || row === null || !sides || hovered) return;
    const found = await Promise.all(heads.map((head) => readLines(source, t, head, [row], [0, 0], true)));
    const top = joinLines(found, "key", 3).map(({ n }) => n);
    const [first, end] = columns[1].sight();
    if (top.length && !top.some((n) => n >= first && n < end - 1)) columns[1].goTo(top[0]);
  };
  const rebuild = async () => {
    const { t, c } = state;
    if (!source.call(t, c)?.heads) return;
    const next = await sidesOf(source, t, c);
    if (t !== state.t || c !== state.c) return;
    sides = next;
    columns[0].fill(sides.query);
    columns[1].fill(sides.key);
    showHeads();
    showKept();
    if (state.at !== "0-0") place();
    else {
      [state.row, state.key].forEach((n, side) => {
        if (n !== null) columns[side].goTo(n);
      });
      if (state.key === null) follow();
    }
    refresh();
  };
  host.append(
    element(
      "div",
      { class: "lines-main" },
      element("div", { class: "lines-bar" }, chips, kept),
      figure,
      note,
    ),
  );
  const aside = element("div", { class: "lines-side" });
  host.append(aside);
  mountHeadSearch(aside, source, state);
  mountHeadNotes(aside, state);
  aside.append(table);
  mountProducts(aside, source, state);
  state.on(["t", "c"], rebuild);
  state.on(["h", "selection", "row", "key", "direction", "asked"], (_, changed) => {
    showHeads();
    showKept();
    if (changed.has("row")) follow();
    refresh();
  });
  state.on("at", place);
  state.addEventListener("recolour", paint);
  for (const event of ["print", "printed"])
    state.addEventListener(event, () => {
      onPaper = event === "print";
      draw();
      tell();
    });
  let hidden = false;
  new ResizeObserver(() => {
    for (const one of columns) one.draw();
    place();
    // What was chosen in another tab comes into sight.
    if (hidden && figure.clientHeight)
      [state.row, state.key].forEach((n, side) => {
        const [first, end] = columns[side].sight();
        if (n !== null && (n < first || n >= end - 1)) columns[side].goTo(n);
      });
    hidden = !figure.clientHeight;
    refresh();
    paint();
  }).observe(figure);
  rebuild();
}
