// Numbers as text, ticks, axes and paths: what plots need before there is a page.

/**
 * A number as a reader wants it: few significant digits, powers of ten where zeros would pile up.
 * @param {number|null|undefined} value @param {number} [digits] @returns {string}
 */
export function formatNumber(value, digits = 3) {
  if (value === Infinity || value === -Infinity) return value > 0 ? "∞" : "−∞";
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const whole = Number.isInteger(value) && size < 1e7;
  const text = whole
    ? String(value)
    : size < 1e-3 || size >= 1e6
      ? value
          .toExponential(digits - 1)
          .replace(/\.?0+e/, "e")
          .replace("e+", "e")
      : String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size))))));
  return text.replaceAll("-", "−");
}

/**
 * Round values inside [low, high], about `count` of them.
 * @param {number} low @param {number} high @param {number} [count] @returns {number[]}
 */
export function linearTicks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5].find((one) => one * power >= rough * 0.999) ?? 10);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    ticks.push(Number((n * step).toPrecision(12)));
  }
  return ticks;
}

/**
 * Powers of ten inside [low, high]; round values where the range holds fewer than two.
 * @param {number} low @param {number} high @param {number} [count] @returns {number[]}
 */
export function logTicks(low, high, count = 6) {
  const first = Math.ceil(Math.log10(low) - 1e-9),
    last = Math.floor(Math.log10(high) + 1e-9);
  if (last - first < 1) return linearTicks(low, high, count).filter((tick) => tick > 0);
  const every = Math.ceil((last - first + 1) / count);
  const ticks = [];
  for (let n = first; n <= last; n += every) ticks.push(Number((10 ** n).toPrecision(12)));
  return ticks;
}

/**
 * A map from values to pixels. Values that a log scale cannot show give NaN.
 * @param {AxisKind|undefined} kind linear when left out
 * @param {number} low @param {number} high @param {number} from
 * @param {number} to
 * @returns {Axis}
 */
export function makeAxis(kind, low, high, from, to) {
  const log = kind === "log";
  /** @type {(value: number) => number} */
  const warp = log ? (value) => (value > 0 ? Math.log(value) : NaN) : (value) => value;
  const start = warp(low),
    span = warp(high) - start || 1;
  return {
    at: (value) => from + ((warp(value) - start) / span) * (to - from),
    invert: (pixel) => {
      const value = start + ((pixel - from) / (to - from)) * span;
      return log ? Math.exp(value) : value;
    },
    ticks: log ? logTicks(low, high) : linearTicks(low, high),
  };
}

/**
 * Smallest and largest finite value of all arrays, on a log scale of the positive ones; [0, 1] of nothing.
 * @param {ArrayLike<number>[]} arrays @param {AxisKind} [kind] @returns {[number, number]}
 */
export function rangeOf(arrays, kind = "linear") {
  let low = Infinity,
    high = -Infinity;
  for (const values of arrays) {
    for (let n = 0; n < values.length; n++) {
      const value = values[n];
      if (!Number.isFinite(value) || (kind === "log" && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return kind === "log" ? [0.1, 1] : [0, 1];
  if (low < high) return [low, high];
  return kind === "log"
    ? [low / 2, high * 2]
    : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
}

/**
 * The `d` of a line; of more points than pixels the lowest and highest of each column, so no spike is lost.
 * @param {ArrayLike<number>} x @param {ArrayLike<number>} y
 * @param {{at: (value: number) => number}} xAxis @param {{at: (value: number) => number}} yAxis
 * @param {number} width pixels @param {boolean} [stepped] @returns {string}
 */
export function linePath(x, y, xAxis, yAxis, width, stepped = false) {
  const dense = y.length > 3 * width;
  let path = "",
    open = 0,
    low = 0,
    high = 0;
  /** @type {number|null} */
  let column = null;
  /** @param {number} px @param {number} py */
  const put = (px, py) => {
    if (open && stepped) path += `H${px.toFixed(1)}V${py.toFixed(1)}`;
    else path += `${open ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
    open += 1;
  };
  const flush = () => {
    if (column === null) return;
    put(column, low);
    if (high !== low) put(column, high);
    column = null;
  };
  const stop = () => {
    flush();
    // A point alone still shows.
    if (open === 1) path += "m-2 0h4";
    open = 0;
  };
  for (let n = 0; n < y.length; n++) {
    const px = xAxis.at(x[n]),
      py = yAxis.at(y[n]);
    if (!Number.isFinite(px) || !Number.isFinite(py)) stop();
    else if (!dense) put(px, py);
    else {
      const here = Math.round(px);
      if (here !== column) {
        flush();
        column = here;
        low = high = py;
      } else {
        low = Math.min(low, py);
        high = Math.max(high, py);
      }
    }
  }
  stop();
  return path;
}

/**
 * Index of the x nearest to `value`, x rising; -1 of none.
 * @param {ArrayLike<number>} x @param {number} value @returns {number}
 */
export function nearestIndex(x, value) {
  if (!x.length) return -1;
  let low = 0,
    high = x.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - x[low - 1] <= x[low] - value ? low - 1 : low;
}
