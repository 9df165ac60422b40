"""List the tiles of the score matrix that hold work, by what the mask says of each, for loops to follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Int
from regard.engine.call.problem import Sizes
from regard.masks import Mask, TileKind
from regard.masks.grid import Blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileLists:
    """For each block, where its tiles with work start: FULL ones first, then PARTIAL ones, each in order.

    A block is all key tiles of some queries, or all query tiles of some keys. Axes of size 1 stand for
    blocks that are all alike. What follows the tiles with work starts beyond the end.
    """

    starts: Int[Array, "*b blocks tiles"]  # first row or column
    full: Int[Array, "*b blocks"]  # how many of `starts` are FULL
    kept: Int[Array, "*b blocks"]  # how many are not EMPTY
    order: Int[Array, "*b blocks"] | None = None  # in which blocks are visited; None, as they lie


def classify_tiles(
    mask: Mask | None, sizes: Sizes, offsets: tuple[Any, Any], query_block: int, key_block: int
) -> Int[Array, "*b Q K"]:
    """Return `TileKind` codes, leading axes (batch..., key heads); an axis along which all are alike is 1."""
    shape = (-(-sizes.T // query_block), -(-sizes.S // key_block))
    rank = max(len(sizes.leading), 1)
    if mask is None:
        return jnp.full((*(1,) * rank, *shape), TileKind.FULL, jnp.int8)
    blocks = Blocks.cover(
        sizes.T, sizes.S, query_block, key_block, offsets[0], len(sizes.leading), offsets[1]
    )
    codes = mask.classify(blocks)
    codes = jnp.broadcast_to(codes, (*codes.shape[:-2], *shape))
    codes = codes.reshape((*(1,) * (rank + 2 - codes.ndim), *codes.shape))
    heads, groups = codes.shape[-3], min(codes.shape[-3], sizes.key_heads)
    return _agree(codes.reshape((*codes.shape[:-3], groups, heads // groups, *shape)), -3)


def _agree(codes: Array, axis: int) -> Array:
    """Return one kind for tiles that are visited together."""
    least, most = codes.min(axis), codes.max(axis)
    return jnp.where(least == most, least, jnp.int8(TileKind.PARTIAL))


def list_tiles(
    codes: Int[Array, "*b blocks tiles"], tile: int, length: int, blocks: int = 1, pieces: int = 0
) -> TileLists:
    """List tiles along the last axis, in O(tiles log tiles); one that sticks out is at most PARTIAL.

    With `pieces`, lists and blocks are filled up, and blocks with much work are visited together.
    """
    count = codes.shape[-1]
    if length % tile:
        codes = codes.at[..., -1].min(jnp.int8(TileKind.PARTIAL))
    index = np.arange(count, dtype=np.int32).reshape((*(1,) * (codes.ndim - 1), count))
    rank = jnp.int32(TileKind.FULL) - codes.astype(jnp.int32)
    order = jax.lax.sort(rank * np.int32(count) + index) % count
    full, kept = (
        jnp.sum(chosen, -1, dtype=jnp.int32) for chosen in (codes == TileKind.FULL, codes != TileKind.EMPTY)
    )
    if not pieces:
        return TileLists(order * tile, full, kept)
    starts = jnp.where(index < kept[..., None], order * tile, length)
    more = (0, -starts.shape[-2] % blocks)
    rest = [(0, 0)] * (starts.ndim - 2)
    starts = jnp.pad(starts, [*rest, more, (0, -count % pieces)], constant_values=length)
    full, kept = (jnp.pad(number, [*rest, more]) for number in (full, kept))
    return TileLists(starts, full, kept, jnp.argsort(-kept, -1).astype(jnp.int32))
