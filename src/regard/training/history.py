"""The course of a training run for the explorer's page: curves by step, and maps of head x step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.paths import read_path
from regard.training import head_statistics, metrics

UNITS = {"loss": "nats", "bits_per_byte": "bits per byte", "accuracy": "share", "token_accuracy": "share"}
UNITS |= {"learning_rate": "", "grad_norm": "", "parameter_norm": ""}
LEAST_SECONDS = 0.01  # that a rate is measured over: clocks are logged in milliseconds
MAPS = {"entropy": "nats", "max_score": "logit"}


def training_document(run_directory: str | Path) -> dict[str, Any]:
    """Collect what a run logged, finished or not, in the form of the "training" part of an explorer page.

    Returns:
        A dict of "title" (the directory's name), "curves" and "maps". A curve has "name", "unit", "split"
        ("train", "test" or None) and "points", float32 (2, n): steps and values, NaN where a value was not
        finite. A map has "name" ("entropy" or "max_score"), "unit", "rows" (one name per head), "steps" and
        "values", float32 (heads, steps). What the run did not log is left out.

    Raises:
        ValueError: where a line of metrics.jsonl is damaged, naming it.
    """
    directory = read_path("run_directory", run_directory)
    lines = metrics.read(directory / "metrics.jsonl")
    curves = []
    for name, unit in UNITS.items():
        train, test = metrics.columns(lines, name), metrics.columns(lines, f"held_out_{name}")
        # A learning rate is not of one set of data.
        splits = {"train" if test[0] else None: _join(*train), "test": _join(*test)}
        shown = {split: points for split, points in splits.items() if points.shape[1]}
        for split, points in shown.items():
            curves.append({"name": name, "unit": unit, "split": split, "points": points})
    rates = _measure_rates(*metrics.columns(lines, "seconds"))
    if rates.shape[1]:
        curves.append({"name": "steps_per_second", "unit": "1/s", "split": None, "points": rates})
    maps = []
    for name, unit in MAPS.items():
        steps, rows, values = head_statistics.read_heads(lines, name)
        if rows:
            held = {"rows": rows, "steps": steps, "values": values.astype(np.float32)}
            maps.append({"name": name, "unit": unit, **held})
    return {"title": directory.resolve().name, "curves": curves, "maps": maps}


def _join(steps: Sequence[int], values: Sequence[float]) -> np.ndarray:
    """Stack steps above values; a step logged twice counts with its last value."""
    points = dict(zip(steps, values, strict=True))
    return np.asarray([[*points], [*points.values()]], np.float32).reshape(2, len(points))


def _measure_rates(steps: Sequence[int], seconds: Sequence[float]) -> np.ndarray:
    """Return the steps per second of training between the logged steps.

    Lines that were written together, far closer than others, say nothing of the time between them: the last
    of them stands for all.
    """
    spans = np.diff(np.asarray(seconds, float))
    least = max(LEAST_SECONDS, 0.1 * np.median(spans[spans > 0])) if (spans > 0).any() else LEAST_SECONDS
    rates: list[tuple[float, float]] = []
    later = None
    for step, clock in reversed(list(zip(steps, seconds, strict=True))):
        if later is not None:
            gap, span = later[0] - step, later[1] - clock
            if gap <= 0 or span < least:
                continue
            rates.append((later[0], gap / span))
        later = (step, clock)
    return np.asarray(rates[::-1], np.float32).reshape(-1, 2).T
