"""Placed: a score of a larger call, for some of its heads and rows."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from regard.axes import Array
from regard.records import delegate, record
from regard.scores.cells import Bucket, Cells
from regard.scores.score import Score


@delegate("score", "reads_positions", "adds", "bounded", "title", "formula", "words", "expression")
@record
class Placed(Score):
    """A score as it acts on some of the heads, and on rows from some index on, that it was made for."""

    score: Score
    heads: Any | None  # their indices, int32 (n,); None, all of them
    first_batch: Any  # index of the first row on the first leading axis

    @property
    def parts(self) -> tuple[Score, ...]:
        return tuple(Placed(part, self.heads, self.first_batch) for part in self.score.parts)

    def apply(self, scores: Array, cells: Cells) -> Array:
        return self.score.apply(scores, _PlacedCells(cells, self.heads, self.first_batch))

    def derivative(self, scores: Array, cells: Cells) -> Array:
        return self.score.derivative(scores, _PlacedCells(cells, self.heads, self.first_batch))

    def pin(self, dtype: Any) -> Score:
        return Placed(self.score.pin(dtype), self.heads, self.first_batch)

    def closure_convert(self, dtype: Any) -> Score:
        return Placed(self.score.closure_convert(dtype), self.heads, self.first_batch)

    def check(self, leading: tuple[int, ...]) -> None:
        for name, shape in (("first_batch", ()), ("heads", leading[-1:])):
            ids = getattr(self, name)
            if ids is not None and (ids.shape != shape or not jnp.issubdtype(ids.dtype, jnp.integer)):
                raise ValueError(f"{name}: expected integers {shape}, got {ids.dtype} {ids.shape}")


@dataclass(frozen=True)
class _PlacedCells:
    """Cells with the indices of heads and rows in the larger call."""

    cells: Cells
    heads: Any
    first_batch: Any

    @property
    def query_position(self) -> Array:
        return self.cells.query_position

    @property
    def key_position(self) -> Array:
        return self.cells.key_position

    @property
    def head(self) -> Array:
        return self.cells.head if self.heads is None else jnp.take(self.heads, self.cells.head)

    @property
    def batch(self) -> Array:
        return self.cells.batch + self.first_batch

    def per_head(self, array: Array) -> Array:
        return self.cells.per_head(array if array.size == 1 else self._own(array, 0))

    def add_looked_up(self, scores: Array, table: Array, bucket: Bucket, reach: int) -> Array:
        table = self._own(table, 1) if table.shape[1] > 1 else table
        return self.cells.add_looked_up(scores, table, bucket, reach)

    def _own(self, array: Array, axis: int) -> Array:
        if self.heads is None:
            return array
        # Heads differ from one another: the gradient adds nothing up, in whatever order.
        return jnp.take(jnp.asarray(array), self.heads, axis, unique_indices=True)
