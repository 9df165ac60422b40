"""Attention weights as pictures: one matrix, or one panel a head."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from numpy.typing import ArrayLike, NDArray

from regard.inspection.figures import canvas, cell_axes, palette
from regard.inspection.figures.canvas import Drawing

ANNOTATED = 16  # numbers are written into matrices up to this many rows and columns
SMALLEST_NUMBER = 4.5  # points; smaller ones are left out
LABEL_PITCH, LARGEST_PANEL = 0.1, 3.2  # inches: of a label in a grid, and of a panel that labels ask for
EXPONENT = 0.4  # of the explorer's scale for small weights
ROUNDING = 1e-3  # how far low-precision weights may leave [0, 1]

Scale = Literal["power", "linear"]


def attention_heatmap(
    weights: ArrayLike,
    *,
    ax: Axes | None = None,
    query_labels: Sequence[object] | None = None,
    key_labels: Sequence[object] | None = None,
    title: str | None = None,
    vmax: float = 1.0,
    scale: Scale = "power",
    annotate: bool | None = None,
) -> Drawing:
    """Draw one matrix of attention weights, queries down and keys across.

    The colour scale runs from 0 to `vmax` whatever the data, so two pictures compare. Numbers in the cells
    are black or white, whichever reads better on the cell. A row of zeros (a query that attends to nothing)
    is drawn as zeros, NaN in grey. Where room is short, labels of the largest weights go first.

    Args:
        weights: shape (T, S), values in [0, 1]; any array NumPy can read, bfloat16 included.
        ax: where to draw; None makes a figure of its own.
        query_labels, key_labels: T and S labels instead of positions, such as tokens; never read as formulas,
            and shown in 24 characters.
        title: text above the picture.
        vmax: the weight that gets the last colour, in (0, 1]. Lower it for long rows, whose weights are all
            small; the colour bar then ends in an arrow where weights lie above it.
        scale: "power" colours by `weight^0.4`, which shows small weights, as the explorer does, or "linear".
        annotate: write each weight into its cell. None does it up to 16 x 16 where the numbers fit. Three
            digits where `vmax` is below 0.1, else two.

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
    fewer = "one query is the matrix weights[None, :]"
    more = "choose one head, for example weights{one}, or draw all with head_grid(weights{several})"
    matrix = canvas.read_numbers(weights, "weights", "(T, S)", 2, fewer=fewer, more=more)
    _check_weights(matrix, vmax, scale)
    canvas.read_labels(query_labels, "query_labels", len(matrix), "query")
    canvas.read_labels(key_labels, "key_labels", matrix.shape[1], "key")
    labels, room = _shorten_labels(query_labels, key_labels)
    target, panels = canvas.open_panel(ax, cell_axes.matrix_size(*matrix.shape), title, room)
    image = _show_matrix(panels, target, matrix, labels, vmax, scale)
    target.set(**cell_axes.MATRIX_LABELS)
    bar = _add_colorbar(panels, image, matrix, vmax, scale)
    panels.fit()
    figure, box = target.figure.figure, target.get_window_extent()
    cell = np.array([box.width, box.height]) / matrix.shape[::-1] * 72.0 / figure.dpi
    size = min(canvas.TICK_SIZE, 0.36 * cell[0], 0.6 * cell[1])  # at which "0.00" fits
    small = max(matrix.shape) <= ANNOTATED
    annotate = small and size >= SMALLEST_NUMBER if annotate is None else annotate
    texts = _write_numbers(target, image, matrix, size, vmax) if annotate else ()
    outlines = cell_axes.separate_cells(target, *matrix.shape) if small else ()
    return Drawing(figure, panels.axes, (image,), texts=texts, outlines=outlines, colorbar=bar)


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
    scale: Scale = "power",
) -> Drawing:
    """Draw the attention weights of every head, one panel each, on one colour scale.

    Args:
        weights: shape (H, T, S), values in [0, 1]; any array NumPy can read, bfloat16 included.
        fig: an empty figure or sub-figure to fill; None makes one.
        columns: panels side by side; None chooses a grid close to square, at most 4 wide.
        head_labels: H names; None counts "Head 0", "Head 1", ...
        query_labels, key_labels, vmax, scale: as in `attention_heatmap`.
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
    _check_weights(stack, vmax, scale)
    heads, T, S = stack.shape
    canvas.read_labels(query_labels, "query_labels", T, "query")
    canvas.read_labels(key_labels, "key_labels", S, "key")
    names = canvas.read_labels(head_labels, "head_labels", heads, "head", "Head {}")
    rows, columns = cell_axes.grid_shape(heads, columns)
    labels, room = _shorten_labels(query_labels, key_labels)
    size = _panel_size(T, S, columns, max(len(side) for side in (*labels, ()) if side is not None))
    panels = canvas.open_panels(fig, size, heads, rows, columns, title, room)
    # Panels share their labels, so that what is large in any of them is named.
    largest = np.nan_to_num(stack).max(0)
    images = []
    for index, ax in enumerate(panels.axes):
        images.append(_show_matrix(panels, ax, stack[index], labels, vmax, scale, largest, most_ticks=5))
        canvas.set_title(ax, names[index], canvas.LABEL_SIZE)
        ax.tick_params(labelleft=index % columns == 0, labelbottom=index + columns >= heads)
        ax.set_ylabel(cell_axes.QUERY_LABEL if index % columns == 0 else "")
        ax.set_xlabel(cell_axes.KEY_LABEL if index // columns == rows - 1 else "")
    bar = _add_colorbar(panels, images[0], stack, vmax, scale)
    return panels.finish(images=tuple(images), colorbar=bar)


def _shorten_labels(
    *sides: Sequence[object] | None,
) -> tuple[list[list[str] | None], tuple[float, float]]:
    """Return labels of queries and keys as they are shown, and the room that they need beside and below."""
    labels = [None if side is None else [canvas.shorten(label) for label in side] for side in sides]
    return labels, (canvas.measure_room(labels[0]), canvas.measure_room(labels[1]))


def _show_matrix(
    panels: canvas.Panels,
    ax: Axes,
    matrix: NDArray,
    labels: Sequence[Sequence[str] | None],
    vmax: float,
    scale: Scale,
    largest: NDArray | None = None,
    most_ticks: int = 12,
) -> AxesImage:
    """Lay a (T, S) matrix on `ax` with whole-number ticks or labels; long thin matrices fill the axes."""
    norm = PowerNorm(EXPONENT if scale == "power" else 1.0, 0.0, vmax)
    aspect = cell_axes.matrix_aspect(*matrix.shape)
    image = ax.imshow(matrix, cmap=palette.weight_colors(), norm=norm, aspect=aspect)
    box = ax.get_window_extent()
    width, height = panels.size if panels.owned else np.array([box.width, box.height]) / ax.figure.figure.dpi
    if aspect == "equal":
        cell = min(width / matrix.shape[1], height / matrix.shape[0])
        width, height = cell * matrix.shape[1], cell * matrix.shape[0]
    largest = np.nan_to_num(matrix) if largest is None else largest
    for side, axis, room in ((0, ax.yaxis, height), (1, ax.xaxis, width)):
        names = labels[side]
        if names is None:
            cell_axes.mark_positions(axis, matrix.shape[side], most=most_ticks)
        else:
            cell_axes.name_positions(axis, names, room, largest.max(1 - side))
    return image


def _add_colorbar(
    panels: canvas.Panels, image: AxesImage, weights: NDArray, vmax: float, scale: Scale
) -> Colorbar:
    """Add a bar that says how weights are coloured; it ends in an arrow where weights above it exist."""
    label = cell_axes.WEIGHT_LABEL + f"\n(colour: w^{EXPONENT})" * (scale == "power")
    above = np.nanmax(weights, initial=0.0) > vmax + ROUNDING
    bar = panels.add_colorbar(image, label, "max" if above else "neither")
    if scale == "power":
        bar.set_ticks([vmax * share for share in (0, 0.01, 0.05, 0.2, 0.5, 1)])
        bar.minorticks_off()
        bar.ax.yaxis.set_major_formatter("{x:.3g}")
    return bar


def _check_weights(weights: NDArray, vmax: float, scale: str) -> None:
    """Refuse values that a scale from 0 to `vmax` would show as something they are not."""
    if scale not in ("power", "linear"):
        raise ValueError(f"scale: expected 'power' or 'linear', got {scale!r}")
    if not 0.0 < vmax <= 1.0:
        raise ValueError(f"vmax: expected a number in (0, 1], got {vmax}")
    shares = weights[~np.isnan(weights)]
    if shares.size and not (shares.min() >= -ROUNDING and shares.max() <= 1.0 + ROUNDING):
        got = f"values from {shares.min():.4g} to {shares.max():.4g}"
        hint = "pass the weights after the softmax, not the scores"
        raise ValueError(f"weights: expected values in [0, 1], got {got}; {hint}")


def _panel_size(T: int, S: int, columns: int, labels: int) -> tuple[float, float]:
    """Return width and height in inches of one head among others: long enough for its labels."""
    width, height = cell_axes.matrix_size(T, S)
    longest = max(1.9 if columns <= 3 else 1.55, min(LABEL_PITCH * labels, LARGEST_PANEL))
    return cell_axes.scaled_size(height, width, longest, least=1.05)


def _write_numbers(ax: Axes, image: AxesImage, matrix: NDArray, size: float, vmax: float) -> tuple[Text, ...]:
    """Write each weight into its cell, in the ink that reads on the cell's colour."""
    style: dict[str, Any] = {"fontsize": size, "ha": "center", "va": "center"}
    colors = image.to_rgba(np.ma.masked_invalid(matrix))
    texts = []
    for (row, column), weight in np.ndenumerate(np.clip(matrix, 0.0, 1.0)):  # no "-0.00" from rounding
        ink = palette.readable_ink(tuple(colors[row, column, :3]))
        fine = vmax < 0.1 and weight < 1.0
        number = "NaN" if np.isnan(weight) else f"{weight:.3f}"[1:] if fine else f"{weight:.2f}"
        texts.append(ax.text(column, row, number, color=ink, **style))
    return tuple(texts)
