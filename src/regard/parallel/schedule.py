"""The rounds of a ring that hold work, found before tracing where the mask is known by then."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.core import eval_context
from jax.sharding import use_abstract_mesh

from regard.engine.call.problem import Problem
from regard.engine.dispatch.explanation import choose_side
from regard.engine.flash.device_types import NO_MESH
from regard.masks import Mask, TileKind
from regard.masks.grid import Blocks, Grid, is_concrete
from regard.masks.offsets import positions_of
from regard.masks.spans import Span
from regard.parallel.division import Division, Round

_MOST_CELLS = 1 << 26  # of a mask that must be looked at


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Compute with what is known, whatever the mesh around the call."""
    with eval_context(), use_abstract_mesh(NO_MESH):
        yield


def _find_work(problem: Problem, division: Division) -> np.ndarray:
    """Return whether each chunk of queries may have work with each of keys, as far as is known now."""
    queries, keys = division.queries, division.keys
    has_work = np.zeros((queries.parts * queries.ring, keys.parts * keys.ring), bool)
    kinds = find_kinds(problem, queries.chunk, keys.chunk)
    shape = (-(-problem.T // queries.chunk), -(-problem.S // keys.chunk))
    # Rows and heads that differ are computed together.
    kinds = np.broadcast_to(kinds, (*kinds.shape[:-2], *shape)).reshape((-1, *shape))
    has_work[: shape[0], : shape[1]] = (kinds != TileKind.EMPTY).any(0)
    return has_work


def find_kinds(problem: Problem, query_block: int, key_block: int) -> np.ndarray:
    """Classify blocks as far as the parts of the mask are known now; the rest is PARTIAL."""
    mask, axes = problem.mask, len(problem.leading)
    ones = (1,) * (axes + 2)
    if mask is None:
        return np.full(ones, TileKind.FULL, np.int8)
    unknown = np.full(ones, TileKind.PARTIAL, np.int8)

    def classify(part: Mask) -> np.ndarray:
        if not is_countable(problem, part):
            return unknown
        offsets = (problem.query_offset, axes, problem.key_offset)
        kinds = part.classify(Blocks.cover(problem.T, problem.S, query_block, key_block, *offsets))
        return np.asarray(kinds) if is_concrete(kinds) else unknown

    with _at_once():
        return np.asarray(mask.combine_kinds(classify))


def plan_rounds(problem: Problem, division: Division) -> tuple[Round, ...]:
    """Return the rounds in which some device has work, and the pairs of parts that have it."""
    return find_rounds(_find_work(problem, division), division)


def find_rounds(has_work: np.ndarray, division: Division) -> tuple[Round, ...]:
    """Return the rounds in which some device has work, from the pairs of chunks that have it."""
    ring, parts = division.size(division.ring), range(division.parts)
    members = np.arange(ring)
    chunks = [division.chunk_of(part, members) for part in parts]
    pairs: list[list[tuple[int, int]]] = [[] for _ in members]
    for query_part in parts:
        for key_part in parts:
            met = has_work[np.ix_(chunks[query_part], chunks[key_part])]
            # Row m, column r: whether member m meets the keys of member m - r.
            twice = np.concatenate([met, met], axis=1)
            row, column = twice.strides
            shifted = np.lib.stride_tricks.as_strided(twice[:, ring:], (ring, ring), (row + column, -column))
            for number in np.flatnonzero(shifted.any(0)):
                pairs[number].append((query_part, key_part))
    return tuple(Round(number, tuple(some)) for number, some in enumerate(pairs) if some)


def is_countable(problem: Problem, mask: Mask | None) -> bool:
    """Return whether the mask, or a part of it, is known now, and the kind of each tile cheap to find."""
    if not is_concrete((mask, problem.query_offset, problem.key_offset)):
        return False
    return mask is None or not mask.reads_cells or problem.T * problem.S <= _MOST_CELLS


def count_tiles(problem: Problem, division: Division) -> tuple[tuple[int, ...], str]:
    """Count square tiles with work on each member of the ring; return their size as well.

    Where the mask is not known cheaply, pairs of chunks that may have work are counted: those of another
    layout have another size.
    """
    queries = division.queries
    side = min(choose_side(problem), queries.chunk)

    def count(member: int) -> list[Any]:
        starts = (division.chunk_of(part, member) * queries.chunk for part in range(queries.parts))
        spans = ((first, min(queries.chunk, problem.T - first)) for first in starts if first < problem.T)
        return [_count_in_rows(problem, first, size, side) for first, size in spans]

    members = range(queries.ring)
    if is_countable(problem, problem.mask):
        counts = [count(member) for member in members]
        if not any(None in tiles for tiles in counts):
            return tuple(map(sum, counts)), f"{side} x {side}"
    has_work = _find_work(problem, division)
    chunks = ([division.chunk_of(part, member) for part in range(division.parts)] for member in members)
    counts = tuple(int(has_work[rows].sum()) for rows in chunks)
    return counts, f"chunks of {queries.chunk} x {division.keys.chunk}"


def _count_in_rows(problem: Problem, first: int, size: int, side: int) -> int | None:
    """Count tiles with work in some rows, over all leading axes that the mask tells apart."""
    axes = len(problem.leading)
    tiles = (-(-size // side), -(-problem.S // side))
    if problem.mask is None:
        return tiles[0] * tiles[1]
    with _at_once():
        rows = Span(first, size)
        grid = Grid.tile(rows, Span(0, problem.S), problem.query_offset, axes, problem.key_offset)
        offset = positions_of(problem.query_offset).slice_rows(first, rows.members)
        mask = problem.mask.slice_grid(grid)
        if not is_countable(problem, mask):  # what was prepared for the whole is read anew in a piece
            return None
        codes = mask.classify(Blocks.cover(size, problem.S, side, side, offset, axes, problem.key_offset))
    codes = np.asarray(codes)
    return int((np.broadcast_to(codes, (*codes.shape[:-2], *tiles)) != TileKind.EMPTY).sum())
