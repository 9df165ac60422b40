import { element, pointIn, svg } from "./dom.js";
import { formatNumber, linePath, makeAxis, nearestIndex, rangeOf } from "./scales.js";

export const PLOT_LEFT = 52,
  PLOT_RIGHT = 10,
  PLOT_TOP = 8,
  PLOT_BOTTOM = 36;

/**
 * A figure that draws itself again when its width changes: the shared frame of every plot.
 * @template {PlotSpec} Spec
 * @param {HTMLElement} host @param {(frame: PlotFrame<Spec>, spec: Spec) => void} draw
 * @returns {PlotFrame<Spec>}
 */
export function plotFrame(host, draw) {
  const caption = element("figcaption"),
    body = element("div", { class: "plot-body" });
  const read = element("output", { class: "plot-read" });
  const legend = element("div", { class: "plot-legend" }),
    table = element("details", { class: "plot-table" });
  const figure = element("figure", { class: "plot" }, caption, legend, body, read, table);
  host.append(figure);
  /** @type {Spec|null} */
  let shown = null;
  const redraw = () => {
    frame.width = body.clientWidth;
    if (shown && frame.width > 0) draw(frame, shown);
  };
  /** @param {Spec} spec */
  const update = (spec) => {
    shown = spec;
    caption.textContent = spec.title;
    read.textContent = spec.note ?? "";
    table.hidden = !spec.table && !spec.series;
    const named = spec.series && spec.series.length > 1 ? spec.series : [];
    legend.replaceChildren(
      ...named.map((one, n) =>
        element("span", { class: `series-${one.color ?? n % 8}` }, element("i"), one.name),
      ),
    );
    if (table.open) plotTable(table, spec);
    redraw();
  };
  /** @type {PlotFrame<Spec>} */
  const frame = { figure, body, read, legend, width: 0, update, redraw };
  table.append(element("summary", {}, "Numbers"));
  table.addEventListener("toggle", () => plotTable(table, shown));
  new ResizeObserver(() => body.clientWidth !== frame.width && redraw()).observe(body);
  return frame;
}

/**
 * The numbers behind a plot as rows, every nth when there are many, made when somebody opens them.
 * @param {HTMLDetailsElement} details @param {PlotSpec | null} spec
 */
function plotTable(details, spec) {
  details.querySelector("table")?.remove();
  if (!details.open || !spec) return;
  const { head, rows } = spec.table ?? seriesTable(spec);
  const every = Math.ceil(rows.length / 32) || 1;
  /** @param {"th" | "td"} tag @param {(string | number)[]} row */
  const cells = (tag, row) =>
    row.slice(0, 7).map((one) => element(tag, {}, typeof one === "number" ? formatNumber(one) : one));
  const caption = element(
    "caption",
    {},
    every > 1 ? `${spec.title}: one of every ${every} of ${rows.length} rows` : spec.title,
  );
  details.append(
    element(
      "table",
      // It scrolls.
      { tabindex: 0 },
      caption,
      element("thead", {}, element("tr", {}, ...cells("th", head))),
      element(
        "tbody",
        {},
        ...rows.filter((_, n) => n % every === 0).map((row) => element("tr", {}, ...cells("td", row))),
      ),
    ),
  );
}

/**
 * What a line plot shows, as rows: one per x of the first series.
 * @param {PlotSpec} spec @returns {Table}
 */
export function seriesTable(spec) {
  const { series = [] } = spec;
  const x = series[0]?.x ?? [];
  return {
    head: [spec.xLabel, ...series.map((one) => one.name)],
    rows: Array.from(x, (value) => [
      spec.xText ? spec.xText(value) : value,
      ...series.map((one) => {
        const at = nearestIndex(one.x, value);
        return one.x[at] === value ? one.y[at] : NaN;
      }),
    ]),
  };
}

/**
 * Axes, grid and labels into an <svg>: one path for all grid lines.
 * @param {SVGElement} node @param {PlotSpec} spec @param {Axis} xAxis @param {Axis} yAxis
 * @param {number} width @param {number} height @param {number} [left]
 */
export function plotAxes(node, spec, xAxis, yAxis, width, height, left = PLOT_LEFT) {
  const right = width - PLOT_RIGHT,
    bottom = height - PLOT_BOTTOM;
  /** @param {Axis} axis @returns {Tick[]} */
  const ticksOf = ({ ticks }) => ticks.map((tick) => [tick, formatNumber(tick)]);
  const xTicks = spec.xTicks ?? ticksOf(xAxis);
  const yTicks = spec.yTicks ?? ticksOf(yAxis);
  const grid = yTicks.map(([tick]) => `M${left} ${yAxis.at(tick).toFixed(1)}H${right}`).join("");
  const notches = xTicks.map(([tick]) => `M${xAxis.at(tick).toFixed(1)} ${bottom}v4`).join("");
  const room = Math.max(1, Math.ceil(xTicks.length / Math.max(2, (width - 60) / 46)));
  node.append(
    svg("path", { class: "plot-grid", d: spec.bare ? "" : grid }),
    svg("path", { class: "plot-axis", d: `M${left} ${PLOT_TOP}V${bottom}H${right}${notches}` }),
    ...xTicks
      .filter((_, n) => n % room === 0)
      .map(([tick, text]) => {
        const x = xAxis.at(tick),
          last = x > right - 12;
        return svg(
          "text",
          { x: last ? right + 8 : x, y: bottom + 15, "text-anchor": last ? "end" : "middle" },
          text,
        );
      }),
    ...yTicks.map(([tick, text]) =>
      svg("text", { x: left - 5, y: yAxis.at(tick) + 3.5, "text-anchor": "end" }, text),
    ),
    svg(
      "text",
      { class: "plot-label", x: (left + right) / 2, y: height - 5, "text-anchor": "middle" },
      spec.xLabel,
    ),
    svg(
      "text",
      {
        class: "plot-label",
        x: 0,
        y: 0,
        "text-anchor": "middle",
        transform: `translate(10 ${(PLOT_TOP + bottom) / 2}) rotate(-90)`,
      },
      spec.yLabel,
    ),
  );
  for (const marker of spec.markers ?? []) {
    const px = xAxis.at(marker.x);
    if (!(px >= left - 1 && px <= right + 1)) continue;
    node.append(
      svg("path", { class: "plot-marker", d: `M${px.toFixed(1)} ${PLOT_TOP}V${bottom}` }),
      svg(
        "text",
        {
          x: px + (px > right - 70 ? -4 : 4),
          y: PLOT_TOP + 9,
          "text-anchor": px > right - 70 ? "end" : "start",
        },
        marker.label,
      ),
    );
  }
}

/**
 * Pointer and arrow keys over a picture: `move(pixelX, pixelY)` and `step(dx, dy)` answer, `pick` on Enter.
 * @param {SVGElement} node @param {(x: number, y: number) => void} move
 * @param {(dx: number, dy: number) => void} step @param {(() => void) | undefined} pick
 */
export function plotPointer(node, move, step, pick) {
  /** @param {MouseEvent} event */
  const at = (event) => {
    const { x, y } = pointIn(node, event);
    move(x, y);
  };
  node.addEventListener("pointermove", at);
  node.addEventListener("click", (event) => {
    at(event);
    pick?.();
  });
  node.addEventListener("keydown", (event) => {
    const step2 = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const times = event.shiftKey ? 10 : 1;
    if (step2) step(step2[0] * times, step2[1] * times);
    else if (event.key === "Enter" && pick) pick();
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

/**
 * Lines over a common x, with axes, legend, a reading under the pointer or the arrow keys, and a table.
 * @param {HTMLElement} host
 * @param {LineSpec} spec
 * @returns {PlotFrame<LineSpec>}
 */
export function linePlot(host, spec) {
  /** @param {PlotFrame<LineSpec>} frame @param {LineSpec} spec */
  const draw = ({ body, read, width }, spec) => {
    const height = spec.height ?? 170,
      bottom = height - PLOT_BOTTOM,
      pick = spec.onPick;
    if (!spec.series.some((one) => Array.prototype.some.call(one.y, Number.isFinite))) {
      body.replaceChildren(element("p", { class: "plot-none" }, "nothing to draw"));
      return;
    }
    const [xLow, xHigh] = rangeOf(
      spec.series.map((one) => one.x),
      spec.xScale,
    );
    const [low, high] = rangeOf(
      spec.series.flatMap((one) => (one.raw ? [one.y, one.raw] : [one.y])),
      spec.yScale,
    );
    const xAxis = makeAxis(spec.xScale, xLow, xHigh, PLOT_LEFT, width - PLOT_RIGHT);
    const yAxis = makeAxis(spec.yScale, spec.low ?? low, spec.high ?? high, bottom, PLOT_TOP);
    const node = svg("svg", {
      width,
      height,
      viewBox: `0 0 ${width} ${height}`,
      tabindex: 0,
      role: "img",
      "aria-label":
        `${spec.title}. ${spec.description ?? ""} ${spec.yLabel} by ${spec.xLabel}. ` +
        "Arrow keys read values.",
    });
    plotAxes(node, spec, xAxis, yAxis, width, height);
    spec.series.forEach((one, n) => {
      const name = `plot-line series-${one.color ?? n % 8}`;
      /** @param {ArrayLike<number>} y */
      const d = (y) => linePath(one.x, y, xAxis, yAxis, width, spec.stepped);
      if (one.raw) node.append(svg("path", { class: `${name} raw`, d: d(one.raw) }));
      node.append(svg("path", { class: one.dashed ? `${name} dashed` : name, d: d(one.y) }));
    });
    const hair = svg("path", { class: "plot-hair" });
    node.append(hair);
    /** @type {number|null} */
    let x = null;
    /** @param {number} value */
    const show = (value) => {
      const longest = spec.series.reduce(
        (best, one) => (one.x.length > best.x.length ? one : best),
        spec.series[0],
      );
      if (!longest?.x.length) return;
      const here = longest.x[nearestIndex(longest.x, value)];
      x = here;
      hair.setAttribute("d", `M${xAxis.at(here).toFixed(1)} ${PLOT_TOP}V${bottom}`);
      read.textContent =
        `${spec.xLabel} ${spec.xText ? spec.xText(here) : formatNumber(here, 4)}: ` +
        spec.series
          .map((one) => {
            const at = nearestIndex(one.x, here),
              there = one.x[at] === here ? "" : ` (at ${formatNumber(one.x[at])})`;
            return `${spec.series.length > 1 ? `${one.name} ` : ""}${formatNumber(one.y[at])}${there}`;
          })
          .join(", ");
    };
    plotPointer(
      node,
      (px) => show(xAxis.invert(px)),
      (dx) => {
        const xs = spec.series[0]?.x ?? [];
        const next = x === null ? 0 : nearestIndex(xs, x) + dx;
        if (xs.length) show(xs[Math.min(Math.max(next, 0), xs.length - 1)]);
      },
      pick && (() => x !== null && pick(x)),
    );
    body.replaceChildren(node);
  };
  const frame = plotFrame(host, draw);
  frame.update(spec);
  return frame;
}
