import { colourOf, cssOf, isDark, limitsFor, missing, pageColours, tableFor, toUnit } from "./colours.js";
import { clear, element, penOf, pixelRatio } from "./dom.js";
import { insideBrush, numberOf, numberRange, readNumber } from "./heads.js";
import { layerNumber } from "./passages.js";
import { formatNumber } from "./scales.js";
import { Thumbnails } from "./thumbnails.js";

/** Pixels of a cell that has room for its name. */
const ATLAS_NAMED = 36;

/** The heads as cells of one picture. */
export class AtlasPicture {
  /** The heads as they are sorted. @type {Head[]} */
  order = [];
  /** By call and head; null: not asked for. @type {ArrayLike<number>[]|null} */
  divergences = null;
  /** As it was drawn. @type {AtlasLayout|null} */
  laid = null;
  legendOf = "";
  scroll = element("div", { class: "rg-atlas-scroll" });

  /** @param {Source} source @param {State} state @param {() => void} arrived */
  constructor(source, state, arrived) {
    this.source = source;
    this.state = state;
    this.canvas = element("canvas", { "aria-hidden": "true" });
    this.legend = element("div", { class: "rg-legend" });
    this.thumbnails = new Thumbnails(source, arrived);
  }

  trace() {
    return this.source.document.traces[this.state.t];
  }

  /** The other trace, of two. */
  other() {
    const { traces } = this.source.document;
    return traces.length > 1 ? traces[this.state.t === 0 ? 1 : 0] : null;
  }

  /** @returns {Head[]} */
  all() {
    return this.trace().calls.flatMap(({ heads }, c) =>
      Array.from({ length: heads }, (_, h) => /** @type {Head} */ ([c, h])),
    );
  }

  /** @param {string} name @param {number} c @param {number} h */
  read(name, c, h) {
    if (name === "divergence") return this.divergences?.[c]?.[h] ?? NaN;
    const { versus, t } = this.state;
    const number = readNumber(this.trace(), c, h, name, versus ? this.other() : null);
    return versus && t === 1 ? -number : number;
  }

  /**
   * Where the cells lie: in the model's order a row is a layer.
   * @returns {AtlasLayout}
   */
  layout() {
    const calls = this.trace().calls;
    const model = this.state.sort === "model";
    const widest = Math.max(1, ...calls.map(({ heads }) => heads));
    const width = Math.max(80, this.scroll.clientWidth - 2);
    const left = model ? 24 : 2;
    const top = model ? 16 : 2;
    const columns = model
      ? widest
      : Math.max(1, Math.min(this.order.length, Math.max(6, Math.ceil(Math.sqrt(this.order.length)))));
    const size = Math.max(8, Math.min(84, (width - left) / columns));
    const rows = model ? calls.length : Math.ceil(this.order.length / columns);
    return {
      left,
      top,
      columns,
      rows,
      size,
      gap: size > 16 ? 3 : 1,
      width,
      height: top + rows * size + 2,
      model,
    };
  }

  /**
   * @param {number} n @param {AtlasLayout} options
   * @returns {[row: number, column: number]}
   */
  placeOf(n, { columns, model }) {
    return model ? [this.order[n][0], this.order[n][1]] : [Math.floor(n / columns), n % columns];
  }

  /** @param {number} row @param {number} column @param {AtlasLayout} options */
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
    const ratio = pixelRatio();
    const [w, h] = [
      Math.round(Math.max(layout.width, left + layout.columns * size) * ratio),
      Math.round(layout.height * ratio),
    ];
    if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
    canvas.style.width = `${w / ratio}px`;
    canvas.style.height = `${h / ratio}px`;
    const pen = penOf(canvas);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, w, h);
    const [well, muted, accent, cross, panel, ink] = ["well", "muted", "accent", "cross", "panel", "ink"].map(
      pageColours(canvas),
    );
    pen.font = "10.5px system-ui, sans-serif";
    pen.fillStyle = muted;
    pen.textBaseline = "middle";
    if (layout.model) {
      pen.textAlign = "center";
      const every = Math.ceil(15 / size);
      for (let n = 0; n < layout.columns; n += every) pen.fillText(String(n), left + (n + 0.5) * size, 7);
      pen.textAlign = "right";
      for (let n = 0; n < layout.rows; n += Math.ceil(12 / size))
        pen.fillText(String(n), left - 5, top + (n + 0.5) * size);
    }
    const dark = isDark(canvas);
    const look = { table: tableFor("sequential", dark), none: dark ? missing.dark : missing.light, dark };
    const ends = this.ends();
    const trace = this.trace();
    const channel = state.show === "max" ? "max" : "mass";
    for (let n = 0; n < this.order.length; n += 1) {
      const [c, head] = this.order[n];
      const [row, column] = this.placeOf(n, layout);
      const [x, y, side] = [left + column * size, top + row * size, size - gap];
      const kept = insideBrush(
        state.brush,
        readNumber(trace, c, head, "entropy"),
        Math.abs(readNumber(trace, c, head, "distance")),
      );
      pen.globalAlpha = kept ? 1 : 0.16;
      if (!ends) {
        pen.fillStyle = well;
        pen.fillRect(x, y, side, side);
        const thumb = this.thumbnails.get(state.t, c, head, channel, side * ratio, look, state.contrast);
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
      if (!layout.model && side >= ATLAS_NAMED) {
        const name = `L${layerNumber(state.calls(), c)} H${head}`;
        pen.textAlign = "right";
        const wide = pen.measureText(name).width + 4;
        pen.fillStyle = panel;
        pen.fillRect(x + side - wide, y, wide, 13);
        pen.fillStyle = ink;
        pen.fillText(name, x + side - 2, y + 7);
      }
      const chosen = state.selection.some(([sc, sh]) => sc === c && sh === head);
      const current = c === state.c && head === state.h;
      if (chosen || current) {
        pen.strokeStyle = current ? cross : accent;
        pen.lineWidth = current ? 2.5 : 2;
        pen.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
      }
    }
    this.laid = layout;
    this.drawLegend(ends, look);
  }

  /** The colours of a number; null: pictures are shown. */
  ends() {
    const { state } = this;
    if (state.show === "mass" || state.show === "max") return null;
    const signed = state.versus && state.show !== "divergence" && Boolean(this.other());
    const values = this.order.map(([c, h]) => this.read(state.show, c, h));
    /** @type {Limits} */
    const range =
      state.show === "divergence"
        ? [0, Math.max(1e-6, ...values.filter(Number.isFinite))]
        : numberRange(state.show, values, signed);
    return { range, table: tableFor(signed ? "diverging" : "sequential", isDark(this.canvas)), signed };
  }

  /** @param {ReturnType<AtlasPicture["ends"]>} ends @param {Paper} look */
  drawLegend(ends, look) {
    const { state } = this;
    const sign = [state.show, state.versus, state.contrast, ends?.range, look.dark, state.t, state.c].join(
      " ",
    );
    if (this.legendOf === sign) return;
    this.legendOf = sign;
    const bar = element("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    const table = ends?.table ?? look.table;
    const image = new ImageData(256, 1);
    for (let code = 0; code < 256; code += 1)
      image.data.set([...table.subarray(3 * code, 3 * code + 3), 255], 4 * code);
    penOf(bar).putImageData(image, 0, 0);
    const [low, high] = ends?.range ?? limitsFor("log", state.shape().keys, 1);
    const { title, unit } =
      state.show === "divergence"
        ? { title: "Jensen–Shannon divergence", unit: "bits" }
        : numberOf(state.show);
    const words = ends
      ? `${title}${ends.signed ? ", A − B" : ""}${unit ? `, ${unit}` : ""}`
      : `${state.show === "max" ? "largest weight" : "mass"} of blocks, log scale`;
    const own = !ends && state.contrast;
    clear(this.legend).append(
      element("span", { text: own ? "weak" : formatNumber(low, 2) }),
      bar,
      element("span", { text: own ? "strong in each head" : formatNumber(high, 2) }),
      element("span", { text: words }),
    );
  }
}
