"""Kinds of tiles, by the pairs that a mask keeps of each."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.masks.grid import Blocks, Grid, is_concrete


class TileKind(enum.IntEnum):
    """Kinds of tiles. Their order makes `&` a minimum, `|` a maximum and `~` a reflection."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


class KeptTiles(NamedTuple):
    """Numbers of kept tiles of this side in rows and columns, by quarters, and in a row if 4 x 4 are one."""

    side: int
    by_row: tuple[int, ...]
    by_column: tuple[int, ...]
    joined: int

    @classmethod
    def count(cls, kinds: Any, side: int) -> KeptTiles | None:
        """Count kinds that are known, rounded up to two numbers a doubling, so that few programs are made."""
        readable = is_concrete(kinds) and getattr(kinds, "is_fully_addressable", True)
        if not readable or not np.size(kinds):
            return None
        with jax.transfer_guard("allow"):  # to look is to read
            nonempty = joined = np.asarray(kinds) != TileKind.EMPTY
        for axis in (-1, -2):
            length = nonempty.shape[axis]
            joined = np.logical_or.reduceat(joined, range(0, length, 4), axis)
            joined = joined.repeat(4, axis).take(range(length), axis)
        by_row = np.quantile(nonempty.sum(-1), (0.25, 0.5, 0.75, 1))
        by_column = np.quantile(nonempty.sum(-2), (0.25, 0.5, 0.75, 1))
        return cls(side, _round_up(by_row), _round_up(by_column), *_round_up([joined.sum(-1).mean()]))


_ROUND = sorted({size << power for power in range(32) for size in (2, 3)} | {0, 1})


def _round_up(numbers: Any) -> tuple[int, ...]:
    return tuple(next(size for size in _ROUND if size >= number) for number in numbers)


def tile_kind(empty: Array, full: Array) -> Array:
    """Return TileKind codes from two conditions; neither means PARTIAL, which is always a safe answer."""
    code = jnp.where(full, jnp.int8(TileKind.FULL), jnp.int8(TileKind.PARTIAL))
    return jnp.where(empty, jnp.int8(TileKind.EMPTY), code)


def join_touched(
    joins: Sequence[Callable[[Array, Array], Array]],
    entries: Array,
    blocks: Blocks,
    sides: tuple[int, int],
    *,
    aligned: bool = True,  # tiles begin at multiples of their size
) -> list[Array]:
    """Join the entries, one for each square of these sides, that each tile touches, maybe one twice."""

    def along(axis: int, join: Callable[[Array, Array], Array], entries: Array) -> Array:
        tile, side = tiles[axis], sides[axis]
        first = jax.lax.div(ends[axis][0].reshape(-1), np.int32(side))
        last = jax.lax.div(ends[axis][1].reshape(-1), np.int32(side))
        fits = aligned and not (tile % side and side % tile)
        more = (tile - 1) // side if fits else -(-(tile - 1) // side)

        def step(number: Any, joined: Array) -> Array:
            return join(joined, jnp.take(entries, jnp.minimum(first + number, last), axis))

        return jax.lax.fori_loop(1, more + 1, step, jnp.take(entries, first, axis))

    ends = (blocks.query_first, blocks.query_last), (blocks.key_first, blocks.key_last)
    tiles = blocks.query_block, blocks.key_block
    joined = [along(-2, join, entries) for join in joins]
    return [along(-1, join, rows) for join, rows in zip(joins, joined, strict=True)]


def classify_cells(keep: Callable[[Grid], Array], blocks: Blocks) -> Array:
    """Evaluate every cell, one row of tiles at a time, so that memory stays at query_block x S."""
    columns = blocks.columns
    num_tiles, key_block = columns.shape
    if blocks.query_first.size == 0 or num_tiles == 0:
        ones = (1,) * blocks.leading_axes
        return jnp.zeros((*ones, blocks.query_first.size, num_tiles), jnp.int8)

    def look(rows: Array) -> Array:
        grid = Grid.at(rows, columns.reshape(-1), blocks.query_offset, blocks.leading_axes, blocks.key_offset)
        may_attend = keep(grid)
        may_attend = jnp.broadcast_to(may_attend, (*may_attend.shape[:-2], rows.size, columns.size))
        cells = may_attend.reshape((*may_attend.shape[:-2], rows.size, num_tiles, key_block))
        return tile_kind(empty=~cells.any((-3, -1)), full=cells.all((-3, -1)))

    return jnp.moveaxis(jax.lax.map(look, blocks.rows), 0, -2)
