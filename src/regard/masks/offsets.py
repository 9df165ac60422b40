"""Places of the rows of query or key: one after the other from an offset, or each row at its own position.

Start from `positions_of`, which answers for both.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST
from regard.axes import Array, broadcast_shapes
from regard.masks.spans import Run
from regard.records import record

Offset = Any  # an int, a traced scalar, or an integer array (batch,); None, known to be 0; or TokenPositions


@dataclass(frozen=True)
class Consecutive:
    """Row n sits at position offset + n."""

    offset: Offset
    is_consecutive: ClassVar[bool] = True

    @property
    def leading_axes(self) -> int:
        """Return how many of the call's leading axes the offset knows."""
        return np.ndim(self.offset) if self.offset is not None else 0

    def at(self, index: Array, span: Run | None, axis: int, leading_axes: int) -> Array:
        """Return the positions of rows that lie on an axis, -2 or -1; what is not moved is the same array."""
        return index if self.offset is None else self._move(index, offset_column(self.offset, leading_axes))

    def _move(self, index: Array, offset: Array) -> Array:
        """Add rows and an offset: the last rows, which may hold nothing, end where int32 does."""
        if isinstance(self.offset, int):  # which was checked
            return index + offset
        return index + jnp.minimum(offset, LARGEST - index)

    def pick(self, index: Array, leading_axes: int) -> Array:
        """Return the positions of one row for each query, (*B, T)."""
        column = offset_column(self.offset, leading_axes)
        column = column.reshape((*(1,) * (index.ndim + 1 - column.ndim), *column.shape[:-1]))
        return self._move(index, column)

    def ends(self, first: Array, last: Array, size: int, axis: int, leading_axes: int) -> tuple[Array, Array]:
        """Return the least and the largest position of each block of `size` rows."""
        return self.at(first, None, axis, leading_axes), self.at(last, None, axis, leading_axes)

    def rows(self, size: int) -> Any:
        """Return the position of the first of `size` rows, or where they differ between examples of each."""
        if self.leading_axes == 0:
            return 0 if self.offset is None else self.offset
        return self._move(jnp.arange(size, dtype=jnp.int32)[None], jnp.asarray(self.offset)[:, None])

    def number(self, index: Array, position: Array) -> Array:
        """Return what tells rows of the whole call apart, whatever part of it this is."""
        return position

    def slice_batch(self, take: Callable[[Any, int], Any]) -> Offset:
        """Return the same of one leading index."""
        return None if self.offset is None else take(self.offset, 0)

    def spell(self, side: str, literal: Callable[[Any], str]) -> str:
        """Return the argument of `attend` that says so; nothing where it is 0."""
        at_zero = isinstance(self.offset, int) and not self.offset
        return "" if self.offset is None or at_zero else f", {side}_offset={literal(self.offset)}"

    def slice_rows(self, first: Any, rows: Array | None) -> Offset:
        """Return the same of some rows alone, from `first` on."""
        return first if self.offset is None else self.offset + first


@record
class TokenPositions:
    """Each row sits at a position of its own; several may share one."""

    positions: Any  # (b..., n), leading axes aligned with the first of query
    first: Any = 0  # number of the first row in the whole call
    is_consecutive: ClassVar[bool] = False

    @property
    def leading_axes(self) -> int:
        return np.ndim(self.positions) - 1

    def at(self, index: Array, span: Run | None, axis: int, leading_axes: int) -> Array:
        positions = jnp.asarray(self.positions)
        taken = span.take(positions, -1) if span else jnp.take(positions, index.ravel(), -1)
        return _along(taken, axis, leading_axes)

    def pick(self, index: Array, leading_axes: int) -> Array:
        return jnp.take_along_axis(spread(jnp.asarray(self.positions), index.ndim, trailing=1), index, -1)

    def ends(self, first: Array, last: Array, size: int, axis: int, leading_axes: int) -> tuple[Array, Array]:
        cells = jnp.take(jnp.asarray(self.positions), block_members(first, last, size), -1)
        return _along(cells.min(-1), axis, leading_axes), _along(cells.max(-1), axis, leading_axes)

    def rows(self, size: int) -> Any:
        return jnp.asarray(self.positions)

    def number(self, index: Array, position: Array) -> Array:
        return index + jnp.asarray(self.first, jnp.int32).reshape((1,) * index.ndim)

    def slice_batch(self, take: Callable[[Any, int], Any]) -> Offset:
        return TokenPositions(take(self.positions, 1), take(self.first, 0))

    def spell(self, side: str, literal: Callable[[Any], str]) -> str:
        return f", {side}_positions={literal(self.positions)}"

    def slice_rows(self, first: Any, rows: Array | None) -> Offset:
        positions = jnp.asarray(self.positions)
        taken = positions if rows is None else jnp.take(positions, rows, -1)
        return TokenPositions(taken, self.first + first)


def positions_of(offset: Offset) -> Consecutive | TokenPositions:
    """Return what knows where each row sits."""
    return offset if isinstance(offset, TokenPositions) else Consecutive(offset)


def offset_column(offset: Offset, leading_axes: int) -> Array:
    """Return the offset with `leading_axes + 2` axes, one entry per first leading axis or a single one."""
    offset = jnp.asarray(0 if offset is None else offset)
    if offset.dtype != jnp.int32:
        offset = offset.astype(jnp.int32)
    return spread(offset, leading_axes + 2)


def signed_distance(key: Array, query: Array) -> Array:
    """Return key position - query position, or the nearest number that int32 holds on both sides of 0."""
    before, difference = key < query, key - query
    beyond = (difference < 0) != before
    return jnp.where(beyond, jnp.where(before, -LARGEST, LARGEST), jnp.maximum(difference, -LARGEST))


def _along(data: Array, axis: int, leading_axes: int) -> Array:
    """Put the last axis of per-row data at `axis`, -2 or -1, of `leading_axes + 2`."""
    return spread(data[..., None] if axis == -2 else data, leading_axes + 2, trailing=-axis)


def block_members(first: Array, last: Array, block: int) -> Array:
    """Return (N, block) indices of blocks, ends included; short ones repeat their last index."""
    first, last = first.reshape(-1, 1), last.reshape(-1, 1)
    return jnp.minimum(first + jnp.arange(block, dtype=jnp.int32)[None], last)


def look_up(data: Array, index: Array, leading_axes: int) -> Array:
    """Read data (batch..., N) at an index (*b, ..., n, m), clipped; zeros where there is nothing to read."""
    *leading, rows, columns = index.shape
    if data.shape[-1] == 0:
        return jnp.zeros(index.shape, data.dtype)
    data = spread(data, leading_axes + 1, trailing=1)
    flat = jnp.clip(index, 0, data.shape[-1] - 1).reshape((*leading, rows * columns))
    shape = broadcast_shapes(data.shape[:-1], flat.shape[:-1])
    data = jnp.broadcast_to(data, (*shape, data.shape[-1]))
    entries = jnp.take_along_axis(data, jnp.broadcast_to(flat, (*shape, flat.shape[-1])), axis=-1)
    return entries.reshape((*shape, rows, columns))


def spread(data: Array, rank: int, trailing: int = 0) -> Array:
    """Insert unit axes so that data of shape (batch..., trailing...) gets `rank` axes, batch first."""
    split = data.ndim - trailing
    return data.reshape((*data.shape[:split], *(1,) * (rank - data.ndim), *data.shape[split:]))
