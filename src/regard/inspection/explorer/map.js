import { isDark, limitsFor, missing, tableFor } from "./colours.js";
import { element, say, svg } from "./dom.js";
import { drawnView, followCell, levelToDraw, MaskTiles, pixelOf, pixelsPerCell, zoomView } from "./geometry.js";
import { areNone, barWords, drawAxes, drawColourBar, drawOverlays, drawStrips, hatchPattern, LAYER_LABEL, mapLayout, matrixRect, readStrips } from "./map_layers.js";
import { drawCrosshairs, drawMinimap, minimapRect } from "./map_marks.js";
import { followPointer } from "./map_pointer.js";
import { areRounded, cellSentence, mapSentence, readCell } from "./sentences.js";
import { TILE, TileStore } from "./tiles.js";
import { mapTools } from "./tools.js";

const MAP_HEADS = 64;
const MAP_THEME = { panel: "--panel", ink: "--ink", muted: "--muted", line: "--line", well: "--well", hatch: "--hatch", grid: "--grid",
  border: "--border", cross: "--cross", entropy: "--entropy", keymass: "--keymass" };

/**
 * The deep-zoom heat map of the selected heads.
 * @param {HTMLElement} host @param {import("./source.js").Source} source @param {import("./state.js").State} state
 * @returns {object} a handle: `base` and `over` (canvases), `pixel(row, key)`, `look()`, `settled()`, `step()`, `draw(pen, layout, ratio)`
 */
export function mountMap(host, source, state) {
  const view = new MapView(host, source, state);
  view.mount();
  return view;
}

class MapView {
  constructor(host, source, state) {
    Object.assign(this, { host, source, state, tokens: {}, strips: null, mask: new MaskTiles(null), planned: false, hovered: null, serial: 0 });
    this.base = element("canvas", { class: "rg-base", "aria-hidden": "true" });
    this.over = element("canvas", { class: "rg-over", "aria-hidden": "true" });
    this.stage = element("div", { class: "rg-stage", tabindex: "0", role: "application", "aria-roledescription": "heat map",
      "aria-label": "Attention weights, queries down and keys across. Arrow keys move the crosshair, plus and minus zoom, question mark lists all keys." },
    this.base, this.over);
    this.words = element("p", { class: "rg-what" });
    this.lockText = element("span");
    this.lock = element("p", { class: "rg-lock", hidden: true }, svg("svg", { viewBox: "0 0 12 14", width: 11, height: 13, "aria-hidden": "true" },
      svg("path", { d: "M1 6h10v7H1zM3 6V4a3 3 0 0 1 6 0v2", fill: "none", stroke: "currentColor", "stroke-width": 1.4 })), this.lockText);
    this.sentence = element("p", { class: "rg-sentence" });
    this.store = new TileStore(source, () => this.plan());
  }

  mount() {
    this.host.append(element("div", { class: "rg-map-head" }, this.words, ...mapTools(this.state)), this.stage, element("div", { class: "rg-map-foot" }, this.sentence, this.lock));
    const { state } = this;
    const plan = () => this.plan();
    const follow = () => {
      const { row, key } = state;
      if (row !== null && key !== null) state.set({ view: followCell(this.drawn(), row, key, state.shape()) });
    };
    const recolour = () => {
      this.theme = null;
      this.plan();
    };
    state.on(["t", "c", "h", "selection"], () => this.change());
    state.on(["channel", "scale", "rowRank", "hideSink", "aggregate", "view", "borders", "band", "tiles", "tab"], plan);
    state.on(["row", "key", "t", "c", "h", "selection", "aggregate", "channel", "hideSink"], () => this.tell());
    const answers = { recolour, follow, "zoom-in": () => this.zoom(0.5), "zoom-out": () => this.zoom(2), fit: () => state.set({ view: state.whole() }) };
    for (const [command, answer] of Object.entries(answers)) state.addEventListener(command, answer);
    new ResizeObserver(plan).observe(this.stage);
    followPointer(this.stage, {
      layout: () => this.layout(), shape: () => state.shape(), view: () => state.view, scale: () => this.scale(), minimap: () => this.minimap,
      change: (next) => state.set({ view: next }), hover: (cell) => this.hover(cell), choose: ({ row, key }) => state.set({ row, key }),
    });
    this.change();
    this.tell();
  }

  call() {
    return this.source.document.traces[this.state.t]?.calls[this.state.c] ?? null;
  }

  /** The heads that can be drawn together: of the size of the one looked at. */
  heads() {
    const { state } = this;
    const { rows, keys } = state.shape();
    const calls = state.shapes[state.t] ?? [];
    const same = state.selection.filter(([c]) => calls[c].rows === rows && calls[c].keys === keys);
    return (same.length ? same : [[state.c, state.h]]).slice(0, MAP_HEADS);
  }

  levels(heads) {
    const { t, channel } = this.state;
    const lists = heads.map(([c, h]) => this.source.levels(t, c, h, channel));
    const has = (list, { queryBlock, keyBlock }) => list.some((one) => one.queryBlock === queryBlock && one.keyBlock === keyBlock);
    return lists[0].filter((level) => lists.every((list) => has(list, level)));
  }

  layout() {
    const { clientWidth: width, clientHeight: height } = this.stage;
    const { view } = this.state;
    const sign = [width, height, view.q0, view.q1, view.k0, view.k1, Boolean(this.tokens.keys)].join(" ");
    if (this.laidOf !== sign) {
      // Whether labels fit is asked of the layout that has room for them: the answer cannot flip back and forth.
      const roomy = mapLayout(width, height);
      const { perKey } = pixelsPerCell(drawnView(view, roomy.plot, this.state.shape()), roomy.plot);
      this.laid = this.tokens.keys && perKey >= LAYER_LABEL ? roomy : mapLayout(width, height, false);
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

  /** Zoom about the crosshair where it is in sight, else about the middle. */
  zoom(factor) {
    const now = this.drawn();
    const { row, key } = this.state;
    const inside = row !== null && key !== null && row >= now.q0 && row < now.q1 && key >= now.k0 && key < now.k1;
    const { rows, keys } = this.state.shape();
    const [q, k] = inside ? [row + 0.5, key + 0.5] : [(now.q0 + Math.min(rows, now.q1)) / 2, (now.k0 + Math.min(keys, now.k1)) / 2];
    this.state.set({ view: zoomView(now, factor, q, k, this.state.shape()) });
  }

  /** Another call or selection: its tokens, its mask, its strips. */
  async change() {
    const serial = (this.serial += 1);
    const { source, state } = this;
    const call = this.call();
    this.strips = null;
    this.tokens = {};
    this.plan();
    if (!call) return;
    const [rows, keys, picture] = await Promise.all([source.tokens(state.t, call.query_sequence), source.tokens(state.t, call.key_sequence), source.chunk(call.mask_picture)]);
    if (serial !== this.serial) return;
    this.tokens = { rows, keys };
    this.mask = new MaskTiles(picture, call.tile_rows, call.tile_keys);
    this.maskOf = `${state.t} ${state.c}`;
    this.strips = await readStrips(source, state.t, this.heads(), call.row_stats);
    if (serial === this.serial) {
      this.plan();
      this.tell();
    }
  }

  plan() {
    if (this.planned) return;
    this.planned = true;
    const run = () => {
      if (!this.planned) return;
      this.planned = false;
      clearTimeout(this.late);
      this.paint();
    };
    requestAnimationFrame(run);
    // Frames stop in a hidden tab; the picture should be there when it is looked at.
    this.late = setTimeout(run, 250);
  }

  colours() {
    if (this.theme) return this.theme;
    const style = getComputedStyle(this.host);
    const read = Object.entries(MAP_THEME).map(([name, property]) => [name, style.getPropertyValue(property).trim() || "#888"]);
    this.theme = { ...Object.fromEntries(read), dark: isDark(this.host) };
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
    const scale = state.rowRank ? "rank" : state.scale;
    const { keys } = state.shape();
    const what = level && { t: state.t, heads, level, channel: state.channel, aggregate: state.aggregate, hideSink: state.hideSink,
      ranked: state.rowRank, columns: Math.ceil(Math.ceil(keys / level.keyBlock) / TILE) };
    const [low, high] = limitsFor(scale, keys, what ? this.store.largest.get(this.store.group(what)) ?? 0 : 0);
    return { level, finest: levels[0] ?? null, limits: { scale, low, high }, what, levels };
  }

  paint() {
    const { state, base } = this;
    const { clientWidth: width, clientHeight: height } = this.stage;
    if (!width || !height) return;
    const ratio = Math.min(3, globalThis.devicePixelRatio || 1);
    for (const canvas of [base, this.over]) {
      const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
      if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
    }
    this.ratio = ratio;
    const pen = base.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw(pen, this.layout(), ratio);
    this.drawOver();
    this.stage.style.touchAction = JSON.stringify(state.view) === JSON.stringify(state.whole()) ? "pan-y" : "none";
  }

  /** Draw the map with axes and colour bar, onto any pen. */
  draw(pen, layout, ratio) {
    const { state } = this;
    const theme = this.colours();
    const shape = state.shape();
    const call = this.call();
    pen.fillStyle = theme.panel;
    pen.fillRect(0, 0, layout.width, layout.height);
    const { level, finest, limits, what } = this.look();
    const { plot } = layout;
    if (!call || !shape.rows || !shape.keys || !level) {
      pen.fillStyle = theme.muted;
      pen.font = "14px system-ui, sans-serif";
      pen.textAlign = "center";
      pen.fillText(call && level ? "This call has no weights: it has no queries or no keys." : "Nothing is stored of this head in this channel.", layout.width / 2, layout.height / 2);
      this.words.textContent = call ? `Layer ${state.c + 1} head ${state.h + 1}` : "";
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
    const look = { ...limits, ...this.paper(theme), level, shape };
    look.sign = [limits.scale, limits.low, limits.high, theme.dark, look.mask.known, this.maskOf, Boolean(this.strips)].join(" ");
    pen.save();
    pen.beginPath();
    pen.rect(area.x, area.y, area.w, area.h);
    pen.clip();
    pen.imageSmoothingEnabled = false;
    this.drawTiles(pen, { view, plot, shape, what, look, ratio });
    pen.restore();
    drawOverlays(pen, { layout, view, shape, theme, call, state });
    drawStrips(pen, { layout, view, shape, theme, strips: this.strips, barLimits: limitsFor("log", shape.keys, 1) });
    drawAxes(pen, { layout, view, shape, theme, rowTokens: this.tokens.rows, keyTokens: this.tokens.keys, rowOffset: call.query_offset ?? 0, keyOffset: call.key_offset ?? 0 });
    drawColourBar(pen, { x: plot.x, y: layout.height - layout.bottom + 10, width: layout.width - plot.x - 6, theme, look, words: barWords(limits, level, state.channel),
      marks: [["not attended", this.hatch], ["no number", `rgb(${look.none.join(" ")})`], ["entropy", theme.entropy], ["key mass", theme.keymass]] });
    this.describe({ level, finest, what, view, plot });
  }

  drawTiles(pen, { view, plot, shape, what, look, ratio }) {
    const { level } = what;
    const snap = (x) => Math.round(x * ratio) / ratio;
    const ends = (from, to, block, size) => [Math.floor(Math.max(0, from) / block / TILE), Math.ceil(Math.min(size, to) / block / TILE)];
    const [r0, r1] = ends(view.q0, view.q1, level.queryBlock, shape.rows);
    const [c0, c1] = ends(view.k0, view.k1, level.keyBlock, shape.keys);
    for (let r = r0; r < r1; r += 1) {
      for (let c = c0; c < c1; c += 1) {
        const entry = this.store.get(what, r, c);
        const start = pixelOf(view, plot, r * TILE * level.queryBlock, c * TILE * level.keyBlock);
        const end = pixelOf(view, plot, (r + 1) * TILE * level.queryBlock, (c + 1) * TILE * level.keyBlock);
        const [x, y] = [snap(start.x), snap(start.y)];
        if (entry) pen.drawImage(this.store.paint(entry, look, r, c), x, y, snap(end.x) - x, snap(end.y) - y);
        else this.drawCoarse(pen, { view, plot, look, what, clip: [x, y, end.x - x, end.y - y] });
      }
    }
  }

  /** While a tile is on its way, the coarsest blocks stand in for it. */
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

  /** All of the map in one tile, as fine as that goes. */
  coarse(what, look) {
    const { rows, keys } = this.state.shape();
    const level = this.levels(what.heads).find(({ queryBlock, keyBlock }) => rows <= queryBlock * 128 && keys <= keyBlock * 128);
    if (!level) return null;
    const whole = { ...what, level, columns: 1 };
    const entry = this.store.get(whole, 0, 0);
    if (!entry) return null;
    const [low, high] = limitsFor(look.scale, keys, this.store.largest.get(this.store.group(whole)) ?? 0);
    const sign = `${look.sign} ${low} ${high}`;
    return { level, canvas: this.store.paint(entry, { ...look, low, high, level, sign }, 0, 0) };
  }

  describe({ level, finest, what, view, plot }) {
    const { state, source } = this;
    const calls = source.document.traces[state.t].calls;
    const text = mapSentence({ ...what, left: state.selection.length - what.heads.length, rowRank: state.rowRank, calls,
      rounded: areRounded(this.source, state.t, what.heads) });
    if (this.words.textContent !== text) this.words.textContent = text;
    const { perRow, perKey } = pixelsPerCell(view, plot);
    const deep = Math.min(level.queryBlock * perRow, level.keyBlock * perKey) > 3;
    this.lock.hidden = !(level === finest && Math.max(level.queryBlock, level.keyBlock) > 1 && deep);
    if (!this.lock.hidden) {
      this.lockText.textContent = "finest stored · exact: regard view FILE";
      this.lock.title = `Nothing finer is stored: a square is ${level.queryBlock} queries by ${level.keyBlock} keys, and is not smoothed.`;
    }
  }

  /** Crosshair, hovered cell and minimap, over the map. */
  drawOver() {
    const { state } = this;
    const layout = this.layout();
    const shape = state.shape();
    const theme = this.colours();
    const view = this.drawn();
    const pen = this.over.getContext("2d");
    pen.setTransform(this.ratio ?? 1, 0, 0, this.ratio ?? 1, 0, 0);
    pen.clearRect(0, 0, layout.width, layout.height);
    drawCrosshairs(pen, { layout, view, shape, theme, hovered: this.hovered, held: state });
    this.minimap = minimapRect(layout, view, shape);
    const { what, limits } = this.look();
    if (!what) this.minimap = null;
    if (!this.minimap) return;
    const coarse = this.coarse(what, { ...limits, ...this.paper(theme), shape, sign: [limits.scale, theme.dark, this.maskOf, "mini"].join(" ") });
    drawMinimap(pen, { mini: this.minimap, view, shape, theme, coarse });
  }

  /** What colours mean: the table, the missing one, and the mask where it is known. */
  paper(theme) {
    const mask = this.maskOf === `${this.state.t} ${this.state.c}` ? this.mask : new MaskTiles(null);
    const { strips } = this;
    const isEmpty = strips ? (q0, q1) => areNone(strips.entropy, q0 / strips.rowBin, q1 / strips.rowBin) : () => false;
    return { table: tableFor("sequential", theme.dark), none: theme.dark ? missing.dark : missing.light, mask, isEmpty };
  }

  hover(cell) {
    if (cell?.row === this.hovered?.row && cell?.key === this.hovered?.key) return;
    this.hovered = cell;
    this.drawOver();
    this.sentence.textContent = cell ? this.facts(cell) : this.told;
  }

  /** The sentence of a cell from what is drawn, without asking for anything. */
  facts({ row, key }, read = { weight: null }) {
    const { state } = this;
    const { what } = this.look();
    const call = this.call();
    let block = null;
    if (what) {
      const plain = { ...what, ranked: false };
      const [i, j] = [Math.floor(row / what.level.queryBlock), Math.floor(key / what.level.keyBlock)];
      const entry = this.store.get(plain, Math.floor(i / TILE), Math.floor(j / TILE));
      if (entry) block = { value: entry.values[(i % TILE) * TILE + (j % TILE)], channel: what.channel, ...what.level };
    }
    const exact = block && block.queryBlock === 1 && block.keyBlock === 1 && !Number.isNaN(block.value);
    const known = read.weight === null && exact ? { weight: block.value } : read;
    const heads = this.heads();
    const rounded = areRounded(this.source, state.t, heads);
    return cellSentence({ row, key, call, tokens: this.tokens, ...known, block, heads: heads.length, aggregate: state.aggregate, rounded });
  }

  /** Say what is under the crosshair, with its rank. */
  async tell() {
    const { state, source } = this;
    const { t, row, key, aggregate } = state;
    if (this.base.width) this.drawOver();
    if (row === null || key === null || !this.call()) {
      this.told = row !== null ? "Choose a key as well to read a weight." : "Point at the map, or click to hold a cell.";
      this.sentence.textContent = this.told;
      this.sentence.classList.remove("rg-held");
      return;
    }
    const asked = (this.asked = (this.asked ?? 0) + 1);
    const read = await readCell(source, { t, heads: this.heads(), row, key, aggregate });
    if (asked !== this.asked) return;
    await this.settled();
    if (asked !== this.asked) return;
    this.told = this.facts({ row, key }, state.hideSink ? { weight: null } : read);
    this.sentence.textContent = this.told;
    this.sentence.classList.add("rg-held");
    say(this.told, this.host);
  }

  /** @returns {{x: number, y: number}|null} CSS pixel of the canvas at the centre of the block that shows a cell; null out of sight */
  pixel(row, key) {
    const { level } = this.look();
    if (!level) return null;
    const shape = this.state.shape();
    const middle = (at, block, size) => (Math.floor(at / block) * block + Math.min(size, (Math.floor(at / block) + 1) * block)) / 2;
    const { plot } = this.layout();
    const { x, y } = pixelOf(this.drawn(), plot, middle(row, level.queryBlock, shape.rows), middle(key, level.keyBlock, shape.keys));
    return x >= plot.x && y >= plot.y && x < plot.x + plot.w && y < plot.y + plot.h ? { x, y } : null;
  }

  /** Cells that an arrow key moves by: a block of what is drawn. */
  step() {
    const { queryBlock, keyBlock } = this.look().level ?? { queryBlock: 1, keyBlock: 1 };
    return { rows: queryBlock, keys: keyBlock };
  }

  /** @returns {Promise<void>} when everything in sight is drawn */
  async settled() {
    for (let quiet = 0; quiet < 2;) {
      await new Promise((resolve) => setTimeout(resolve, 16));
      quiet = this.store.pending || this.planned || (this.call() && !this.strips && this.state.shape().rows) ? 0 : quiet + 1;
    }
  }
}
