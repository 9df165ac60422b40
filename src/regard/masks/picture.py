"""Pictures of masks as text: every cell of a small one, every tile of a larger one."""

import sys
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
    """Draw a mask, its first row where it has several: cells at the positions of queries, or tiles."""
    offsets = {"query_offset": offset, "key_offset": key_offset}
    legend = f"{num_queries} queries x {num_keys} keys"
    if max(num_queries, num_keys) <= LARGEST_EXACT:
        cells, note = _take_first(mask.dense(num_queries, num_keys, **offsets))
        where, rows = positions_of(offset), Span(None, num_queries)
        position = where.at(rows.members[:, None], rows, -2, where.leading_axes)
        labels = [str(number) for number in np.ravel(position)[:num_queries].tolist()]
        width = max(map(len, labels), default=1)
        marked = zip(labels, CELLS[cells.astype(int)], strict=True)
        lines = [f"{label:>{width}} {' '.join(marks)}".rstrip() for label, marks in marked]
        legend += f"   ■ may attend  · may not{note}"
    else:
        block = (-(-num_queries // 32) or 1, -(-num_keys // 32) or 1)
        kinds = mask.tiles(num_queries, num_keys, query_block=block[0], key_block=block[1], **offsets)
        kinds, note = _take_first(kinds)
        lines = [" ".join(TILES[row]) for row in kinds]
        legend += f", one mark per {block[0]} x {block[1]}   █ all may attend  ▒ some  · none{note}"
    return printable("\n".join([legend, *lines]))


def _take_first(drawn: Any) -> tuple[np.ndarray, str]:
    """Return the first of many matrices, and a note of which it is."""
    *leading, _, _ = drawn.shape
    note = f"   leading index 0 of {', '.join(map(str, leading))}" if max(leading, default=1) > 1 else ""
    return np.asarray(drawn)[(0,) * len(leading)], note


def printable(text: str) -> str:
    """Return a text, its marks plain ones where standard output has an encoding that lacks some."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_PLAIN)
    return text
