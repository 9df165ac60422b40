"""Grids of cells on axes: how large they are, how their positions are named, what lies between them."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.collections import LineCollection
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from regard.arguments import whole_number
from regard.inspection.figures.canvas import TICK_SIZE, literal, shorten_name

QUERY_LABEL, KEY_LABEL, WEIGHT_LABEL = "Query position", "Key position", "Attention weight"
MATRIX_LABELS: dict[str, Any] = {"xlabel": KEY_LABEL, "ylabel": QUERY_LABEL}
LONGEST_SIDE, SHORTEST_SIDE, CELL = 4.6, 1.2, 0.42  # inches
LINE_HEIGHT, SMALLEST_LABEL = 1.15, 5.0  # of a label, in its size; points


def mark_positions(
    axis: Axis, size: int, labels: Sequence[object] | None = None, most: int = 12, start: int = 0
) -> None:
    """Set whole-number ticks, never one between two cells; or the labels, as many as fit."""
    if labels is not None:
        name_positions(axis, [shorten_name(label) for label in labels])
    elif size <= most:
        axis.set_ticks(range(start, start + size))
    else:
        axis.set_major_locator(MaxNLocator(nbins=most, integer=True, steps=[1, 2, 5, 10]))


def name_positions(
    axis: Axis, labels: Sequence[object], room: float | None = None, weights: NDArray | None = None
) -> None:
    """Name every position where that fits; else first those of the largest weight, each where it has room.

    `room` is the axis's length in inches; None takes that of the axes as they are now.
    """
    across, texts = isinstance(axis, XAxis), [literal(label) for label in labels]
    if room is None:
        box = axis.axes.get_window_extent()
        room = (box.width if across else box.height) / axis.axes.figure.figure.dpi
    pitch = 72 * room / len(texts)  # points from one to the next
    size = min(TICK_SIZE, max(pitch / LINE_HEIGHT, SMALLEST_LABEL))
    spacing = math.ceil(LINE_HEIGHT * size / pitch - 1e-9)
    order = np.arange(len(texts)) if weights is None else np.argsort(-weights, kind="stable")
    free, shown = np.ones(len(texts), bool), []
    for index in order:
        if free[index]:
            shown.append(int(index))
            free[max(index - spacing + 1, 0) : index + spacing] = False
    axis.set_ticks(sorted(shown), [texts[index] for index in sorted(shown)], fontsize=size)
    if across and max(len(texts[index]) for index in shown) > 2:
        # At 45 degrees a line of text takes 1.4 times its height along the axis.
        slant_labels(axis, 45 if pitch * spacing >= 1.4 * LINE_HEIGHT * size else 90)


def read_heads(values: object) -> NDArray[np.float64]:
    """Read a statistic of a readout as `(H, n)`, with or without an axis of heads."""
    array = np.asarray(values, np.float64)
    if array.ndim > 2:
        raise ValueError(f"readout: expected leading axes (H,) or none, got {array.shape[:-1]}")
    return array if array.ndim == 2 else array[None]


def slant_labels(axis: Axis, angle: float = 45) -> None:
    """Turn tick labels below a panel so that long ones do not run into each other."""
    for tick in axis.get_ticklabels():
        tick.set(rotation=angle, rotation_mode="anchor", ha="right", va="center")


def separate_cells(ax: Axes, T: int, S: int, top: int = 0) -> tuple[LineCollection, ...]:
    """Draw thin white lines between neighbouring cells."""
    style: dict[str, Any] = {"colors": "white", "linewidths": 0.6}
    across = ax.hlines(np.arange(top, top + T - 1) + 0.5, -0.5, S - 0.5, **style)
    return across, ax.vlines(np.arange(S - 1) + 0.5, top - 0.5, top + T - 0.5, **style)


def matrix_aspect(T: int, S: int) -> Literal["equal", "auto"]:
    """Return the aspect of square cells, unless the matrix is so long that they would leave a thread."""
    return "equal" if max(T, S) <= 3 * min(T, S) else "auto"


def scaled_size(height: float, width: float, longest: float, least: float = 0.0) -> tuple[float, float]:
    """Return width and height in inches of a picture whose longest side is given."""
    scale = longest / max(height, width)
    return max(width * scale, least), max(height * scale, least)


def matrix_size(T: int, S: int) -> tuple[float, float]:
    """Return width and height in inches of a (T, S) matrix on a page."""
    cell = min(CELL, LONGEST_SIDE / max(T, S))
    if matrix_aspect(T, S) == "equal":
        cell = max(cell, SHORTEST_SIDE / min(T, S))
    return max(S * cell, SHORTEST_SIDE), max(T * cell, SHORTEST_SIDE)


def grid_shape(count: int, columns: int | None) -> tuple[int, int]:
    """Return rows and columns that hold `count` panels: close to square, at most 4 wide."""
    if columns is None:
        widest = min(4, count)
        columns = widest if count > 6 or count <= 3 else -(-count // 2)
    columns = min(whole_number("columns", columns, 1), count)
    return -(-count // columns), columns
