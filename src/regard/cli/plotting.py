"""`regard plot`: curves and attention of runs as files."""

import itertools

from regard.cli.commands import Plot
from regard.cli.console import Console, UsageError
from regard.cli.training import expected_errors


def run_plotting(command: Plot, console: Console) -> int:
    """Draws every run into its figures folder, and a comparison when there are several."""
    if not command.runs:
        raise UsageError("plot needs at least one run directory, such as: regard plot out/copy")
    with expected_errors():
        from regard.cli import pictures  # matplotlib may be missing: an expected error
        from regard.training import metrics, runs

        histories = {}
        for directory in command.runs:
            task, model = runs.load_run(directory)
            lines = metrics.read(directory / "metrics.jsonl")
            histories[str(directory)] = lines
            drawn = pictures.draw_run(task, model, lines)
            if task.config.positions == "sinusoidal":
                drawn = itertools.chain(drawn, pictures.draw_sinusoids(task.config.d_model))
            for path in pictures.save_pictures(drawn, directory / "figures", command.format):
                console.say(str(path))
        if len(histories) > 1:
            folder = command.runs[0] / "figures"
            comparison = iter([("comparison", pictures.draw_comparison(histories))])
            for path in pictures.save_pictures(comparison, folder, command.format):
                console.say(str(path))
    return 0
