"""List the tiles of the score matrix that hold work, by what the mask says of each, for loops to follow."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Int
from regard.engine.call.problem import Sizes
from regard.engine.flash.blocking import Blocking
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


def list_both_ways(
    mask: Mask | None,
    sizes: Sizes,
    offsets: tuple[Any, Any],
    forward: Blocking,
    backward: Blocking,
    *,
    in_order: bool = False,
) -> tuple[TileLists, TileLists]:
    """List the tiles by query, for the forward loop, and by key, for the backward loop.

    With `in_order` the forward loop visits tiles as they lie, whatever their other rows keep of them.
    """
    by_query = classify_tiles(mask, sizes, offsets, forward.queries, forward.keys)
    by_key = classify_tiles(mask, sizes, offsets, backward.queries, backward.keys)
    by_key = jnp.swapaxes(by_key, -1, -2)
    if in_order:
        by_query = jnp.minimum(by_query, jnp.int8(TileKind.PARTIAL))
    if sizes.S % backward.keys:  # the last block overlaps the one before it
        by_key = by_key.at[..., -1, :].min(jnp.int8(TileKind.PARTIAL))
    return (
        list_tiles(by_query, forward.keys, sizes.S, forward),
        list_tiles(by_key, backward.queries, sizes.T, backward),
    )


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
    codes = codes.reshape((*codes.shape[:-3], groups, heads // groups, *shape))
    # The tiles of a group are visited together.
    least, most = codes.min(-3), codes.max(-3)
    return jnp.where(least == most, least, jnp.int8(TileKind.PARTIAL))


def list_tiles(
    codes: Int[Array, "*b blocks tiles"], tile: int, length: int, blocking: Blocking | None = None
) -> TileLists:
    """List tiles along the last axis, in O(tiles); one that sticks out is at most PARTIAL.

    With pieces, lists and blocks are filled up, and blocks with much work are visited together.
    """
    count = codes.shape[-1]
    if length % tile:
        codes = codes.at[..., -1].min(jnp.int8(TileKind.PARTIAL))
    is_full, is_partial = codes == jnp.int8(TileKind.FULL), codes == jnp.int8(TileKind.PARTIAL)
    rank, full = _rank(is_full)
    partial_rank, partial = _rank(is_partial)
    nonempty = full + partial
    # A tile goes to its rank in its list: sorting took three times as long on the CPU. Leading axes stay
    # apart, so that they stay divided.
    slot = jnp.where(is_full, rank, full[..., None] + partial_rank)
    line = np.arange(codes.shape[-2], dtype=np.int32).reshape((*(1,) * (codes.ndim - 2), -1, 1)) * count
    slot = jnp.where(is_full | is_partial, line + slot, line.size * count)
    start = jnp.broadcast_to(jnp.arange(0, count * tile, tile, dtype=jnp.int32), codes.shape[-2:]).reshape(-1)

    def put(slot: Array) -> Array:
        starts = jnp.full(slot.size, length, jnp.int32).at[slot.reshape(-1)]
        return starts.set(start, mode="drop").reshape(slot.shape)

    leading = [size for size in codes.shape[:-2] if size > 1]
    for _ in leading:
        put = jax.vmap(put)
    starts = put(slot.reshape((*leading, *codes.shape[-2:]))).reshape(codes.shape)
    return _fill_up(jnp, TileLists(starts, full, nonempty), length, blocking)


def _fill_up(numpy: Any, lists: TileLists, length: int, blocking: Blocking | None) -> TileLists:
    """Fill up lists and blocks to whole pieces, and order blocks by their work, by NumPy or jax.numpy."""
    if blocking is None or not blocking.pieces:
        return lists
    more = (0, -lists.starts.shape[-2] % blocking.blocks)
    rest = [(0, 0)] * (lists.starts.ndim - 2)
    ends = [*rest, more, (0, -lists.starts.shape[-1] % blocking.pieces)]
    starts = numpy.pad(lists.starts, ends, constant_values=length)
    full, nonempty = numpy.pad(lists.full, [*rest, more]), numpy.pad(lists.kept, [*rest, more])
    order = None if blocking.in_order else numpy.argsort(-nonempty, -1, stable=True).astype(np.int32)
    return TileLists(starts, full, nonempty, order)


def list_known(
    kinds: np.ndarray, side: int, sizes: Sizes, forward: Blocking, backward: Blocking
) -> tuple[TileLists, TileLists] | None:
    """List the tiles both ways, as `list_both_ways` does, by known kinds of tiles of this side.

    Programs that are given lists need not make them. None, tiles are not whole ones of this side.
    """
    forward, backward = forward.fit(sizes.T, sizes.S, 1), backward.fit(sizes.T, sizes.S, 1)
    lengths = [(each.queries, sizes.T) for each in (forward, backward)]
    lengths += [(each.keys, sizes.S) for each in (forward, backward)]
    if any(tile % side and tile < length for tile, length in lengths):
        return None
    by_query = _join_kinds(kinds, side, sizes, forward)
    by_key = np.swapaxes(_join_kinds(kinds, side, sizes, backward), -1, -2)
    if sizes.S % backward.keys:
        by_key[..., -1, :] = np.minimum(by_key[..., -1, :], TileKind.PARTIAL)
    return (
        _list_kinds(by_query, forward.keys, sizes.S, forward),
        _list_kinds(by_key, backward.queries, sizes.T, backward),
    )


def _join_kinds(kinds: np.ndarray, side: int, sizes: Sizes, blocking: Blocking) -> np.ndarray:
    """Return the kinds of the tiles that whole ones of this side make together."""
    lengths, tile = (sizes.T, sizes.S), (blocking.queries, blocking.keys)
    counts = [-(-length // size) for length, size in zip(lengths, tile, strict=True)]
    spans = [-(-size // side) for size in tile]
    short = [
        (0, count * span - size) for count, span, size in zip(counts, spans, kinds.shape[-2:], strict=True)
    ]
    padded = np.pad(kinds, [(0, 0)] * (kinds.ndim - 2) + short, mode="edge")
    cells = padded.reshape((*kinds.shape[:-2], counts[0], spans[0], counts[1], spans[1]))
    least, most = cells.min((-3, -1)), cells.max((-3, -1))
    return np.where(least == most, least, np.int8(TileKind.PARTIAL))


def _list_kinds(kinds: np.ndarray, tile: int, length: int, blocking: Blocking) -> TileLists:
    """List known tiles along the last axis, as `list_tiles` does."""
    if length % tile:
        kinds[..., -1] = np.minimum(kinds[..., -1], TileKind.PARTIAL)
    full = (kinds == TileKind.FULL).sum(-1, dtype=np.int32)
    nonempty = (kinds != TileKind.EMPTY).sum(-1, dtype=np.int32)
    starts: Any = tile * np.argsort(-kinds, -1, stable=True).astype(np.int32)
    starts = np.where(np.arange(kinds.shape[-1]) < nonempty[..., None], starts, np.int32(length))
    return _fill_up(np, TileLists(starts, full, nonempty), length, blocking)


def _rank(chosen: Array) -> tuple[Array, Array]:
    """Return how many entries of a line are chosen before each, and how many are in all.

    Bits are counted a word at a time, of which there are few to add up.
    """
    count, bit = chosen.shape[-1], np.arange(32, dtype=np.uint32)
    padded = jnp.pad(chosen, [(0, 0)] * (chosen.ndim - 1) + [(0, -count % 32)])
    bits = padded.reshape((*chosen.shape[:-1], -1, 32)).astype(jnp.uint32)
    word = jnp.sum(jnp.left_shift(bits, bit.reshape((1,) * chosen.ndim + (32,))), -1, dtype=jnp.uint32)
    ends = jnp.cumsum(jax.lax.population_count(word).astype(jnp.int32), -1)
    below = word[..., None] & ((np.uint32(1) << bit) - np.uint32(1)).reshape((1,) * chosen.ndim + (32,))
    before = ends - jax.lax.population_count(word).astype(jnp.int32)
    rank = before[..., None] + jax.lax.population_count(below).astype(jnp.int32)
    return rank.reshape(padded.shape)[..., :count], ends[..., -1]
