"""`regard tune`: settings of tiles that are faster here, kept for later calls of `attend`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from regard.cli.console import Console, UsageError, expected_errors, new_table
from regard.cli.declaration import Command, Output, option

if TYPE_CHECKING:
    from rich.table import Table

    from regard.tuning import Findings


@dataclass(frozen=True)
class Tune(Command):
    """Measure which tiles are faster here than those by default; later calls of attend use them.

    Example: regard tune --dry-run
    """

    EXTRA = "train"

    seconds: Annotated[float, option("N")] = 45.0
    """The time after which no further value is tried; what was found is then measured once more."""
    dry_run: bool = False
    """Print what was found and write nothing."""
    output: Output = Output()

    def run(self, console: Console) -> int:
        """Find the tuning, show what it was chosen from, and write it unless asked not to."""
        from regard import tuning
        from regard.engine.flash import measurements

        if not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds must be above 0 and finite, got {self.seconds}")
        console.say(f"measuring for {measurements.device_key()}")
        with console.show_steps() as begin:
            findings = tuning.measure_tuning(tuning.QUESTIONS, self.seconds, begin)
        for table in _tabulate(findings):
            console.say()
            console.say(table)
        console.say()
        if findings.unasked:
            unasked = ", ".join(findings.unasked)
            console.say(f"not asked in {self.seconds:g} s: {unasked}; --seconds gives more")
        console.emit("tuning", **asdict(findings.tuning), ratio=findings.ratio)
        path = measurements.cache_file()
        if self.dry_run:
            console.say(f"a dry run: {path} is left as it is")
        else:
            with expected_errors():
                measurements.write_tuning(path, findings.tuning)
            measurements.load_kept.cache_clear()
            console.say(f"written: {path}")
        console.say(_gain(findings))
        return 0


def _gain(findings: Findings) -> str:
    if not findings.ratios:
        return "gained: nothing, the defaults are as fast here as anything that was tried"
    count = len(findings.ratios)
    calls = "the one call" if count == 1 else f"the {count} calls"
    return f"gained: of what was measured, {calls} that it changes take {findings.ratio:.2f} of their time"


def _tabulate(findings: Findings) -> Iterator[Table]:
    """Return tables of what was tried, and of the choice beside the defaults."""
    from regard.engine.flash.measurements import default_tuning

    trials = new_table("setting", "tried", "instead of", "time", "")
    for trial in findings.trials:
        verdict = "kept" if trial.kept else ""
        trials.add_row(trial.setting, f"{trial.value:,}", f"{trial.before:,}", f"{trial.ratio:.3f}", verdict)
    yield trials
    default = default_tuning()
    choice = new_table("setting", "chosen", "default")
    for name, value in asdict(findings.tuning).items():
        choice.add_row(name, f"{value:,}", f"{getattr(default, name):,}")
    yield choice
