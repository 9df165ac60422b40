"""Work: how much of the score matrix a mask keeps, by rows, so that any division of them can be weighed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from regard.engine.call.problem import Problem
from regard.engine.dispatch.explanation import classify_tiles
from regard.masks import TileKind
from regard.parallel.division import Division
from regard.parallel.schedule import is_countable


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
        """Look at every tile once; heads and rows that differ are averaged."""
        pairs = problem.T * problem.S
        if problem.mask is None or not is_countable(problem):
            edges = np.asarray([0, problem.T])
            return cls(edges, edges * float(problem.S), 0, pairs)
        codes, side = classify_tiles(problem)
        columns = np.diff(np.minimum(np.arange(codes.shape[-1] + 1) * side, problem.S))
        edges = np.minimum(np.arange(codes.shape[-2] + 1) * side, problem.T)
        # Verdicts that do not depend on the row or the key have one for all.
        held = (codes != TileKind.EMPTY) @ columns.astype(float)
        held = held.reshape(-1, held.shape[-1]).mean(0)
        return cls(edges, np.concatenate([[0.0], np.cumsum(held * np.diff(edges))]), side, pairs)

    @property
    def total(self) -> float:
        return float(self.cells[-1])

    @property
    def kept(self) -> float:
        """Share of the cells that are in tiles with work."""
        return self.total / self.pairs

    def divide(self, division: Division) -> np.ndarray:
        """Cells of each member of the ring."""
        chunk, members = division.queries.chunk, range(division.queries.ring)
        first = np.asarray(
            [
                [division.chunk_of(part, member) * chunk for part in range(division.parts)]
                for member in members
            ]
        )
        return (self._before(first + chunk) - self._before(first)).sum(-1)

    def _before(self, rows: np.ndarray) -> np.ndarray:
        """Cells above a row; within a tile they are taken to be spread evenly."""
        return np.interp(rows, self.edges, self.cells)
