import { readNotes, writeNotes } from "./head_notes.js";
import { headCode, layerNumber, layerNumbers } from "./passages.js";
import { STATE_FIELDS, stateWhole } from "./state_fields.js";

// What is looked at: one record that every view reads and writes, kept in the address so that it can be shared.

/**
 * Events: "change" (detail: Set of names); commands sent by `ask`, under their own names: "find", "next-edge",
 * "previous-edge", "export", "fit", "zoom-in", "zoom-out", "clear", "help", "theme", "print", "printed".
 */
export class State extends EventTarget {
  /** Trace, call and head. */
  t = 0;
  c = 0;
  h = 0;
  /** @type {number|null} */
  row = null;
  /** @type {number|null} */
  key = null;
  /** @type {Head[]} */
  selection = [[0, 0]];
  tab = "attention";
  /** @type {Channel} */
  channel = "mass";
  /** @type {"log" | "linear" | "power"} */
  scale = "log";
  /** Ends of the colours: "all", "head", or "low:high". */
  range = "all";
  rowRank = false;
  hideSink = false;
  /** Whether words show what reaches the chosen query through all layers below, not what one head reads. */
  rollout = false;
  /** @type {Aggregate} */
  aggregate = "mean";
  /** @type {Direction} */
  direction = "out";
  /** A number of a head, "model", or a number after "-": smallest first. */
  sort = "model";
  show = "mass";
  versus = false;
  /** Whether the atlas colours each head by its own weights. */
  contrast = true;
  borders = true;
  band = false;
  tiles = false;
  /** @type {Brush|null} */
  brush = null;
  /** The trace compared with. */
  other = 1;
  compareMode = "swipe";
  /** Queries whose lines are drawn together; none: all in sight. */
  asked = "";
  /** First query and key in sight beside the lines. */
  at = "0-0";
  /** A question for heads: query, key, offset and label. */
  find = "";
  /** Notes on heads, as JSON. */
  notes = "";
  /** Folded panes: the map comes first. */
  fold = "profiles";
  /** Of heads, text and profiles, in pixels. */
  sizes = "0-0-0";
  /** @type {{map?: MapView}} */
  views = {};
  /** The address of a page as it opens. */
  start = "";
  /** Whether somebody chose the head looked at. */
  chosen = false;
  /** Whether the address is written. */
  address = false;
  reading = false;
  lastHash = "";
  renewal = 0;

  /**
   * @param {Array<Array<Shape & {heads: number, layer?: number}>>} shapes calls of every trace
   * @param {{address?: boolean}} [options] address: follow and write `location.hash`
   */
  constructor(shapes, { address = false } = {}) {
    super();
    this.shapes = shapes;
    this.initial = { ...stateFields(this) };
    this.view = this.whole();
    if (address) this.followAddress();
  }

  /** @returns {Shape & {heads: number}} shape of the call looked at */
  shape() {
    return this.shapes[this.t]?.[this.c] ?? { heads: 0, rows: 0, keys: 0 };
  }

  /** @returns {Array<Shape & {heads: number, layer?: number}>} those of the calls of the trace looked at */
  calls() {
    return this.shapes[this.t] ?? [];
  }

  /** @returns {View} the view that shows every cell */
  whole() {
    const { rows, keys } = this.shape();
    return { q0: 0, q1: rows, k0: 0, k1: keys };
  }

  /**
   * Change fields; what makes no sense is left as it was, numbers are brought into range.
   * @param {Record<string, any>} changes
   * @returns {Set<string>} the names that changed
   */
  set(changes) {
    /** @type {Set<string>} */
    const changed = new Set();
    const own = stateFields(this);
    /** @param {string} name @param {any} value */
    const put = (name, value) => {
      if (value === undefined || stateSame(own[name], value)) return;
      own[name] = value;
      changed.add(name);
    };
    const before = [this.t, this.c];
    if ("t" in changes) put("t", stateWhole(changes.t, this.shapes.length - 1));
    const calls = this.calls();
    put("c", stateWhole(changes.c, calls.length - 1) ?? stateWhole(this.c, calls.length - 1));
    put("h", stateWhole(changes.h, this.shape().heads - 1) ?? stateWhole(this.h, this.shape().heads - 1));
    const moved = ["t", "c", "h"].some((name) => changed.has(name));
    const selection =
      "selection" in changes
        ? this.cleanSelection(changes.selection)
        : moved
          ? [[this.c, this.h]]
          : undefined;
    put("selection", selection);
    this.chosen ||= changed.has("c") || changed.has("h");
    const [old, now] = [this.shapes[before[0]]?.[before[1]], this.shape()];
    const resized = old && (old.rows !== now.rows || old.keys !== now.keys);
    if ("view" in changes || resized) put("view", this.cleanView("view" in changes ? changes.view : null));
    for (const [name, most] of Object.entries({ row: now.rows - 1, key: now.keys - 1 })) {
      const value = name in changes ? changes[name] : own[name];
      put(name, value === null || most < 0 ? null : stateWhole(value, most));
    }
    for (const [name, value] of Object.entries(changes)) {
      if (name in STATE_FIELDS) put(name, STATE_FIELDS[name].clean(value, this));
    }
    if (changed.size) {
      this.dispatchEvent(new CustomEvent("change", { detail: changed }));
      this.writeAddress(changed);
    }
    return changed;
  }

  /**
   * Call back whenever one of the fields changes.
   * @param {string|string[]} names
   * @param {(state: State, changed: Set<string>) => void} callback
   * @returns {() => void} stops it
   */
  on(names, callback) {
    const wanted = [names].flat();
    /** @param {any} event */
    const listener = (event) => {
      if (wanted.some((name) => event.detail.has(name))) callback(this, event.detail);
    };
    this.addEventListener("change", listener);
    return () => this.removeEventListener("change", listener);
  }

  /** Send a command to whichever view answers it. @param {string} command @param {any} [detail] */
  ask(command, detail = null) {
    this.dispatchEvent(new CustomEvent(command, { detail }));
  }

  /** @returns {Record<string, any>} a copy without behaviour */
  plain() {
    const { t, c, h, row, key } = this;
    const fields = stateFields(this);
    const own = Object.fromEntries(Object.keys(STATE_FIELDS).map((name) => [name, fields[name]]));
    return structuredClone({ t, c, h, row, key, selection: this.selection, view: this.view, ...own });
  }

  /**
   * @param {any} heads
   * @returns {Head[] | undefined}
   */
  cleanSelection(heads) {
    if (!Array.isArray(heads)) return undefined;
    const calls = this.calls();
    const kept = heads.filter(
      ([c, h]) =>
        Number.isInteger(c) && Number.isInteger(h) && c >= 0 && h >= 0 && h < (calls[c]?.heads ?? 0),
    );
    const once = [...new Map(kept.map((head) => [head.join("."), head])).values()].slice(0, 1024);
    return once.length ? once : undefined;
  }

  /**
   * @param {View | null} view
   * @returns {View | undefined}
   */
  cleanView(view) {
    const whole = this.whole();
    if (!view) return whole;
    const ends = [view.q0, view.q1, view.k0, view.k1];
    if (!ends.every(Number.isFinite)) return undefined;
    const [q0, q1] = stateRange(view.q0, view.q1, whole.q1);
    const [k0, k1] = stateRange(view.k0, view.k1, whole.k1);
    return { q0, q1, k0, k1 };
  }

  /** @returns {string} the address part, without the sharp */
  toHash() {
    /** @type {string[]} */
    const parts = [];
    const own = stateFields(this);
    /** @param {string} name @param {string | number} value */
    const add = (name, value) =>
      parts.push(`${name}=${encodeURIComponent(value).replaceAll("%2C", ",").replaceAll("%3A", ":")}`);
    if (this.t) add("t", this.t);
    add("l", layerNumber(this.calls(), this.c));
    add("h", this.h);
    if (this.selection.length > 1)
      add(
        "sel",
        this.selection
          .slice(0, 128)
          .map((head) => headCode(this.calls(), head))
          .join(","),
      );
    const { q0, q1, k0, k1 } = this.view;
    if (!stateSame(this.view, this.whole())) {
      /** @param {number} number */
      const short = (number) => String(Number(number.toFixed(2)));
      add("q", `${short(q0)}-${short(q1)}`);
      add("k", `${short(k0)}-${short(k1)}`);
    }
    if (this.row !== null) add("row", this.row);
    if (this.key !== null) add("key", this.key);
    for (const [name, { hash }] of Object.entries(STATE_FIELDS)) {
      if (!hash || stateSame(own[name], this.initial[name])) continue;
      add(hash, typeof own[name] === "boolean" ? Number(own[name]) : own[name]);
    }
    return parts.join("&");
  }

  /** Take what makes sense from an address part; fields it does not name go back to how they start. @param {string} hash */
  fromHash(hash) {
    const said = new URLSearchParams(String(hash).replace(/^#/, "").slice(0, 65536));
    /** @param {string | null} text */
    const range = (text) =>
      /^(\d{1,12}(?:\.\d{1,6})?)-(\d{1,12}(?:\.\d{1,6})?)$/
        .exec(text ?? "")
        ?.slice(1)
        .map(Number);
    const t = said.get("t") ?? "0",
      layer = said.get("l") ?? "0",
      layers = layerNumbers(this.shapes[stateWhole(t, this.shapes.length - 1) ?? this.t] ?? []);
    /** The call of a layer; -1: none. @param {string} text */
    const callOf = (text) => layers.indexOf(Number(text));
    /** @type {Record<string, any>} */
    const changes = {
      t,
      // What is no layer is brought into range.
      c: /^\d+$/.test(layer) && callOf(layer) >= 0 ? callOf(layer) : layer,
      h: said.get("h") ?? "0",
      row: said.get("row"),
      key: said.get("key"),
    };
    for (const [name, { hash, clean }] of Object.entries(STATE_FIELDS)) {
      const text = hash && said.get(hash);
      if (hash) changes[name] = (text === null ? undefined : clean(text, this)) ?? this.initial[name];
    }
    // An older address of the history takes no note away.
    changes.notes = writeNotes({ ...readNotes(changes.notes), ...readNotes(this.notes) });
    const heads = (said.get("sel") ?? "").split(",").filter((head) => /^\d{1,4}\.\d{1,4}$/.test(head));
    this.set(changes);
    const selection = heads.length
      ? heads.map((head) => head.split(".")).map(([l, h]) => [callOf(l), Number(h)])
      : [[this.c, this.h]];
    const [q, k] = [range(said.get("q")), range(said.get("k"))];
    const { q1, k1 } = this.whole();
    const view = q || k ? { q0: q?.[0] ?? 0, q1: q?.[1] ?? q1, k0: k?.[0] ?? 0, k1: k?.[1] ?? k1 } : null;
    this.set({ selection, view });
  }

  /** Follow `location.hash` from now on. */
  followAddress() {
    this.address = true;
    this.readAddress();
    addEventListener("hashchange", () => {
      if (location.hash !== this.lastHash) this.readAddress();
    });
  }

  readAddress() {
    const hash = typeof location === "undefined" ? "" : location.hash;
    this.lastHash = hash;
    this.chosen ||= namesHead(hash);
    if (hash.length > 1) {
      this.reading = true;
      this.fromHash(hash);
      this.reading = false;
    } else if (this.start) this.fromHash(this.start);
  }

  /**
   * Steps that a reader would go back over become entries of the history; moving about only renews the last one.
   * @param {Set<string>} changed
   */
  writeAddress(changed) {
    if (!this.address || this.reading) return;
    const step = ["tab", "channel"].some((name) => changed.has(name));
    const hash = `#${this.toHash()}`;
    if (hash === this.lastHash) return;
    clearTimeout(this.renewal);
    if (step) {
      // What was seen last before the step is where going back leads.
      this.renewAddress();
      this.lastHash = hash;
      // Not by `location.hash`: its event comes later, and would undo what was done in between.
      this.tryAddress(() => history.pushState(null, "", hash));
    } else {
      this.lastHash = hash;
      this.renewal = setTimeout(() => this.renewAddress(), 120);
    }
  }

  renewAddress() {
    if (this.lastHash !== location.hash)
      this.tryAddress(() => history.replaceState(null, "", this.lastHash || location.pathname));
  }

  /** A sandboxed frame may refuse: the page then works without an address. @param {() => void} write */
  tryAddress(write) {
    try {
      write();
    } catch {
      this.address = false;
    }
  }
}

/** Whether an address part names a layer or a head. @param {string} hash */
export const namesHead = (hash) => /(^|[#&])[lh]=/.test(hash);

/**
 * The fields of a state, by name.
 * @param {any} state
 * @returns {Record<string, any>}
 */
function stateFields(state) {
  return state;
}

/**
 * @param {number} from @param {number} to @param {number} most
 * @returns {Limits}
 */
function stateRange(from, to, most) {
  const [low, high] = [Math.max(0, Math.min(from, to)), Math.min(most, Math.max(from, to))];
  if (most <= 1 || high - low >= most) return [0, most];
  if (high - low >= 1) return [low, high];
  const middle = Math.min(Math.max((low + high) / 2, 0.5), most - 0.5);
  return [middle - 0.5, middle + 0.5];
}

/** @param {any} one @param {any} other */
function stateSame(one, other) {
  return (
    one === other ||
    (typeof one === "object" && typeof other === "object" && JSON.stringify(one) === JSON.stringify(other))
  );
}
