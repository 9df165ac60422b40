import { isDark, pageColours } from "./colours.js";
import { penOf } from "./dom.js";

/** @param {HTMLElement} host @returns {MapTheme} the colours of the map, as the page's style says */
export function readTheme(host) {
  const names = [
    "panel",
    "ink",
    "muted",
    "line",
    "well",
    "hatch",
    "grid",
    "border",
    "cross",
    "entropy",
    "keymass",
  ];
  const colour = pageColours(host);
  /** @type {any} */
  const read = Object.fromEntries(names.map((name) => [name, colour(name)]));
  return { ...read, dark: isDark(host) };
}

/**
 * Lines that say "nothing may be attended to".
 * @param {CanvasRenderingContext2D} context @param {MapTheme} theme @param {number} ratio
 * @returns {CanvasPattern|string} a colour where the browser makes no pattern
 */
export function hatchPattern(context, theme, ratio) {
  const size = Math.round(6 * ratio);
  const tile = Object.assign(document.createElement("canvas"), { width: size, height: size });
  const pen = penOf(tile);
  pen.fillStyle = theme.panel;
  pen.fillRect(0, 0, size, size);
  pen.strokeStyle = theme.hatch;
  pen.lineWidth = ratio;
  pen.beginPath();
  for (const shift of [-size, 0, size]) {
    pen.moveTo(shift - 1, size + 1);
    pen.lineTo(shift + size + 1, -1);
  }
  pen.stroke();
  const pattern = context.createPattern(tile, "repeat");
  pattern?.setTransform(new DOMMatrix([1 / ratio, 0, 0, 1 / ratio, 0, 0]));
  return pattern ?? theme.panel;
}
