"""Records of the heads of a call: means, labels, and arrays packed as chunks."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from regard import readouts
from regard.inspection.explorer.budgets import TOP_K, Plan
from regard.inspection.explorer.codes import Entry, pack
from regard.inspection.explorer.mask_outlines import draw_tiles, find_borders, find_reach
from regard.readouts import Level, Readout

ROW_STATS = ("entropy", "max_weight", "first_mass", "local_mass", "distance", "sink_mass")
PINNED_BLOCKS = 512
_SHARE = 0.9
Packed = tuple[Entry, bytes]
Add = Callable[[Packed], str]  # keeps a chunk, and gives its name


class CallRecords:
    """Reads a call once, and writes records of its heads for one plan after another."""

    def __init__(self, call: Any, pinned: list[int], weights_code: str | None, featured: Sequence[int] = ()):
        """Read a call; None leaves its weights out, and featured heads carry their queries and keys."""
        self.call, self.pinned, self.featured = call, pinned, featured
        self.readout = call.readout(grid=64, top_k=TOP_K, exact=False)
        # Padding counts for nothing, and its program serves for other lengths.
        self._summed = call.whole.readout(grid=64, top_k=TOP_K, exact=False)
        self.alive = np.asarray(self.readout.keys) > 0
        self.weights = _exact_weights(call, slice(None)) if weights_code else None
        self.weights_code = weights_code if self.weights is not None else None
        self.fine = None
        if pinned and self.weights is None:
            self.fine = call.readout(grid=PINNED_BLOCKS, top_k=TOP_K, heads=pinned, exact=False)
        last = _exact_weights(call, slice(call.rows - 1, call.rows)) if call.rows else None
        self.last = None if last is None else last[:, 0]
        living = np.maximum(self.alive.sum(-1, keepdims=True), 1)
        self.shares = np.asarray(self.readout.key_mass, np.float64) / living
        norms = call.value_norms if self.weights is not None else None
        self.norms = None if norms is None else np.where(np.isfinite(norms), norms, np.nan)
        self._packed: dict[tuple[Any, ...], Packed] = {}

    def outline(self) -> dict[str, Any]:
        """Return what is drawn of the mask: tiles (an array, or None) and their sizes, borders, band."""
        call, mask, reach = self.call, self.call.mask, find_reach(self.call.mask)
        tiles, rows, keys = None, 1, 1
        if mask is not None:
            whole = call.whole
            tiles, rows, keys = draw_tiles(mask, whole.rows, whole.keys, call.query_offset, call.key_offset)
            tiles = tiles[: -(-call.rows // rows), : -(-call.keys // keys)]
        borders = find_borders(mask, call.query_offset - call.key_offset, call.rows)
        outline = {"tiles": tiles, "tile_rows": rows, "tile_keys": keys, "borders": borders}
        return outline | {"window": None if None in reach else reach, "reach": reach}

    @cached_property
    def permitted(self) -> Packed | None:
        """Return which pairs may attend, in bits, of one head where all agree; None: all, or not carried."""
        if self.weights is None:
            return None
        pairs = self.call.permit(np.arange(self.call.rows), np.arange(self.call.keys))
        if pairs.all():
            return None
        return pack(np.packbits(pairs[:1] if (pairs == pairs[:1]).all() else pairs, axis=-1), "u8")

    def means(self) -> dict[str, list[float | None]]:
        """Return numbers by name, one per head; the largest score and weight are those of all rows."""
        values = {name: np.asarray(mean) for name, mean in readouts.average(self._summed).items()}
        scores = np.where(self.alive, np.asarray(self.call.max_score), -np.inf)
        values["max_score"] = scores.max(-1, initial=-np.inf)
        values["largest_weight"] = np.asarray(self.readout.block_max).max((-2, -1), initial=0)
        if self.weights is not None and self.norms is not None:
            # 0 times what is no number adds nothing.
            added = self.weights.max(-2, initial=0).astype(np.float64) * np.nan_to_num(self.norms)
            values["largest_addition"] = added.max(-1, initial=0)
        means = {name: [number(value) for value in own] for name, own in values.items()}
        coverage = [self._cover(head) for head in range(self.call.heads)]
        return means if all(count is None for count in coverage) else {**means, "coverage90": coverage}

    def labels(self) -> list[list[dict[str, Any]]]:
        """Return the labels of each head."""

        def write(label: readouts.Label) -> dict[str, Any]:
            values = {name: number(getattr(label, name)) for name in ("value", "threshold", "chance")}
            return {"name": label.name, **values, "rows": label.rows}

        labels = readouts.label(self._summed)
        return [[write(label) for label in labels[(head,)]] for head in range(self.call.heads)]

    def head(self, head: int, plan: Plan, detailed: bool, add: Add) -> dict[str, Any]:
        """Return the record of a head; `detailed` where it is pinned under this plan."""
        exact = self.weights_code if plan.exact or detailed else None

        def keep(array: Any, code: str, name: str, size: int = 1, combine: Any = None) -> str:
            """Pack a head's part of an array, with every `size` neighbours combined."""

            def part() -> np.ndarray:
                return np.asarray(array[head] if combine is None else _binned(array[head], size, combine))

            return self._pack(add, (name, size, head), part, code)

        record: dict[str, Any] = {"weights": keep(self.weights, exact, "weights") if exact else None}
        if exact and self.norms is not None:
            record["value_norms"] = keep(self.norms, "f32", "norms")
        number_, level = coarsen(self.readout, plan.atlas)
        largest = plan.largest or detailed
        levels = [self._level(add, ("atlas", number_, head), level, head, largest)]
        if detailed and exact is None and self.fine is not None:
            index, fine = self.pinned.index(head), self.fine.level(0)
            if (fine.query_block, fine.key_block) != (level.query_block, level.key_block):
                levels.insert(0, self._level(add, ("fine", head), fine, index, True))
        row_bin, key_bin = -(-self.call.rows // plan.bins) or 1, -(-self.call.keys // plan.bins) or 1
        last_bin = -(-self.call.keys // (2 * plan.bins)) or 1
        is_near = bool(np.all(np.abs(self._of("distance", head)) < 60_000))
        code = "f16" if exact is not None and is_near else "linear8"
        readout, last = self.readout, self.last
        # The largest weights are listed unless the page holds all.
        listed = exact is None and (plan.top_k or detailed)
        return record | {
            "levels": levels,
            "row_stats": self._pack(add, ("rows", row_bin, head), lambda: self._rows(head, row_bin), code),
            "row_bin": row_bin,
            "key_mass": keep(self.shares, "log8", "keys", key_bin, np.add),
            "key_bin": key_bin,
            "distance_mass": keep(readout.distance_mass, "f16", "far"),
            "last_row": None if last is None else keep(last, "log8", "last", last_bin, np.maximum),
            "last_row_bin": last_bin,
            "top_keys": keep(readout.top_keys, "i32", "top_keys") if listed else None,
            "top_weights": keep(readout.top_weights, "log8", "top_weights") if listed else None,
            **(self._features(head, add) if plan.features and head in self.featured else {}),
        }

    def _features(self, head: int, add: Add) -> dict[str, str]:
        """Pack the head's scaled query and its key, whose products by feature add up to the score."""
        problem = self.call.trimmed
        group = head * len(problem.key) // self.call.heads
        scaled = np.asarray(problem.query[head], np.float64) * float(problem.scale)

        def keep(name: str, index: int, array: np.ndarray) -> str:
            code = "f16" if np.abs(array).max(initial=0) < 60_000 else "f32"
            return self._pack(add, (name, index), lambda: array, code)

        key = np.asarray(problem.key[group], np.float64)
        return {"query": keep("query", head, scaled), "key": keep("key", group, key)}

    def _of(self, name: str, head: int) -> np.ndarray:
        return np.asarray(getattr(self.readout, name))[head]

    def _pack(self, add: Add, name: tuple[Any, ...], make: Callable[[], np.ndarray], code: str) -> str:
        key = (*name, code)
        if key not in self._packed:
            self._packed[key] = pack(make(), code)
        return add(self._packed[key])

    def _level(self, add: Add, name: Any, level: Level, head: int, largest: bool) -> dict[str, Any]:
        def of(channel: str, code: str) -> str:
            return self._pack(add, (*name, channel), lambda: np.asarray(getattr(level, channel))[head], code)

        channels = {"mass": of("mass", "log8"), "max": of("max", "log8") if largest else None}
        blocks = {"query_block": level.query_block, "key_block": level.key_block}
        return blocks | channels | {"rows": of("rows", "i32")}

    def _rows(self, head: int, size: int) -> np.ndarray:
        alive = self.alive[head]
        living = _binned(alive.astype(np.float64), size, np.add)
        values = [np.where(alive, self._of(name, head), 0).astype(np.float64) for name in ROW_STATS]
        sums = np.stack([_binned(value, size, np.add) for value in values])
        return np.where(living > 0, sums / np.maximum(living, 1), np.nan)

    def _cover(self, head: int) -> float | None:
        """Average over rows how many keys hold 90 % of the weight on keys; None where that is not known."""
        alive = self.alive[head]
        if not alive.any():
            return None
        if self.weights is not None:
            largest = -np.sort(-self.weights[head].astype(np.float64)[alive], axis=-1)
            goal = _SHARE * largest.sum(-1)
        else:
            largest = self._of("top_weights", head)[alive].astype(np.float64)
            goal = _SHARE * (1 - self._of("sink_mass", head)[alive].astype(np.float64))
        # A share reached but for rounding is reached.
        enough = np.cumsum(largest, axis=-1) >= goal[:, None] - 1e-6
        return number(np.mean(enough.argmax(-1) + 1)) if enough.any(-1).all() else None


def coarsen(readout: Readout, most: int) -> tuple[int, Level]:
    """Return the finest level with at most so many blocks along an axis, and its number."""
    levels = ((number, readout.level(number)) for number in range(readout.num_levels))
    return next((number, level) for number, level in levels if max(level.mass.shape[-2:]) <= most)


def number(value: Any) -> float | None:
    """Return a number with 6 digits for JSON, None for NaN and infinities."""
    return float(f"{float(value):.6g}") if np.isfinite(value) else None


def _exact_weights(call: Any, rows: slice) -> np.ndarray | None:
    try:
        return np.asarray(call.window(rows=rows, columns=slice(None)))
    except ValueError:  # of a trace without queries and keys
        return None


def _binned(values: np.ndarray, size: int, combine: np.ufunc) -> np.ndarray:
    """Combine every `size` neighbours into one; the last may be fewer."""
    if not len(values):
        return values.astype(np.float64)
    return combine.reduceat(values.astype(np.float64), np.arange(0, len(values), size))
