"""Loss, bits per byte and accuracy over steps, for one run or several."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from regard.inspection.figures import canvas, palette
from regard.inspection.figures.canvas import Drawing

Records = Sequence[Mapping[str, Any]]
Curve = tuple[NDArray[np.float64], NDArray[np.float64]]

PANELS = {"loss": "Loss", "bits_per_byte": "Bits per byte", "accuracy": "Accuracy"}
SPLITS = {"": "training", "held_out_": "held out"}  # prefix of the metric's name -> what the legend says
PANEL_SIZE = (2.9, 1.95)  # inches
SPARSE = 30  # curves of up to this many points mark each


def training_curves(
    runs: Records | Mapping[str, Records],
    *,
    fig: Figure | SubFigure | None = None,
    loss_scale: Literal["linear", "log"] = "linear",
    title: str | None = None,
) -> Drawing:
    """Draw loss, bits per byte and accuracy over the steps of one run, or compare several.

    One run: training and held-out values in two colours. Several: a colour a run, held-out values dashed.
    Records may lack any metric; a value of None or NaN leaves a gap; a step logged twice counts with its last
    value. A metric that no record has gets no panel.

    Args:
        runs: the lines of a metrics.jsonl as dictionaries with `step` and any of `loss`, `bits_per_byte`,
            `accuracy`, and these with `held_out_` before them; or such lines by the run's name.
        fig, title: as in `head_grid`.
        loss_scale: "linear", or "log" for losses that fall by orders of magnitude.

    Returns:
        A `Drawing` with a panel a metric, the curves (panel by panel, run by run, training before held out),
        each with the label "RUN, training" or "RUN, held out", and the legend.

    Raises:
        ValueError: no metric to draw, one without step, an accuracy outside [0, 1], an unknown loss_scale.
        TypeError: a record is no dictionary, or a metric no number.

    Example:
        >>> from regard.inspection import figures
        >>> records = [{"step": 1, "loss": 0.7}, {"step": 2, "loss": 0.5, "held_out_accuracy": 0.8}]
        >>> drawing = figures.training_curves(records)
        >>> [ax.get_ylabel() for ax in drawing.axes]
        ['Loss', 'Accuracy']
        >>> [line.get_label() for line in drawing.lines]
        ['training', 'held out']
    """
    if loss_scale not in ("linear", "log"):
        raise ValueError(f"loss_scale: expected 'linear' or 'log', got {loss_scale!r}")
    named = dict(runs) if isinstance(runs, Mapping) else {"": runs}
    for name, records in named.items():
        if isinstance(records, Mapping) or not isinstance(records, Iterable):
            expected = "a list of records, or a dictionary from run name to such a list"
            raise TypeError(f"runs: expected {expected}, got {type(records).__name__} under {name!r}")
    named = {str(name): list(records) for name, records in named.items()}
    curves = _collect(named)
    shown = [metric for metric in PANELS if any(metric == key[0] for key in curves)]
    if not shown:
        metrics = ", ".join(prefix + metric for metric in PANELS for prefix in SPLITS)
        got = f"none in {len(named)} run(s) with {sum(map(len, named.values()))} record(s)"
        raise ValueError(f"runs: expected records with any of {metrics}, got {got}")
    styles = _choose_styles(list(named), isinstance(runs, Mapping))
    panels = canvas.open_panels(fig, PANEL_SIZE, len(shown), 1, len(shown), title)
    lines: list[Line2D] = []
    for ax, metric in zip(panels.axes, shown, strict=True):
        for (name, run, split), (steps, values) in curves.items():
            if name == metric:
                # Few points are marked, and a curve along the frame is drawn whole.
                marker, clip = "o" if len(steps) <= SPARSE else "", metric != "accuracy"
                style = {"linewidth": 1.2, "marker": marker, "markersize": 3.0, "clip_on": clip}
                lines += ax.plot(steps, values, **style, **styles[run, split])
        _dress_panel(ax, metric, loss_scale)
    return panels.finish(lines=tuple(lines), legend=_add_legend(panels.axes, lines, list(named)))


def _collect(runs: Mapping[str, Records]) -> dict[tuple[str, str, str], Curve]:
    """Collect the curves that exist, by (metric, run, split), in drawing order."""
    curves = {}
    for metric in PANELS:
        for run, records in runs.items():
            for prefix, split in SPLITS.items():
                points = sorted(_points(records, prefix + metric, run).items())
                steps, values = np.array(points, np.float64).reshape(-1, 2).T
                if np.isfinite(values).any():
                    curves[metric, run, split] = (steps, values)
    return curves


def _points(records: Records, metric: str, run: str) -> dict[float, float]:
    """Return one metric's values by step; later records win, None is NaN."""
    points: dict[float, float] = {}
    for index, record in enumerate(records):
        where = f"record {index}" + (f" of run {run!r}" if run else "")
        if not isinstance(record, Mapping):
            raise TypeError(f"runs: expected dictionaries, got {type(record).__name__} as {where}")
        if metric not in record:
            continue
        if record.get("step") is None:
            names = sorted(record)
            raise ValueError(f"runs: expected a 'step' beside {metric!r}, got only {names} in {where}")
        value = _number(record[metric], metric, where)
        if "accuracy" in metric and (value < 0.0 or value > 1.0):
            raise ValueError(f"runs: expected {metric!r} in [0, 1], got {value:g} in {where}")
        points[_number(record["step"], "step", where)] = value
    return points


def _number(value: Any, metric: str, where: str) -> float:
    """Return a metric as a float; JSON's null is NaN."""
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"runs: expected a number as {metric!r}, got {value!r} in {where}") from error


def _choose_styles(names: list[str], named: bool) -> dict[tuple[str, str], dict[str, Any]]:
    """Choose the style of each (run, split): colours tell splits apart in one run, runs in several."""
    alone = len(names) == 1
    styles: dict[tuple[str, str], dict[str, Any]] = {}
    for name, color in zip(names, palette.series_colors(len(names)), strict=True):
        for index, split in enumerate(SPLITS.values()):
            label = canvas.literal(f"{name}, {split}" if named else split)
            style = {"color": palette.SERIES[index] if alone else color, "label": label}
            dashes = "--" if index and not alone else "-"
            styles[name, split] = style | {"linestyle": dashes, "zorder": 2.0 + index / 2}
    return styles


def _dress_panel(ax: Axes, metric: str, loss_scale: str) -> None:
    """Set labels, grid and limits of one panel."""
    ax.set(xlabel="Step", ylabel=PANELS[metric])
    ax.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    canvas.open_frame(ax)
    if metric == "accuracy":
        ax.set_ylim(0.0, 1.0)
    elif loss_scale == "log":
        ax.set_yscale("log")
    elif ax.get_ylim()[0] < 0.0 <= min(float(np.nanmin(line.get_ydata())) for line in ax.lines):
        ax.set_ylim(bottom=0.0)


def _add_legend(axes: Sequence[Axes], lines: list[Line2D], names: list[str]) -> Legend:
    """Add the legend: inside the first panel for one run; for several a key each, beside the last panel."""
    if len(names) == 1:
        keys = {str(line.get_label()): line for line in reversed(lines)}
        # Loss falls and accuracy rises: these corners are free. "best" would be slow on long runs.
        corner = "upper right" if axes[0].get_ylabel() == PANELS["loss"] else "lower right"
        anchor: dict[str, Any] = {"loc": corner, "bbox_to_anchor": None, "borderaxespad": None}
        return canvas.add_side_legend(axes[0], [keys[label] for label in reversed(keys)], **anchor)
    named = zip(map(canvas.literal, names), palette.series_colors(len(names)), strict=True)
    keys = [Line2D([], [], color=color, linewidth=1.2, label=label) for label, color in named]
    styles = {str(line.get_linestyle()) for line in lines}
    for split, style in zip(SPLITS.values(), ("-", "--"), strict=True):
        if style in styles and "--" in styles:
            keys.append(Line2D([], [], color=palette.QUIET, linewidth=1.2, linestyle=style, label=split))
    return canvas.add_side_legend(axes[-1], keys)
