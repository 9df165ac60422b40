// Paths: what flows from token to token, over the layers, towards one prediction, as a graph to walk in.

import { element, shown, svg } from "./dom.js";
import { formatNumber } from "./scales.js";

/**
 * Where everything of a graph lies: the last layer on top, a column for every token that takes part.
 * @param {PathEdge[]} edges @param {number} query the position that predicts
 */
export function layoutPaths(edges, query) {
  const columns = [...new Set([query, ...edges.flatMap((edge) => [edge.query, edge.key])])].sort(
    (a, b) => a - b,
  );
  const layers = 1 + Math.max(0, ...edges.map((edge) => edge.call));
  const step = { x: Math.min(96, Math.max(30, 1000 / columns.length)), y: 64 };
  const size = { width: 84 + step.x * columns.length, height: 58 + step.y * layers + 76 };
  /** The point of a token's stream ahead of a layer. @param {number} position @param {number} layer */
  const point = (position, layer) => ({
    x: 84 + step.x * (columns.indexOf(position) + 0.5),
    y: 58 + step.y * (layers - layer),
  });
  return { columns, layers, size, point };
}

/**
 * The number of the edge that a key leads to from another one: up and down along a path, left and right among those
 * that the same token reads there; null where there is none.
 * @param {PathEdge[]} edges last layers first @param {number} from @param {string} key
 */
export function followPath(edges, from, key) {
  const current = edges[from];
  /** The largest of those that fit. @param {(edge: PathEdge) => boolean} fits */
  const largest = (fits) => {
    const sizes = edges.map((edge) => (fits(edge) ? Math.abs(edge.total) : -1));
    const best = Math.max(...sizes);
    return best < 0 ? null : sizes.indexOf(best);
  };
  if (key === "ArrowDown") return largest((edge) => edge.call < current.call && edge.query === current.key);
  if (key === "ArrowUp") return largest((edge) => edge.call > current.call && edge.key === current.query);
  const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (!step) return null;
  const beside = edges.flatMap((edge, n) =>
    edge.call === current.call && edge.query === current.query ? [n] : [],
  );
  return beside[(beside.indexOf(from) + step + beside.length) % beside.length];
}

/**
 * What an edge says in words. @param {PathEdge} edge @param {Record<number, string>} tokens
 */
export function tellEdge({ layer, head, query, key, total, direct }, tokens) {
  /** @param {number} value */
  const signed = (value) => `${value > 0 ? "+" : ""}${formatNumber(value)}`;
  const straight = direct === null ? "" : `, of which ${signed(direct)} directly`;
  return `Head ${layer}.${head}: ‘${shown(tokens[query])}’ (${query}) reads ‘${shown(tokens[key])}’ (${key}): ${signed(total)}${straight}`;
}

/**
 * Draw the graph of an answer. Tab enters it, arrows follow paths, Enter looks at the cell of an edge.
 * @param {{edges: PathEdge[], query: number, target: string, logit: number, tokens: Record<number, string>,
 *   layers: number[]}} answer layers: those of the calls
 * @param {(edge: PathEdge) => void} look
 */
export function drawPaths({ edges, query, target, logit, tokens, layers: numbers }, look) {
  const { columns, layers, size, point } = layoutPaths(edges, query);
  const most = Math.max(...edges.map((edge) => Math.abs(edge.total)), 1e-30);
  const told = element("figcaption", { "aria-live": "polite" });
  /** @type {SVGElement[]} */
  const lines = edges.map((edge, number) => {
    const [from, to] = [point(edge.key, edge.call), point(edge.query, edge.call + 1)];
    const way = `M${from.x} ${from.y}C${from.x} ${from.y - 34} ${to.x} ${to.y + 34} ${to.x} ${to.y}`;
    const width = 1 + (7 * Math.abs(edge.total)) / most;
    return svg(
      "g",
      {
        class: edge.total < 0 ? "path-edge path-less" : "path-edge",
        tabindex: number ? -1 : 0,
        role: "button",
        "aria-label": tellEdge(edge, tokens),
        on: {
          focus: () => choose(number),
          click: () => look(edge),
          keydown: (/** @type {KeyboardEvent} */ event) => press(event, number),
        },
      },
      svg("path", { d: way, "stroke-width": 14, class: "path-hit" }),
      svg("path", { d: way, "stroke-width": width.toFixed(1), "stroke-dasharray": edge.total < 0 && "6 4" }),
    );
  });
  /** @param {number} number */
  const choose = (number) => {
    for (const [n, line] of lines.entries()) line.setAttribute("tabindex", n === number ? "0" : "-1");
    told.textContent = `${tellEdge(edges[number], tokens)}.`;
  };
  /** @param {KeyboardEvent} event @param {number} number */
  const press = (event, number) => {
    const next = followPath(edges, number, event.key);
    if (event.key === "Enter" || event.key === " ") look(edges[number]);
    else if (next !== null) lines[next].focus();
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  };
  const streams = columns.map((position) => {
    const ends = edges.flatMap((edge) => [
      ...(edge.key === position ? [edge.call] : []),
      ...(edge.query === position ? [edge.call + 1] : []),
    ]);
    const [low, high] = [
      point(position, 0),
      point(position, position === query ? layers : Math.max(...ends)),
    ];
    const label = { x: low.x + 4, y: low.y + 14, transform: `rotate(38 ${low.x + 4} ${low.y + 14})` };
    return svg(
      "g",
      {},
      svg("line", { x1: low.x, y1: low.y, x2: high.x, y2: high.y, class: "path-stream" }),
      svg("text", label, shown(tokens[position], 12)),
    );
  });
  const names = Array.from({ length: layers }, (_, layer) =>
    svg("text", { x: 8, y: point(query, layer).y - 28 }, `layer ${numbers[layer] ?? layer}`),
  );
  const top = point(query, layers);
  const goal = `→ ‘${shown(target)}’ ${formatNumber(logit)}`;
  told.textContent = edges.length
    ? "Thick lines add most to the prediction, dashed ones take from it: all ways onward to first order, direct parts exactly. Arrow keys follow a path, Enter looks at the cell."
    : "No head's reading adds to this prediction.";
  return element(
    "figure",
    { class: "live-paths" },
    element(
      "div",
      {},
      svg(
        "svg",
        {
          ...size,
          viewBox: `0 0 ${size.width} ${size.height}`,
          role: "group",
          "aria-label": `Paths to ${goal}`,
        },
        ...streams,
        ...names,
        ...[...lines].reverse(),
        svg("circle", { cx: top.x, cy: top.y, r: 4 }),
        svg("text", { x: Math.min(top.x - 8, size.width - 150), y: top.y - 14, class: "path-goal" }, goal),
      ),
    ),
    told,
  );
}
