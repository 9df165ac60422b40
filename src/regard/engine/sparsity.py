"""Which tiles of the score matrix hold work: verdicts of the mask, as lists that a loop can follow."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Int
from regard.engine.problem import Problem
from regard.masks import Tile
from regard.masks.grid import Blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileLists:
    """For each line of tiles, those with work: FULL ones first, then PARTIAL ones, each in order.

    A line is a query tile with its key tiles, or a key tile with its query tiles. Axes of size 1 stand for
    lines that are all alike.
    """

    order: Int[Array, "*b lines tiles"]
    full: Int[Array, "*b lines"]  # how many of `order` are FULL
    kept: Int[Array, "*b lines"]  # how many are not EMPTY


def classify(problem: Problem, query_block: int, key_block: int) -> Int[Array, "*b Q K"]:
    """`Tile` codes with one leading axis per axis of (batch..., key heads); axes that are alike have size 1.

    A last key tile that is shorter than the others is at most PARTIAL: its slice overlaps the tile before.
    """
    shape = (-(-problem.T // query_block), -(-problem.S // key_block))
    rank = max(len(problem.leading), 1)
    if problem.mask is None:
        codes = np.full((*(1,) * rank, 1, shape[1]), Tile.FULL, np.int8)
        if problem.S % key_block:
            codes[..., -1] = Tile.PARTIAL
        return jnp.asarray(codes)
    blocks = Blocks.cover(
        problem.T, problem.S, query_block, key_block, problem.query_offset, len(problem.leading)
    )
    codes = problem.mask.verdicts(blocks)
    codes = jnp.broadcast_to(codes, (*codes.shape[:-2], *shape))
    codes = codes.reshape((*(1,) * (rank + 2 - codes.ndim), *codes.shape))
    heads, groups = codes.shape[-3], min(codes.shape[-3], problem.key_heads)
    folded = codes.reshape((*codes.shape[:-3], groups, heads // groups, *shape))
    codes = _agree(folded, -3)
    if problem.S % key_block:
        codes = codes.at[..., -1].min(jnp.int8(Tile.PARTIAL))
    return codes


def _agree(codes: Array, axis: int) -> Array:
    """One verdict for tiles that are visited together."""
    least, most = codes.min(axis), codes.max(axis)
    return jnp.where(least == most, least, jnp.int8(Tile.PARTIAL))


def list_tiles(codes: Int[Array, "*b lines tiles"]) -> TileLists:
    """Lists along the last axis, in O(tiles log tiles)."""
    count = codes.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    rank = (jnp.int32(Tile.FULL) - codes.astype(jnp.int32)) * count
    order = jax.lax.sort(rank + index.reshape((*(1,) * (codes.ndim - 1), count))) % max(count, 1)
    return TileLists(
        order,
        jnp.sum(codes == Tile.FULL, -1, dtype=jnp.int32),
        jnp.sum(codes != Tile.EMPTY, -1, dtype=jnp.int32),
    )
