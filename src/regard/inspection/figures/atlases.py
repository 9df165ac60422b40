"""Many heads on one page, and one head with its margins: attention that is too long to draw cell by cell."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from regard.arguments import check_kind
from regard.inspection.figures import canvas, cell_axes, palette
from regard.inspection.figures.canvas import Drawing
from regard.readouts import Readout

THUMBNAIL, LARGEST = 0.62, 8.0  # inches
GAP = 0.06  # share of a thumbnail
MOST_BLOCKS = 64  # along a side of a thumbnail
SMALLEST = 1e-4  # where the logarithmic scale ends
STRIP = 0.07  # share of the map's side
BLOCK_LABELS = {"mass": "Weight per row and block", "max": "Largest weight in the block"}

# Where the colour bar ends in an arrow: weights below the last value of the logarithmic scale exist.
ARROWS: dict[str, canvas.Arrow] = {"log": "min", "linear": "neither"}

Channel = Literal["mass", "max"]
Scale = Literal["log", "linear"]


def head_atlas(
    readouts: Readout | Sequence[Readout],
    *,
    ax: Axes | None = None,
    channel: Channel = "mass",
    scale: Scale = "log",
    layer_labels: Sequence[object] | None = None,
    title: str | None = None,
) -> Drawing:
    """Draw every head of every layer as a thumbnail, layers down and heads across, on one scale.

    Thumbnails show blocks: the weight that an average row of a block gives to a block of keys, or the largest
    in it, which keeps single strong cells visible. Queries go down, keys across; no weight is grey.

    Args:
        readouts: of `readouts.read` with leading axes `(H,)`, one per layer.
        channel: "mass" or "max".
        scale: "log" from 0.0001 to 1, or "linear" from 0 to 1.
        layer_labels: names of the layers; None counts from 0.
        ax, title: as in `attention_heatmap`.

    Returns:
        A `Drawing` with one image a head, layer by layer, and the one colour bar.

    Raises:
        ValueError: no readout, or other leading axes; labels that do not fit; an unknown channel or scale.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> from regard.inspection import figures
        >>> x = jnp.ones((3, 7, 5))
        >>> drawing = figures.head_atlas(readouts.read(x, x, mask=masks.causal()))
        >>> len(drawing.images), [tick.get_text() for tick in drawing.axes[0].get_xticklabels()]
        (3, ['0', '1', '2'])
    """
    check_kind("readouts", readouts, Readout, Sequence)
    layers = [readouts] if isinstance(readouts, Readout) else list(readouts)
    grids = [_read_blocks(layer, channel) for layer in layers]
    if not grids:
        raise ValueError("readouts: expected at least one, got none")
    canvas.read_labels(layer_labels, "layer_labels", len(grids), "readout")
    across = max(len(grid) for grid in grids)
    side = min(THUMBNAIL, LARGEST / max(across, len(grids)))
    panel = (max(across * side, 1.2), max(len(grids) * side, 1.2))
    # Long names of layers need room before the panel gets its size.
    room = max(2.5, canvas.measure_room([canvas.shorten_name(name) for name in layer_labels or ()]))
    target, panels = canvas.open_panel(ax, panel, title, room=(room, 1.5))
    half, shades = (1 - GAP) / 2, _shades(scale)
    images = []
    for layer, grid in enumerate(grids):
        for head, blocks in enumerate(grid):
            extent = (head - half, head + half, layer + half, layer - half)
            images.append(_show(target, blocks, extent, "auto", shades))
    target.set(xlim=(-0.5, across - 0.5), ylim=(len(grids) - 0.5, -0.5), xlabel="Head", ylabel="Layer")
    cell_axes.mark_positions(target.xaxis, across)
    cell_axes.mark_positions(target.yaxis, len(grids), layer_labels)
    target.tick_params(length=0.0)
    target.spines[:].set_visible(False)
    bar = panels.add_colorbar(images[0], BLOCK_LABELS[channel], ARROWS[scale])
    return panels.finish(images=tuple(images), colorbar=bar)


def head_map(
    readout: Readout,
    head: int = 0,
    *,
    weights: ArrayLike | None = None,
    first_row: int = 0,
    first_column: int = 0,
    ax: Axes | None = None,
    channel: Channel = "mass",
    scale: Scale = "log",
    title: str | None = None,
) -> Drawing:
    """Draw one head, whole in blocks or a window of it by cells, with its entropy and key mass as margins.

    The strip on the right is the entropy of each row in nats, the one above the weight that each key gets
    from all rows together; both are of the whole head, also beside a window.

    Args:
        readout: of `readouts.read`, with leading axes `(H,)` or none.
        head: which head.
        weights: exact weights `(R, C)`, as `readouts.window` gives for one head; None draws all, in blocks.
        first_row, first_column: the query and the key that the window begins with.
        ax, channel, scale, title: as in `head_atlas`; the channel is that of the blocks.

    Returns:
        A `Drawing` with axes of map, entropy and key mass, one image, the strips as lines, the colour bar.

    Raises:
        ValueError: other leading axes, a head or a window that is not there, an unknown channel or scale.
        TypeError: `weights` holds no real numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> from regard.inspection import figures
        >>> x = jnp.eye(5)
        >>> readout = readouts.read(x, x, mask=masks.causal())
        >>> window = readouts.window(x, x, readout.lse, mask=masks.causal(), rows=slice(2, 5))
        >>> drawing = figures.head_map(readout, weights=window, first_row=2)
        >>> drawing.images[0].get_array().shape, [float(end) for end in drawing.axes[0].get_ylim()]
        ((3, 5), [4.5, 1.5])
    """
    check_kind("readout", readout, Readout)
    entropies = cell_axes.read_heads(np.where(readout.empty, np.nan, readout.entropy))
    if head not in range(len(entropies)):
        raise ValueError(f"head: expected a number in 0..{len(entropies) - 1}, got {head}")
    entropy, mass = entropies[head], cell_axes.read_heads(readout.key_mass)[head]
    T, S = len(entropy), len(mass)
    if weights is None:
        grid = _read_blocks(readout, channel, most=max(T, S))[head]
        rows, columns = (0, T), (0, S)
        label, block = BLOCK_LABELS[channel], (readout.query_block, readout.key_block)
    else:
        grid = canvas.read_numbers(weights, "weights", "(R, C)", 2)
        rows = (first_row, first_row + grid.shape[0])
        columns = (first_column, first_column + grid.shape[1])
        label, block = cell_axes.WEIGHT_LABEL, (1, 1)
        if min(first_row, first_column) < 0 or rows[1] > T or columns[1] > S:
            got = f"rows {rows[0]}..{rows[1] - 1} and columns {columns[0]}..{columns[1] - 1}"
            hint = "pass first_row and first_column"
            raise ValueError(f"weights: expected a window inside {T} x {S}, got {got}; {hint}")
    shape = rows[1] - rows[0], columns[1] - columns[0]
    # A map is for looking closely, so it takes the page's width.
    size = cell_axes.scaled_size(*shape, cell_axes.LONGEST_SIDE, cell_axes.SHORTEST_SIDE)
    target, panels = canvas.open_panel(ax, size)
    # The last block may hold fewer rows than the others: it reaches beyond, and the limits cut it.
    ends = rows[0] + grid.shape[0] * block[0], columns[0] + grid.shape[1] * block[1]
    extent = (columns[0] - 0.5, ends[1] - 0.5, ends[0] - 0.5, rows[0] - 0.5)
    image = _show(target, grid, extent, cell_axes.matrix_aspect(*shape), _shades(scale))
    target.set(xlim=(columns[0] - 0.5, columns[1] - 0.5), ylim=(rows[1] - 0.5, rows[0] - 0.5))
    cell_axes.mark_positions(target.yaxis, shape[0], start=rows[0])
    cell_axes.mark_positions(target.xaxis, shape[1], start=columns[0])
    target.set(**cell_axes.MATRIX_LABELS)
    strips = _draw_strips(target, entropy, mass, rows, columns)
    canvas.set_title(strips[1].axes if title else target, title)
    bar = panels.add_colorbar(image, label, ARROWS[scale])
    axes = (target, strips[0].axes, strips[1].axes)
    return panels.finish(axes=axes, images=(image,), lines=strips, colorbar=bar)


def _draw_strips(
    ax: Axes, entropy: NDArray, mass: NDArray, rows: tuple[int, int], columns: tuple[int, int]
) -> Any:
    """Draw entropy on the right of the map and key mass above it, on the map's own positions."""
    style: dict[str, Any] = {"color": palette.KEPT, "linewidth": 0.8}
    right = ax.inset_axes((1.02, 0.0, STRIP, 1.0))
    above = ax.inset_axes((0.0, 1.02, 1.0, STRIP))
    (first,) = right.plot(entropy[slice(*rows)], np.arange(*rows), **style)
    (second,) = above.plot(np.arange(*columns), mass[slice(*columns)], **style)
    right.set(ylim=ax.get_ylim(), yticks=[], xlim=(0.0, None), xlabel="entropy\n(nats)")
    above.set(xlim=ax.get_xlim(), xticks=[], ylim=(0.0, None), ylabel="key\nmass")
    above.yaxis.label.set(rotation=0, horizontalalignment="right", verticalalignment="center")
    for strip, axis in ((right, right.xaxis), (above, above.yaxis)):
        canvas.style_axes(strip, canvas.TICK_SIZE - 1, canvas.TICK_SIZE - 2, length=2.0)
        strip.spines[["top", "right"]].set_visible(False)
        # The 0 would run into the last number of the map's own axis.
        axis.set_major_locator(MaxNLocator(nbins=2, prune="lower"))
    return first, second


def _read_blocks(readout: Readout, channel: str, most: int = MOST_BLOCKS) -> NDArray[np.float64]:
    """Return blocks `(H, I, J)` of one channel, at most `most` along a side; NaN where no row reads."""
    if channel not in BLOCK_LABELS:
        raise ValueError(f"channel: expected 'mass' or 'max', got {channel!r}")
    check_kind("readout", readout, Readout)
    shape = readout.block_mass.shape
    if len(shape) > 3:
        hint = "choose an example, for instance jax.tree.map(lambda x: x[0], readout)"
        raise ValueError(f"readout: expected leading axes (H,), got {shape[:-2]}; {hint}")
    if 0 in shape:
        raise ValueError("readout: expected at least one head, row and key, got none")
    number = (-(-max(shape[-2:]) // most) - 1).bit_length()
    level = readout.level(min(number, readout.num_levels - 1))
    blocks = np.asarray(level.mass if channel == "mass" else level.max, np.float64)
    blocks = np.where(np.asarray(level.rows)[..., None] > 0, blocks, np.nan)
    return blocks if blocks.ndim == 3 else blocks[None]


def _shades(scale: str) -> dict[str, Any]:
    """Return the colours of weights; NaN is grey, and stands for 0: no weight looks unlike little weight."""
    if scale not in ("log", "linear"):
        raise ValueError(f"scale: expected 'log' or 'linear', got {scale!r}")
    norm = LogNorm(SMALLEST, 1.0) if scale == "log" else Normalize(0.0, 1.0)
    return {"cmap": palette.weight_colors().with_extremes(bad=palette.MASKED), "norm": norm}


def _show(ax: Axes, weights: NDArray, extent: Any, aspect: Any, shades: dict[str, Any]) -> AxesImage:
    shown = np.where(weights > 0, weights, np.nan)
    return ax.imshow(shown, extent=extent, aspect=aspect, interpolation="nearest", **shades)
