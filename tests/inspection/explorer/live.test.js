import assert from "node:assert/strict";
import test from "node:test";
import { Latest, nextPlace } from "../../../src/regard/inspection/explorer/web/live.js";
import * as cutting from "../../../src/regard/inspection/explorer/web/live_cutting.js";
import { tellScore } from "../../../src/regard/inspection/explorer/web/questions.js";

const { CutTarget, cutWords, namesAt, tellPredictions, tokenCosts } = cutting;
const toggleCut = (cut, place, what) => cutting.toggleCut(cut, namesAt(place, what));

const rest = (time) => new Promise((done) => setTimeout(done, time));

test("of keys in a row the last one alone is answered", async () => {
  const begun = [];
  const latest = new Latest(async (signal) => {
    begun.push(signal);
  }, 20);
  for (let n = 0; n < 5; n += 1) latest.plan();
  assert.equal(begun.length, 0);
  await rest(60);
  assert.equal(begun.length, 1);
  assert.equal(begun[0].aborted, false);
});

test("what runs is given up for what comes, and its end is no error", async () => {
  const ended = [];
  const latest = new Latest(async (signal) => {
    await rest(30);
    signal.throwIfAborted();
    ended.push(signal);
  }, 0);
  const first = latest.plan();
  await rest(10);
  await Promise.all([first, latest.plan()]);
  assert.equal(ended.length, 1);
  assert.equal(ended[0].aborted, false);
  const stopped = latest.plan();
  await rest(10);
  latest.stop();
  await stopped;
  assert.equal(ended.length, 1, "nothing comes of what was stopped");
  const broken = new Latest(async () => {
    throw new Error("a fault");
  }, 0);
  await assert.rejects(broken.plan(), /a fault/);
});

test("the next explorer opens where the last one stood, two texts on their difference", () => {
  assert.equal(nextPlace("", false, false), "");
  assert.equal(nextPlace("#l=1&h=2", false, false), "#l=1&h=2");
  assert.equal(nextPlace("#l=1&h=2", false, true), "#l=1&h=2&tab=compare&cmp=difference");
  assert.equal(nextPlace("#l=1&tab=attention&t=1", true, true, true), "#l=1&tab=attention&t=1");
  assert.equal(nextPlace("#l=1&tab=compare&row=3", true, true, true), "#tab=compare&row=3");
  assert.equal(nextPlace("#t=1&l=1&tab=compare&cmp=side", true, false), "#l=1");
  assert.equal(nextPlace("#l=1&h=2&row=3", false, true, true), "#row=3&tab=compare&cmp=difference");
});

test("the head that is looked at is cut, and restored", () => {
  assert.equal(toggleCut("", ""), "0.0");
  assert.equal(toggleCut("2.5, 3.1", "#l=3&h=1"), "2.5");
  assert.equal(toggleCut("2.5", "#l=3&h=1&sel=3.1,2.5"), "2.5 3.1");
  assert.equal(toggleCut("2.5 3.1", "#l=3&h=1&sel=3.1,2.5"), "");
  assert.equal(toggleCut("2.5", "#l=3&h=1&sel=3.1&row=7&key=2", "cell"), "2.5 3.1:7-2");
  assert.equal(toggleCut("3.1:7-2 3.1:7-1", "#l=3&h=1&row=7&key=2", "cell"), "3.1:7-1");
  assert.equal(toggleCut("2.5", "#l=3&h=1&sel=2.5,3.1&row=7&key=2", "query"), "2.5 3.1:7");
  assert.equal(toggleCut("3.1 3.1:7", "#l=3&h=1&row=7", "query"), "3.1");
});

test("a button restores what it cut last until somebody looks elsewhere than the page does", () => {
  const target = new CutTarget(["0.3"]);
  assert.deepEqual(target.names("0.3", "#l=1&h=1", "heads"), ["0.3"]);
  assert.equal(target.press("0.3 2.1", "#l=1&h=1", "heads"), "2.1");
  assert.equal(target.press("2.1", "#l=0&h=2&row=1", "heads"), "2.1 0.2");
  target.touched ??= namesAt("#l=1&h=1").join(); // where the page went, and somebody clicks
  assert.deepEqual(target.names("2.1 0.2", "#l=1&h=1&row=5", "heads"), ["0.2"]);
  assert.deepEqual(target.names("2.1 0.2", "#l=1&h=0", "heads"), ["1.0"]);
  assert.deepEqual(target.names("2.1", "#l=1&h=1", "heads"), ["1.1"]);
  assert.deepEqual(
    ["zero", "half", "patch"].map((by) => cutWords(by)[4]),
    ["Cut this cell", "Scale this cell", "Patch this query"],
  );
});

test("each token has its costs, and the tint of how much more it costs", () => {
  const [before, after] = [
    [1, 2, null],
    [3, 1, 0],
  ].map((list) => ({ costs: list.map((cost, n) => ["abc"[n], cost]) }));
  assert.deepEqual(
    tokenCosts([before, after]).map(({ text, costs, tint }) => [text, ...costs, tint]),
    [
      ["a", 1, 3, 1],
      ["b", 2, 1, -0.5],
      ["c", null, 0, 0],
    ],
  );
  assert.deepEqual(tokenCosts([before]), []);
  assert.deepEqual(tokenCosts([before, { costs: [] }]), []);
});

test("what is predicted is told before and after", () => {
  const before = {
    loss: 2,
    next: [
      ["mat", 0.5],
      ["\u202edog", 0.25],
    ],
  };
  assert.equal(tellPredictions([before]), "next: ‘mat’ 0.5, ‘⟨202E⟩dog’ 0.25");
  const after = {
    loss: 3,
    next: [
      ["dog", 0.5],
      ["mat", 0.25],
    ],
  };
  assert.equal(tellPredictions([before, after]), "loss 2 → 3, next ‘mat’ 0.5 → ‘dog’ 0.5, ‘mat’ 0.25");
  assert.equal(
    tellPredictions([before, { ...before, loss: null }]),
    "loss 2 → –, next ‘mat’ 0.5 → ‘mat’ 0.5",
  );
  const source = {
    loss: 1,
    next: [
      ["log", 0.75],
      ["dog", 0.125],
    ],
  };
  assert.equal(
    tellPredictions([before, { ...after, next: [...after.next, ["cat", 0.1], ["log", 0.05]] }, source]),
    "loss 2 → 3, next ‘mat’ 0.5 → ‘dog’ 0.5, ‘mat’ 0.25, ‘log’ 0.05; of the source ‘log’ 0.75",
  );
});

test("a score is told as what it is, and where no weight comes of it", () => {
  const [cell, answer] = [
    { layer: "2", head: "5", query: "1", key: "3" },
    { score: 1.5, permitted: false },
  ];
  const told = "Head 2.5, query 1, key 3: scaled product 1.5, before score functions, biases and the mask.";
  assert.ok(tellScore(cell, answer).startsWith(`${told} This query may not attend to this key`));
  assert.equal(tellScore(cell, { ...answer, permitted: true }), `${told} Of it:`);
});
