import { button, element } from "./dom.js";

/**
 * Panes beside the map: the share of the address that names them, the style that holds their size, and its ends.
 * @type {{name: string, title: string, size: string, wide: boolean, least: number, most: () => number, sign: number}[]}
 */
const FOLDING_PANES = [
  {
    name: "heads",
    title: "Heads",
    size: "--heads",
    wide: true,
    least: 160,
    most: () => innerWidth / 3,
    sign: 1,
  },
  {
    name: "text",
    title: "Reader and details",
    size: "--text",
    wide: true,
    least: 200,
    most: () => innerWidth / 2.2,
    sign: -1,
  },
  {
    name: "profiles",
    title: "Profiles",
    size: "--profiles",
    wide: false,
    least: 120,
    most: () => innerHeight / 2,
    sign: -1,
  },
];

/** Pixels that an arrow key moves an edge by. */
const FOLDING_STEP = 16;

/**
 * Buttons that fold the panes around the map, and edges that resize them; both are kept in the address.
 * @param {HTMLElement} host what holds the panes @param {State} state
 * @param {Record<string, {panel: HTMLElement, head: HTMLElement}>} parts by the names of the panes
 */
export function mountFolding(host, state, parts) {
  /** @param {number} place @param {number} size */
  const resize = (place, size) => {
    const { least, most } = FOLDING_PANES[place];
    const sizes = state.sizes.split("-").map(Number);
    sizes[place] = Math.round(Math.min(Math.max(size, least), most()));
    state.set({ sizes: sizes.join("-") });
  };
  /** @param {string} name */
  const turn = (name) => {
    const folded = state.fold.split(",");
    state.set({
      fold: (folded.includes(name) ? folded.filter((one) => one !== name) : [...folded, name]).join(","),
    });
  };
  const plain = button("plain", {
    title: "The heads and the text alone: point at a word to see what it reads",
    class: "rg-plain",
    press: () => turn("plain"),
  });
  parts.text.head.append(plain);
  const panes = FOLDING_PANES.map(({ name, title, wide, sign }, place) => {
    const { panel, head } = parts[name];
    const fold = button("", {
      title: `Fold ${title.toLowerCase()}`,
      class: "rg-fold",
      press: () => turn(name),
    });
    const edge = element("div", {
      class: `rg-edge rg-edge-${name}`,
      role: "separator",
      tabindex: "0",
      "aria-label": `Size of ${title.toLowerCase()}`,
      "aria-orientation": wide ? "vertical" : "horizontal",
    });
    const size = () => (wide ? panel.clientWidth : panel.clientHeight);
    edge.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!by) return;
      resize(place, size() + by * sign * FOLDING_STEP);
      event.preventDefault();
    });
    edge.addEventListener("pointerdown", (event) => {
      edge.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    edge.addEventListener("pointermove", (event) => {
      if (!edge.hasPointerCapture(event.pointerId)) return;
      const box = panel.getBoundingClientRect();
      const at = wide ? event.clientX : event.clientY;
      resize(place, sign > 0 ? at - box.left : (wide ? box.right : box.bottom) - at);
    });
    edge.addEventListener("dblclick", () => {
      const sizes = state.sizes.split("-");
      sizes[place] = "0";
      state.set({ sizes: sizes.join("-") });
    });
    head.append(fold);
    panel.append(edge);
    return { fold, edge, size };
  });
  const show = () => {
    host.dataset.fold = state.fold.replaceAll(",", " ");
    const folded = state.fold.split(",");
    const sizes = state.sizes.split("-").map(Number);
    plain.setAttribute("aria-pressed", String(folded.includes("plain")));
    panes.forEach(({ fold, edge, size }, place) => {
      const { name, size: property } = FOLDING_PANES[place];
      const open = !folded.includes(name);
      fold.textContent = open ? "▾" : "▸";
      fold.setAttribute("aria-expanded", String(open));
      edge.hidden = !open;
      if (sizes[place]) host.style.setProperty(property, `${sizes[place]}px`);
      else host.style.removeProperty(property);
      edge.setAttribute("aria-valuenow", String(Math.round(sizes[place] || size())));
    });
  };
  state.on(["fold", "sizes"], show);
  for (const command of ["find", "next-edge", "previous-edge", "export"])
    state.addEventListener(command, () => {
      const folded = state.fold.split(",").filter((name) => !["text", "plain"].includes(name));
      state.set({ fold: folded.join(",") });
    });
  show();
}
