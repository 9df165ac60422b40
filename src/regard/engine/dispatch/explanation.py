"""Explanations of what a call will do, in words and numbers."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_context
from jax.sharding import use_abstract_mesh

from regard.engine.call.problem import Problem
from regard.engine.dispatch.placement import active
from regard.engine.dispatch.registry import Choice
from regard.engine.flash.device_types import NO_MESH
from regard.engine.flash.measurements import describe_costs
from regard.engine.flash.tile_choice import TileChoice, choose_tiles
from regard.masks.grid import is_concrete

TILE = 128
_MOST_TILES = 2048  # along an axis: counting more would take gigabytes


@dataclass(frozen=True)
class TileCensus:
    """The number of square tiles of the score matrix that a mask leaves empty, partly and fully kept.

    It is a measure of the mask; `Explanation.computes` says what is computed. Counted once per distinct
    leading index of the mask. `side` is 128, or more for very long sequences.
    """

    empty: int
    partial: int
    full: int
    side: int = TILE

    @property
    def kept(self) -> float:
        """The share of tiles with something to compute."""
        total = self.empty + self.partial + self.full
        return (self.partial + self.full) / total if total else 0.0


@dataclass(frozen=True)
class Explanation:
    """An account of what `attend` would do; print it to read it."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    query_heads: int
    key_heads: int
    score: str | None
    mask: str | None
    tiles: TileCensus | None
    backend: str
    reason: str
    refusals: dict[str, str]
    dense_flops: int
    dense_bytes: int
    computes: TileChoice | None = None
    """The tiles that the tiled backend computes; None with another backend."""
    mask_work: str | None = None
    """The cost of looking at the mask, before any attention; None where there is none."""
    costs: str = ""
    """The machine whose costs the choice of backend and tiles goes by; empty for a fused kernel."""
    gathered: tuple[str, ...] = ()
    """Mesh axes that divide the sequence of an array, which no backend does: it is gathered along them."""

    @property
    def flops(self) -> int | None:
        """The products of the forward pass, in FLOPs; None where it is not known what is computed."""
        if self.backend == "dense":
            return self.dense_flops
        share = None if self.computes is None else self.computes.computed
        return None if share is None else round(share * self.dense_flops)

    def __str__(self) -> str:
        heads = f"{self.query_heads} query head{'s' if self.query_heads != 1 else ''}"
        if self.key_heads != self.query_heads:
            heads += f" in {self.key_heads} group{'s' if self.key_heads != 1 else ''}, one per key head"
        arrays = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        lines = [
            ("arrays", arrays),
            ("heads", heads),
            ("dtypes", ", ".join(f"{name} {dtype}" for name, dtype in self.dtypes.items())),
            *([("score", self.score)] if self.score else []),
            ("mask", self.mask or "none: every query attends to every key"),
        ]
        if self.tiles is not None:
            counts = f"{self.tiles.empty} empty, {self.tiles.partial} partial, {self.tiles.full} full"
            sides = f"{self.tiles.side} x {self.tiles.side}"
            lines.append(("tiles", f"{counts} of {sides}; {self.tiles.kept:.0%} hold work"))
        elif self.mask:
            lines.append(("tiles", "not counted: the mask's arrays, or sizes, are not known here"))
        if self.computes is not None:
            lines.append(("computes", str(self.computes)))
        if self.mask_work is not None:
            lines.append(("mask work", self.mask_work))
        lines += [
            ("backend", f"{self.backend}: {self.reason}"),
            *(("refused", f"{name}: {why}") for name, why in self.refusals.items()),
            *([("costs", self.costs)] if self.costs else []),
            ("work", self._describe_work()),
        ]
        if self.gathered:
            axis = self.gathered[0] if len(self.gathered) == 1 else self.gathered
            remedy = f"`with regard.parallel.use(mesh, {axis!r}):` around the call keeps it divided"
            lines.append(("gathered", f"the sequence, along {', '.join(self.gathered)}; {remedy}"))
        return "\n".join(f"{label:<10} {text}" for label, text in lines)

    def _describe_work(self) -> str:
        pairs, scores = scaled(self.dense_flops, "FLOP"), scaled(self.dense_bytes, "B")
        if self.backend == "dense":
            return f"{pairs}, all pairs, and {scores} of scores"
        own = "" if self.flops is None else f"{scaled(self.flops, 'FLOP')}, a tile of scores at a time; "
        return f"{own}all pairs would be {pairs} and {scores} of scores"


def describe(problem: Problem, choice: Choice) -> Explanation:
    """Fill in the explanation of a canonical problem."""
    pairs = math.prod(problem.leading) * problem.T * problem.S
    output = (*problem.leading, problem.T, problem.E)
    arrays = {"query": problem.query, "key": problem.key, "value": problem.value}
    return Explanation(
        shapes={name: tuple(array.shape) for name, array in arrays.items()} | {"output": output},
        dtypes={name: str(array.dtype) for name, array in arrays.items()}
        | {"sums": str(problem.accumulation)},
        query_heads=problem.leading[-1] if problem.leading else 1,
        key_heads=problem.key_heads,
        score=None if problem.score is None else repr(problem.score),
        mask=None if problem.mask is None else repr(problem.mask),
        tiles=_census(problem),
        backend=choice.name,
        reason=choice.reason,
        refusals=choice.refusals,
        dense_flops=2 * pairs * (problem.D + problem.E),
        dense_bytes=pairs * problem.accumulation.itemsize,
        computes=choose_tiles(problem) if choice.name == "tiled" and not problem.is_symbolic else None,
        mask_work=_mask_work(problem) if choice.name == "tiled" else None,
        costs=describe_costs() if choice.name in ("tiled", "dense") else "",
        gathered=() if active() else _sequence_axes(problem),
    )


def _mask_work(problem: Problem) -> str | None:
    """Say what it costs to find the tiles that hold work."""
    mask = problem.mask
    if mask is None or problem.is_symbolic:
        return None
    if mask.kinds is not None:
        return f"prepared: {mask.kinds.size:,} B of tile kinds, read by every call"
    if mask.reads_cells:
        cells = scaled(problem.T * problem.S, "cells")
        return f"{cells} looked at twice in every call; mask.prepare({problem.T}, {problem.S}) does it once"
    return "by interval arithmetic, in every call"


def _sequence_axes(problem: Problem) -> tuple[str, ...]:
    """Return the mesh axes along which the sequence of an array is known to be divided."""
    axes: list[str] = []
    for array in (problem.query, problem.key, problem.value):
        typed = jax.typeof(array) if isinstance(array, Tracer) else array
        spec = getattr(getattr(typed, "sharding", None), "spec", ())
        entry = spec[array.ndim - 2] if len(spec) > array.ndim - 2 else None
        axes += () if entry is None else (entry,) if isinstance(entry, str) else entry
    return tuple(dict.fromkeys(axes))


def _census(problem: Problem) -> TileCensus | None:
    if problem.mask is None or problem.is_symbolic:
        return None
    if not is_concrete((problem.mask, problem.query_offset, problem.key_offset)):
        return None
    if not is_concrete(problem.mask.closure_convert(problem.grid())):
        return None
    side = choose_side(problem)
    placed: dict[str, Any] = {"query_offset": problem.query_offset, "key_offset": problem.key_offset}
    placed |= {"query_block": side, "key_block": side, "leading_axes": len(problem.leading)}
    # To count is to read; inside a trace, too.
    with eval_context(), jax.transfer_guard("allow"), use_abstract_mesh(NO_MESH):
        codes = np.asarray(problem.mask.tiles(problem.T, problem.S, **placed))
    counts = {kind: int((codes == code).sum()) for code, kind in enumerate(("empty", "partial", "full"))}
    return TileCensus(**counts, side=side)


def choose_side(problem: Problem) -> int:
    """Return the side of tiles that are counted: 128, or more where there would be too many."""
    side = TILE
    while max(problem.T, problem.S) > side * _MOST_TILES:
        side *= 2
    return side


def scaled(amount: float, unit: str) -> str:
    """Spell an amount with three digits; one that is symbolic as it is."""
    if not isinstance(amount, int | float):
        return f"{amount} {unit}"
    for prefix in ("", "k", "M", "G", "T"):
        if amount < 1000:
            return f"{amount:.3g} {prefix}{unit}"
        amount /= 1000
    return f"{amount:.3g} P{unit}"
