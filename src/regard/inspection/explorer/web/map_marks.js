import { pixelOf, pixelsPerCell } from "./geometry.js";
import { matrixRect } from "./map_layers.js";

/**
 * The held cell and the one under the pointer, as lines that leave the cell itself free.
 * @param {CanvasRenderingContext2D} pen
 * @param {MapFrame & { hovered: Cell | null, held: Held }} options
 */
export function drawCrosshairs(pen, { layout, view, shape, theme, hovered, held }) {
  const { plot } = layout;
  const area = matrixRect(view, plot, shape);
  const { perRow, perKey } = pixelsPerCell(view, plot);
  pen.save();
  pen.beginPath();
  pen.rect(area.x, area.y, area.w, area.h);
  pen.clip();
  pen.strokeStyle = theme.cross;
  /** @param {number | null} row @param {number | null} key @param {boolean} strong */
  const cross = (row, key, strong) => {
    const { x, y } = pixelOf(view, plot, (row ?? 0) + 0.5, (key ?? 0) + 0.5);
    const [w, h] = [Math.max(10, perKey), Math.max(10, perRow)];
    pen.lineWidth = 1;
    pen.globalAlpha = strong ? 0.9 : 0.35;
    pen.beginPath();
    for (const { here, other, size, from, to, mid, across } of [
      { here: row, other: key, size: w, from: area.x, to: area.x + area.w, mid: x, across: true },
      { here: key, other: row, size: h, from: area.y, to: area.y + area.h, mid: y, across: false },
    ]) {
      if (here === null) continue;
      for (const [start, end] of other === null
        ? [[from, to]]
        : [
            [from, mid - size / 2],
            [mid + size / 2, to],
          ]) {
        if (end <= start) continue;
        pen.moveTo(across ? start : x, across ? y : start);
        pen.lineTo(across ? end : x, across ? y : end);
      }
    }
    pen.stroke();
    if (strong && row !== null && key !== null) {
      pen.lineWidth = 2;
      pen.strokeRect(x - w / 2, y - h / 2, w, h);
    }
  };
  if (hovered) cross(hovered.row, hovered.key, false);
  if (held.row !== null || held.key !== null) cross(held.row, held.key, true);
  pen.restore();
}

/**
 * Where the minimap lies: at the right, above, and only while part of the map is out of sight.
 * @param {MapLayout} what @param {View} view @param {Shape} shape
 * @returns {Rect|null}
 */
export function minimapRect({ plot, small }, view, shape) {
  if (!shape.rows || !shape.keys) return null;
  const seen = Math.min((view.q1 - view.q0) / shape.rows, (view.k1 - view.k0) / shape.keys);
  const most = Math.min(small ? 60 : 104, 0.36 * plot.w, 0.36 * plot.h);
  if (seen >= 0.98 || most < 24) return null;
  const ratio = Math.min(4, Math.max(0.25, shape.keys / shape.rows));
  const [w, h] = ratio > 1 ? [most, most / ratio] : [most * ratio, most];
  return { x: plot.x + plot.w - w - 8, y: plot.y + 8, w, h };
}

/**
 * The whole map, small, with the part in sight framed.
 * @param {CanvasRenderingContext2D} pen
 * @param {{ mini: Rect, view: View, shape: Shape, theme: MapTheme, coarse: CoarseMap | null }} options
 */
export function drawMinimap(pen, { mini, view, shape, theme, coarse }) {
  const { x, y, w, h } = mini;
  pen.fillStyle = theme.panel;
  pen.fillRect(x - 4, y - 4, w + 8, h + 8);
  pen.strokeStyle = theme.line;
  pen.lineWidth = 1;
  pen.strokeRect(x - 3.5, y - 3.5, w + 7, h + 7);
  if (coarse) {
    const { queryBlock, keyBlock } = coarse.level;
    pen.imageSmoothingEnabled = false;
    pen.drawImage(coarse.canvas, 0, 0, shape.keys / keyBlock, shape.rows / queryBlock, x, y, w, h);
  }
  /** @param {number} low @param {number} high @param {number} size @param {number} most */
  const part = (low, high, size, most) => [
    (most * Math.max(0, low)) / size,
    Math.max(3, (most * (Math.min(size, high) - Math.max(0, low))) / size),
  ];
  const [left, wide] = part(view.k0, view.k1, shape.keys, w);
  const [top, tall] = part(view.q0, view.q1, shape.rows, h);
  pen.strokeStyle = theme.cross;
  pen.lineWidth = 1.5;
  pen.strokeRect(x + Math.min(left, w - 3), y + Math.min(top, h - 3), wide, tall);
}
