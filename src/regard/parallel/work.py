"""The work of a call by its rows, and whether a balanced order evens out enough of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from regard.engine.call.problem import Problem
from regard.engine.dispatch.explanation import choose_side
from regard.masks import TileKind
from regard.parallel.cost_reports import sent_bytes
from regard.parallel.division import Division
from regard.parallel.schedule import find_kinds, is_countable

# Operations that are worth a byte: chips of `planning.CHIPS` compute 480 to 1,560 at half of their peak in
# bfloat16 while all links to their neighbours carry one at 80% of theirs.
_WORTH = 1000


@dataclass(frozen=True)
class Work:
    """Cells of tiles with work, up to each row; `side` is that of the tiles, 0 if the mask is not known."""

    edges: np.ndarray
    cells: np.ndarray
    side: int
    pairs: int
    """Cells in all, kept or not."""

    @classmethod
    def count(cls, problem: Problem) -> Work:
        """Count by looking at every tile once; heads and rows that differ are averaged.

        Tiles that only parts of the mask which are not known now leave out count as well.
        """
        pairs, side = problem.T * problem.S, choose_side(problem)
        kinds = find_kinds(problem, side, side)
        is_known = problem.mask is not None and is_countable(problem, problem.mask)
        if kinds.shape[-2:] == (1, 1) and not is_known:
            edges = np.asarray([0, problem.T])
            return cls(edges, edges * float(problem.S), 0, pairs)
        edges = np.minimum(np.arange(-(-problem.T // side) + 1) * side, problem.T)
        columns = np.diff(np.minimum(np.arange(-(-problem.S // side) + 1) * side, problem.S))
        # Kinds that do not depend on the row or the key have one for all.
        held = (kinds != TileKind.EMPTY).reshape(-1, *kinds.shape[-2:]).mean(0)
        held = np.broadcast_to(held, (edges.size - 1, columns.size)) @ columns
        return cls(edges, np.concatenate([[0.0], np.cumsum(held * np.diff(edges))]), side, pairs)

    @property
    def total(self) -> float:
        return float(self.cells[-1])

    @property
    def kept(self) -> float:
        """Share of the cells that are in tiles with work."""
        return self.total / self.pairs

    def count_rows(self, first: np.ndarray, count: int) -> np.ndarray:
        """Return the cells of so many rows, from each first one on; within a tile they are spread evenly."""
        return np.interp(first + count, self.edges, self.cells) - np.interp(first, self.edges, self.cells)

    def count_chunks(self, ring: int, parts: int, chunk: int) -> np.ndarray:
        """Return the cells of every member's chunks, (parts, ring)."""
        members = np.arange(ring)
        chunks = members[None] if parts == 1 else np.stack([members, 2 * ring - 1 - members])
        return self.count_rows(chunks * chunk, chunk)


def count_members(work: Work, division: Division) -> np.ndarray:
    """Return the cells of every member of the ring."""
    return work.count_chunks(division.queries.ring, division.parts, division.queries.chunk).sum(0)


def favours_balance(problem: Problem, work: Work, plain: Division, even: Division) -> bool:
    """Return whether what a balanced order takes off the busiest device is worth the bytes that it sends.

    Work is that of a forward and a backward pass, in cells of the same tiles for both orders.
    """
    if plain.is_even and not even.is_even:
        return False  # every device would have all rows, to pad them
    cells = count_members(work, plain).max() - count_members(work, even).max()
    heads = math.prod(problem.leading) / plain.size(*plain.batch, *plain.heads, plain.exchange)
    operations = 2 * cells * heads * (4 * problem.D + 3 * problem.E)
    return operations > _WORTH * (sum(sent_bytes(problem, even)) - sum(sent_bytes(problem, plain)))
