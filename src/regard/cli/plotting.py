"""`regard plot`: curves and attention of runs as files."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from regard.cli import pictures
from regard.cli.commands import Plot
from regard.cli.console import Console, UsageError, expected_errors
from regard.inspection.figures import training_curves
from regard.training import metrics, runs


def run_plotting(command: Plot, console: Console) -> int:
    """Draw every run into its figures folder, and a comparison when there are several."""
    if not command.runs:
        raise UsageError("plot needs at least one run directory, such as: regard plot out/copy")
    with expected_errors():
        loaded = [(directory, *runs.load_run(directory)) for directory in command.runs]
        for _, task, _ in loaded:
            _ = task.held_out  # may be in files that are gone
        histories = {str(directory): metrics.read(directory / "metrics.jsonl") for directory in command.runs}
    for directory, task, model in loaded:
        drawn = pictures.draw_run(task, model, histories[str(directory)])
        if task.config.positions == "sinusoidal":
            drawn = itertools.chain(drawn, pictures.draw_sinusoids(task.config.d_model))
        _save(drawn, directory, command, console)
    if len(histories) > 1:
        comparison = ("comparison", training_curves(histories))
        _save(iter([comparison]), command.runs[0], command, console)
    return 0


def _save(drawn: Iterator[pictures.Picture], directory: Path, command: Plot, console: Console) -> None:
    """Write pictures into a run's figures folder and print their paths."""
    for path in pictures.save_pictures(drawn, directory / "figures", command.format):
        console.say(str(path))
