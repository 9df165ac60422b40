"""Keys that are listed for each query: what an indexer, or any top-k, has chosen."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from regard.arguments import check_flag, integers, keep_array
from regard.axes import Array, ArrayLike
from regard.masks.data import check_rows, literal
from regard.masks.grid import Blocks, Grid, spread
from regard.masks.mask import Mask, Take
from regard.masks.spans import Span
from regard.masks.stored_masks import Stored, find_listed
from regard.masks.tile_kinds import tile_kind
from regard.records import derived, record, static


def chosen_keys(indices: ArrayLike, ascending: bool = False) -> Mask:
    """Let each query attend to the keys that are listed for it: learned sparsity, key by key.

    keep(b, q, k) = (k is among indices[b, q])

    `attend` gathers these keys, some queries at a time: memory and time are linear in T C, forward and
    backward, where tiles would take all T S pairs. Join it with other masks by `&`: the pairs that they
    remove of those listed are masked, nothing else is looked at.

    Args:
        indices: integer array `(*b, T, C)`, rows of key in any order; numbers outside 0..S-1, such as -1,
            name none, and a key that is listed twice counts once. `b` is aligned with the first leading axes
            of query; its last axis may be that of query heads, of key heads, or 1. May be traced.
        ascending: True promises that each query's keys are listed in order, each once, wherever negative
            numbers stand between them; `attend` then sorts nothing.

    Returns:
        A mask that does not read positions.

    Raises:
        TypeError: indices that are not integers, or fewer than two axes.
        ValueError: a NumPy array or list that is not as `ascending` promises.

    Example:
        >>> from regard import masks
        >>> (masks.chosen_keys([[0, -1], [2, 1], [1, 2]]) & masks.causal()).dense(3).astype(int).tolist()
        [[1, 0, 0], [0, 1, 0], [0, 1, 1]]

    Reference: DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1 (DSA).
    """
    listed = integers("indices", indices, clamp=True)
    if listed.ndim < 2:
        raise TypeError(f"indices: expected at least the axes (T, C), got shape {tuple(listed.shape)}")
    check_flag("ascending", ascending)
    if ascending and isinstance(listed, np.ndarray):
        largest = np.maximum.accumulate(listed, axis=-1)
        if ((listed[..., 1:] >= 0) & (listed[..., 1:] <= largest[..., :-1])).any():
            raise ValueError("indices: expected ascending numbers, each once; leave out ascending=True")
    return ChosenKeys(keep_array(listed), None, ascending, 1)


@record
class ChosenKeys(Stored):
    """Pairs of a query and a key on its list; a piece of a call knows which columns it has."""

    indices: Any
    columns: Any = derived()
    is_ascending: bool = static()
    group: int = derived(static=True)  # query heads that share a list, where key heads have one
    ends: ClassVar = {"indices": "query choice"}
    maker = staticmethod(chosen_keys)

    @property
    def reads_cells(self) -> bool:
        return False

    def number_leading(self, leading: tuple[int, ...] | None) -> Mask:
        *own, _, _ = np.shape(self.indices)
        grouped = leading is not None and len(own) == len(leading) > 0 and own[-1] not in (0, 1, leading[-1])
        return dataclasses.replace(self, group=leading[-1] // own[-1] if leading and grouped else 1)

    def per_query_head(self) -> Array:
        """Return the lists with those of a key head for each of its query heads."""
        listed = jnp.asarray(self.indices)
        return listed if self.group == 1 else jnp.repeat(listed, self.group, axis=-3)

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        return dataclasses.replace(self, indices=take(self.per_query_head(), 2), group=1)

    def in_order(self, num_keys: int) -> Array:
        """Return at least one int32 index a query, ascending, each once; `num_keys` stands for none."""
        listed = jnp.asarray(self.indices)
        listed = jnp.where((listed < 0) | (listed >= num_keys), num_keys, listed).astype(jnp.int32)
        pad = [(0, 0)] * (listed.ndim - 1)
        if listed.shape[-1] == 0:
            return jnp.pad(listed, [*pad, (0, 1)], constant_values=num_keys)
        if self.is_ascending:
            return listed
        listed = jnp.sort(listed, axis=-1)
        repeats = jnp.pad(listed[..., 1:] == listed[..., :-1], [*pad, (1, 0)])
        return jnp.where(repeats, num_keys, listed)

    def keep(self, grid: Grid) -> Array:
        rank = grid.leading_axes + 2
        listed = spread(grid.take_rows(self.per_query_head(), -2), rank, trailing=2)
        if isinstance(grid.columns, Span) and self.columns is None:
            return _mark(listed, grid.columns.first, grid.columns.size)
        columns = grid.key_index.ravel() if self.columns is None else grid.take_columns(self.columns)
        return find_listed(listed, columns.reshape((*(1,) * (rank - 1), -1)))

    def classify(self, blocks: Blocks) -> Array:
        listed = jnp.take(self.per_query_head(), blocks.rows, axis=-2)  # (*b, Q, query_block, C)
        listed = spread(listed.reshape((*listed.shape[:-2], -1)), blocks.leading_axes + 2, trailing=2)
        first, last = blocks.key_first.ravel(), blocks.key_last.ravel()
        if self.columns is not None or not first.size:
            shape = (*listed.shape[:-1], first.size)
            return jnp.full(shape, tile_kind(jnp.zeros((), bool), jnp.zeros((), bool)))
        tile = jnp.searchsorted(first, listed, side="right").astype(jnp.int32) - 1
        tile = jnp.where((tile >= 0) & (listed <= last[tile]), tile, -1)
        return tile_kind(empty=~_mark(tile, 0, first.size), full=jnp.zeros((), bool))

    def slice_grid(self, grid: Grid) -> Mask:
        index = grid.key_index.ravel()
        columns = index if self.columns is None else jnp.take(self.columns, index)
        indices = grid.take_rows(jnp.asarray(self.indices), -2)
        return dataclasses.replace(self, indices=indices, columns=columns)

    def check(self, leading: tuple[int, ...] | None, num_queries: int, num_keys: int) -> None:
        *own, rows, _ = np.shape(self.indices)
        if leading and len(own) == len(leading) and own[-1] and leading[-1] % own[-1] == 0:
            own[-1] = 1  # one list for each group of query heads
        check_rows("chosen_keys", tuple(own), leading)
        if rows != num_queries:
            raise ValueError(
                f"chosen_keys: expected a row of indices for each of {num_queries} queries; got {rows}"
            )

    def expression(self) -> str:
        return f"chosen_keys({literal(self.indices)}{', ascending=True' if self.is_ascending else ''})"


def _mark(listed: Array, start: Any, size: int) -> Array:
    """Return which of the numbers from `start` on each row lists: (..., C) -> (..., size)."""
    columns = listed - jnp.asarray(start, listed.dtype)
    columns = jnp.where(columns < 0, size, columns)

    def mark(columns: Array) -> Array:
        return jnp.zeros((size,), bool).at[columns].set(True, mode="drop")

    return jnp.vectorize(mark, signature="(c)->(n)")(columns)
