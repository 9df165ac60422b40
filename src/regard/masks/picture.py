"""Pictures of masks as text: every cell of a small one, every tile of a larger one."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from regard.masks.grid import Offset
from regard.masks.offsets import positions_of
from regard.masks.spans import Span

LARGEST_EXACT = 64
CELLS = np.array(["·", "■"])
TILES = np.array(["·", "▒", "█"])
# What stands for marks where standard output cannot print them.
_PLAIN = str.maketrans({"·": ".", "■": "#", "▒": "+", "█": "#", "∞": "inf"})


def draw_mask(mask: Any, num_queries: int, num_keys: int, offset: Offset, key_offset: Offset) -> str:
    """Draw a mask, its first row where it has several."""
    offsets = {"query_offset": offset, "key_offset": key_offset}
    if max(num_queries, num_keys) <= LARGEST_EXACT:
        cells, note = _take_first(mask.dense(num_queries, num_keys, **offsets))
        where, rows = positions_of(offset), Span(None, num_queries)
        position = where.at(rows.members[:, None], rows, -2, where.leading_axes)
        return draw_cells(cells, np.ravel(position)[:num_queries].tolist(), note)
    block = (-(-num_queries // 32) or 1, -(-num_keys // 32) or 1)
    codes = mask.tiles(num_queries, num_keys, query_block=block[0], key_block=block[1], **offsets)
    codes, note = _take_first(codes)
    return draw_tiles(codes, (num_queries, num_keys), block, note)


def _take_first(drawn: Any) -> tuple[np.ndarray, str]:
    """Return the first of many matrices, and a note of which it is."""
    *leading, _, _ = drawn.shape
    note = f"   leading index 0 of {', '.join(map(str, leading))}" if max(leading, default=1) > 1 else ""
    return np.asarray(drawn)[(0,) * len(leading)], note


def draw_cells(keep: np.ndarray, positions: Sequence[int], note: str = "") -> str:
    """Draw one character a cell, query positions at the left."""
    width = max((len(str(position)) for position in positions), default=1)
    lines = [
        f"{position:>{width}} {' '.join(CELLS[cells.astype(int)])}".rstrip()
        for position, cells in zip(positions, keep, strict=True)
    ]
    legend = f"{len(keep)} queries x {keep.shape[1]} keys   ■ may attend  · may not{note}"
    return printable("\n".join([legend, *lines]))


def draw_tiles(kinds: np.ndarray, shape: tuple[int, int], block: tuple[int, int], note: str = "") -> str:
    """Draw one character a tile."""
    legend = f"{shape[0]} queries x {shape[1]} keys, one mark per {block[0]} x {block[1]}"
    marks = "█ all may attend  ▒ some  · none"
    return printable("\n".join([f"{legend}   {marks}{note}", *(" ".join(TILES[row]) for row in kinds)]))


def printable(text: str) -> str:
    """Return a text, its marks plain ones where standard output has an encoding that lacks some."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_PLAIN)
    return text
