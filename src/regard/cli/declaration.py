"""The parts of a command's declaration: its base class, the shape of an option, the options of output."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from regard.cli.console import Console

if TYPE_CHECKING:
    from tyro import conf
else:
    try:
        from tyro import conf
    except ModuleNotFoundError:
        from regard.cli import plain as conf


def option(metavar: str, default: str | None = None) -> Any:
    """Return the annotation of a flag: how it shows its value, and a default that depends on other flags."""
    return conf.arg(metavar=metavar, help_behavior_hint=default and f"(default: {default})")


def choice(named: Mapping[str, type]) -> Any:
    """Return the type of one of these subcommands."""
    return reduce(operator.or_, (Annotated[kind, conf.subcommand(name=name)] for name, kind in named.items()))


@dataclass(frozen=True)
class Output:
    """The streams that words go to."""

    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """JSON lines on standard output, text for people on standard error."""


class Command:
    """A command: a dataclass whose fields are its options and whose docstring is its help.

    Attributes:
        RUNS: module and function that run it, for a command that has no `run` of its own.
        CHOICES: its subcommands by name, for each field that holds one.
        EXTRA: the extra that brings what it needs; None for a command of the core.
        ALIASES: arguments of the library that are options of another name, and their fields.
    """

    RUNS: ClassVar[str]
    CHOICES: ClassVar[Mapping[str, Mapping[str, type]]] = {}
    EXTRA: ClassVar[str | None] = "all"
    ALIASES: ClassVar[Mapping[str, str]] = {}
    output: Any = Output()

    def load(self) -> Callable[..., int]:
        """Import the function that runs the command."""
        module, function = self.RUNS.split(":")
        return getattr(import_module(module), function)

    def run(self, console: Console) -> int:
        """Run the command and return the exit code."""
        return self.load()(self, console)
