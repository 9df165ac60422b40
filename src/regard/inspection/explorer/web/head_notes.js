import { button, element, partOf } from "./dom.js";
import { headName } from "./passages.js";

/** Characters of a note, and how many there may be. */
const NOTE_LENGTH = 200,
  NOTES_MOST = 64;

/**
 * Notes by trace, call and head, "0.3.7", from text of the address; what is no note is left out.
 * @param {any} text @returns {Record<string, string>}
 */
export function readNotes(text) {
  try {
    const notes = Object.entries(JSON.parse(text)).filter(
      ([name, note]) => /^\d+\.\d+\.\d+$/.test(name) && note && typeof note === "string",
    );
    return Object.fromEntries(
      notes.slice(0, NOTES_MOST).map(([name, note]) => [name, String(note).slice(0, NOTE_LENGTH)]),
    );
  } catch {
    return {};
  }
}

/** @param {Record<string, string>} notes @returns {string} "" for none */
export function writeNotes(notes) {
  const kept = readNotes(JSON.stringify(notes));
  return Object.keys(kept).length ? JSON.stringify(kept) : "";
}

/**
 * The notes on some heads, for files. @param {Pick<State, "t" | "notes" | "calls">} state @param {Head[]} heads
 */
export function notesOn(state, heads) {
  const all = readNotes(state.notes),
    { t } = state;
  return heads
    .flatMap(([c, h]) =>
      all[`${t}.${c}.${h}`] ? `${headName(state.calls(), c, h)}: ${all[`${t}.${c}.${h}`]}` : [],
    )
    .join("; ");
}

/**
 * A line to write on the head looked at, and all that was written.
 * @param {HTMLElement} host @param {State} state
 */
export function mountHeadNotes(host, state) {
  const field = element(
    "label",
    { class: "rg-field head-note" },
    element("span"),
    element("input", { maxlength: NOTE_LENGTH, placeholder: "a note on this head" }),
  );
  const input = partOf(field, "input"),
    list = element("ul", { class: "lines-notes" });
  const place = () => `${state.t}.${state.c}.${state.h}`;
  input.addEventListener("input", () =>
    state.set({ notes: writeNotes({ ...readNotes(state.notes), [place()]: input.value.trim() }) }),
  );
  const show = () => {
    const notes = readNotes(state.notes);
    partOf(field, "span").textContent = `Note on ${headName(state.calls(), state.c, state.h)}`;
    if (input !== document.activeElement) input.value = notes[place()] ?? "";
    list.replaceChildren(
      ...Object.entries(notes).map(([name, note]) => {
        const [t, c, h] = name.split(".").map(Number);
        const head = headName(state.shapes[t] ?? [], c, h);
        return element(
          "li",
          {},
          button(head, { title: `Go to ${head}`, press: () => state.set({ t, c, h }) }),
          ` ${note}`,
        );
      }),
    );
  };
  host.append(element("section", { "aria-label": "Notes on heads" }, field, list));
  state.on(["t", "c", "h", "notes"], show);
  show();
}
