"""Pictures of what goes into attention: position tables and masks."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from numpy.typing import ArrayLike, NDArray

from regard.inspection.figures import canvas, cell_axes, palette
from regard.inspection.figures.canvas import Drawing
from regard.masks import Mask

TABLE_SIZE = (5.2, 2.3)  # inches; tables are of any shape, so the picture's is fixed
LARGEST_SHARP = 512
LONGEST_TITLE = 60  # characters of a mask's expression
SEPARATED = 32  # cells of masks up to this many rows and columns have lines between them


def position_table(table: ArrayLike, *, ax: Axes | None = None, title: str | None = None) -> Drawing:
    """Draw a table of position vectors, positions across and dimensions up, on a scale symmetric about zero.

    Args:
        table: shape (length, d_model), sinusoidal or learned; any array NumPy can read, bfloat16 included.
        ax, title: as in `attention_heatmap`.

    Returns:
        A `Drawing` with the image and its colour bar. White is zero, red positive, blue negative, grey NaN.

    Raises:
        ValueError: `table` is no matrix, is empty, or holds an infinity.
        TypeError: `table` holds no real numbers.

    Example:
        >>> from regard import positions
        >>> from regard.inspection import figures
        >>> drawing = figures.position_table(positions.sinusoidal(50, 64), title="Sinusoidal positions")
        >>> drawing.images[0].get_clim()
        (-1.0, 1.0)
    """
    values = _read_table(table)
    magnitudes = np.abs(values[~np.isnan(values)])
    limit = float(magnitudes.max(initial=0.0)) or 1.0
    target, panels = canvas.open_panel(ax, TABLE_SIZE, title)
    # Columns are positions, so a dimension reads as a wave from left to right.
    shared: dict[str, Any] = {"aspect": "auto", "origin": "lower"}
    image = target.imshow(values.T, cmap=palette.signed_colors(), vmin=-limit, vmax=limit, **shared)
    cell_axes.mark_positions(target.yaxis, values.shape[1], most=8)
    return _finish_table(panels, image, len(values), "Dimension", "Value")


def position_similarity(table: ArrayLike, *, ax: Axes | None = None, title: str | None = None) -> Drawing:
    """Draw how alike the vectors of any two positions are: the cosine of the angle between them.

    cosine[i, j] = sum_m table[i, m] table[j, m] / (norm[i] norm[j])

    A sinusoidal table gives bands that depend on the distance i - j alone; a learned table shows whether
    training found neighbourhoods. A position whose vector is zero has no direction and is drawn in grey.

    Args:
        table, ax, title: as in `position_table`.

    Returns:
        A `Drawing` with the (length, length) image, scale fixed to [-1, 1], and its colour bar.

    Raises:
        ValueError, TypeError: as `position_table`.

    Example:
        >>> from regard.inspection import figures
        >>> drawing = figures.position_similarity([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
        >>> drawing.images[0].get_array().tolist()
        [[1.0, 0.0, -1.0], [0.0, 1.0, 0.0], [-1.0, 0.0, 1.0]]
    """
    values = _read_table(table)
    length = len(values)
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    directions = np.divide(values, norms, out=np.full_like(values, np.nan), where=norms > 0.0)
    target, panels = canvas.open_panel(ax, cell_axes.matrix_size(length, length), title)
    image = target.imshow(directions @ directions.T, cmap=palette.signed_colors(), vmin=-1.0, vmax=1.0)
    cell_axes.mark_positions(target.yaxis, length)
    return _finish_table(panels, image, length, "Position", "Cosine similarity")


def mask_picture(
    mask: Mask | ArrayLike,
    T: int | None = None,
    S: int | None = None,
    *,
    query_offset: int | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> Drawing:
    """Draw which keys each query may attend to, in two colours told apart by lightness alone.

    Args:
        mask: a `regard.masks.Mask`, or a boolean (or integer, nonzero = may attend) array of shape (T, S).
        T: number of queries; a `Mask` needs it, an array knows it.
        S: number of keys; None means T for a `Mask`.
        query_offset: position of the first query, and number of its row; None: what the mask says, and 0.
        ax: where to draw; None makes a figure of its own.
        title: text above the picture; None names a `Mask` by its expression.

    Returns:
        A `Drawing` with the image (1 = may attend, 0 = masked) and the legend.

    Raises:
        ValueError: the mask is no matrix (the message says which index to take), is empty, or is not (T, S).
        TypeError: the array is neither boolean nor integer; additive masks are a bias.

    Example:
        >>> import numpy as np
        >>> from regard.inspection import figures
        >>> drawing = figures.mask_picture(np.tri(3, dtype=bool))
        >>> drawing.images[0].get_array().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    allowed = _read_mask(mask, T, S, query_offset)
    rows, columns = allowed.shape
    top = 0 if query_offset is None else int(query_offset)
    if title is None and isinstance(mask, Mask):
        expression = canvas.literal(repr(mask))
        title = expression if len(expression) <= LONGEST_TITLE else None
    target, panels = canvas.open_panel(ax, cell_axes.matrix_size(rows, columns), title)
    # Cells smaller than pixels are shaded by the share that is kept; larger ones have no third colour.
    shading = "nearest" if max(rows, columns) <= LARGEST_SHARP else "antialiased"
    style: dict[str, Any] = {"interpolation": shading, "interpolation_stage": "rgba", "vmin": 0, "vmax": 1}
    style["extent"] = (-0.5, columns - 0.5, top + rows - 0.5, top - 0.5)
    style["cmap"] = ListedColormap([palette.MASKED, palette.KEPT])
    image = target.imshow(allowed.astype(np.uint8), aspect=cell_axes.matrix_aspect(rows, columns), **style)
    cell_axes.mark_positions(target.yaxis, rows, start=top)
    cell_axes.mark_positions(target.xaxis, columns)
    outlines = cell_axes.separate_cells(target, rows, columns, top) if max(rows, columns) <= SEPARATED else ()
    target.set(**cell_axes.MATRIX_LABELS)
    allowing = Patch(facecolor=palette.KEPT, label="may attend")
    masking = Patch(facecolor=palette.MASKED, edgecolor="#9A9A9A", linewidth=0.5, label="masked")
    legend = canvas.add_side_legend(target, [allowing, masking], handlelength=1.0, handleheight=1.0)
    return panels.finish(images=(image,), outlines=outlines, legend=legend)


def _finish_table(panels: canvas.Panels, image: AxesImage, length: int, down: str, value: str) -> Drawing:
    """Name the axes, with positions across, and add the colour bar."""
    (ax,) = panels.axes
    cell_axes.mark_positions(ax.xaxis, length)
    ax.set(xlabel="Position", ylabel=down)
    return panels.finish(images=(image,), colorbar=panels.add_colorbar(image, value))


def _read_table(table: ArrayLike) -> NDArray[np.float64]:
    """Read a position table as float64 without infinities."""
    values = canvas.read_numbers(table, "table", "(length, d_model)", 2)
    if np.isinf(values).any():
        raise ValueError(f"table: expected finite values, got {int(np.isinf(values).sum())} infinite ones")
    return values


def _read_mask(mask: Mask | ArrayLike, T: int | None, S: int | None, query_offset: int | None) -> NDArray:
    """Read the mask as a boolean (T, S) matrix."""
    if isinstance(mask, Mask):
        if T is None:
            raise ValueError("T: a Mask has no size of its own; call mask_picture(mask, T, S)")
        allowed, source = np.asarray(mask.dense(T, S, query_offset=query_offset)), "mask.dense(T, S)"
    else:
        allowed, source = np.asarray(mask), "mask"
    if allowed.dtype.kind not in "bui":
        got = f"{canvas.describe(mask, allowed)}; an additive mask is no mask but a bias"
        raise TypeError(f"mask: expected a Mask, or booleans or integers of shape (T, S), got {got}")
    if allowed.ndim != 2 or allowed.size == 0:
        index = ", ".join("0" * (allowed.ndim - 2))
        hint = f"; choose one matrix, for example {source}[{index}]" if index else ""
        raise ValueError(f"mask: expected shape (T, S) with no axis of length 0, got {allowed.shape}{hint}")
    expected = (allowed.shape[0] if T is None else T, allowed.shape[1] if S is None else S)
    if allowed.shape != expected:
        raise ValueError(f"mask: expected shape (T, S) = {expected}, got {allowed.shape}")
    return allowed != 0
