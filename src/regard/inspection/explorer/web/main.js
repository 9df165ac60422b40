import { mountAtlas } from "./atlas.js";
import { mountCompare } from "./compare.js";
import { describeExplorer } from "./debug_api.js";
import { mountDetails } from "./details.js";
import { button, clear, element, say, visibleText } from "./dom.js";
import { mountEffects } from "./effects.js";
import { mountExport } from "./exporting.js";
import { mountFolding } from "./folding.js";
import { mountGuide } from "./guide.js";
import { mountHeadLines } from "./head_lines.js";
import { mountHeadNotes } from "./head_notes.js";
import { tellSums } from "./heads.js";
import { listenForKeys, openKeyList } from "./keys.js";
import { mountMap } from "./map.js";
import { headName } from "./passages.js";
import { mountPositions } from "./positions.js";
import { mountProfiles } from "./profiles.js";
import { mountReader } from "./reader.js";
import { Source } from "./source.js";
import { namesHead, State } from "./state.js";
import { TABS } from "./state_fields.js";
import { mountTools } from "./tools.js";
import { mountTraining } from "./training.js";

/** @type {Record<string, string>} */
const TAB_NAMES = {
  attention: "Attention",
  lines: "Lines",
  positions: "Positions",
  compare: "Compare",
  training: "Training",
};

/** Tokens of a text that opens to be read by pointing. */
const MAIN_SHORT = 24;

/** @typedef {{name: string, panel: HTMLElement, mount: (() => void)|null}} Panel filled as it is first seen */

/**
 * A panel with a heading; `host` is where its view lives.
 * @param {string} name @param {string} title
 */
function mainPanel(name, title) {
  const host = element("div", { class: "rg-host" });
  const heading = element("h2", { text: title });
  const head = element("div", { class: "rg-panel-head" }, heading);
  return {
    panel: element("section", { class: `rg-panel rg-${name}`, "aria-label": title }, head, host),
    host,
    head,
  };
}

/** @param {PageDocument} document_ */
function mainTrust(document_) {
  const every = document_.traces.flatMap((trace) => trace.calls.flatMap((call) => call.trust ?? []));
  if (!every.length) return null;
  const { good, text } = tellSums(every);
  return element(
    "span",
    {
      class: `rg-badge ${good ? "rg-good" : "rg-poor"}`,
      title:
        "The largest distance from 1 of a row's sum of weights, over all heads: it shows that these are the weights of the kernel that ran.",
    },
    element("span", { class: "rg-mark", "aria-hidden": "true", text: good ? "✓" : "!" }),
    element("span", { text }),
  );
}

/** @param {Source} source @param {State} state */
function mainHeader(source, state) {
  const page = source.document;
  const facts = page.traces.map((trace, n) => {
    const name = page.traces.length > 1 ? `${"AB"[n] ?? n + 1}: ${trace.title}` : "";
    const tokens = trace.calls.reduce((most, call) => Math.max(most, call.keys), 0);
    const heads = trace.calls.reduce((sum, call) => sum + call.heads, 0);
    /** @param {number} count @param {string} word */
    const many = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
    return [name, trace.model, many(tokens, "token"), many(trace.calls.length, "layer"), many(heads, "head")]
      .filter(Boolean)
      .join(" · ");
  });
  const made = page.made_with ?? {};
  const theme = button("◐", {
    title: "Light or dark",
    keys: "d",
    class: "rg-quiet",
    press: () => state.ask("theme"),
  });
  const help = button("?", {
    title: "Keys and help",
    keys: "?",
    class: "rg-quiet",
    press: () => state.ask("help"),
  });
  const notes = page.notes?.length
    ? element(
        "details",
        { class: "rg-notes" },
        element("summary", { text: `Notes (${page.notes.length})` }),
        element("ul", {}, ...page.notes.map((note) => element("li", { text: note }))),
      )
    : null;
  const start = mainStart(source);
  if (start.h !== undefined && !page.start)
    facts.push(
      `opened on ${headName(page.traces[0].calls, start.c, start.h)}, the first that is stored finer than others`,
    );
  return element(
    "header",
    { class: "rg-header" },
    element(
      "div",
      { class: "rg-title" },
      element("h1", { text: page.title || "Attention" }),
      ...facts.map((fact) => element("p", { class: "rg-facts", text: fact })),
    ),
    element(
      "div",
      { class: "rg-about" },
      mainTrust(page),
      notes,
      element("p", {
        class: "rg-caution",
        text: "Attention shows where a head reads; it is not an explanation of the answer.",
        title: made.regard ? `regard ${made.regard}, jax ${made.jax ?? ""}` : null,
      }),
    ),
    element("div", { class: "rg-buttons" }, theme, help),
  );
}

/**
 * One line that stands above all while the server does not answer.
 * @param {Source} source @param {HTMLElement} root
 */
function mainConnection({ connection }, root) {
  const text =
    "No answer from regard view: start it again and open the address it prints. If this one answers again, the page goes on by itself.";
  const line = element("p", { class: "rg-lost rg-poor", role: "alert", hidden: true });
  connection?.addEventListener("lost", () => {
    line.textContent = text;
    line.hidden = false;
  });
  connection?.addEventListener("found", () => {
    line.hidden = true;
    say("regard view answers again", root);
  });
  return line;
}

/** @param {PageDocument} page @param {State} state @param {Panel[]} panels */
function mainTabs(page, state, panels) {
  const list = element("div", { class: "rg-tabs", role: "tablist", "aria-label": "Views" });
  /** @type {Record<string, boolean>} */
  const empty = {
    positions: !page.positions?.length,
    compare: page.traces.length < 2,
    training: !page.training,
  };
  const tabs = panels.map(({ name, panel }) => {
    const tab = element("button", {
      type: "button",
      role: "tab",
      "aria-keyshortcuts": name === "compare" ? "c" : null,
      class: empty[name] ? "rg-empty" : null,
      title: empty[name] ? "nothing in this page; what would be here is told" : null,
      text: TAB_NAMES[name],
      on: { click: () => state.set({ tab: name }) },
    });
    list.append(tab);
    panel.setAttribute("role", "tabpanel");
    panel.setAttribute("aria-label", TAB_NAMES[name]);
    return tab;
  });
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -tabs.length, End: tabs.length }[event.key];
    if (!step) return;
    event.preventDefault();
    const at =
      Math.abs(step) > 1
        ? step > 0
          ? tabs.length - 1
          : 0
        : (panels.findIndex(({ name }) => name === state.tab) + step + tabs.length) % tabs.length;
    state.set({ tab: panels[at].name });
    tabs[at].focus();
  });
  const show = () => {
    const wanted = panels.some(({ name }) => name === state.tab) ? state.tab : "attention";
    panels.forEach((entry, n) => {
      const open = entry.name === wanted;
      tabs[n].setAttribute("aria-selected", String(open));
      tabs[n].tabIndex = open ? 0 : -1;
      entry.panel.hidden = !open;
      if (open && entry.mount) {
        const mount = entry.mount;
        entry.mount = null;
        mount();
      }
    });
  };
  state.on("tab", show);
  return { list, show };
}

/** @param {Source} source @param {State} state */
function mainAttention(source, state) {
  const parts = {
    atlas: mainPanel("atlas", "Heads"),
    map: mainPanel("map", "Map"),
    reader: mainPanel("reader", "Reader"),
    details: mainPanel("details", "Details"),
    profiles: mainPanel("profiles", "Profiles"),
  };
  const tools = element("div", {
    class: "rg-tools",
    role: "toolbar",
    "aria-label": "Head, colours and tools",
  });
  const side = element("div", { class: "rg-side" }, parts.reader.panel, parts.details.panel);
  const panel = element(
    "div",
    { class: "rg-attention" },
    tools,
    parts.atlas.panel,
    parts.map.panel,
    side,
    parts.profiles.panel,
  );
  const mount = () => {
    state.views.map = mountMap(parts.map.host, source, state);
    mountAtlas(parts.atlas.host, source, state);
    mountHeadNotes(parts.atlas.host, state);
    mountTools(tools, source, state);
    mountFolding(panel, state, {
      heads: parts.atlas,
      text: { panel: side, head: parts.reader.head },
      profiles: parts.profiles,
    });
    mountReader(parts.reader.host, source, state);
    mountDetails(parts.details.host, source, state);
    mountEffects(parts.details.host, source, state);
    mountProfiles(parts.profiles.host, source, state);
    mountExport(tools.appendChild(element("span", { class: "rg-export" })), source, state);
  };
  return { name: "attention", panel, mount };
}

/**
 * The first head that has finer levels than the others, so that a page opens on something sharp.
 * @param {Source} source
 */
function mainStart(source) {
  const calls = source.document.traces[0]?.calls ?? [];
  for (const [c, call] of calls.entries()) {
    const h = call.head.findIndex((head) => head.weights || head.levels.length > 1);
    if (h > 0 || (h === 0 && c > 0)) return { c, h };
    if (h === 0) return {};
  }
  return {};
}

/** @param {HTMLElement} root @param {State} state */
function mainTheme(root, state) {
  const order = ["", "light", "dark"];
  state.addEventListener("theme", () => {
    const dark = typeof matchMedia === "function" && matchMedia("(prefers-color-scheme: dark)").matches;
    const now = root.dataset.theme || (dark ? "dark" : "light");
    const next = now === "dark" ? "light" : "dark";
    root.dataset.theme = next === (dark ? "dark" : "light") ? order[0] : next;
    state.dispatchEvent(new CustomEvent("recolour"));
    say(`${next} colours`, root);
  });
  const redraw = () => state.dispatchEvent(new CustomEvent("recolour"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let theme = "";
  addEventListener("beforeprint", () => {
    theme = root.dataset.theme ?? "";
    root.dataset.theme = "light";
    redraw();
    state.ask("print");
  });
  addEventListener("afterprint", () => {
    root.dataset.theme = theme;
    state.ask("printed");
    redraw();
  });
}

/**
 * Build the explorer inside an element that holds its document and chunks.
 * @param {HTMLElement} root
 * @param {{address?: boolean}} [options] address: keep the state in `location.hash` (one explorer of a page may)
 * @returns {Promise<{root: HTMLElement, source: Source, state: State}>}
 */
export async function boot(root, { address = true } = {}) {
  const source = Source.fromPage(root);
  const page = source.document;
  for (const named of [page, ...page.traces]) named.title = visibleText(named.title ?? "");
  const state = new State(
    page.traces.map((trace) =>
      trace.calls.map(({ heads, rows, keys, layer }) => ({ heads, rows, keys, layer })),
    ),
  );
  state.set(mainStart(source));
  const calls = page.traces.flatMap((trace) => trace.calls);
  const isText = page.traces.every(({ sequences }) => sequences.every(({ kind }) => kind === "text"));
  // The questions of the live page, around this one, need the map.
  const isLive = Boolean(/** @type {any} */ (frameElement)?.outerKeys);
  if (isText && calls.length && calls.every(({ keys }) => keys <= MAIN_SHORT) && !isLive)
    state.set({ fold: "profiles,plain" });
  if (page.start) state.fromHash(page.start);
  state.start = state.toHash();
  state.chosen = namesHead(page.start ?? "");
  if (address) state.followAddress();
  mainTheme(root, state);
  /** @type {Panel[]} */
  const panels = [mainAttention(source, state)];
  const simple = {
    lines: mountHeadLines,
    positions: mountPositions,
    compare: mountCompare,
    training: mountTraining,
  };
  for (const [name, mount] of Object.entries(simple)) {
    const panel = element("div", { class: `rg-single rg-${name}` });
    panels.push({ name, panel, mount: () => mount(panel, source, state) });
  }
  panels.sort((one, other) => TABS.indexOf(one.name) - TABS.indexOf(other.name));
  const { list, show } = mainTabs(page, state, panels);
  for (const node of root.querySelectorAll(":scope > .rg-loading")) node.remove();
  root.append(
    mainConnection(source, root),
    mainHeader(source, state),
    // A link says where to look already.
    ...(location.hash || page.start ? [] : [mountGuide(state)]),
    list,
    ...panels.map(({ panel }) => panel),
  );
  state.addEventListener("help", () => openKeyList(root));
  listenForKeys(root, state);
  show();
  return { root, source, state };
}

/**
 * A page that cannot be read says so instead of staying blank.
 * @param {HTMLElement} root @param {any} error
 * @returns {never}
 */
function mainFailure(root, error) {
  const place = root.querySelector(".rg-loading") ?? root.appendChild(element("p", { class: "rg-loading" }));
  clear(place).append(`This page could not be opened: ${error?.message ?? error}`);
  place.setAttribute("role", "alert");
  throw error;
}

if (typeof document !== "undefined") {
  /** @type {NodeListOf<HTMLElement>} */
  const found = document.querySelectorAll(".regard:not([data-open])");
  const roots = [...found];
  const opened = roots.map((root, n) => {
    root.dataset.open = "";
    const whole = boot(root, { address: n === 0 }).catch((error) => mainFailure(root, error));
    const debugApi = describeExplorer(whole);
    Object.defineProperty(root, "regard", { value: debugApi });
    return debugApi;
  });
  if (opened.length && !("__regard" in window))
    Object.defineProperty(window, "__regard", { value: opened[0] });
}
