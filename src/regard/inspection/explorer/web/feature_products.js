import { element, svg } from "./dom.js";
import { headName, largestIndices } from "./passages.js";
import { formatNumber } from "./scales.js";

const PRODUCTS_LISTED = 6;
const PRODUCTS_WIDTH = 320,
  PRODUCTS_HEIGHT = 64;

/**
 * What each feature of a head's width adds to the score of the chosen pair.
 * @param {HTMLElement} host @param {Source} source @param {State} state
 */
export function mountProducts(host, source, state) {
  const section = element("section", { class: "lines-products", hidden: true });
  host.append(section);
  let now = 0;
  const draw = async () => {
    const mine = ++now,
      { t, c, h, row, key } = state;
    const own = source.head(t, c, h);
    section.hidden = row === null || key === null || !own?.query;
    if (!own?.query || !own.key || row === null || key === null) return;
    const [query, keys] = await Promise.all([source.chunk(own.query), source.chunk(own.key)]);
    if (mine !== now) return;
    const products = productsOf(query.values, keys.values, query.shape[1], row, key);
    const sum = products.reduce((total, one) => total + one, 0);
    const sizes = products.map(Math.abs),
      most = Math.max(0, ...sizes.filter(Number.isFinite)) || 1,
      wide = PRODUCTS_WIDTH / products.length,
      middle = PRODUCTS_HEIGHT / 2;
    const bars = Array.from(products, (one, n) =>
      Number.isFinite(one)
        ? `M${(n * wide).toFixed(2)} ${middle}v${((-one / most) * middle).toFixed(2)}h${(0.8 * wide).toFixed(2)}V${middle}z`
        : "",
    );
    const { query_offset, key_offset } = source.call(t, c);
    section.replaceChildren(
      element("h2", {
        text: `q · k by feature: query ${row + query_offset}, key ${key + key_offset}, ${headName(source.document.traces[t].calls, c, h)}`,
      }),
      svg(
        "svg",
        {
          viewBox: `0 0 ${PRODUCTS_WIDTH} ${PRODUCTS_HEIGHT}`,
          role: "img",
          "aria-label": `${products.length} products`,
        },
        svg("path", { d: `M0 ${middle}h${PRODUCTS_WIDTH}`, class: "plot-axis" }),
        svg("path", { d: bars.join(""), class: "lines-bars" }),
      ),
      element(
        "p",
        { class: "details-note" },
        `Scaled sum ${formatNumber(sum)}, before biases and score functions; largest: `,
        largestIndices(sizes, PRODUCTS_LISTED)
          .map((n) => `feature ${n} ${formatNumber(products[n])}`)
          .join(", "),
        ".",
      ),
    );
  };
  state.on(["t", "c", "h", "row", "key"], draw);
  draw();
}

/**
 * @param {ArrayLike<number>} query T x D, scaled @param {ArrayLike<number>} keys S x D @param {number} D
 * @param {number} row @param {number} key
 * @returns {Float64Array} D numbers whose sum is the score
 */
export function productsOf(query, keys, D, row, key) {
  return Float64Array.from({ length: D }, (_, n) => query[row * D + n] * keys[key * D + n]);
}
