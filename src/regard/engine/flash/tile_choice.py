"""The choice of tiles: whole ones, or several pieces at once where these leave out more."""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_context
from jax.sharding import use_abstract_mesh

from regard.engine.call.problem import Problem, Sizes
from regard.engine.flash.blocking import Blocking, Trips
from regard.engine.flash.device_types import NO_MESH
from regard.engine.flash.measurements import Tuning, load_tuning
from regard.engine.flash.piece_costs import HALF_LINES, ONE_LINE, TWO_LINES, Lines
from regard.engine.flash.sparsity import TileLists, classify_tiles, list_both_ways, list_known
from regard.masks import Mask, TileKind
from regard.masks.grid import is_concrete
from regard.masks.tile_kinds import KeptTiles

_FEWEST_PAIRS = 1 << 21  # below, to choose takes a tenth of the call
_FEW_TILES = 4  # kept per line, up to which half lines may be faster
_MOST_HALF_TILES = 1 << 18  # to list more would take too much of a call
_DATA_COST = 1.5  # of a pair in a PARTIAL tile whose mask reads arrays
_MOST_TILES = 1 << 22  # whose lists are a few dozen megabytes
_MOST_LISTED = 1 << 16  # small tiles, whose lists a call is given: of 32,768 tokens squared
_GAIN = 0.95  # pieces must promise that much, as costs are estimates
_STEP_CELLS = 1 << 22  # what a step costs before its first score, in scores: a dozen kernels, and three reads


@dataclass(frozen=True)
class TileChoice:
    """Tiles of the forward and of the backward loop, and why these."""

    forward: Blocking
    backward: Blocking
    reason: str
    computed: float | None = None
    """The share of all pairs that the forward loop computes; None where it is not known."""
    steps: int | None = None
    """The number of its steps, one after the other; None where it is not known."""
    lists: tuple[TileLists, TileLists] | None = dataclasses.field(default=None, compare=False, repr=False)
    """Lists of these tiles, as `list_both_ways` makes them; None where they are not known, or are long."""

    def __str__(self) -> str:
        block = self.forward
        tile = f"tiles of {block.queries} x {block.keys}"
        if block.pieces:
            tile = f"{block.blocks} blocks at once, each against {block.pieces} {tile}"
        share = "" if self.computed is None else f"{self.computed:.0%} of pairs computed, in "
        steps = "" if self.steps is None else f"{self.steps:,} step{'s' * (self.steps != 1)} of "
        return f"{share}{steps}{tile}: {self.reason}"


def choose_tiles(problem: Problem) -> TileChoice:
    """Choose the tiles of a call by what its mask keeps."""
    tuning = load_tuning()
    whole, side, mask = tuning.blocking(problem), tuning.piece_side, problem.mask
    if whole[0].at_once:
        return choose_tiles_at_once(problem, tuning)
    if mask is None:
        sizes, block = problem.sizes, whole[0]
        tiles = -(-sizes.T // block.queries) * -(-sizes.S // block.keys)
        return TileChoice(*whole, "there is no mask", 1.0, _steps(sizes, (), tiles, block))
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
        if mask.kept_tiles is not None and mask.kept_tiles.side == side:
            return _choose_prepared(mask.kept_tiles, problem, whole, tuning)
        if mask.block_side is None or mask.block_side > side:
            return TileChoice(*whole, "the mask's arrays are not known here")
        longest = -(-max(problem.T, problem.S) // side)
        pieces = ONE_LINE.blocking(tuning, problem.group, max(2, 1024 // side), longest)
        return TileChoice(pieces, pieces, f"the mask keeps blocks of {mask.block_side}")
    always = not jax.tree.leaves(mask) and all(isinstance(offset, int | None) for offset in offsets)
    choose = _choose_once if always else _choose
    choice = choose(mask, problem.sizes, offsets, problem.group, whole, tuning)
    is_known = is_concrete((problem.query_offset, problem.key_offset))
    return choice if is_known else dataclasses.replace(choice, lists=None)


def _choose(
    mask: Mask,
    sizes: Sizes,
    offsets: tuple[Any, Any],
    group: int,
    whole: tuple[Blocking, Blocking],
    tuning: Tuning,
) -> TileChoice:
    """Choose by the kinds of tiles of a mask that is known."""
    side, positions = tuning.piece_side, sizes.T * sizes.S
    # One look at half tiles says of whole ones, too: to look is to compile.
    has_halves = 4 * positions <= _MOST_HALF_TILES * side**2
    halves = _look(mask, sizes, offsets, side // 2) if has_halves else None
    fine = _look(mask, sizes, offsets, side) if halves is None else join_halves(halves)
    nonempty = fine != TileKind.EMPTY
    data_cost = (_DATA_COST - 1) * bool(jax.tree.leaves(mask))
    rest = [_whole(fine, sizes, side, block, data_cost) for block in whole]
    kinds_of = {ONE_LINE: fine}
    if group == 1:  # heads that share keys make as tall products of blocks of one line
        kinds_of[TWO_LINES] = fine
    if halves is not None and nonempty.sum(-1).mean() <= _FEW_TILES:
        kinds_of[HALF_LINES] = halves
    chosen = []
    for axis, candidate in zip((-1, -2), rest, strict=True):
        best = dataclasses.replace(candidate, cost=candidate.cost * _GAIN)
        for lines, kinds in kinds_of.items():
            best = _cheaper(best, lines, kinds, group, tuning, data_cost, axis)
        chosen.append(best)
    pairs = math.prod(fine.shape[:-2]) * positions
    block = chosen[0].blocking
    if sizes.T % block.queries:  # the last block is moved back
        block = dataclasses.replace(block, in_order=False)
    fewest = min(each.keys if each.pieces else side for each in (block, chosen[1].blocking.turn()))
    listed_kinds, listed_side = (kinds_of[HALF_LINES], side // 2) if fewest < side else (fine, side)
    lists = None
    if listed_kinds.size <= _MOST_LISTED:
        lists = list_known(listed_kinds, listed_side, sizes, block, chosen[1].blocking)
    kinds, side = (kinds_of[HALF_LINES], side // 2) if block.pieces and block.keys < side else (fine, side)
    shares = (
        (side, side, (kinds != TileKind.EMPTY).sum() * side**2),
        (whole[0].queries, whole[0].keys, rest[0].pairs),
    )
    listed = ", ".join(f"{min(n / pairs, 1.0):.0%} of pairs in tiles of {q} x {k}" for q, k, n in shares)
    return TileChoice(
        block,
        chosen[1].blocking,
        f"the mask keeps {listed}",
        min(chosen[0].pairs / pairs, 1.0),
        _steps(sizes, fine.shape[:-2], chosen[0].tiles, block),
        lists,
    )


def _look(mask: Mask, sizes: Sizes, offsets: tuple[Any, Any], side: int) -> np.ndarray:
    """Return the kinds of tiles of a mask that is known."""
    # To look is to read.
    with eval_context(), jax.transfer_guard("allow"), use_abstract_mesh(NO_MESH):
        return np.asarray(_classify(mask, sizes, offsets, side, side))


def join_halves(halves: np.ndarray) -> np.ndarray:
    """Return the kinds of tiles of twice the side."""
    least = most = halves
    for axis in (-2, -1):
        starts = range(0, halves.shape[axis], 2)
        least, most = np.minimum.reduceat(least, starts, axis), np.maximum.reduceat(most, starts, axis)
    return np.where(least == most, least, TileKind.PARTIAL).astype(halves.dtype)


_choose_once = functools.lru_cache(maxsize=64)(_choose)


def _choose_prepared(
    tiles: KeptTiles, problem: Problem, whole: tuple[Blocking, Blocking], tuning: Tuning
) -> TileChoice:
    """Choose by how many tiles a prepared mask keeps, where which they are is data of the call."""
    rows, columns = -(-problem.T // tiles.side), -(-problem.S // tiles.side)
    pairs = min(tiles.joined, columns) * rows * tiles.side**2
    chosen = []
    for direction, (block, quarters, lines, longest) in enumerate(
        ((whole[0], tiles.by_row, rows, columns), (whole[1], tiles.by_column, columns, rows))
    ):
        counts = np.minimum(np.resize(quarters, lines), longest)
        best = _Candidate(block, pairs, pairs * _GAIN, 0.0)
        best = _cheapest(best, ONE_LINE, direction, counts, problem.group, tuning, 0.0)
        chosen.append(best.blocking)
    half, most = min(tiles.by_row[1] / columns, 1.0), min(tiles.joined / columns, 1.0)
    reason = (
        f"half of the prepared rows keep up to {half:.0%} of pairs in tiles of {tiles.side}, {most:.0%} in"
        " larger ones"
    )
    return TileChoice(chosen[0], chosen[1], reason)


@dataclass(frozen=True)
class _Candidate:
    blocking: Blocking
    pairs: float  # computed, over the leading axes of the mask's data
    cost: float
    tiles: float  # or steps of several pieces, likewise


def _whole(fine: np.ndarray, sizes: Sizes, side: int, block: Blocking, data_cost: float) -> _Candidate:
    """Return what whole tiles cost, by the kinds of small ones."""
    least = most = fine
    for axis, length, size in ((-2, sizes.T, block.queries), (-1, sizes.S, block.keys)):
        if size > side:
            starts = np.arange(0, length, size) // side
            least, most = np.minimum.reduceat(least, starts, axis), np.maximum.reduceat(most, starts, axis)
    area, nonempty = block.queries * block.keys, most != TileKind.EMPTY
    partial = float((nonempty & (least != TileKind.FULL)).sum()) * data_cost
    count = float(nonempty.sum())
    return _Candidate(block, count * area, (count + partial) * area, count)


def _steps(sizes: Sizes, counted: tuple[int, ...], tiles: float, block: Blocking) -> int:
    """Return the steps for all leading positions, where `tiles` are those of the positions `counted`."""
    positions = math.prod(sizes.leading[:-1]) * sizes.key_heads
    alike = math.prod(counted[-1:]) == 1
    heads = block.fit(sizes.T, sizes.S, sizes.key_heads).heads if alike and not block.pieces else 1
    return round(tiles * positions / math.prod(counted) / heads)


def _cheaper(
    best: _Candidate, lines: Lines, kinds: np.ndarray, group: int, tuning: Tuning, data_cost: float, axis: int
) -> _Candidate:
    """Return what is faster, the best so far or blocks of lines of tiles of these kinds, along an axis."""
    nonempty = kinds != TileKind.EMPTY
    look = data_cost * np.mean(kinds[nonempty] == TileKind.PARTIAL) if nonempty.any() else 0.0
    nonempty = nonempty if axis == -1 else np.swapaxes(nonempty, -1, -2)
    if lines is TWO_LINES:
        nonempty = np.logical_or.reduceat(nonempty, range(0, nonempty.shape[-2], 2), -2)
    counts = nonempty.sum(-1)
    cheapest = _cheapest(best, lines, -1 - axis, counts, group, tuning, look)
    block = cheapest.blocking
    if cheapest is best or axis == -2 or counts.shape[-1] % block.blocks:
        return cheapest
    in_order = _steps_of_pieces(counts, block.blocks, block.pieces) == cheapest.tiles
    return dataclasses.replace(cheapest, blocking=dataclasses.replace(block, in_order=in_order))


def _cheapest(
    best: _Candidate,
    lines: Lines,
    direction: int,
    counts: np.ndarray,
    group: int,
    tuning: Tuning,
    look: float,
) -> _Candidate:
    """Return what is faster, the best so far or blocks of such lines.

    `counts` of pieces are kept in each block, and a pair of theirs costs `look` more for their PARTIAL ones.
    """
    ordered = -np.sort(-counts, -1)
    for number, cost in zip(lines.pieces, (lines.forward, lines.backward)[direction], strict=True):
        blocking = lines.blocking(tuning, group, number, ordered.shape[-1])
        steps = _steps_of_pieces(ordered, blocking.blocks, number)
        pairs = steps * number * blocking.blocks * blocking.queries * blocking.keys
        total = pairs * (1 + (cost - 1) / group + look)  # heads that share keys make taller products
        if total < best.cost:
            best = _Candidate(blocking.turn() if direction else blocking, pairs, total, steps)
    return best


def _steps_of_pieces(ordered: np.ndarray, blocks: int, number: int) -> float:
    """Count the steps of blocks that go together in this order, each against so many pieces at once."""
    short = -ordered.shape[-1] % blocks
    padded = np.pad(ordered, [(0, 0)] * (ordered.ndim - 1) + [(0, short)])
    most = padded.reshape((*padded.shape[:-1], -1, blocks)).max(-1)
    return float((-(-most // number)).sum())


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


def choose_tiles_at_once(problem: Problem, tuning: Tuning) -> TileChoice:
    """Choose tiles of all leading positions, and count them where the mask is known to the program."""
    mask, sizes, blocks = problem.mask, problem.sizes, tuning.blocking(problem)
    reason = "as many rows of the batch and heads at once as memory holds"
    always = not jax.tree.leaves(mask)
    # A program that is made for these arrays may count them; one that is kept for others must not.
    made_here = not isinstance(problem.query, jax.Array) or isinstance(problem.query, Tracer)
    offsets = (problem.query_offset, problem.key_offset)
    fixed = all(isinstance(offset, int | None) for offset in offsets) and (always or made_here)
    if mask is not None and not (fixed and _known_offsets(problem, min(blocks[0].queries, blocks[0].keys))):
        return TileChoice(*blocks, f"{reason}; how many tiles the mask keeps is seen in every step")
    count = _count_once if always else _count
    choices: list[tuple[Blocking, int]] = []
    for block, axis in zip(blocks, (0, 1), strict=True):
        candidates = []
        while True:
            trips = count(mask, sizes, (0, None) if mask is None else offsets, block, tuning.most_loops)[axis]
            steps = sum(trip.blocks * trip.kept for trip in trips) * _loops(problem, block.at_once)
            cells = min(block.at_once, math.prod(sizes.leading)) * block.queries * block.keys
            candidates.append((steps * (cells + _STEP_CELLS), steps, dataclasses.replace(block, trips=trips)))
            smaller = tuning.halve(problem, block)
            if smaller == block:
                break
            block = smaller
        _, steps, best = min(candidates, key=lambda candidate: candidate[0])
        choices.append((best, steps))
    (forward, steps), (backward, _) = choices
    tiles = sum(trip.blocks * trip.kept for trip in forward.trips)
    computed = min(tiles * forward.queries * forward.keys / (problem.T * problem.S), 1.0)
    return TileChoice(forward, backward, reason, computed, steps)


def _count(
    mask: Mask | None, sizes: Sizes, offsets: tuple[Any, Any], block: Blocking, most_loops: int
) -> tuple[tuple[Trips, ...], tuple[Trips, ...]]:
    """Return the trips by query and by key."""
    with eval_context(), jax.transfer_guard("allow"), use_abstract_mesh(NO_MESH):
        by_query, by_key = _list_both_ways(mask, sizes, offsets, block, block)
        return _merge(by_query, most_loops), _merge(by_key, most_loops)


_count_once = functools.lru_cache(maxsize=256)(_count)


def _merge(lists: TileLists, most_loops: int) -> tuple[Trips, ...]:
    """Return the trips of blocks, as if some visited as many tiles as their neighbours."""
    full, tiles = np.asarray(lists.full), np.asarray(lists.kept)
    full, tiles = full.reshape((-1, full.shape[-1])).min(0), tiles.reshape((-1, tiles.shape[-1])).max(0)
    changes = 1 + np.flatnonzero(np.diff(full) | np.diff(tiles))
    if len(changes) >= most_loops:
        changes = np.unique(np.linspace(0, len(full), most_loops + 1).astype(int)[1:-1])
    groups = zip(np.split(full, changes), np.split(tiles, changes), strict=True)
    return tuple(Trips(len(least), int(least.min()), int(most.max())) for least, most in groups)


def _loops(problem: Problem, at_once: int) -> int:
    """Return over how many leading positions is looped where so many go together."""
    axes = [*problem.leading[:-1], problem.key_heads]
    while axes and axes[-1] <= at_once:
        at_once //= axes.pop()
    return math.prod(axes)


_list_both_ways = jax.jit(list_both_ways, static_argnames=("sizes", "forward", "backward"))
_classify = jax.jit(classify_tiles, static_argnames=("sizes", "query_block", "key_block"))
