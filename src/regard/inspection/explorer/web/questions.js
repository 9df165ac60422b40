// Questions about what is looked at: why a head looked there, and by which paths a prediction came.

import { element, shown } from "./dom.js";
import { drawPaths } from "./paths.js";
import { formatNumber } from "./scales.js";

export const CHOOSE_CELL = "Choose a cell of the map first, by a click: a query and a key.";

/**
 * What a score is, in words.
 * @param {Record<string, string>} cell @param {{score: number, permitted: boolean}} answer
 */
export function tellScore({ layer, head, query, key }, { score, permitted }) {
  const forbidden = permitted
    ? ""
    : " This query may not attend to this key: the weight is 0, whatever the product.";
  return (
    `Head ${layer}.${head}, query ${query}, key ${key}: scaled product ${formatNumber(score)}, ` +
    `before score functions, biases and the mask.${forbidden} Of it:`
  );
}

/**
 * The score of a cell as a table of the parts that make most of it.
 * @param {Record<string, string>} cell
 * @param {{score: number, permitted: boolean, parts: Array<[string, string, number]>}} answer
 */
function drawParts(cell, answer) {
  /** @param {"th" | "td"} kind @param {string[]} texts */
  const line = (kind, texts) => element("tr", {}, ...texts.map((text) => element(kind, {}, text)));
  return element(
    "table",
    { class: "details-table live-why" },
    element("caption", {}, tellScore(cell, answer)),
    element("thead", {}, line("th", ["written at the query", "written at the key", "adds"])),
    element(
      "tbody",
      {},
      ...answer.parts.map(([atQuery, atKey, adds]) =>
        line("td", [atQuery, atKey, `${adds > 0 ? "+" : ""}${formatNumber(adds)}`]),
      ),
    ),
  );
}

/**
 * Buttons that ask about what is looked at, and where the answers stand.
 * @param {{
 *   why: boolean, paths: boolean,
 *   place: () => URLSearchParams, text: (place: URLSearchParams) => string,
 *   request: (path: string, signal: AbortSignal) => Promise<any>,
 *   tell: (message: string, python?: string) => void, fail: (message?: string) => void,
 *   look: (fields: Record<string, number>) => void,
 * }} page
 * @param {(task: (signal: AbortSignal) => Promise<void>) => {plan: (wait?: number) => any, stop: () => void}} latestOf
 */
export function mountQuestions(page, latestOf) {
  const answered = element("div", { class: "live-answer", hidden: true });
  /** @param {string} path @param {Record<string, string>} asked @param {AbortSignal} signal */
  const ask = async (path, asked, signal) => {
    page.tell("asking the model …");
    const answer = await page.request(`${path}?${new URLSearchParams(asked)}`, signal);
    if (answer) page.tell("", answer.python);
    return answer;
  };
  const clear = () => {
    page.fail();
    answered.hidden = true;
  };
  /** @param {AbortSignal} signal */
  const askWhy = async (signal) => {
    const place = page.place();
    const [query, key] = [place.get("row"), place.get("key")];
    clear();
    if (query === null || key === null) {
      page.fail(CHOOSE_CELL);
      return;
    }
    const cell = { layer: place.get("l") ?? "0", head: place.get("h") ?? "0", query, key };
    const answer = await ask("why", { text: page.text(place), ...cell }, signal);
    if (!answer) return;
    answered.replaceChildren(drawParts(cell, answer));
    answered.hidden = false;
  };
  /** @param {AbortSignal} signal */
  const askPaths = async (signal) => {
    const place = page.place();
    clear();
    const answer = await ask("paths", { text: page.text(place), query: place.get("row") ?? "-1" }, signal);
    if (!answer) return;
    /** @type {(edge: PathEdge) => void} */
    const look = ({ layer, head, query, key }) => page.look({ l: layer, h: head, row: query, key });
    const title = `What ‘${shown(answer.tokens[answer.query])}’ (${answer.query}) predicts, and by which heads and tokens`;
    const graph = drawPaths(answer, look);
    answered.replaceChildren(element("h2", {}, title), graph);
    answered.hidden = false;
    // The prediction is on the right.
    if (graph.firstElementChild) graph.firstElementChild.scrollLeft = graph.firstElementChild.scrollWidth;
  };
  let question = askWhy;
  const latest = latestOf((signal) => question(signal));
  /** @param {(signal: AbortSignal) => Promise<void>} asked */
  const press = (asked) => () => {
    question = asked;
    latest.plan(0);
  };
  const forget = () => {
    latest.stop();
    answered.hidden = true;
  };
  const buttons = [
    element("button", {
      type: "button",
      text: "Why this cell?",
      title: "Split the scaled product of the chosen query and key over what wrote into their streams (w)",
      "aria-keyshortcuts": "w",
      hidden: !page.why,
      on: { click: press(askWhy) },
    }),
    element("button", {
      type: "button",
      text: "Paths to the prediction",
      title:
        "What heads pass from token to token towards what the chosen query predicts; the last token if none is (g)",
      "aria-keyshortcuts": "g",
      hidden: !page.paths,
      on: { click: press(askPaths) },
    }),
  ];
  return { buttons, answered, forget };
}
