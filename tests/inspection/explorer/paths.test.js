import assert from "node:assert/strict";
import test from "node:test";
import { followPath, layoutPaths, tellEdge } from "../../../src/regard/inspection/explorer/web/paths.js";

const edge = (call, query, key, total, head = 0) => ({
  call,
  layer: call + 3,
  head,
  query,
  key,
  total,
  direct: null,
});
const edges = [
  edge(2, 9, 9, 0.3),
  edge(2, 9, 4, -0.9),
  edge(1, 4, 1, 0.2),
  edge(1, 4, 0, 0.1),
  edge(0, 1, 0, 0.5),
];

test("keys lead down and up along the largest edges, and around those of one token", () => {
  assert.equal(followPath(edges, 1, "ArrowDown"), 2);
  assert.equal(followPath(edges, 2, "ArrowDown"), 4);
  assert.equal(followPath(edges, 4, "ArrowDown"), null);
  assert.equal(followPath(edges, 4, "ArrowUp"), 2);
  assert.equal(followPath(edges, 2, "ArrowUp"), 1);
  assert.equal(followPath(edges, 2, "ArrowRight"), 3);
  assert.equal(followPath(edges, 3, "ArrowRight"), 2);
  assert.equal(followPath(edges, 0, "ArrowLeft"), 1);
  assert.equal(followPath(edges, 0, "a"), null);
});

test("columns are the tokens that take part, in order, and later layers lie above", () => {
  const { columns, layers, point, size } = layoutPaths(edges, 9);
  assert.deepEqual(columns, [0, 1, 4, 9]);
  assert.equal(layers, 3);
  assert.ok(point(0, 0).x < point(9, 0).x && point(0, 3).y < point(0, 0).y);
  assert.ok(point(9, 0).x < size.width && point(9, 0).y < size.height);
  assert.deepEqual(layoutPaths([], 3).columns, [3]);
});

test("an edge is told with its tokens, and its direct part where it is known", () => {
  const tokens = { 4: "<b>", 9: "cat" };
  assert.equal(tellEdge(edges[1], tokens), "Head 5.0: ‘cat’ (9) reads ‘<b>’ (4): −0.9");
  assert.match(tellEdge({ ...edges[1], direct: 0.25 }, tokens), /, of which \+0\.25 directly$/);
});
