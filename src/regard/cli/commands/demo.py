"""`regard demo`: its options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from regard.cli.declaration import Command, Output, option


@dataclass(frozen=True)
class Demo(Command):
    """Train four small tasks, draw what the models attend to, make pages of it, and check the goals.

    Finished runs in the output directory are reused; --force trains them again.

    Example: regard demo
    """

    RUNS = "regard.cli.demonstration:run_demonstration"
    ALIASES: ClassVar = {"directory": "out"}

    out: Annotated[Path | None, option("DIR", "out/demo, or out/demo-smoke")] = None
    """Output directory."""
    seed: int = 0
    """Seed of parameters, batches and dropout."""
    smoke: bool = False
    """Tiny models, 20 steps each: checks the plumbing, not the goals."""
    force: bool = False
    """Delete the runs in the output directory and start again."""
    output: Output = Output()
