// What the page's scripts hand to each other, for the type checker alone: no part of the page.

type Source = import("./source.js").Source;
type State = import("./state.js").State;
type MaskTiles = import("./geometry.js").MaskTiles;
type TileStore = import("./tiles.js").TileStore;
type MapView = ReturnType<typeof import("./map.js").mountMap>;
type Shift = { query: number; key: number };

type Channel = "mass" | "max" | "value";
type Direction = "out" | "in";
type Aggregate = "mean" | "max";
type Scale = "log" | "linear" | "power" | "rank";
type AxisKind = "linear" | "log";
/** A call of a trace and a head of it. */
type Head = [c: number, h: number];
type Limits = [low: number, high: number];

interface Shape {
  rows: number;
  keys: number;
}

/** Cells in sight; ends may be fractions. */
interface View {
  q0: number;
  q1: number;
  k0: number;
  k1: number;
}

interface Cell {
  row: number;
  key: number;
}

/** What the crosshair holds. */
interface Held {
  row: number | null;
  key: number | null;
}

interface Point {
  x: number;
  y: number;
}

/** CSS pixels. */
interface Rect extends Point {
  w: number;
  h: number;
}

/** Cells of a block. */
interface BlockSize {
  queryBlock: number;
  keyBlock: number;
}

/** Entropy and distance that heads are kept for. */
interface Brush {
  e0: number;
  e1: number;
  d0: number;
  d1: number;
}

// The document, as documents.py writes it.

interface PageDocument {
  title: string;
  made_with?: { regard?: string; jax?: string };
  exact: "served" | "embedded" | "none";
  traces: Trace[];
  training?: Training | null;
  positions?: PositionRecord[];
  chunks: Record<string, ChunkEntry>;
  notes?: string[];
  /** Heads that were cut in the second trace. */
  cut?: Head[];
  /** The address of a page that was saved. */
  start?: string;
}

interface ChunkEntry {
  dtype: "u8" | "u16" | "i32" | "f16" | "f32" | "json";
  shape: number[];
  code: "plain" | "log8" | "linear8";
  bytes: number;
  deflate?: boolean;
  delta?: boolean;
  low?: number | number[];
  high?: number | number[];
}

/** A decoded chunk. */
interface Numbers {
  shape: number[];
  values: Float32Array | Int32Array | Uint8Array;
}

interface Trace {
  title: string;
  model: string | null;
  sequences: Sequence[];
  calls: Call[];
  /** Chunks by name: what each layer would predict, by numbers of `texts`, and what heads add to the target. */
  predictions?: Record<"texts" | "tokens" | "probabilities" | "targets", string> & { contributions?: string };
}

interface Sequence {
  tokens: string;
  count: number;
  kind: string;
  patch_grid: [rows: number, columns: number] | null;
  first_patch: number | null;
  picture: string | null;
}

interface Call extends Shape {
  name: string;
  layer: number;
  kind: string;
  heads: number;
  query_offset: number;
  key_offset: number;
  query_sequence: number | null;
  key_sequence: number | null;
  /** The self-attention whose outputs these are queries of; -1: none. Left out where a rollout makes no sense. */
  below?: number;
  sinks?: boolean;
  mask_picture: string | null;
  /** Bits along the keys: pairs that may attend; null: all. */
  permitted?: string | null;
  tile_rows: number;
  tile_keys: number;
  borders?: number[] | null;
  window?: [before: number, after: number] | null;
  /** Keys that a query may attend to before and after its own. */
  reach?: [before: number | null, after: number | null];
  trust?: (number | null)[];
  means?: Record<string, (number | null)[]>;
  labels?: Label[][];
  row_stats?: string[];
  head: HeadRecord[];
}

interface Label {
  name: string;
  value: number;
  threshold: number;
  /** What even weights would give, and over how many queries. */
  chance: number;
  rows: number;
}

interface HeadRecord {
  weights: string | null;
  /** What a weight of 1 on each key adds; only beside weights. */
  value_norms?: string;
  levels: StoredLevel[];
  row_stats: string;
  row_bin: number;
  key_mass: string;
  key_bin: number;
  distance_mass: string;
  last_row: string | null;
  last_row_bin: number;
  top_keys: string | null;
  top_weights: string | null;
  /** Scaled queries and keys, where they are few. */
  query?: string | null;
  key?: string | null;
}

interface StoredLevel {
  /** Never there. */
  value?: null;
  query_block: number;
  key_block: number;
  mass: string;
  max: string | null;
  rows: string;
}

/** A curve, table or split of positions; which fields it has follows from its kind. */
interface PositionRecord {
  kind: "rotary" | "bias" | "table" | "split";
  name: string;
  calls?: number[];
  // biome-ignore lint/suspicious/noExplicitAny: which fields there are follows from the kind
  [field: string]: any;
}

interface Training {
  title?: string;
  curves?: { name: string; unit: string | null; split: string | null; points: string }[];
  maps?: { name: string; unit: string | null; rows: string[]; steps: number[]; values: string }[];
}

// Numbers on their way to a picture.

/** All blocks of one size. */
interface Blocks {
  values: Float32Array;
  I: number;
  J: number;
}

/** Blocks under a view; row0 and column0 count blocks. */
interface Excerpt extends BlockSize {
  values: Float32Array;
  rows: number;
  columns: number;
  row0: number;
  column0: number;
}

/** What the map shows, as numbers. */
interface MapExcerpt extends Excerpt {
  channel: Channel;
  heads: Head[];
  exact: boolean;
}

/** Weights of a query or on a key, or what is known of them by bins. */
interface Line {
  values: Float32Array;
  exact: boolean;
  bin: number;
  of: "weights" | "largest" | "mass";
}

interface Strips {
  entropy: Float32Array;
  keyMass: Float32Array;
  rowBin: number;
  keyBin: number;
}

/** Which tiles are drawn: of which heads, in which blocks. */
interface TileRequest {
  t: number;
  heads: Head[];
  level: BlockSize;
  channel: Channel;
  aggregate: Aggregate;
  hideSink: boolean;
  ranked: boolean;
  columns: number;
}

interface Tile {
  values: Float32Array | null;
  none?: boolean;
  canvas: HTMLCanvasElement | null;
  painted: string;
  /** The last picture that had it. */
  picture: number;
  /** While it is on its way. */
  end: AbortController | null;
}

/** A tile that has arrived. */
interface KnownTile extends Tile {
  values: Float32Array;
}

interface ColourLimits {
  scale: Scale;
  low: number;
  high: number;
}

interface TileLook extends ColourLimits {
  table: Uint8Array;
  none: number[];
  level: BlockSize;
  mask: Pick<MaskTiles, "of">;
  isEmpty?: (q0: number, q1: number) => boolean;
  shape: Shape;
}

/** `sign` names the look. */
interface SignedLook extends TileLook {
  sign: string;
}

interface MapLayout {
  plot: Rect;
  strip: number;
  bottom: number;
  below: boolean;
  width: number;
  height: number;
  small: boolean;
  labels: boolean;
}

interface MapTheme {
  panel: string;
  ink: string;
  muted: string;
  line: string;
  well: string;
  hatch: string;
  grid: string;
  border: string;
  cross: string;
  entropy: string;
  keymass: string;
  dark: boolean;
}

/** What every layer of the map is drawn with. */
interface MapFrame {
  layout: MapLayout;
  view: View;
  shape: Shape;
  theme: MapTheme;
}

interface CoarseMap {
  level: BlockSize;
  canvas: HTMLCanvasElement;
}

interface AtlasLayout {
  left: number;
  top: number;
  columns: number;
  rows: number;
  size: number;
  gap: number;
  width: number;
  height: number;
  model: boolean;
}

/** How thumbnails and colour bars are coloured. */
interface Paper {
  table: Uint8Array;
  none: number[];
  dark: boolean;
}

interface HeatLook {
  kind?: "sequential" | "diverging";
  scale?: Scale;
  low: number;
  high: number;
  dark?: boolean;
}

/** Blocks as pixels, and the share of the plot that they are drawn in. */
interface CompareLayer {
  excerpt: Excerpt;
  picture: HTMLCanvasElement;
  from?: number;
  to?: number;
}

interface ComparePicture {
  layers: CompareLayer[];
  shape: Shape & { queryOffset: number; keyOffset: number };
  /** The numbers of a cell, in words. */
  read: (cell: Cell) => string;
  /** From the cell that is held to the one shown here, and back; left out where they are the same. */
  ofHeld?: (cell: Cell) => Cell | null;
  toHeld?: (cell: Cell) => Cell | null;
}

// The text of a call.

/** One side of a call: who asks or who is read. */
interface Side {
  tokens: string[];
  kind: string;
  about: Sequence | null;
  size: number;
  offset: number;
  tokenAt: (n: number) => number;
  indexAt: (token: number) => number;
  textAt: (n: number) => string;
}

interface Sides {
  same: boolean;
  query: Side;
  key: Side;
}

interface Marks {
  chosen: number | null;
  weights: Float32Array | null;
  largest: number;
  targets: Map<number, number>;
  matches: Set<number>;
  arcs: boolean;
}

interface Pane {
  node: HTMLElement;
  goTo: (token: number) => void;
  show: (marks: Marks) => void;
}

interface Edge extends Cell {
  weight: number;
  distance: number;
  score: number;
}

/** What a head of a layer passes from a key to a query, towards one prediction. */
interface PathEdge {
  call: number;
  layer: number;
  head: number;
  query: number;
  key: number;
  total: number;
  direct: number | null;
}

/** "Heads that read ...": texts of tokens, a distance, a label; "" for any. */
interface HeadQuestion {
  query: string;
  key: string;
  offset: string;
  label: string;
}

interface FoundHead {
  c: number;
  h: number;
  weight: number;
  /** Pairs, or queries that the label stands on. */
  pairs: number;
}

// Plots.

interface Axis {
  at: (value: number) => number;
  invert: (pixel: number) => number;
  ticks: number[];
}

type Tick = [value: number, text: string];

interface Marker {
  x: number;
  label: string;
}

interface Table {
  head: string[];
  rows: (string | number)[][];
}

/** What every plot has. */
interface PlotSpec {
  title: string;
  description?: string;
  note?: string;
  xLabel: string;
  yLabel: string;
  xTicks?: Tick[];
  yTicks?: Tick[];
  /** No grid. */
  bare?: boolean;
  xText?: (x: number) => string;
  markers?: Marker[];
  height?: number;
  table?: Table;
  series?: Series[];
}

interface Series {
  name: string;
  /** Rises. */
  x: ArrayLike<number>;
  y: ArrayLike<number>;
  /** A faint line below. */
  raw?: ArrayLike<number>;
  color?: number;
  dashed?: boolean;
}

interface LineSpec extends PlotSpec {
  series: Series[];
  xScale?: AxisKind;
  yScale?: AxisKind;
  low?: number;
  high?: number;
  stepped?: boolean;
  onPick?: (x: number) => void;
}

interface HeatSpec extends PlotSpec {
  values: ArrayLike<number>;
  rows: number;
  columns: number;
  kind?: "sequential" | "diverging";
  low: number;
  high: number;
  unit?: string;
  yText?: (row: number) => string;
  left?: number;
  square?: boolean;
  onPick?: (row: number, column: number) => void;
}

interface PlotFrame<Spec extends PlotSpec> {
  figure: HTMLElement;
  body: HTMLElement;
  read: HTMLElement;
  legend: HTMLElement;
  width: number;
  update: (spec: Spec) => void;
  redraw: () => void;
}

// Figures to save.

interface Figure {
  excerpt: MapExcerpt;
  /** Its values, -Infinity where nothing may attend. */
  drawn: Float32Array;
  remark: string;
  scale: Scale;
  limits: Limits;
  title: string;
  labels: { query: (n: number) => string; key: (n: number) => string } | null;
  tokens: { query: (n: number) => string; key: (n: number) => string } | null;
  offsets: Shift;
  /** What the colours measure. */
  noun: string;
}

/** How a figure is wanted: 0 inches is the size of a screen. */
interface FigureLook {
  inches: number;
  dark: boolean;
  titled: boolean;
}

interface FigureBox extends Point {
  width: number;
  height: number;
}

interface FigureText extends Point {
  text: string;
  size: number;
  weight?: number;
  anchor?: "start" | "middle" | "end";
  /** Degrees. */
  turn?: number;
  soft?: boolean;
}

type Four = [number, number, number, number];

interface FigureLayout {
  width: number;
  height: number;
  inches: number;
  /** Colours of the ground, letters, softer letters and lines. */
  inks: string[];
  plot: FigureBox;
  bar: FigureBox;
  texts: FigureText[];
  lines: Four[];
  frames: Four[];
}
