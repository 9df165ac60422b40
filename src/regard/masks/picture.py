"""Pictures of masks as text: every cell of a small one, every tile of a larger one."""

from __future__ import annotations

from typing import Any

import numpy as np

from regard.masks.alignment import place_queries
from regard.masks.grid import Offset

LARGEST_EXACT = 64
CELLS = np.array(["·", "■"])
TILES = np.array(["·", "▒", "█"])


def draw_mask(mask: Any, num_queries: int, num_keys: int, query_offset: Offset) -> str:
    """Draw a mask, its first row where it has several."""
    offset = place_queries(num_queries, num_keys, query_offset, mask.reads_positions)
    if max(num_queries, num_keys) <= LARGEST_EXACT:
        cells = np.asarray(mask.dense(num_queries, num_keys, query_offset=offset))
        return draw_cells(cells[(0,) * (cells.ndim - 2)], int(np.ravel(np.asarray(offset))[0]))
    block = (-(-num_queries // 32) or 1, -(-num_keys // 32) or 1)
    codes = mask.tiles(num_queries, num_keys, query_block=block[0], key_block=block[1], query_offset=offset)
    codes = np.asarray(codes)
    return draw_tiles(codes[(0,) * (codes.ndim - 2)], (num_queries, num_keys), block)


def draw_cells(keep: np.ndarray, offset: int) -> str:
    """Draw one character a cell, query positions at the left."""
    width = len(str(max(offset, offset + len(keep) - 1, 0)))
    lines = [
        f"{offset + row:>{width}} {' '.join(CELLS[cells.astype(int)])}".rstrip()
        for row, cells in enumerate(keep)
    ]
    return "\n".join([f"{len(keep)} queries x {keep.shape[1]} keys   ■ may attend  · may not", *lines])


def draw_tiles(kinds: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> str:
    """Draw one character a tile."""
    legend = f"{shape[0]} queries x {shape[1]} keys, one mark per {block[0]} x {block[1]}"
    marks = "█ all may attend  ▒ some  · none"
    return "\n".join([f"{legend}   {marks}", *(" ".join(TILES[row]) for row in kinds)])
