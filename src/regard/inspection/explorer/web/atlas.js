import { AtlasPicture } from "./atlas_picture.js";
import { headDivergences } from "./divergences.js";
import { button, chooser, clear, element, oncePerFrame, partOf, pointIn, tickbox } from "./dom.js";
import { headSentence, labelWords, numberNames, numberOf, sortHeads } from "./heads.js";
import { formatNumber } from "./scales.js";
import { mountScatter } from "./scatter.js";

/**
 * All heads as small multiples or as one number in colour: choose, add, sort, filter.
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountAtlas(host, source, state) {
  new Atlas(host, source, state).mount();
}

class Atlas extends AtlasPicture {
  /** The head that has the focus, by its place in the order. */
  active = 0;
  plan = oncePerFrame(() => {
    this.draw();
    this.cells(false);
  });
  /** Whether divergences are on their way. */
  asked = false;
  cellsOf = "";
  controls = element("div", { class: "rg-controls" });
  shows = element("label");
  sorts = element("label");
  turn = element("button");
  /** @type {HTMLElement|null} */
  versus = null;
  contrast = tickbox("contrast per head", true, (contrast) => this.state.set({ contrast }), {
    title: "Colours of a picture from weak to strong in that head; else the same for all heads",
  });

  /** @param {HTMLElement} host @param {Source} source @param {State} state */
  constructor(host, source, state) {
    super(source, state, () => this.plan());
    this.host = host;
    this.rows = element("div", { role: "presentation" });
    this.grid = element(
      "div",
      { class: "rg-grid", role: "grid", "aria-label": "Heads, layers down", "aria-multiselectable": "true" },
      this.canvas,
      this.rows,
    );
    this.scroll.append(this.grid);
    this.about = element("p", { class: "rg-head-line" });
    this.labels = element("div", { class: "rg-labels" });
  }

  mount() {
    const { host, state } = this;
    const filter = element("div");
    const details = element(
      "details",
      { class: "rg-filter" },
      element("summary", { text: "Filter by entropy and distance" }),
      filter,
    );
    host.append(this.controls, this.scroll, this.legend, this.about, this.labels, details);
    details.addEventListener("toggle", () => {
      if (details.open && !filter.childNodes.length)
        mountScatter(filter, this.source, state, () => this.all());
    });
    this.buildControls();
    this.follow();
    state.on(["t"], () => this.buildControls());
    state.on(["t", "sort", "show", "versus", "contrast", "brush", "aggregate"], () => this.arrange());
    state.on(["c", "h", "selection"], () => {
      const at = this.order.findIndex(([c, h]) => c === state.c && h === state.h);
      if (at >= 0) this.active = at;
      this.describe();
      this.cells(this.grid.contains(document.activeElement));
      this.plan();
    });
    state.addEventListener("recolour", () => this.plan());
    state.addEventListener("print", () => this.draw());
    new ResizeObserver(() => this.plan()).observe(this.scroll);
    this.arrange();
  }

  buildControls() {
    const { state } = this;
    /** @type {[string, string][]} */
    const names = numberNames(this.trace()).map((name) => [name, numberOf(name).title]);
    const two = Boolean(this.other());
    /** @type {[string, string][]} */
    const shows = [["mass", "pictures: mass"], ["max", "pictures: largest"], ...names];
    if (two) shows.push(["divergence", "divergence from B"]);
    /** @type {[string, string][]} */
    const sorts = [["model", "layer and head"], ...names];
    if (two) sorts.push(["divergence", "divergence from B"]);
    if (!shows.some(([name]) => name === state.show)) state.set({ show: "mass" });
    if (!sorts.some(([name]) => name === state.sort.replace(/^-/, ""))) state.set({ sort: "model" });
    this.shows = chooser("Show", shows, state.show, (show) => state.set({ show }));
    this.sorts = chooser("Sort", sorts, state.sort.replace(/^-/, ""), (sort) => state.set({ sort }));
    this.turn = button("↓", {
      title: "largest or smallest first",
      press: () => {
        if (state.sort !== "model")
          state.set({ sort: state.sort.startsWith("-") ? state.sort.slice(1) : `-${state.sort}` });
      },
    });
    this.versus = two ? tickbox("difference A − B", state.versus, (versus) => state.set({ versus })) : null;
    const sorting = element("span", { class: "rg-row" }, this.sorts, this.turn);
    clear(this.controls).append(this.shows, sorting, this.contrast, ...(this.versus ? [this.versus] : []));
  }

  arrange() {
    const { state } = this;
    const wanted = [state.show, state.sort.replace(/^-/, "")].includes("divergence");
    if (wanted && !this.asked && this.other()) {
      this.asked = true;
      headDivergences(this.source, 0, 1).then((values) => {
        this.divergences = values;
        this.arrange();
      });
    }
    this.order = sortHeads(this.all(), state.sort, (name, c, h) => this.read(name, c, h));
    this.active = Math.max(
      0,
      this.order.findIndex(([c, h]) => c === state.c && h === state.h),
    );
    partOf(this.shows, "select").value = state.show;
    partOf(this.sorts, "select").value = state.sort.replace(/^-/, "");
    partOf(this.contrast, "input").checked = state.contrast;
    this.contrast.hidden = state.show !== "mass" && state.show !== "max";
    this.turn.disabled = state.sort === "model";
    this.turn.textContent = state.sort.startsWith("-") ? "↑" : "↓";
    if (this.versus) partOf(this.versus, "input").checked = state.versus;
    this.describe();
    this.plan();
  }

  describe() {
    const { state } = this;
    const trace = this.trace();
    const call = trace.calls[state.c];
    if (!call?.heads) return;
    const several = state.selection.length;
    const line = headSentence(
      trace,
      state.c,
      state.h,
      state.show === "mass" || state.show === "max" || state.show === "divergence"
        ? "max_weight"
        : state.show,
    );
    const labels = call.labels?.[state.h] ?? [],
      named = labels.map(labelWords);
    const plain = line
      .split(", ")
      .filter((part) => !named.some(({ name }) => part === name))
      .join(" · ");
    this.about.textContent =
      several > 1 ? `${several} heads selected · ${plain}` : plain.charAt(0).toUpperCase() + plain.slice(1);
    clear(this.labels).append(
      ...named.map(({ name, ground, title }, n) =>
        element(
          "span",
          { class: "rg-label", title, text: name },
          element("small", { text: ` ${ground}` }),
          element("span", { class: "rg-voice", text: `, threshold ${formatNumber(labels[n].threshold)}` }),
        ),
      ),
    );
    if (!this.labels.childNodes.length)
      this.labels.append(
        element("span", { class: "rg-word", text: "no label: no pattern reaches its threshold" }),
      );
  }

  /**
   * Cells for keyboard and screen reader: the row of the active one and its neighbours, over the picture.
   * @param {boolean} focus
   */
  cells(focus) {
    const layout = this.laid;
    if (!layout || !this.order.length) {
      clear(this.rows);
      return;
    }
    this.active = Math.min(this.active, this.order.length - 1);
    const [row] = this.placeOf(this.active, layout);
    this.grid.setAttribute("aria-rowcount", String(layout.rows));
    this.grid.setAttribute("aria-colcount", String(layout.columns));
    const had = focus || this.rows.contains(document.activeElement);
    const sign = [
      row,
      JSON.stringify(layout),
      this.state.sort,
      this.state.show,
      this.state.t,
      this.state.versus,
      this.order.length,
    ].join(" ");
    if (this.cellsOf !== sign) {
      this.cellsOf = sign;
      const trace = this.trace();
      clear(this.rows).append(
        ...[row - 1, row, row + 1]
          .filter((r) => r >= 0 && r < layout.rows)
          .map((r) => {
            const line = element("div", { role: "row", "aria-rowindex": r + 1 });
            for (let col = 0; col < layout.columns; col += 1) {
              const n = this.indexOf(r, col, layout);
              if (n < 0) continue;
              const side = `${layout.size - layout.gap}px`;
              line.append(
                element("div", {
                  role: "gridcell",
                  "aria-colindex": col + 1,
                  tabindex: -1,
                  data: { n },
                  "aria-label": headSentence(trace, ...this.order[n], this.state.show),
                  style: {
                    left: `${layout.left + col * layout.size}px`,
                    top: `${layout.top + r * layout.size}px`,
                    width: side,
                    height: side,
                  },
                }),
              );
            }
            return line;
          }),
      );
    }
    for (const cell of /** @type {NodeListOf<HTMLElement>} */ (
      this.rows.querySelectorAll("[role=gridcell]")
    )) {
      const n = Number(cell.dataset.n);
      const [c, h] = this.order[n];
      cell.tabIndex = n === this.active ? 0 : -1;
      cell.setAttribute(
        "aria-selected",
        String(this.state.selection.some(([sc, sh]) => sc === c && sh === h)),
      );
      if (n === this.active && had && document.activeElement !== cell) cell.focus({ preventScroll: false });
    }
  }

  /** @param {number} n @param {boolean} add */
  choose(n, add) {
    const { state } = this;
    const [c, h] = this.order[n];
    this.active = n;
    if (!add) {
      state.set({ c, h, selection: [[c, h]] });
      return;
    }
    const without = state.selection.filter(([sc, sh]) => sc !== c || sh !== h);
    if (without.length === state.selection.length)
      state.set({ c, h, selection: [...state.selection, [c, h]] });
    else if (without.length) {
      const [last, head] = without[without.length - 1];
      state.set({ c: last, h: head, selection: without });
    }
  }

  follow() {
    /** @param {MouseEvent} event */
    const hit = (event) => {
      if (!this.laid) return -1;
      const { x, y } = pointIn(this.canvas, event);
      const { left, top, size } = this.laid;
      return this.indexOf(Math.floor((y - top) / size), Math.floor((x - left) / size), this.laid);
    };
    this.canvas.addEventListener("click", (event) => {
      const n = hit(event);
      if (n < 0) return;
      this.choose(n, event.shiftKey || event.ctrlKey || event.metaKey);
      this.cells(true);
    });
    let titled = -1;
    this.canvas.addEventListener("pointermove", (event) => {
      const n = hit(event);
      if (n !== titled)
        this.canvas.title = n < 0 ? "" : headSentence(this.trace(), ...this.order[n], this.state.show);
      titled = n;
    });
    this.grid.addEventListener("keydown", (event) => {
      if (event.altKey || event.metaKey || !this.laid || !this.order.length) return;
      const layout = this.laid;
      const [row, column] = this.placeOf(this.active, layout);
      /** @type {Record<string, [row: number, column: number]>} */
      const steps = {
        ArrowLeft: [row, column - 1],
        ArrowRight: [row, column + 1],
        ArrowUp: [row - 1, column],
        ArrowDown: [row + 1, column],
        PageUp: [Math.max(0, row - 5), column],
        PageDown: [Math.min(layout.rows - 1, row + 5), column],
      };
      const to = steps[event.key];
      let next = -1;
      if (to) next = this.indexOf(...to, layout);
      else if (event.key === "Home") next = event.ctrlKey ? 0 : this.indexOf(row, 0, layout);
      else if (event.key === "End") {
        next = event.ctrlKey ? this.order.length - 1 : -1;
        for (let col = layout.columns - 1; col >= 0 && next < 0; col -= 1)
          next = this.indexOf(row, col, layout);
      } else if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        this.choose(this.active, event.shiftKey || event.ctrlKey);
        return;
      } else return;
      event.preventDefault();
      if (next < 0) return;
      this.active = next;
      // With shift or control the focus moves alone, so that Shift+Space can add a head to the selection.
      if (event.shiftKey || (event.ctrlKey && to)) this.cells(true);
      else {
        this.choose(next, false);
        this.cells(true);
      }
    });
  }
}
