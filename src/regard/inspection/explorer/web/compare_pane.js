// A picture of blocks that follows the view of the map: one of A, one of B, or both in one.
import { clear, element, penOf, pixelRatio, pointIn, svg } from "./dom.js";
import { cellAt, drawnView, panView, placeAt, wholeTicks, zoomView } from "./geometry.js";

const COMPARE_LEFT = 46,
  COMPARE_BOTTOM = 34;

/**
 * One canvas that follows the state's view; `show({layers: [{excerpt, look, from, to}], shape, read})` draws
 * it.
 * Dragging, the wheel, + − 0 and the arrow keys move the view of every pane and of the map.
 * @param {HTMLElement} host @param {State} state @param {string} label
 */
export function comparePane(host, state, label) {
  const canvas = element("canvas", { "aria-hidden": "true" }),
    read = element("output", { class: "plot-read" });
  const axes = svg("svg", { tabindex: 0, role: "img" });
  const stage = element("div", { class: "compare-stage" }, canvas, axes);
  const title = element("h2", {}, label),
    box = element("section", {}, title, stage, read);
  host.append(box);
  /** @type {ComparePicture|null} */
  let shown = null;
  let shape = { rows: 0, keys: 0, queryOffset: 0, keyOffset: 0 };
  /** @type {Cell|null} */
  let cell = null;
  let plot = { x: COMPARE_LEFT, y: 0, w: 0, h: 0 },
    view = state.view;

  const draw = () => {
    const wide = stage.clientWidth;
    if (!shown || !wide) return;
    const { layers } = shown,
      ratio = pixelRatio();
    plot = { x: COMPARE_LEFT, y: 4, w: wide - COMPARE_LEFT - 6, h: Math.min(wide - COMPARE_LEFT, 520) };
    const tall = plot.h + plot.y + COMPARE_BOTTOM;
    view = drawnView(stretch(state.view, 1), plot, shape);
    // On paper the stage scales as a whole: its height follows its width.
    for (const [property, setting] of [
      ["height", `${tall}px`],
      ["--wide", `${wide}px`],
      ["aspect-ratio", `${wide} / ${tall}`],
    ])
      stage.style.setProperty(property, setting);
    Object.assign(canvas, { width: wide * ratio, height: tall * ratio });
    const pen = penOf(canvas),
      x = plot.w / (view.k1 - view.k0),
      y = plot.h / (view.q1 - view.q0);
    pen.scale(ratio, ratio);
    for (const { picture, excerpt, from = 0, to = 1 } of layers) {
      const { row0, column0, rows, columns, queryBlock, keyBlock } = excerpt;
      // The last block of an axis may be cut off by its end.
      const high = Math.min((row0 + rows) * queryBlock, shape.rows) - row0 * queryBlock,
        broad = Math.min((column0 + columns) * keyBlock, shape.keys) - column0 * keyBlock;
      pen.save();
      pen.beginPath();
      pen.rect(plot.x + from * plot.w, plot.y, (to - from) * plot.w, plot.h);
      pen.clip();
      pen.imageSmoothingEnabled = false;
      pen.drawImage(
        picture,
        0,
        0,
        broad / keyBlock,
        high / queryBlock,
        plot.x + (column0 * keyBlock - view.k0) * x,
        plot.y + (row0 * queryBlock - view.q0) * y,
        broad * x,
        high * y,
      );
      pen.restore();
    }
    axes.setAttribute("width", String(wide));
    axes.setAttribute("height", String(tall));
    axes.setAttribute("viewBox", `0 0 ${wide} ${tall}`);
    axes.setAttribute(
      "aria-label",
      `${title.textContent}. Arrow keys move, plus and minus zoom, 0 shows all.`,
    );
    const right = plot.x + Math.min(plot.w, (shape.keys - view.k0) * x),
      foot = plot.y + Math.min(plot.h, (shape.rows - view.q0) * y);
    const across = wholeTicks(view.k0, Math.min(view.k1, shape.keys), plot.w, 64),
      down = wholeTicks(view.q0, Math.min(view.q1, shape.rows), plot.h, 36);
    clear(axes).append(
      svg("rect", {
        class: "compare-frame",
        x: plot.x,
        y: plot.y,
        width: Math.max(0, right - plot.x),
        height: Math.max(0, foot - plot.y),
      }),
      ...across.map((n) =>
        svg(
          "text",
          { x: plot.x + (n + 0.5 - view.k0) * x, y: foot + 14, "text-anchor": "middle" },
          String(n + shape.keyOffset),
        ),
      ),
      ...down.map((n) =>
        svg(
          "text",
          { x: plot.x - 5, y: plot.y + (n + 0.5 - view.q0) * y + 4, "text-anchor": "end" },
          String(n + shape.queryOffset),
        ),
      ),
      svg(
        "text",
        { class: "plot-label", x: (plot.x + right) / 2, y: foot + 29, "text-anchor": "middle" },
        "key",
      ),
      svg(
        "text",
        {
          class: "plot-label",
          "text-anchor": "middle",
          transform: `translate(10 ${(plot.y + foot) / 2}) rotate(-90)`,
        },
        "query",
      ),
    );
    const split = layers[0]?.to ?? 1;
    if (split < 1)
      axes.append(
        svg("path", {
          class: "compare-divider",
          d: `M${plot.x + split * plot.w} ${plot.y}V${plot.y + plot.h}`,
        }),
      );
    if (cell) {
      axes.append(
        svg("rect", {
          class: "plot-ring",
          x: plot.x + (cell.key - view.k0) * x,
          y: plot.y + (cell.row - view.q0) * y,
          width: Math.max(3, x),
          height: Math.max(3, y),
        }),
      );
    }
  };
  // Traces of different lengths show the same share of each.
  /**
   * @param {View} what @param {number} way
   * @returns {View}
   */
  const stretch = ({ q0, q1, k0, k1 }, way) => {
    const { rows, keys } = state.shape(),
      q = (shape.rows / (rows || 1)) ** way,
      k = (shape.keys / (keys || 1)) ** way;
    return { q0: q0 * q, q1: q1 * q, k0: k0 * k, k1: k1 * k };
  };
  /** @type {{at: Point, view: View}|null} */
  let grip = null;
  stage.addEventListener("pointerdown", (event) => {
    if (event.button === 0) grip = { at: pointIn(stage, event), view };
  });
  stage.addEventListener("pointermove", (event) => {
    const { x, y } = pointIn(stage, event);
    if (grip) {
      stage.setPointerCapture(event.pointerId);
      const dq = ((grip.at.y - y) * (view.q1 - view.q0)) / plot.h,
        dk = ((grip.at.x - x) * (view.k1 - view.k0)) / plot.w;
      state.set({ view: stretch(panView(grip.view, dq, dk, shape), -1) });
      return;
    }
    cell = shown && cellAt(view, plot, x, y, shape);
    read.textContent = shown && cell ? shown.read(cell) : "";
  });
  const release = () => (grip = null);
  stage.addEventListener("pointerup", release);
  stage.addEventListener("pointercancel", release);
  stage.addEventListener("click", () => {
    const held = cell && shown?.toHeld ? shown.toHeld(cell) : cell;
    if (held) state.set({ row: held.row, key: held.key });
  });
  /** @param {number} factor @param {Point} [about] */
  const zoom = (factor, { x, y } = { x: plot.x + plot.w / 2, y: plot.y + plot.h / 2 }) => {
    const { q, k } = placeAt(view, plot, x, y);
    state.set({ view: stretch(zoomView(view, factor, q, k, shape), -1) });
  };
  stage.addEventListener(
    "wheel",
    (event) => {
      if (!shown) return;
      event.preventDefault();
      zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) / 150), pointIn(stage, event));
    },
    { passive: false },
  );
  axes.addEventListener("keydown", (event) => {
    if (!shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    /** @param {number} n @param {number} span */
    const by = (n, span) => (n * span) / 8;
    if (step)
      state.set({
        view: stretch(
          panView(view, by(step[0], view.q1 - view.q0), by(step[1], view.k1 - view.k0), shape),
          -1,
        ),
      });
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
    /** @param {ComparePicture} next @param {string} name */
    show(next, name) {
      shown = next;
      shape = next.shape;
      title.textContent = name;
      const held = state.row !== null && state.key !== null ? { row: state.row, key: state.key } : null;
      const here = held && next.ofHeld ? next.ofHeld(held) : held;
      cell = here && here.row < shape.rows && here.key < shape.keys ? here : null;
      read.textContent = cell ? next.read(cell) : "";
      draw();
    },
  };
}
