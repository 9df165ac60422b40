// Three steps for whoever opens a page: each is ticked once it was done, and all go when the last one is.

import { button, element } from "./dom.js";

/** @type {Array<[string, string, string[]]>} What to do, what it shows, and the fields of the state that tell it was done. */
const GUIDE_STEPS = [
  ["Choose a word", "in the Reader: what it reads is tinted (plain: by pointing alone).", ["row"]],
  ["Choose a head", "under Heads: each of them reads otherwise.", ["c", "h", "selection"]],
  ["Choose a cell", "of the map: its weight, and what else the query reads, stand in Details.", ["key"]],
];

/** @param {State} state */
export function mountGuide(state) {
  const items = GUIDE_STEPS.map(([act, effect]) =>
    element("li", {}, element("strong", {}, act), ` ${effect}`),
  );
  const guide = element(
    "div",
    { class: "rg-guide", role: "note", "aria-label": "First steps" },
    element("ol", {}, ...items),
    button("hide", { title: "Hide the first steps", class: "rg-quiet", press: () => guide.remove() }),
  );
  GUIDE_STEPS.forEach(([, , fields], n) => {
    state.on(fields, () => {
      items[n].classList.add("rg-done");
      if (items.every((item) => item.classList.contains("rg-done"))) guide.remove();
    });
  });
  return guide;
}
