import { isDark, masked, missing, tableFor, toUnit } from "./colours.js";
import { element, penOf, svg } from "./dom.js";
import { PLOT_BOTTOM, PLOT_RIGHT, PLOT_TOP, plotAxes, plotFrame, plotPointer } from "./plots.js";
import { formatNumber, linearTicks, makeAxis } from "./scales.js";

/**
 * A matrix as a picture of one pixel a cell; NaN in the colour that no map holds.
 * @param {ArrayLike<number>} values rows x columns @param {number} rows @param {number} columns
 * @param {HeatLook} look
 * @returns {Uint8ClampedArray<ArrayBuffer>} rows x columns x 4
 */
export function heatPixels(
  values,
  rows,
  columns,
  { kind = "sequential", scale = "linear", low, high, dark = false },
) {
  const table = tableFor(kind, dark),
    theme = dark ? "dark" : "light";
  const pixels = new Uint8ClampedArray(4 * rows * columns);
  for (let n = 0; n < rows * columns; n++) {
    const unit = toUnit(values[n], scale, low, high),
      code = 3 * Math.round(255 * unit);
    const none = values[n] === -Infinity ? masked[theme] : Number.isNaN(unit) ? missing[theme] : null;
    for (let part = 0; part < 3; part++) pixels[4 * n + part] = none?.[part] ?? table[code + part];
    pixels[4 * n + 3] = 255;
  }
  return pixels;
}

/**
 * A canvas of the size of the matrix, to be drawn larger.
 * @param {ArrayLike<number>} values @param {number} rows @param {number} columns
 * @param {HeatLook} look
 * @returns {HTMLCanvasElement}
 */
export function heatCanvas(values, rows, columns, look) {
  const canvas = element("canvas", {
    width: Math.max(1, columns),
    height: Math.max(1, rows),
    "aria-hidden": "true",
  });
  if (rows * columns > 0) {
    penOf(canvas).putImageData(new ImageData(heatPixels(values, rows, columns, look), columns, rows), 0, 0);
  }
  return canvas;
}

/**
 * The colours of a look with the numbers at both ends, as children of a legend.
 * @param {HeatLook} look @param {string} [unit]
 * @returns {Node[]}
 */
export function heatLegend(look, unit = "") {
  const ramp = Float32Array.from({ length: 96 }, (_, n) => look.low + ((look.high - look.low) * n) / 95);
  return [
    element(
      "span",
      { class: "heat-bar" },
      formatNumber(look.low),
      heatCanvas(ramp, 1, 96, { ...look, scale: "linear" }),
      `${formatNumber(look.high)}${unit ? ` ${unit}` : ""}`,
    ),
  ];
}

/**
 * A matrix with axes, colour bar, and the number under the pointer or the arrow keys.
 * @param {HTMLElement} host
 * @param {HeatSpec} spec
 * @param {EventTarget} [state] whose "recolour" draws it again
 * @returns {PlotFrame<HeatSpec>}
 */
export function heatPlot(host, spec, state) {
  /** @param {PlotFrame<HeatSpec>} frame @param {HeatSpec} spec */
  const draw = ({ body, read, legend, width }, spec) => {
    const { rows, columns, onPick: pick } = spec,
      left = spec.left ?? 52;
    const wide = spec.square ? Math.min(width - left - PLOT_RIGHT, 300) : width - left - PLOT_RIGHT;
    const tall = spec.square
      ? wide * Math.min(2, rows / (columns || 1))
      : (spec.height ?? Math.min(360, Math.max(40, 14 * rows)));
    const full = left + wide + PLOT_RIGHT,
      height = tall + PLOT_TOP + PLOT_BOTTOM;
    const look = { kind: spec.kind, low: spec.low, high: spec.high, dark: isDark(body) };
    const canvas = heatCanvas(spec.values, rows, columns, look);
    // Shares of the figure, so that both scale together on paper.
    Object.assign(canvas.style, {
      left: `${(100 * left) / full}%`,
      top: `${(100 * PLOT_TOP) / height}%`,
      width: `${(100 * wide) / full}%`,
      height: `${(100 * tall) / height}%`,
    });
    canvas.classList.add("heat-canvas");
    const xAxis = makeAxis("linear", -0.5, columns - 0.5, left, left + wide);
    const yAxis = makeAxis("linear", -0.5, rows - 0.5, PLOT_TOP, PLOT_TOP + tall);
    /**
     * @param {number} size @param {number} most @param {((n: number) => string) | undefined} text
     * @returns {Tick[]}
     */
    const ticks = (size, most, text) =>
      linearTicks(0, Math.max(size - 1, 0), Math.min(most, size))
        .filter(Number.isInteger)
        .map((tick) => /** @type {Tick} */ ([tick, text ? text(tick) : String(tick)]));
    const node = svg("svg", {
      width: full,
      height,
      viewBox: `0 0 ${full} ${height}`,
      tabindex: 0,
      role: "img",
      "aria-label": `${spec.title}: ${rows} by ${columns} numbers. Arrow keys read them.`,
    });
    plotAxes(
      node,
      {
        ...spec,
        xTicks: ticks(columns, wide / 60, spec.xText),
        yTicks: ticks(rows, tall / 16, spec.yText),
        bare: true,
      },
      xAxis,
      yAxis,
      full,
      height,
      left,
    );
    const ring = svg("rect", { class: "plot-ring", width: 0, height: 0 });
    node.append(ring);
    let row = -1,
      column = -1;
    /** @param {number} i @param {number} j */
    const show = (i, j) => {
      if (!rows || !columns) return;
      [row, column] = [Math.min(Math.max(i, 0), rows - 1), Math.min(Math.max(j, 0), columns - 1)];
      const box = {
        x: xAxis.at(column - 0.5),
        y: yAxis.at(row - 0.5),
        width: wide / columns,
        height: tall / rows,
      };
      for (const [name, value] of Object.entries(box)) ring.setAttribute(name, String(value));
      read.textContent =
        `${spec.yLabel} ${spec.yText ? spec.yText(row) : row}, ${spec.xLabel} ` +
        `${spec.xText ? spec.xText(column) : column}: ` +
        `${formatNumber(spec.values[row * columns + column])} ${spec.unit ?? ""}`;
    };
    plotPointer(
      node,
      (px, py) => show(Math.round(yAxis.invert(py)), Math.round(xAxis.invert(px))),
      (dx, dy) => show(Math.max(row, 0) + (row < 0 ? 0 : dy), Math.max(column, 0) + (column < 0 ? 0 : dx)),
      pick && (() => row >= 0 && pick(row, column)),
    );
    legend.replaceChildren(...heatLegend(look, spec.unit));
    body.replaceChildren(element("div", { class: "heat-stage" }, canvas, node));
  };
  const frame = plotFrame(host, draw);
  frame.update(spec);
  state?.addEventListener("recolour", frame.redraw);
  return frame;
}
