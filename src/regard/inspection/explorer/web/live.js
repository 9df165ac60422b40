// The live page: a text that is typed is read by the model, heads cut or not, and shown by an explorer in a frame.

import { Connection, pause } from "./connection.js";
import { element, shown } from "./dom.js";
import { CHOOSE_CELL, mountQuestions } from "./questions.js";
import { formatNumber } from "./scales.js";

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

const LIVE_CUT = [
  "B, without heads or cells",
  "3.1:7-2",
  "Cut this head",
  "Cut the head that is looked at",
  "Cut this cell",
  "Take out what the chosen key hands to the chosen query by this head",
];
const LIVE_SCALE = [
  "B, with heads or cells scaled",
  "3.1:7-2",
  "Scale this head",
  "Scale the head that is looked at",
  "Scale this cell",
  "Scale what the chosen key hands to the chosen query by this head",
];
const LIVE_PATCH = [
  "B: A, with heads’ output on the source",
  "3.1:7",
  "Patch this head",
  "Give the head that is looked at the output that it has on the source",
  "Patch this query",
  "Give the head that is looked at its output on the source at the chosen query alone",
];
/** @type {Record<string, string[]>} */
const LIVE_WORDS = { half: LIVE_SCALE, double: LIVE_SCALE, patch: LIVE_PATCH };

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
 * What is cut, with what an explorer looks at among it, or no longer: its heads, the weight of its cell, or its
 * head at the query.
 * @param {string} heads @param {string} place address part of the explorer
 * @param {"heads" | "cell" | "query"} [what]
 */
export function toggleCut(heads, place, what = "heads") {
  const said = new URLSearchParams(place.replace(/^#/, ""));
  const cut = new Set(heads.split(/[\s,]+/).filter(Boolean));
  const head = `${said.get("l") ?? 0}.${said.get("h") ?? 0}`;
  const cell = `${head}:${said.get("row")}${what === "cell" ? `-${said.get("key")}` : ""}`;
  const chosen = what === "heads" ? (said.get("sel")?.split(",") ?? [head]) : [cell];
  const has = chosen.every((head) => cut.has(head));
  for (const head of chosen) has ? cut.delete(head) : cut.add(head);
  return [...cut].join(" ");
}

/**
 * What comes after the texts, and what each token of them costs, one after the other; then after a source.
 * @param {Array<{loss: number|null, next: Array<[string, number]>}>} predicted
 */
export function tellPredictions(predicted) {
  /** @param {[string, number]} likeliest */
  const word = ([token, share]) => `‘${shown(token)}’ ${formatNumber(share)}`;
  const [before, after, source] = predicted;
  if (!after) return `next: ${before.next.map(word).join(", ")}`;
  const losses = [before.loss, after.loss].map((loss) => (loss === null ? "–" : formatNumber(loss)));
  const asked = [before, ...(source ? [source] : [])].map(({ next }) => next[0][0]);
  const now = after.next.filter(([token], n) => !n || asked.includes(token)).map(word);
  const there = source ? `; of the source ${word(source.next[0])}` : "";
  return `loss ${losses.join(" → ")}, next ${word(before.next[0])} → ${now.join(", ")}${there}`;
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
  /** @param {boolean} one */
  const pick = (one) => () => {
    if (one && !(place().has("row") && place().has("key"))) {
      fail(CHOOSE_CELL);
      return;
    }
    const what = one ? (patches() ? "query" : "cell") : "heads";
    cut.value = toggleCut(cut.value, current ? placeOf(current) : first, what);
    latest.plan(0);
  };
  const cutName = element("span");
  const cutHead = element("button", { type: "button", on: { click: pick(false) } });
  const cutCell = element("button", { type: "button", on: { click: pick(true) } });
  const cutting = element(
    "label",
    { class: "live-cut", hidden: !settings.cuts?.length },
    ...[cutName, cut, by, cutHead, cutCell],
  );
  const python = element("code", { hidden: true });
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
        element("h1", { text: root.dataset.title ?? "" }),
      ),
      questions.answered,
    ),
    frames,
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
    const view = (current ? placeOf(current) : first).replace(/^#/, "");
    const kept = new URLSearchParams(view ? { ...texts, view } : texts);
    if (`#${kept}` !== location.hash) history.replaceState(null, "", `#${kept}`);
  };
  setInterval(keep, LIVE_KEEP);

  const isPatched = () => patches() && Boolean(cut.value.trim());
  const tell = () => {
    name.textContent = other.hidden ? "Text" : "A";
    otherName.textContent = patches() ? "Source, changed" : "B, changed";
    change.textContent = other.hidden ? "Change a word" : "Compare no more";
    const [about, example, head, headTitle, cell, cellTitle] = LIVE_WORDS[by.value] ?? LIVE_CUT;
    cutName.textContent = about;
    cut.placeholder = `layer.head, such as 2.5 ${example}`;
    cutHead.textContent = head;
    cutHead.title = `${headTitle}; once more restores it`;
    cutCell.textContent = cell;
    cutCell.title = `${cellTitle}; once more restores it`;
  };
  /** @param {string} [message] */
  const fail = (message = "") => {
    failure.textContent = message;
    failure.hidden = !message;
    python.hidden = true;
    if (message) status.textContent = "";
  };
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
    signal.addEventListener("abort", () => frame !== current && frame.remove());
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
    const before = current;
    [current, compared, cutBefore] = [frame, compares, heads];
    delete frame.dataset.waiting;
    before?.remove();
  };
  /**
   * What the model answers; null where it refuses, which is said.
   * @param {string} path @param {AbortSignal} signal
   */
  const request = async (path, signal) => {
    const { ok, bytes } = await connection.ask(path, signal);
    const text = new TextDecoder().decode(bytes);
    signal.throwIfAborted();
    const answer = ok ? JSON.parse(text) : { refused: text };
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
    status.textContent = `${answer.tokens.join(" and ")} tokens, ${seconds} s${told}`;
    python.textContent = answer.python ?? "";
    python.hidden = !answer.python;
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
