import { element, emptyState } from "./dom.js";
import { heatPlot } from "./heats.js";
import { headName, layerNumber } from "./passages.js";
import { linePlot } from "./plots.js";
import { formatNumber, rangeOf } from "./scales.js";

const POSITION_PLOTS = 10;

/**
 * The calls that a record holds for, in words.
 * @param {PositionRecord} place @param {Call[]} calls
 */
const positionScope = (place, calls) =>
  place.calls?.length
    ? ` · ${
        place.calls.length === calls.length
          ? "every layer"
          : `layer ${place.calls
              .slice(0, 8)
              .map((c) => layerNumber(calls, c))
              .join(", ")}`
      }`
    : "";

/**
 * Turns per token as wavelengths: how many tokens until a pair of features is back where it was.
 * @param {number[]} frequencies radians per token
 * @returns {number[]} tokens; Infinity for a pair that does not turn
 */
export function wavelengths(frequencies) {
  return frequencies.map((one) => (one === 0 ? Infinity : (2 * Math.PI) / Math.abs(one)));
}

/**
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountPositions(host, source, state) {
  const places = source.document.positions ?? [],
    calls = source.document.traces[0]?.calls ?? [];
  host.classList.add("positions");
  if (!places.length) {
    host.append(
      emptyState(
        "Nothing is known about positions",
        "No rotary positions, biases by distance or position tables were found. Tables can be given:",
        'trace.explore("page.html", positions={"sinusoidal": table})',
      ),
    );
    return;
  }
  /** @param {string} title @param {boolean} [wide] */
  const section = (title, wide) => {
    const box = element("section", { class: wide ? "wide" : null }, element("h2", {}, title));
    host.append(box);
    return box;
  };
  /** @param {HTMLElement} box */
  const spot = (box) => box.appendChild(element("div"));
  /**
   * @param {number | null} length
   * @returns {Marker[]}
   */
  const markerAt = (length) => (length ? [{ x: length, label: `trained to ${length}` }] : []);

  /** @param {PositionRecord} place */
  const rotary = async (place) => {
    const { values } = await source.chunk(place.kernel),
      box = section(`${place.name}${positionScope(place, calls)}`);
    const waves = wavelengths(place.frequencies),
      n = waves.length;
    linePlot(spot(box), {
      title: "q · k of two equal unit vectors, by distance",
      xLabel: "distance",
      yLabel: "mean cosine",
      xScale: "log",
      height: 190,
      series: [{ name: "kernel", x: place.distances, y: values }],
      markers: markerAt(place.trained_length),
      note:
        `${formatNumber(values[0])} at distance 0.` +
        (place.trained_length ? "" : " The trained length is not known."),
    });
    linePlot(spot(box), {
      title: "Wavelength of each pair of features",
      xLabel: "pair",
      yLabel: "tokens",
      yScale: "log",
      height: 170,
      series: [
        { name: "wavelength", x: waves.map((_, at) => at), y: waves },
        ...(place.trained_length
          ? [
              {
                name: "trained length",
                x: [0, n - 1],
                y: [place.trained_length, place.trained_length],
                dashed: true,
              },
            ]
          : []),
      ],
      note:
        `${n} pairs of ${place.head_dim} features, ${formatNumber(place.frequencies[0])} to ` +
        `${formatNumber(place.frequencies[n - 1])} radians a token.`,
    });
  };
  /** @param {PositionRecord} place */
  const bias = async (place) => {
    const { values, shape } = await source.chunk(place.values),
      box = section(`${place.name.replaceAll("_", " ")}${positionScope(place, calls)}`);
    const every = Math.ceil(shape[0] / 8),
      heads = Array.from({ length: shape[0] }, (_, n) => n).filter((n) => n % every === 0);
    linePlot(spot(box), {
      title: "Added to the score, by distance",
      xLabel: "query − key",
      yLabel: "logit",
      height: 220,
      note: every > 1 ? `Every ${every}th of ${shape[0]} heads.` : "",
      markers: markerAt(place.trained_length),
      series: heads.map((n) => ({
        name: `head ${n}`,
        x: place.distances,
        y: values.subarray(n * shape[1], (n + 1) * shape[1]),
      })),
    });
  };
  /** @param {PositionRecord} place */
  const table = async (place) => {
    const [alike, norms] = await Promise.all([source.chunk(place.similarity), source.chunk(place.norms)]);
    const n = alike.shape[0],
      step = place.step ?? 1,
      box = section(`${place.name} table${positionScope(place, calls)}`);
    /** @param {number} at */
    const text = (at) => String(at * step);
    heatPlot(
      spot(box),
      {
        title: "Cosine similarity of positions",
        values: alike.values,
        rows: n,
        columns: n,
        kind: "diverging",
        low: -1,
        high: 1,
        square: true,
        xLabel: "position",
        yLabel: "position",
        xText: text,
        yText: text,
        markers:
          place.trained_length < n * step
            ? markerAt(place.trained_length).map((one) => ({ ...one, x: one.x / step }))
            : [],
        table: {
          head: ["distance", "similarity to position 0"],
          rows: Array.from({ length: n }, (_, at) => [at * step, alike.values[at]]),
        },
      },
      state,
    );
    linePlot(spot(box), {
      title: "Norm by position",
      xLabel: "position",
      yLabel: "norm",
      low: 0,
      height: 130,
      markers: markerAt(place.trained_length),
      series: [{ name: "norm", x: Array.from(norms.values, (_, at) => at * step), y: norms.values }],
    });
  };
  /** @param {PositionRecord} place */
  const split = async (place) => {
    const names = ["content", "bias", "both"];
    const parts = await Promise.all(names.map((name) => source.chunk(place[name])));
    const [low, high] = rangeOf(parts.map((part) => part.values)),
      most = Math.max(Math.abs(low), Math.abs(high));
    const box = section(
      `Scores of ${headName(source.document.traces[0].calls, place.call, place.head)}, taken apart`,
      true,
    );
    box.append(
      element(
        "p",
        {},
        "One colour scale for all. Cells that the mask forbids are grey; a click shows the cell on the map.",
      ),
    );
    const row = box.appendChild(element("div", { class: "positions-split" }));
    const [top, left] = [place.first_row ?? 0, place.first_key ?? 0];
    for (const [n, part] of parts.entries())
      heatPlot(
        spot(row),
        {
          title: [
            "What the features say",
            "What positions and biases add",
            "Both: the score before the softmax",
          ][n],
          values: part.values,
          rows: place.rows,
          columns: place.keys,
          kind: "diverging",
          low: -most,
          high: most,
          square: true,
          xLabel: "key",
          yLabel: "query",
          xText: (at) => String(at + left),
          yText: (at) => String(at + top),
          onPick: (i, j) =>
            state.set({
              t: 0,
              c: place.call,
              h: place.head,
              row: i + top,
              key: j + left,
              direction: "out",
              tab: "attention",
            }),
        },
        state,
      );
  };
  const draw = async () => {
    for (const place of places.slice(0, POSITION_PLOTS))
      await { rotary, bias, table, split }[place.kind]?.(place);
    if (places.length > POSITION_PLOTS)
      host.append(
        element("p", {}, `${places.length - POSITION_PLOTS} more records of positions are not drawn.`),
      );
  };
  draw();
}
