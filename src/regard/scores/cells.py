"""Cells: the pairs of queries and keys that scores belong to."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST
from regard.axes import Array
from regard.masks.grid import Grid
from regard.masks.offsets import signed_distance
from regard.masks.spans import Span

Bucket = Callable[[Array], Array]  # the row of a table for each distance, key position - query position


class Cells(Protocol):
    """Places of pairs of queries and keys; every answer broadcasts against their scores."""

    @property
    def query_position(self) -> Array:
        """Return the positions of the queries."""
        ...

    @property
    def key_position(self) -> Array:
        """Return the positions of the keys."""
        ...

    @property
    def head(self) -> Array:
        """Return the index of the query head."""
        ...

    @property
    def batch(self) -> Array:
        """Return the index on the first leading axis; 0 where heads are the only one."""
        ...

    def per_head(self, array: Array) -> Array:
        """Return a parameter, a number or one per head."""
        ...

    def add_looked_up(self, scores: Array, table: Array, bucket: Bucket, reach: int) -> Array:
        """Add table (buckets, heads | 1) at bucket(distance) to the scores.

        Beyond a distance of `reach`, to either side, all distances share a bucket.
        """
        ...


@dataclass(frozen=True)
class Block:
    """Runs of consecutive queries against runs of consecutive keys."""

    grid: Grid
    heads: Span  # query heads
    first: Array  # index on the first leading axis
    over_scores: Callable[[Array], Array]  # (..., heads | 1, T | 1, S | 1) over the scores
    part: tuple[Span, int] | None = None  # the same heads among those of this device, and how many it has

    def _take_heads(self, array: Array, axis: int) -> Array:
        """Take the heads out of a parameter that has all heads, or those of this device."""
        divided = self.part is not None and self.part[1] == array.shape[axis]
        return (self.part[0] if self.part and divided else self.heads).take(array, axis)

    @property
    def query_position(self) -> Array:
        return self.over_scores(self.grid.query_position)

    @property
    def key_position(self) -> Array:
        return self.over_scores(self.grid.key_position)

    @property
    def head(self) -> Array:
        return self.over_scores(self.heads.members[:, None, None])

    @property
    def batch(self) -> Array:
        return self.over_scores(self.first)

    def per_head(self, array: Array) -> Array:
        if array.size == 1:
            return array.reshape(())
        return self.over_scores(self._take_heads(array, 0)[:, None, None])

    def add_looked_up(self, scores: Array, table: Array, bucket: Bucket, reach: int) -> Array:
        if table.shape[1] > 1:
            table = self._take_heads(table, 1)
        shape = jax.eval_shape(lambda: self.grid.key_position - self.grid.query_position).shape
        # Where heads are the only leading axis, it is theirs that an offset per row goes by.
        by_head = max(shape[-3:-2], default=1) > 1
        if by_head or not self.grid.is_consecutive:
            distance = signed_distance(self.grid.key_position, self.grid.query_position)
            return scores + self.over_scores(_entries_of_pairs(table, bucket(distance)))
        rows, columns = self.grid.rows, self.grid.columns
        assert rows is not None
        assert columns is not None
        height, width = rows.length, columns.length
        if 0 in (height, width):
            return scores

        def by_head_and_distance(position: Array) -> Array:
            return position.reshape((*position.shape[:-3], 1, 1))

        first_key = by_head_and_distance(self.grid.key_position[..., :1])
        first_query = by_head_and_distance(self.grid.query_position[..., :1, :])
        base = signed_distance(first_key, first_query)

        def run(row: Any, column: Any) -> Array:
            # One entry per distance, from that of the last query and first key upwards: each of two positions
            # that are there, as int32 may not hold a step beyond them.
            steps = jnp.arange(1 - height, width + 1, dtype=jnp.int32).reshape((*(1,) * (base.ndim - 1), -1))
            key = first_key + (column - columns.first) + jnp.maximum(steps, 0)
            query = first_query + (row - rows.first) + jnp.maximum(-steps, 0)
            return _toeplitz(_entries(table, bucket(signed_distance(key, query))), height, width)

        def near(scores: Array) -> Array:
            return scores + self.over_scores(rows.read(lambda row: columns.read(partial(run, row), -1), -2))

        is_known = isinstance(height, int) and isinstance(width, int)
        if base.size != 1 or (height, width) != (rows.size, columns.size) or not is_known:
            return near(scores)
        after, before = min(reach + height - 1, LARGEST), min(reach + width - 1, LARGEST)
        away = (base > after) | (base < -before)
        # Far off it is one number for all cells of a head, which costs no pass over the scores. What does
        # nothing is the first branch: as the second, XLA's CPU makes it a copy.
        entry = _entries(table, bucket(jnp.sign(base) * np.int32(reach + 1)))
        scores = jax.lax.cond(~away.reshape(()), near, lambda scores: scores, scores)
        return scores + self.over_scores(jnp.where(away, entry, 0)[..., None])


@dataclass(frozen=True)
class Picks:
    """Pairs in no order: arrays that broadcast against one score per query, `(*B, T)`."""

    query_position: Array
    key_position: Array
    head: Array
    batch: Array

    def per_head(self, array: Array) -> Array:
        return array.reshape(()) if array.size == 1 else array[self.head]

    def add_looked_up(self, scores: Array, table: Array, bucket: Bucket, reach: int) -> Array:
        rows = bucket(signed_distance(self.key_position, self.query_position))
        return scores + table[rows, self.head if table.shape[1] > 1 else 0]


@dataclass(frozen=True)
class HeadPicks(Picks):
    """Pairs of all heads, in order on the axis before the last: nothing is gathered that heads divide."""

    def per_head(self, array: Array) -> Array:
        return array.reshape((*(1,) * (self.key_position.ndim - 2), -1, 1))

    def add_looked_up(self, scores: Array, table: Array, bucket: Bucket, reach: int) -> Array:
        rows = bucket(signed_distance(self.key_position, self.query_position))
        entries = table.T.reshape((*(1,) * (rows.ndim - 2), *table.shape[::-1]))
        return scores + jnp.take_along_axis(entries, rows, -1)


def _entries(table: Array, rows: Array) -> Array:
    """Look up table[rows] as a product, whose gradient is one, too: (..., 1, n) -> (..., heads | 1, n)."""
    rows = rows[..., 0, :, None]
    kinds = jnp.arange(len(table), dtype=rows.dtype).reshape((*(1,) * (rows.ndim - 1), -1))
    chosen = (rows == kinds).astype(table.dtype)
    return jnp.einsum("...nb,bh->...hn", chosen, table, precision=jax.lax.Precision.HIGHEST)


def _entries_of_pairs(table: Array, rows: Array) -> Array:
    """Look up table[rows] for every pair, (..., heads | 1, T, S), by comparing with each row of the table."""
    # It is fused: no gather, which is slow, and no scatter in the gradient, which adds in any order.
    rows = rows.reshape((*(1,) * (3 - rows.ndim), *rows.shape))[..., None]
    kinds = jnp.arange(len(table), dtype=rows.dtype).reshape((*(1,) * (rows.ndim - 1), -1))
    entries = table.T.reshape((*(1,) * (rows.ndim - 4), table.shape[1], 1, 1, len(table)))
    return jnp.sum(jnp.where(rows == kinds, entries, 0), -1)


def _toeplitz(entries: Array, height: int, width: int) -> Array:
    """Return out[..., i, j] = entries[..., height - 1 + j - i], of height + width entries."""
    # Entries again and again, cut into rows one shorter than they are, move by one a row: no gather, which
    # is slow on the CPU.
    shorter = height + width - 1
    again = jnp.tile(entries, height)[..., height - 1 : height - 1 + height * shorter]
    return again.reshape((*entries.shape[:-1], height, shorter))[..., :width]
