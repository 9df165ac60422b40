import { element, oncePerFrame, penOf, pixelRatio, pointIn, say, svg } from "./dom.js";
import { displayToken, lastAtMost, layoutLines } from "./passages.js";

const PANE_LINE = 24,
  /** Pixels beside the text, for arcs. */
  PANE_GUTTER = 20,
  PANE_MOST = 400;
let paneSerial = 0;
/** @type {Marks} */
const NO_MARKS = {
  chosen: null,
  weights: null,
  largest: 0,
  targets: new Map(),
  matches: new Set(),
  arcs: false,
};

/**
 * Share of the tint of a weight: the root, so that weak weights show; the row's largest is full.
 * @param {number | undefined} weight @param {number} largest
 */
const paneTint = (weight, largest) => (weight && weight > 0 && largest > 0 ? Math.sqrt(weight / largest) : 0);

/**
 * The way from one word to another in the gaps between lines and beside them, never through a word.
 * @param {Point} from @param {Point} to middle of a word, top of its line @param {number} side 0, or the width
 *   of a text that begins at the right
 * @returns {string} of an SVG path
 */
export function besideWords(from, to, side) {
  const [start, end] = [from.y + PANE_LINE, to.y + PANE_LINE];
  if (start === end) return `M${from.x} ${start - 2}v2H${to.x}v-2`;
  const edge = Math.abs(side - PANE_GUTTER + 4),
    far = Math.min(PANE_GUTTER - 4, 5 + Math.abs(start - end) / PANE_LINE),
    lane = side ? edge + 1.3 * far : edge - 1.3 * far;
  return `M${from.x} ${start}H${edge}C${lane} ${start} ${lane} ${end} ${edge} ${end}H${to.x}v-2`;
}

/**
 * A text of any length of which only the lines in sight are elements.
 * @param {HTMLElement} host
 * @param {{tokens: string[], label: string, gap?: number, onChoose: (token: number) => void}} options
 * @returns {Pane}
 */
export function textPane(host, { tokens, label, gap = 2, onChoose }) {
  const lines = element("div", { class: "reader-lines" });
  const arcs = svg("svg", { class: "reader-arcs", "aria-hidden": "true" });
  const sizer = element("div", { class: "reader-sizer" }, lines, arcs);
  const scroll = element(
    "div",
    { class: "reader-text", tabindex: 0, role: "listbox", "aria-label": label },
    sizer,
  );
  const sample = tokens.slice(0, 2000).join("");
  const rightToLeft =
    (sample.match(/[\u0590-\u08ff\ufb1d-\ufefc]/g) ?? []).length > (sample.match(/[a-z]/gi) ?? []).length;
  if (rightToLeft) scroll.dir = "rtl";
  paneSerial += 1;
  const stem = `regard-token-${paneSerial}`;
  const pen = penOf(element("canvas")),
    widths = new Map();
  lines.style.setProperty("--gap", `${gap}px`);
  lines.style.paddingInline = `${PANE_GUTTER}px 6px`;
  let starts = layoutLines([], () => 0, 0),
    marks = NO_MARKS,
    width = 0,
    tall = 0;
  /** Where to go once there are lines. @type {number|null} */
  let wanted = null;
  host.append(scroll);

  /** @param {string} shown */
  const sizeOf = (shown) => {
    let size = widths.get(shown);
    if (size === undefined) {
      size = pen.measureText(shown).width;
      widths.set(shown, size);
    }
    return size;
  };
  /** @param {string} shown */
  const widthOf = (shown) => {
    if (!/^\d+$/.test(shown)) return sizeOf(shown) + gap;
    // Where positions stand for tokens no two are alike, but their digits are.
    let size = gap;
    for (let at = 0; at < shown.length; at++) size += sizeOf(shown[at]);
    return size;
  };
  /** @param {number} token */
  const lineOf = (token) => lastAtMost(starts, token);
  /**
   * @param {number} token
   * @returns {Point}
   */
  const place = (token) => {
    const line = lineOf(token);
    let x = PANE_GUTTER;
    for (let n = starts[line]; n < token; n++) x += widthOf(displayToken(tokens[n]).text);
    x += widthOf(displayToken(tokens[token]).text) / 2;
    return { x: rightToLeft ? width - x : x, y: line * PANE_LINE };
  };

  /** @param {number} n @param {number} largest */
  const span = (n, largest) => {
    const { text, kind, note } = displayToken(tokens[n]);
    const weight = marks.weights?.[n],
      tint = paneTint(weight, largest);
    const names = [
      kind,
      n === marks.chosen && "chosen",
      marks.matches.has(n) && "match",
      marks.targets.has(n) && "target",
    ];
    const node = element(
      "bdi",
      {
        id: `${stem}-${n}`,
        role: "option",
        class: names.filter(Boolean).join(" ") || null,
        data: { token: n },
        "aria-selected": n === marks.chosen ? "true" : null,
        title: note ? `${n}: ${note}` : n,
      },
      text,
    );
    if (tint > 0.02) node.style.setProperty("--tint", tint.toFixed(3));
    return node;
  };
  const draw = () => {
    if (!scroll.clientHeight) return;
    const first = Math.max(0, Math.floor(scroll.scrollTop / PANE_LINE) - 1);
    const last = Math.min(starts.length, first + Math.ceil(scroll.clientHeight / PANE_LINE) + 2);
    const { largest } = marks;
    const nodes = [];
    for (let line = first; line < last; line++) {
      const end = starts[line + 1] ?? tokens.length,
        row = element("div");
      for (let n = starts[line]; n < end; n++) row.append(span(n, largest));
      nodes.push(row);
    }
    lines.style.transform = `translateY(${first * PANE_LINE}px)`;
    lines.replaceChildren(...nodes);
    const seen =
      marks.chosen !== null &&
      marks.chosen >= (starts[first] ?? 0) &&
      marks.chosen < (starts[last] ?? tokens.length);
    if (seen) scroll.setAttribute("aria-activedescendant", `${stem}-${marks.chosen}`);
    else scroll.removeAttribute("aria-activedescendant");
    drawArcs(largest);
  };
  /** @param {number} largest */
  const drawArcs = (largest) => {
    const paths = [];
    if (marks.arcs && marks.chosen !== null && marks.chosen >= 0) {
      const from = place(marks.chosen),
        top = scroll.scrollTop - PANE_LINE,
        bottom = top + scroll.clientHeight + 2 * PANE_LINE;
      for (const [token, weight] of [...marks.targets].slice(0, 32)) {
        if (token === marks.chosen || token < 0 || token >= tokens.length) continue;
        const to = place(token);
        if ((from.y < top && to.y < top) || (from.y > bottom && to.y > bottom)) continue;
        const d = besideWords(from, to, rightToLeft ? width : 0);
        const tint = paneTint(weight, largest);
        paths.push(
          svg("path", {
            d,
            "stroke-width": (0.75 + 2 * tint).toFixed(2),
            "stroke-opacity": (0.2 + 0.7 * tint).toFixed(2),
          }),
        );
      }
    }
    arcs.replaceChildren(...paths);
  };
  const plan = oncePerFrame(draw);
  const layout = () => {
    if (scroll.clientWidth === width && scroll.clientHeight === tall) return;
    const keep = starts.length
      ? starts[Math.min(Math.floor(scroll.scrollTop / PANE_LINE), starts.length - 1)]
      : 0;
    width = scroll.clientWidth;
    tall = scroll.clientHeight;
    if (!width || !tall) return;
    // The shorthand is empty when a part of it (tabular figures) has no place in it.
    const { fontWeight, fontSize, fontFamily } = getComputedStyle(lines);
    pen.font = `${fontWeight} ${fontSize} ${fontFamily}`;
    widths.clear();
    const most = Math.max(8, Math.floor(PANE_MOST / (Math.ceil(tall / PANE_LINE) + 3)));
    starts = layoutLines(tokens, widthOf, width - PANE_GUTTER - 8, most);
    sizer.style.height = `${starts.length * PANE_LINE}px`;
    arcs.setAttribute("height", String(Math.min(starts.length * PANE_LINE, 8e6)));
    scroll.scrollTop = Math.max(0, lineOf(keep)) * PANE_LINE;
    plan();
    if (wanted !== null) goTo(wanted);
  };
  /** @param {number} token */
  const goTo = (token) => {
    if (!(token >= 0) || token >= tokens.length) return;
    wanted = starts.length ? null : token;
    if (wanted !== null) return;
    const y = lineOf(token) * PANE_LINE;
    if (y < scroll.scrollTop || y + PANE_LINE > scroll.scrollTop + scroll.clientHeight) {
      scroll.scrollTop = Math.max(0, y - scroll.clientHeight / 3);
    }
    plan();
  };

  scroll.addEventListener("scroll", plan, { passive: true });
  scroll.addEventListener("click", (event) => {
    const token = event.target instanceof Element && event.target.closest("[data-token]");
    if (token && String(getSelection() ?? "") === "") onChoose(Number(token.getAttribute("data-token")));
  });
  scroll.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = marks.chosen ?? -1,
      line = Math.max(0, lineOf(at)),
      into = at - (starts[line] ?? 0);
    /** @param {number} next */
    const along = (next) =>
      Math.min((starts[next] ?? 0) + Math.max(0, into), (starts[next + 1] ?? tokens.length) - 1);
    const move = {
      ArrowRight: () => at + (rightToLeft ? -1 : 1),
      ArrowLeft: () => at - (rightToLeft ? -1 : 1),
      ArrowDown: () => (line + 1 < starts.length ? along(line + 1) : at),
      ArrowUp: () => (line > 0 ? along(line - 1) : at),
      Home: () => 0,
      End: () => tokens.length - 1,
      Enter: () => (at < 0 ? (starts[Math.floor(scroll.scrollTop / PANE_LINE)] ?? 0) : at),
    }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    const next = Math.min(Math.max(move(), 0), tokens.length - 1);
    if (tokens.length) {
      onChoose(next);
      goTo(next);
    }
  });
  new ResizeObserver(layout).observe(scroll);
  layout();
  return {
    node: scroll,
    goTo,
    /** @param {Marks} next */
    show(next) {
      marks = next;
      plan();
    },
  };
}

/**
 * A picture cut into patches, with the weights of the chosen one laid over it; special tokens as buttons
 * before it.
 * @param {HTMLElement} host
 * @param {{tokens: string[], label: string, grid: [number, number], first: number,
 *   picture: Numbers|null, onChoose: (token: number) => void}} options
 * @returns {Pane}
 */
export function patchPane(host, { tokens, label, grid: [rows, columns], first, picture, onChoose }) {
  const canvas = element("canvas", {
    class: "reader-picture",
    tabindex: 0,
    role: "img",
    "aria-label": `${label}: ${rows} by ${columns} patches. Arrow keys choose one.`,
  });
  const special = element("div", { class: "reader-special" });
  const box = element("div", { class: "reader-patches" }, special, canvas);
  let marks = NO_MARKS;
  host.append(box);
  const scan = picture && element("canvas", { width: picture.shape[1], height: picture.shape[0] });
  if (scan && picture.shape[0] * picture.shape[1]) {
    const [high, wide, depth = 1] = picture.shape,
      pixels = new Uint8ClampedArray(4 * high * wide);
    for (let n = 0; n < high * wide; n++) {
      for (let part = 0; part < 3; part++)
        pixels[4 * n + part] = picture.values[n * depth + (depth > 1 ? part : 0)];
      pixels[4 * n + 3] = 255;
    }
    penOf(scan).putImageData(new ImageData(pixels, wide, high), 0, 0);
  }
  const outside = tokens
    .map((_, n) => n)
    .filter((n) => n < first || n >= first + rows * columns)
    .slice(0, 12);
  special.append(
    ...outside.map((n) =>
      element(
        "button",
        { type: "button", data: { token: n }, on: { click: () => onChoose(n) } },
        displayToken(tokens[n] || String(n)).text,
      ),
    ),
  );
  const draw = () => {
    const room = Math.min(box.clientWidth - 2, 460);
    if (room <= 0) return;
    const aspect = scan ? scan.height / scan.width : rows / columns;
    const space = Math.max(140, box.clientHeight - special.offsetHeight - 8);
    const wide = Math.round(Math.min(room, space / aspect)),
      high = Math.round(wide * aspect),
      ratio = pixelRatio();
    Object.assign(canvas, { width: wide * ratio, height: high * ratio });
    Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
    const pen = penOf(canvas),
      style = getComputedStyle(box),
      x = wide / columns,
      y = high / rows;
    pen.scale(ratio, ratio);
    pen.imageSmoothingEnabled = !scan || scan.width > wide;
    if (scan) pen.drawImage(scan, 0, 0, wide, high);
    /** @param {number} n */
    const tintOf = (n) => paneTint(marks.weights?.[n], marks.largest);
    pen.fillStyle = style.getPropertyValue("--reader-tint-solid") || "#d06000";
    for (let n = 0; n < rows * columns; n++) {
      pen.globalAlpha = 0.85 * tintOf(first + n);
      pen.fillRect((n % columns) * x, Math.floor(n / columns) * y, x, y);
    }
    pen.globalAlpha = 0.25;
    pen.strokeStyle = style.color;
    pen.lineWidth = 0.5;
    pen.beginPath();
    for (let n = 0; n <= columns; n++) pen.rect(n * x, 0, 0, high);
    for (let n = 0; n <= rows; n++) pen.rect(0, n * y, wide, 0);
    pen.stroke();
    pen.globalAlpha = 1;
    const at = marks.chosen === null ? -1 : marks.chosen - first;
    if (at >= 0 && at < rows * columns) {
      for (const width of [4, 2]) {
        pen.strokeStyle = width > 2 ? "#000" : "#fff";
        pen.lineWidth = width;
        pen.strokeRect((at % columns) * x + 1, Math.floor(at / columns) * y + 1, x - 2, y - 2);
      }
    }
    for (const one of special.querySelectorAll("button")) {
      const n = Number(one.dataset.token);
      one.style.setProperty("--tint", tintOf(n).toFixed(3));
      one.setAttribute("aria-pressed", String(n === marks.chosen));
    }
  };
  canvas.addEventListener("click", (event) => {
    const { x, y } = pointIn(canvas, event);
    const column = Math.floor((x / canvas.clientWidth) * columns);
    const row = Math.floor((y / canvas.clientHeight) * rows);
    onChoose(
      first + Math.min(Math.max(row, 0), rows - 1) * columns + Math.min(Math.max(column, 0), columns - 1),
    );
  });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    const next = (marks.chosen ?? first - step) + step;
    if (next < first || next >= first + rows * columns) return;
    onChoose(next);
    say(`patch in row ${Math.floor((next - first) / columns)}, column ${(next - first) % columns}`, canvas);
  });
  new ResizeObserver(draw).observe(box);
  return {
    node: canvas,
    goTo() {},
    /** @param {Marks} next */
    show(next) {
      marks = next;
      draw();
    },
  };
}
