// Elements from data: text always becomes a text node, so no token can turn into markup.

/** @typedef {Node|string|false|null|undefined} Child what is not a node or text is left out */

/**
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, any>} [attributes] `class`, `text`, `on` ({event: listener}), `style` (object), `data` (object);
 *   null, undefined and false leave an attribute out, true sets it empty
 * @param {...Child} children strings become text nodes
 * @returns {HTMLElementTagNameMap[T]}
 */
export function element(tag, attributes = {}, ...children) {
  return domFill(document.createElement(tag), attributes, children);
}

/**
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...Child} children
 * @returns {SVGElement}
 */
export function svg(tag, attributes = {}, ...children) {
  return domFill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

/** @param {any} node @param {Record<string, any>} attributes @param {Child[]} children */
function domFill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = String(value);
    else if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, setting] of Object.entries(value))
        node.style.setProperty(property, String(setting));
    } else if (name === "data") {
      for (const [key, datum] of Object.entries(value)) node.dataset[key] = String(datum);
    } else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child);
  }
  return node;
}

/**
 * @template {Element} T
 * @param {T} node left without children
 * @returns {T}
 */
export function clear(node) {
  node.replaceChildren();
  return node;
}

/**
 * Find the only control of a field, or another part that is known to be there.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {ParentNode} node @param {T} tag
 * @returns {HTMLElementTagNameMap[T]}
 */
export function partOf(node, tag) {
  const found = node.querySelector(tag);
  if (!found) throw new Error(`there is no <${tag}> here`);
  return found;
}

/**
 * What a view shows that has nothing to draw.
 * @param {string} title @param {string} text @param {string} code what gives it something
 */
export function emptyState(title, text, code) {
  return element(
    "div",
    { class: "empty-state" },
    element("h2", {}, title),
    element("p", {}, text),
    element("pre", {}, code),
  );
}

/** Where an event is in a node. @param {Element} node @param {MouseEvent} event @returns {Point} CSS pixels */
export function pointIn(node, event) {
  const box = node.getBoundingClientRect();
  return { x: event.clientX - box.left, y: event.clientY - box.top };
}

/**
 * A function that draws at the next frame, however often it is called before.
 * @param {() => void} draw
 * @returns {() => void}
 */
export function oncePerFrame(draw) {
  let planned = false;
  return () => {
    if (!planned)
      requestAnimationFrame(() => {
        planned = false;
        draw();
      });
    planned = true;
  };
}

/** @param {HTMLCanvasElement} canvas @returns {CanvasRenderingContext2D} */
export function penOf(canvas) {
  const pen = canvas.getContext("2d");
  if (!pen) throw new Error("this browser gives no canvas to draw on");
  return pen;
}

/** @returns {number} pixels of a canvas to a CSS pixel */
export function pixelRatio() {
  return Math.min(3, globalThis.devicePixelRatio || 1);
}

/**
 * A real button with its shortcut told to screen readers and shown in the tooltip.
 * @param {string} label what is seen
 * @param {{title?: string, keys?: string, press: (event: Event) => void, pressed?: boolean, class?: string}} options
 * @returns {HTMLButtonElement}
 */
export function button(label, { title = "", keys = "", press, pressed, class: names = "" }) {
  // Who speaks to a computer says what is seen: the name holds it.
  const words = label.replace(/[^\p{L}\p{N} ]/gu, "").trim();
  const name = title && !title.toLowerCase().includes(words.toLowerCase()) ? `${words}: ${title}` : title;
  return element("button", {
    type: "button",
    class: names,
    title: keys ? `${title || label} (${keys})` : title || null,
    "aria-label": name || null,
    "aria-keyshortcuts": keys || null,
    "aria-pressed": pressed === undefined ? null : String(pressed),
    on: { click: press },
    text: label,
  });
}

/**
 * A labelled list of choices.
 * @param {string} label
 * @param {Array<[string, string]>} choices value and what is seen
 * @param {string} value
 * @param {(value: string) => void} choose
 * @returns {HTMLLabelElement}
 */
export function chooser(label, choices, value, choose, attributes = {}) {
  const select = element("select", { ...attributes, on: { change: () => choose(select.value) } });
  for (const [name, text] of choices) select.append(element("option", { value: name, text }));
  select.value = value;
  return element("label", { class: "rg-field" }, element("span", { text: label }), select);
}

/**
 * @param {string} label
 * @param {boolean} checked
 * @param {(checked: boolean) => void} change
 * @returns {HTMLLabelElement}
 */
export function tickbox(label, checked, change, attributes = {}) {
  const input = element("input", {
    type: "checkbox",
    ...attributes,
    on: { change: () => change(input.checked) },
  });
  input.checked = checked;
  return element("label", { class: "rg-tick" }, input, element("span", { text: label }));
}

const domVoices = new WeakMap();

/**
 * Tell a screen reader, politely; the newest sentence wins.
 * @param {string} text
 * @param {Element} [near] any node of the explorer that speaks; the first explorer when left out
 */
export function say(text, near) {
  const root = near?.closest?.(".regard") ?? document.querySelector(".regard") ?? document.body;
  let voice = domVoices.get(root);
  if (!voice) {
    voice = element("div", { class: "rg-voice", "aria-live": "polite", role: "status" });
    root.append(voice);
    domVoices.set(root, voice);
  }
  voice.textContent = text;
}

/**
 * Hand a file to the reader's browser.
 * @param {string} name
 * @param {Blob} blob
 */
export function download(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = element("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// Joiners and variants of what they follow, then signs that are seen though Unicode calls them controls.
const DOM_JOINED = /\u200c|\u200d|[\ufe00-\ufe0f]|[\u{e0100}-\u{e01ef}]/u,
  DOM_SEEN = /[ \u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2]/,
  // Marks that lie on one letter: more would lie over other lines.
  DOM_MARKS = /(\p{M}{4})(\p{M}+)/gu,
  DOM_UNSEEN = /[\p{Cc}\p{Z}\p{Cf}\p{DI}]/u,
  DOM_LEFTWARD = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc\u{10800}-\u{10fff}\u{1e800}-\u{1efff}]/u;

/**
 * A text with a sign of its own for every character that would not show, or would turn the line around; of marks
 * on one letter four, and how many more.
 * @param {string} text
 * @returns {string}
 */
export function visibleText(text) {
  let before = "";
  const thinned = text.replace(DOM_MARKS, (_, four, more) => `${four}⟨+${[...more].length}⟩`);
  return Array.from(thinned.replaceAll("\r\n", "\n"), (character) => {
    const kept = DOM_SEEN.test(character) || (before && DOM_JOINED.test(character));
    const code = character.codePointAt(0) ?? 0,
      unseen = DOM_UNSEEN.test(character);
    before = kept || !unseen ? character : "";
    if (kept) return character;
    if (character === "\n") return "↵";
    if (character === "\t") return "⇥";
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    if (code === 127) return "␡";
    if (unseen) return `⟨${code.toString(16).toUpperCase()}⟩`;
    return code >= 0xd800 && code <= 0xdfff ? "\ufffd" : character;
  }).join("");
}

/**
 * A token fit for one line of other words: all of it visible, what is long cut in whole characters, what is written
 * from the right kept from turning the words around it.
 * @param {string} token
 * @param {number} [most] characters kept
 * @returns {string}
 */
export function shown(token, most = 24) {
  const whole = String(token),
    visible = visibleText(whole.slice(0, 4 * most));
  const plain = visible.trim() || visible.replaceAll(" ", "␣") || "∅";
  const head = Array.from(plain);
  const text = head.length > most || whole.length > 4 * most ? `${head.slice(0, most - 1).join("")}…` : plain;
  return DOM_LEFTWARD.test(text) ? `\u2068${text}\u2069` : text;
}
