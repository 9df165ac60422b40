import assert from "node:assert/strict";
import test from "node:test";
import { shown } from "../../../src/regard/inspection/explorer/web/dom.js";
import { besideWords } from "../../../src/regard/inspection/explorer/web/panes.js";
import {
  displayToken,
  entropyOf,
  findMatches,
  keysHolding,
  largestIndices,
  lastAtMost,
  layoutLines,
  rankEdges,
  tokenOf,
} from "../../../src/regard/inspection/explorer/web/passages.js";

test("hostile tokens become visible and short", () => {
  assert.equal(displayToken("a\u0000b\u001b[31m").text, "a␀b␛[31m");
  // No two blanks have one sign, and nothing that turns a line, or hides in it, is left of all of Unicode.
  const blanks = [..." \n\t\u2028\u2029\ufeff\u00a0\u3000\u200d\u{e0041}\u3164"];
  assert.equal(new Set(blanks.map((one) => displayToken(one).text)).size, blanks.length);
  for (const one of blanks) assert.equal(displayToken(`a${one}`).text.trim(), shown(`a${one}`));
  for (let code = 0; code < 0x110000; code++) {
    if (!/\p{Bidi_Control}|\p{Zl}|\p{Zp}|\p{Cc}/u.test(String.fromCodePoint(code))) continue;
    const token = `${String.fromCodePoint(code)}6 evil`;
    for (const text of [displayToken(token).text, shown(token)])
      assert.ok(!text.includes(token[0]), code.toString(16));
  }
  assert.equal(shown("\u202eevil"), "⟨202E⟩evil");
  assert.deepEqual([shown(" the"), shown("שלום")], ["the", "\u2068שלום\u2069"]);
  assert.equal(shown("🙂".repeat(10000), 5), "🙂🙂🙂🙂…");
  assert.equal(displayToken("\ud800x").text, "\ufffdx");
  assert.equal(displayToken("👩‍👩‍👧").text, "👩‍👩‍👧");
  assert.equal(displayToken("</script><img onerror=1>").text, "</script><img onerror=1>");
  assert.deepEqual(displayToken(""), { text: "∅", kind: "space", note: "empty token" });
  assert.deepEqual(displayToken("\r\n"), { text: "↵", kind: "space", note: "" });
  assert.equal(displayToken("  \t").text, "␣␣⇥");
  assert.equal(displayToken(" the").kind, "lead");
  const long = displayToken("x".repeat(10007));
  assert.equal(long.text.length, 33);
  assert.match(long.note, /10007/);
  assert.equal(Array.from(displayToken("𝕏".repeat(500)).text).length, 33);
});

test("lines are no wider than asked and break after newlines", () => {
  const width = (text) => text.length;
  assert.deepEqual([...layoutLines(["ab", "cd", "\n", "e", "f"], width, 5)], [0, 3]);
  assert.deepEqual([...layoutLines(["abc", "def", "gh"], width, 5)], [0, 1]);
  assert.deepEqual([...layoutLines(["abcdefgh", "i"], width, 3)], [0, 1]);
  assert.deepEqual([...layoutLines([], width, 3)], []);
  assert.deepEqual([...layoutLines(["\n", "\n", "a"], width, 3)], [0, 1, 2]);
  const tokens = Array.from({ length: 9973 }, (_, n) => "w".repeat(1 + ((n * 7) % 11)));
  const starts = layoutLines(tokens, width, 61);
  for (let n = 0; n < starts.length; n++) {
    const line = tokens.slice(starts[n], starts[n + 1] ?? tokens.length).join("");
    assert.ok(line.length <= 61);
    if (starts[n + 1]) assert.ok(line.length + tokens[starts[n + 1]].length > 61);
  }
});

test("bisection finds the line", () => {
  assert.deepEqual(
    [-1, 0, 4, 5, 6, 99].map((value) => lastAtMost([0, 5, 9], value)),
    [-1, 0, 0, 1, 1, 2],
  );
  assert.equal(lastAtMost([], 3), -1);
});

test("find joins tokens, ignores case, and takes signs literally", () => {
  const tokens = ["The", " ca", "t", " sat.", "*", "İ", " CAT"];
  assert.deepEqual(findMatches(tokens, "cat"), [
    { first: 1, last: 2 },
    { first: 6, last: 6 },
  ]);
  assert.deepEqual(findMatches(tokens, "."), [{ first: 3, last: 3 }]);
  assert.deepEqual(findMatches(tokens, "*İ c"), [{ first: 4, last: 6 }]);
  assert.deepEqual(findMatches(tokens, ""), []);
  assert.deepEqual(findMatches([], "x"), []);
  for (const sign of "\\^$.*+?()[]{}|/-&~`!@#%=:;\"'<>,_")
    assert.equal(findMatches(["a", sign, "b"], sign).length, 1, sign);
});

test("needles come before sinks and neighbours", () => {
  const keys = Int32Array.from([0, -1, 0, 1, 0, 2, 0, 3, 0, 1]);
  const weights = Float32Array.from([1, 0, 0.9, 0.1, 0.9, 0.1, 0.9, 0.1, 0.3, 0.7]);
  const edges = rankEdges(keys, weights, 2);
  const brute = [];
  for (let row = 0; row < 5; row++) {
    for (const at of [2 * row, 2 * row + 1]) {
      const score = weights[at] * Math.log2(1 + Math.abs(row - keys[at]));
      if (keys[at] >= 0 && score > 0) brute.push([row, keys[at], score]);
    }
  }
  brute.sort((a, b) => b[2] - a[2]);
  assert.deepEqual(
    edges.filter((one) => one.key !== 0).map((one) => one.row),
    brute.filter((one) => one[1] !== 0).map((one) => one[0]),
  );
  assert.equal(edges.filter((one) => one.key === 0).length, 2);
  assert.equal(rankEdges(Int32Array.from([1]), Float32Array.from([0.5]), 1, { shift: 8 })[0].distance, 7);
  assert.deepEqual(rankEdges(new Int32Array(0), new Float32Array(0), 8), []);
  assert.deepEqual(rankEdges(Int32Array.from([0]), Float32Array.from([NaN]), 1, { shift: 3 }), []);
});

test("largest entries agree with a sort", () => {
  const values = Float32Array.from({ length: 211 }, (_, n) => ((n * 7919) % 101) / 101);
  const sorted = Array.from(values.keys())
    .sort((a, b) => values[b] - values[a] || a - b)
    .filter((n) => values[n] > 0);
  assert.deepEqual(largestIndices(values, 17), sorted.slice(0, 17));
  assert.deepEqual(largestIndices([0, NaN, 0.5], 8), [2]);
  assert.deepEqual(largestIndices([], 8), []);
});

test("coverage and entropy of rows are those known by hand", () => {
  assert.equal(keysHolding([0.05, 0.5, 0.4, 0.05], 0.9), 2);
  assert.equal(keysHolding([0.05, 0.5, 0.4, 0.05], 0.99), 4);
  assert.equal(keysHolding(new Float32Array(10).fill(0.1), 0.9), 9);
  assert.equal(keysHolding([0, 0], 0.9), 0);
  assert.equal(keysHolding([0.3, 0.1], 0.7), 1);
  assert.ok(Math.abs(entropyOf(new Float32Array(8).fill(0.125)) - Math.log(8)) < 1e-12);
  assert.ok(Math.abs(entropyOf([0.25, 0.25], 0.5) - 1.5 * Math.log(2)) < 1e-12);
  assert.equal(entropyOf([1, 0]), 0);
});

test("rows of a decoding step stand at the end of the text", () => {
  assert.equal(tokenOf(0, 3, 10, 7), 7);
  assert.equal(tokenOf(2, 3, 3, 7), 2);
  assert.equal(tokenOf(4, 10, 10, 0), 4);
});

test("arcs run between lines and beside them, never through a word", () => {
  // A word takes the upper 22 of the 24 pixels of its line; the text begins 20 pixels from its side.
  for (const side of [0, 300])
    for (const [from, to] of [
      [72, 0],
      [0, 240],
      [48, 48],
    ]) {
      const path = besideWords({ x: 150, y: from }, { x: 90, y: to }, side);
      const runs = [...path.matchAll(/([MHvC])([^MHvC]*)/g)].map(([, kind, numbers]) => [
        kind,
        ...numbers.trim().split(/[ ,]/).map(Number),
      ]);
      let [x, y] = runs[0].slice(1);
      for (const [kind, ...numbers] of runs.slice(1)) {
        if (kind === "H") {
          assert.ok(y % 24 === 0, path);
          x = numbers[0];
        } else if (kind === "v") y += numbers[0];
        else {
          const beside = [x, ...numbers.filter((_, n) => n % 2 === 0)];
          assert.ok(
            beside.every((at) => Math.abs(side - at) < 20),
            path,
          );
          [x, y] = numbers.slice(4);
        }
      }
      assert.deepEqual([x, y], [90, to + 22], path);
    }
});
