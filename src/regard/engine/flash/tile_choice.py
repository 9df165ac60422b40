"""The choice of tiles: whole ones, or several pieces at once where these leave out more."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_context
from jax.sharding import use_abstract_mesh

from regard.engine.call.problem import Problem, Sizes
from regard.engine.flash.device_types import NO_MESH
from regard.engine.flash.sparsity import classify_tiles
from regard.engine.flash.tiles import Blocking
from regard.engine.flash.tuning import Tuning, load_tuning
from regard.masks import Mask, TileKind
from regard.masks.grid import is_concrete

# Time per pair over that of whole tiles, by the keys (backward, queries) that a block of 128 meets at once:
# products of few numbers run on one core. Measured on two (benchmarks/NOTES.md).
_FORWARD_COSTS = {128: 3.0, 256: 2.1, 384: 1.9, 512: 1.6, 640: 1.4, 768: 1.3, 1024: 1.25}
_BACKWARD_COSTS = {128: 3.5, 256: 2.2, 384: 1.8, 512: 1.4, 640: 1.3, 768: 1.25, 1024: 1.15}
_PIECES = (2, 3, 4, 5, 6, 8, 10, 12)
_MOST_BLOCKS = 16
_FEWEST_PAIRS = 1 << 21  # below, to choose takes a tenth of the call
_DATA_COST = 1.5  # of a pair in a PARTIAL tile whose mask reads arrays
_MOST_TILES = 1 << 22  # whose lists are a few dozen megabytes
_GAIN = 0.95  # pieces must promise that much, as costs are estimates


@dataclass(frozen=True)
class TileChoice:
    """Tiles of the forward and of the backward loop, and why these."""

    forward: Blocking
    backward: Blocking
    reason: str
    computed: float | None = None
    """The share of all pairs that the forward loop computes; None where it is not known."""

    def __str__(self) -> str:
        block = self.forward
        tile = f"tiles of {block.queries} x {block.keys}"
        if block.pieces:
            tile = f"{block.blocks} blocks at once, each against {block.pieces} {tile}"
        share = "" if self.computed is None else f"{self.computed:.0%} of pairs computed, in "
        return f"{share}{tile}: {self.reason}"


def choose_tiles(problem: Problem) -> TileChoice:
    """Choose the tiles of a call by what its mask keeps."""
    tuning = load_tuning()
    whole, side, mask = tuning.blocking(problem), tuning.piece_side, problem.mask
    if mask is None:
        return TileChoice(*whole, "there is no mask", 1.0)
    if problem.batch_invariant:
        return TileChoice(*whole, "what other rows of the batch keep must not decide")
    pairs = math.prod(problem.leading) * problem.T * problem.S
    if min(problem.T, problem.S) <= side or pairs < _FEWEST_PAIRS:
        return TileChoice(*whole, "it is short")
    offsets = _known_offsets(problem, side)
    if offsets is None:
        if mask.reads_cells and is_concrete(mask) and not isinstance(problem.query, Tracer):
            return TileChoice(
                *whole, "the mask is read cell by cell; under jit, or prepared, it is known before"
            )
        if mask.block_side is None or mask.block_side > side:
            return TileChoice(*whole, "the mask's arrays are not known here")
        longest = -(-max(problem.T, problem.S) // side)
        pieces = _pieces(problem.group, tuning, max(_PIECES[0], 1024 // side), longest)
        return TileChoice(pieces, pieces, f"the mask keeps blocks of {mask.block_side}")
    always = not jax.tree.leaves(mask) and all(isinstance(offset, int | None) for offset in offsets)
    choose = _choose_once if always else _choose
    return choose(mask, problem.sizes, offsets, problem.group, whole, tuning)


def _choose(
    mask: Mask,
    sizes: Sizes,
    offsets: tuple[Any, Any],
    group: int,
    whole: tuple[Blocking, Blocking],
    tuning: Tuning,
) -> TileChoice:
    """Choose by the kinds of tiles of a mask that is known."""
    side = tuning.piece_side
    # To look is to read.
    with eval_context(), jax.transfer_guard("allow"), use_abstract_mesh(NO_MESH):
        found = np.asarray(_classify(mask, offsets, sizes, side))
    kept = found != TileKind.EMPTY
    data_cost = (_DATA_COST - 1) * bool(jax.tree.leaves(mask))
    look = data_cost * np.mean(found[kept] == TileKind.PARTIAL) if kept.any() else 0.0
    forward, backward = (
        _cheapest(group, tuning, kept.sum(axis), _whole(found, sizes, side, block, data_cost), costs, look)
        for axis, block, costs in zip((-1, -2), whole, (_FORWARD_COSTS, _BACKWARD_COSTS), strict=True)
    )
    pairs = kept[..., 0, 0].size * sizes.T * sizes.S
    shares = (side, side, kept.sum() * side * side), (whole[0].queries, whole[0].keys, forward[1].pairs)
    small, large = (f"{min(n / pairs, 1.0):.0%} of pairs in tiles of {q} x {k}" for q, k, n in shares)
    chosen = [best for best, _ in (forward, backward)]
    return TileChoice(
        chosen[0].blocking,
        chosen[1].blocking,
        f"the mask keeps {small}, {large}",
        min(chosen[0].pairs / pairs, 1.0),
    )


_choose_once = functools.lru_cache(maxsize=64)(_choose)


@dataclass(frozen=True)
class _Candidate:
    blocking: Blocking
    pairs: float  # computed, over the leading axes of the mask's data
    cost: float


def _whole(fine: np.ndarray, sizes: Sizes, side: int, block: Blocking, data_cost: float) -> _Candidate:
    """Return what whole tiles cost, by the kinds of small ones."""
    least = most = fine
    for axis, length, size in ((-2, sizes.T, block.queries), (-1, sizes.S, block.keys)):
        if size > side:
            starts = np.arange(0, length, size) // side
            least, most = np.minimum.reduceat(least, starts, axis), np.maximum.reduceat(most, starts, axis)
    area, kept = block.queries * block.keys, most != TileKind.EMPTY
    partial = float((kept & (least != TileKind.FULL)).sum()) * data_cost
    return _Candidate(block, float(kept.sum()) * area, (float(kept.sum()) + partial) * area)


def _cheapest(
    group: int,
    tuning: Tuning,
    counts: np.ndarray,
    whole: _Candidate,
    costs: Mapping[int, float],
    look: float,
) -> tuple[_Candidate, _Candidate]:
    """Return what is fastest, and whole tiles.

    `counts` of pieces are kept in each block, and a pair of theirs costs `look` more for their PARTIAL ones.
    """
    best = dataclasses.replace(whole, cost=whole.cost * _GAIN)
    ordered = -np.sort(-counts, -1)
    for number in _PIECES:
        blocking = _pieces(group, tuning, number, ordered.shape[-1])
        short = -ordered.shape[-1] % blocking.blocks
        padded = np.pad(ordered, [(0, 0)] * (ordered.ndim - 1) + [(0, short)])
        most = padded.reshape((*padded.shape[:-1], -1, blocking.blocks)).max(-1)
        steps = float((-(-most // number)).sum())
        pairs = steps * number * blocking.blocks * tuning.piece_side**2
        cost = pairs * (_cost(group * 128, number * tuning.piece_side, costs) + look)
        if cost < best.cost:
            best = _Candidate(blocking, pairs, cost)
    return best, whole


def _cost(rows: int, width: int, costs: Mapping[int, float]) -> float:
    """Return the cost of a pair in a block of so many rows that meets so many keys."""
    known = max((size for size in costs if size <= width), default=min(costs))
    return 1 + (costs[known] - 1) * min(1.0, 128 / rows)


def _pieces(group: int, tuning: Tuning, number: int, count: int) -> Blocking:
    """Return so many pieces for as many of `count` blocks as a step may compute."""
    cells = group * tuning.piece_side**2 * number
    blocks = min(max(tuning.piece_cells // cells, 1), _MOST_BLOCKS, count)
    return Blocking(tuning.piece_side, tuning.piece_side, 1, blocks, number)


def _known_offsets(problem: Problem, side: int) -> tuple[Any, Any] | None:
    """Return the offsets to look at the mask with; None where it is not known yet."""
    mask, sizes = problem.mask, problem.sizes
    assert mask is not None
    closed = mask
    if mask.reads_cells:
        # To look at all cells once is worth it while a program is made, not in every call.
        if not isinstance(problem.query, Tracer):
            return None
        # A function that closes over traced arrays is not known, though the mask shows none.
        closed = mask.closure_convert(problem.grid())
    if not is_concrete(closed) or -(-sizes.T // side) * -(-sizes.S // side) > _MOST_TILES:
        return None
    offsets = (problem.query_offset, problem.key_offset)
    # For an estimate where they are not known: the last query sits with the last key.
    return offsets if is_concrete(offsets) else (sizes.S - sizes.T, None)


@functools.partial(jax.jit, static_argnames=("sizes", "side"))
def _classify(mask: Mask, offsets: tuple[Any, Any], sizes: Sizes, side: int) -> jax.Array:
    return classify_tiles(mask, sizes, offsets, side, side)
