"""Attention over the patches of a picture, laid over the picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import Colormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from numpy.typing import ArrayLike, NDArray

from regard.inspection.figures import canvas, cell_axes, palette
from regard.inspection.figures.canvas import Drawing

PatchGrid = tuple[int, int]


def scan_attention(
    image: ArrayLike,
    weights: ArrayLike,
    *,
    patch_grid: PatchGrid,
    ax: Axes | None = None,
    predicted_label: object | None = None,
    true_label: object | None = None,
    title: str | None = None,
    vmax: float | None = None,
    large_is_dark: bool = True,
) -> Drawing:
    """Draw a scan in grey and, over each patch, a veil as strong as the attention that patch gets.

    The veil varies in opacity alone, so the strokes beneath stay visible and no weight hides the scan. Lines
    mark the patches. A patch with weight zero has no veil, and neither has one with NaN.

    Args:
        image: shape (height, width), any range of values; the darkest ink is the largest.
        weights: shape (num_patches,), at least 0, patches counted row by row; for a classifier with attention
            pooling, one head of `aux["pooling"]["weights"][example, head, 0]` or the mean over heads.
        patch_grid: rows and columns of patches; they must divide height and width.
        ax: where to draw; None makes a figure of its own.
        predicted_label, true_label: what the model said and the scan shows, for a title, bold if they differ.
        title: replaces the title made from the labels.
        vmax: the weight with the strongest veil; None takes the largest weight. Give it to compare scans.
        large_is_dark: True for ink on paper, False for light on a sensor.

    Returns:
        A `Drawing` with two images (the scan, the weights as a grid), the patch lines and the colour bar.

    Raises:
        ValueError: a shape that does not fit (the message says which index to take), a negative weight, an
            image that is not finite, a `vmax` that is not positive.
        TypeError: `image` or `weights` holds no real numbers.

    Example:
        >>> import numpy as np
        >>> from regard.inspection import figures
        >>> scan = np.arange(64.0).reshape(8, 8)
        >>> drawing = figures.scan_attention(scan, np.full(16, 1 / 16), patch_grid=(4, 4), predicted_label=3)
        >>> drawing.images[1].get_array().shape, drawing.axes[0].get_title()
        ((4, 4), 'predicted 3')
    """
    scan = canvas.read_numbers(image, "image", "(height, width)", 2)
    pooled = "the pooled query is row 0: weights[example, head, 0]"
    flat = canvas.read_numbers(weights, "weights", "(num_patches,)", 1, more=pooled)
    _check_patches(scan[None], flat[None], patch_grid)
    vmax = _strongest(flat, vmax)
    target, panels = canvas.open_panel(ax, cell_axes.scaled_size(*scan.shape, longest=2.2), title)
    greys = palette.scan_greys(large_is_dark)
    images, outlines = _draw_scan(target, scan, flat.reshape(patch_grid), vmax, greys)
    if title is None:
        _set_verdict(target, predicted_label, true_label)
    bar = panels.add_colorbar(images[1], cell_axes.WEIGHT_LABEL)
    return panels.finish(images=images, outlines=outlines, colorbar=bar)


def scan_attention_grid(
    images: ArrayLike,
    weights: ArrayLike,
    *,
    patch_grid: PatchGrid,
    fig: Figure | SubFigure | None = None,
    columns: int | None = None,
    predicted_labels: Sequence[object] | None = None,
    true_labels: Sequence[object] | None = None,
    title: str | None = None,
    vmax: float | None = None,
    large_is_dark: bool = True,
) -> Drawing:
    """Draw the attention over several scans, one panel each, on one scale of weights and one of grey.

    Args:
        images: shape (num_scans, height, width).
        weights: shape (num_scans, num_patches), at least 0, patches counted row by row.
        patch_grid, vmax, large_is_dark: as in `scan_attention`, for all scans.
        fig, title: as in `head_grid`.
        columns: panels side by side; None takes up to 6.
        predicted_labels, true_labels: one a scan, as in `scan_attention`.

    Returns:
        A `Drawing` with one axes and two images a scan (it and its weights), patch lines, one colour bar.

    Raises:
        ValueError, TypeError: as `scan_attention`; a number of labels that does not fit.

    Example:
        >>> import numpy as np
        >>> from regard.inspection import figures
        >>> drawing = figures.scan_attention_grid(
        ...     np.ones((3, 8, 8)), np.full((3, 16), 1 / 16), patch_grid=(4, 4), true_labels=[5, 7, 9]
        ... )
        >>> [ax.get_title() for ax in drawing.axes]
        ['true 5', 'true 7', 'true 9']
    """
    shape = "(num_scans, height, width)"
    scans = canvas.read_numbers(images, "images", shape, 3, fewer="one scan is the stack images[None]")
    fewer = "one scan is the stack weights[None]"
    more = "choose a head, weights[:, head, 0], or take the mean of all, weights[:, :, 0].mean(1)"
    stack = canvas.read_numbers(weights, "weights", "(num_scans, num_patches)", 2, fewer=fewer, more=more)
    _check_patches(scans, stack, patch_grid)
    count = len(scans)
    canvas.read_labels(predicted_labels, "predicted_labels", count, "scan")
    canvas.read_labels(true_labels, "true_labels", count, "scan")
    vmax = _strongest(stack, vmax)
    rows, columns = cell_axes.grid_shape(count, min(6, count) if columns is None else columns)
    size = cell_axes.scaled_size(*scans.shape[1:], longest=1.25)
    panels = canvas.open_panels(fig, size, count, rows, columns, title)
    greys, limits = palette.scan_greys(large_is_dark), (float(scans.min()), float(scans.max()))
    shown, outlines = [], []
    for index, ax in enumerate(panels.axes):
        pair, lines = _draw_scan(ax, scans[index], stack[index].reshape(patch_grid), vmax, greys, limits)
        predicted = None if predicted_labels is None else predicted_labels[index]
        true = None if true_labels is None else true_labels[index]
        _set_verdict(ax, predicted, true, canvas.TICK_SIZE)
        shown.extend(pair)
        outlines.extend(lines)
    bar = panels.add_colorbar(shown[1], cell_axes.WEIGHT_LABEL)
    return panels.finish(images=tuple(shown), outlines=tuple(outlines), colorbar=bar)


def _draw_scan(
    ax: Axes,
    scan: NDArray,
    patches: NDArray,
    vmax: float,
    greys: Colormap,
    limits: tuple[float | None, float | None] = (None, None),
) -> tuple[tuple[AxesImage, AxesImage], tuple[LineCollection, LineCollection]]:
    """Draw the scan, the veil over it and the lines between patches, in pixel coordinates."""
    height, width = scan.shape
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    shared: dict[str, Any] = {"extent": extent, "interpolation": "nearest", "aspect": "equal"}
    below = ax.imshow(scan, cmap=greys, vmin=limits[0], vmax=limits[1], **shared)
    veil = ax.imshow(patches, cmap=palette.veil_colors(), vmin=0.0, vmax=vmax, **shared)
    rows, columns = patches.shape
    style: dict[str, Any] = {"colors": "0.6", "linewidths": 0.5}
    across = ax.hlines(np.arange(1, rows) * (height / rows) - 0.5, -0.5, width - 0.5, **style)
    down = ax.vlines(np.arange(1, columns) * (width / columns) - 0.5, -0.5, height - 0.5, **style)
    ax.set(xticks=[], yticks=[])  # pixels of a scan have no positions worth reading
    return (below, veil), (across, down)


def _set_verdict(ax: Axes, predicted: object, true: object, size: float = canvas.TITLE_SIZE) -> None:
    """Write the predicted and the true label as the title, bold where they differ."""
    named = {"predicted": predicted, "true": true}
    parts = [f"{word} {canvas.literal(label)}" for word, label in named.items() if label is not None]
    wrong = len(parts) == 2 and str(predicted) != str(true)
    canvas.set_title(ax, ", ".join(parts), size, fontweight="bold" if wrong else "normal")


def _check_patches(scans: NDArray, weights: NDArray, patch_grid: PatchGrid) -> None:
    """Refuse a grid that does not tile the scans, or weights that are not one a patch and at least 0."""
    is_whole = [isinstance(count, int | np.integer) and count >= 1 for count in patch_grid]
    if len(patch_grid) != 2 or not all(is_whole):
        raise ValueError(f"patch_grid: expected (rows, columns), whole and positive, got {patch_grid}")
    rows, columns = patch_grid
    height, width = scans.shape[1:]
    if height % rows or width % columns:
        size = f"{height} x {width} pixels"
        raise ValueError(f"patch_grid: expected (rows, columns) that divide {size}, got {patch_grid}")
    expected = (len(scans), rows * columns)
    if weights.shape != expected:
        wanted = f"{expected[1]} patches ({rows} x {columns}) for {expected[0]} image(s)"
        raise ValueError(f"weights: expected {wanted}, got {weights.shape[1]} for {weights.shape[0]}")
    if not np.isfinite(scans).all():
        raise ValueError("image: expected finite values, got NaN or infinity")
    shares = weights[~np.isnan(weights)]
    if shares.size and not (shares.min() >= 0.0 and np.isfinite(shares.max())):
        got = f"{shares.min():.4g} to {shares.max():.4g}"
        raise ValueError(f"weights: expected finite values of at least 0, got {got}")


def _strongest(weights: NDArray, vmax: float | None) -> float:
    """Return the weight at the end of the scale."""
    if vmax is None:
        return float(np.nanmax(weights, initial=0.0)) or 1.0
    if not vmax > 0.0:
        raise ValueError(f"vmax: expected a positive weight, got {vmax}")
    return vmax
