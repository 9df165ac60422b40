"""Read tiles from arrays and write them back: nothing else does.

Arrays are `(*batch, heads, length, width)`: query heads on the query side, key heads on the key side, and any
axis but the width may have size 1 where all along it is alike. A tile is a matrix, or a batch of matrices
where several key heads go together; the query heads of a group are rows of one matrix: no key is repeated.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.flash.blocking import Blocking, TileConfig
from regard.masks import Mask
from regard.masks.grid import Grid, Offset
from regard.masks.offsets import positions_of
from regard.masks.spans import Pieces, Run, Span
from regard.scores.cells import Block

Offsets = tuple[Offset, Offset]  # where the rows of query and of key sit


class PieceKind(enum.IntEnum):
    """Kinds of steps over pieces, by what must be looked at: each kind asks for what those before it do."""

    FULL = 0
    SHORT = 1  # a list is over: some pieces lie beyond the end
    PARTIAL = 2  # of a piece, the mask keeps some pairs


@dataclass(frozen=True)
class TileView:
    """One tile of the score matrix; `leading` is its first position on each of the config's leading axes.

    `first_query` or `first_key` may be those of several pieces, which then count as one tile.
    """

    config: TileConfig
    blocking: Blocking
    leading: Sequence[Any]
    first_query: Any = 0
    first_key: Any = 0

    # A last tile that would stick out is moved back. What then precedes its first row or column
    # belongs to the tile before.

    @property
    def row_span(self) -> Run:
        return self._place(self.first_query, self.blocking.queries, self.config.num_queries)

    @property
    def column_span(self) -> Run:
        return self._place(self.first_key, self.blocking.keys, self.config.num_keys)

    def _place(self, first: Any, block: int, length: int) -> Run:
        if jnp.ndim(first):
            return Pieces(jnp.minimum(first, length - block), block)
        inside = length % block == 0 and not self.blocking.overruns
        return Span(first if inside else jnp.minimum(first, length - block), block)

    # Tiles out of arrays.

    def rows(self, array: Array) -> Array:
        """Read query-side rows (*batch, H, T, x) as (heads, G * queries, x)."""
        return self._matrix(self._slice(array, self.config.group, self.row_span, None))

    def columns(self, array: Array) -> Array:
        """Read key-side rows (*batch, K, S, x) as (heads, keys, x)."""
        return self._matrix(self._slice(array, 1, self.column_span, None))

    def row_vector(self, array: Array) -> Array:
        """Read one number per query (*batch, H, T) as (heads, G * queries)."""
        return self.rows(array[..., None])[..., 0]

    def cells(self, array: Array) -> Array:
        """Read an array over pairs (*batch, H, T, S), to be combined with a tile of scores."""
        return self.over_scores(self.slice_cells(array))

    def slice_cells(self, array: Array) -> Array:
        """Read the same as (heads * G | 1, queries | 1, keys | 1)."""
        return self._slice(array, self.config.group, self.row_span, self.column_span)

    def own_rows(self) -> Array | bool:
        """Return which rows (G * queries) belong to this tile."""
        # Where lists are overrun some lie beyond the end, whatever the sizes.
        if not self.blocking.overruns and self._is_whole(self.config.num_queries, self.blocking.queries):
            return True
        own = _own(self.row_span, self.first_query, self.blocking.queries)
        return jnp.broadcast_to(own, (self.config.group, own.size)).reshape(-1)

    def own_pieces(self, *, across: bool) -> Array | None:
        """Return which keys of several pieces, or queries, belong to this tile; None for one piece."""
        if not self.blocking.pieces:
            return None
        if across:
            return jnp.broadcast_to(self.own_rows(), (self.config.group * self.row_span.size,))
        return _own(self.column_span, self.first_key, self.blocking.keys)

    def _is_whole(self, length: int, block: int) -> bool:
        """Tell whether all that is read along an axis belongs to the tile."""
        count = -(-length // block)
        return length % block == 0 and (self.blocking.pieces == 0 or count % self.blocking.blocks == 0)

    def grid(self, offsets: Offsets) -> Grid:
        """Return the tile's cells, for one leading position."""
        rank = self.config.call_axes
        query = positions_of(offsets[0]).slice_batch(self._take)
        key = positions_of(offsets[1]).slice_batch(self._take)
        return Grid.tile(self.row_span, self.column_span, query, rank, key)

    def keep(self, mask: Mask | None, offsets: Offsets) -> Array:
        """Return which query of the tile may attend to which of its keys, to be combined with its scores."""
        rank = self.config.call_axes
        grid = self.grid(offsets)
        keep = None if mask is None else mask.slice_batch(self._take, rank).keep(grid)
        if keep is None or self.config.num_keys % self.blocking.keys or self.blocking.overruns:
            own = _own(self.column_span, self.first_key, self.blocking.keys).reshape(grid.key_index.shape)
            keep = own if keep is None else own & keep
        return self.over_scores(keep.reshape((keep.shape[-3] if rank else 1, *keep.shape[-2:])))

    def pairs(self, offsets: Offsets, numbers: tuple[Array, Array], *, across: bool = False) -> Block:
        """Return the tile's cells for score functions; `across`, where scores lie keys by queries.

        `numbers` are those of rows on the first leading axis and of query heads, in the whole call.
        """
        first, head = self.slice_cells(numbers[0])[:1], self.slice_cells(numbers[1])[:1]
        size, group = self.blocking.heads * self.config.group, self.config.group
        heads, part = Span(head.reshape(()), size), Span(self.leading[-1] * group, size)

        def align(array: Array) -> Array:
            array = array.reshape((array.shape[-3] if array.ndim > 2 else 1, *array.shape[-2:]))
            laid = self.over_scores(array)
            return jnp.swapaxes(laid, -1, -2) if across else laid

        return Block(self.grid(offsets), heads, first, align, (part, self.config.leading[-1] * group))

    # Parameters have axes of their own after those that vmap added.

    def parameter(self, array: Array) -> Array:
        """Read this leading position's parameter."""
        added, own = self.config.added, array.shape[self.config.added :]
        if not added:
            return array
        return slice_at(array, self._added_starts(array), (*(1,) * added, *own)).reshape(own)

    def add_parameter(self, array: Array, change: Array) -> Array:
        """Add to this leading position's parameter, in the dtype of sums."""
        change = change.astype(array.dtype)
        if not self.config.added:
            return array + change
        starts = self._added_starts(array)
        change = change.reshape((*(1,) * self.config.added, *change.shape))
        change = change + slice_at(array, starts, change.shape)
        return jax.lax.dynamic_update_slice(array, change, starts, allow_negative_indices=False)

    def _added_starts(self, array: Array) -> list[Array]:
        added = self.config.added
        starts = [
            0 if n == 1 else start for n, start in zip(array.shape[:added], self.leading[:added], strict=True)
        ]
        return [jnp.asarray(start, jnp.int32) for start in (*starts, *[0] * (array.ndim - added))]

    def _take(self, data: Any, trailing: int) -> Array:
        """Take this tile's part of a mask's data, whose leading axes are the first of the call's."""
        data = jnp.asarray(data)
        starts = self.leading[self.config.added :]
        for axis in range(data.ndim - trailing):
            if data.shape[axis] > 1:
                heads = axis == self.config.call_axes - 1
                unit, size = (self.config.group, self.config.group * self.blocking.heads) if heads else (1, 1)
                data = jax.lax.dynamic_slice_in_dim(
                    data, starts[axis] * unit, size, axis, allow_negative_indices=False
                )
        return self.config.opaque(data, starts)

    def _slice(self, array: Array, group: int, rows: Run, columns: Run | None) -> Array:
        """Slice this tile out of an array, as (heads * group | 1, ...); an axis of size 1 stays."""
        # Fewer leading axes than the config has: vmap added some that do not concern the array.
        *batch, heads = self.leading[2 - array.ndim :]
        columns = Span(0, array.shape[-1]) if columns is None else columns
        rows = Span(0, 1) if array.shape[-2] == 1 else rows
        columns = Span(0, 1) if array.shape[-1] == 1 else columns
        places = [*((start, 1) for start in batch), (heads * group, self.blocking.heads * group)]
        places = [(0, 1) if n == 1 else span for n, span in zip(array.shape[:-2], places, strict=True)]
        first, sizes = zip(*places, strict=True)
        sizes = (*sizes, rows.length, columns.length)

        def at(row: Any, column: Any) -> Array:
            return slice_at(array, (*first, row, column), sizes).reshape(sizes[-3:])

        tile = rows.read(lambda row: columns.read(lambda column: at(row, column), -1), -2)
        return self.config.opaque(tile, self.leading)

    def _matrix(self, tile: Array) -> Array:
        """Put the group of (heads * group | 1, length, x) in the rows, and drop the axis of a single head."""
        count, length, width = tile.shape
        if self.blocking.heads == 1:
            return tile.reshape((count * length, width))
        if count == 1:
            # Held: XLA's CPU of jax 0.10 multiplies what is broadcast wrongly in a kernel with more to add.
            return jax.lax.optimization_barrier(jnp.broadcast_to(tile, (self.blocking.heads, length, width)))
        return tile.reshape((self.blocking.heads, -1, width))

    def over_scores(self, tile: Array) -> Array:
        """Make (heads * G | 1, queries | 1, keys | 1) broadcast against a tile of scores."""
        count, length, width = tile.shape
        heads, group = self.blocking.heads, self.config.group
        if group > 1 and (count > 1 or length > 1):
            # Rows of a group differ: spell them all out.
            shape = (1 if count == 1 else heads, group, self.row_span.size, width)
            tile = jnp.broadcast_to(tile.reshape((shape[0], -1, length, width)), shape)
            tile = tile.reshape((shape[0], group * self.row_span.size, width))
        return tile.reshape(tile.shape[1:]) if heads == 1 else tile

    # Tiles into arrays.

    def put_rows(self, array: Array, tile: Array) -> Array:
        """Overwrite query-side rows (*batch, H, T, x) that belong to this tile.

        Or of several blocks, (blocks, G * queries, x), that lie one after the other.
        """
        if jnp.ndim(self.first_query):
            rows = tile.reshape((len(tile), self.config.group, self.blocking.queries, -1))
            rows = jnp.swapaxes(rows, 0, 1).reshape((self.config.group, -1, tile.shape[-1]))
            return self._update(array, rows, self.config.group, (self.first_query[0], 0), add=False)
        run = self.row_span
        assert isinstance(run, Span)
        tile = tile.reshape((-1, self.blocking.queries, tile.shape[-1]))
        if not self._is_whole(self.config.num_queries, self.blocking.queries):
            own = _own(run, self.first_query, self.blocking.queries)[None, :, None]
            tile = jnp.where(own, tile, self._slice(array, self.config.group, run, None))
        return self._update(array, tile, self.config.group, (run.start, 0), add=False)

    def put_row_vector(self, array: Array, tile: Array) -> Array:
        """Overwrite one number per query (*batch, H, T)."""
        return self.put_rows(array[..., None], tile[..., None])[..., 0]

    def add_columns(self, array: Array, tile: Array) -> Array:
        """Add to key-side rows (*batch, K, S, x)."""
        run = self.column_span
        assert isinstance(run, Span)
        tile = tile.reshape((-1, *tile.shape[-2:]))
        return self._update(array, tile, 1, (run.start, 0), add=True)

    def add_rows_across(self, array: Array, tile: Array) -> Array:
        """Add (heads, x, G * queries) to query-side rows kept as (*batch, H, x, T).

        That way round, the product that makes the tile is two to three times as fast on the CPU.
        """
        group, width, run = self.config.group, tile.shape[-2], self.row_span
        tile = tile.reshape((-1, width, group, run.size))
        if group > 1:
            tile = jnp.swapaxes(tile, 1, 2)
        tile = tile.reshape((-1, width, run.size))

        def add(array: Array, start: Any, tile: Array) -> Array:
            return self._update(array, tile, group, (0, start), add=True)

        return run.write(array, tile, add, -1)

    def add_cells(self, array: Array, tile: Array) -> Array:
        """Add a tile of scores to an array over pairs (*batch, H | 1, T | 1, S | 1)."""
        rows, columns = self.row_span, self.column_span
        tile = tile.reshape((-1, rows.size, columns.size))
        alike = tuple(axis for axis in (-2, -1) if array.shape[axis] == 1)
        tile = tile.sum(alike, keepdims=True)
        rows = Span(0, 1) if array.shape[-2] == 1 else rows
        columns = Span(0, 1) if array.shape[-1] == 1 else columns

        def add_row(array: Array, row: Any, tile: Array) -> Array:
            def add(array: Array, column: Any, tile: Array) -> Array:
                return self._update(array, tile, self.config.group, (row, column), add=True)

            return columns.write(array, tile, add, -1)

        return rows.write(array, tile, add_row, -2)

    def _update(self, array: Array, tile: Array, group: int, corner: tuple[Any, Any], *, add: bool) -> Array:
        """Write (heads * group, a, b) at this tile's leading position, from `corner` on in the last two."""
        if array.shape[-3] == 1:
            tile = tile.sum(0, keepdims=True, dtype=tile.dtype)
        *batch, heads = self.leading
        starts = [
            0 if n == 1 else start for n, start in zip(array.shape, (*batch, heads * group), strict=False)
        ]
        starts = [jnp.asarray(start, jnp.int32) for start in (*starts, *corner)]
        tile = tile.reshape((*(1,) * (array.ndim - 3), *tile.shape))
        if add:
            tile = tile + slice_at(array, starts, tile.shape)
        return jax.lax.dynamic_update_slice(array, tile, starts, allow_negative_indices=False)


def _own(run: Run, first: Any, block: int) -> Array:
    """Return which indices of a run, whose blocks were moved back to fit, do not precede their block."""
    return (run.members.reshape((-1, block)) >= jnp.reshape(first, (-1, 1))).reshape(-1)


def slice_at(array: Array, starts: Sequence[Any], sizes: Sequence[int]) -> Array:
    """Return a part of an array from places that lie inside it."""
    starts = [jnp.asarray(start, jnp.int32) for start in starts]
    if array.dtype == jnp.bfloat16:
        return _slice_bits(array, starts, tuple(sizes))
    return jax.lax.dynamic_slice(array, starts, sizes, allow_negative_indices=False)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _slice_bits(array: Array, starts: list[Array], sizes: tuple[int, ...]) -> Array:
    """Slice bfloat16 numbers as integers: XLA's CPU would first make the whole array float32."""
    # Hidden: jax 0.10's XLA reads the bits of a constant that lies in another order of axes as if it did not.
    bits = jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(array), jnp.uint16)
    bits = jax.lax.dynamic_slice(bits, starts, sizes, allow_negative_indices=False)
    return jax.lax.bitcast_convert_type(bits, array.dtype)


@_slice_bits.defjvp
def _slice_bits_jvp(sizes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Array, Array]:
    tangent = jax.lax.dynamic_slice(tangents[0], primals[1], sizes, allow_negative_indices=False)
    return _slice_bits(*primals, sizes), tangent
