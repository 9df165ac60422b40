"""The page's document, that JSON can hold, and the chunks that it names."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, TypedDict

import numpy as np

from regard import __version__
from regard.arguments import as_array
from regard.inspection.explorer.budgets import Plan
from regard.inspection.explorer.codes import Entry, pack
from regard.inspection.explorer.head_records import ROW_STATS, CallRecords, Packed, number
from regard.inspection.explorer.position_curves import bias_curves, rotary_curve, split_scores, table_picture
from regard.inspection.rollouts import find_below
from regard.inspection.tokens import Tokens, number_sequence

FORMAT, VERSION = "regard-page", 1
LARGEST_PICTURE = 512  # pixels along a side
MOST_POINTS = 20_000  # of a curve
MOST_BIASES = 8
_BLOCK = 1 << 20  # characters of chunks in one element, of which a page should have few
_LONGEST_KERNEL = 4096
_CALL_FIELDS = ("name", "layer", "kind", "heads", "rows", "keys", "query_offset", "key_offset")


class PageOptions(TypedDict, total=False):
    """Options of a page; `pages.write` describes them."""

    compare: Any
    title: str | None
    pinned: int | Sequence[tuple[int, int]]
    training: Mapping[str, Any] | None
    positions: Mapping[str, Any] | None
    cut: Sequence[tuple[int, int]]


@dataclass
class Payload:
    """A page's data: all that JSON can hold, and named bytes, of which what is the same is kept once."""

    document: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    chunks: dict[str, bytes] = field(default_factory=dict)
    _known: dict[bytes, str] = field(default_factory=dict)

    def add(self, packed: Packed) -> str:
        """Keep a chunk of `codes.pack`, and give its name."""
        entry, data = packed
        mark = hashlib.sha256(json.dumps(entry).encode() + b"\n" + data).digest()
        if mark not in self._known:
            name = f"c{len(self.chunks)}"
            self._known[mark], self.entries[name], self.chunks[name] = name, entry, data
        return self._known[mark]

    def cost(self) -> int:
        """Return an upper bound of the bytes that the data take in a page."""
        lines = sum(4 * -(-len(data) // 3) + len(name) + 2 for name, data in self.chunks.items())
        return len(write_json(self.document)) + lines + 64 * (lines // _BLOCK + 1)

    def blocks(self) -> Iterator[str]:
        """Yield the chunks as elements of the page, with a line `name:base64` for each."""
        lines, size, last = [], 0, next(reversed(self.chunks), None)
        for name, data in self.chunks.items():
            lines.append(f"{name}:{base64.b64encode(data).decode()}")
            size += len(lines[-1])
            if size > _BLOCK or name == last:
                text = "\n".join(lines)
                yield f'<script type="text/plain" class="regard-chunks">{text}</script>\n'
                lines, size = [], 0


@dataclass
class Writer:
    """A writer of the document for one plan after another."""

    traces: Sequence[Any]
    records: Sequence[Sequence[CallRecords]]
    chosen: Sequence[tuple[int, int]]  # heads to pin
    served: bool
    title: str | None = None
    training: Mapping[str, Any] | None = None
    positions: Mapping[str, Any] | None = None
    cut: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        self.remarks: list[str] = []
        self.places = self._places(self.positions or {})
        self._packed: dict[Any, Packed] = {}

    def write(self, plan: Plan, notes: Sequence[str]) -> tuple[Payload, int]:
        """Return the payload and how many bytes it takes in a page."""
        page = Payload()
        pinned = set(self.chosen[: plan.pinned])
        exact = any(call.weights_code for calls in self.records for call in calls)
        recorded = zip(self.traces, self.records, strict=True)
        page.document = {
            "format": FORMAT,
            "version": VERSION,
            "title": self.traces[0].title if self.title is None else self.title,
            "made_with": {"regard": __version__, "jax": metadata.version("jax")},
            "exact": "served" if self.served else "embedded" if exact else "none",
            "pinned": [list(pair) for pair in self.chosen[: plan.pinned]],
            "traces": [self._trace(trace, calls, plan, pinned, page) for trace, calls in recorded],
            "training": None if self.training is None else self._curves(self.training, page),
            "positions": [self._place(panel, page) for panel in self.places],
            "chunks": page.entries,
        }
        if self.cut:
            page.document["cut"] = [list(pair) for pair in self.cut]
        # Only now is all of it known.
        page.document["notes"] = [*dict.fromkeys(self.remarks), *notes]
        return page, page.cost()

    def _trace(
        self, trace: Any, calls: Sequence[CallRecords], plan: Plan, pinned: set[Any], page: Payload
    ) -> dict[str, Any]:
        sequences: list[Tokens] = []
        written, below = [], find_below(trace.calls)
        for index, record in enumerate(calls):
            call = record.call
            tokens = {"query_sequence": call.query_tokens, "key_sequence": call.key_tokens}
            about = {name: number_sequence(sequences, side) for name, side in tokens.items()}
            detailed = [(index, head) in pinned for head in range(call.heads)]
            heads = [record.head(head, plan, full, page.add) for head, full in enumerate(detailed)]
            under = {} if below[index] is None else {"below": below[index]}
            written.append({**self._call(record, page), **about, **under, "head": heads})
        texts = [self._sequence(tokens, page) for tokens in sequences]
        about = {"title": trace.title, "model": trace.model, "sequences": texts, "calls": written}
        predicted = trace.predictions is not None and plan.predictions
        return about | (self._predict(trace.predictions, page) if predicted else {})

    def _predict(self, predictions: Any, page: Payload) -> dict[str, Any]:
        entries = {name: value for name, value in vars(predictions).items() if value is not None}
        codes = {"texts": "json", "tokens": "i32", "targets": "i32"}
        for name, value in entries.items():
            entries[name] = self._once((name, id(predictions)), value, codes.get(name, "f32"), page)
        return {"predictions": entries}

    def _once(self, name: Any, values: Any, code: str, page: Payload) -> str:
        if name not in self._packed:
            self._packed[name] = pack(values, code)
        return page.add(self._packed[name])

    def _call(self, record: CallRecords, page: Payload) -> dict[str, Any]:
        call, outline, about = record.call, record.outline(), record.call.description
        tiles = outline.pop("tiles")
        picture = None if tiles is None else self._once(("mask", id(record)), tiles, "u8", page)
        permitted = record.permitted
        return {
            **{name: getattr(call, name) for name in _CALL_FIELDS},
            **{name: getattr(about, name) for name in ("mask", "score", "dtype", "bias", "sinks")},
            "scale": None if about.scale is None else number(about.scale),
            "mask_picture": picture,
            "permitted": None if permitted is None else page.add(permitted),
            **outline,
            "trust": [number(trust) for trust in np.asarray(record.readout.trust)],
            "means": record.means(),
            "labels": record.labels(),
            "row_stats": list(ROW_STATS),
        }

    def _sequence(self, tokens: Tokens, page: Payload) -> dict[str, Any]:
        picture = None
        if tokens.picture is not None:
            shown = _shrink(tokens.picture)
            if shown.shape[:2] != tokens.picture.shape[:2]:
                sizes = [f"{size[1]} x {size[0]}" for size in (tokens.picture.shape, shown.shape)]
                self.remarks.append(f"A picture of {sizes[0]} pixels is shown in {sizes[1]}.")
            picture = self._once(("picture", id(tokens)), shown, "u8", page)
        texts = self._once(("tokens", id(tokens)), list(tokens.texts), "json", page)
        fields = {name: getattr(tokens, name) for name in ("kind", "patch_grid", "first_patch")}
        return {"tokens": texts, "count": len(tokens), **fields, "picture": picture}

    def _places(self, tables: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Collect what is known of positions, each thing once, with the calls that it holds for."""
        numbered: list[tuple[int | None, dict[str, Any]]] = []
        for index, call in enumerate(self.traces[0].calls):
            positions = call.positions
            turn = None if positions is None else positions.rotary
            head_dim = None if turn is None else call.description.width or turn.width
            if turn is not None and head_dim:
                longest = max(_LONGEST_KERNEL, call.rows, call.keys)
                numbered.append((index, rotary_curve(turn, head_dim, longest)))
            if positions is not None and positions.table is not None:
                kind = positions.table_kind or "positions"
                numbered.append((index, table_picture(kind, positions.table, positions.trained_length)))
            numbered += [(index, curve) for curve in bias_curves(call)]
        numbered += [(None, table_picture(name, table)) for name, table in tables.items()]
        panels = _merge(numbered)
        biases = [panel for panel in panels if panel["kind"] == "bias"]
        if len(biases) > MOST_BIASES:
            self.remarks.append(f"Of {len(biases)} biases by distance, the first {MOST_BIASES} are shown.")
            panels = [panel for panel in panels if not any(panel is bias for bias in biases[MOST_BIASES:])]
        calls = self.traces[0].calls
        for index, head in [*self.chosen, *((index, 0) for index, call in enumerate(calls) if call.heads)]:
            split = split_scores(calls[index], head)
            if split is not None:
                return [*panels, {"kind": "split", "call": index, "head": head, **split}]
        return panels

    def _place(self, panel: dict[str, Any], page: Payload) -> dict[str, Any]:
        written = dict(panel)
        for name, value in panel.items():
            if isinstance(value, np.ndarray):
                small = panel["kind"] == "split" and np.nanmax(np.abs(value), initial=0) < 60_000
                code = "linear8" if name == "similarity" else "f16" if small else "f32"
                written[name] = self._once((name, id(panel)), value, code, page)
        return written

    def _curves(self, training: Mapping[str, Any], page: Payload) -> dict[str, Any]:
        curves, maps = [], []
        for number_, curve in enumerate(training.get("curves", ())):
            points = _numbers(curve, "points")
            if points.ndim != 2 or len(points) != 2:
                expected = f"the points of {curve['name']!r} as steps and values, shape (2, n)"
                raise ValueError(f"training: expected {expected}, got {points.shape}")
            step = -(-points.shape[1] // MOST_POINTS) or 1
            if step > 1:
                self.remarks.append(f"Of the points of {curve['name']}, one in {step} is kept.")
            chunk = self._once(("curve", number_), points[:, ::step], "f32", page)
            curves.append({"unit": None, "split": None, **curve, "points": chunk})
        for number_, chart in enumerate(training.get("maps", ())):
            values = _numbers(chart, "values", "rows", "steps")
            wanted = (len(chart["rows"]), len(chart["steps"]))
            if values.shape != wanted:
                expected = f"the values of {chart['name']!r} as (rows, steps), {wanted}"
                raise ValueError(f"training: expected {expected}, got {values.shape}")
            chunk = self._once(("chart", number_), values, "f32", page)
            steps = [int(step) for step in chart["steps"]]
            maps.append({"unit": None, **chart, "rows": list(chart["rows"]), "steps": steps, "values": chunk})
        return {"title": training.get("title", "training"), "curves": curves, "maps": maps}


def _numbers(logged: Mapping[str, Any], *needed: str) -> np.ndarray:
    """Return the numbers of a curve or map of training: the first of what it needs besides a name."""
    if missing := [name for name in ("name", *needed) if name not in logged]:
        raise ValueError(f"training: expected {missing[0]!r} of each curve or map, got {', '.join(logged)}")
    title = f"training: {needed[0]} of {logged['name']!r}"
    return as_array(title, "numbers", np.asarray, logged[needed[0]], np.float64)


def write_json(document: Any) -> str:
    """Return JSON as it stands between tags, without characters special to HTML or scripts.

    Example:
        >>> from regard.inspection.explorer.page_document import write_json
        >>> write_json({"text": "</script>"})
        '{"text":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(document, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for special in "<>&":
        text = text.replace(special, f"\\u{ord(special):04x}")
    return text


def _merge(numbered: Sequence[tuple[int | None, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge records that are the same for several calls into one that lists the calls."""
    panels: list[dict[str, Any]] = []
    marks: dict[bytes, int] = {}
    for index, panel in numbered:
        parts = [v.tobytes() if isinstance(v, np.ndarray) else repr(v).encode() for v in panel.values()]
        mark = b"\n".join(parts)
        if mark not in marks:
            marks[mark] = len(panels)
            panels.append({**panel, "calls": []})
        if index is not None:
            panels[marks[mark]]["calls"].append(index)
    return panels


def _shrink(picture: np.ndarray) -> np.ndarray:
    """Return a picture as uint8 (H, W, 3), with means of square blocks of pixels where it is large."""
    is_bytes = picture.dtype == np.uint8
    values = picture.astype(np.float64) if is_bytes else 255 * np.clip(np.nan_to_num(picture), 0, 1)
    values = np.broadcast_to(values[..., None], (*values.shape, 3)) if values.ndim == 2 else values
    step = -(-max(values.shape[:2]) // LARGEST_PICTURE) or 1
    sums, counts = values, np.ones_like(values)
    for axis, size in enumerate(values.shape[:2]):
        blocks = np.arange(0, size, step)
        sums, counts = np.add.reduceat(sums, blocks, axis), np.add.reduceat(counts, blocks, axis)
    return np.rint(sums / counts).astype(np.uint8)
