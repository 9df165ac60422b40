import { barWords, drawColourBar } from "./colour_bar.js";
import { barLimits, limitsFor, missing, tableFor } from "./colours.js";
import { element, svg } from "./dom.js";
import { headsTogether, sharedLevels } from "./excerpts.js";
import { drawnView, levelToDraw, MaskTiles, pixelOf, pixelsPerCell } from "./geometry.js";
import { largestOfAll } from "./heads.js";
import {
  areNone,
  drawAxes,
  drawOverlays,
  drawStrips,
  LAYER_LABEL,
  mapLayout,
  matrixRect,
} from "./map_layers.js";
import { hatchPattern, readTheme } from "./map_theme.js";
import { layerNumber } from "./passages.js";
import { areRounded, mapSentence } from "./sentences.js";
import { TILE, TileStore } from "./tiles.js";

/** What the map shows: which heads, which blocks, which colours, and the picture of them. */
export class MapPicture {
  /** @type {{rows: string[]|null, keys: string[]|null}} */
  tokens = { rows: null, keys: null };
  /** CSS pixels that tokens above the keys take. */
  room = 0;
  /** @type {Strips|null} */
  strips = null;
  mask = new MaskTiles(null);
  /** Trace and call of the mask. */
  maskOf = "";
  /** @type {MapTheme|null} */
  theme = null;
  /** @type {CanvasPattern|string} */
  hatch = "";
  hatchOf = "";
  laid = mapLayout(0, 0);
  laidOf = "";
  base = element("canvas", { class: "rg-base", "aria-hidden": "true" });
  over = element("canvas", { class: "rg-over", "aria-hidden": "true" });
  stage = element(
    "div",
    {
      class: "rg-stage",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "heat map",
      "aria-label":
        "Attention, queries down and keys across. Arrow keys move the crosshair, plus and minus zoom, question mark lists all keys.",
    },
    this.base,
    this.over,
  );

  /** @param {HTMLElement} host @param {Source} source @param {State} state @param {() => void} arrived */
  constructor(host, source, state, arrived) {
    this.host = host;
    this.source = source;
    this.state = state;
    this.store = new TileStore(source, arrived);
    this.words = element("p", { class: "rg-what" });
    this.lockText = element("span");
    this.lock = element(
      "p",
      { class: "rg-lock", hidden: true },
      svg(
        "svg",
        { viewBox: "0 0 12 14", width: 11, height: 13, "aria-hidden": "true" },
        svg("path", {
          d: "M1 6h10v7H1zM3 6V4a3 3 0 0 1 6 0v2",
          fill: "none",
          stroke: "currentColor",
          "stroke-width": 1.4,
        }),
      ),
      this.lockText,
    );
  }

  call() {
    return this.source.document.traces[this.state.t]?.calls[this.state.c] ?? null;
  }

  /** The heads that can be drawn together: of the size of the one looked at. */
  heads() {
    return headsTogether(this.source, this.state);
  }

  /** @param {Head[]} heads */
  levels(heads) {
    const { t, channel } = this.state;
    return sharedLevels(heads.map(([c, h]) => this.source.levels(t, c, h, channel)));
  }

  layout() {
    const { clientWidth: width, clientHeight: height } = this.stage;
    const { view } = this.state;
    const sign = [
      width,
      height,
      view.q0,
      view.q1,
      view.k0,
      view.k1,
      Boolean(this.tokens.keys),
      this.room,
    ].join(" ");
    if (this.laidOf !== sign) {
      // Whether labels fit is asked of the layout that has room for them: the answer cannot flip back and forth.
      const roomy = mapLayout(width, height);
      const seen = drawnView(view, roomy.plot, this.state.shape());
      const { perKey } = pixelsPerCell(seen, roomy.plot);
      this.laid = mapLayout(width, height, this.tokens.keys && perKey >= LAYER_LABEL ? this.room : 0);
      this.laidOf = sign;
    }
    return this.laid;
  }

  drawn() {
    return drawnView(this.state.view, this.layout().plot, this.state.shape());
  }

  scale() {
    return pixelsPerCell(this.drawn(), this.layout().plot);
  }

  colours() {
    this.theme ??= readTheme(this.host);
    return this.theme;
  }

  /** What is drawn: level, scale and its ends. */
  look() {
    const { state } = this;
    const heads = this.heads();
    const levels = this.call() ? this.levels(heads) : [];
    const { perRow, perKey } = this.scale();
    const place = levelToDraw(levels, perRow, perKey);
    const level = levels[place] ?? null;
    /** @type {Scale} */
    const scale = state.rowRank ? "rank" : state.scale;
    const { keys } = state.shape();
    /** @type {TileRequest|null} */
    const what = level && {
      t: state.t,
      heads,
      level,
      channel: state.channel,
      aggregate: state.aggregate,
      hideSink: state.hideSink,
      ranked: state.rowRank,
      columns: Math.ceil(Math.ceil(keys / level.keyBlock) / TILE),
    };
    const [low, high] = this.limits(scale, what);
    return { level, finest: levels[0] ?? null, limits: { scale, low, high }, what, levels };
  }

  /**
   * Ends of the colours of what is drawn.
   * @param {Scale} scale @param {TileRequest|null} what
   */
  limits(scale, what) {
    const { state, store, source } = this;
    const group = what ? store.group(what) : "";
    return barLimits(state.range, scale, state.shape().keys, {
      all: what ? largestOfAll(source.document.traces[state.t], what.channel, what.level) : 1,
      channel: state.channel,
      head: store.largest.get(group) ?? 0,
      counts: store.histograms.get(group),
    });
  }

  /**
   * Draw the map with axes and colour bar, onto any pen.
   * @param {CanvasRenderingContext2D} pen @param {MapLayout} layout @param {number} ratio
   */
  draw(pen, layout, ratio) {
    const { state } = this;
    const theme = this.colours();
    const shape = state.shape();
    const call = this.call();
    pen.fillStyle = theme.panel;
    pen.fillRect(0, 0, layout.width, layout.height);
    const { level, finest, limits, what } = this.look();
    const { plot } = layout;
    if (!call || !shape.rows || !shape.keys || !level || !what) {
      pen.fillStyle = theme.muted;
      pen.font = "14px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillText(
        call && level
          ? "This call has no weights: it has no queries or no keys."
          : "Nothing is stored of this head in this channel.",
        layout.width / 2,
        layout.height / 2,
      );
      this.words.textContent = call ? `Layer ${layerNumber(state.calls(), state.c)} head ${state.h}` : "";
      this.lock.hidden = true;
      return;
    }
    const view = drawnView(state.view, plot, shape);
    const area = matrixRect(view, plot, shape);
    if (this.hatchOf !== `${theme.hatch} ${theme.panel} ${ratio}`) {
      this.hatch = hatchPattern(pen, theme, ratio);
      this.hatchOf = `${theme.hatch} ${theme.panel} ${ratio}`;
    }
    pen.fillStyle = this.hatch;
    pen.fillRect(area.x, area.y, area.w, area.h);
    const paper = this.paper(theme);
    const sign = [
      limits.scale,
      limits.low,
      limits.high,
      theme.dark,
      paper.mask.known,
      this.maskOf,
      Boolean(this.strips),
    ].join(" ");
    const look = { ...limits, ...paper, level, shape, sign };
    pen.save();
    pen.beginPath();
    pen.rect(area.x, area.y, area.w, area.h);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    const waiting = this.drawTiles(pen, { view, plot, shape, what, look, ratio });
    pen.restore();
    drawOverlays(pen, { layout, view, shape, theme, call, state });
    drawStrips(pen, {
      layout,
      view,
      shape,
      theme,
      strips: this.strips,
      barLimits: limitsFor("log", shape.keys, 1),
    });
    drawAxes(pen, {
      layout,
      view,
      shape,
      theme,
      rowTokens: this.tokens.rows,
      keyTokens: this.tokens.keys,
      rowOffset: call.query_offset,
      keyOffset: call.key_offset,
    });
    drawColourBar(pen, {
      x: plot.x,
      y: layout.height - layout.bottom + 20,
      width: layout.width - plot.x - 6,
      below: layout.below,
      theme,
      look,
      words: barWords(limits, level, state.channel),
      counts: this.store.histograms.get(this.store.group(what)),
      marks: [
        ["not attended", this.hatch],
        ["no number", `rgb(${look.none.join(" ")})`],
        ["entropy", theme.entropy],
        ["key mass", theme.keymass],
      ],
    });
    this.describe({ level, finest, what, view, plot, waiting });
  }

  /**
   * @param {CanvasRenderingContext2D} pen
   * @param {{ view: View, plot: Rect, shape: Shape, what: TileRequest, look: SignedLook, ratio: number }} options
   * @returns {boolean} whether tiles are on their way
   */
  drawTiles(pen, { view, plot, shape, what, look, ratio }) {
    const { level } = what;
    /** @param {number} x */
    const snap = (x) => Math.round(x * ratio) / ratio;
    /** @param {number} from @param {number} to @param {number} block @param {number} size */
    const ends = (from, to, block, size) => [
      Math.floor(Math.max(0, from) / block / TILE),
      Math.ceil(Math.min(size, to) / block / TILE),
    ];
    const [r0, r1] = ends(view.q0, view.q1, level.queryBlock, shape.rows);
    const [c0, c1] = ends(view.k0, view.k1, level.keyBlock, shape.keys);
    let waiting = false;
    for (let r = r0; r < r1; r += 1) {
      for (let c = c0; c < c1; c += 1) {
        const entry = this.store.get(what, r, c);
        const start = pixelOf(view, plot, r * TILE * level.queryBlock, c * TILE * level.keyBlock);
        const end = pixelOf(view, plot, (r + 1) * TILE * level.queryBlock, (c + 1) * TILE * level.keyBlock);
        const [x, y] = [snap(start.x), snap(start.y)];
        if (entry) pen.drawImage(this.store.paint(entry, look, r, c), x, y, snap(end.x) - x, snap(end.y) - y);
        else {
          waiting = true;
          this.drawCoarse(pen, { view, plot, look, what, clip: [x, y, end.x - x, end.y - y] });
        }
      }
    }
    return waiting;
  }

  /**
   * While a tile is on its way, the coarsest blocks stand in for it.
   * @param {CanvasRenderingContext2D} pen
   * @param {{ view: View, plot: Rect, look: SignedLook, what: TileRequest, clip: Four }} options
   */
  drawCoarse(pen, { view, plot, look, what, clip }) {
    const coarse = this.coarse(what, look);
    if (!coarse) return;
    pen.save();
    pen.beginPath();
    pen.rect(...clip);
    pen.clip();
    const start = pixelOf(view, plot, 0, 0);
    const end = pixelOf(view, plot, TILE * coarse.level.queryBlock, TILE * coarse.level.keyBlock);
    pen.globalAlpha = 0.6;
    pen.drawImage(coarse.canvas, start.x, start.y, end.x - start.x, end.y - start.y);
    pen.restore();
  }

  /**
   * All of the map in one tile, as fine as that goes.
   * @param {TileRequest} what @param {Omit<SignedLook, "level">} look
   * @returns {CoarseMap | null}
   */
  coarse(what, look) {
    const { rows, keys } = this.state.shape();
    const levels = this.levels(what.heads).filter(
      ({ queryBlock, keyBlock }) => rows <= queryBlock * 128 && keys <= keyBlock * 128,
    );
    // A stand-in is no reason to let a server sweep over whole heads.
    const level =
      levels.find((one) =>
        what.heads.every(([c, h]) => this.source.holds(what.t, c, h, one, what.channel)),
      ) ?? levels[0];
    if (!level) return null;
    const whole = { ...what, level, columns: 1 };
    const entry = this.store.get(whole, 0, 0);
    if (!entry) return null;
    const [low, high] = this.limits(look.scale, whole);
    const sign = `${look.sign} ${low} ${high}`;
    return { level, canvas: this.store.paint(entry, { ...look, low, high, level, sign }, 0, 0) };
  }

  /**
   * @param {{ level: BlockSize, finest: BlockSize | null, what: TileRequest, view: View, plot: Rect, waiting: boolean }} what
   */
  describe({ level, finest, what, view, plot, waiting }) {
    const { state, source } = this;
    const text = mapSentence({
      ...what,
      left: state.selection.length - what.heads.length,
      rowRank: state.rowRank,
      calls: source.document.traces[state.t].calls,
      rounded: areRounded(this.source, state.t, what.heads),
      narrow: state.range === "all" && what.channel === "mass" ? this.narrowest() : 0,
      waiting: waiting && Boolean(source.ask),
    });
    if (this.words.textContent !== text) this.words.textContent = text;
    const { perRow, perKey } = pixelsPerCell(view, plot);
    const deep = Math.min(level.queryBlock * perRow, level.keyBlock * perKey) > 3;
    this.lock.hidden = !(level === finest && Math.max(level.queryBlock, level.keyBlock) > 1 && deep);
    if (!this.lock.hidden) {
      this.lockText.textContent = "finest stored · exact: regard view FILE";
      this.lock.title = `Nothing finer is stored: a square is ${level.queryBlock} queries by ${level.keyBlock} keys, and is not smoothed.`;
    }
  }

  /** Keys of the narrowest blocks that another head of this size would be drawn in. */
  narrowest() {
    const { state, source } = this;
    const { t, channel } = state;
    const { rows, keys } = state.shape();
    const { perRow, perKey } = this.scale();
    let least = Infinity;
    for (const [c, call] of source.document.traces[t].calls.entries())
      for (let h = 0; h < call.heads && call.rows === rows && call.keys === keys; h += 1) {
        const finest = source.finest(t, c, h, channel);
        if (!finest || finest.keyBlock >= least) continue;
        const levels = source.levels(t, c, h, channel);
        least = Math.min(least, levels[levelToDraw(levels, perRow, perKey)].keyBlock);
      }
    return least;
  }

  /**
   * What colours mean: the table, the missing one, and the mask where it is known.
   * @param {MapTheme} theme
   */
  paper(theme) {
    const mask = this.maskOf === `${this.state.t} ${this.state.c}` ? this.mask : new MaskTiles(null);
    const { strips } = this;
    /** @type {(q0: number, q1: number) => boolean} */
    const isEmpty = strips
      ? (q0, q1) => areNone(strips.entropy, q0 / strips.rowBin, q1 / strips.rowBin)
      : () => false;
    return {
      table: tableFor("sequential", theme.dark),
      none: theme.dark ? missing.dark : missing.light,
      mask,
      isEmpty,
    };
  }
}
