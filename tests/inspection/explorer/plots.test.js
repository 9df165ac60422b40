import assert from "node:assert/strict";
import test from "node:test";
import { diverging, missing, sequential } from "../../../src/regard/inspection/explorer/web/colours.js";
import { numberOf, tellSums } from "../../../src/regard/inspection/explorer/web/heads.js";
import { heatPixels } from "../../../src/regard/inspection/explorer/web/heats.js";
import { seriesTable } from "../../../src/regard/inspection/explorer/web/plots.js";
import {
  formatNumber,
  linearTicks,
  linePath,
  logTicks,
  makeAxis,
  nearestIndex,
  rangeOf,
} from "../../../src/regard/inspection/explorer/web/scales.js";

test("numbers are short and keep whole positions whole", () => {
  const cases = [
    [0, "0"],
    [131072, "131072"],
    [0.12345, "0.123"],
    [1234.5, "1235"],
    [0.0001234, "1.23e−4"],
    [-2.5, "−2.5"],
    [NaN, "–"],
    [undefined, "–"],
    [null, "–"],
    [Infinity, "∞"],
    [-Infinity, "−∞"],
    [2e9, "2e9"],
    [1e-300, "1e−300"],
  ];
  for (const [value, text] of cases) assert.equal(formatNumber(value), text);
});

test("a head without a number is told, whatever others sum to", () => {
  assert.deepEqual(tellSums([2e-7, 0]), { good: true, text: "weights sum to 1 within 2e−7" });
  assert.deepEqual(tellSums([2e-7, null]), {
    good: false,
    text: "1 of 2 heads have rows without a number, elsewhere weights sum to 1 within 2e−7",
  });
  assert.equal(tellSums([null]).text, "1 of 1 heads have rows without a number");
  assert.equal(tellSums([0.1]).good, false);
  assert.equal(numberOf("toString").title, "toString");
});

test("linear ticks are round, inside, and few", () => {
  assert.deepEqual(linearTicks(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(linearTicks(-3, 7, 5), [-2, 0, 2, 4, 6]);
  assert.deepEqual(linearTicks(4, 4), [4]);
  for (const ends of ["0.013 0.0171", "-1e-9 1e-9", "17 131071"]) {
    const [low, high] = ends.split(" ").map(Number);
    const ticks = linearTicks(low, high);
    assert.ok(ticks.length >= 2 && ticks.length <= 11, `${ticks}`);
    assert.ok(ticks.every((tick) => tick >= low * (1 - 1e-9) - 1e-15 && tick <= high * (1 + 1e-9)));
  }
});

test("log ticks are powers of ten, or round values in a narrow range", () => {
  assert.deepEqual(logTicks(0.5, 2000), [1, 10, 100, 1000]);
  assert.ok(logTicks(1e-12, 1).length <= 7);
  assert.ok(logTicks(2, 7).every((tick) => tick >= 2 && tick <= 7));
});

test("an axis goes there and back", () => {
  for (const kind of ["linear", "log"]) {
    const axis = makeAxis(kind, 0.25, 64, 10, 110);
    assert.equal(axis.at(0.25), 10);
    assert.equal(axis.at(64), 110);
    for (const value of [0.3, 1, 17]) assert.ok(Math.abs(axis.invert(axis.at(value)) - value) < 1e-9);
  }
  assert.equal(makeAxis("log", 1, 100, 0, 100).at(10), 50);
  assert.ok(Number.isNaN(makeAxis("log", 1, 100, 0, 100).at(0)));
  assert.ok(Number.isFinite(makeAxis("linear", 3, 3, 0, 10).at(3)));
});

test("ranges skip what cannot be drawn", () => {
  assert.deepEqual(rangeOf([[3, NaN, -1], [Infinity]]), [-1, 3]);
  assert.deepEqual(rangeOf([[0, -4, 2, 8]], "log"), [2, 8]);
  assert.deepEqual(rangeOf([[]]), [0, 1]);
  assert.deepEqual(rangeOf([[0]]), [-0.5, 0.5]);
  assert.deepEqual(rangeOf([[0]], "log"), [0.1, 1]);
});

const identity = { at: (value) => value };

test("a line breaks at NaN and a lonely point still shows", () => {
  assert.equal(
    linePath([0, 1, 2, 3], [5, 6, NaN, 7], identity, identity, 100),
    "M0.0 5.0L1.0 6.0M3.0 7.0m-2 0h4",
  );
  assert.equal(linePath([], [], identity, identity, 100), "");
  assert.equal(linePath([1, 2], [4, 5], identity, identity, 100, true), "M1.0 4.0H2.0V5.0");
});

test("decimation keeps every spike and bounds the path", () => {
  const n = 100003,
    y = new Float32Array(n);
  y[54321] = 77;
  const x = Float32Array.from(y, (_, at) => at / 1000);
  const path = linePath(x, y, identity, identity, 100);
  assert.ok(path.includes(" 77.0"));
  assert.ok(path.length < 5000, `${path.length}`);
});

test("nearest index by bisection agrees with a scan", () => {
  const x = [-3, 0, 1, 4, 9];
  for (const value of [-9, -1.6, -1.4, 0.4, 2.4, 2.6, 6.4, 6.6, 99]) {
    const far = x.map((one) => Math.abs(one - value));
    assert.equal(nearestIndex(x, value), far.indexOf(Math.min(...far)));
  }
  assert.equal(nearestIndex([], 1), -1);
});

test("the table says what the lines say", () => {
  const [one, other] = [
    { name: "a", x: [1, 2], y: [3, 4] },
    { name: "b", x: [2], y: [5] },
  ];
  const { head, rows } = seriesTable({ xLabel: "step", series: [one, other] });
  assert.equal([head, ...rows].map((row) => row.join()).join(";"), "step,a,b;1,3,NaN;2,4,5");
});

test("pixels follow the maps, and NaN has a colour of its own", () => {
  const pixels = heatPixels([0, 1, NaN, 0.5], 2, 2, { low: 0, high: 1 });
  assert.deepEqual([...pixels.slice(0, 4)], [...sequential.slice(0, 3), 255]);
  assert.deepEqual([...pixels.slice(4, 7)], [...sequential.slice(765)]);
  assert.deepEqual([...pixels.slice(8, 11)], missing.light);
  const signed = heatPixels([-2, 2], 1, 2, { kind: "diverging", low: -2, high: 2 });
  assert.deepEqual(
    [...signed.slice(0, 3), ...signed.slice(4, 7)],
    [...diverging.slice(0, 3), ...diverging.slice(765)],
  );
});
