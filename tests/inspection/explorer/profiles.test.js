import assert from "node:assert/strict";
import test from "node:test";
import { wavelengths } from "../../../src/regard/inspection/explorer/web/positions.js";
import {
  blocksHolding,
  coverageOf,
  distanceBins,
  distancesOf,
  distanceText,
  servedText,
  shareServed,
} from "../../../src/regard/inspection/explorer/web/profiles.js";
import { smoothed } from "../../../src/regard/inspection/explorer/web/training.js";

test("bins of distances tile the whole numbers", () => {
  let next = -(2 ** 31) + 1;
  for (let bin = 0; bin < 63; bin++) {
    const [low, high] = distancesOf(bin);
    assert.equal(low, next);
    assert.ok(high >= low);
    next = high + 1;
  }
  assert.equal(next, 2 ** 31);
  assert.deepEqual([28, 30, 31, 32, 34].map(distanceText), ["−4…7", "−1", "0", "1", "4…7"]);
});

test("the bins of a call are those its distances fall into", () => {
  const binOf = (distance) => {
    for (let bin = 0; bin < 63; bin++)
      if (distance >= distancesOf(bin)[0] && distance <= distancesOf(bin)[1]) return bin;
    return -1;
  };
  for (const [rows, keys, shift] of [
    [1, 1, 0],
    [7, 7, 0],
    [3, 17, 14],
    [5, 2, 0],
    [129, 64, 3],
  ]) {
    const all = [];
    for (let i = 0; i < rows; i++) for (let j = 0; j < keys; j++) all.push(binOf(i + shift - j));
    assert.deepEqual(distanceBins(rows, keys, shift), [Math.min(...all, 31), Math.max(...all, 31)]);
  }
});

test("coverage is known only where the stored keys reach it", () => {
  assert.deepEqual([...coverageOf([0.95, 0.04, 0.5, 0.3, 0.6, 0.3], 2, 0.9)].map(String), ["1", "NaN", "2"]);
  assert.equal(coverageOf([], 0, 0.9).length, 0);
});

test("where too few weights are listed, whole blocks tell how many keys are needed", () => {
  // Blocks of 64 keys of 200; the last row of blocks holds nothing, the first three rows.
  const mass = [0.5, 0.3, 0.15, 0.05, 0, 0, 0, 1, 0, 0, 0, 0];
  assert.deepEqual(blocksHolding(mass, 4, 64, 200, [3, 2, 0], 0.9), [192, 192, 192, 64, 64]);
  assert.deepEqual(blocksHolding(mass, 4, 64, 200, [3, 0, 0], 0.99), [200, 200, 200]);
  const served = shareServed([192, 192, 192, 64, 64], 200);
  assert.deepEqual(served, { x: [1, 64, 192, 200], y: [0, 0.4, 1, 1] });
  assert.equal(servedText(served), "half of the queries need 192 at most, 95 % 192");
});

test("smoothing is a plain mean of the window, cut at the ends", () => {
  const values = [1, 4, NaN, 7, 10, -2, 3];
  const half = 2;
  const plain = values.map((_, n) => {
    const window = values.slice(Math.max(0, n - half), n + half + 1).filter((one) => !Number.isNaN(one));
    return window.reduce((sum, one) => sum + one, 0) / window.length;
  });
  for (const [n, value] of smoothed(values, half).entries()) assert.ok(Math.abs(value - plain[n]) < 1e-12);
  assert.deepEqual([...smoothed([3, 5], 0)], [3, 5]);
  assert.ok(Number.isNaN(smoothed([NaN], 4)[0]));
  assert.equal(smoothed([], 3).length, 0);
});

test("wavelengths follow from angles", () => {
  assert.deepEqual(wavelengths([Math.PI, 0, -2 * Math.PI]), [2, Infinity, 1]);
});

test("the share of rows that n keys serve is counted", () => {
  assert.deepEqual(shareServed([1, 3, 3, 0, NaN], 4), { x: [1, 3, 4], y: [0.25, 0.75, 0.75] });
  assert.deepEqual(shareServed([2], 2), { x: [1, 2], y: [0, 1] });
  assert.ok(Number.isNaN(shareServed([], 1).y[0]));
});
