"""Small pictures of all heads where the page cannot run: PNG bytes, and blocks of characters."""

import struct
import zlib
from typing import Any

import numpy as np

from regard.inspection.explorer.head_records import coarsen

SHADES = " ░▒▓█"
_MOST_CALLS, _MOST_HEADS = 24, 16
_SIDE, _GAP = 32, 4  # pixels
_OCTAVES = 10  # from the darkest colour to none
# White, and three blues, darker and darker.
_ANCHORS = np.array([[255, 255, 255], [158, 202, 225], [33, 113, 181], [8, 30, 75]], np.float64)


def draw_png(trace: Any) -> bytes:
    """Draw the heads of a trace, calls downwards and heads across, as the bytes of a PNG file.

    The darker, the larger the largest weight in a block, on a log scale: white is below 2^-10. Of many calls
    or heads, the first ones are drawn. The same trace gives the same bytes.
    """
    calls = trace.calls[:_MOST_CALLS]
    across = min(max((call.heads for call in calls), default=1), _MOST_HEADS)
    step = _SIDE + _GAP
    picture = np.full((max(len(calls), 1) * step + _GAP, max(across, 1) * step + _GAP, 3), 238, np.uint8)
    for row, call in enumerate(calls):
        blocks = _blocks(call, _SIDE)
        for head in range(min(call.heads, across)):
            y, x = _GAP + row * step, _GAP + head * step
            level = _depth(_resize(blocks[head], _SIDE, _SIDE))
            shades = [np.interp(level, np.linspace(0, 1, len(_ANCHORS)), channel) for channel in _ANCHORS.T]
            picture[y : y + _SIDE, x : x + _SIDE] = np.rint(np.stack(shades, -1))
    height, width, _ = picture.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), picture.reshape((height, -1))], 1)

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = part(b"IDAT", zlib.compress(lines.tobytes(), 9))
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + body + part(b"IEND", b"")


def draw_text(trace: Any, heads: int = 6, calls: int = 4) -> str:
    """Draw the first heads in characters, 8 x 4 blocks each, the darker the larger the largest weight."""
    lines = [repr(trace)]
    for call in trace.calls[:calls]:
        blocks = _blocks(call, 8)[:heads]
        hidden = call.heads - len(blocks)
        lines.append(f"{call.name}{f', {hidden} more heads not drawn' if hidden else ''}")
        shades = [np.rint(4 * _depth(_resize(block, 4, 8))).astype(int) for block in blocks]
        for row in range(4):
            lines.append("  ".join(f"|{''.join(SHADES[cell] for cell in shade[row])}|" for shade in shades))
    if len(trace.calls) > calls:
        lines.append(f"{len(trace.calls) - calls} more calls not drawn")
    return "\n".join(lines)


def _blocks(call: Any, most: int) -> np.ndarray:
    """Return the largest weights of blocks (H, I, J), neither axis above `most` where that is stored."""
    _, level = coarsen(call.readout(exact=False), most)
    return np.nan_to_num(np.asarray(level.max))


def _resize(block: np.ndarray, height: int, width: int) -> np.ndarray:
    """Take the largest of the blocks under each cell."""
    if 0 in block.shape:
        return np.zeros((height, width))
    for axis, size in enumerate((height, width)):
        ends = [(n * block.shape[axis] // size, -(-(n + 1) * block.shape[axis] // size)) for n in range(size)]
        block = np.stack([block.take(range(*end), axis).max(axis) for end in ends], axis)
    return block


def _depth(weights: np.ndarray) -> np.ndarray:
    """Return 0 for no weight up to 1 for a weight of 1, on a log scale."""
    return np.clip(1 + np.log2(np.maximum(weights, 2.0**-60)) / _OCTAVES, 0, 1)
