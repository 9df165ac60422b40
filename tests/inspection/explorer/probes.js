// What the tests in a browser ask of a page, as functions of `window.probe`.
(() => {
  // A policy that a page breaks is told to the document, and is not always on the console.
  addEventListener("securitypolicyviolation", (event) => {
    console.error(`policy: ${event.violatedDirective} refused ${event.blockedURI}`);
  });

  const visible = (one) => one.checkVisibility({ visibilityProperty: true });
  const outline = (one) => one.outerHTML.slice(0, 160);
  const seen = new Set();
  addEventListener("focusin", ({ target }) => seen.add(target));

  function controls() {
    const every = document.querySelectorAll("button, input, select, textarea, summary, a[href], [tabindex]");
    return [...every].filter((one) => one.tabIndex >= 0 && visible(one) && !one.disabled);
  }

  /** Whether an element around it that hides what is beyond its edges had to be scrolled; it is put back. */
  function shut(one) {
    let found = false;
    for (let up = one.parentElement; up; up = up.parentElement) {
      const { overflowX, overflowY } = getComputedStyle(up);
      if ((overflowY === "hidden" && up.scrollTop > 1) || (overflowX === "hidden" && up.scrollLeft > 1)) {
        up.scrollTo(0, 0);
        found = true;
      }
    }
    return found;
  }

  /** Relative luminance, as WCAG has it. */
  function luminance([r, g, b]) {
    const linear = [r, g, b]
      .map((part) => part / 255)
      .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  }

  let pen = null;
  function channels(colour) {
    pen ??= document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data];
  }

  /** The opaque colour behind an element; null where it is a picture or a mixture. */
  function ground(one) {
    for (let up = one; up; up = up.parentElement) {
      const style = getComputedStyle(up);
      const colour = channels(style.backgroundColor);
      if (style.backgroundImage !== "none" || (colour[3] > 0 && colour[3] < 255)) return null;
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255, 255];
  }

  // A page is laid out anew on paper, and no ResizeObserver hears of it.
  let printing = false;
  const { ResizeObserver: Real } = window;
  window.ResizeObserver = class extends Real {
    constructor(call) {
      super((...all) => printing || call(...all));
    }
  };

  const rest = (time) => new Promise((done) => setTimeout(done, time));
  const seenText = ({ innerText }) => innerText;
  const text = (selector) => seenText(document.querySelector(selector) ?? { innerText: "" });

  window.probe = {
    /** Two frames, and the work that they started; false where there are none within 15 s. */
    drawn: () =>
      new Promise((done) => {
        setTimeout(done, 15_000, false);
        requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 20, true)));
      }),

    /** The explorer of a page or frame is there: its script is inflated as the page loads. */
    opened: async () => {
      for (const end = Date.now() + 60_000; !window.__regard; await rest(10))
        if (Date.now() > end) throw new Error("no explorer was there in 60 s");
      const late = rest(60_000).then(() => {
        throw new Error("not ready in 60 s");
      });
      await Promise.race([window.__regard.ready, late]);
    },

    /** The text of a part that holds all of some words; "" before. */
    holding: (selector, words) =>
      words.every((word) => text(selector).includes(word)) ? text(selector) : "",

    /** Texts of a table's cells, row by row. */
    rows: (table) =>
      [...document.querySelectorAll(`${table} tbody tr`)].map((row) => [...row.cells].map(seenText)),

    /** How many pixels between the columns of Lines have a colour, if that is within bounds; else 0. */
    painted: (least, end) => {
      const canvas = document.querySelector(".lines-figure canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const count = data.filter((value, n) => n % 4 === 3 && value > 8).length;
      return count >= least && count < end ? count : 0;
    },

    /** What a screen reader was told last that holds a word. */
    said: (word) =>
      [...document.querySelectorAll("[aria-live=polite]")]
        .map((one) => one.textContent)
        .find((told) => told.includes(word)),

    /** Whether a tab stands on paper with its marks and words, and without what is pressed. */
    isOnPaper: (tab) =>
      ({
        attention: () =>
          window.probe.strayed < 0.01 && document.querySelector(".rg-plain")?.checkVisibility() === false,
        lines: () => text(".lines-main .details-note").includes("Printed are queries "),
        compare: () => getComputedStyle(document.querySelector(".compare-bar select")).appearance === "none",
      })[tab]?.() ?? true,

    still: (on) => {
      printing = on;
      if (!on) return;
      const { prototype } = CanvasRenderingContext2D;
      const { strokeRect } = prototype;
      const { row, key } = __regard.state();
      const cell = row === null ? null : __regard.pixel(row, key);
      window.probe.strayed = null;
      prototype.strokeRect = function (x, y, w, h) {
        if (cell && this.lineWidth === 2 && this.canvas.className === "rg-print")
          window.probe.strayed = Math.hypot(x + w / 2 - cell.x, y + h / 2 - cell.y);
        strokeRect.call(this, x, y, w, h);
      };
      dispatchEvent(new Event("beforeprint"));
      prototype.strokeRect = strokeRect;
    },

    /** Tokens in sight of the Reader, with their tint. */
    tints: () =>
      [...document.querySelectorAll(".reader-lines [data-token]")].map((one) => [
        Number(one.dataset.token),
        Number(one.style.getPropertyValue("--tint")),
      ]),

    /** What a page's policy refuses: a script of its own, an address, a picture from elsewhere. */
    attempts: async () => {
      const script = document.createElement("script");
      script.textContent = "window.__ran = true";
      document.body.append(script);
      await new Promise((done) => setTimeout(done, 30));
      const fetched = await fetch("https://example.org/").then(
        () => true,
        () => false,
      );
      const image = Object.assign(new Image(), { src: "https://example.org/x.png" });
      const drawn = await image.decode().then(
        () => true,
        () => false,
      );
      await new Promise((done) => setTimeout(done, 200)); // refusals are told a little later
      return [window.__ran === true, fetched, drawn];
    },

    pressedAndLoose: () => {
      const pressed = document.querySelector("button[aria-pressed=true]");
      const loose = pressed.parentElement.querySelector("button[aria-pressed=false]");
      return [pressed, loose].map(window.probe.look);
    },

    /** How far from its cell the frame of the chosen one was drawn on paper, in pixels. */
    strayed: null,

    /** How many pixels of a picture have the colour of cells that may not attend. */
    greys: async (selector) => {
      while (!document.querySelector(selector)) await rest(20);
      const picture = Object.assign(new Image(), {
        src: document.querySelector(selector).getAttribute("href"),
      });
      await picture.decode();
      const canvas = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
      canvas.drawImage(picture, 0, 0);
      const { data } = canvas.getImageData(0, 0, picture.width, picture.height);
      return data.filter((red, n) => n % 4 === 0 && red === 219 && data[n + 1] === 220).length;
    },

    /** Drawings that go on beyond the sheet. */
    cut: () =>
      [...document.querySelectorAll(".regard :is(svg, canvas)")]
        .filter((one) => visible(one) && one.getBoundingClientRect().right > innerWidth)
        .map(outline),

    /** For queries and keys of Compare: labels with their places, and the places of pixels of a colour. */
    underLabels: ([r, g, b]) => {
      const canvas = document.querySelector(".compare-stage canvas");
      const box = canvas.getBoundingClientRect();
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const [down, across] = [[], []];
      for (let n = 0; n < data.length; n += 4) {
        if (Math.hypot(data[n] - r, data[n + 1] - g, data[n + 2] - b) > 3 || data[n + 3] < 255) continue;
        across.push(box.left + ((((n / 4) % canvas.width) + 0.5) * box.width) / canvas.width);
        down.push(box.top + ((Math.floor(n / 4 / canvas.width) + 0.5) * box.height) / canvas.height);
      }
      const labels = (anchor, middle) =>
        [...document.querySelectorAll(`.compare-stage text[text-anchor=${anchor}]:not(.plot-label)`)].map(
          (one) => [Number(one.textContent), middle(one.getBoundingClientRect())],
        );
      return [
        [labels("end", ({ top, height }) => top + height / 2), down],
        [labels("middle", ({ left, width }) => left + width / 2), across],
      ];
    },

    nodes: () => document.querySelectorAll("*").length,

    controls: () => controls().length,

    reached: () => {
      const once = [...seen];
      const back = once.filter(
        (one, n) => n && !(once[n - 1].compareDocumentPosition(one) & Node.DOCUMENT_POSITION_FOLLOWING),
      );
      return { count: once.length, back: back.map(outline) };
    },

    /** Controls that cannot be brought under a finger: covered, cut off, or of no size. */
    unreachable: () => {
      const lost = [];
      for (const one of controls()) {
        one.scrollIntoView({ block: "center", inline: "center" });
        const box = one.getBoundingClientRect();
        const [x, y] = [
          box.left + Math.min(box.width, innerWidth) / 2,
          box.top + Math.min(box.height, innerHeight) / 2,
        ];
        const found = document.elementFromPoint(x, y);
        const label = one.closest("label");
        // Cells of the grid lie under the picture that they are drawn in, which finds them again.
        const drawn = one.role === "gridcell" && found === one.closest(".rg-atlas").querySelector("canvas");
        // What cannot be scrolled by hand was scrolled just now.
        const stuck = shut(one);
        if (!stuck && found && (drawn || one.contains(found) || label?.contains(found))) continue;
        lost.push(`${outline(one)} at ${x},${y} under ${found ? outline(found) : "nothing"}`);
      }
      scrollTo(0, 0);
      return lost;
    },

    /** The focused control, where nothing around it shows that it is. */
    ringless: () => {
      const one = document.activeElement;
      if (!one || one === document.body) return [];
      const style = getComputedStyle(one);
      const ring = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
      return ring || style.boxShadow !== "none" ? [] : [outline(one)];
    },

    /** Texts with less contrast than 4.5 to 1. */
    faint: () => {
      const weak = [];
      const left =
        "script, svg, option, [disabled], [aria-disabled=true], [aria-hidden=true], .reader-text, .rg-atlas canvas";
      const walker = document.createTreeWalker(document.querySelector(".regard"), NodeFilter.SHOW_TEXT);
      for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const one = node.parentElement;
        if (!node.data.trim() || !visible(one) || one.closest(left)) continue;
        const behind = ground(one);
        if (!behind) continue;
        const [a, b] = [luminance(channels(getComputedStyle(one).color)), luminance(behind)];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5)
          weak.push(
            `${ratio.toFixed(2)} "${node.data.trim().slice(0, 40)}" in ${one.tagName}.${one.className}`,
          );
      }
      return weak;
    },

    /** The same for the letters of drawings. */
    faintLetters: () =>
      [...document.querySelectorAll("svg text")].filter(visible).flatMap((one) => {
        const behind = ground(one);
        const fill = getComputedStyle(one).fill;
        if (!behind || !one.textContent.trim() || one.closest("[aria-hidden=true]")) return [];
        const [a, b] = [luminance(channels(fill)), luminance(behind)];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        return ratio < 4.5 ? [`${ratio.toFixed(2)} "${one.textContent}" ${fill}`] : [];
      }),

    ground: (selector) => ground(document.querySelector(selector))?.slice(0, 3) ?? null,

    /** Buttons whose name does not hold what is seen on them. */
    misnamed: () =>
      [...document.querySelectorAll("button[aria-label]")]
        .filter((one) => {
          const words = one.textContent
            .toLowerCase()
            .replace(/[^\p{L} ]/gu, "")
            .trim();
          return words.length > 1 && !one.getAttribute("aria-label").toLowerCase().includes(words);
        })
        .map(outline),

    /** Elements that would move. */
    moving: () =>
      [...document.querySelectorAll("*")]
        .filter((one) => {
          const { transitionDuration, animationDuration } = getComputedStyle(one);
          return `${transitionDuration},${animationDuration}`
            .split(",")
            .some((time) => parseFloat(time) > 0.01);
        })
        .map(outline),

    look: (one) => {
      const style = getComputedStyle(one);
      return [
        style.color,
        style.backgroundColor,
        style.borderBottomColor,
        style.borderBottomWidth,
        style.outlineStyle,
        style.fontWeight,
        style.textDecorationLine,
      ].join();
    },

    repeated: () => {
      const ids = [...document.querySelectorAll("[id]")]
        .map(({ id }) => id)
        .filter((id) => id !== "regard-document");
      return ids.filter((id, n) => ids.indexOf(id) !== n);
    },

    /** How many colours the map has. */
    colours: () => {
      const canvas = document.querySelector("canvas.rg-base");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size;
    },

    /** Red, green, blue and place on the colour bar of the map's own pixels under the centres of cells. */
    pixels: (cells) => {
      const canvas = document.querySelector("canvas.rg-base");
      const box = canvas.getBoundingClientRect();
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return cells.map(([i, j]) => {
        const { x, y } = __regard.pixel(i, j);
        const at = [(x * canvas.width) / box.width, (y * canvas.height) / box.height].map(Math.floor);
        const [r, g, b] = data.slice(4 * (at[1] * canvas.width + at[0]));
        return [r, g, b, __regard.unit(r, g, b)];
      });
    },

    cells: async ([c, h, rows, keys]) => {
      const found = [];
      for (let i = 0; i < rows; i += 1)
        for (let j = 0; j < keys; j += 1) found.push(await __regard.cell(0, c, h, i, j));
      return found;
    },
  };
})();
