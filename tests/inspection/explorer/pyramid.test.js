import assert from "node:assert/strict";
import test from "node:test";
import { reduceMass, reduceMax } from "../../../src/regard/inspection/explorer/web/pyramid.js";

function close(found, expected, message) {
  assert.equal(found.length, expected.length, message);
  for (const [at, value] of found.entries())
    assert.ok(Math.abs(value - expected[at]) < 1e-6, `${message} ${at}`);
}

/** Causal weights with an empty row, and what blocks of them hold, by the definition. */
function example(T, S) {
  const weights = new Float32Array(T * S);
  const living = new Int32Array(T);
  for (let i = 0; i < T; i += 1) {
    const reach = Math.min(i + 1, S);
    if (i === 2) continue;
    living[i] = 1;
    let sum = 0;
    for (let j = 0; j < reach; j += 1) sum += weights[i * S + j] = 1 + ((i * 31 + j * 17) % 11);
    for (let j = 0; j < reach; j += 1) weights[i * S + j] /= sum;
  }
  return { weights, living };
}

function blocks(weights, living, T, S, height, width) {
  const mass = [];
  const largest = [];
  for (let top = 0; top < T; top += height) {
    for (let left = 0; left < S; left += width) {
      let sum = 0;
      let most = 0;
      let rows = 0;
      for (let i = top; i < Math.min(T, top + height); i += 1) {
        rows += living[i];
        for (let j = left; j < Math.min(S, left + width); j += 1) {
          sum += weights[i * S + j];
          most = Math.max(most, weights[i * S + j]);
        }
      }
      mass.push(sum / Math.max(rows, 1));
      largest.push(most);
    }
  }
  return { mass, largest };
}

test("blocks of any weights follow from finer blocks, up to one", () => {
  for (const [T, S] of ["7 13", "13 7", "1 1", "2 5"].map((shape) => shape.split(" ").map(Number))) {
    const { weights, living } = example(T, S);
    let level = { values: weights, rows: living, I: T, J: S };
    let most = { values: weights, I: T, J: S };
    for (let size = 2; size < 32; size *= 2) {
      level = reduceMass(level.values, level.rows, level.I, level.J);
      most = reduceMax(most.values, most.I, most.J);
      const { mass, largest } = blocks(weights, living, T, S, size, size);
      close(level.values, mass, "mass");
      close(most.values, largest, "max");
      assert.deepEqual([most.I, most.J], [level.I, level.J]);
      assert.ok(level.rows.reduce((a, b) => a + b, 0) === living.reduce((a, b) => a + b, 0));
    }
    assert.deepEqual([level.I, level.J], [1, 1]);
  }
});

test("any number of blocks is joined at once, of other sizes along the axes", () => {
  const { weights, living } = example(11, 13);
  const found = reduceMass(weights, living, 11, 13, 4, 3);
  const { mass, largest } = blocks(weights, living, 11, 13, 4, 3);
  close(found.values, mass, "mass");
  close(reduceMax(weights, 11, 13, 4, 3).values, largest, "max");
  assert.deepEqual([...found.rows], [3, 4, 3]);
  for (let i = 0; i < 3; i += 1) {
    const row = found.values.slice(5 * i, 5 * i + 5);
    close([row.reduce((sum, mass) => sum + mass, 0)], [1], "a row where queries live");
  }
});

test("without counts, each block is one living row; nothing is reduced to nothing", () => {
  close(reduceMass(Float32Array.from([1, 0, 0.5, 0.5]), null, 2, 2).values, [1], "mass");
  assert.deepEqual(reduceMass(new Float32Array(), new Int32Array(), 0, 3).values.length, 0);
  assert.deepEqual(reduceMax(new Float32Array(), 3, 0).values.length, 0);
});
