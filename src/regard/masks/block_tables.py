"""Masks of whole blocks, as a table says: learned and routed sparsity."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import check_reach, evaluate, integers, keep_array, whole_number
from regard.axes import Array, ArrayLike
from regard.masks.data import check_boolean, check_rows, literal
from regard.masks.grid import Blocks, Grid, spread
from regard.masks.mask import Mask
from regard.masks.stored_masks import Stored, find_listed
from regard.masks.tile_kinds import join_touched, tile_kind
from regard.records import derived, record, static


def blocks(table: ArrayLike, size: int | tuple[int, int]) -> Mask:
    """Keep whole blocks of queries and keys: block-sparse attention, at the cost of the blocks that are kept.

    keep(b, q, k) = table[b, q // size, k // size]

    Rows and keys are counted from the first of the call's, whatever their positions are.

    Args:
        table: boolean or integer array `(*b, rows, columns)`, nonzero = the block may attend; `b` is aligned
            with the first leading axes of query, so `(batch, heads, rows, columns)` differs from head to
            head; may be traced, so that a router decides in every step. There are as many rows and
            columns as cover the call: ceil(T / size) and ceil(S / size).
        size: queries and keys of a block, or one number for each.

    Returns:
        A mask that does not read positions, whose blocks `attend` skips where the table is False: those of
        128 one by one, larger ones too where the table is not traced, others where a whole tile is empty.

    Raises:
        TypeError: a float table, or one with fewer than two axes.
        ValueError: a size below 1, or more than two sizes; in a call, a table with more or fewer rows or
            columns than cover it.

    Example:
        >>> from regard import masks
        >>> print(masks.blocks([[1, 0], [0, 1]], 2).picture(4))
        4 queries x 4 keys   ■ may attend  · may not
        0 ■ ■ · ·
        1 ■ ■ · ·
        2 · · ■ ■
        3 · · ■ ■

    Reference: Child et al., "Generating Long Sequences with Sparse Transformers", 2019, section 5.4.
    """
    keep = check_boolean("table", table)
    if keep.ndim < 2:
        raise TypeError(f"table: expected at least the axes (rows, columns), got shape {tuple(keep.shape)}")
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2:
        raise ValueError(f"size: expected one number, or one for queries and one for keys; got {size}")
    queries = whole_number("size", sides[0], 1, clamp=True)
    keys = whole_number("size", sides[1], 1, clamp=True)
    return BlockTable(keep_array(keep), None, None, queries, keys)


def chosen_blocks(
    indices: ArrayLike, size: int | tuple[int, int], num_columns: int, *, counts: ArrayLike | None = None
) -> Mask:
    """Keep, for each block of queries, the blocks of keys that are listed: top-k and routed sparsity.

    keep(b, q, k) = (k // size is among indices[b, q // size, :counts[b, q // size]])

    Args:
        indices: integer array `(*b, rows, k)`, block numbers in any order, repeats allowed; `b` is aligned
            with the first leading axes of query; may be traced.
        size: queries and keys of a block, or one number for each.
        num_columns: how many blocks of keys there are.
        counts: integer array `(*b, rows)`: how many of the k numbers count. None means all.

    Returns:
        A mask as that of `blocks`. Numbers outside 0..num_columns - 1 keep nothing.

    Raises:
        TypeError: numbers that are not integers, or fewer than two axes.
        ValueError: a size or a number of columns below 1; counts of another shape.

    Example:
        >>> from regard import masks
        >>> masks.chosen_blocks([[0, 0], [2, 1]], 1, 3, counts=[1, 2]).dense(2, 3).astype(int).tolist()
        [[1, 0, 0], [0, 1, 1]]

    Reference: Yuan et al., "Native Sparse Attention", 2025, section 3.3; Lu et al., "MoBA", 2025.
    """
    columns = whole_number("num_columns", num_columns, 1)
    check_reach("num_columns", columns)
    numbers = [integers("indices", indices, clamp=True)]
    if numbers[0].ndim < 2:
        raise TypeError(f"indices: expected at least the axes (rows, k), got shape {numbers[0].shape}")
    if counts is not None:
        numbers.append(integers("counts", counts, clamp=True))
        if numbers[1].shape != (rows := numbers[0].shape[:-1]):
            raise ValueError(
                f"counts: expected one number for each row of indices, {rows}; got {numbers[1].shape}"
            )
    return blocks(evaluate(partial(_tabulate, columns), *numbers), size)


def _tabulate(columns: int, used: Array, counts: Array | None = None) -> Array:
    """Return which of so many columns each row's numbers, or so many first ones, name."""
    used = jnp.asarray(used)
    if counts is not None:
        slot = jax.lax.broadcasted_iota(jnp.int32, used.shape, used.ndim - 1)
        used = jnp.where(slot < counts[..., None], used, -1)
    numbers = jax.lax.broadcasted_iota(jnp.int32, (*(1,) * (used.ndim - 1), columns), used.ndim - 1)
    return find_listed(used, numbers)


def _find(source: Array | None, index: Array) -> Array:
    """Return the rows or columns of the call that those of a piece are."""
    return index if source is None else jnp.take(source, index)


@record
class BlockTable(Stored):
    """Pairs in the blocks that a table keeps; a piece of a call knows which rows and columns it has."""

    table: Any
    rows: Any = derived()
    columns: Any = derived()
    queries: int = static()
    keys: int = static()
    ends: ClassVar = {"table": "rows columns"}

    @staticmethod
    def maker(table: Any, queries: int, keys: int) -> Mask:
        return blocks(table, (queries, keys))

    @property
    def block_side(self) -> int | None:
        # Blocks of a piece begin anywhere.
        return min(self.queries, self.keys) if self.rows is None else None

    def _table_of_rank(self, rank: int) -> Array:
        return spread(jnp.asarray(self.table), rank, trailing=2)

    def keep(self, grid: Grid) -> Array:
        table = self._table_of_rank(grid.leading_axes + 2)
        row, column = _find(self.rows, grid.query_index), _find(self.columns, grid.key_index)
        rows = jnp.take(table, jax.lax.div(row.ravel(), np.int32(self.queries)), -2)
        return jnp.take(rows, jax.lax.div(column.ravel(), np.int32(self.keys)), -1)

    def classify(self, blocks: Blocks) -> Array:
        table, sides = self._table_of_rank(blocks.leading_axes + 2), (self.queries, self.keys)
        sources = {"query": self.rows, "key": self.columns}
        names = {f"{side}_{end}": source for side, source in sources.items() for end in ("first", "last")}
        ends = {name: _find(source, getattr(blocks, name)) for name, source in names.items()}
        blocks, joins = dataclasses.replace(blocks, **ends), (jnp.logical_or, jnp.logical_and)
        some, every = join_touched(joins, table, blocks, sides, aligned=self.rows is None)
        return tile_kind(empty=~some, full=every)

    def check(self, leading: tuple[int, ...] | None, num_queries: int, num_keys: int) -> None:
        *own, rows, columns = np.shape(self.table)
        check_rows("blocks table", tuple(own), leading)
        if self.rows is not None:
            return
        axes = (("rows", rows, self.queries, num_queries), ("columns", columns, self.keys, num_keys))
        for axis, count, side, length in axes:
            if count != (needed := -(-length // side)):
                raise ValueError(
                    f"blocks table: expected {needed} {axis}, one for each {side} of {length}; got {count}"
                )

    def slice_grid(self, grid: Grid) -> Mask:
        rows, columns = _find(self.rows, grid.query_index), _find(self.columns, grid.key_index)
        return dataclasses.replace(self, rows=rows.ravel(), columns=columns.ravel())

    def expression(self) -> str:
        size = self.queries if self.queries == self.keys else (self.queries, self.keys)
        return f"blocks({literal(self.table)}, {size})"
