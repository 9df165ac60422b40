"""Outlines of masks, drawn over the weights: tiles, the band, the beginnings of documents."""

from typing import Any

import numpy as np

from regard.masks import Mask, TileKind

LARGEST_PICTURE = 256
_LARGEST_BORDERS = 4096


def draw_tiles(
    mask: Mask, T: int, S: int, query_offset: Any = 0, key_offset: Any = None
) -> tuple[np.ndarray, int, int]:
    """Classify tiles of one example's mask by `TileKind`, at most 256 a side, with rows and keys of each."""
    rows, keys = _block(T), _block(S)
    if not T or not S:
        return np.zeros((-(-T // rows), -(-S // keys)), np.uint8), rows, keys
    offsets = {"query_offset": query_offset, "key_offset": key_offset}
    tiles = mask.tiles(T, S, query_block=rows, key_block=keys, **offsets)
    tiles = np.asarray(tiles).reshape((-1, *tiles.shape[-2:]))
    agreed = np.where((tiles == tiles[:1]).all(0), tiles[0], TileKind.PARTIAL)
    return agreed.astype(np.uint8), rows, keys


def find_reach(mask: Mask | None) -> tuple[int | None, int | None]:
    """Find how many keys before and after its own a query may attend to; None where nothing says so."""
    bounds = None if mask is None else mask.bounds
    return (None, None) if bounds is None else (bounds.before, bounds.after)


def find_borders(mask: Mask | None, query_offset: int = 0, T: int | None = None) -> list[int] | None:
    """Find the rows at which documents after the first begin; None, no documents or too many to draw."""
    bounds = None if mask is None else mask.bounds
    if bounds is None or bounds.key_ids is None:
        return None
    ids = np.asarray(bounds.key_ids if bounds.query_ids is None else bounds.query_ids)
    if ids.size != ids.shape[-1]:  # of several examples or heads
        return None
    row = ids.reshape(-1)
    if bounds.query_ids is None:  # ids belong to keys: those of the rows
        row = row[max(query_offset, 0) :][: len(row) if T is None else T]
    borders = (np.flatnonzero(np.diff(row)) + 1).tolist()
    return borders if len(borders) <= _LARGEST_BORDERS else None


def _block(size: int) -> int:
    """Return the least power of two that leaves at most so many tiles."""
    return 1 << max(0, (max(size, 1) - 1) // LARGEST_PICTURE).bit_length()
