"""Tiling: the tiles of a call as a sweep takes them, keys by queries, in whole blocks of keys.

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
from regard.engine.call.problem import Problem
from regard.engine.flash.blocking import Blocking, TileConfig
from regard.engine.flash.loops import TileLoop
from regard.engine.flash.operands import Context, Operands
from regard.engine.flash.preparation import prepare
from regard.engine.flash.tile_scores import score_tile
from regard.engine.flash.tiles import TileView
from regard.manual_meshes import varying_axes
from regard.readouts.accumulators import SweepConfig
from regard.readouts.top_k import CHUNK


@dataclass(frozen=True)
class Tiling:
    """The tiles of a sweep, padded to whole chunks and blocks of keys; the last begin with their own keys."""

    inputs: Operands
    context: Context
    config: TileConfig
    sweep_config: SweepConfig
    keys: int  # of a tile, padding included
    width: int  # keys of all tiles, padding included
    row_blocks: int
    query_blocks: int  # of the pyramid, that a tile touches
    key_blocks: int
    pyramid: tuple[int, int]  # query blocks and key blocks that all tiles touch

    @classmethod
    def prepare(cls, problem: Problem, sweep_config: SweepConfig) -> Tiling:
        """Prepare tiles with a power of two of queries and of keys."""
        queries = max(sweep_config.side // problem.group, 1)
        blocking = Blocking(1 << (queries.bit_length() - 1), sweep_config.side)
        inputs, context, config = prepare(problem, blocking, blocking)
        blocking = config.forward
        unit = max(CHUNK, min(sweep_config.key_block, sweep_config.side))
        keys = -(-blocking.keys // unit) * unit
        width = -(-config.num_keys // blocking.keys) * keys
        row_blocks = -(-config.num_queries // blocking.queries)
        query_blocks = -(-blocking.queries // sweep_config.query_block)
        key_blocks = -(-keys // sweep_config.key_block)
        height = (row_blocks - 1) * blocking.queries // sweep_config.query_block + query_blocks
        pyramid = height, (width - keys) // sweep_config.key_block + key_blocks
        blocks = (keys, width, row_blocks, query_blocks, key_blocks, pyramid)
        return cls(inputs, context, config, sweep_config, *blocks)

    @property
    def blocking(self) -> Blocking:
        return self.config.forward

    @property
    def loop(self) -> TileLoop:
        return TileLoop(self.config, self.blocking, varying=varying_axes(self.inputs, self.context))

    def view(self, leading: Sequence[Any], first_query: Any, first_key: Any = 0) -> TileView:
        return TileView(self.config, self.blocking, leading, first_query, first_key)

    def scores(self, query: Array, view: TileView, partly: Any) -> Array:
        """Compute a tile of scores (C, G * R) as the softmax sees them."""
        key = view.columns(self.inputs.key).astype(self.config.matmul_dtype)
        return score_tile(query, key, self.inputs, self.context, view, partly, across=True).scores

    def align(self, tile: Array, view: TileView, fill: Any) -> Array:
        """Roll the keys so that the tile's own come first, and pad them."""
        if self.config.num_keys % self.blocking.keys:
            shift = view.first_key - view.column_span.first
            tile = jax.lax.cond(shift > 0, lambda tile: _roll(tile, shift, 0), lambda tile: tile, tile)
        rest = [(0, 0)] * (tile.ndim - 1)
        return jnp.pad(tile, [(0, self.keys - self.blocking.keys), *rest], constant_values=fill)

    def align_rows(self, tile: Array, view: TileView) -> Array:
        """Roll the queries, on the last axis, in the same way, and pad them with 0 to whole blocks."""
        if self.config.num_queries % self.blocking.queries:
            tile = _roll(tile, view.first_query - view.row_span.first, tile.ndim - 1)
        block = min(self.sweep_config.query_block, self.blocking.queries)
        more = self.query_blocks * block - self.blocking.queries
        return jnp.pad(tile, [*[(0, 0)] * (tile.ndim - 1), (0, more)])

    def positions(self, view: TileView) -> TilePositions:
        grid = view.grid(self.context.offsets)
        key = grid.key_position.reshape(-1)[0] + view.first_key - view.column_span.first
        ahead = grid.query_position.reshape(-1)[0] - key
        most = ahead + np.int32(self.blocking.queries - 1)
        return TilePositions(key, ahead - np.int32(self.keys - 1), most)


class TilePositions(NamedTuple):
    """The position of a tile's first key, and the range of its distances, query position - key position."""

    first_key: Array
    least_distance: Array
    most_distance: Array


def block_of(index: Any, block: int) -> Array:
    """Compute index // block for a power of two."""
    return jax.lax.shift_right_logical(jnp.asarray(index, jnp.int32), np.int32(block.bit_length() - 1))


def merge(array: Array, tile: Array, starts: Sequence[Any], join: Any) -> Array:
    """Join a tile into an array at `starts`, on as many axes as the array has."""
    tile = tile.reshape((*(1,) * (array.ndim - tile.ndim), *tile.shape))
    starts = [jnp.asarray(start, jnp.int32) for start in starts]
    before = jax.lax.dynamic_slice(array, starts, tile.shape, allow_negative_indices=False)
    return jax.lax.dynamic_update_slice(array, join(before, tile), starts, allow_negative_indices=False)


def _roll(tile: Array, shift: Any, axis: int) -> Array:
    twice = jnp.concatenate([tile, tile], axis)
    return jax.lax.dynamic_slice_in_dim(twice, shift, tile.shape[axis], axis, allow_negative_indices=False)
