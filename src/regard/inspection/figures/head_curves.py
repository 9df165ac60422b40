"""Curves and histories of heads: by distance, by position and by training step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from regard.arguments import check_kind
from regard.inspection.figures import canvas, cell_axes, palette
from regard.inspection.figures.canvas import Drawing
from regard.readouts import Readout

PANEL_SIZE = (3.6, 2.3)  # inches
MOST_POINTS = 256  # of a curve over positions
MOST_NAMED = 12  # heads in a legend
DOTTED: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "markersize": 2.5}
ROW_HEIGHT, TALLEST = 0.16, 6.0  # inches


def distance_profile(
    readout: Readout,
    *,
    ax: Axes | None = None,
    heads: Sequence[int] | None = None,
    head_labels: Sequence[object] | None = None,
    title: str | None = None,
) -> Drawing:
    """Draw how much attention each head pays at each distance back, in bins that double.

    Args:
        readout: of `readouts.read`, with leading axes `(H,)` or none.
        heads: which heads; None means all.
        head_labels: their names; None counts "head 0", "head 1", ...
        ax, title: as in `attention_heatmap`.

    Returns:
        A `Drawing` with one curve a head, and the legend where there are at most 12.

    Raises:
        ValueError: other leading axes, a head that is not there, labels that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> from regard.inspection import figures
        >>> x = jnp.eye(5)
        >>> drawing = figures.distance_profile(readouts.read(x, x, mask=masks.causal(), scale=0.0))
        >>> [tick.get_text() for tick in drawing.axes[0].get_xticklabels()]
        ['0', '1', '2-3', '4-7']
    """
    masses, chosen, names = _choose(readout, "distance_mass", heads, head_labels)
    middle = masses.shape[1] // 2
    nonzero = np.flatnonzero((masses > 0).any(0))
    first, last = (min(nonzero[0], middle), max(nonzero[-1], middle)) if nonzero.size else (middle, middle)
    numbers = np.arange(first, last + 1) - middle
    target, panels = canvas.open_panel(ax, PANEL_SIZE, title)
    lines = []
    for head, name, color in zip(chosen, names, palette.series_colors(len(chosen)), strict=True):
        lines += target.plot(numbers, masses[head, first : last + 1], color=color, label=name, **DOTTED)
    target.set_xticks(numbers, [_name_distance(int(number)) for number in numbers])
    cell_axes.slant_labels(target.xaxis)
    target.set(xlabel="Distance back (tokens)", ylabel="Share of attention", ylim=(0.0, None))
    return _finish(panels, tuple(lines), len(chosen))


def entropy_profile(
    readout: Readout,
    *,
    ax: Axes | None = None,
    heads: Sequence[int] | None = None,
    head_labels: Sequence[object] | None = None,
    title: str | None = None,
) -> Drawing:
    """Draw how spread out each head reads, by the query's position.

    Beyond 256 queries a point is the mean over neighbours. The dashed line is the most there can be, the
    logarithm of the number of keys that a query may attend to, if to any, and the sink if there is one.

    Args:
        readout, ax, heads, head_labels, title: as in `distance_profile`.

    Returns:
        A `Drawing` with one curve a head, then the dashed line; the legend where there are at most 12 heads.

    Raises:
        ValueError: other leading axes, a head that is not there, labels that do not fit, no query.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> from regard.inspection import figures
        >>> x = jnp.eye(4)
        >>> drawing = figures.entropy_profile(readouts.read(x, x, mask=masks.causal(), scale=0.0))
        >>> [f"{value:.2f}" for value in drawing.lines[0].get_ydata()]
        ['0.00', '0.69', '1.10', '1.39']
    """
    entropies, chosen, names = _choose(readout, "entropy", heads, head_labels)
    keys = np.asarray(readout.keys, np.float64).reshape(entropies.shape)
    T = entropies.shape[1]
    if T == 0:
        raise ValueError("readout: expected at least one query, got none")
    size = -(-T // MOST_POINTS)
    places = _average(np.arange(T), np.ones(T, bool), size)
    target, panels = canvas.open_panel(ax, PANEL_SIZE, title)
    lines = []
    for head, name, color in zip(chosen, names, palette.series_colors(len(chosen)), strict=True):
        values = _average(entropies[head], keys[head] > 0, size)
        lines += target.plot(places, values, color=color, label=name, linewidth=1.0)
    sunk = np.asarray(readout.sink_mass).reshape(entropies.shape) > 0
    most = np.where(keys > 0, keys + sunk, 0)[chosen].max(0, initial=0)
    bound = _average(np.log(np.maximum(most, 1)), most > 0, size)
    dashed = {"color": palette.QUIET, "linewidth": 1.0, "linestyle": "--"}
    lines += target.plot(places, bound, label="even, log(keys)", **dashed)
    target.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    target.set(xlabel=cell_axes.QUERY_LABEL, ylabel="Entropy (nats)", ylim=(0.0, None))
    return _finish(panels, tuple(lines), len(chosen))


def head_history(
    steps: Sequence[int],
    names: Sequence[object],
    values: ArrayLike,
    *,
    ax: Axes | None = None,
    label: str = "Entropy (nats)",
    title: str | None = None,
) -> Drawing:
    """Draw one number of every head over the steps of a training: heads down, steps across.

    Args:
        steps: when the heads were looked at, one a column, increasing.
        names: of the heads, one a row.
        values: `(heads, steps)`, NaN in grey; `regard.training.head_statistics.read_heads` gives all three.
        label: what the numbers are.
        ax, title: as in `attention_heatmap`.

    Returns:
        A `Drawing` with the image and its colour bar.

    Raises:
        ValueError: values that do not fit steps and names, or none.
        TypeError: `values` holds no real numbers.

    Example:
        >>> from regard.inspection import figures
        >>> drawing = figures.head_history([0, 20], ["blocks.0 head 0"], [[1.5, 0.25]])
        >>> [tick.get_text() for tick in drawing.axes[0].get_xticklabels()]
        ['0', '20']
    """
    matrix = canvas.read_numbers(values, "values", "(heads, steps)", 2)
    if matrix.shape != (len(names), len(steps)):
        expected = f"shape {(len(names), len(steps))}, a row a name and a column a step"
        raise ValueError(f"values: expected {expected}, got {matrix.shape}")
    panel = (PANEL_SIZE[0], min(max(ROW_HEIGHT * len(names), 0.8), TALLEST))
    room = canvas.measure_room([canvas.shorten_name(name) for name in names])
    target, panels = canvas.open_panel(ax, panel, title, room=(room, 0.0))
    finite = np.where(np.isfinite(matrix), matrix, np.nan)
    image = target.imshow(finite, cmap=palette.weight_colors(), aspect="auto", interpolation="nearest")
    shown = range(0, len(steps), -(-len(steps) // 8))
    target.set_xticks(shown, [str(steps[index]) for index in shown])
    cell_axes.mark_positions(target.yaxis, len(names), names)
    target.tick_params(axis="y", labelsize=canvas.TICK_SIZE - 1)
    target.set(xlabel="Step")
    return panels.finish(images=(image,), colorbar=panels.add_colorbar(image, label))


def _choose(
    readout: Readout, statistic: str, heads: Sequence[int] | None, head_labels: Sequence[object] | None
) -> tuple[NDArray[np.float64], list[int], list[str]]:
    """Return a statistic `(H, n)`, which heads to draw, and their names."""
    check_kind("readout", readout, Readout)
    array = cell_axes.read_heads(getattr(readout, statistic))
    chosen = list(range(len(array))) if heads is None else list(heads)
    wrong = [head for head in chosen if head not in range(len(array))]
    if wrong or not chosen:
        raise ValueError(f"heads: expected numbers in 0..{len(array) - 1}, got {wrong or chosen}")
    labels = [f"head {head}" for head in chosen] if head_labels is None else head_labels
    return array, chosen, canvas.read_labels(labels, "head_labels", len(chosen), "head")


def _average(values: NDArray, is_known: NDArray, size: int) -> NDArray:
    """Average every `size` neighbours, over those that are known; NaN where none is."""
    missing = -len(values) % size
    sums = np.pad(np.where(is_known, values, 0.0), (0, missing)).reshape(-1, size).sum(1)
    counts = np.pad(is_known, (0, missing)).reshape(-1, size).sum(1)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _name_distance(number: int) -> str:
    """Name the distances of a bin: 0, 1, 2-3, 4-7 back, or as many ahead with a minus sign."""
    if number == 0:
        return "0"
    ends = 2 ** (abs(number) - 1), 2 ** abs(number) - 1
    names = dict.fromkeys(str(end) if end < 1024 else f"{(end + 1) // 1024}k" for end in ends)
    return ("\N{MINUS SIGN}" if number < 0 else "") + "-".join(names)


def _finish(panels: canvas.Panels, lines: tuple, heads: int) -> Drawing:
    """Add the grid, and a legend beside the panel where it can name all heads."""
    (ax,) = panels.axes
    canvas.open_frame(ax)
    legend = canvas.add_side_legend(ax, lines) if heads <= MOST_NAMED else None
    return panels.finish(lines=lines, legend=legend)
