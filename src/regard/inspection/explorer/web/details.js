import { button, element } from "./dom.js";
import { displayToken, entropyOf, headName, keysHolding, largestIndices } from "./passages.js";
import { readChosen } from "./reader.js";
import { rolledLayers, rolledWords } from "./rollout.js";
import { formatNumber } from "./scales.js";
import { nameToken, sidesOf } from "./sides.js";

const DETAILS_TOP = 10;
/** Milliseconds until a row that is on its way is said to be. */
const DETAILS_LATE = 200;

/**
 * What the page stores of a row's statistics: means over a bin of rows.
 * @param {Source} source @param {number} t @param {number} c @param {number} h @param {number} row
 * @returns {Promise<Record<string, number>|null>} by name, with `bin`; null when nothing is stored
 */
export async function storedRow(source, t, c, h, row) {
  const head = source.head(t, c, h),
    names = source.call(t, c).row_stats ?? [];
  const stats = head.row_stats ? await source.chunk(head.row_stats) : null;
  if (!stats) return null;
  const bins = stats.shape[1],
    bin = head.row_bin || 1,
    at = Math.floor(row / bin);
  return { ...Object.fromEntries(names.map((name, n) => [name, stats.values[n * bins + at]])), bin };
}

/**
 * @param {HTMLElement} host
 * @param {Source} source
 * @param {State} state
 */
export function mountDetails(host, source, state) {
  const numbers = element("dl", { class: "details-numbers" }),
    note = element("p", { class: "details-note" });
  const caption = element("caption"),
    head = element("thead"),
    rows = element("tbody");
  const table = element("table", { class: "details-table" }, caption, head, rows);
  host.classList.add("details");
  host.append(numbers, table, note);
  let now = 0;

  const draw = async () => {
    const mine = ++now,
      { t, c, h, row, key, direction } = state,
      call = source.call(t, c),
      out = direction === "out";
    const n = out ? row : key;
    if (!call?.heads || n === null) {
      table.hidden = numbers.hidden = true;
      note.textContent =
        "The largest weights of the chosen row stand here: choose a cell of the map or a token.";
      return;
    }
    const sides = await sidesOf(source, t, c),
      asks = out ? sides.query : sides.key,
      answers = out ? sides.key : sides.query;
    const late = setTimeout(() => {
      if (mine !== now) return;
      table.hidden = numbers.hidden = true;
      note.textContent = `${out ? "Query" : "Key"} ${nameToken(asks, n)}: being computed …`;
    }, DETAILS_LATE);
    const layers = rolledLayers(source, state),
      found = await readChosen(source, state);
    clearTimeout(late);
    const exact = found?.exact ? found.values : null;
    const known = out && !exact ? await source.topKeys(t, c, h, n, DETAILS_TOP) : null;
    const stored = out ? await storedRow(source, t, c, h, n) : null;
    if (mine !== now) return;
    const all = exact
      ? largestIndices(exact, DETAILS_TOP).map((at) => ({ key: at, weight: exact[at] }))
      : (known ?? []);
    const top = all.filter(({ weight }, place) => place < 3 || weight >= 1e-6);
    const sum = exact ? exact.reduce((total, one) => total + one, 0) : NaN;
    const empty = exact && sum === 0;
    const sink =
      !out || layers || !call.sinks
        ? NaN
        : exact
          ? empty
            ? NaN
            : Math.max(0, 1 - sum)
          : (stored?.sink_mass ?? NaN);
    table.hidden = !top.length;
    numbers.hidden = false;
    const one =
      state.selection.length > 1 && !layers
        ? `${headName(state.calls(), c, h)}, one of ${state.selection.length}: `
        : "";
    const does = layers ? rolledWords(layers) : out ? "reads" : "is read by";
    caption.textContent = `${one}${out ? "Query" : "Key"} ${nameToken(asks, n)} ${does}`;
    head.replaceChildren(
      element(
        "tr",
        {},
        ...[out ? "key" : "query", "token", "tokens back", layers ? "share" : "weight", out ? "sum" : ""].map(
          (text) => element("th", { scope: "col" }, text),
        ),
      ),
    );
    let total = 0;
    const shift = call.query_offset - call.key_offset;
    /** @param {{ key: number, weight: number }} what */
    const line = ({ key: other, weight }) => {
      total += weight;
      const distance = out ? n + shift - other : other + shift - n;
      const cells = [
        element("bdi", {}, displayToken(answers.textAt(other)).text),
        formatNumber(distance),
        "",
        out ? formatNumber(total) : "",
      ];
      const weigh = element(
        "td",
        { class: "details-weight", style: { "--part": String(Math.min(1, weight / (top[0].weight || 1))) } },
        formatNumber(weight),
      );
      const go = button(String(other + answers.offset), {
        title: `Go to ${out ? "key" : "query"} ${other + answers.offset}`,
        press: () => state.set({ [out ? "key" : "row"]: other }),
      });
      return element(
        "tr",
        { class: other === (out ? key : row) ? "current" : null },
        element("td", {}, go),
        ...cells.map((cell, at) => (at === 2 ? weigh : element("td", {}, cell))),
      );
    };
    rows.replaceChildren(...top.map(line));
    if (sink > 0) {
      rows.append(
        element(
          "tr",
          { class: "details-sink" },
          element("td", {}, "∅"),
          element("td", {}, "(sink)"),
          element("td"),
          element("td", {}, formatNumber(sink)),
          element("td", {}, formatNumber(total + sink)),
        ),
      );
    }
    const about = stored && stored.bin > 1 ? `mean of ${stored.bin} rows` : "";
    const facts = !out
      ? [
          ["mass on the key", exact ? formatNumber(sum) : "", ""],
          ["mean over queries", exact ? formatNumber(sum / (call.rows || 1)) : "", ""],
        ]
      : [
          [
            "entropy",
            exact
              ? `${formatNumber(entropyOf(exact, sink))} nats`
              : stored && `${formatNumber(stored.entropy)} nats`,
            exact ? "" : about,
          ],
          [
            "largest",
            exact
              ? formatNumber(top[0]?.weight ?? 0)
              : formatNumber(known?.[0]?.weight ?? stored?.max_weight),
            exact || known ? "" : about,
          ],
          [
            "keys for 90 % / 99 %",
            exact ? `${keysHolding(exact, 0.9)} / ${keysHolding(exact, 0.99)}` : "",
            "",
          ],
        ];
    numbers.replaceChildren(
      ...facts
        .filter(([, value]) => value !== "" && value !== null)
        .map(([name, value, more]) =>
          element(
            "div",
            {},
            element("dt", {}, name),
            element("dd", {}, String(value), more && element("small", {}, ` ${more}`)),
          ),
        ),
    );
    const how = "For exact numbers pin the head (pinned= of trace.explore) or serve the trace.";
    note.textContent = empty
      ? out
        ? "This query may attend to nothing: its row is empty."
        : "No query reads this key."
      : exact
        ? ""
        : !found
          ? `Nothing is stored about this row. ${how}`
          : known
            ? `Right within 3.4 %; the other keys are known in blocks of ${found.bin}. ${how}`
            : `Known here only in blocks of ${found.bin} ${out ? "keys" : "queries"} (${
                found.of === "largest"
                  ? "largest of each"
                  : `mean over ${found.blocked} ${out ? "queries" : "keys"}`
              }). ${how}`;
  };
  state.on(["t", "c", "h", "row", "key", "direction", "rollout"], draw);
  draw();
}
