"""The table of commands: a file and a line each, from which tyro makes flags and help."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from regard.cli.commands.demo import Demo
from regard.cli.commands.doctor import Doctor
from regard.cli.commands.explain import Explain
from regard.cli.commands.generate import Generate
from regard.cli.commands.inspect import Inspect
from regard.cli.commands.plan import Plan
from regard.cli.commands.plot import Plot
from regard.cli.commands.train import Train
from regard.cli.commands.tune import Tune
from regard.cli.commands.view import View
from regard.cli.declaration import Command, choice

# In the order of the help; each is called by its name in lower case.
COMMANDS: list[type[Command]] = [Demo, Train, Generate, Plot, Inspect, View, Explain, Plan, Tune, Doctor]


def parse_arguments(words: Sequence[str]) -> Command:
    """Turn words into a command.

    Raises:
        SystemExit: 0 after printing help, 2 after printing what was not understood and what is near it.
    """
    named: Any = choice({command.__name__.lower(): command for command in COMMANDS})
    # The field's name appears in errors about settings that do not fit together.
    line = dataclasses.make_dataclass("Line", [("regard", Annotated[named, tyro.conf.arg(name="")])])
    style = (
        tyro.conf.CascadeSubcommandArgs,  # `train copy --out DIR` as well as `train --out DIR copy`
        tyro.conf.OmitArgPrefixes,
        tyro.conf.OmitSubcommandPrefixes,
        tyro.conf.FlagCreatePairsOff,
    )
    description = "Attention for JAX: exact, composable, inspectable."
    return tyro.cli(line, prog="regard", description=description, args=words, config=style).regard
