import { element } from "./dom.js";
import { headCode, headName, keysHolding } from "./passages.js";
import { linePlot } from "./plots.js";
import { formatNumber } from "./scales.js";

const PROFILE_HEADS = 6,
  PROFILE_ROWS = 160;

/**
 * The distances that bin n of 63 holds: 31 is distance 0, 31 + n holds 2^(n-1) .. 2^n - 1, 31 - n keys that
 * come later.
 * @param {number} bin @returns {[number, number]} smallest and largest
 */
export function distancesOf(bin) {
  const n = Math.abs(bin - 31);
  if (!n) return [0, 0];
  const [near, far] = [2 ** (n - 1), 2 ** n - 1];
  return bin > 31 ? [near, far] : [-far, -near];
}

/** A bin's distances in words. @param {number} bin @returns {string} */
export function distanceText(bin) {
  const [low, high] = distancesOf(bin)
    .map(Math.abs)
    .sort((a, b) => a - b);
  return `${bin < 31 ? "−" : ""}${low === high ? low : `${low}…${high}`}`;
}

/**
 * First and last bin that a call can fill.
 * @param {number} rows @param {number} keys @param {number} shift position of row 0 less that of key 0
 * @returns {[number, number]}
 */
export function distanceBins(rows, keys, shift) {
  /** @param {number} distance */
  const binOf = (distance) =>
    distance === 0 ? 31 : 31 + Math.sign(distance) * (1 + Math.floor(Math.log2(Math.abs(distance))));
  return [
    Math.max(0, Math.min(31, binOf(shift - keys + 1))),
    Math.min(62, Math.max(31, binOf(shift + rows - 1))),
  ];
}

/**
 * How many keys hold a share of each row, as far as the largest weights tell.
 * @param {ArrayLike<number>} weights rows x k, largest first @param {number} k @param {number} share
 * @returns {Float32Array} NaN where k keys do not hold it
 */
export function coverageOf(weights, k, share) {
  return Float32Array.from({ length: k ? Math.floor(weights.length / k) : 0 }, (_, row) => {
    let sum = 0;
    for (let n = 0; n < k; n++) {
      sum += weights[row * k + n];
      if (sum >= share * (1 - 1e-7)) return n + 1;
    }
    return NaN;
  });
}

/**
 * Which share of the rows needs at most n keys, for n = 1, 2, ... up to the largest count known.
 * @param {ArrayLike<number>} counts keys that a row needs; NaN: more than are known; 0: a row without mass,
 *   left out
 * @param {number} most @returns {{x: number[], y: number[]}}
 */
export function shareServed(counts, most) {
  const rows = Array.from(counts).filter((one) => one !== 0),
    histogram = new Float64Array(most + 1);
  for (const one of rows) if (one <= most) histogram[one]++;
  const x = [],
    y = [];
  for (let n = 1, sum = 0; n <= most; n++) {
    sum += histogram[n];
    if (n > 1 && n < most && !histogram[n]) continue;
    x.push(n);
    y.push(sum / rows.length);
  }
  return { x, y };
}

/**
 * How many keys the rows of each row of blocks need, in whole blocks, largest first.
 * @param {ArrayLike<number>} mass I x J means over rows @param {number} J @param {number} keyBlock
 * @param {number} keys @param {ArrayLike<number>} rows how many live in each row of blocks @param {number} share
 * @returns {number[]} one for each living row
 */
export function blocksHolding(mass, J, keyBlock, keys, rows, share) {
  return Array.from(rows).flatMap((living, i) => {
    const blocks = keysHolding(
      Array.from({ length: J }, (_, j) => mass[i * J + j]),
      share,
    );
    return Array(living).fill(Math.min(keys, blocks * keyBlock));
  });
}

/**
 * How many keys are enough for most and for all of the queries, in words.
 * @param {{x: number[], y: number[]}} served
 */
export function servedText({ x, y }) {
  /** @param {number} part */
  const enough = (part) => x[y.findIndex((one) => one >= part - 1e-9)] ?? NaN;
  return `half of the queries need ${formatNumber(enough(0.5))} at most, 95 % ${formatNumber(enough(0.95))}`;
}

/**
 * How many keys rows need for 90 % and 99 %, from exact weights (some rows of many) or stored top keys; null
 * when unknown.
 * @param {Source} source @param {number} t @param {number} c @param {number} h
 */
async function profileCoverage(source, t, c, h) {
  const head = source.head(t, c, h),
    exact = await source.weights(t, c, h);
  if (exact) {
    const every = Math.ceil(exact.rows / PROFILE_ROWS) || 1,
      count = Math.ceil(exact.rows / every);
    /** @param {number} n */
    const row = (n) => exact.values.subarray(n * every * exact.keys, (n * every + 1) * exact.keys);
    /** @param {number} share */
    const hold = (share) => Float32Array.from({ length: count }, (_, n) => keysHolding(row(n), share));
    const counts = [hold(0.9), hold(0.99)],
      most = Math.max(1, ...counts[1]);
    return {
      served: counts.map((one) => shareServed(one, most)),
      note: every > 1 ? `Every ${every}th query.` : "",
    };
  }
  if (head.top_weights) {
    const { values, shape } = await source.chunk(head.top_weights),
      k = shape[1];
    // Rows whose largest weight is 0 may attend to nothing.
    const served = [0.9, 0.99].map((share) =>
      shareServed(
        coverageOf(values, k, share).map((one, n) => (values[n * k] > 0 ? one : 0)),
        k,
      ),
    );
    if ((served[1].y.at(-1) ?? 0) >= 0.95)
      return { served, note: `The ${k} largest weights of each query are known.` };
  }
  // Where the largest weights tell of few queries, blocks tell of all.
  const [level] = head.levels,
    { keys } = source.call(t, c);
  if (!level) return null;
  const [mass, rows] = await Promise.all([source.chunk(level.mass), source.chunk(level.rows)]);
  const served = [0.9, 0.99].map((share) =>
    shareServed(blocksHolding(mass.values, mass.shape[1], level.key_block, keys, rows.values, share), keys),
  );
  const { query_block: up, key_block: across } = level;
  return { served, note: up * across > 1 ? `In whole blocks of ${up} queries × ${across} keys.` : "" };
}

/**
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountProfiles(host, source, state) {
  host.classList.add("profiles");
  const places = Array.from({ length: 4 }, () => host.appendChild(element("div")));
  /** @type {PlotFrame<LineSpec>[]} */
  const plots = [];
  let now = 0;

  /** @param {number} n @param {LineSpec} spec */
  const show = (n, spec) => {
    const sized = { height: 122, ...spec };
    if (plots[n]) plots[n].update(sized);
    else plots[n] = linePlot(places[n], sized);
  };
  const draw = async () => {
    const mine = ++now,
      { t, c, h } = state;
    // Nobody sees folded curves, which take longer than the map.
    if (!source.call(t, c)?.heads || state.fold.split(",").includes("profiles")) return;
    const chosen = [[c, h], ...state.selection.filter(([a, b]) => a !== c || b !== h)].slice(
      0,
      PROFILE_HEADS,
    );
    const more =
      state.selection.length > PROFILE_HEADS
        ? `The first ${PROFILE_HEADS} of ${state.selection.length} heads.`
        : "";
    const records = await Promise.all(
      chosen.map(async ([a, b]) => {
        const call = source.call(t, a),
          head = source.head(t, a, b);
        const [mass, stats] = await Promise.all([
          source.chunk(head.distance_mass),
          source.chunk(head.row_stats),
        ]);
        const bin = head.row_bin || 1,
          bins = stats?.shape[1] ?? 0;
        /** @param {string} name */
        const of = (name) => {
          const at = (call.row_stats ?? []).indexOf(name);
          return stats && at >= 0 ? stats.values.slice(at * bins, (at + 1) * bins) : [];
        };
        const x = Array.from(
          { length: bins },
          (_, n) => call.query_offset + n * bin + (Math.min(bin, call.rows - n * bin) - 1) / 2,
        );
        return {
          call,
          name: `head ${headCode(state.calls(), [a, b])}`,
          mass: mass?.values ?? [],
          of,
          x,
          bin,
        };
      }),
    );
    const coverage = await profileCoverage(source, t, c, h);
    if (mine !== now) return;
    const spans = records.map(({ call }) =>
      distanceBins(call.rows, call.keys, call.query_offset - call.key_offset),
    );
    const [first, last] = [Math.min(...spans.map((one) => one[0])), Math.max(...spans.map((one) => one[1]))];
    const backward = records.some(({ mass }) =>
      Array.from(mass)
        .slice(first, 31)
        .some((one) => one > 0),
    );
    const from = backward ? first : 31,
      bins = Array.from({ length: last - from + 1 }, (_, n) => from + n);
    /** @type {Tick[]} */
    const labels = bins.map((bin) => [bin, distanceText(bin).split("…")[0]]);
    show(0, {
      title: "Weight by distance",
      note: more,
      xLabel: "tokens back",
      yLabel: "share",
      low: 0,
      xTicks: labels,
      xText: distanceText,
      description: "Bins of doubling width; negative: keys that come later.",
      series: records.map(({ name, mass }) => ({ name, x: bins, y: bins.map((bin) => mass[bin] ?? NaN) })),
    });
    const binned = records[0].bin > 1 ? `Means of ${records[0].bin} queries.` : "";
    show(1, {
      title: "Entropy by position",
      note: binned,
      xLabel: "query",
      yLabel: "nats",
      low: 0,
      series: records.map(({ name, x, of }) => ({ name, x, y: of("entropy") })),
    });
    const sinks = records.some(({ call }) => call.sinks);
    show(2, {
      title: sinks ? "Weight on the first keys and the sink" : "Weight on the first keys",
      note: binned,
      xLabel: "query",
      yLabel: "share",
      low: 0,
      series: records.flatMap(({ name, x, of, call }, n) => [
        { name: sinks ? `${name}, first` : name, x, y: of("first_mass"), color: n },
        ...(call.sinks ? [{ name: `${name}, sink`, x, y: of("sink_mass"), color: n, dashed: true }] : []),
      ]),
    });
    const tops = source.call(t, c).means?.coverage90?.[h];
    const { keys } = source.call(t, c);
    // To the last key: where the line lies is then the same for every head.
    const served = coverage?.served.map(({ x, y }) =>
      (x.at(-1) ?? 0) < keys ? { x: [...x, keys], y: [...y, y.at(-1) ?? NaN] } : { x, y },
    );
    show(3, {
      title: `Keys that hold 90 % and 99 %${records.length > 1 ? `, ${headName(state.calls(), c, h)}` : ""}`,
      xLabel: "keys",
      yLabel: "share of queries",
      xScale: "log",
      low: 0,
      high: 1,
      stepped: true,
      description: "Share of the queries for which so many keys are enough.",
      note: coverage
        ? `For 90 %, ${servedText(coverage.served[0])}. ${coverage.note}`
        : typeof tops === "number"
          ? `90 % in ${tops.toFixed(1)} keys on average.`
          : "Not known for this head: pin it, or serve the trace.",
      series: served ? ["90 %", "99 %"].map((name, n) => ({ name, dashed: n > 0, ...served[n] })) : [],
    });
  };
  state.on(["t", "c", "h", "selection", "fold"], draw);
  draw();
}
