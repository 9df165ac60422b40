"""A mask as text: every cell when it is small, every tile when it is not."""

from __future__ import annotations

import numpy as np

LARGEST_EXACT = 64
CELLS = np.array(["·", "■"])
TILES = np.array(["·", "▒", "█"])


def draw_cells(keep: np.ndarray, offset: int) -> str:
    """One character a cell, query positions at the left."""
    width = len(str(max(offset, offset + len(keep) - 1, 0)))
    lines = [
        f"{offset + row:>{width}} {' '.join(CELLS[cells.astype(int)])}".rstrip()
        for row, cells in enumerate(keep)
    ]
    return "\n".join([f"{len(keep)} queries x {keep.shape[1]} keys   ■ may attend  · may not", *lines])


def draw_tiles(kinds: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> str:
    """One character a tile."""
    legend = f"{shape[0]} queries x {shape[1]} keys, one mark per {block[0]} x {block[1]}"
    marks = "█ all may attend  ▒ some  · none"
    return "\n".join([f"{legend}   {marks}", *(" ".join(TILES[row]) for row in kinds)])
