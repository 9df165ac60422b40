import { element, emptyState, tickbox } from "./dom.js";
import { heatPlot } from "./heats.js";
import { linePlot } from "./plots.js";
import { rangeOf } from "./scales.js";

/**
 * Mean of the points within a window that is centred on each and cut at the ends; NaN takes no part.
 * @param {ArrayLike<number>} values @param {number} half points on either side @returns {Float64Array}
 */
export function smoothed(values, half) {
  const sums = new Float64Array(values.length + 1),
    counts = new Int32Array(values.length + 1);
  for (let n = 0; n < values.length; n++) {
    const known = Number.isFinite(values[n]);
    sums[n + 1] = sums[n] + (known ? values[n] : 0);
    counts[n + 1] = counts[n] + (known ? 1 : 0);
  }
  return Float64Array.from(values, (_, n) => {
    const from = Math.max(0, n - half),
      to = Math.min(values.length, n + half + 1);
    return (sums[to] - sums[from]) / (counts[to] - counts[from] || NaN);
  });
}

/** @param {HTMLElement} host @param {Source} source @param {State} state */
export function mountTraining(host, source, state) {
  const training = source.document.training;
  host.classList.add("training");
  if (!training) {
    host.append(
      emptyState(
        "No training run in this page",
        "Give one to the page; a run holds a title, curves (name, unit, points, split) and maps (name, rows, steps, values):",
        'trace.explore("page.html", training=run)',
      ),
    );
    return;
  }
  const look = { logX: false, logY: false, half: 0 };
  const range = element("input", {
    type: "range",
    min: 0,
    max: 50,
    value: 0,
    "aria-label": "Smoothing: points on either side",
  });
  const told = element("output", {}, "off");
  const bar = element(
    "div",
    { class: "training-bar" },
    element("h2", {}, training.title ?? "Training"),
    tickbox("log steps", false, (on) => change({ logX: on })),
    tickbox("log values", false, (on) => change({ logY: on })),
    element("label", { class: "rg-field" }, element("span", {}, "smoothing"), range, told),
  );
  const curves = element("div", { class: "training-curves" }),
    maps = element("div", { class: "training-maps" });
  host.append(bar, curves, maps);
  /** @type {Map<string, PlotFrame<LineSpec>>} */
  const plots = new Map();
  /** @param {Partial<typeof look>} changes */
  const change = (changes) => {
    Object.assign(look, changes);
    told.textContent = look.half ? `mean of ${2 * look.half + 1} points` : "off";
    draw();
  };
  range.addEventListener("input", () => change({ half: Number(range.value) }));

  const draw = async () => {
    /** @type {Map<string, NonNullable<Training["curves"]>>} */
    const groups = new Map();
    for (const curve of training.curves ?? [])
      groups.set(curve.name, [...(groups.get(curve.name) ?? []), curve]);
    for (const [name, list] of groups) {
      const series = await Promise.all(
        list.map(async (curve) => {
          const { values, shape } = await source.chunk(curve.points),
            n = shape[1];
          const raw = values.subarray(n, 2 * n);
          return {
            name: curve.split ?? curve.name,
            x: values.subarray(0, n),
            y: look.half ? smoothed(raw, look.half) : raw,
            raw: look.half ? raw : undefined,
            dashed: curve.split === "test",
          };
        }),
      );
      /** @type {LineSpec} */
      const spec = {
        title: name,
        xLabel: "step",
        yLabel: list[0].unit ?? name,
        series,
        height: 200,
        xScale: look.logX ? "log" : "linear",
        yScale: look.logY ? "log" : "linear",
        note: look.logX || look.logY ? "A log axis leaves out what is not above 0." : "",
      };
      const plot = plots.get(name);
      if (plot) plot.update(spec);
      else plots.set(name, linePlot(curves.appendChild(element("div")), spec));
    }
  };
  const drawMaps = async () => {
    for (const map of training.maps ?? []) {
      const { values } = await source.chunk(map.values),
        [low, high] = rangeOf([values]);
      heatPlot(
        maps.appendChild(element("div")),
        {
          title: `${map.name.replaceAll("_", " ")} by head and step`,
          values,
          rows: map.rows.length,
          columns: map.steps.length,
          low: Math.min(0, low),
          high,
          unit: map.unit ?? "",
          left: 110,
          xLabel: "step",
          yLabel: "head",
          xText: (n) => String(map.steps[n]),
          yText: (n) => map.rows[n],
          height: Math.min(420, Math.max(60, 15 * map.rows.length)),
          table: {
            head: ["head", ...map.steps.slice(0, 1), ...map.steps.slice(-1)].map(String),
            rows: map.rows.map((row, n) => [
              row,
              values[n * map.steps.length],
              values[(n + 1) * map.steps.length - 1],
            ]),
          },
        },
        state,
      );
    }
  };
  draw();
  drawMaps();
}
