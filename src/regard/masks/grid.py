"""Grids of cells, and blocks of them, at which a mask is evaluated; and the position of the queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from regard.axes import Array
from regard.masks.offsets import Offset as Offset
from regard.masks.offsets import block_members, positions_of
from regard.masks.offsets import spread as spread
from regard.masks.spans import Run, Span


@dataclass(frozen=True)
class Grid:
    """Cells at which a mask is evaluated. Every array has `leading_axes + 2` axes."""

    query_index: Array  # (1, ..., T, 1): rows of the query array
    query_position: Array  # (*b, ..., T, 1): where those rows sit
    query_offset: Offset  # of all rows, as the call has it
    key_index: Array  # (1, ..., 1, S): rows of the key array
    key_offset: Offset
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
        return cls.at(rows.members, columns.members, offset, leading_axes, key_offset, (rows, columns))

    @classmethod
    def at(
        cls,
        rows: Array,
        columns: Array,
        offset: Offset,
        leading_axes: int,
        key_offset: Offset = None,
        runs: tuple[Run | None, Run | None] = (None, None),
    ) -> Grid:
        """Return the cells in the given rows and columns, one-dimensional index arrays, maybe of runs."""
        ones = (1,) * leading_axes
        query_index = rows.reshape((*ones, rows.size, 1))
        query_position = positions_of(offset).at(query_index, runs[0], -2, leading_axes)
        key_index = columns.reshape((*ones, 1, columns.size))
        return cls(query_index, query_position, offset, key_index, key_offset, leading_axes, *runs)

    @property
    def key_position(self) -> Array:
        """Return the positions of the keys, (*b, ..., 1, S)."""
        return positions_of(self.key_offset).at(self.key_index, self.columns, -1, self.leading_axes)

    @property
    def query_number(self) -> Array:
        """Return what no two queries share: positions; rows, where tokens may share a position."""
        return positions_of(self.query_offset).number(self.query_index, self.query_position)

    @property
    def key_number(self) -> Array:
        """Return what no two keys share, likewise."""
        return positions_of(self.key_offset).number(self.key_index, self.key_position)

    @property
    def is_consecutive(self) -> bool:
        """Return whether positions follow one another along both axes, as consecutive rows do."""
        return positions_of(self.query_offset).is_consecutive and positions_of(self.key_offset).is_consecutive

    def take_rows(self, data: Array, axis: int = -1) -> Array:
        """Take the entries of per-query data at the grid's rows."""
        return self.rows.take(data, axis) if self.rows else jnp.take(data, self.query_index.ravel(), axis)

    def take_columns(self, data: Array, axis: int = -1) -> Array:
        """Take the entries of per-key data at the grid's columns."""
        return self.columns.take(data, axis) if self.columns else jnp.take(data, self.key_index.ravel(), axis)


@dataclass(frozen=True)
class Blocks:
    """Runs of consecutive rows of query against such runs of key, ends included.

    Query arrays are `(..., Q, 1)` and key arrays `(..., 1, K)` for Q x K tiles, of rank `leading_axes + 2`.
    """

    query_first: Array
    query_last: Array
    query_offset: Offset
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

        def cut(length: int, block: int, *shape: int) -> tuple[Array, Array]:
            first = np.arange(0, length, block, dtype=np.int32).reshape((*(1,) * leading_axes, *shape))
            last = np.minimum(first + block, length).astype(np.int32) - 1
            return jnp.asarray(first), jnp.asarray(last)

        queries, keys = cut(num_queries, query_block, -1, 1), cut(num_keys, key_block, 1, -1)
        return cls(*queries, offset, *keys, key_offset, query_block, key_block, leading_axes)

    @property
    def query_ends(self) -> tuple[Array, Array]:
        """Return the least and the largest position of each block of queries."""
        where = positions_of(self.query_offset)
        return where.ends(self.query_first, self.query_last, self.query_block, -2, self.leading_axes)

    @property
    def key_ends(self) -> tuple[Array, Array]:
        """Return the least and the largest position of each block of keys."""
        where = positions_of(self.key_offset)
        return where.ends(self.key_first, self.key_last, self.key_block, -1, self.leading_axes)

    @property
    def row_positions(self) -> Array:
        """Return the positions of `rows`, (*b, ..., Q, query_block)."""
        index = self.rows.reshape((*(1,) * self.leading_axes, -1, 1))
        positions = positions_of(self.query_offset).at(index, None, -2, self.leading_axes)
        return positions.reshape((*positions.shape[:-2], *self.rows.shape))

    @property
    def column_positions(self) -> Array:
        """Return the positions of `columns`, (*b, ..., K, key_block)."""
        index = self.columns.reshape((*(1,) * self.leading_axes, 1, -1))
        positions = positions_of(self.key_offset).at(index, None, -1, self.leading_axes)
        return positions.reshape((*positions.shape[:-2], *self.columns.shape))

    @property
    def rows(self) -> Array:
        """Return (Q, query_block) row indices of the query blocks; short ones repeat their last row."""
        return block_members(self.query_first, self.query_last, self.query_block)

    @property
    def columns(self) -> Array:
        """Return (K, key_block) column indices of the key blocks; short ones repeat their last column."""
        return block_members(self.key_first, self.key_last, self.key_block)


def is_concrete(tree: Any) -> bool:
    """Return whether every leaf has values now, outside a trace."""
    return not any(isinstance(leaf, Tracer | jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def are_same(tree: Any, other: Any) -> bool:
    """Return whether two trees have one structure and equal leaves; what is traced equals itself alone."""
    (leaves, structure), (others, other_structure) = jax.tree.flatten(tree), jax.tree.flatten(other)
    return structure == other_structure and all(
        a is b or (is_concrete((a, b)) and np.array_equal(a, b)) for a, b in zip(leaves, others, strict=True)
    )
