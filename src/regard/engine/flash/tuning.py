"""Measurements of a device: when dense wins, and how large tiles should be."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from regard.engine.call.problem import Problem
from regard.engine.flash.tiles import Blocking

_LANES = 32  # sizes of tiles that vector units like


@dataclass(frozen=True)
class Tuning:
    """Measured numbers of one kind of device. Scores are counted over all heads and batch rows.

    The defaults come from two CPU cores with AVX-512 (benchmarks/NOTES.md); `regard tune` measures all but
    those of pieces.
    """

    dense_scores: int = 1 << 20  # up to so many scores, dense is faster
    dense_side: int = 256  # without a mask, also with more heads of at most side x side scores
    dense_rows: int = 8  # with fewer queries per key head than this, dense is faster, too
    tile_side: int = 512  # queries and keys of a tile
    full_side: int = 1024  # the same without a mask, in float32
    forward_cells: int = 1 << 20  # scores of a forward tile, over the heads that go together
    backward_cells: int = 1 << 19
    piece_side: int = 128  # queries and keys of a piece, where masks keep little of each tile
    piece_cells: int = 5 << 17  # scores of a step that computes several pieces

    def favours_dense(self, problem: Problem) -> str | None:
        """Return why the definition is faster than tiles, or None."""
        heads = 1
        for size in problem.leading:
            heads *= size
        scores = heads * problem.T * problem.S
        if problem.T * problem.group < self.dense_rows:
            return f"fewer than {self.dense_rows} queries per key head"
        if scores <= self.dense_scores:
            return f"{scores:,} scores, up to {self.dense_scores:,} are faster at once"
        plain = problem.mask is None and problem.bias is None
        if plain and max(problem.T, problem.S) <= self.dense_side:
            side = f"{self.dense_side} x {self.dense_side}"
            return f"no mask and at most {side} scores a head, which are faster at once"
        return None

    def blocking(self, problem: Problem) -> tuple[Blocking, Blocking]:
        """Return the tiles of the forward and of the backward loop."""
        plain = problem.mask is None and problem.bias is None and not problem.low_precision
        side = self.full_side if plain else self.tile_side
        queries, keys = _divide(problem.T, side // problem.group), _divide(problem.S, side)
        cells = problem.group * queries * keys
        forward, backward = (max(limit // cells, 1) for limit in (self.forward_cells, self.backward_cells))
        lower = queries
        if problem.mask is not None and problem.mask.local:
            # A band crosses its tiles: tiles of fewer queries hold fewer pairs outside of it.
            lower, backward = _divide(problem.T, side // problem.group // 2), 2 * backward
        return Blocking(queries, keys, forward), Blocking(lower, keys, backward)


def _divide(length: int, side: int) -> int:
    """Divide a length into as few tiles as `side` allows, and return the least size that does so."""
    length, side = max(length, 1), max(side, 1)
    size = -(-length // -(-length // side))
    return min(-(-size // _LANES) * _LANES, length, side)


def cache_file() -> Path:
    """Return the file of `regard tune`, under XDG_CACHE_HOME or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "regard" / "tuning.json"


def device_key() -> str:
    """Name what measurements hold for: the kind of the default device, and the jax that compiles."""
    device = jax.devices()[0]
    return f"{device.platform} {device.device_kind}, {os.cpu_count()} cores, jax {jax.__version__}"


@functools.cache
def load_tuning() -> Tuning:
    """Load this machine's measurements, or the defaults; once in a process."""
    return read_tuning(cache_file())


def read_tuning(path: Path) -> Tuning:
    """Read the entry for this device; what is missing or damaged is ignored, the latter with a warning."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Tuning()
    except (OSError, UnicodeDecodeError) as error:
        return _ignore(path, error)
    try:
        entry = json.loads(text).get(device_key())
        return Tuning() if entry is None else _checked(entry)
    except (ValueError, TypeError, AttributeError) as error:
        return _ignore(path, error)


def write_tuning(path: Path, found: Tuning) -> None:
    """Add or replace this device's entry; other entries stay, and the file appears whole or not at all."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        entries = entries if isinstance(entries, dict) else {}
    except (OSError, ValueError):
        entries = {}
    entries[device_key()] = dataclasses.asdict(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _checked(entry: Any) -> Tuning:
    """Return numbers as they must be, or raise ValueError."""
    known = {field.name for field in dataclasses.fields(Tuning)}
    if not isinstance(entry, dict) or set(entry) - known:
        raise ValueError(f"expected an object with {', '.join(sorted(known))}; got {str(entry)[:80]}")
    if any(type(value) is not int or not 0 <= value < 2**40 for value in entry.values()):
        raise ValueError(f"expected whole numbers that are not negative; got {str(entry)[:80]}")
    found = Tuning(**entry)
    for side in ("tile_side", "full_side", "piece_side"):
        if getattr(found, side) < 1:
            raise ValueError(f"{side}: expected at least 1, got {getattr(found, side)}")
    return found


def _ignore(path: Path, error: Exception) -> Tuning:
    message = f"{path} is ignored: {type(error).__name__}: {error}; `regard tune` writes it anew"
    warnings.warn(message, stacklevel=2)
    return Tuning()
