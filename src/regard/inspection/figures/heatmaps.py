"""Attention weights as pictures: one matrix, or one panel a head."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from numpy.typing import ArrayLike, NDArray

from regard.inspection.figures import canvas, cells, palette
from regard.inspection.figures.canvas import Drawing

ANNOTATED = 16  # numbers are written into matrices up to this many rows and columns
SMALLEST_NUMBER = 4.5  # points; smaller ones are left out
ROUNDING = 1e-3  # how far low-precision weights may leave [0, 1]


def attention_heatmap(
    weights: ArrayLike,
    *,
    ax: Axes | None = None,
    query_labels: Sequence[object] | None = None,
    key_labels: Sequence[object] | None = None,
    title: str | None = None,
    vmax: float = 1.0,
    annotate: bool | None = None,
) -> Drawing:
    """Draw one matrix of attention weights, queries down and keys across.

    The colour scale runs from 0 to `vmax` whatever the data, so two pictures compare. Numbers in the cells
    are black or white, whichever reads better on the cell. A row of zeros (a query that attends to nothing)
    is drawn as zeros, NaN in grey.

    Args:
        weights: shape (T, S), values in [0, 1]; any array NumPy can read, bfloat16 included.
        ax: where to draw; None makes a figure of its own.
        query_labels: T labels instead of positions, for example tokens; shown as they are, never as formulas.
        key_labels: the same for the S keys.
        title: text above the picture.
        vmax: the weight that gets the last colour, in (0, 1]. Lower it for long rows, whose weights are all
            small; the colour bar then ends in an arrow where weights lie above it.
        annotate: write each weight into its cell. None does it up to 16 x 16 where the numbers fit.

    Returns:
        A `Drawing` with the image, the numbers in `texts` (row by row) and the colour bar.

    Raises:
        ValueError: `weights` is no matrix (the message says which index to take), is empty or holds values
            outside [0, 1]; the labels do not fit the shape; `vmax` is outside (0, 1].
        TypeError: `weights` holds no real numbers.

    Example:
        >>> from regard.inspection import figures
        >>> drawing = figures.attention_heatmap([[1.0, 0.0], [0.25, 0.75]], key_labels=["the", "cat"])
        >>> [text.get_text() for text in drawing.texts]
        ['1.00', '0.00', '0.25', '0.75']
        >>> drawing.images[0].get_clim()
        (0.0, 1.0)
    """
    matrix = canvas.read_numbers(
        weights,
        "weights",
        "(T, S)",
        2,
        fewer="one query is the matrix weights[None, :]",
        more="choose one head, for example weights{one}, or draw all with head_grid(weights{several})",
    )
    _check_weights(matrix, vmax)
    canvas.read_labels(query_labels, "query_labels", len(matrix), "query")
    canvas.read_labels(key_labels, "key_labels", matrix.shape[1], "key")
    target, panels = canvas.open_panel(ax, cells.matrix_size(*matrix.shape), title)
    image = show_matrix(target, matrix, (query_labels, key_labels), vmax=vmax)
    target.set(**cells.MATRIX_LABELS)
    bar = panels.add_colorbar(image, cells.WEIGHT_LABEL, _overflow(matrix, vmax))
    panels.fit()
    size = _number_size(target, matrix.shape)
    small = max(matrix.shape) <= ANNOTATED
    annotate = small and size >= SMALLEST_NUMBER if annotate is None else annotate
    texts = _write_numbers(target, image, matrix, size) if annotate else ()
    outlines = cells.separate_cells(target, *matrix.shape) if small else ()
    return Drawing(panels.figure, panels.axes, (image,), texts=texts, outlines=outlines, colorbar=bar)


def head_grid(
    weights: ArrayLike,
    *,
    fig: Figure | SubFigure | None = None,
    columns: int | None = None,
    head_labels: Sequence[object] | None = None,
    query_labels: Sequence[object] | None = None,
    key_labels: Sequence[object] | None = None,
    title: str | None = None,
    vmax: float = 1.0,
) -> Drawing:
    """Draw the attention weights of every head, one panel each, on one colour scale.

    Args:
        weights: shape (H, T, S), values in [0, 1]; any array NumPy can read, bfloat16 included.
        fig: an empty figure or sub-figure to fill; None makes one.
        columns: panels side by side; None chooses a grid close to square, at most 4 wide.
        head_labels: H names; None counts "Head 0", "Head 1", ...
        query_labels, key_labels, vmax: as in `attention_heatmap`.
        title: text above the whole grid.

    Returns:
        A `Drawing` with one axes and one image a head, and the one colour bar they share.

    Raises:
        ValueError, TypeError: as `attention_heatmap`, of weights of rank 3.

    Example:
        >>> import numpy as np
        >>> from regard.inspection import figures
        >>> drawing = figures.head_grid(np.full((3, 5, 7), 1 / 7))
        >>> [ax.get_title() for ax in drawing.axes]
        ['Head 0', 'Head 1', 'Head 2']
    """
    alone = "one head is the stack weights[None], or draw it with attention_heatmap(weights)"
    stack = canvas.read_numbers(weights, "weights", "(H, T, S)", 3, fewer=alone)
    _check_weights(stack, vmax)
    heads, T, S = stack.shape
    canvas.read_labels(query_labels, "query_labels", T, "query")
    canvas.read_labels(key_labels, "key_labels", S, "key")
    names = canvas.read_labels(head_labels, "head_labels", heads, "head", "Head {}")
    rows, columns = cells.grid_shape(heads, columns)
    panels = canvas.open_panels(fig, _panel_size(T, S, columns), heads, rows, columns, title)
    images = []
    for index, ax in enumerate(panels.axes):
        images.append(show_matrix(ax, stack[index], (query_labels, key_labels), vmax=vmax, most_ticks=5))
        canvas.set_title(ax, names[index], canvas.LABEL_SIZE)
        ax.tick_params(labelleft=index % columns == 0, labelbottom=index + columns >= heads)
        ax.set_ylabel(cells.QUERY_LABEL if index % columns == 0 else "")
        ax.set_xlabel(cells.KEY_LABEL if index // columns == rows - 1 else "")
    bar = panels.add_colorbar(images[0], cells.WEIGHT_LABEL, _overflow(stack, vmax))
    return panels.finish(images=tuple(images), colorbar=bar)


def show_matrix(
    ax: Axes,
    matrix: NDArray,
    labels: tuple[Sequence[object] | None, Sequence[object] | None],
    vmax: float,
    most_ticks: int = 12,
) -> AxesImage:
    """Lay a (T, S) matrix on `ax` with whole-number ticks or labels; long thin matrices fill the axes."""
    image = ax.imshow(
        matrix, cmap=palette.weight_colors(), vmin=0.0, vmax=vmax, aspect=cells.matrix_aspect(*matrix.shape)
    )
    cells.mark_positions(ax.yaxis, matrix.shape[0], labels[0], most_ticks)
    cells.mark_positions(ax.xaxis, matrix.shape[1], labels[1], most_ticks)
    return image


def _check_weights(weights: NDArray, vmax: float) -> None:
    """Refuse values that a scale from 0 to `vmax` would show as something they are not."""
    if not 0.0 < vmax <= 1.0:
        raise ValueError(f"vmax: expected a number in (0, 1], got {vmax}")
    known = weights[~np.isnan(weights)]
    if known.size and not (known.min() >= -ROUNDING and known.max() <= 1.0 + ROUNDING):
        raise ValueError(
            f"weights: expected values in [0, 1], got values from {known.min():.4g} to {known.max():.4g}; "
            "pass the weights after the softmax, not the scores"
        )


def _panel_size(T: int, S: int, columns: int) -> tuple[float, float]:
    """Return width and height in inches of one head among others: long enough for its axis labels."""
    width, height = cells.matrix_size(T, S)
    scale = (1.9 if columns <= 3 else 1.55) / max(width, height)
    return max(scale * width, 1.05), max(scale * height, 1.05)


def _number_size(ax: Axes, shape: tuple[int, ...]) -> float:
    """Return the font size in points at which "0.00" fits a cell."""
    box = ax.get_window_extent()
    points = 72.0 / ax.figure.figure.dpi
    return min(canvas.TICK_SIZE, 0.36 * points * box.width / shape[1], 0.6 * points * box.height / shape[0])


def _write_numbers(ax: Axes, image: AxesImage, matrix: NDArray, size: float) -> tuple[Text, ...]:
    """Write each weight into its cell, in the ink that reads on the cell's colour."""
    style: dict[str, Any] = {"fontsize": size, "ha": "center", "va": "center"}
    colors = image.to_rgba(np.ma.masked_invalid(matrix))
    texts = []
    for (row, column), weight in np.ndenumerate(np.clip(matrix, 0.0, 1.0)):  # no "-0.00" from rounding
        ink = palette.readable_ink(tuple(colors[row, column, :3]))
        number = "NaN" if np.isnan(weight) else f"{weight:.2f}"
        texts.append(ax.text(column, row, number, color=ink, **style))
    return tuple(texts)


def _overflow(weights: NDArray, vmax: float) -> Literal["max", "neither"]:
    """Return "max", an arrow at the colour bar's end, where weights above its last value exist."""
    return "max" if np.nanmax(weights, initial=0.0) > vmax + ROUNDING else "neither"
