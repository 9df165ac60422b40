"""Measurements of a device: when dense wins, and how large tiles should be."""

import contextvars
import dataclasses
import functools
import json
import math
import os
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from regard.engine.call.hooks import hold
from regard.engine.call.problem import Problem
from regard.engine.call.stores import FEW_QUERIES, LengthFirst, Store
from regard.engine.flash.blocking import Blocking
from regard.engine.flash.whole_tiles import size_tiles
from regard.engine.platforms import Platform, find_platform, find_present, tracing_for
from regard.engine.processors import name_instructions
from regard.paths import cache_folder, read_object, replacing

_LANES = 32  # sizes of tiles that vector units like
_LEAST_SIDE = 128  # of tiles of several leading positions
_LIVE_SCORES = 4  # arrays of the size of a step's scores that are there at once


@dataclass(frozen=True)
class Tuning:
    """Numbers of one kind of device, by default of a CPU. Scores are counted over all heads and batch rows.

    `regard tune` measures all but those of pieces and of memory.
    """

    dense_scores: int = 1 << 20  # up to so many scores, dense is faster
    dense_side: int = 256  # in one kernel, also with more heads of at most side x side scores
    dense_gradient_side: int = 64  # of these, those whose scores are fewer a side have dense derivatives, too
    dense_rows: int = 8  # with fewer queries per key head than this, dense is faster, too
    tile_side: int = 512  # queries and keys of a tile
    full_side: int = 1024  # the same without a mask, in float32
    forward_cells: int = 1 << 20  # scores of a forward tile, over the heads that go together
    backward_cells: int = 1 << 19
    piece_side: int = 128  # queries and keys of a piece, where masks keep little of each tile
    piece_cells: int = 5 << 17  # scores of a step that computes several pieces
    most_loops: int = 16  # of a program whose steps hold all, over blocks that visit equally many tiles
    step_bytes: int = 0  # memory of a step that holds all batch rows and heads; 0: they are looped over

    def favours_dense(self, problem: Problem) -> str | None:
        """Return why the definition is faster than tiles, or None."""
        scores = math.prod(problem.leading) * problem.T * problem.S
        if problem.T * problem.group < self.dense_rows:
            return f"fewer than {self.dense_rows} queries per key head"
        if scores <= self.dense_scores:
            return f"{scores:,} scores, up to {self.dense_scores:,} are faster at once"
        plain = problem.mask is None and problem.bias is None
        if max(problem.T, problem.S) <= self.dense_side and (plain or is_one_kernel(problem)):
            side = f"{self.dense_side} x {self.dense_side}"
            tiles = "; derivatives go in tiles" if self.tiles_derivatives(problem) else ""
            return f"at most {side} scores a head, which are faster at once{tiles}"
        return None

    def tiles_derivatives(self, problem: Problem) -> bool:
        """Return True where derivatives of what `favours_dense` takes are faster in tiles."""
        scores = math.prod(problem.leading) * problem.T * problem.S
        is_long = min(problem.T, problem.S) > self.dense_gradient_side
        return is_long and scores > self.dense_scores and problem.T * problem.group >= self.dense_rows

    def blocking(self, problem: Problem) -> tuple[Blocking, Blocking]:
        """Return the tiles of the forward and of the backward loop."""
        plain = problem.mask is None and problem.bias is None and not problem.low_precision
        side = self.full_side if plain else self.tile_side
        if self.step_bytes and not problem.batch_invariant:
            cells = self.forward_cells, self.backward_cells
            return self._at_once(problem, side, cells[0]), self._at_once(problem, side, cells[1])
        queries, keys = _divide(problem.T, side // problem.group), _divide(problem.S, side)
        if problem.batch_invariant:
            queries, keys = size_tiles(problem.group)
        cells = problem.group * queries * keys
        forward, backward = max(self.forward_cells // cells, 1), max(self.backward_cells // cells, 1)
        lower = queries
        if problem.mask is not None and problem.mask.local:
            # A band crosses its tiles: tiles of fewer queries hold fewer pairs outside of it.
            lower, backward = _divide(problem.T, side // problem.group // 2), 2 * backward
        return Blocking(queries, keys, forward), Blocking(lower, keys, backward)

    def _at_once(self, problem: Problem, side: int, cells: int) -> Blocking:
        """Return the largest tile up to `side` that fits a step of all leading positions."""
        rows = math.prod(problem.leading)
        while side > _LEAST_SIDE and rows * min(side, problem.T) * min(side, problem.S) > cells:
            side //= 2
        block = self._of_side(problem, side)
        if block.queries == problem.T:  # few queries meet more keys
            longer = cells // (rows * block.queries) // _LANES * _LANES
            block = self._of_side(problem, side, max(longer, block.keys))
        return block

    def _of_side(self, problem: Problem, queries: int, keys: int = 0) -> Blocking:
        queries, keys = _divide(problem.T, queries), _divide(problem.S, keys or queries)
        tile = problem.group * queries * keys * _LIVE_SCORES * problem.accumulation.itemsize
        return Blocking(queries, keys, at_once=max(self.step_bytes // tile, 1))

    def halve(self, problem: Problem, block: Blocking) -> Blocking:
        """Return the tile of half the sides, for all leading positions; the same where it is small."""
        if max(block.queries, block.keys) // 2 < _LEAST_SIDE:
            return block
        sides = (side if side < 2 * _LEAST_SIDE else side // 2 for side in (block.queries, block.keys))
        return self._of_side(problem, *sides)


_ONE_KERNEL_SIDE = 256  # rows and keys of a head up to which one kernel is faster


def is_one_kernel(problem: Problem) -> bool:
    """Return whether XLA's CPU makes one kernel of a call, on all cores, as `dense` computes it at once."""
    if problem.is_symbolic or problem.dropout_rate or problem.accumulation != np.float32:
        return False
    stored = isinstance(problem.key, Store) and not isinstance(problem.key, LengthFirst)
    if stored or problem.score is not None or problem.sinks is not None or 0 in problem.leading:
        return False
    rows = problem.T * problem.group
    is_short = FEW_QUERIES < rows <= _ONE_KERNEL_SIDE and 0 < problem.S <= _ONE_KERNEL_SIDE
    masked = problem.mask is not None or problem.bias is not None
    scaled_late = problem.low_precision and problem.bias is not None
    return is_short and not scaled_late and (looks_at_output() if masked else find_platform().name == "cpu")


def looks_at_output() -> bool:
    """Return whether a branch may ask if an output is finite: one CPU, which waits for nothing."""
    return find_platform().name == "cpu" and jax.device_count() == 1


def _divide(length: int, side: int) -> int:
    """Divide a length into as few tiles as `side` allows, and return the least size that does so."""
    length, side = max(length, 1), max(side, 1)
    size = -(-length // -(-length // side))
    return min(-(-size // _LANES) * _LANES, length, side)


# Where nothing was measured; with what each comes from.
_FILLING = Tuning(
    dense_scores=1 << 24,
    dense_side=512,
    dense_rows=32,
    tile_side=2048,
    full_side=2048,
    forward_cells=1 << 25,
    backward_cells=1 << 25,
    step_bytes=1 << 30,
)
_REASONED = "reasoned, not measured: steps large enough to fill the device"
DEFAULTS = {
    "cpu": (Tuning(), "measured on two cores, with AVX-512 and with AVX2"),
    "gpu": (_FILLING, _REASONED),
    # Its compiler takes seconds for each loop, and keeps the results of all.
    "tpu": (dataclasses.replace(_FILLING, most_loops=4), _REASONED),
}
_MEMORY_SHARE = 16  # of the device's memory, one part is for a step


def default_tuning() -> Tuning:
    """Return what holds for the platform of a call where nothing was measured."""
    platform = find_platform()
    default, _ = DEFAULTS.get(platform.name, DEFAULTS["gpu"])
    device = find_present(platform) if default.step_bytes else None
    memory = 0 if device is None else (device.memory_stats() or {}).get("bytes_limit", 0)
    return dataclasses.replace(default, step_bytes=memory // _MEMORY_SHARE) if memory else default


def cache_file() -> Path:
    """Return the file of `regard tune`."""
    return cache_folder() / "tuning.json"


def device_key() -> str:
    """Name what measurements hold for: the kind of a call's device, and the jax that compiles."""
    platform = find_platform()
    kind = name_instructions() if platform.name == "cpu" else platform.device_kind
    return f"{platform.name} {kind}, {os.cpu_count()} cores, jax {jax.__version__}"


_USED = contextvars.ContextVar[Tuning | None]("used", default=None)


def using(tuning: Tuning) -> AbstractContextManager[None]:
    """Return a context in which calls are traced under a tuning, whatever was measured."""
    return hold(_USED, tuning)


def load_tuning() -> Tuning:
    """Load the measurements for a call's platform, or the defaults; once in a process."""
    return _USED.get() or load_kept(find_platform())


@functools.cache
def load_kept(platform: Platform) -> Tuning:
    """Load what `regard tune` kept for a platform, or the defaults."""
    with tracing_for(platform):
        return read_tuning(cache_file())


def describe_costs() -> str:
    """Say what the choice of backends and tiles goes by: numbers of this machine, or of which other."""
    if load_tuning() != default_tuning():
        return f"measured here by regard tune, for {device_key()}"
    kind, host = find_platform().name, (os.cpu_count(), name_instructions())
    origin = DEFAULTS.get(kind, DEFAULTS["gpu"])[1]
    if kind != "cpu" or host in ((2, "AVX-512"), (2, "AVX2")):
        return f"by default, {origin}"
    return f"by default, {origin}; here are {host[0]}, with {host[1]}: regard tune takes a minute"


def read_tuning(path: Path) -> Tuning:
    """Read the entry for this device; what is missing or damaged is ignored, the latter with a warning."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return default_tuning()
    except (OSError, UnicodeDecodeError) as error:
        return _ignore(path, error)
    try:
        entries = json.loads(text)
        if not isinstance(entries, dict):
            raise ValueError(f"expected an object with an entry for each device; got {str(entries)[:80]}")
        entry = entries.get(device_key())
        return default_tuning() if entry is None else _checked(entry)
    except (ValueError, RecursionError) as error:
        return _ignore(path, error)


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Add or replace this device's entry, what differs from the defaults.

    Other entries stay, and the file appears whole or not at all.
    """
    entries = read_object(path)
    default = dataclasses.asdict(default_tuning())
    own = {name: value for name, value in dataclasses.asdict(tuning).items() if value != default[name]}
    entries[device_key()] = own
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        draft.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def _checked(entry: Any) -> Tuning:
    """Return numbers as they must be, or raise ValueError."""
    names = {field.name for field in dataclasses.fields(Tuning)}
    if not isinstance(entry, dict) or set(entry) - names:
        raise ValueError(f"expected an object with {', '.join(sorted(names))}; got {str(entry)[:80]}")
    if any(type(value) is not int or not 0 <= value < 2**40 for value in entry.values()):
        raise ValueError(f"expected whole numbers that are not negative; got {str(entry)[:80]}")
    tuning = dataclasses.replace(default_tuning(), **entry)
    for side in ("tile_side", "full_side", "piece_side"):
        if getattr(tuning, side) < 1:
            raise ValueError(f"{side}: expected at least 1, got {getattr(tuning, side)}")
    return tuning


def _ignore(path: Path, error: Exception) -> Tuning:
    message = f"{path} is ignored: {type(error).__name__}: {error}; `regard tune` writes it anew"
    warnings.warn(message, stacklevel=2)
    return default_tuning()
