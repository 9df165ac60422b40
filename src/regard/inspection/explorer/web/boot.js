// Opens what the page is made of: its style and script, deflated, which leaves a third of them to store.
// Without DecompressionStream, which would finish only after the page has loaded.

/**
 * Read bytes in the zlib format (RFC 1950 and 1951) at once; what follows the data is not looked at.
 * @param {Uint8Array} bytes
 * @returns {Uint8Array}
 */
export function inflateNow(bytes) {
  const out = [];
  let at = 16; // bits: two bytes say what the format is
  const bit = () => (bytes[at >> 3] >> (at++ & 7)) & 1;
  const bits = (count) => {
    let value = 0;
    for (let place = 0; place < count; place += 1) value |= bit() << place;
    return value;
  };
  const symbol = ({ counts, sorted }) => {
    // Codes of one length are consecutive numbers, and begin at twice the end of the shorter ones.
    if (at >> 3 > bytes.length) throw new Error("the page is damaged");
    let code = 0,
      first = 0,
      before = 0;
    for (let length = 1; length < 16; length += 1) {
      code = 2 * code + bit();
      const count = counts[length];
      if (code < first + count) return sorted[before + code - first];
      before += count;
      first = 2 * (first + count);
    }
    throw new Error("the page is damaged");
  };
  let last = 0;
  while (!last) {
    last = bit();
    const kind = bits(2);
    if (kind === 0) {
      at = (at + 7) & ~7;
      const count = bits(16);
      at += 16; // its complement
      for (let place = 0; place < count; place += 1) out.push(bytes[(at >> 3) + place]);
      at += 8 * count;
      continue;
    }
    const [literals, distances] = kind === 1 ? bootFixed() : bootTrees(bits, symbol);
    for (let code = symbol(literals); code !== 256; code = symbol(literals)) {
      if (code < 256) {
        out.push(code);
        continue;
      }
      const length = bootStep(code - 257, 3, 2) + bits(bootExtra(code - 257, 2));
      const far = symbol(distances);
      const from = out.length - (bootStep(far, 1, 1) + bits(bootExtra(far, 1)));
      if (from < 0) throw new Error("the page is damaged");
      for (let place = 0; place < length; place += 1) out.push(out[from + place]);
    }
  }
  return Uint8Array.from(out);
}

/**
 * Put style and script into the page, where the script runs.
 * @param {string} packed base64 of the deflated style, a NUL and the script
 */
export function openPage(packed) {
  const bytes = Uint8Array.from(atob(packed), (one) => one.charCodeAt(0));
  const parts = new TextDecoder().decode(inflateNow(bytes)).split("\0");
  for (const [place, name] of ["style", "script"].entries()) {
    const part = document.createElement(name);
    part.textContent = parts[place];
    document.head.append(part);
  }
}

/** Extra bits of the code with this number: one more for each 2^bits codes, none for the first two such. */
function bootExtra(number, bits) {
  return bits === 2 && number === 28 ? 0 : Math.max((number >> bits) - 1, 0);
}

/** Where the range of a code begins. */
function bootStep(number, start, bits) {
  if (bits === 2 && number === 28) return 258;
  let step = start;
  for (let before = 0; before < number; before += 1) step += 1 << bootExtra(before, bits);
  return step;
}

function bootTree(lengths) {
  const counts = new Array(16).fill(0);
  for (const length of lengths) if (length) counts[length] += 1;
  const sorted = [];
  for (let length = 1; length < 16; length += 1) {
    for (const [symbol, own] of lengths.entries()) if (own === length) sorted.push(symbol);
  }
  return { counts, sorted };
}

function bootFixed() {
  const lengths = Array.from({ length: 288 }, (_, n) => (n < 144 ? 8 : n < 256 ? 9 : n < 280 ? 7 : 8));
  return [bootTree(lengths), bootTree(new Array(30).fill(5))];
}

/** Trees of a block, whose lengths are themselves coded by a tree. */
function bootTrees(bits, symbol) {
  const literals = bits(5) + 257,
    distances = bits(5) + 1,
    given = bits(4) + 4;
  const order = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
  const own = new Array(19).fill(0);
  for (const place of order.slice(0, given)) own[place] = bits(3);
  const tree = bootTree(own),
    lengths = [];
  while (lengths.length < literals + distances) {
    const code = symbol(tree);
    if (code < 16) lengths.push(code);
    else if (code === 16) lengths.push(...new Array(bits(2) + 3).fill(lengths.at(-1)));
    else lengths.push(...new Array(code === 17 ? bits(3) + 3 : bits(7) + 11).fill(0));
  }
  return [bootTree(lengths.slice(0, literals)), bootTree(lengths.slice(literals))];
}
