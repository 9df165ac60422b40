// Figures: the cells of a view with axes, title and colour bar, on a canvas, as SVG, or as large as a paper wants it.

import { fromUnit, toUnit } from "./colours.js";
import { element, penOf, shown } from "./dom.js";
import { xmlText } from "./formats.js";
import { heatCanvas } from "./heats.js";
import { formatNumber, linearTicks, logTicks } from "./scales.js";

/** Sizes on the screen, in pixels, and on paper, in points of 1/72 inch: of letters, and beside the cells. */
const DRAWING_SIZES = {
  screen: { title: 15, small: 11, token: 10, axis: 12, left: 64, bar: [18, 12, 112], below: 52 },
  paper: { title: 9, small: 7, token: 6.5, axis: 8, left: 38, bar: [8, 7, 58], below: 30 },
};
const DRAWING_SIDE = 640,
  DRAWING_INKS = { light: ["#fff", "#111", "#555", "#333"], dark: ["#101116", "#eee", "#aaa", "#999"] };

/**
 * Everything of a figure but its cells: sizes, texts and lines, for a canvas and for SVG alike.
 * @param {Figure} what @param {FigureLook} look
 * @returns {FigureLayout}
 */
export function drawingLayout(
  { excerpt, title, remark, limits, scale, labels, offsets, noun },
  { inches, dark, titled } = { inches: 0, dark: false, titled: true },
) {
  const { rows, columns, row0, column0, queryBlock, keyBlock } = excerpt;
  const sizes = DRAWING_SIZES[inches ? "paper" : "screen"];
  const [gap, thick, right] = sizes.bar;
  const most = Math.max(rows, columns);
  const named =
    labels && (inches ? 72 * inches - 2 * sizes.left - right > 1.05 * sizes.token * most : most <= 48);
  /** Room for names ahead of an axis. @param {number} count @param {(n: number) => string} name */
  const room = (count, name) =>
    1.8 * sizes.axis +
    8 +
    0.62 * sizes.token * Math.max(...Array.from({ length: count }, (_, n) => name(n).length));
  const x = named ? room(rows, labels.query) : sizes.left,
    y = titled ? 3.5 * sizes.title : sizes.title;
  const side = inches ? 72 * inches - x - right : DRAWING_SIDE,
    aspect = Math.min(inches ? 1.5 : 3, Math.max(1 / 3, (rows * queryBlock) / (columns * keyBlock)));
  const shrunk = aspect > 1 && !inches;
  const wide = shrunk ? Math.round(side / aspect) : side,
    tall = Math.round(shrunk ? side : side * aspect);
  const width = x + wide + right,
    height = y + tall + (named ? 4 + room(columns, labels.key) : sizes.below);
  /** @param {string} text @param {number} size */
  const fit = (text, size) => shown(text, Math.floor((width - x - 8) / (0.55 * size)));
  /** @type {FigureText[]} */
  const texts = titled
    ? [
        { x, y: 1.5 * sizes.title, text: fit(title, sizes.title), size: sizes.title, weight: 600 },
        { x, y: 2.7 * sizes.title, text: fit(remark, sizes.small), size: sizes.small, soft: true },
      ]
    : [];
  /** @type {Four[]} */
  const lines = [];
  /**
   * @param {number} count @param {number} first @param {number} block @param {number} length
   * @param {number} offset @param {(at: number, n: number, text: string) => void} put
   */
  const axis = (count, first, block, length, offset, put) => {
    const from = first * block + offset,
      to = from + count * block;
    const ticks = named
      ? Array.from({ length: count }, (_, n) => from + n)
      : linearTicks(from, to - 1, Math.max(2, length / (5 * sizes.small))).filter(Number.isInteger);
    for (const tick of ticks)
      put(((tick - from + 0.5) / (count * block)) * length, tick - offset, String(tick));
  };
  axis(columns, column0, keyBlock, wide, offsets.key, (at, n, text) => {
    lines.push([x + at, y + tall, x + at, y + tall + 4]);
    const below = y + tall + 5;
    texts.push(
      named
        ? {
            x: x + at + 0.36 * sizes.token,
            y: below + 2,
            text: labels.key(n),
            size: sizes.token,
            turn: -90,
            anchor: "end",
          }
        : { x: x + at, y: below + sizes.small, text, size: sizes.small, anchor: "middle" },
    );
  });
  axis(rows, row0, queryBlock, tall, offsets.query, (at, n, text) => {
    lines.push([x - 4, y + at, x, y + at]);
    texts.push({
      x: x - 7,
      y: y + at + 0.36 * sizes.small,
      text: named ? labels.query(n) : text,
      size: named ? sizes.token : sizes.small,
      anchor: "end",
    });
  });
  texts.push(
    { x: x + wide / 2, y: height - 0.6 * sizes.axis, text: "key", size: sizes.axis, anchor: "middle" },
    { x: 1.2 * sizes.axis, y: y + tall / 2, text: "query", size: sizes.axis, anchor: "middle", turn: -90 },
  );
  const bar = { x: x + wide + gap, y, width: thick, height: Math.min(tall, inches ? tall : 240) };
  const measure = scale === "linear" ? noun : `${noun}, ${scale}`,
    middle = bar.y + bar.height / 2;
  texts.push({
    x: width - 0.5 * sizes.axis,
    y: middle,
    text: measure,
    size: sizes.axis,
    anchor: "middle",
    turn: -90,
  });
  for (const tick of (scale === "log" ? logTicks : linearTicks)(...limits)) {
    const at = bar.y + (1 - toUnit(tick, scale, ...limits)) * bar.height;
    lines.push([bar.x + bar.width, at, bar.x + bar.width + 4, at]);
    texts.push({
      x: bar.x + bar.width + 7,
      y: at + 0.36 * sizes.small,
      text: formatNumber(tick),
      size: sizes.small,
    });
  }
  /** @type {Four[]} */
  const frames = [
    [x, y, wide, tall],
    [bar.x, bar.y, bar.width, bar.height],
  ];
  const inks = DRAWING_INKS[dark ? "dark" : "light"];
  return {
    width,
    height,
    inches,
    inks,
    plot: { x, y, width: wide, height: tall },
    bar,
    texts,
    lines,
    frames,
  };
}

/**
 * The cells and the colour bar as canvases of one pixel a cell.
 * @param {Figure} what
 */
export function drawingPictures({ excerpt, drawn, limits: [low, high], scale }) {
  const ramp = Float32Array.from({ length: 128 }, (_, n) => fromUnit(1 - n / 127, scale, low, high));
  return [
    heatCanvas(drawn, excerpt.rows, excerpt.columns, { low, high, scale }),
    heatCanvas(ramp, 128, 1, { low, high, scale }),
  ];
}

/**
 * A figure as SVG text: the cells as an embedded picture, everything else as lines and letters.
 * @param {Pick<Figure, "title">} figure @param {FigureLayout} layout @param {string[]} pictures
 * @returns {string}
 */
export function svgText(figure, layout, pictures) {
  const { width, height, inches, plot, bar, texts, lines, frames } = layout;
  const [ground, ink, soft, line] = layout.inks;
  /** @param {FigureBox} place @param {string} data */
  const image = (place, data) =>
    `<image x="${place.x}" y="${place.y}" width="${place.width}" height="${place.height}" ` +
    `preserveAspectRatio="none" style="image-rendering:pixelated" href="${data}"/>`;
  const letters = texts.map(
    ({ x, y, text, size, weight = 400, anchor = "start", turn = 0, soft: gentle }) =>
      `<text transform="translate(${x.toFixed(1)} ${y.toFixed(1)}) rotate(${turn})" font-size="${size}" ` +
      `font-weight="${weight}" text-anchor="${anchor}" fill="${gentle ? soft : ink}">` +
      `${xmlText(text)}</text>`,
  );
  const strokes = lines.map(
    ([x0, y0, x1, y1]) => `M${x0.toFixed(1)} ${y0.toFixed(1)}L${x1.toFixed(1)} ${y1.toFixed(1)}`,
  );
  /** @param {number} length */
  const unit = (length) => (inches ? `${(length / 72).toFixed(3)}in` : length);
  const boxes = frames.map(([x, y, w, h]) => `M${x} ${y}h${w}v${h}h${-w}z`);
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" width="${unit(width)}" height="${unit(height)}" ` +
    `viewBox="0 0 ${width} ${height}" font-family="${inches ? "Helvetica, Arial" : "system-ui"}, sans-serif">` +
    `<title>${xmlText(figure.title)}</title><rect width="100%" height="100%" fill="${ground}"/>` +
    `${image(plot, pictures[0])}${image(bar, pictures[1])}` +
    `<path d="${strokes.join("")}${boxes.join("")}" fill="none" stroke="${line}"${inches ? ' stroke-width=".6"' : ""}/>${letters.join("")}</svg>\n`
  );
}

/** @param {FigureLayout} layout @param {HTMLCanvasElement[]} pictures */
export function paintDrawing(layout, pictures) {
  const [ground, ink, softer, line] = layout.inks;
  // On paper, 600 dots to the inch.
  const ratio = layout.inches ? 600 / 72 : 2,
    canvas = element("canvas", {
      width: Math.round(layout.width * ratio),
      height: Math.round(layout.height * ratio),
    }),
    pen = penOf(canvas);
  pen.scale(ratio, ratio);
  pen.fillStyle = ground;
  pen.fillRect(0, 0, layout.width, layout.height);
  [layout.plot, layout.bar].forEach((place, n) => {
    pen.imageSmoothingEnabled = pictures[n].width > ratio * place.width;
    pen.drawImage(pictures[n], place.x, place.y, place.width, place.height);
  });
  pen.strokeStyle = line;
  pen.lineWidth = layout.inches ? 0.6 : 1;
  pen.beginPath();
  for (const [x0, y0, x1, y1] of layout.lines) {
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
  }
  for (const frame of layout.frames) pen.rect(...frame);
  pen.stroke();
  for (const { x, y, text, size, weight = 400, anchor = "start", turn = 0, soft } of layout.texts) {
    pen.save();
    pen.translate(x, y);
    pen.rotate((turn * Math.PI) / 180);
    pen.font = `${weight} ${size}px system-ui, sans-serif`;
    pen.textAlign = anchor === "middle" ? "center" : anchor;
    pen.fillStyle = soft ? softer : ink;
    pen.fillText(text, 0, 0);
    pen.restore();
  }
  return canvas;
}

/**
 * Print a figure alone, on a sheet of its own size: a browser saves that as PDF, with letters and axes as they are.
 * @param {string} markup SVG @param {FigureLayout} layout
 */
export function printDrawing(markup, { width, height, inches }) {
  const unit = inches ? 72 : 96;
  const size = `${(width / unit).toFixed(3)}in ${(height / unit).toFixed(3)}in`;
  const sheet = element("div", { class: "rg-sheet" });
  sheet.append(new DOMParser().parseFromString(markup, "image/svg+xml").documentElement);
  const style = element("style", {
    text: `@page{size:${size};margin:0}@media print{body>:not(.rg-sheet){display:none!important}}`,
  });
  document.body.append(sheet, style);
  addEventListener("afterprint", () => [sheet, style].map((node) => node.remove()), { once: true });
  print();
}
