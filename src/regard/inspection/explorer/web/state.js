// What is looked at: one record that every view reads and writes, kept in the address so that it can be shared.

/** Tabs in their order. */
export const TABS = ["attention", "positions", "compare", "training"];
const SCALES = ["log", "linear", "power"];

const stateWhole = (value, most) => {
  const number = typeof value === "string" ? (/^\d{1,12}$/.test(value) ? Number(value) : NaN) : value;
  return Number.isInteger(number) && number >= 0 ? Math.min(number, Math.max(0, most)) : undefined;
};
const stateOneOf = (choices) => (value) => (choices.includes(value) ? value : undefined);
const stateFlag = (value) => ({ true: true, false: false, 1: true, 0: false })[String(value)];
const stateName = (value) => (/^[A-Za-z0-9_.:-]{0,64}$/.test(String(value)) ? String(value) : undefined);

// By field: its name in the address (null: not kept there), what it starts as, and what a value means; `undefined` refuses it.
const STATE_FIELDS = {
  tab: { hash: "tab", initial: "attention", clean: stateOneOf(TABS) },
  channel: { hash: "ch", initial: "mass", clean: stateOneOf(["mass", "max"]) },
  scale: { hash: "scale", initial: "log", clean: stateOneOf(SCALES) },
  rowRank: { hash: "rank", initial: false, clean: stateFlag },
  hideSink: { hash: "sink", initial: false, clean: stateFlag },
  aggregate: { hash: "agg", initial: "mean", clean: stateOneOf(["mean", "max"]) },
  direction: { hash: "dir", initial: "out", clean: stateOneOf(["out", "in"]) },
  sort: { hash: "sort", initial: "model", clean: stateName },
  show: { hash: "show", initial: "mass", clean: stateName },
  versus: { hash: "versus", initial: false, clean: stateFlag },
  borders: { hash: null, initial: true, clean: stateFlag },
  band: { hash: null, initial: false, clean: stateFlag },
  tiles: { hash: null, initial: false, clean: stateFlag },
  brush: { hash: null, initial: null, clean: (value) => value },
};

/**
 * Fields (all may be set): t trace, c call, h head, selection [[c, h], ...], view {q0, q1, k0, k1} in cells, row, key (null:
 * none), and those of STATE_FIELDS. A view may add its own with `declare`.
 * Events: "change" (detail: Set of names); commands sent by `ask`, under their own names: "find", "next-edge",
 * "previous-edge", "export", "fit", "zoom-in", "zoom-out", "clear", "help", "theme".
 */
export class State extends EventTarget {
  /**
   * @param {Array<Array<{heads: number, rows: number, keys: number}>>} shapes calls of every trace
   * @param {{address?: boolean}} [options] address: follow and write `location.hash`
   */
  constructor(shapes, { address = false } = {}) {
    super();
    this.shapes = shapes;
    this.fields = { ...STATE_FIELDS };
    this.views = {};
    this.address = false;
    this.t = 0;
    this.c = 0;
    this.h = 0;
    this.row = null;
    this.key = null;
    for (const [name, field] of Object.entries(this.fields)) this[name] = field.initial;
    this.selection = [[0, 0]];
    this.view = this.whole();
    if (address) this.followAddress();
  }

  /** @returns {{heads: number, rows: number, keys: number}} shape of the call looked at */
  shape() {
    return this.shapes[this.t]?.[this.c] ?? { heads: 0, rows: 0, keys: 0 };
  }

  /** @returns {{q0: number, q1: number, k0: number, k1: number}} the view that shows every cell */
  whole() {
    const { rows, keys } = this.shape();
    return { q0: 0, q1: rows, k0: 0, k1: keys };
  }

  /**
   * A field of one view's own, kept in the address too.
   * @param {string} name
   * @param {{initial: any, hash?: string|null, clean: (value: any) => any}} field `clean` gets text when it comes from the
   *   address and answers `undefined` to refuse
   */
  declare(name, { initial, hash = null, clean }) {
    if (name in this.fields) return;
    this.fields[name] = { hash, initial, clean };
    this[name] = initial;
    // Only this field: what was changed a moment ago may not be in the address yet.
    const said = this.address && hash ? new URLSearchParams(location.hash.slice(1)).get(hash) : null;
    if (said !== null) this[name] = clean(said) ?? initial;
  }

  /**
   * Change fields; what makes no sense is left as it was, numbers are brought into range.
   * @param {Record<string, any>} changes
   * @returns {Set<string>} the names that changed
   */
  set(changes) {
    const changed = new Set();
    const put = (name, value) => {
      if (value === undefined || stateSame(this[name], value)) return;
      this[name] = value;
      changed.add(name);
    };
    const before = [this.t, this.c];
    if ("t" in changes) put("t", stateWhole(changes.t, this.shapes.length - 1));
    const calls = this.shapes[this.t] ?? [];
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
    const [old, now] = [this.shapes[before[0]]?.[before[1]], this.shape()];
    const resized = old && (old.rows !== now.rows || old.keys !== now.keys);
    if ("view" in changes || resized) put("view", this.cleanView("view" in changes ? changes.view : null));
    for (const [name, most] of [
      ["row", now.rows - 1],
      ["key", now.keys - 1],
    ]) {
      const value = name in changes ? changes[name] : this[name];
      put(name, value === null || most < 0 ? null : stateWhole(value, most));
    }
    for (const [name, value] of Object.entries(changes)) {
      if (name in this.fields) put(name, this.fields[name].clean(value));
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
    const own = Object.fromEntries(Object.keys(this.fields).map((name) => [name, this[name]]));
    return structuredClone({ t, c, h, row, key, selection: this.selection, view: this.view, ...own });
  }

  cleanSelection(heads) {
    if (!Array.isArray(heads)) return undefined;
    const calls = this.shapes[this.t] ?? [];
    const kept = heads.filter(
      ([c, h]) =>
        Number.isInteger(c) && Number.isInteger(h) && c >= 0 && h >= 0 && h < (calls[c]?.heads ?? 0),
    );
    const once = [...new Map(kept.map((head) => [head.join("."), head])).values()].slice(0, 1024);
    return once.length ? once : undefined;
  }

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
    const parts = [];
    const add = (name, value) =>
      parts.push(`${name}=${encodeURIComponent(value).replaceAll("%2C", ",").replaceAll("%3A", ":")}`);
    if (this.t) add("t", this.t);
    add("l", this.c);
    add("h", this.h);
    if (this.selection.length > 1)
      add(
        "sel",
        this.selection
          .slice(0, 128)
          .map((head) => head.join("."))
          .join(","),
      );
    const { q0, q1, k0, k1 } = this.view;
    if (!stateSame(this.view, this.whole())) {
      const short = (number) => String(Number(number.toFixed(2)));
      add("q", `${short(q0)}-${short(q1)}`);
      add("k", `${short(k0)}-${short(k1)}`);
    }
    if (this.row !== null) add("row", this.row);
    if (this.key !== null) add("key", this.key);
    for (const [name, field] of Object.entries(this.fields)) {
      if (!field.hash || stateSame(this[name], field.initial)) continue;
      add(field.hash, typeof this[name] === "boolean" ? Number(this[name]) : this[name]);
    }
    return parts.join("&");
  }

  /** Take what makes sense from an address part; fields it does not name go back to how they start. @param {string} hash */
  fromHash(hash) {
    const said = new URLSearchParams(String(hash).replace(/^#/, "").slice(0, 8192));
    const range = (text) =>
      /^(\d{1,12}(?:\.\d{1,6})?)-(\d{1,12}(?:\.\d{1,6})?)$/
        .exec(text ?? "")
        ?.slice(1)
        .map(Number);
    const changes = {
      t: said.get("t") ?? "0",
      c: said.get("l") ?? "0",
      h: said.get("h") ?? "0",
      row: said.get("row"),
      key: said.get("key"),
    };
    for (const [name, field] of Object.entries(this.fields)) {
      if (field.hash) changes[name] = field.clean(said.get(field.hash) ?? field.initial) ?? field.initial;
    }
    const heads = (said.get("sel") ?? "").split(",").filter((head) => /^\d{1,4}\.\d{1,4}$/.test(head));
    this.set(changes);
    const selection = heads.length ? heads.map((head) => head.split(".").map(Number)) : [[this.c, this.h]];
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
    if (hash.length > 1) {
      this.reading = true;
      this.fromHash(hash);
      this.reading = false;
    } else if (this.start) this.fromHash(this.start);
  }

  /** Steps that a reader would go back over become entries of the history; moving about only renews the last one. */
  writeAddress(changed) {
    if (!this.address || this.reading) return;
    const step = ["t", "c", "h", "tab", "channel", "selection"].some((name) => changed.has(name));
    const hash = `#${this.toHash()}`;
    if (hash === this.lastHash) return;
    this.lastHash = hash;
    try {
      if (step) location.hash = hash;
      else {
        clearTimeout(this.renewal);
        this.renewal = setTimeout(() => {
          try {
            history.replaceState(null, "", this.lastHash);
          } catch {
            this.address = false;
          }
        }, 120);
      }
    } catch {
      this.address = false; // a sandboxed frame may refuse: the page then works without an address
    }
  }
}

function stateRange(from, to, most) {
  const [low, high] = [Math.max(0, Math.min(from, to)), Math.min(most, Math.max(from, to))];
  if (most <= 1 || high - low >= most) return [0, most];
  if (high - low >= 1) return [low, high];
  const middle = Math.min(Math.max((low + high) / 2, 0.5), most - 0.5);
  return [middle - 0.5, middle + 0.5];
}

function stateSame(one, other) {
  return (
    one === other ||
    (typeof one === "object" && typeof other === "object" && JSON.stringify(one) === JSON.stringify(other))
  );
}
