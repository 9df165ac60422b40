"""`regard plot`: its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from regard.cli.declaration import Command


@dataclass(frozen=True)
class Plot(Command):
    """Draw the curves, the heads and the attention of finished or running runs; several are also compared.

    Example: regard plot out/copy
    """

    RUNS = "regard.cli.plotting:run_plotting"

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    format: Literal["png", "svg", "pdf"] = "png"
    """Kind of files to write, into RUN/figures."""
