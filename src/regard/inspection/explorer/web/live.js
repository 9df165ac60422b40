// The live page: a text that is typed is read by the model, and shown by an explorer in a frame.

import { Connection, pause } from "./connection.js";
import { element } from "./dom.js";

/** Milliseconds after the last key before a text is read. */
const LIVE_WAIT = 300;

/** The latest of several tasks: it begins when nothing new has come for a while, and those before it end. */
export class Latest {
  /** @type {AbortController|null} */
  running = null;

  /** @param {(signal: AbortSignal) => Promise<void>} task @param {number} wait milliseconds */
  constructor(task, wait) {
    this.task = task;
    this.wait = wait;
  }

  /** End what runs, and begin anew after the wait, or at once. @param {number} [wait] */
  async plan(wait = this.wait) {
    this.running?.abort();
    this.running = new AbortController();
    const { signal } = this.running;
    try {
      await pause(wait, signal);
      await this.task(signal);
    } catch (error) {
      if (!signal.aborted) throw error;
    }
  }
}

/** Milliseconds after which a link has what was looked at. */
const LIVE_KEEP = 300;
const LIVE_READING = "reading … the first text of a length takes longer: a program is made for it";

/**
 * Where the next explorer opens: as the last one stood, and on the difference as soon as there are two texts.
 * @param {string} last address part of the last explorer @param {boolean} compared whether it showed two texts
 * @param {boolean} compares whether the next one does
 */
export function nextPlace(last, compared, compares) {
  const said = new URLSearchParams(last.replace(/^#/, ""));
  if (compares && !compared) {
    said.set("tab", "compare");
    said.set("cmp", "difference");
  }
  if (compared && !compares) for (const name of ["tab", "cmp", "t", "b", "versus"]) said.delete(name);
  return String(said) && `#${said}`;
}

/**
 * Build the page around its settings.
 * @param {HTMLElement} root @param {Connection} connection @param {number} [wait] milliseconds
 */
export function mountLive(root, connection, wait = LIVE_WAIT) {
  const settings = JSON.parse(root.querySelector("#live-settings")?.textContent ?? "{}");
  const said = new URLSearchParams(location.hash.slice(1));
  /** @param {string} name @param {string} value */
  const box = (name, value) =>
    element("textarea", {
      rows: 2,
      spellcheck: "false",
      "aria-label": name,
      value,
      on: { input: () => latest.plan() },
    });
  const text = box("Text", said.get("text") ?? settings.text ?? "");
  const changed = box("Changed text", said.get("changed") ?? "");
  const other = element(
    "label",
    { hidden: !said.has("changed") },
    element("span", {}, "B, changed"),
    changed,
  );
  const press = () => {
    other.hidden = !other.hidden;
    if (!other.hidden) {
      changed.value = text.value;
      changed.focus();
    }
    tell();
    latest.plan(0);
  };
  const change = element("button", { type: "button", on: { click: press } });
  const status = element("span", { role: "status" });
  const failure = element("span", { role: "alert", class: "rg-poor", hidden: true });
  const lost = element("span", { role: "alert", class: "rg-poor", hidden: true });
  const frames = element("div", { class: "live-frames" });
  const name = element("span", {}, "Text");
  root.append(
    element(
      "form",
      {
        class: "live-bar",
        "aria-label": "What the model reads",
        on: { submit: (/** @type {Event} */ event) => event.preventDefault() },
      },
      element("label", {}, name, text),
      other,
      change,
      element(
        "div",
        { class: "live-told" },
        status,
        failure,
        lost,
        element("h1", { text: root.dataset.title ?? "" }),
      ),
    ),
    frames,
  );
  /** @type {HTMLIFrameElement|null} */
  let shown = null;
  // What a link keeps of the explorer, beside the texts.
  const first = said.get("view") ?? "";
  let compared = Boolean(first) && said.has("changed");
  /** @param {HTMLIFrameElement} frame */
  const placeOf = (frame) => frame.contentWindow?.location.hash ?? "";
  const keep = () => {
    const texts = { text: text.value, ...(other.hidden ? {} : { changed: changed.value }) };
    const view = (shown ? placeOf(shown) : first).replace(/^#/, "");
    const kept = new URLSearchParams(view ? { ...texts, view } : texts);
    if (`#${kept}` !== location.hash) history.replaceState(null, "", `#${kept}`);
  };
  setInterval(keep, LIVE_KEEP);

  const tell = () => {
    name.textContent = other.hidden ? "Text" : "A";
    change.textContent = other.hidden ? "Change a word" : "Compare no more";
  };
  /** @param {string} [message] */
  const fail = (message = "") => {
    failure.textContent = message;
    failure.hidden = !message;
    if (message) status.textContent = "";
  };
  /**
   * Open an explorer behind the one that is shown, which it replaces once it is drawn.
   * @param {string} view @param {boolean} compares @param {AbortSignal} signal
   */
  const open = async (view, compares, signal) => {
    const place = nextPlace(shown ? placeOf(shown) : first, compared, compares);
    const frame = element("iframe", {
      title: "Attention of the text",
      src: view + place,
      "data-waiting": true,
    });
    signal.addEventListener("abort", () => frame !== shown && frame.remove());
    frames.append(frame);
    await new Promise((done) => frame.addEventListener("load", done, { once: true }));
    signal.throwIfAborted();
    const inner = frame.contentDocument?.querySelector(".regard");
    if (inner) liveTheme(root, /** @type {HTMLElement} */ (inner));
    /** @type {any} */
    const explorer = frame.contentWindow;
    while (!explorer.__regard) await pause(20, signal);
    // What could not be opened says so itself.
    await explorer.__regard.ready.catch(() => null);
    signal.throwIfAborted();
    const before = shown;
    [shown, compared] = [frame, compares];
    delete frame.dataset.waiting;
    before?.remove();
  };
  const latest = new Latest(async (signal) => {
    const texts = [text.value, ...(other.hidden ? [] : [changed.value])];
    keep();
    fail();
    if (texts.some((one) => !one.trim())) {
      status.textContent = "Type a text: what every head reads in it appears below.";
      return;
    }
    status.textContent = LIVE_READING;
    const begun = performance.now();
    const asked = new URLSearchParams(texts.map((one) => ["text", one]));
    const { ok, bytes } = await connection.ask(`read?${asked}`, signal);
    const said = new TextDecoder().decode(bytes);
    signal.throwIfAborted();
    const { view, tokens, refused } = ok ? JSON.parse(said) : { refused: said };
    if (refused) {
      fail(refused);
      return;
    }
    await open(view, texts.length > 1, signal);
    const seconds = ((performance.now() - begun) / 1000).toFixed(1);
    status.textContent = `${tokens.join(" and ")} tokens, ${seconds} s`;
  }, wait);
  connection.addEventListener("lost", () => {
    lost.textContent = "No answer from regard view: start it again and open the address it prints.";
    lost.hidden = false;
    if (status.textContent === LIVE_READING) status.textContent = "";
  });
  connection.addEventListener("found", () => {
    lost.hidden = true;
  });
  tell();
  latest.plan(0);
}

/**
 * Light or dark is chosen in the explorer, and stays so in the next one.
 * @param {HTMLElement} root @param {HTMLElement} inner
 */
function liveTheme(root, inner) {
  if (root.dataset.theme) inner.dataset.theme = root.dataset.theme;
  const follow = () => {
    root.dataset.theme = inner.dataset.theme ?? "";
  };
  new MutationObserver(follow).observe(inner, { attributeFilter: ["data-theme"] });
}

if (typeof document !== "undefined") {
  const root = document.querySelector("main.live");
  if (root instanceof HTMLElement) mountLive(root, new Connection());
}
