"""Grids of cells, and blocks of them, at which a mask is evaluated; and the position of the queries."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from regard.axes import Array

Update = Callable[[Array, Any, Array], Array]  # of an array, at a start, with a tile
Offset = Any  # an int, a traced scalar, or an integer array (batch,); None, known to be 0


@dataclass(frozen=True)
class Span:
    """Consecutive indices; data that has one entry per index can be sliced instead of gathered."""

    start: Any  # None: from the first to the last, so nothing needs to be taken out
    size: int

    @property
    def members(self) -> Array:
        index = jnp.arange(self.size, dtype=jnp.int32)
        return index if self.start is None else self.start + index

    @property
    def length(self) -> int:
        return self.size

    @property
    def first(self) -> Any:
        return 0 if self.start is None else self.start

    def read(self, slice_at: Callable[[Any], Array], axis: int) -> Array:
        """Return what `slice_at(start)` reads."""
        del axis
        return slice_at(self.first)

    def write(self, array: Array, tile: Array, update: Update, axis: int) -> Array:
        """Return `update(array, start, tile)`."""
        del axis
        return update(array, self.first, tile)

    def take(self, data: Array, axis: int) -> Array:
        """Take the entries at these indices."""
        if self.start is None:
            return data
        return jax.lax.dynamic_slice_in_dim(data, self.start, self.size, axis, allow_negative_indices=False)


@dataclass(frozen=True)
class Pieces:
    """Several runs of consecutive indices, all of one length, one after the other."""

    starts: Array  # (pieces,)
    length: int

    @property
    def size(self) -> int:
        return self.starts.size * self.length

    @property
    def first(self) -> Any:
        return self.starts[0]

    @property
    def members(self) -> Array:
        return (self.starts[:, None] + jnp.arange(self.length, dtype=jnp.int32)[None]).reshape(-1)

    def read(self, slice_at: Callable[[Any], Array], axis: int) -> Array:
        """Join what `slice_at(start)` reads for each run along `axis`, a negative number."""
        found = jnp.moveaxis(jax.vmap(slice_at)(self.starts), 0, axis - 1)
        return found.reshape((*found.shape[: axis - 1], self.size, *found.shape[axis:][1:]))

    def write(self, array: Array, tile: Array, update: Update, axis: int) -> Array:
        """Update an array with each run's part of a tile along `axis`, one after the other."""

        def step(number: Any, array: Array) -> Array:
            part = jax.lax.dynamic_slice_in_dim(
                tile, number * np.int32(self.length), self.length, axis, allow_negative_indices=False
            )
            return update(array, self.starts[number], part)

        return jax.lax.fori_loop(0, self.starts.size, step, array)

    def take(self, data: Array, axis: int) -> Array:
        """Take the entries at these indices."""
        axis = axis if axis < 0 else axis - data.ndim

        def slice_at(start: Any) -> Array:
            return jax.lax.dynamic_slice_in_dim(data, start, self.length, axis, allow_negative_indices=False)

        return self.read(slice_at, axis)


Run = Span | Pieces


@dataclass(frozen=True)
class Grid:
    """Cells at which a mask is evaluated. Every array has `leading_axes + 2` axes."""

    query_index: Array  # (1, ..., T, 1): rows of the query array
    query_position: Array  # (*b, ..., T, 1): where those rows sit
    key_index: Array  # (1, ..., 1, S): rows of the key array
    key_offset: Offset  # index + offset = position
    leading_axes: int
    rows: Run | None  # None: the indices have no order to rely on
    columns: Run | None

    @classmethod
    def cover(
        cls, num_queries: int, num_keys: int, offset: Offset, leading_axes: int, key_offset: Offset = None
    ) -> Grid:
        """Return all T x S cells."""
        return cls.tile(Span(None, num_queries), Span(None, num_keys), offset, leading_axes, key_offset)

    @classmethod
    def tile(
        cls, rows: Run, columns: Run, offset: Offset, leading_axes: int, key_offset: Offset = None
    ) -> Grid:
        """Return the cells of runs of rows and columns."""
        cells = cls.at(rows.members, columns.members, offset, leading_axes, key_offset)
        return dataclasses.replace(cells, rows=rows, columns=columns)

    @classmethod
    def at(
        cls, rows: Array, columns: Array, offset: Offset, leading_axes: int, key_offset: Offset = None
    ) -> Grid:
        """Return the cells in the given rows and columns, both one-dimensional index arrays."""
        ones = (1,) * leading_axes
        query_index = rows.reshape((*ones, rows.size, 1))
        return cls(
            query_index,
            query_index + offset_column(offset, leading_axes),
            columns.reshape((*ones, 1, columns.size)),
            key_offset,
            leading_axes,
            None,
            None,
        )

    @property
    def key_position(self) -> Array:
        """Return the positions of the keys, (*b, ..., 1, S)."""
        return _move(self.key_index, self.key_offset, self.leading_axes)

    def take_rows(self, data: Array, axis: int = -1) -> Array:
        """Take the entries of per-query data at the grid's rows."""
        return self.rows.take(data, axis) if self.rows else jnp.take(data, self.query_index.ravel(), axis)

    def take_columns(self, data: Array, axis: int = -1) -> Array:
        """Take the entries of per-key data at the grid's columns."""
        return self.columns.take(data, axis) if self.columns else jnp.take(data, self.key_index.ravel(), axis)


@dataclass(frozen=True)
class Blocks:
    """Runs of consecutive queries against runs of consecutive keys, ends included.

    Query arrays are `(..., Q, 1)` and key arrays `(..., 1, K)` for Q x K tiles, of rank `leading_axes + 2`.
    """

    query_first: Array
    query_last: Array
    query_offset: Array  # (*b, ..., 1, 1): index + offset = position
    key_first: Array
    key_last: Array
    key_offset: Offset
    query_block: int
    key_block: int
    leading_axes: int

    @classmethod
    def cover(
        cls,
        num_queries: int,
        num_keys: int,
        query_block: int,
        key_block: int,
        offset: Offset,
        leading_axes: int,
        key_offset: Offset = None,
    ) -> Blocks:
        """Return the tiling of a T x S grid; the last block of each axis may be shorter."""
        ones = (1,) * leading_axes
        query_first = np.arange(0, num_queries, query_block, dtype=np.int32).reshape((*ones, -1, 1))
        key_first = np.arange(0, num_keys, key_block, dtype=np.int32).reshape((*ones, 1, -1))
        return cls(
            jnp.asarray(query_first),
            jnp.asarray(np.minimum(query_first + query_block, num_queries).astype(np.int32) - 1),
            offset_column(offset, leading_axes),
            jnp.asarray(key_first),
            jnp.asarray(np.minimum(key_first + key_block, num_keys).astype(np.int32) - 1),
            key_offset,
            query_block,
            key_block,
            leading_axes,
        )

    @property
    def position_first(self) -> Array:
        return self.query_first + self.query_offset

    @property
    def position_last(self) -> Array:
        return self.query_last + self.query_offset

    @property
    def key_position_first(self) -> Array:
        return _move(self.key_first, self.key_offset, self.leading_axes)

    @property
    def key_position_last(self) -> Array:
        return _move(self.key_last, self.key_offset, self.leading_axes)

    @property
    def rows(self) -> Array:
        """Return (Q, query_block) row indices of the query blocks; short ones repeat their last row."""
        return _members(self.query_first, self.query_last, self.query_block)

    @property
    def columns(self) -> Array:
        """Return (K, key_block) column indices of the key blocks; short ones repeat their last column."""
        return _members(self.key_first, self.key_last, self.key_block)


def _members(first: Array, last: Array, block: int) -> Array:
    first, last = first.reshape(-1, 1), last.reshape(-1, 1)
    return jnp.minimum(first + jnp.arange(block, dtype=jnp.int32)[None], last)


def _move(index: Array, offset: Offset, leading_axes: int) -> Array:
    """Return the positions of indices; what is not moved stays the same array."""
    return index if offset is None else index + offset_column(offset, leading_axes)


def offset_column(offset: Offset, leading_axes: int) -> Array:
    """Return the offset with `leading_axes + 2` axes, one entry per first leading axis or a single one."""
    offset = jnp.asarray(0 if offset is None else offset)
    if offset.dtype != jnp.int32:
        offset = offset.astype(jnp.int32)
    return spread(offset, leading_axes + 2)


def spread(data: Array, rank: int, trailing: int = 0) -> Array:
    """Insert unit axes so that data of shape (batch..., trailing...) gets `rank` axes, batch first."""
    split = data.ndim - trailing
    return data.reshape((*data.shape[:split], *(1,) * (rank - data.ndim), *data.shape[split:]))


def is_concrete(tree: Any) -> bool:
    """Return whether every leaf has values now, outside a trace."""
    return not any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))
