import { pointIn } from "./dom.js";
import { cellAt, drawnView, panView, placeAt, zoomFactor, zoomView } from "./geometry.js";

/**
 * Wheel, drag, pinch, click and double click on the map.
 * @param {HTMLElement} target
 * @param {{layout: () => MapLayout, shape: () => Shape, view: () => View, scale: () => {perRow: number, perKey: number},
 *   minimap: () => Rect|null, change: (view: View) => void, hover: (cell: Cell|null) => void,
 *   choose: (cell: Cell) => void}} map
 */
export function followPointer(target, map) {
  const pointers = new Map();
  /** @type {{from: Point, view: View, moved: boolean, mini: Rect|null, pinch: boolean}|null} */
  let drag = null;
  /** @param {MouseEvent} event */
  const at = (event) => pointIn(target, event);
  const drawn = () => drawnView(map.view(), map.layout().plot, map.shape());
  /** @param {number} factor @param {Point} options */
  const zoom = (factor, { x, y }) => {
    const view = drawn();
    const { q, k } = placeAt(view, map.layout().plot, x, y);
    const by = zoomFactor(factor, map.scale(), map.shape());
    map.change(zoomView(view, by, q, k, map.shape()));
  };
  /** @param {Point} spot */
  const insideMinimap = (spot) => {
    const mini = map.minimap();
    return mini &&
      spot.x >= mini.x &&
      spot.y >= mini.y &&
      spot.x < mini.x + mini.w &&
      spot.y < mini.y + mini.h
      ? mini
      : null;
  };
  /** @param {Rect} mini @param {Point} spot */
  const jump = (mini, spot) => {
    const view = drawn();
    const shape = map.shape();
    const q = ((spot.y - mini.y) / mini.h) * shape.rows;
    const k = ((spot.x - mini.x) / mini.w) * shape.keys;
    map.change(panView(view, q - (view.q0 + view.q1) / 2, k - (view.k0 + view.k1) / 2, shape));
  };
  target.addEventListener(
    "wheel",
    (event) => {
      const scrolls = document.documentElement.scrollHeight > innerHeight + 8;
      // On a page that scrolls, the wheel belongs to the page until the map is asked for.
      if (scrolls && !event.ctrlKey && !target.parentElement?.contains(document.activeElement)) return;
      event.preventDefault();
      const lines = event.deltaMode === 1 ? 18 : event.deltaMode === 2 ? 400 : 1;
      if (event.shiftKey && !event.ctrlKey) {
        const { perKey } = map.scale();
        map.change(panView(drawn(), 0, ((event.deltaX || event.deltaY) * lines) / perKey, map.shape()));
      } else
        zoom(
          Math.exp(Math.min(1, Math.max(-1, event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.0018)))),
          at(event),
        );
    },
    { passive: false },
  );
  target.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    const spot = at(event);
    pointers.set(event.pointerId, spot);
    try {
      target.setPointerCapture(event.pointerId);
    } catch {
      // a pointer that is gone already
    }
    drag = { from: spot, view: drawn(), moved: false, mini: insideMinimap(spot), pinch: pointers.size > 1 };
    if (drag.mini) jump(drag.mini, spot);
  });
  target.addEventListener("pointermove", (event) => {
    const spot = at(event);
    if (!pointers.has(event.pointerId)) {
      map.hover(insideMinimap(spot) ? null : cellAt(drawn(), map.layout().plot, spot.x, spot.y, map.shape()));
      return;
    }
    const before = [...pointers.values()];
    pointers.set(event.pointerId, spot);
    if (drag?.mini) jump(drag.mini, spot);
    else if (pointers.size > 1) {
      const now = [...pointers.values()];
      /** @param {Point[]} two */
      const apart = (two) => Math.max(8, Math.hypot(two[0].x - two[1].x, two[0].y - two[1].y));
      zoom(apart(before) / apart(now), { x: (now[0].x + now[1].x) / 2, y: (now[0].y + now[1].y) / 2 });
    } else if (drag && !drag.pinch) {
      const [dx, dy] = [spot.x - drag.from.x, spot.y - drag.from.y];
      if (!drag.moved && Math.hypot(dx, dy) < 4) return;
      drag.moved = true;
      const { perRow, perKey } = map.scale();
      map.change(panView(drag.view, -dy / perRow, -dx / perKey, map.shape()));
    }
  });
  /** @param {PointerEvent} event */
  const lift = (event) => {
    const click =
      event.type === "pointerup" &&
      drag &&
      !drag.moved &&
      !drag.mini &&
      !drag.pinch &&
      pointers.has(event.pointerId);
    pointers.delete(event.pointerId);
    if (click) {
      const spot = at(event);
      const cell = cellAt(drawn(), map.layout().plot, spot.x, spot.y, map.shape());
      if (cell) map.choose(cell);
    }
    if (!pointers.size) drag = null;
  };
  target.addEventListener("pointerup", lift);
  target.addEventListener("pointercancel", lift);
  target.addEventListener("pointerleave", () => map.hover(null));
  target.addEventListener("dblclick", (event) => zoom(0.4, at(event)));
}
