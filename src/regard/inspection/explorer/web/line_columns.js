import { element, oncePerFrame } from "./dom.js";
import { displayToken } from "./passages.js";

/** Pixels that a token is tall. */
export const LINE_STEP = 20;
let columnSerial = 0;

/**
 * A column of any number of tokens, of which only those in sight are elements.
 * @param {string} label
 * @param {{hover: (n: number|null) => void, choose: (n: number, how: "click"|"go"|"keep") => void, leave: () => void,
 *   scrolled: () => void}} told keep: beside those chosen before; leave: to the other column
 */
export function tokenColumn(label, { hover, choose, leave, scrolled }) {
  columnSerial += 1;
  const stem = `regard-line-${columnSerial}`;
  const list = element("div", { class: "lines-tokens" });
  const sizer = element("div", { class: "lines-sizer" }, list);
  const node = element(
    "div",
    {
      class: "lines-column",
      role: "listbox",
      tabindex: 0,
      "aria-label": label,
      "aria-multiselectable": "true",
    },
    sizer,
  );
  /** @type {Side|null} */
  let side = null;
  /** @type {number|null} */
  let active = null;
  /** @type {Set<number>} */
  let kept = new Set();

  const sight = () => {
    const first = Math.floor(node.scrollTop / LINE_STEP);
    return [first, Math.min(side?.size ?? 0, first + Math.ceil(node.clientHeight / LINE_STEP) + 1)];
  };
  /** @param {Side} from @param {number} n */
  const token = (from, n) => {
    const { text, note } = displayToken(from.textAt(n));
    const place = String(n + from.offset);
    return element(
      "div",
      {
        id: `${stem}-${n}`,
        role: "option",
        class: n === active ? "current" : null,
        data: { n },
        "aria-selected": String(n === active || kept.has(n)),
        "aria-setsize": from.size,
        "aria-posinset": n + 1,
        title: note || null,
      },
      element("small", { text: place }),
      from.kind === "index" ? null : element("bdi", { text }),
    );
  };
  const draw = () => {
    const from = side;
    if (!from || !node.clientHeight) return;
    const [first, end] = sight();
    list.style.transform = `translateY(${first * LINE_STEP}px)`;
    list.replaceChildren(...Array.from({ length: end - first }, (_, n) => token(from, first + n)));
    if (active !== null && active >= first && active < end)
      node.setAttribute("aria-activedescendant", `${stem}-${active}`);
    else node.removeAttribute("aria-activedescendant");
  };
  const plan = oncePerFrame(draw);
  /** @param {Event} event */
  const tokenOfEvent = (event) => {
    const found = event.target instanceof Element ? event.target.closest("[data-n]") : null;
    return found ? Number(found.getAttribute("data-n")) : null;
  };
  node.addEventListener("scroll", () => {
    plan();
    scrolled();
  });
  node.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "touch") hover(tokenOfEvent(event));
  });
  node.addEventListener("pointerleave", () => hover(null));
  node.addEventListener("click", (event) => {
    const n = tokenOfEvent(event);
    if (n !== null) choose(n, event.ctrlKey || event.metaKey || event.shiftKey ? "keep" : "click");
  });
  node.addEventListener("keydown", (event) => {
    if (!side?.size || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(node.clientHeight / LINE_STEP) - 1);
    const last = side.size - 1;
    const at = active ?? sight()[0] - (event.key === "ArrowDown" ? 1 : 0);
    const next = {
      ArrowDown: at + 1,
      ArrowUp: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: last,
    }[event.key];
    if (next !== undefined) {
      const n = Math.min(Math.max(next, 0), last);
      choose(n, "go");
      goTo(n);
    } else if (event.key === "Enter" || event.key === " ") choose(Math.max(at, 0), "keep");
    else if (event.key === "ArrowLeft" || event.key === "ArrowRight") leave();
    else return;
    event.preventDefault();
  });
  /** @param {number} n */
  const goTo = (n) => {
    const y = n * LINE_STEP;
    if (y < node.scrollTop || y + LINE_STEP > node.scrollTop + node.clientHeight)
      node.scrollTop = Math.max(0, y - node.clientHeight / 3);
    plan();
  };
  return {
    node,
    sight,
    goTo,
    draw,
    /** Where the middle of a token lies. @param {number} n */
    middle: (n) => (n + 0.5) * LINE_STEP - node.scrollTop,
    /** @param {Side} from */
    fill(from) {
      side = from;
      sizer.style.height = `${from.size * LINE_STEP}px`;
      plan();
    },
    /** @param {number|null} chosen @param {number[]} others @param {boolean} asks whether its row is shown */
    mark(chosen, others, asks) {
      active = chosen;
      node.dataset.asks = String(asks);
      kept = new Set(others);
      plan();
    },
  };
}
