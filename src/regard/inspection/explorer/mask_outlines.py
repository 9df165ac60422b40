"""What of a mask the page draws over the weights: its tiles, its band, where its documents begin."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.masks import Mask, TileKind
from regard.masks.algebra import And
from regard.masks.documents import Documents, Segments
from regard.masks.positional import Causal, SlidingWindow

LARGEST_PICTURE = 256
_LARGEST_BORDERS = 4096


def draw_tiles(
    mask: Mask, T: int, S: int, query_offset: Any = 0, key_offset: Any = None
) -> tuple[np.ndarray, int, int]:
    """Classify tiles of the T x S cells, at most 256 along each axis.

    Args:
        mask: of one example.
        T: queries.
        S: keys.
        query_offset: as in `attend`.
        key_offset: as in `attend`.

    Returns:
        uint8 `(I, J)` of `TileKind` codes (where heads differ, PARTIAL), rows per tile and keys per tile.

    Example:
        >>> from regard import masks
        >>> from regard.inspection.explorer.mask_outlines import draw_tiles
        >>> draw_tiles(masks.causal(), 2, 2)[0].tolist()
        [[2, 0], [2, 2]]
    """
    rows, keys = (_block(size) for size in (T, S))
    if not T or not S:
        return np.zeros((-(-T // rows), -(-S // keys)), np.uint8), rows, keys
    tiles = mask.tiles(
        T, S, query_block=rows, key_block=keys, query_offset=query_offset, key_offset=key_offset
    )
    tiles = np.asarray(tiles).reshape((-1, *tiles.shape[-2:]))
    agreed = np.where((tiles == tiles[:1]).all(0), tiles[0], TileKind.PARTIAL)
    return agreed.astype(np.uint8), rows, keys


def find_band(mask: Mask | None) -> tuple[int, int] | None:
    """Find how many keys before and after its own a query may attend to at most, if a window says so."""
    before = after = np.inf
    for part in _parts(mask):
        if isinstance(part, Causal):
            after = 0
        if isinstance(part, SlidingWindow):
            before = min(before, np.inf if part.before is None else part.before)
            after = min(after, np.inf if part.after is None else part.after)
    return None if np.inf in (before, after) else (int(before), int(after))


def find_borders(mask: Mask | None, query_offset: int = 0, T: int | None = None) -> list[int] | None:
    """Find the rows at which documents after the first begin; None, no documents or too many to draw."""
    for part in _parts(mask):
        if not isinstance(part, Documents | Segments):
            continue
        ids = np.asarray(part.ids if isinstance(part, Documents) else part.query_ids)
        ids = ids.reshape((-1, ids.shape[-1]))
        if len(ids) != 1:
            return None
        row = ids[0]
        if isinstance(part, Documents):  # ids belong to keys: those of the rows
            row = row[max(query_offset, 0) :][: len(row) if T is None else T]
        borders = (np.flatnonzero(np.diff(row)) + 1).tolist()
        return borders if len(borders) <= _LARGEST_BORDERS else None
    return None


def _parts(mask: Mask | None) -> list[Mask]:
    """The masks that all have to agree."""
    if isinstance(mask, And):
        return _parts(mask.left) + _parts(mask.right)
    return [] if mask is None else [mask]


def _block(size: int) -> int:
    """The least power of two that leaves at most so many tiles."""
    return 1 << max(0, (max(size, 1) - 1) // LARGEST_PICTURE).bit_length()
