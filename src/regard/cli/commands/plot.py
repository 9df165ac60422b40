"""`regard plot`: curves and attention of runs as files."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from regard.cli.console import Console, UsageError, expected_errors
from regard.cli.declaration import Command, Output, conf


@dataclass(frozen=True)
class Plot(Command):
    """Draw the curves, the heads and the attention of finished or running runs; several are also compared.

    Example: regard plot out/copy
    """

    ALIASES: ClassVar = {"runs": "RUN"}

    runs: Annotated[
        conf.Positional[tuple[Path, ...]], conf.arg(metavar="RUN ...", help_behavior_hint="(required)")
    ]
    """Run directories."""
    format: Literal["png", "svg", "pdf"] = "png"
    """Kind of files to write, into RUN/figures."""
    output: Output = Output()

    def run(self, console: Console) -> int:
        """Draw every run into its figures folder, and a comparison when there are several."""
        from regard.cli import pictures
        from regard.cli.sources import demand_run, load_run
        from regard.inspection.figures import training_curves
        from regard.training import metrics

        def save(drawn: Iterator[Any], directory: Path) -> None:
            for path in pictures.save_pictures(drawn, directory / "figures", self.format):
                console.say(str(path))
                console.emit("written", path=str(path))

        if not self.runs:
            raise UsageError("plot needs at least one run directory, such as: regard plot out/copy")
        for directory in self.runs:
            demand_run(directory)
        with expected_errors():
            loaded = [(directory, *load_run(directory)) for directory in self.runs]
            for _, task, _ in loaded:
                _ = task.held_out  # may be in files that are gone
            histories = {str(directory): metrics.read(directory / "metrics.jsonl") for directory in self.runs}
            for directory, task, model in loaded:
                drawn = pictures.draw_run(task, model, histories[str(directory)])
                if task.config.positions == "sinusoidal":
                    drawn = itertools.chain(drawn, pictures.draw_sinusoids(task.config.d_model))
                save(drawn, directory)
            if len(histories) > 1:
                save(iter([("comparison", training_curves(histories))]), self.runs[0])
        return 0
