"""Tiling: the tiles of a call as a sweep takes them, keys by queries and from whole blocks of keys.

Scores lie (C, G * R): what is summed over keys is then summed over whole vectors of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.backends.tiled import prepare
from regard.engine.call.problem import Problem
from regard.engine.flash.operands import Context, Inputs, scale_late
from regard.engine.flash.tile_scores import finish
from regard.engine.flash.tiles import Blocking, Layout, TileLoop, TileView
from regard.engine.softmax.online_softmax import product
from regard.readouts.accumulators import Plan
from regard.readouts.top_k import CHUNK


@dataclass(frozen=True)
class Tiling:
    """Tiles are padded to whole chunks and blocks of keys, and last ones begin where their own keys do."""

    inputs: Inputs
    context: Context
    layout: Layout
    plan: Plan

    @classmethod
    def prepare(cls, problem: Problem, plan: Plan) -> Tiling:
        """Tiles of a power of two of queries and of keys."""
        queries = max(plan.side // problem.group, 1)
        blocking = Blocking(1 << (queries.bit_length() - 1), plan.side)
        return cls(*prepare(problem, blocking, blocking), plan)

    @property
    def blocking(self) -> Blocking:
        return self.layout.forward

    @property
    def loop(self) -> TileLoop:
        return TileLoop(self.layout, self.blocking)

    @property
    def keys(self) -> int:
        """Keys of a tile, those that pad it included."""
        unit = max(CHUNK, min(self.plan.key_block, self.plan.side))
        return -(-self.blocking.keys // unit) * unit

    @property
    def key_tiles(self) -> int:
        return -(-self.layout.num_keys // self.blocking.keys)

    @property
    def width(self) -> int:
        """Keys of all tiles."""
        return self.key_tiles * self.keys

    @property
    def row_blocks(self) -> int:
        return -(-self.layout.num_queries // self.blocking.queries)

    @property
    def query_blocks(self) -> int:
        """Blocks of the pyramid that a tile touches."""
        return -(-self.blocking.queries // self.plan.query_block)

    @property
    def key_blocks(self) -> int:
        return -(-self.keys // self.plan.key_block)

    @property
    def pyramid(self) -> tuple[int, int]:
        """Blocks of queries and of keys that all tiles touch."""
        rows, tiles = (self.row_blocks - 1) * self.blocking.queries, (self.key_tiles - 1) * self.keys
        return (
            rows // self.plan.query_block + self.query_blocks,
            tiles // self.plan.key_block + self.key_blocks,
        )

    def view(self, leading: Sequence[Any], first_query: Any, first_key: Any = 0) -> TileView:
        return TileView(self.layout, self.blocking, leading, first_query, first_key)

    def scores(self, query: Array, scale: Array, view: TileView, partly: Any) -> Array:
        """A tile of scores (C, G * R) as the softmax sees them."""
        key = view.columns(self.inputs.key).astype(self.layout.matmul_dtype)
        scores = product(key, query, self.layout.precision, (-1, -1))
        scores = scale_late(scores, scale, self.layout)
        return finish(scores, self.inputs, self.context, view, partly, across=True).scores

    def align(self, tile: Array, view: TileView, fill: Any) -> Array:
        """Keys from the first that belongs to the tile, and padding; those not its own go last."""
        if self.layout.num_keys % self.blocking.keys:
            shift = view.first_key - view.column_span.start
            tile = jax.lax.cond(shift > 0, lambda tile: _roll(tile, shift, 0), lambda tile: tile, tile)
        rest = [(0, 0)] * (tile.ndim - 1)
        return jnp.pad(tile, [(0, self.keys - self.blocking.keys), *rest], constant_values=fill)

    def align_rows(self, tile: Array, view: TileView) -> Array:
        """The same for queries, on the last axis, padded with 0 to whole blocks."""
        if self.layout.num_queries % self.blocking.queries:
            tile = _roll(tile, view.first_query - view.row_span.start, tile.ndim - 1)
        block = min(self.plan.query_block, self.blocking.queries)
        more = self.query_blocks * block - self.blocking.queries
        return jnp.pad(tile, [*[(0, 0)] * (tile.ndim - 1), (0, more)])

    def place(self, view: TileView) -> Place:
        grid = view.grid(self.context.offsets)
        key = grid.key_position.reshape(-1)[0] + view.first_key - view.column_span.start
        ahead = grid.query_position.reshape(-1)[0] - key
        return Place(key, ahead - np.int32(self.keys - 1), ahead + np.int32(self.blocking.queries - 1))


class Place(NamedTuple):
    """Where a tile lies."""

    key: Array  # position of its first key
    least: Array  # distance, query position - key position
    most: Array


def block_of(index: Any, block: int) -> Array:
    """index // block for a power of two."""
    return jax.lax.shift_right_logical(jnp.asarray(index, jnp.int32), np.int32(block.bit_length() - 1))


def merge(array: Array, tile: Array, starts: Sequence[Any], join: Any) -> Array:
    """Join a tile into an array whose leading axes are those of the tile's place."""
    tile = tile.reshape((*(1,) * (array.ndim - tile.ndim), *tile.shape))
    starts = [jnp.asarray(start, jnp.int32) for start in starts]
    there = jax.lax.dynamic_slice(array, starts, tile.shape, allow_negative_indices=False)
    return jax.lax.dynamic_update_slice(array, join(there, tile), starts, allow_negative_indices=False)


def _roll(tile: Array, shift: Any, axis: int) -> Array:
    twice = jnp.concatenate([tile, tile], axis)
    return jax.lax.dynamic_slice_in_dim(twice, shift, tile.shape[axis], axis, allow_negative_indices=False)
