import { button, element } from "./dom.js";
import { displayToken, headName, layerNumber } from "./passages.js";
import { formatNumber } from "./scales.js";
import { nameToken, sidesOf } from "./sides.js";

const EFFECTS_HEADS = 10;

/**
 * What each layer would predict after the chosen query (logit lens), and what heads add to the target's logit.
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountEffects(host, source, state) {
  /** @param {string[]} names */
  const make = (names) => {
    const caption = element("caption"),
      rows = element("tbody");
    const head = element("tr", {}, ...names.map((text) => element("th", { scope: "col" }, text)));
    const table = element(
      "table",
      { class: "details-table effects" },
      caption,
      element("thead", {}, head),
      rows,
    );
    host.append(table);
    return { table, caption, rows };
  };
  const lens = make(["layer", "token", "probability", "then"]),
    parts = make(["head", "adds to the logit"]);
  let now = 0;

  const draw = async () => {
    const mine = ++now,
      { t, c, h, row, direction } = state,
      { predictions, calls } = source.document.traces[t];
    const shown = predictions && row !== null && direction === "out";
    lens.table.hidden = parts.table.hidden = true;
    if (!shown) return;
    const { contributions } = predictions;
    const [texts, tokens, probabilities, targets, added, { query }] = await Promise.all([
      source.chunk(predictions.texts),
      source.chunk(predictions.tokens),
      source.chunk(predictions.probabilities),
      source.chunk(predictions.targets),
      contributions ? source.chunk(contributions) : null,
      sidesOf(source, t, c),
    ]);
    if (mine !== now) return;
    const [layers, length, count] = tokens.shape;
    /** @param {number} n */
    const word = (n) => element("bdi", {}, displayToken(texts[n]).text);
    lens.caption.textContent = `After ${nameToken(query, row)}, layers would predict`;
    lens.rows.replaceChildren(
      ...Array.from({ length: layers }, (_, l) => {
        // Of a hybrid, layers without a call predict, too.
        const n = layers > calls.length ? calls.findIndex(({ layer }) => layer === l) : l;
        const at = (l * length + row) * count,
          then = Array.from(tokens.values.subarray(at + 1, at + count), word);
        return element(
          "tr",
          { class: n === c ? "current" : null },
          element("td", {}, n < 0 ? `${l} linear` : String(layerNumber(calls, n))),
          element("td", {}, word(tokens.values[at])),
          element("td", {}, formatNumber(probabilities.values[at])),
          element("td", {}, ...then.flatMap((one) => [one, " "])),
        );
      }),
    );
    lens.table.hidden = false;
    if (!added) return;
    const heads = calls
      .flatMap((call, l) =>
        call.head.map((_, n) => ({ l, n, value: added.values[(l * call.heads + n) * length + row] })),
      )
      .sort((one, other) => Math.abs(other.value) - Math.abs(one.value));
    parts.caption.replaceChildren(
      "Heads, by what they add to the logit of ‘",
      word(targets.values[row]),
      "’",
    );
    parts.rows.replaceChildren(
      ...heads.slice(0, EFFECTS_HEADS).map(({ l, n, value }) =>
        element(
          "tr",
          { class: l === c && n === h ? "current" : null },
          element(
            "td",
            {},
            button(headName(calls, l, n), {
              title: `Show ${headName(calls, l, n)}`,
              press: () => state.set({ c: l, h: n, selection: [[l, n]] }),
            }),
          ),
          element(
            "td",
            {
              class: "details-weight",
              style: { "--part": String(Math.abs(value / heads[0].value) || 0) },
            },
            `${value > 0 ? "+" : ""}${formatNumber(value)}`,
          ),
        ),
      ),
    );
    parts.table.hidden = false;
  };
  state.on(["t", "c", "h", "row", "direction"], draw);
  draw();
}
