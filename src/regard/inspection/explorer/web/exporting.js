import { barLimits, fromUnit, histogramOf, toUnit } from "./colours.js";
import { button, download, element, partOf, penOf, say, shown } from "./dom.js";
import { headsTogether, readExcerpt } from "./excerpts.js";
import { csvText, describeExcerpt, namedHeads, npyBytes, pythonText, safeName, xmlText } from "./formats.js";
import { notesOn } from "./head_notes.js";
import { largestOfAll } from "./heads.js";
import { heatCanvas } from "./heats.js";
import { formatNumber, linearTicks, logTicks } from "./scales.js";
import { sidesOf } from "./sides.js";

const EXPORT_SIDE = 640;

/**
 * Everything of a figure but its cells: sizes, texts and lines, for a canvas and for SVG alike.
 * @param {Figure} what
 * @returns {FigureLayout}
 */
function exportLayout({ excerpt, title, remark, limits, scale, labels, offsets }) {
  const { rows, columns, row0, column0, queryBlock, keyBlock } = excerpt;
  const aspect = Math.min(3, Math.max(1 / 3, (rows * queryBlock) / (columns * keyBlock)));
  const wide = Math.round(aspect > 1 ? EXPORT_SIDE / aspect : EXPORT_SIDE),
    tall = Math.round(aspect > 1 ? EXPORT_SIDE : EXPORT_SIDE * aspect);
  const named = labels && Math.max(rows, columns) <= 48;
  const x = named ? 130 : 64,
    y = 52,
    width = x + wide + 96,
    height = y + tall + (named ? 120 : 52);
  /** @param {string} text @param {number} size */
  const fit = (text, size) => shown(text, Math.floor((width - x - 8) / (0.55 * size)));
  /** @type {FigureText[]} */
  const texts = [
    { x, y: 22, text: fit(title, 15), size: 15, weight: 600 },
    { x, y: 40, text: fit(remark, 11), size: 11, soft: true },
  ];
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
      : linearTicks(from, to - 1, Math.max(2, length / 90)).filter(Number.isInteger);
    for (const tick of ticks)
      put(((tick - from + 0.5) / (count * block)) * length, tick - offset, String(tick));
  };
  axis(columns, column0, keyBlock, wide, offsets.key, (at, n, text) => {
    lines.push([x + at, y + tall, x + at, y + tall + 4]);
    texts.push(
      named
        ? { x: x + at + 4, y: y + tall + 8, text: labels.key(n), size: 10, turn: -90, anchor: "end" }
        : { x: x + at, y: y + tall + 17, text, size: 11, anchor: "middle" },
    );
  });
  axis(rows, row0, queryBlock, tall, offsets.query, (at, n, text) => {
    lines.push([x - 4, y + at, x, y + at]);
    texts.push({
      x: x - 7,
      y: y + at + 4,
      text: named ? labels.query(n) : text,
      size: named ? 10 : 11,
      anchor: "end",
    });
  });
  texts.push(
    { x: x + wide / 2, y: height - 10, text: "key", size: 12, anchor: "middle" },
    { x: 14, y: y + tall / 2, text: "query", size: 12, anchor: "middle", turn: -90 },
  );
  const bar = { x: x + wide + 18, y, width: 12, height: Math.min(tall, 240) };
  for (const tick of (scale === "log" ? logTicks : linearTicks)(...limits)) {
    const at = bar.y + (1 - toUnit(tick, scale, ...limits)) * bar.height;
    lines.push([bar.x + bar.width, at, bar.x + bar.width + 4, at]);
    texts.push({ x: bar.x + bar.width + 7, y: at + 4, text: formatNumber(tick), size: 11 });
  }
  /** @type {Four[]} */
  const frames = [
    [x, y, wide, tall],
    [bar.x, bar.y, bar.width, bar.height],
  ];
  return { width, height, plot: { x, y, width: wide, height: tall }, bar, texts, lines, frames };
}

/**
 * The cells and the colour bar as canvases of one pixel a cell.
 * @param {Figure} what
 */
function exportPictures({ excerpt, limits: [low, high], scale }) {
  const ramp = Float32Array.from({ length: 128 }, (_, n) => fromUnit(1 - n / 127, scale, low, high));
  return [
    heatCanvas(excerpt.values, excerpt.rows, excerpt.columns, { low, high, scale }),
    heatCanvas(ramp, 128, 1, { low, high, scale }),
  ];
}

/**
 * A figure as SVG text: the cells as an embedded picture, everything else as lines and letters.
 * @param {Pick<Figure, "title">} figure @param {FigureLayout} layout @param {string[]} pictures
 * @returns {string}
 */
export function svgText(figure, layout, pictures) {
  const { width, height, plot, bar, texts, lines, frames } = layout;
  /** @param {FigureBox} place @param {string} data */
  const image = (place, data) =>
    `<image x="${place.x}" y="${place.y}" width="${place.width}" height="${place.height}" ` +
    `preserveAspectRatio="none" style="image-rendering:pixelated" href="${data}"/>`;
  const letters = texts.map(
    ({ x, y, text, size, weight = 400, anchor = "start", turn = 0, soft }) =>
      `<text transform="translate(${x.toFixed(1)} ${y.toFixed(1)}) rotate(${turn})" font-size="${size}" ` +
      `font-weight="${weight}" text-anchor="${anchor}" fill="${soft ? "#555" : "#111"}">` +
      `${xmlText(text)}</text>`,
  );
  const strokes = lines.map(
    ([x0, y0, x1, y1]) => `M${x0.toFixed(1)} ${y0.toFixed(1)}L${x1.toFixed(1)} ${y1.toFixed(1)}`,
  );
  const boxes = frames.map(([x, y, w, h]) => `M${x} ${y}h${w}v${h}h${-w}z`);
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" ` +
    `viewBox="0 0 ${width} ${height}" font-family="system-ui, sans-serif">` +
    `<title>${xmlText(figure.title)}</title><rect width="100%" height="100%" fill="#fff"/>` +
    `${image(plot, pictures[0])}${image(bar, pictures[1])}` +
    `<path d="${strokes.join("")}${boxes.join("")}" fill="none" stroke="#333"/>${letters.join("")}</svg>\n`
  );
}

/** @param {FigureLayout} layout @param {HTMLCanvasElement[]} pictures */
function exportPaint(layout, pictures) {
  const ratio = 2,
    canvas = element("canvas", { width: layout.width * ratio, height: layout.height * ratio }),
    pen = penOf(canvas);
  pen.scale(ratio, ratio);
  pen.fillStyle = "#fff";
  pen.fillRect(0, 0, layout.width, layout.height);
  [layout.plot, layout.bar].forEach((place, n) => {
    pen.imageSmoothingEnabled = pictures[n].width > ratio * place.width;
    pen.drawImage(pictures[n], place.x, place.y, place.width, place.height);
  });
  pen.strokeStyle = "#333";
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
    pen.fillStyle = soft ? "#555" : "#111";
    pen.fillText(text, 0, 0);
    pen.restore();
  }
  return canvas;
}

/**
 * The figure that the state shows, ready to be drawn.
 * @param {Source} source @param {State} state @param {number} [most]
 * @returns {Promise<Figure>}
 */
async function exportFigure(source, state, most = 1024) {
  const excerpt = await readExcerpt(source, state, most),
    { t, c, h } = state;
  if (!excerpt) throw new Error("There is nothing here to export.");
  const call = source.call(t, c),
    trace = source.document.traces[t],
    sides = await sidesOf(source, t, c);
  const rounded =
    source.document.exact !== "served" &&
    source.document.chunks[source.head(t, c, h).weights ?? ""]?.dtype !== "f16";
  const about = describeExcerpt(excerpt, { aggregate: state.aggregate, rounded });
  const remark = [about, notesOn(state, excerpt.heads)].filter(Boolean).join("; ");
  let largest = 0;
  for (const value of excerpt.values) if (value > largest) largest = value;
  const which = namedHeads(excerpt.heads, state.aggregate, excerpt.channel);
  /**
   * @param {Side} side
   * @returns {(n: number) => string}
   */
  const label = (side) => (n) => shown(side.textAt(n), 16);
  const words = sides.query.kind !== "index" && sides.key.kind !== "index";
  return {
    excerpt,
    remark,
    scale: state.scale,
    limits: barLimits(state.range, state.scale, call.keys, {
      all: largestOfAll(trace, excerpt.channel, excerpt),
      channel: excerpt.channel,
      head: largest,
      counts: histogramOf(excerpt.values),
    }),
    // The heads first: what is long is cut at its end.
    title: `${which}: ${trace.title || source.document.title || "Attention"}`,
    labels: words && excerpt.exact ? { query: label(sides.query), key: label(sides.key) } : null,
    tokens: words ? { query: sides.query.textAt, key: sides.key.textAt } : null,
    offsets: { query: call.query_offset, key: call.key_offset },
  };
}

/**
 * @param {Source} source @param {State} state
 * @returns {Promise<Blob>} the view as a picture with axes, title and colour bar, on white
 */
export async function exportPng(source, state) {
  const figure = await exportFigure(source, state),
    canvas = exportPaint(exportLayout(figure), exportPictures(figure));
  return new Promise((give, fail) =>
    canvas.toBlob(
      (blob) => (blob ? give(blob) : fail(new Error("The browser made no picture."))),
      "image/png",
    ),
  );
}

/**
 * @param {Source} source @param {State} state
 * @returns {Promise<Blob>} the same as SVG
 */
export async function exportSvg(source, state) {
  const figure = await exportFigure(source, state),
    pictures = exportPictures(figure).map((canvas) => canvas.toDataURL("image/png"));
  return new Blob([svgText(figure, exportLayout(figure), pictures)], { type: "image/svg+xml" });
}

/**
 * @param {Source} source @param {State} state
 * @returns {Promise<Blob>} the visible numbers with what they are
 */
export async function exportCsv(source, state) {
  const { excerpt, title, remark, offsets, tokens } = await exportFigure(source, state, 2048);
  return new Blob([csvText(excerpt, `${title}: ${remark}`, offsets, tokens)], { type: "text/csv" });
}

/**
 * @param {Source} source @param {State} state
 * @returns {Promise<Blob>} the visible numbers for numpy.load
 */
export async function exportNpy(source, state) {
  const { excerpt } = await exportFigure(source, state, 2048);
  return new Blob([/** @type {BlobPart} */ (npyBytes(excerpt.values, [excerpt.rows, excerpt.columns]))], {
    type: "application/octet-stream",
  });
}

/**
 * @param {Source} source @param {State} state
 * @returns {Promise<Blob>} this page, to open as it is seen now, with its notes
 */
async function exportPage(source, state) {
  const page = /** @type {HTMLElement} */ (document.documentElement.cloneNode(true));
  // The script will put it there again.
  for (const node of page.querySelectorAll("head > :is(script, style)")) node.remove();
  for (const root of page.querySelectorAll(".regard")) {
    root.replaceChildren(...root.querySelectorAll(":scope > :is(script, noscript)"));
    for (const name of ["data-open", "data-theme"]) root.removeAttribute(name);
  }
  const all = [...document.querySelectorAll("#regard-document")];
  const own = all.findIndex(
    ({ textContent }) => JSON.stringify(JSON.parse(textContent ?? "")) === JSON.stringify(source.document),
  );
  page.querySelectorAll("#regard-document")[own].textContent = JSON.stringify({
    ...source.document,
    start: state.toHash(),
  }).replace(/[<>&]/g, (sign) => `\\u00${sign.charCodeAt(0).toString(16)}`);
  return new Blob(["<!DOCTYPE html>\n", page.outerHTML], { type: "text/html" });
}

/**
 * @param {Source} source @param {State} state
 * @returns {string}
 */
export function exportPython(source, state) {
  const { t, c, h, view, scale, channel } = state,
    call = source.call(t, c);
  return pythonText({
    c,
    heads: [[c, h]],
    view,
    scale,
    channel,
    name: call.name ?? "",
    rows: call.rows,
    keys: call.keys,
  });
}

/**
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountExport(host, source, state) {
  const menu = element("details", { class: "export-menu" }),
    code = element("textarea", { readonly: true, rows: 9, "aria-label": "Python", spellcheck: "false" });
  const told = element("p", { class: "export-told", role: "status" });
  /** @param {string} ending */
  const name = (ending) =>
    safeName(
      source.document.title || "attention",
      ending,
      namedHeads(headsTogether(source, state), state.aggregate, state.channel),
    );
  /**
   * @param {string} text @param {string} title @param {string} ending
   * @param {(source: Source, state: State) => Promise<Blob>} make
   */
  const save = (text, title, ending, make) =>
    button(text, {
      title,
      press: async () => {
        try {
          const blob = await make(source, state);
          download(name(ending), blob);
          told.textContent = `${name(ending)}, ${formatNumber(Math.ceil(blob.size / 1024))} KB`;
        } catch (error) {
          told.textContent = error instanceof Error ? error.message : String(error);
        }
        say(told.textContent, host);
      },
    });
  const python = button("copy Python", {
    title: "Copy Python that draws this view",
    press: async () => {
      code.hidden = false;
      code.value = exportPython(source, state);
      code.select();
      try {
        await navigator.clipboard.writeText(code.value);
        told.textContent = "Copied.";
      } catch {
        told.textContent = "Press Ctrl+C (or Cmd+C) to copy.";
      }
    },
  });
  code.hidden = true;
  menu.append(
    element("summary", { "aria-keyshortcuts": "e" }, "Export"),
    element(
      "div",
      { class: "export-box" },
      element(
        "div",
        { class: "export-buttons" },
        save("PNG", "Picture with axes", "png", exportPng),
        save("SVG", "Vector axes and labels", "svg", exportSvg),
        save("CSV", "Visible numbers as a table", "csv", exportCsv),
        save("NPY", "Visible numbers for NumPy", "npy", exportNpy),
        source.document.exact !== "served" &&
          save("HTML", "This page as it is seen now, with its notes", "html", exportPage),
        python,
      ),
      code,
      told,
    ),
  );
  host.append(menu);
  menu.addEventListener("toggle", () => (code.hidden = true));
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    partOf(menu, "summary").focus();
    event.stopPropagation();
  });
  state.addEventListener("export", () => {
    state.set({ tab: "attention" });
    menu.open = true;
    partOf(menu, "button").focus();
  });
}
