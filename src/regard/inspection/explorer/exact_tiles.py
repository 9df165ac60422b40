"""Tiles: any part of a trace's weights in blocks of any size, exactly, in the memory of what is shown."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.inspection.explorer.budgets import TOP_K
from regard.inspection.explorer.position_curves import split_scores
from regard.inspection.rollouts import roll_out_row
from regard.readouts.accumulators import choose_block

SIDE = 256  # blocks of a tile along each axis
CHANNELS = ("mass", "max")
LARGEST_SPLIT = 512  # rows and columns
CACHE_BYTES = 64 << 20
_STRIP_CELLS = 1 << 21
_FEW_CELLS = 1 << 24  # formed within a second
_COARSE, _FINE = 64, 512  # blocks along an axis of the readouts that coarser tiles are taken from
IsWanted = Callable[[], bool]
Pair = tuple[int, int]  # along rows and keys, or a beginning and an end


class AbandonedError(Exception):
    """Raised where nobody waits any more for what is being formed."""


class Tiles:
    """Cuts tiles, rows and columns out of `Trace`s; calls from several threads wait for each other.

    A tile holds 256 x 256 blocks. The mass of a block is the mean over its rows that may attend to something
    of the sum of the weights on its keys, its max the largest weight; beyond the edge both are NaN. Blocks of
    one row and one key are the weights themselves. What is not a number is 0.

    Every method takes `is_wanted`, which is asked before and while something is formed: where it says no,
    `AbandonedError` is raised, and the next one's turn has come. A trace, call, head, row or tile that is not
    there is a LookupError, what cannot be formed of what was kept a ValueError.
    """

    def __init__(self, traces: Sequence[Any]):
        self._traces = list(traces)
        # A sweep over a whole head cannot be broken off: windows of few cells do not wait for it.
        self._forming, self._sweeping = threading.Lock(), threading.Lock()
        self._keeping = threading.Lock()
        self._kept: OrderedDict[tuple[Any, ...], np.ndarray] = OrderedDict()
        self._bytes = 0

    def tile(
        self, trace: int, call: int, head: int, blocks: Pair, corner: Pair, channel: str, is_wanted: IsWanted
    ) -> np.ndarray:
        """Cut one tile, float32 (256, 256), of blocks of this size; corner: its number from top and left."""
        recorded = self._find(trace, call, head)
        spans, sizes = [], (recorded.rows, recorded.keys)
        for name, size, block, number in zip(("row", "column"), sizes, blocks, corner, strict=True):
            _demand(f"tile {name}", number, -(-size // (SIDE * block)))
            spans.append((number * SIDE * block, min((number + 1) * SIDE * block, size)))
        part = _Part(head, blocks, *spans)
        lock = self._forming if _is_small(recorded, part) else self._sweeping
        name = (trace, call, head, "tile", blocks, corner)
        channels = self._keep(name, lambda: _cut(recorded, part, is_wanted), is_wanted, lock)
        return channels[CHANNELS.index(channel)]

    def row(self, trace: int, call: int, head: int, index: int, is_wanted: IsWanted) -> np.ndarray:
        """Return the weights of one query, float32 `(S,)`."""
        return self._line(trace, call, head, "row", index, is_wanted)

    def column(self, trace: int, call: int, head: int, index: int, is_wanted: IsWanted) -> np.ndarray:
        """Return the weights on one key, float32 `(T,)`."""
        return self._line(trace, call, head, "column", index, is_wanted)

    def _line(self, trace: int, call: int, head: int, what: str, at: int, is_wanted: IsWanted) -> np.ndarray:
        recorded = self._find(trace, call, head)
        _demand(what, at, recorded.rows if what == "row" else recorded.keys)

        def form() -> np.ndarray:
            return _clean(recorded.window(**{f"{what}s": [at]}, heads=[head])).reshape(-1)

        return self._keep((trace, call, head, what, at), form, is_wanted, self._forming)

    def rollout(self, trace: int, call: int, row: int, is_wanted: IsWanted) -> np.ndarray:
        """Return what reaches a query through its layer and those below, float32 `(T,)`: `roll_out_row`."""
        _demand("row", row, self._find(trace, call, 0).rows)

        def form() -> np.ndarray:
            return _clean(roll_out_row(self._traces[trace], row, call))

        return self._keep((trace, call, "rollout", row), form, is_wanted, self._sweeping)

    def split(
        self, trace: int, call: int, head: int, rows: Pair, columns: Pair, is_wanted: IsWanted
    ) -> np.ndarray:
        """Split the scores of a window as `split_scores`: content, bias and both, float32 `(3, R, C)`."""
        recorded = self._find(trace, call, head)
        for name, (start, stop), size in (("rows", rows, recorded.rows), ("columns", columns, recorded.keys)):
            if not 0 <= start < stop <= size:
                raise LookupError(f"{name}: expected a part of 0..{size}, got {start}..{stop}")
            if stop - start > LARGEST_SPLIT:
                raise ValueError(f"{name}: expected at most {LARGEST_SPLIT}, got {stop - start}")

        def form() -> np.ndarray:
            parts = split_scores(recorded, head, rows, columns)
            if parts is None:
                raise ValueError("split: nothing is added to the scores of this call, or it is not kept")
            return np.stack([parts[name] for name in ("content", "bias", "both")]).astype(np.float32)

        return self._keep((trace, call, head, "split", rows, columns), form, is_wanted, self._forming)

    def _find(self, trace: int, call: int, head: int) -> Any:
        _demand("trace", trace, len(self._traces))
        _demand("call", call, len(self._traces[trace].calls))
        recorded = self._traces[trace].calls[call]
        _demand("head", head, recorded.heads)
        return recorded

    def _keep(
        self, name: tuple[Any, ...], form: Callable[[], np.ndarray], is_wanted: IsWanted, lock: threading.Lock
    ) -> np.ndarray:
        """Return an array from the cache, or form it: one at a time, as each keeps all cores busy."""
        array = self._recall(name)
        if array is not None:
            return array
        with lock:
            array = self._recall(name)
            if array is None:
                demand_reader(is_wanted)
                array = form()
                with self._keeping:
                    self._kept[name] = array
                    self._bytes += array.nbytes
                    while self._bytes > CACHE_BYTES and len(self._kept) > 1:
                        self._bytes -= self._kept.popitem(last=False)[1].nbytes
            return array

    def _recall(self, name: tuple[Any, ...]) -> np.ndarray | None:
        with self._keeping:
            if name in self._kept:
                self._kept.move_to_end(name)
            return self._kept.get(name)


@dataclass(frozen=True)
class _Part:
    """The rows and keys of one head that a tile shows, and how many of each make a block."""

    head: int
    blocks: Pair
    rows: Pair
    keys: Pair


def _is_small(call: Any, part: _Part) -> bool:
    """Return whether a part is formed from its weights sooner than by a sweep over the whole head."""
    if call.problem is None or part.blocks == (1, 1):
        return call.problem is not None
    # A sweep takes as long for each cell as four times forming it.
    cells = (part.rows[1] - part.rows[0]) * (part.keys[1] - part.keys[0])
    return cells <= max(_FEW_CELLS, call.rows * call.keys // 4)


def _cut(call: Any, part: _Part, is_wanted: IsWanted) -> np.ndarray:
    """Cut both channels of a tile, float32 (2, 256, 256), from the coarsest blocks that are as fine."""
    tile = np.full((len(CHANNELS), SIDE, SIDE), np.nan, np.float32)
    exact = part.blocks == (1, 1) and call.problem is not None
    channels = (None if exact else _join_blocks(call, part)) or _join_weights(call, part, is_wanted)
    for channel, values in zip(tile, channels, strict=True):
        channel[: len(values), : len(values[0])] = _clean(values)
    return tile


def _join_blocks(call: Any, part: _Part) -> tuple[np.ndarray, np.ndarray] | None:
    """Return mass and max from a readout's blocks; None where those are coarser or weights are faster."""
    matched = _find_readout(call, part)
    if matched is None:
        return None
    readout, head = matched
    own = readout.query_block, readout.key_block
    down = slice(part.rows[0] // own[0], -(-part.rows[1] // own[0]))
    across = slice(part.keys[0] // own[1], -(-part.keys[1] // own[1]))
    rows = np.asarray(readout.block_rows)[head, down]
    sums = np.asarray(readout.block_mass)[head, down, across].astype(np.float64) * rows[:, None]
    largest = np.asarray(readout.block_max)[head, down, across]
    steps = part.blocks[0] // own[0], part.blocks[1] // own[1]
    living = np.add.reduceat(rows, np.arange(0, len(rows), steps[0]))
    mass = _join(sums, steps, np.add) / np.maximum(living, 1)[:, None]
    return mass, _join(largest, steps, np.maximum)


def _find_readout(call: Any, part: _Part) -> tuple[Any, int] | None:
    """Find a readout whose blocks make up those of the part, and the place of the head in it."""

    def fits(query_block: int, key_block: int) -> bool:
        return part.blocks[0] % query_block == part.blocks[1] % key_block == 0

    if call.problem is None:  # all that the file holds
        readout = call.readout(grid=max(call.rows, call.keys, 1), top_k=TOP_K, exact=False)
        return (readout, part.head) if fits(readout.query_block, readout.key_block) else None
    if fits(choose_block(call.rows, _COARSE), choose_block(call.keys, _COARSE)):
        return call.readout(grid=_COARSE, top_k=TOP_K), part.head
    if not _is_small(call, part) and fits(choose_block(call.rows, _FINE), choose_block(call.keys, _FINE)):
        return call.readout(grid=_FINE, top_k=TOP_K, heads=[part.head]), 0
    return None


def _join_weights(call: Any, part: _Part, is_wanted: IsWanted) -> tuple[np.ndarray, np.ndarray]:
    """Compute mass and max from the weights themselves, a strip of rows at a time."""
    (first_row, end_row), (first_key, end_key) = part.rows, part.keys
    # Always as many, some of them twice at the edges: windows of one size share one compiled program.
    width = min(SIDE * part.blocks[1], call.keys)
    height = min(max(_STRIP_CELLS // width, 1), SIDE * part.blocks[0], call.rows)
    columns = np.minimum(np.arange(first_key, first_key + width, dtype=np.int32), call.keys - 1)
    sums, largest = [], []
    for start in range(first_row, end_row, height):
        demand_reader(is_wanted)
        rows = np.minimum(np.arange(start, start + height, dtype=np.int32), call.rows - 1)
        weights = call.window(rows=rows, columns=columns, heads=[part.head])[0]
        weights = _clean(weights[: end_row - start, : end_key - first_key])
        sums.append(_join(weights, (1, part.blocks[1]), np.add))
        largest.append(_join(weights, (1, part.blocks[1]), np.maximum))
    alive = np.asarray(call.max_score)[part.head, first_row:end_row] != -np.inf
    steps = part.blocks[0], 1
    living = np.add.reduceat(alive.astype(np.int64), np.arange(0, end_row - first_row, steps[0]))
    mass = _join(np.concatenate(sums).astype(np.float64), steps, np.add) / np.maximum(living, 1)[:, None]
    return mass, _join(np.concatenate(largest), steps, np.maximum)


def _join(values: np.ndarray, steps: Pair, combine: np.ufunc) -> np.ndarray:
    """Combine neighbours along both axes; the last may be fewer."""
    for axis, size in enumerate(values.shape):
        step = min(steps[axis], size)
        if step > 1:
            # Not reduceat: it adds one after the other, and rounding grows with the number.
            missing = -size % step
            values = np.pad(values, [(0, missing if axis == a else 0) for a in (0, 1)])
            shape = (*values.shape[:axis], -1, step, *values.shape[axis + 1 :])
            values = combine.reduce(values.reshape(shape), axis=axis + 1)
    return values


def _clean(values: Any) -> np.ndarray:
    """Replace NaN and infinities by 0, as they are drawn."""
    return np.nan_to_num(np.asarray(values), nan=0.0, posinf=0.0, neginf=0.0)


def demand_reader(is_wanted: IsWanted) -> None:
    """Raise where nobody waits any more."""
    if not is_wanted():
        raise AbandonedError


def _demand(what: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise LookupError(f"{what}: expected a number in 0..{count - 1}, got {number}")
