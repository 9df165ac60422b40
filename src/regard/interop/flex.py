"""Masks for PyTorch's FlexAttention."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.arguments import whole_number
from regard.axes import ArrayLike
from regard.loading import name_extra
from regard.masks import Mask, TileKind
from regard.masks.alignment import align_mask
from regard.masks.grid import Grid
from regard.masks.spans import Span


def block_mask(
    mask: Mask,
    num_queries: int,
    num_keys: int | None = None,
    *,
    block_size: int = 128,
    device: Any = "cpu",
    query_offset: int | ArrayLike | None = None,
    key_offset: int | ArrayLike | None = None,
) -> Any:
    """Build the `BlockMask` of a mask, for `torch.nn.attention.flex_attention.flex_attention`.

    Which blocks are kept, and which of them wholly, is what `mask.tiles` says; of a block kept in part the
    pairs are stored, so that FlexAttention looks them up instead of calling Python. Nothing of T x S numbers
    is made, unless all blocks are kept in part.

    Args:
        mask: of known arrays, whose leading axes are those of batch and heads, if it has any.
        num_queries: T.
        num_keys: S; None means T.
        block_size: the side of the blocks.
        device: where torch puts the tensors.
        query_offset: position of the first query; needed where T != S and the mask reads positions.
        key_offset: position of the first key; None means 0.

    Returns:
        A `torch.nn.attention.flex_attention.BlockMask`.

    Raises:
        ImportError: torch is not installed.
        TypeError, ValueError: as `Mask.tiles`.

    Example:
        >>> from regard import masks
        >>> from regard.interop.flex import block_mask
        >>> mask = masks.causal() & masks.sliding_window(255)
        >>> flex_attention(q, k, v, block_mask=block_mask(mask, 4096))  # doctest: +SKIP

    Reference: PyTorch 2.13, `torch.nn.attention.flex_attention.BlockMask`.
    """
    with name_extra(__name__):
        import torch  # pyright: ignore[reportMissingImports]
        from torch.nn.attention.flex_attention import BlockMask  # pyright: ignore[reportMissingImports]

    num_keys = num_queries if num_keys is None else num_keys
    size = whole_number("block_size", block_size, 1)
    kinds, slots, cells = _stored_blocks(mask, num_queries, num_keys, size, query_offset, key_offset)

    def tensor(array: Any) -> Any:
        return torch.tensor(np.asarray(array), device=device)

    lists = [
        tensor(array) for kind in (TileKind.PARTIAL, TileKind.FULL) for array in _list_blocks(kinds == kind)
    ]
    slots, cells = tensor(slots), tensor(cells)

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        batch = batch if slots.shape[0] > 1 else batch * 0
        head = head if slots.shape[1] > 1 else head * 0
        return cells[slots[batch, head, query // size, key // size], query % size, key % size]

    return BlockMask.from_kv_blocks(
        *lists, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(num_queries, num_keys)
    )


def _list_blocks(chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many blocks of each row are chosen, and which: these first, in order, then the others."""
    return chosen.sum(-1, dtype=np.int32), np.argsort(~chosen, axis=-1, kind="stable").astype(np.int32)


def _stored_blocks(
    mask: Mask, num_queries: int, num_keys: int, size: int, query_offset: Any, key_offset: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return kinds of blocks, `(B | 1, H | 1, rows, columns)`, where the pairs of each are, and these.

    Pairs come as `(stored, size, size)` booleans, those of EMPTY and of FULL blocks first.
    """
    query, key, _ = align_mask(mask, num_queries, num_keys, (query_offset, key_offset), (None, None), 2)
    offsets = {"query_offset": query_offset, "key_offset": key_offset, "leading_axes": 2}
    kinds = np.array(mask.tiles(num_queries, num_keys, query_block=size, key_block=size, **offsets))
    # As torch does, pairs of a block that sticks out count as left out.
    if num_queries % size:
        kinds[..., -1, :] = np.minimum(kinds[..., -1, :], TileKind.PARTIAL)
    if num_keys % size:
        kinds[..., -1] = np.minimum(kinds[..., -1], TileKind.PARTIAL)
    slots = np.where(kinds == TileKind.FULL, np.int32(1), np.int32(0))
    cells = [np.zeros((1, size, size), bool), np.ones((1, size, size), bool)]
    count, columns = 2, kinds.shape[-1]
    for row in range(kinds.shape[-2]):
        first = row * size
        span = Span(first, min(size, num_queries - first))
        pairs = np.asarray(mask.keep(Grid.tile(span, Span(0, num_keys), query, 2, key)))
        pairs = np.broadcast_to(pairs, (*kinds.shape[:2], span.size, num_keys))
        beyond = (size - span.size, columns * size - num_keys)
        pairs = np.pad(pairs, [(0, 0), (0, 0), (0, beyond[0]), (0, beyond[1])])
        pairs = np.moveaxis(pairs.reshape((*kinds.shape[:2], size, columns, size)), -2, -3)
        partial = kinds[:, :, row] == TileKind.PARTIAL
        cells.append(pairs[partial])
        slots[:, :, row][partial] = count + np.arange(partial.sum())
        count += partial.sum()
    return kinds, slots, np.concatenate(cells)
