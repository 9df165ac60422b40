import { pageColours } from "./colours.js";
import { clear, element, penOf, pixelRatio, pointIn } from "./dom.js";
import { insideBrush, readNumber } from "./heads.js";
import { formatNumber } from "./scales.js";

/**
 * Entropy by distance of every head: a drag over it keeps the heads inside, as do its four numbers.
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 * @param {() => Head[]} heads
 */
export function mountScatter(host, source, state, heads) {
  const canvas = element("canvas", {
    role: "img",
    "aria-label": "Heads by entropy and distance; the four fields below filter them too",
  });
  const plot = element("div", { class: "rg-scatter" }, canvas);
  const fields = /** @type {Record<keyof Brush, HTMLInputElement>} */ ({});
  const ranges = element("div", { class: "rg-ranges" });
  /** @type {[keyof Brush, string][]} */
  const words = [
    ["e0", "entropy from"],
    ["e1", "to"],
    ["d0", "distance from"],
    ["d1", "to"],
  ];
  for (const [name, word] of words) {
    fields[name] = element("input", {
      type: "number",
      step: "any",
      "aria-label": `${name[0] === "e" ? "entropy" : "distance"} ${name[1] === "0" ? "from" : "to"}`,
      on: { change: () => readFields() },
    });
    ranges.append(element("span", { text: word }), fields[name]);
  }
  const all = element("button", {
    type: "button",
    text: "all heads",
    on: { click: () => state.set({ brush: null }) },
  });
  const count = element("span", { class: "rg-word" });
  host.append(plot, ranges, element("div", { class: "rg-row" }, count, all));

  const readFields = () => {
    /** @param {keyof Brush} name @param {number} none */
    const value = (name, none) =>
      fields[name].value === "" || !Number.isFinite(Number(fields[name].value))
        ? none
        : Number(fields[name].value);
    const brush = { e0: value("e0", 0), e1: value("e1", 1e9), d0: value("d0", -1e9), d1: value("d1", 1e9) };
    state.set({ brush: Object.values(fields).every(({ value: text }) => text === "") ? null : brush });
  };
  const points = () => {
    const trace = source.document.traces[state.t];
    return heads()
      .map(([c, h]) => ({
        c,
        h,
        e: readNumber(trace, c, h, "entropy"),
        d: Math.abs(readNumber(trace, c, h, "distance")),
      }))
      .filter(({ e, d }) => Number.isFinite(e) && Number.isFinite(d));
  };
  const edge = { left: 30, right: 8, top: 8, bottom: 26 };
  /** @typedef {Record<"x" | "y" | "e" | "d", (from: number) => number>} Scales between numbers and pixels */
  /** @type {Scales|null} */
  let scale = null;
  /** @type {Record<"x0" | "y0" | "x1" | "y1", number>|null} */
  let drag = null;
  const draw = () => {
    const { clientWidth: width, clientHeight: height } = canvas;
    if (!width) return;
    const ratio = pixelRatio();
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    const pen = penOf(canvas);
    pen.scale(ratio, ratio);
    const colour = pageColours(canvas);
    const spots = points();
    const [most, far] = [
      Math.max(0.1, ...spots.map(({ e }) => e)) * 1.04,
      Math.max(1, ...spots.map(({ d }) => d)) * 1.1,
    ];
    const [w, h] = [width - edge.left - edge.right, height - edge.top - edge.bottom];
    scale = {
      /** @param {number} e */
      x: (e) => edge.left + (w * e) / most,
      /** @param {number} d */
      y: (d) => edge.top + h * (1 - Math.log1p(d) / Math.log1p(far)),
      /** @param {number} x */
      e: (x) => (most * (x - edge.left)) / w,
      /** @param {number} y */
      d: (y) => Math.expm1((1 - (y - edge.top) / h) * Math.log1p(far)),
    };
    pen.strokeStyle = colour("line");
    pen.strokeRect(edge.left + 0.5, edge.top + 0.5, w, h);
    pen.fillStyle = colour("muted");
    pen.font = "10.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    for (let d = 1, last = Infinity; d < far; d *= 4) {
      if (last - scale.y(d) < 14) continue;
      last = scale.y(d);
      pen.fillText(formatNumber(d), edge.left - 4, last);
    }
    pen.textAlign = "center";
    pen.fillText("0", edge.left, height - edge.bottom + 8);
    pen.fillText(formatNumber(most / 1.04, 2), scale.x(most / 1.04), height - edge.bottom + 8);
    pen.fillText("entropy (nats) →   ↑ distance (tokens)", edge.left + w / 2, height - 7);
    /** @type {Four|null} */
    const box = drag
      ? [
          Math.min(drag.x0, drag.x1),
          Math.min(drag.y0, drag.y1),
          Math.abs(drag.x1 - drag.x0),
          Math.abs(drag.y1 - drag.y0),
        ]
      : state.brush
        ? boxOf(state.brush, w, h, scale)
        : null;
    if (box) {
      pen.fillStyle = colour("accent-soft");
      pen.fillRect(...box);
      pen.strokeStyle = colour("accent");
      pen.strokeRect(...box);
    }
    let inside = 0;
    for (const { c, h: head, e, d } of spots) {
      const kept = insideBrush(state.brush, e, d);
      inside += Number(kept);
      const chosen = state.selection.some(([sc, sh]) => sc === c && sh === head);
      pen.globalAlpha = kept ? 0.75 : 0.2;
      pen.fillStyle = colour(chosen ? "cross" : "accent");
      pen.beginPath();
      pen.arc(scale.x(e), scale.y(d), chosen ? 5 : 2.6, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    count.textContent = state.brush ? `${inside} of ${spots.length} heads` : `${spots.length} heads`;
  };
  /**
   * @param {Brush} what @param {number} w @param {number} h @param {Scales} scale
   * @returns {Four}
   */
  const boxOf = ({ e0, e1, d0, d1 }, w, h, scale) => {
    /** @param {number} e */
    const x = (e) => Math.min(edge.left + w, Math.max(edge.left, scale.x(Math.min(e, 1e8))));
    /** @param {number} d */
    const y = (d) =>
      d >= 1e8 ? edge.top : Math.min(edge.top + h, Math.max(edge.top, scale.y(Math.max(0, d))));
    return [x(e0), y(d1), x(e1) - x(e0), y(d0) - y(d1)];
  };
  canvas.addEventListener("pointerdown", (event) => {
    const { x, y } = pointIn(canvas, event);
    drag = { x0: x, y0: y, x1: x, y1: y };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const { x, y } = pointIn(canvas, event);
    Object.assign(drag, { x1: x, y1: y });
    draw();
  });
  canvas.addEventListener("pointerup", () => {
    if (!drag || !scale) return;
    const { x0, x1, y0, y1 } = drag;
    const now = scale;
    drag = null;
    if (Math.hypot(x1 - x0, y1 - y0) > 4) {
      /** @param {number} number */
      const near = (number) => Number(number.toPrecision(3));
      state.set({
        brush: {
          e0: near(Math.max(0, scale.e(Math.min(x0, x1)))),
          e1: near(scale.e(Math.max(x0, x1))),
          d0: near(Math.max(0, scale.d(Math.max(y0, y1)))),
          d1: near(scale.d(Math.min(y0, y1))),
        },
      });
      return;
    }
    /** @param {{ e: number, d: number }} what */
    const far = ({ e, d }) => Math.hypot(now.x(e) - x0, now.y(d) - y0);
    const nearest = points().sort((one, other) => far(one) - far(other))[0];
    if (nearest && far(nearest) < 10) state.set({ c: nearest.c, h: nearest.h });
    else draw();
  });
  state.on(["brush"], () => {
    for (const [name, input] of Object.entries(fields)) {
      const value = state.brush?.[/** @type {keyof Brush} */ (name)];
      input.value = value === undefined || Math.abs(value) >= 1e8 ? "" : String(value);
    }
    draw();
  });
  state.on(["t", "selection"], draw);
  state.addEventListener("recolour", draw);
  new ResizeObserver(draw).observe(canvas);
  return { draw, clear: () => clear(host) };
}
