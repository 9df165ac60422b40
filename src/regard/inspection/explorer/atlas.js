import { colourOf, cssOf, isDark, limitsFor, missing, tableFor, toUnit } from "./colours.js";
import { button, chooser, clear, element, figures, tickbox } from "./dom.js";
import { headDivergences } from "./divergences.js";
import { headSentence, insideBrush, numberNames, numberOf, numberRange, readNumber, sortHeads } from "./heads.js";
import { mountScatter } from "./scatter.js";
import { Thumbnails } from "./thumbnails.js";

/**
 * All heads as small multiples or as one number in colour: choose, add, sort, filter.
 * @param {HTMLElement} host
 * @param {import("./source.js").Source} source
 * @param {import("./state.js").State} state
 */
export function mountAtlas(host, source, state) {
  new Atlas(host, source, state).mount();
}

class Atlas {
  constructor(host, source, state) {
    Object.assign(this, { host, source, state, order: [], active: 0, planned: false, divergences: null });
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.rows = element("div", { role: "presentation" });
    this.grid = element("div", { class: "rg-grid", role: "grid", "aria-label": "Heads, layers down", "aria-multiselectable": "true" }, this.canvas, this.rows);
    this.scroll = element("div", { class: "rg-atlas-scroll" }, this.grid);
    this.legend = element("div", { class: "rg-legend" });
    this.about = element("p", { class: "rg-head-line" });
    this.labels = element("div", { class: "rg-labels" });
    this.thumbnails = new Thumbnails(source, () => this.plan());
  }

  trace() {
    return this.source.document.traces[this.state.t];
  }

  /** The other trace, of two. */
  other() {
    const { traces } = this.source.document;
    return traces.length > 1 ? traces[this.state.t === 0 ? 1 : 0] : null;
  }

  mount() {
    const { host, state } = this;
    this.controls = element("div", { class: "rg-controls" });
    const filter = element("div");
    const details = element("details", { class: "rg-filter" }, element("summary", { text: "Filter by entropy and distance" }), filter);
    host.append(this.controls, this.scroll, this.legend, this.about, this.labels, details);
    details.addEventListener("toggle", () => {
      if (details.open && !filter.childNodes.length) mountScatter(filter, this.source, state, () => this.all());
    });
    this.buildControls();
    this.follow();
    state.on(["t"], () => this.buildControls());
    state.on(["t", "sort", "show", "versus", "brush", "aggregate"], () => this.arrange());
    state.on(["c", "h", "selection"], () => {
      const at = this.order.findIndex(([c, h]) => c === state.c && h === state.h);
      if (at >= 0) this.active = at;
      this.describe();
      this.cells(this.grid.contains(document.activeElement));
      this.plan();
    });
    state.addEventListener("recolour", () => this.plan());
    new ResizeObserver(() => this.plan()).observe(this.scroll);
    this.arrange();
  }

  buildControls() {
    const { state } = this;
    const names = numberNames(this.trace()).map((name) => [name, numberOf(name).title]);
    const two = Boolean(this.other());
    const shows = [["mass", "pictures: mass"], ["max", "pictures: largest"], ...names];
    if (two) shows.push(["divergence", "divergence from B"]);
    const sorts = [["model", "layer and head"], ...names, ...(two ? [["divergence", "divergence from B"]] : [])];
    if (!shows.some(([name]) => name === state.show)) state.set({ show: "mass" });
    if (!sorts.some(([name]) => name === state.sort.replace(/^-/, ""))) state.set({ sort: "model" });
    this.shows = chooser("Show", shows, state.show, (show) => state.set({ show }));
    this.sorts = chooser("Sort", sorts, state.sort.replace(/^-/, ""), (sort) => state.set({ sort }));
    this.turn = button("↓", { title: "largest or smallest first", press: () => {
      if (state.sort !== "model") state.set({ sort: state.sort.startsWith("-") ? state.sort.slice(1) : `-${state.sort}` });
    } });
    this.versus = two ? tickbox("difference A − B", state.versus, (versus) => state.set({ versus })) : null;
    const sorting = element("span", { class: "rg-row" }, this.sorts, this.turn);
    clear(this.controls).append(...[this.shows, sorting, this.versus].filter(Boolean));
  }

  all() {
    return this.trace().calls.flatMap((call, c) => Array.from({ length: call.heads }, (_, h) => [c, h]));
  }

  read(name, c, h) {
    if (name === "divergence") return this.divergences?.[c]?.[h] ?? NaN;
    const { versus, t } = this.state;
    const number = readNumber(this.trace(), c, h, name, versus ? this.other() : null);
    return versus && t === 1 ? -number : number;
  }

  arrange() {
    const { state } = this;
    const wanted = [state.show, state.sort.replace(/^-/, "")].includes("divergence");
    if (wanted && !this.divergences && this.other()) {
      this.divergences = [];
      headDivergences(this.source, 0, 1).then((values) => {
        this.divergences = values;
        this.arrange();
      });
    }
    this.order = sortHeads(this.all(), state.sort, (name, c, h) => this.read(name, c, h));
    this.active = Math.max(0, this.order.findIndex(([c, h]) => c === state.c && h === state.h));
    this.shows.querySelector("select").value = state.show;
    this.sorts.querySelector("select").value = state.sort.replace(/^-/, "");
    this.turn.disabled = state.sort === "model";
    this.turn.textContent = state.sort.startsWith("-") ? "↑" : "↓";
    if (this.versus) this.versus.querySelector("input").checked = state.versus;
    this.describe();
    this.plan();
  }

  plan() {
    if (this.planned) return;
    this.planned = true;
    requestAnimationFrame(() => {
      this.planned = false;
      this.draw();
    });
  }

  /** Where the cells lie: in the model's order a row is a layer. */
  layout() {
    const calls = this.trace().calls;
    const model = this.state.sort === "model";
    const widest = Math.max(1, ...calls.map(({ heads }) => heads));
    const width = Math.max(80, this.scroll.clientWidth - 2);
    const left = model ? 24 : 2;
    const top = model ? 16 : 2;
    const columns = model ? widest : Math.max(1, Math.min(this.order.length, Math.max(6, Math.ceil(Math.sqrt(this.order.length)))));
    const size = Math.max(8, Math.min(84, (width - left) / columns));
    const rows = model ? calls.length : Math.ceil(this.order.length / columns);
    return { left, top, columns, rows, size, gap: size > 16 ? 3 : 1, width, height: top + rows * size + 2, model };
  }

  placeOf(n, { columns, model }) {
    return model ? [this.order[n][0], this.order[n][1]] : [Math.floor(n / columns), n % columns];
  }

  indexOf(row, column, { columns, model }) {
    if (model) return this.order.findIndex(([c, h]) => c === row && h === column);
    const n = row * columns + column;
    return column >= 0 && column < columns && n < this.order.length ? n : -1;
  }

  draw() {
    const { canvas, state } = this;
    if (!this.scroll.clientWidth) return;
    const layout = this.layout();
    const { left, top, size, gap } = layout;
    const ratio = Math.min(3, globalThis.devicePixelRatio || 1);
    const [w, h] = [Math.round(Math.max(layout.width, left + layout.columns * size) * ratio), Math.round(layout.height * ratio)];
    if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
    canvas.style.width = `${w / ratio}px`;
    canvas.style.height = `${h / ratio}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, w, h);
    const style = getComputedStyle(canvas);
    const colour = (name) => style.getPropertyValue(name).trim() || "#888";
    const [well, muted, accent, cross] = ["--well", "--muted", "--accent", "--cross"].map(colour);
    pen.font = "10.5px system-ui, sans-serif";
    pen.fillStyle = muted;
    pen.textBaseline = "middle";
    if (layout.model) {
      pen.textAlign = "center";
      const every = Math.ceil(15 / size);
      for (let n = 0; n < layout.columns; n += every) pen.fillText(String(n + 1), left + (n + 0.5) * size, 7);
      pen.textAlign = "right";
      for (let n = 0; n < layout.rows; n += Math.ceil(12 / size)) pen.fillText(String(n + 1), left - 5, top + (n + 0.5) * size);
    }
    const dark = isDark(canvas);
    const picture = state.show === "mass" || state.show === "max";
    const look = { table: tableFor("sequential", dark), none: dark ? missing.dark : missing.light, dark };
    const ends = picture ? null : this.ends();
    const trace = this.trace();
    for (let n = 0; n < this.order.length; n += 1) {
      const [c, head] = this.order[n];
      const [row, column] = this.placeOf(n, layout);
      const [x, y, side] = [left + column * size, top + row * size, size - gap];
      const kept = insideBrush(state.brush, readNumber(trace, c, head, "entropy"), Math.abs(readNumber(trace, c, head, "distance")));
      pen.globalAlpha = kept ? 1 : 0.16;
      if (picture) {
        pen.fillStyle = well;
        pen.fillRect(x, y, side, side);
        const thumb = this.thumbnails.get(state.t, c, head, state.show, side * ratio, look);
        if (thumb) {
          pen.imageSmoothingEnabled = thumb.width > side * ratio;
          pen.imageSmoothingQuality = "high";
          pen.drawImage(thumb, x, y, side, side);
        }
      } else {
        const unit = toUnit(this.read(state.show, c, head), "linear", ...ends.range);
        pen.fillStyle = cssOf(Number.isNaN(unit) ? look.none : colourOf(unit, ends.table));
        pen.fillRect(x, y, side, side);
      }
      pen.globalAlpha = 1;
      const chosen = state.selection.some(([sc, sh]) => sc === c && sh === head);
      const current = c === state.c && head === state.h;
      if (chosen || current) {
        pen.strokeStyle = current ? cross : accent;
        pen.lineWidth = current ? 2.5 : 2;
        pen.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
      }
    }
    this.laid = layout;
    this.cells(false);
    this.drawLegend(ends, look);
  }

  ends() {
    const { state } = this;
    const signed = state.versus && state.show !== "divergence" && Boolean(this.other());
    const values = this.order.map(([c, h]) => this.read(state.show, c, h));
    const range = state.show === "divergence" ? [0, Math.max(1e-6, ...values.filter(Number.isFinite))] : numberRange(state.show, values, signed);
    return { range, table: tableFor(signed ? "diverging" : "sequential", isDark(this.canvas)), signed };
  }

  drawLegend(ends, look) {
    const { state } = this;
    const sign = [state.show, state.versus, ends?.range, look.dark, state.t, state.c].join(" ");
    if (this.legendOf === sign) return;
    this.legendOf = sign;
    const bar = element("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    const table = ends?.table ?? look.table;
    const image = new ImageData(256, 1);
    for (let code = 0; code < 256; code += 1) image.data.set([...table.subarray(3 * code, 3 * code + 3), 255], 4 * code);
    bar.getContext("2d").putImageData(image, 0, 0);
    const [low, high] = ends?.range ?? limitsFor("log", state.shape().keys, 1);
    const { title, unit } = state.show === "divergence" ? { title: "Jensen–Shannon divergence", unit: "bits" } : numberOf(state.show);
    const words = ends ? `${title}${ends.signed ? ", A − B" : ""}${unit ? `, ${unit}` : ""}` : `${state.show === "max" ? "largest weight" : "mass"} of blocks, log scale`;
    clear(this.legend).append(element("span", { text: figures(low, 2) }), bar, element("span", { text: figures(high, 2) }), element("span", { text: words }));
  }

  describe() {
    const { state } = this;
    const trace = this.trace();
    const call = trace.calls[state.c];
    if (!call?.heads) return;
    const several = state.selection.length;
    const line = headSentence(trace, state.c, state.h, state.show === "mass" || state.show === "max" || state.show === "divergence" ? "max_weight" : state.show);
    const plain = line.split(", ").filter((part) => !(call.labels?.[state.h] ?? []).some(({ name, value }) => part === `${name} ${value.toFixed(2)}`)).join(" · ");
    this.about.textContent = several > 1 ? `${several} heads selected · ${plain}` : plain.charAt(0).toUpperCase() + plain.slice(1);
    clear(this.labels).append(...(call.labels?.[state.h] ?? []).map(({ name, value, threshold }) =>
      element("span", { class: "rg-label", title: `${name}: mean share ${figures(value)}; named so from ${figures(threshold)} on`, text: `${name} ${value.toFixed(2)}` },
        element("span", { class: "rg-voice", text: `, threshold ${figures(threshold)}` }))));
    if (!this.labels.childNodes.length) this.labels.append(element("span", { class: "rg-word", text: "no label: no pattern reaches its threshold" }));
  }

  /** Cells for keyboard and screen reader: the row of the active one and its neighbours, over the picture. */
  cells(focus) {
    const layout = this.laid;
    if (!layout || !this.order.length) {
      clear(this.rows);
      return;
    }
    this.active = Math.min(this.active, this.order.length - 1);
    const [row, column] = this.placeOf(this.active, layout);
    this.grid.setAttribute("aria-rowcount", String(layout.rows));
    this.grid.setAttribute("aria-colcount", String(layout.columns));
    const had = focus || this.rows.contains(document.activeElement);
    const sign = [row, JSON.stringify(layout), this.state.sort, this.state.show, this.state.t, this.state.versus, this.order.length].join(" ");
    if (this.cellsOf !== sign) {
      this.cellsOf = sign;
      const trace = this.trace();
      clear(this.rows).append(...[row - 1, row, row + 1].filter((r) => r >= 0 && r < layout.rows).map((r) => {
        const line = element("div", { role: "row", "aria-rowindex": r + 1 });
        for (let col = 0; col < layout.columns; col += 1) {
          const n = this.indexOf(r, col, layout);
          if (n < 0) continue;
          const side = `${layout.size - layout.gap}px`;
          line.append(element("div", { role: "gridcell", "aria-colindex": col + 1, tabindex: -1, data: { n }, "aria-label": headSentence(trace, ...this.order[n], this.state.show),
            style: { left: `${layout.left + col * layout.size}px`, top: `${layout.top + r * layout.size}px`, width: side, height: side } }));
        }
        return line;
      }));
    }
    for (const cell of this.rows.querySelectorAll("[role=gridcell]")) {
      const n = Number(cell.dataset.n);
      const [c, h] = this.order[n];
      cell.tabIndex = n === this.active ? 0 : -1;
      cell.setAttribute("aria-selected", String(this.state.selection.some(([sc, sh]) => sc === c && sh === h)));
      if (n === this.active && had && document.activeElement !== cell) cell.focus({ preventScroll: false });
    }
  }

  choose(n, add) {
    const { state } = this;
    const [c, h] = this.order[n];
    this.active = n;
    if (!add) {
      state.set({ c, h, selection: [[c, h]] });
      return;
    }
    const without = state.selection.filter(([sc, sh]) => sc !== c || sh !== h);
    if (without.length === state.selection.length) state.set({ c, h, selection: [...state.selection, [c, h]] });
    else if (without.length) state.set({ c: without.at(-1)[0], h: without.at(-1)[1], selection: without });
  }

  follow() {
    const hit = (event) => {
      if (!this.laid) return -1;
      const box = this.canvas.getBoundingClientRect();
      const { left, top, size } = this.laid;
      return this.indexOf(Math.floor((event.clientY - box.top - top) / size), Math.floor((event.clientX - box.left - left) / size), this.laid);
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
      if (n !== titled) this.canvas.title = n < 0 ? "" : headSentence(this.trace(), ...this.order[n], this.state.show);
      titled = n;
    });
    this.grid.addEventListener("keydown", (event) => {
      if (event.altKey || event.metaKey || !this.laid || !this.order.length) return;
      const layout = this.laid;
      const [row, column] = this.placeOf(this.active, layout);
      const to = { ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column], ArrowDown: [row + 1, column],
        PageUp: [Math.max(0, row - 5), column], PageDown: [Math.min(layout.rows - 1, row + 5), column] }[event.key];
      let next = -1;
      if (to) next = this.indexOf(...to, layout);
      else if (event.key === "Home") next = event.ctrlKey ? 0 : this.indexOf(row, 0, layout);
      else if (event.key === "End") {
        next = event.ctrlKey ? this.order.length - 1 : -1;
        for (let col = layout.columns - 1; col >= 0 && next < 0; col -= 1) next = this.indexOf(row, col, layout);
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
