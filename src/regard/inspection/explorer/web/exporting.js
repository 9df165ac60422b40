import { barLimits, histogramOf } from "./colours.js";
import { button, chooser, download, element, partOf, say, shown, tickbox } from "./dom.js";
import { drawingLayout, drawingPictures, paintDrawing, printDrawing, svgText } from "./drawings.js";
import { drawnValues, headsTogether, readExcerpt } from "./excerpts.js";
import { csvText, describeExcerpt, namedHeads, npyBytes, pythonText, safeName } from "./formats.js";
import { MaskTiles } from "./geometry.js";
import { notesOn } from "./head_notes.js";
import { channelNoun, largestOfAll } from "./heads.js";
import { formatNumber } from "./scales.js";
import { sidesOf } from "./sides.js";

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
    sides = await sidesOf(source, t, c),
    mask = new MaskTiles(await source.chunk(call.mask_picture), call.tile_rows, call.tile_keys);
  const rounded =
    source.document.exact !== "served" &&
    source.document.chunks[source.head(t, c, h).weights ?? ""]?.dtype !== "f16";
  const about = describeExcerpt(excerpt, { aggregate: state.aggregate, rounded });
  const remark = [about, notesOn(state, excerpt.heads)].filter(Boolean).join("; ");
  let largest = 0;
  for (const value of excerpt.values) if (value > largest) largest = value;
  const which = namedHeads(trace.calls, excerpt.heads, state.aggregate, excerpt.channel);
  /**
   * @param {Side} side
   * @returns {(n: number) => string}
   */
  const label = (side) => (n) => shown(side.textAt(n), 16);
  const words = sides.query.kind !== "index" && sides.key.kind !== "index";
  return {
    excerpt,
    drawn: drawnValues(excerpt, call, mask),
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
    noun: channelNoun(excerpt.channel, "weight"),
  };
}

/**
 * @param {Source} source @param {State} state @param {FigureLook} look
 * @returns {Promise<Blob>} the view as a picture with axes, title and colour bar
 */
async function exportPng(source, state, look) {
  const figure = await exportFigure(source, state),
    canvas = paintDrawing(drawingLayout(figure, look), drawingPictures(figure));
  return new Promise((give, fail) =>
    canvas.toBlob(
      (blob) => (blob ? give(blob) : fail(new Error("The browser made no picture."))),
      "image/png",
    ),
  );
}

/** The same as SVG text. @param {Figure} figure @param {FigureLayout} layout */
function exportMarkup(figure, layout) {
  return svgText(
    figure,
    layout,
    drawingPictures(figure).map((canvas) => canvas.toDataURL("image/png")),
  );
}

/**
 * @param {Source} source @param {State} state @param {FigureLook} look
 * @returns {Promise<Blob>}
 */
async function exportSvg(source, state, look) {
  const figure = await exportFigure(source, state);
  return new Blob([exportMarkup(figure, drawingLayout(figure, look))], { type: "image/svg+xml" });
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
    calls: state.calls(),
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
  /** @type {FigureLook} */
  const look = { inches: 0, dark: false, titled: true };
  /** @param {string} ending */
  const name = (ending) =>
    safeName(
      source.document.title || "attention",
      ending,
      namedHeads(state.calls(), headsTogether(source, state), state.aggregate, state.channel),
    );
  /**
   * @param {string} text @param {string} title @param {string} ending
   * @param {(source: Source, state: State, look: FigureLook) => Promise<Blob>} make
   */
  const save = (text, title, ending, make) =>
    button(text, {
      title,
      press: async () => {
        try {
          const blob = await make(source, state, look);
          download(name(ending), blob);
          told.textContent = `${name(ending)}, ${formatNumber(Math.ceil(blob.size / 1024))} KB`;
        } catch (error) {
          told.textContent = error instanceof Error ? error.message : String(error);
        }
        say(told.textContent, host);
      },
    });
  /** @param {string} text */
  const copy = async (text) => {
    code.hidden = false;
    code.value = text;
    code.select();
    try {
      await navigator.clipboard.writeText(text);
      told.textContent = "Copied.";
    } catch {
      told.textContent = "Press Ctrl+C (or Cmd+C) to copy.";
    }
  };
  const python = button("copy Python", {
    title: "Copy Python that draws this view",
    press: () => copy(exportPython(source, state)),
  });
  const caption = button("copy caption", {
    title: "Copy words that tell what is in the figure",
    press: async () => {
      const { title, remark, limits, scale, noun } = await exportFigure(source, state);
      copy(
        `${title}. ${remark}. Colours: ${noun} from ${limits.map((end) => formatNumber(end)).join(" to ")}, ${scale}.`,
      );
    },
  });
  const pdf = button("PDF", {
    title: "Vector figure on a sheet of its size, by the browser's printing",
    press: async () => {
      const figure = await exportFigure(source, state),
        layout = drawingLayout(figure, look);
      printDrawing(exportMarkup(figure, layout), layout);
    },
  });
  const widths = chooser(
    "Width",
    [
      ["0", "screen"],
      ["3.25", "3.25 in, one column"],
      ["6.75", "6.75 in, two columns"],
    ],
    "0",
    (value) => {
      look.inches = Number(value);
    },
  );
  const looks = [
    tickbox("title", true, (on) => {
      look.titled = on;
    }),
    tickbox("dark", false, (on) => {
      look.dark = on;
    }),
  ];
  code.hidden = true;
  menu.append(
    element("summary", { "aria-keyshortcuts": "e" }, "Export"),
    element(
      "div",
      { class: "export-box" },
      element(
        "div",
        { class: "export-buttons" },
        widths,
        ...looks,
        save("PNG", "Picture with axes", "png", exportPng),
        save("SVG", "Vector axes and labels", "svg", exportSvg),
        pdf,
        caption,
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
