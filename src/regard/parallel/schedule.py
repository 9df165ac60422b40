"""Plan which rounds a ring needs: known before tracing wherever the kinds of the mask's tiles are."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from regard.engine.call.problem import Problem
from regard.masks import Mask, TileKind
from regard.masks.algebra import And, Not, Or
from regard.masks.grid import Blocks, Grid, Span, is_concrete
from regard.masks.predicates import HoistedPredicate, Predicate
from regard.masks.stored import FromArray
from regard.parallel.division import Division, Round

_MOST_CELLS = 1 << 26  # of a mask that must be looked at
_SIDE, _MOST_TILES = 128, 2048  # of tiles that are counted: at least so large, at most so many along an axis


def chunk_codes(problem: Problem, division: Division) -> np.ndarray:
    """A `TileKind` code for each chunk of queries and each of keys; what is not known now is PARTIAL."""
    queries, keys = division.queries, division.keys
    codes = np.zeros((queries.parts * queries.ring, keys.parts * keys.ring), np.int8)
    blocks = _evaluate(
        problem.mask,
        lambda: Blocks.cover(
            problem.T,
            problem.S,
            queries.chunk,
            keys.chunk,
            problem.query_offset,
            len(problem.leading),
            problem.key_offset,
        ),
        problem,
    )
    shape = (-(-problem.T // queries.chunk), -(-problem.S // keys.chunk))
    blocks = np.broadcast_to(blocks, (*blocks.shape[:-2], *shape))
    # Rows and heads that differ are computed together.
    least, most = (edge.reshape((-1, *shape)) for edge in (blocks, blocks))
    least, most = least.min(0), most.max(0)
    codes[: shape[0], : shape[1]] = np.where(least == most, most, TileKind.PARTIAL)
    codes[: shape[0], : shape[1]][most == TileKind.EMPTY] = TileKind.EMPTY
    return codes


def plan_rounds(problem: Problem, division: Division) -> tuple[Round, ...]:
    """The rounds in which some device has work, and which of its parts have it somewhere."""
    held = chunk_codes(problem, division) != TileKind.EMPTY
    ring, parts = division.size(division.ring), range(division.parts)
    members = np.arange(ring)
    pairs: list[list[tuple[int, int]]] = [[] for _ in members]
    for one in parts:
        for other in parts:
            theirs = [division.chunk_of(other, member) for member in range(ring)]
            met = np.zeros(ring, bool)  # in each round, by some member
            for member in range(ring):
                met[(member - members) % ring] |= held[division.chunk_of(one, member), theirs]
            for number in np.flatnonzero(met):
                pairs[number].append((one, other))
    rounds = [Round(number, tuple(some)) for number, some in enumerate(pairs) if some]
    return tuple(rounds)


def tile_side(problem: Problem, division: Division) -> int:
    """How large the tiles are that `tile_counts` counts."""
    side = _SIDE
    while max(problem.T, problem.S) > side * _MOST_TILES:
        side *= 2
    return min(side, division.queries.chunk)


def is_countable(problem: Problem) -> bool:
    """Return whether the mask is known now, and the kind of each tile cheap to find."""
    if not is_concrete((problem.mask, problem.query_offset, problem.key_offset)):
        return False
    return not _must_look(problem.mask) or problem.T * problem.S <= _MOST_CELLS


def tile_counts(problem: Problem, division: Division) -> tuple[int, ...] | None:
    """Square tiles with work, on each member of the ring; None where the mask is not known now."""
    if not is_countable(problem):
        return None
    queries, side = division.queries, tile_side(problem, division)
    counts = []
    for member in range(queries.ring):
        total = 0
        for part in range(queries.parts):
            first = division.chunk_of(part, member) * queries.chunk
            size = min(queries.chunk, problem.T - first)
            if size > 0:
                total += _count(problem, first, size, side)
        counts.append(total)
    return tuple(counts)


def _count(problem: Problem, first: int, size: int, side: int) -> int:
    """Tiles with work in some rows, over all leading axes the mask tells apart."""
    axes = len(problem.leading)
    tiles = (-(-size // side), -(-problem.S // side))
    if problem.mask is None:
        return tiles[0] * tiles[1]
    with jax.ensure_compile_time_eval():
        grid = Grid.tile(
            Span(first, size), Span(0, problem.S), problem.query_offset, axes, problem.key_offset
        )
        codes = problem.mask.slice_grid(grid).classify(
            Blocks.cover(size, problem.S, side, side, problem.query_offset + first, axes, problem.key_offset)
        )
    codes = np.asarray(codes)
    return int((np.broadcast_to(codes, (*codes.shape[:-2], *tiles)) != TileKind.EMPTY).sum())


def _evaluate(mask: Mask | None, cover: Any, problem: Problem) -> np.ndarray:
    """Verdicts of a mask as far as they are known."""
    ones = (1,) * (len(problem.leading) + 2)
    if mask is None:
        return np.full(ones, TileKind.FULL, np.int8)
    if isinstance(mask, And | Or):
        combine = np.minimum if isinstance(mask, And) else np.maximum
        return combine(_evaluate(mask.left, cover, problem), _evaluate(mask.right, cover, problem))
    if isinstance(mask, Not):
        return np.int8(TileKind.FULL) - _evaluate(mask.operand, cover, problem)
    unknown = np.full(ones, TileKind.PARTIAL, np.int8)
    if _must_look(mask) and problem.T * problem.S > _MOST_CELLS:
        return unknown
    if not is_concrete((mask, problem.query_offset, problem.key_offset)):
        return unknown
    with jax.ensure_compile_time_eval():
        codes = mask.classify(cover())
    return np.asarray(codes) if is_concrete(codes) else unknown


def _must_look(mask: Mask | None) -> bool:
    """Return whether tiles are classified by looking at every cell."""
    if isinstance(mask, And | Or):
        return _must_look(mask.left) or _must_look(mask.right)
    if isinstance(mask, Not):
        return _must_look(mask.operand)
    return isinstance(mask, FromArray | Predicate | HoistedPredicate)


def chunk_counts(problem: Problem, division: Division) -> tuple[int, ...]:
    """Pairs of chunks that may have work, on each member of the ring."""
    held = chunk_codes(problem, division) != TileKind.EMPTY
    parts = range(division.parts)
    return tuple(
        int(sum(held[division.chunk_of(part, member)].sum() for part in parts))
        for member in range(division.size(division.ring))
    )
