import assert from "node:assert/strict";
import { test } from "node:test";
import * as own from "../../../src/regard/inspection/explorer/web/colours.js";

const { barLimits, colourOf, histogramBin, histogramOf, limitsFor, missing, oklab, toUnit, unitOf } = own;
const { diverging, divergingDark, sequential, sequentialDark } = own;

const colours = (table) =>
  Array.from({ length: 256 }, (_, code) => Array.from(table.subarray(3 * code, 3 * code + 3)));
const MAPS = { sequential, sequentialDark, diverging, divergingDark };

// Vienot, Brettel and Mollon 1999, in linear light: what is left without long, and without medium cones.
const LOST = {
  protan: [
    [0.11238, 0.88762, 0],
    [0.11238, 0.88762, 0],
    [0.00401, -0.00401, 1],
  ],
  deutan: [
    [0.29275, 0.70725, 0],
    [0.29275, 0.70725, 0],
    [-0.02234, 0.02234, 1],
  ],
};
const bright = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
const luminance = (rgb) =>
  rgb.reduce((sum, part, n) => sum + [0.2126, 0.7152, 0.0722][n] * bright(part / 255), 0);

test("OKLab goes there and back, and white, red and grey lie where its definition puts them", () => {
  for (const hex of ["#000000", "#ffffff", "#0765d3", "#fb0d59", "#1fc72b"])
    assert.deepEqual(own.rgbOfOklab(oklab(own.rgbOfHex(hex))), own.rgbOfHex(hex));
  for (const [axis, x] of oklab([255, 255, 255]).entries()) assert.ok(Math.abs(x - [1, 0, 0][axis]) < 1e-4);
  for (const [axis, x] of oklab([255, 0, 0]).entries())
    assert.ok(Math.abs(x - [0.62796, 0.22486, 0.12585][axis]) < 1e-4);
  assert.deepEqual(own.rgbOfHex("#0b3c78"), [11, 60, 120]);
});

test("every map has 256 different colours, each step as large as any other", () => {
  for (const [name, table] of Object.entries(MAPS)) {
    const all = colours(table);
    assert.equal(new Set(all.map(String)).size, 256, name);
    const steps = all
      .slice(1)
      .map((rgb, n) => Math.hypot(...oklab(rgb).map((x, axis) => x - oklab(all[n])[axis])));
    const mean = steps.reduce((sum, step) => sum + step, 0) / 255;
    // Rounding to 8 bits moves a colour by up to 0.003.
    assert.ok(
      steps.every((step) => Math.abs(step - mean) < 0.008),
      `${name} ${Math.max(...steps)} ${mean}`,
    );
  }
});

test("lightness orders weights, also in grey and for readers without red or green", () => {
  for (const sign of [-1, 1]) {
    const table = sign < 0 ? sequential : sequentialDark;
    for (const matrix of [null, ...Object.values(LOST)]) {
      const values = colours(table).map((rgb) => {
        const light = rgb.map((part) => bright(part / 255));
        const seen = matrix
          ? matrix.map((row) => row.reduce((sum, weight, n) => sum + weight * light[n], 0))
          : light;
        return 0.2126 * seen[0] + 0.7152 * seen[1] + 0.0722 * seen[2];
      });
      for (let code = 8; code < 256; code += 1)
        assert.ok(sign * (values[code] - values[code - 8]) > 0, `${sign} ${code}`);
    }
  }
  assert.ok(luminance(colours(diverging)[128]) > luminance(colours(diverging)[16]));
  assert.ok(luminance(colours(divergingDark)[128]) < luminance(colours(divergingDark)[16]));
});

test("a colour tells its unit within half a code; a missing one is none of the map's", () => {
  for (const table of Object.values(MAPS)) {
    for (let n = 0; n <= 1000; n += 1)
      assert.ok(Math.abs(unitOf(colourOf(n / 1000, table), table) - n / 1000) <= 0.5 / 255 + 1e-12);
  }
  assert.ok(Number.isNaN(unitOf(missing.light, sequential)));
  assert.ok(Number.isNaN(unitOf(missing.dark, sequentialDark)));
  assert.deepEqual(colourOf(NaN), missing.light);
  assert.deepEqual(colourOf(7), colourOf(1));
});

test("units of the scales are those known by hand, are clamped, and have inverses", () => {
  assert.equal(toUnit(0.001, "log", 1e-6, 1), 0.5);
  assert.equal(toUnit(0, "log", 1e-6, 1), 0);
  assert.equal(toUnit(1e-9, "log", 1e-6, 1), 0);
  assert.equal(toUnit(5, "log", 1e-6, 1), 1);
  assert.equal(toUnit(0.25, "linear", 0, 0.5), 0.5);
  assert.equal(toUnit(-1, "linear", -2, 2), 0.25);
  assert.ok(Math.abs(toUnit(0.03125, "power", 0, 1) - 0.25) < 1e-12);
  assert.equal(toUnit(0.75, "rank", 0, 1), 0.75);
  assert.ok(Number.isNaN(toUnit(NaN, "log", 1e-6, 1)));
  assert.equal(toUnit(0.3, "linear", 0, 0), 1);
  for (const scale of ["log", "linear", "power", "rank"]) {
    for (const value of [0.0011, 0.07, 0.93])
      assert.ok(Math.abs(own.fromUnit(toUnit(value, scale, 1e-4, 1), scale, 1e-4, 1) - value) < 1e-12);
  }
});

test("the ends of a bar: fixed for log, round numbers else", () => {
  assert.deepEqual(limitsFor("log", 0, 0), [2 ** -12, 1]);
  assert.deepEqual(limitsFor("log", 131072, 0), [2 ** -21, 1]);
  assert.deepEqual(limitsFor("linear", 7, 0.4137), [0, 0.42]);
  assert.deepEqual(limitsFor("power", 7, 1), [0, 1]);
  assert.deepEqual(limitsFor("linear", 7, 0.97001), [0, 0.98]);
  assert.deepEqual(limitsFor("linear", 7, 0), [0, 1]);
  assert.deepEqual(limitsFor("rank", 7, 0.3), [0, 1]);
});

test("a signed map has no colour at 0", () => {
  for (const map of [diverging, divergingDark]) {
    const [left, right] = [127, 128].map((code) => oklab(map.slice(3 * code, 3 * code + 3)));
    for (const [, a, b] of [left, right]) assert.ok(Math.hypot(a, b) < 0.02, `${a} ${b}`);
    assert.ok(Math.abs(left[0] - right[0]) < 0.02);
  }
});

test("ends of the colour bar are those of all heads, of one, or locked", () => {
  const values = Float32Array.from({ length: 1000 }, (_, n) => 2 ** (-10 + (6 * n) / 999));
  const known = { all: 0.75, head: 2 ** -4, counts: histogramOf(values) };
  assert.deepEqual(barLimits("all", "log", 4096, known), limitsFor("log", 4096, 1));
  assert.deepEqual(barLimits("all", "linear", 4096, known), [0, 0.75]);
  assert.deepEqual(barLimits("head", "linear", 4096, known), [0, 2 ** -4]);
  const [low, high] = barLimits("head", "log", 4096, known);
  assert.ok(low >= 2 ** -10 && low <= 2 ** -9.3 && high === 2 ** -4, String([low, high]));
  assert.deepEqual(barLimits("0.001:0.5", "log", 4096, known), [0.001, 0.5]);
  assert.ok(barLimits("0:0.5", "log", 4096, known)[0] > 0);
  assert.deepEqual(barLimits("0:0.5", "rank", 4096, known), [0, 1]);
  // Norms go up to the largest of all heads, whatever that is.
  const norms = Float32Array.from(values, (value) => 400 * value);
  const added = { all: 40, head: 25, counts: histogramOf(norms), channel: "value" };
  assert.deepEqual(barLimits("all", "log", 4096, added), [40 * 2 ** -16, 40]);
  assert.deepEqual(barLimits("all", "power", 4096, added), [0, 40]);
  const [least, most] = barLimits("head", "log", 4096, added);
  assert.ok(least >= 400 * 2 ** -10 && least <= 400 * 2 ** -9.3 && most === 25, String([least, most]));
  assert.deepEqual(barLimits("all", "log", 7, { ...added, all: 0 }), [2 ** -12, 1]);
  assert.deepEqual(barLimits("head", "log", 4096, { all: 1, head: 0 }), limitsFor("log", 4096, 0));
});

test("a histogram counts every value above 0 in the bin that it is asked for", () => {
  const counts = histogramOf([0, NaN, 1, 0.5, 0.51, 1e-12]);
  const total = counts.reduce((sum, one) => sum + one);
  assert.deepEqual([total, ...[1, 0.5, 1e-12].map((value) => counts[histogramBin(value)])], [4, 1, 2, 1]);
  assert.equal(histogramOf([1], counts)[histogramBin(1)], 2);
});
