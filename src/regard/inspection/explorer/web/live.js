// The live page: a text that is typed is read by the model, heads cut or not, and shown by an explorer in a frame.

import { Connection, pause } from "./connection.js";
import { element } from "./dom.js";
import { takesKeys } from "./keys.js";
import { CutTarget, cutWords, drawCosts, isCut, namesAt, tellPredictions } from "./live_cutting.js";
import { CHOOSE_CELL, mountQuestions } from "./questions.js";

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

  /** End what runs. */
  stop() {
    this.running?.abort();
  }

  /** End what runs, and begin anew after the wait, or at once. @param {number} [wait] */
  async plan(wait = this.wait) {
    this.stop();
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
 * @param {boolean} compares whether the next one does @param {boolean} [cuts] whether other heads are cut
 */
export function nextPlace(last, compared, compares, cuts = false) {
  const said = new URLSearchParams(last.replace(/^#/, ""));
  // A cut head reads as before: what changes most is another.
  if (cuts && (!compared || said.get("tab") === "compare"))
    for (const name of ["l", "h", "sel"]) said.delete(name);
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
  const cut = element("input", {
    value: said.get("cut") ?? "",
    "aria-label": "Cut heads",
    on: { input: () => latest.plan() },
  });
  const by = element(
    "select",
    { "aria-label": "Cut by", on: { change: () => chooseBy() } },
    ...(settings.cuts ?? []).map((/** @type {string} */ value) => element("option", { value, text: value })),
  );
  if (said.has("by")) by.value = said.get("by") ?? "";
  const patches = () => by.value === "patch";
  const lastCut = cut.value.split(/[\s,]+/).at(-1) ?? "";
  const targets = [new CutTarget(lastCut ? [lastCut] : []), new CutTarget([])];
  /** @param {number} n of the heads, or of the cell */
  const cutKind = (n) => (n ? (patches() ? "query" : "cell") : "heads");
  /** @param {number} n */
  const restores = (n) => isCut(cut.value, targets[n].names(cut.value, looked(), cutKind(n)));
  /** @param {number} n */
  const pick = (n) => () => {
    if (n && !restores(n) && !(place().has("row") && place().has("key"))) {
      fail(CHOOSE_CELL);
      return;
    }
    cut.value = targets[n].press(cut.value, looked(), cutKind(n));
    latest.plan(0);
  };
  const cutName = element("span");
  const cutHead = element("button", { type: "button", "aria-keyshortcuts": "x", on: { click: pick(0) } });
  const cutCell = element("button", {
    type: "button",
    "aria-keyshortcuts": "Shift+X",
    on: { click: pick(1) },
  });
  const cutting = element(
    "label",
    { class: "live-cut", hidden: !settings.cuts?.length },
    ...[cutName, cut, by, cutHead, cutCell],
  );
  const python = element("code", { hidden: true });
  const costs = element("div", {
    class: "live-costs",
    role: "region",
    tabindex: "0",
    "aria-label": "What each token costs now, in nats, against before",
    hidden: true,
  });
  const saving = element("a", { download: "", hidden: true, text: "Save page" });
  const share = async () => {
    keep();
    try {
      await navigator.clipboard.writeText(location.href);
      status.textContent = "The link is copied: texts, cut and view are in it.";
    } catch {
      fail("This browser does not let a page copy: take the link from the address bar.");
    }
  };
  const text = box("Text", said.get("text") ?? settings.text ?? "");
  const changed = box("Changed text", said.get("changed") ?? "");
  const otherName = element("span");
  const other = element("label", { hidden: !said.has("changed") }, otherName, changed);
  const press = () => {
    other.hidden = !other.hidden;
    if (!other.hidden) {
      changed.value = text.value;
      changed.focus();
    }
    latest.plan(0);
  };
  const chooseBy = () => {
    // A patch comes from a second text.
    if (patches() && other.hidden) {
      other.hidden = false;
      changed.value = text.value;
    }
    latest.plan(0);
  };
  const change = element("button", { type: "button", on: { click: press } });
  const status = element("span", { role: "status" });
  const failure = element("span", { role: "alert", class: "rg-poor", hidden: true });
  const lost = element("span", { role: "alert", class: "rg-poor", hidden: true });
  const frames = element("div", { class: "live-frames" });
  const name = element("span", {}, "Text");
  /** @type {HTMLIFrameElement|null} */
  let current = null;
  const place = () => new URLSearchParams((current ? placeOf(current) : "").replace(/^#/, ""));
  const looked = () => (current ? placeOf(current) : first);
  const touch = () => {
    for (const target of targets) target.touched ??= namesAt(looked()).join();
  };
  const questions = mountQuestions(
    {
      why: settings.why,
      paths: settings.paths,
      place,
      text: (said) => (said.get("t") === "1" && !other.hidden && !isPatched() ? changed : text).value,
      request: (path, signal) => request(path, signal),
      tell: (message, line = "") => {
        status.textContent = message;
        python.textContent = line;
        python.hidden = !line;
      },
      fail: (message) => fail(message),
      look: (fields) => {
        touch();
        const said = place();
        for (const [field, value] of Object.entries(fields)) said.set(field, String(value));
        said.delete("sel");
        said.set("tab", "attention");
        if (current?.contentWindow) current.contentWindow.location.hash = String(said);
      },
    },
    (task) => new Latest(task, 0),
  );
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
      cutting,
      ...questions.buttons,
      element(
        "div",
        { class: "live-told" },
        status,
        python,
        failure,
        lost,
        saving,
        element("button", { type: "button", text: "Copy link", on: { click: share } }),
        element("button", { type: "button", text: "Print", on: { click: () => print() } }),
        element("h1", { text: root.dataset.title ?? "" }),
      ),
      costs,
      questions.answered,
    ),
    frames,
    element("p", { class: "live-paper", text: "The button “Print”, or Ctrl+P, prints all of the explorer." }),
  );
  // What a link keeps of the explorer, beside the texts.
  const first = said.get("view") ?? "";
  let compared = Boolean(first) && (said.has("changed") || said.has("cut"));
  let cutBefore = first && cut.value.trim();
  /** @param {HTMLIFrameElement} frame */
  const placeOf = (frame) => frame.contentWindow?.location.hash ?? "";
  const keep = () => {
    /** @type {Record<string, string>} */
    const heads = cut.value.trim() ? { cut: cut.value.trim(), by: by.value } : {};
    const texts = { text: text.value, ...(other.hidden ? {} : { changed: changed.value }), ...heads };
    const view = looked().replace(/^#/, "");
    const kept = new URLSearchParams(view ? { ...texts, view } : texts);
    if (`#${kept}` !== location.hash) history.replaceState(null, "", `#${kept}`);
  };
  setInterval(() => {
    keep();
    tell();
  }, LIVE_KEEP);

  const isPatched = () => patches() && Boolean(cut.value.trim());
  const tell = () => {
    name.textContent = other.hidden ? "Text" : "A";
    otherName.textContent = patches() ? "Source, changed" : "B, changed";
    change.textContent = other.hidden ? "Change a word" : "Compare no more";
    const [about, example, ...words] = cutWords(by.value);
    cutName.textContent = about;
    cut.placeholder = `layer.head, such as 2.5 ${example}`;
    for (const [n, button] of [cutHead, cutCell].entries()) {
      const names = targets[n].names(cut.value, looked(), cutKind(n)).join(" ");
      const [text, title] = restores(n)
        ? [`Restore ${names}`, "As the model has it"]
        : [words[2 * n], `${words[2 * n + 1]}; once more restores it`];
      if (button.textContent !== text) button.textContent = text;
      button.title = `${title} (${"xX"[n]})`;
    }
  };
  /** @param {string} [message] */
  const fail = (message = "") => {
    failure.textContent = message;
    failure.hidden = !message;
    python.hidden = true;
    if (message) status.textContent = "";
  };
  /** Keys of the page that the explorer in its frame lists and runs with its own. */
  const outerKeys = [
    { keys: ["x"], does: "cut this head, or restore it", button: cutHead },
    { keys: ["X"], does: "cut this cell, or restore it", button: cutCell },
    { keys: ["w"], does: "why this cell", button: questions.buttons[0] },
    { keys: ["g"], does: "paths to the prediction, a graph", button: questions.buttons[1] },
  ]
    .filter(({ button }) => !button.hidden && !button.closest("[hidden]"))
    .map(({ button, ...key }) => ({ ...key, run: () => button.click() }));
  /** The explorer prints itself: on this page its frame would be cut. */
  const print = () => current?.contentWindow?.print();
  /** @param {KeyboardEvent} event */
  const printByKey = (event) => {
    if (event.key !== "p" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    print();
  };
  document.addEventListener("keydown", printByKey);
  document.addEventListener("keydown", (event) => {
    const inside = current?.contentDocument?.body,
      { key, ctrlKey, metaKey, altKey } = event;
    if (!inside || event.defaultPrevented || takesKeys(/** @type {Element} */ (event.target))) return;
    const init = { key, ctrlKey, metaKey, altKey, bubbles: true, cancelable: true };
    if (!inside.dispatchEvent(new KeyboardEvent("keydown", init))) event.preventDefault();
  });
  /**
   * Open an explorer behind the one that is current, which it replaces once it is drawn.
   * @param {string} view @param {boolean} compares @param {AbortSignal} signal
   */
  const open = async (view, compares, signal) => {
    const heads = cut.value.trim(),
      last = current ? placeOf(current) : first;
    const place = nextPlace(last, compared, compares, Boolean(heads) && heads !== cutBefore);
    const frame = element("iframe", {
      title: "Attention of the text",
      src: view + place,
      "data-waiting": true,
    });
    Object.assign(frame, { outerKeys });
    signal.addEventListener("abort", () => frame !== current && frame.remove());
    frames.append(frame);
    await new Promise((done) => frame.addEventListener("load", done, { once: true }));
    signal.throwIfAborted();
    const inner = frame.contentDocument?.querySelector(".regard");
    if (inner) liveTheme(root, /** @type {HTMLElement} */ (inner));
    /** @type {any} */
    const explorer = frame.contentWindow;
    while (!explorer.__regard) await pause(20, signal);
    for (const event of ["pointerdown", "keydown"])
      frame.contentDocument?.addEventListener(event, touch, true);
    frame.contentDocument?.addEventListener("keydown", printByKey);
    // What could not be opened says so itself.
    await explorer.__regard.ready.catch(() => null);
    signal.throwIfAborted();
    const before = current;
    [current, compared, cutBefore] = [frame, compares, heads];
    delete frame.dataset.waiting;
    before?.remove();
    // Keys are the explorer's where no field has them.
    if (document.activeElement === document.body) explorer.focus();
  };
  /**
   * What the model answers; null where it refuses, which is said.
   * @param {string} path @param {AbortSignal} signal
   */
  const request = async (path, signal) => {
    const { ok, bytes } = await connection.ask(path, signal);
    const text = new TextDecoder().decode(bytes);
    signal.throwIfAborted();
    /** @type {any} */
    let answer = { refused: text };
    try {
      if (ok) answer = JSON.parse(text);
    } catch {
      answer.refused = `The answer cannot be read: ${text.slice(0, 200)}`;
    }
    if (!answer.refused) return answer;
    fail(answer.refused);
    return null;
  };
  const latest = new Latest(async (signal) => {
    const texts = [text.value, ...(other.hidden ? [] : [changed.value])];
    tell();
    keep();
    fail();
    if (texts.some((one) => !one.trim())) {
      status.textContent = "Type a text: what every head reads in it appears below.";
      return;
    }
    status.textContent = LIVE_READING;
    questions.forget();
    const begun = performance.now();
    const asked = new URLSearchParams(texts.map((one) => ["text", one]));
    const heads = cut.value.trim();
    if (heads) {
      asked.set("cut", heads);
      asked.set("by", by.value);
    }
    const answer = await request(`read?${asked}`, signal);
    if (!answer) return;
    await open(answer.view, answer.tokens.length > 1, signal);
    const seconds = ((performance.now() - begun) / 1000).toFixed(1);
    const told = answer.predicted ? `; ${tellPredictions(answer.predicted)}` : "";
    status.textContent = `${answer.tokens.join(" and ")} token${String(answer.tokens) === "1" ? "" : "s"}, ${seconds} s${told}`;
    python.textContent = answer.python ?? "";
    python.hidden = !answer.python;
    costs.replaceChildren(...drawCosts(answer.predicted ?? []));
    costs.hidden = !costs.firstChild;
    saving.href = answer.view.replace("view", "save");
    saving.hidden = false;
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
