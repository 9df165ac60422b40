"""`regard tune`: the tiles and thresholds that are fastest here, kept for later calls of `attend`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from regard.cli.console import Console, UsageError, expected_errors, new_table
from regard.cli.declaration import Command, Output, option

if TYPE_CHECKING:
    from rich.table import Table

    from regard.tuning import Findings

ROUNDS, QUICK_ROUNDS = 7, 3


@dataclass(frozen=True)
class Tune(Command):
    """Measure which tiles are fastest here, and from which size on; later calls of attend use it.

    Example: regard tune --quick
    """

    EXTRA = "train"

    rounds: Annotated[int | None, option("N", "7, with --quick 3")] = None
    """The number of times that each is timed; the median counts."""
    quick: bool = False
    """A first look at a few sizes; nothing is written."""
    dry_run: bool = False
    """Print what was found and write nothing."""
    output: Output = Output()

    def run(self, console: Console) -> int:
        """Find the tuning, show what it was chosen from, and write it unless asked not to."""
        from regard import tuning
        from regard.engine.flash import tuning as engine_tuning

        rounds = self.rounds or (QUICK_ROUNDS if self.quick else ROUNDS)
        if self.rounds is not None and self.rounds < 1:
            raise UsageError(f"--rounds must be at least 1, got {self.rounds}")
        grid = tuning.choose_grid(quick=self.quick)
        console.say(f"measuring for {engine_tuning.device_key()}")
        with console.show_steps() as begin:
            findings = tuning.measure_tuning(grid, rounds, begin)
        for table in _tabulate(findings):
            console.say()
            console.say(table)
        console.say()
        console.emit("tuning", **dataclasses.asdict(findings.tuning))
        path = engine_tuning.cache_file()
        if self.dry_run or self.quick:
            kind = "a dry run" if self.dry_run else "a quick look"
            console.say(f"{kind}: {path} is left as it is")
            return 0
        with expected_errors():
            engine_tuning.write_tuning(path, findings.tuning)
        engine_tuning.load_tuning.cache_clear()
        console.say(f"written: {path}")
        return 0


def _tabulate(findings: Findings) -> Iterator[Table]:
    """Return tables of tiles, thresholds, and the choice beside the defaults."""
    from regard.engine.flash.tuning import default_tuning

    tiles = new_table("tile side", "cells", "forward", "with backward")
    for (side, cells), mean in findings.forward.items():
        tiles.add_row(str(side), f"{cells:,}", f"{mean:.3f}", f"{findings.backward[side, cells]:.3f}")
    yield tiles
    points = new_table("threshold", "size", "dense / tiled")
    for name, measured in findings.thresholds.items():
        for point in measured:
            points.add_row(name, f"{point.size:,}", f"{point.dense_seconds / point.tiled_seconds:.3f}")
    yield points
    default = default_tuning()
    choice = new_table("setting", "chosen", "default")
    for name, value in dataclasses.asdict(findings.tuning).items():
        choice.add_row(name, f"{value:,}", f"{getattr(default, name):,}")
    yield choice
