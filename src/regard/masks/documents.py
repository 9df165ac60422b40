"""Masks that keep packed documents apart."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from regard.arguments import integers, keep_array
from regard.axes import Array, ArrayLike
from regard.masks.bounds import Bounds
from regard.masks.data import literal, split
from regard.masks.grid import Blocks, Grid, Offset, spread
from regard.masks.mask import Mask
from regard.masks.offsets import look_up, offset_column, positions_of
from regard.masks.positional import same_value_kind
from regard.masks.stored_masks import FromArray, Stored
from regard.masks.tile_kinds import TileKind, tile_kind
from regard.records import record


def segments(query_ids: ArrayLike, key_ids: ArrayLike | None = None) -> Mask:
    """Let each query attend to the keys of its own segment: packed documents.

    keep(b, q, k) = (query_ids[b, q] == key_ids[b, k])

    Args:
        query_ids: integer array `(batch, ..., T)`, aligned with the first leading axes of query; may be
            traced. Ids need no order: a segment may come back after another. Padding is a segment as any
            other: tokens with its id see each other and are seen by none else. `& valid_keys(ids != pad)`
            makes empty rows of them.
        key_ids: integer array `(batch, ..., S)`. None means that `query_ids` holds one id per *key*, and a
            query reads that of the key where it sits, at position `query_offset + t` or
            `query_positions[t]`. With `key_positions` both are needed.

    Ids are int32; traced ones of 64 bits are compared as such.

    Returns:
        A mask; with `key_ids` it does not read query positions.

    Raises:
        TypeError: ids that are not integers, or scalars.
        ValueError: ids that int32 does not hold; `np.unique(ids, return_inverse=True)` numbers them anew.

    Example:
        >>> from regard import masks
        >>> (masks.segments([7, 7, 4]) & masks.causal()).dense(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]

    Reference: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021.
    """
    ids = [integers("query_ids", query_ids, wide=True)]
    if key_ids is not None:
        ids.append(integers("key_ids", key_ids, wide=True))
    if len({array.dtype for array in ids}) > 1:
        ids = [array.astype(np.int64) for array in ids]
    for name, array in zip(("query_ids", "key_ids"), ids, strict=False):
        if array.ndim == 0:
            raise TypeError(f"{name}: expected an integer array with one id per position, got a scalar")
    ids = [*map(keep_array, ids)]
    return Segments(*ids) if key_ids is not None else Documents(ids[0])


def _ranges(ids: Array, block: int) -> tuple[Array, Array]:
    """Return the smallest and largest id of each block: (..., n) -> (..., N) twice."""
    cells = split(ids, block)
    return cells.min(-1), cells.max(-1)


@record
class Segments(Stored):
    """Separate ids for the rows of query and of key."""

    query_ids: Any
    key_ids: Any
    ends: ClassVar = {"query_ids": "query", "key_ids": "key"}
    maker = staticmethod(segments)
    local = True

    @property
    def bounds(self) -> Bounds:
        return Bounds(key_ids=self.key_ids, query_ids=self.query_ids)

    def keep(self, grid: Grid) -> Array:
        queries = grid.take_rows(jnp.asarray(self.query_ids))
        keys = grid.take_columns(jnp.asarray(self.key_ids))
        rank = grid.leading_axes + 2
        return spread(queries[..., None], rank, trailing=2) == spread(keys, rank, trailing=1)

    def classify(self, blocks: Blocks) -> Array:
        rank = blocks.leading_axes + 2
        queries = _ranges(jnp.asarray(self.query_ids), blocks.query_block)
        keys = _ranges(jnp.asarray(self.key_ids), blocks.key_block)
        bounds = [spread(ids[..., None], rank, trailing=2) for ids in queries]
        bounds += [spread(ids, rank, trailing=1) for ids in keys]
        return same_value_kind(*bounds)


@record
class Documents(Stored):
    """One id per key: a query reads that of the key where it sits. Where no key sits, it sees nothing."""

    ids: Any
    ends: ClassVar = {"ids": "key"}
    maker = staticmethod(segments)
    reads_positions = True
    local = True

    @property
    def bounds(self) -> Bounds:
        return Bounds(key_ids=self.ids)

    def _at(self, row: Array, leading_axes: int) -> tuple[Array, Array]:
        """Return ids of the keys in rows (..., n, m) and whether there is such a row, both (..., n, m)."""
        ids = jnp.asarray(self.ids)
        inside = (row >= 0) & (row < ids.shape[-1])
        return look_up(ids, row, leading_axes), inside

    def keep(self, grid: Grid) -> Array:
        keys = grid.take_columns(jnp.asarray(self.ids))
        row = grid.query_position - offset_column(grid.key_offset, grid.leading_axes)
        queries, inside = self._at(row, grid.leading_axes)
        return inside & (queries == spread(keys, grid.leading_axes + 2, trailing=1))

    def classify(self, blocks: Blocks) -> Array:
        rank = blocks.leading_axes + 2
        row = blocks.row_positions - offset_column(blocks.key_offset, blocks.leading_axes)
        queries, inside = self._at(row, blocks.leading_axes)
        keys = [spread(ids, rank, trailing=1) for ids in _ranges(jnp.asarray(self.ids), blocks.key_block)]
        code = same_value_kind(queries.min(-1)[..., None], queries.max(-1)[..., None], *keys)
        all_inside, none_inside = inside.all(-1)[..., None], ~inside.any(-1)[..., None]
        empty = none_inside | (code == jnp.int8(TileKind.EMPTY))
        return tile_kind(empty, full=all_inside & (code == jnp.int8(TileKind.FULL)))

    def check_positions(self, query: Offset, key: Offset) -> None:
        if not positions_of(key).is_consecutive:
            raise ValueError(
                "key_positions: expected none with segments(ids), whose queries read the id of the key where"
                " they sit, which takes keys that follow one another; give the ids of both sides:"
                " segments(query_ids, key_ids), or segments(ids, ids) where queries and keys are the same"
                " tokens"
            )

    def slice_grid(self, grid: Grid) -> Mask:
        # The piece's queries may sit where keys of another piece do.
        row = grid.query_position - offset_column(grid.key_offset, grid.leading_axes)
        queries, inside = self._at(row, grid.leading_axes)
        keys = grid.take_columns(jnp.asarray(self.ids))
        return Segments(queries[..., 0], keys) & FromArray(inside)

    def expression(self) -> str:
        return f"segments({literal(self.ids)})"
