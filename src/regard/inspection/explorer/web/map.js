import { element, penOf, pixelRatio, say } from "./dom.js";
import { drawnView, followCell, MaskTiles, pixelOf, zoomFactor, zoomView } from "./geometry.js";
import { labelRoom, printLayout, readStrips } from "./map_layers.js";
import { drawCrosshairs, drawMinimap, minimapRect } from "./map_marks.js";
import { MapPicture } from "./map_picture.js";
import { followPointer } from "./map_pointer.js";
import { areRounded, cellSentence, readCell } from "./sentences.js";
import { TILE } from "./tiles.js";
import { mapTools } from "./tools.js";

/**
 * The deep-zoom heat map of the selected heads.
 * @param {HTMLElement} host @param {Source} source @param {State} state
 * @returns {MapView} a handle: `base` and `over` (canvases), `pixel(row, key)`, `look()`, `settled()`, `step()`, `draw(pen, layout, ratio)`
 */
export function mountMap(host, source, state) {
  const view = new MapView(host, source, state);
  view.mount();
  return view;
}

class MapView extends MapPicture {
  planned = false;
  late = 0;
  /** @type {Cell|null} */
  hovered = null;
  /** What the sentence says while nothing is pointed at. */
  told = "";
  /** Counts of changes and of sentences: an answer that comes after the next question is dropped. */
  serial = 0;
  asked = 0;
  ratio = 1;
  /** @type {Rect|null} */
  minimap = null;

  /** @param {HTMLElement} host @param {Source} source @param {State} state */
  constructor(host, source, state) {
    super(host, source, state, () => this.plan());
    this.sentence = element("p", { class: "rg-sentence" });
  }

  mount() {
    this.host.append(
      element("div", { class: "rg-map-head" }, this.words, ...mapTools(this.state)),
      this.stage,
      element("div", { class: "rg-map-foot" }, this.sentence, this.lock),
    );
    const { state } = this;
    const plan = () => this.plan();
    const follow = () => {
      const { row, key } = state;
      if (row !== null && key !== null)
        state.set({ view: followCell(this.drawn(), row, key, state.shape()) });
    };
    const recolour = () => {
      this.theme = null;
      this.plan();
    };
    state.on("view", () => (this.store.moved = performance.now()));
    state.on(["t", "c", "h", "selection"], () => this.change());
    state.on(
      [
        "channel",
        "scale",
        "range",
        "rowRank",
        "hideSink",
        "aggregate",
        "view",
        "borders",
        "band",
        "tiles",
        "tab",
      ],
      plan,
    );
    state.on(["row", "key", "t", "c", "h", "selection", "aggregate", "channel", "hideSink"], () =>
      this.tell(),
    );
    const answers = {
      recolour,
      follow,
      "zoom-in": () => this.zoom(0.5),
      "zoom-out": () => this.zoom(2),
      fit: () => state.set({ view: state.whole() }),
      print: () => this.print(),
      printed: () => this.printed(),
    };
    for (const [command, answer] of Object.entries(answers)) state.addEventListener(command, answer);
    new ResizeObserver(plan).observe(this.stage);
    followPointer(this.stage, {
      layout: () => this.layout(),
      shape: () => state.shape(),
      view: () => state.view,
      scale: () => this.scale(),
      minimap: () => this.minimap,
      change: (next) => state.set({ view: next }),
      hover: (cell) => this.hover(cell),
      choose: ({ row, key }) => state.set({ row, key }),
    });
    this.change();
    this.tell();
  }

  /**
   * Zoom about the crosshair where it is in sight, else about the middle.
   * @param {number} factor
   */
  zoom(factor) {
    const now = this.drawn();
    const { row, key } = this.state;
    const inside =
      row !== null && key !== null && row >= now.q0 && row < now.q1 && key >= now.k0 && key < now.k1;
    const { rows, keys } = this.state.shape();
    const [q, k] = inside
      ? [row + 0.5, key + 0.5]
      : [(now.q0 + Math.min(rows, now.q1)) / 2, (now.k0 + Math.min(keys, now.k1)) / 2];
    const shape = this.state.shape();
    this.state.set({ view: zoomView(now, zoomFactor(factor, this.scale(), shape), q, k, shape) });
  }

  /** Another call or selection: its tokens, its mask, its strips. */
  async change() {
    this.serial += 1;
    const { serial } = this;
    const { source, state } = this;
    const call = this.call();
    this.strips = null;
    this.tokens = { rows: null, keys: null };
    this.plan();
    if (!call) return;
    const [rows, keys, picture] = await Promise.all([
      source.tokens(state.t, call.query_sequence),
      source.tokens(state.t, call.key_sequence),
      source.chunk(call.mask_picture),
    ]);
    if (serial !== this.serial) return;
    this.tokens = { rows, keys };
    this.room = labelRoom(keys ?? []);
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

  paint() {
    const { state, base } = this;
    const { clientWidth: width, clientHeight: height } = this.stage;
    if (!width || !height) return;
    const ratio = pixelRatio();
    for (const canvas of [base, this.over]) {
      const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
      if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
    }
    this.ratio = ratio;
    const pen = penOf(base);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.store.inPicture(() => {
      this.draw(pen, this.layout(), ratio);
      this.drawOver();
    });
    this.stage.style.touchAction =
      JSON.stringify(state.view) === JSON.stringify(state.whole()) ? "pan-y" : "none";
  }

  /** One picture of all layers in place of them: what erases on paper covers what lies below. */
  print() {
    const { clientWidth: width, clientHeight: height } = this.stage;
    if (!width || !height) return;
    const layout = printLayout(this.layout(), this.drawn(), this.state.shape());
    const picture = element("canvas", {
      class: "rg-print",
      width: Math.round(3 * layout.width),
      height: Math.round(3 * layout.height),
    });
    const pen = penOf(picture);
    pen.setTransform(3, 0, 0, 3, 0, 0);
    this.draw(pen, layout, 3);
    this.drawMarks(pen, layout);
    this.base.hidden = this.over.hidden = true;
    this.stage.append(picture);
  }

  printed() {
    this.stage.querySelector(".rg-print")?.remove();
    this.base.hidden = this.over.hidden = false;
  }

  /** Crosshair, hovered cell and minimap, over the map. */
  drawOver() {
    const layout = this.layout();
    const pen = penOf(this.over);
    pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    pen.clearRect(0, 0, layout.width, layout.height);
    this.drawMarks(pen, layout);
  }

  /** @param {CanvasRenderingContext2D} pen @param {MapLayout} layout */
  drawMarks(pen, layout) {
    const { state } = this;
    const shape = state.shape();
    const theme = this.colours();
    const view = drawnView(state.view, layout.plot, shape);
    drawCrosshairs(pen, { layout, view, shape, theme, hovered: this.hovered, held: state });
    this.minimap = minimapRect(layout, view, shape);
    const { what, limits } = this.look();
    if (!what) this.minimap = null;
    if (!what || !this.minimap) return;
    const coarse = this.coarse(what, {
      ...limits,
      ...this.paper(theme),
      shape,
      sign: [limits.scale, theme.dark, this.maskOf, "mini"].join(" "),
    });
    drawMinimap(pen, { mini: this.minimap, view, shape, theme, coarse });
  }

  /** @param {Cell | null} cell */
  hover(cell) {
    if (cell?.row === this.hovered?.row && cell?.key === this.hovered?.key) return;
    this.hovered = cell;
    this.drawOver();
    this.sentence.textContent = cell ? this.facts(cell) : this.told;
  }

  /**
   * The sentence of a cell from what is drawn, without asking for anything.
   * @param {Cell} what
   * @param {{ weight: number | null, rank?: number, count?: number | string }} [read]
   */
  facts({ row, key }, read = { weight: null }) {
    const { state } = this;
    const { what } = this.look();
    const call = this.call();
    if (!call) return "";
    /** @type {(BlockSize & {value: number, channel: Channel})|null} */
    let block = null;
    let waiting = false;
    if (what) {
      const plain = { ...what, ranked: false };
      const [i, j] = [Math.floor(row / what.level.queryBlock), Math.floor(key / what.level.keyBlock)];
      const entry = this.store.get(plain, Math.floor(i / TILE), Math.floor(j / TILE));
      waiting = !entry && this.store.awaits(plain, Math.floor(i / TILE), Math.floor(j / TILE));
      if (entry)
        block = { value: entry.values[(i % TILE) * TILE + (j % TILE)], channel: what.channel, ...what.level };
    }
    const exact = block && block.queryBlock === 1 && block.keyBlock === 1 && !Number.isNaN(block.value);
    const known = read.weight === null && exact ? { weight: block?.value ?? NaN } : read;
    const heads = this.heads();
    const rounded = areRounded(this.source, state.t, heads);
    return cellSentence({
      row,
      key,
      call,
      tokens: this.tokens,
      ...known,
      block,
      heads: heads.length,
      aggregate: state.aggregate,
      channel: state.channel,
      rounded,
      waiting,
      forbidden: this.paper(this.colours()).mask.forbids(call, row, key),
    });
  }

  /** Say what is under the crosshair, with its rank. */
  async tell() {
    const { state, source } = this;
    const { t, row, key, aggregate, channel } = state;
    if (this.base.width) this.drawOver();
    if (row === null || key === null || !this.call()) {
      this.told =
        row !== null
          ? "Choose a key as well to read a weight."
          : "Point at the map, or click to hold a cell.";
      this.sentence.textContent = this.told;
      this.sentence.classList.remove("rg-held");
      return;
    }
    this.asked += 1;
    const { asked } = this;
    const read = await readCell(source, { t, heads: this.heads(), row, key, aggregate, channel });
    if (asked !== this.asked) return;
    await this.settled();
    if (asked !== this.asked) return;
    this.told = this.facts({ row, key }, state.hideSink ? { weight: null } : read);
    this.sentence.textContent = this.told;
    this.sentence.classList.add("rg-held");
    say(this.told, this.host);
  }

  /**
   * @param {number} row @param {number} key
   * @returns {Point|null} CSS pixel of the canvas at the centre of the block that shows a cell; null out of sight
   */
  pixel(row, key) {
    const { level } = this.look();
    if (!level) return null;
    const shape = this.state.shape();
    /** @param {number} at @param {number} block @param {number} size */
    const middle = (at, block, size) =>
      (Math.floor(at / block) * block + Math.min(size, (Math.floor(at / block) + 1) * block)) / 2;
    const { plot } = this.layout();
    const { x, y } = pixelOf(
      this.drawn(),
      plot,
      middle(row, level.queryBlock, shape.rows),
      middle(key, level.keyBlock, shape.keys),
    );
    return x >= plot.x && y >= plot.y && x < plot.x + plot.w && y < plot.y + plot.h ? { x, y } : null;
  }

  /** Cells that an arrow key moves by: a block of what is drawn. */
  step() {
    const { queryBlock, keyBlock } = this.look().level ?? { queryBlock: 1, keyBlock: 1 };
    return { rows: queryBlock, keys: keyBlock };
  }

  /** @returns {Promise<void>} when everything in sight is drawn */
  async settled() {
    for (let quiet = 0; quiet < 2; ) {
      await new Promise((resolve) => setTimeout(resolve, 16));
      quiet =
        this.store.pending || this.planned || (this.call() && !this.strips && this.state.shape().rows)
          ? 0
          : quiet + 1;
    }
  }
}
