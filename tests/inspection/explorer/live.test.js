import assert from "node:assert/strict";
import test from "node:test";
import { Latest, nextPlace } from "../../../src/regard/inspection/explorer/web/live.js";

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
  const broken = new Latest(async () => {
    throw new Error("a fault");
  }, 0);
  await assert.rejects(broken.plan(), /a fault/);
});

test("the next explorer opens where the last one stood, two texts on their difference", () => {
  assert.equal(nextPlace("", false, false), "");
  assert.equal(nextPlace("#l=1&h=2", false, false), "#l=1&h=2");
  assert.equal(nextPlace("#l=1&h=2", false, true), "#l=1&h=2&tab=compare&cmp=difference");
  assert.equal(nextPlace("#l=1&tab=attention&t=1", true, true), "#l=1&tab=attention&t=1");
  assert.equal(nextPlace("#t=1&l=1&tab=compare&cmp=side", true, false), "#l=1");
});
