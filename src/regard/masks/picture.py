"""Pictures of masks as text: every cell of a small one, every tile of a larger one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.masks.grid import Offset
from regard.masks.offsets import Span, positions_of

LARGEST_EXACT = 64
CELLS = np.array(["·", "■"])
TILES = np.array(["·", "▒", "█"])


def draw_mask(mask: Any, num_queries: int, num_keys: int, offset: Offset, key_offset: Offset) -> str:
    """Draw a mask, its first row where it has several."""
    offsets = {"query_offset": offset, "key_offset": key_offset}
    if max(num_queries, num_keys) <= LARGEST_EXACT:
        cells = np.asarray(mask.dense(num_queries, num_keys, **offsets))
        cells = cells[(0,) * (cells.ndim - 2)]
        where, rows = positions_of(offset), Span(None, num_queries)
        position = where.at(rows.members[:, None], rows, -2, where.leading_axes)
        return draw_cells(cells, np.ravel(position)[:num_queries].tolist())
    block = (-(-num_queries // 32) or 1, -(-num_keys // 32) or 1)
    codes = np.asarray(mask.tiles(num_queries, num_keys, query_block=block[0], key_block=block[1], **offsets))
    return draw_tiles(codes[(0,) * (codes.ndim - 2)], (num_queries, num_keys), block)


def draw_cells(keep: np.ndarray, positions: Sequence[int]) -> str:
    """Draw one character a cell, query positions at the left."""
    width = max((len(str(position)) for position in positions), default=1)
    lines = [
        f"{position:>{width}} {' '.join(CELLS[cells.astype(int)])}".rstrip()
        for position, cells in zip(positions, keep, strict=True)
    ]
    return "\n".join([f"{len(keep)} queries x {keep.shape[1]} keys   ■ may attend  · may not", *lines])


def draw_tiles(kinds: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> str:
    """Draw one character a tile."""
    legend = f"{shape[0]} queries x {shape[1]} keys, one mark per {block[0]} x {block[1]}"
    marks = "█ all may attend  ▒ some  · none"
    return "\n".join([f"{legend}   {marks}", *(" ".join(TILES[row]) for row in kinds)])
