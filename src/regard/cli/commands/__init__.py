"""The table of commands: a file and a line each, from which tyro makes flags and help."""

from regard.cli.commands.conformance import Conformance
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
from regard.cli.declaration import Command

# In the order of the help; each is called by its name in lower case.
COMMANDS: list[type[Command]] = [
    Demo, Train, Generate, Plot, Inspect, View, Explain, Plan, Tune, Conformance, Doctor,
]  # fmt: skip
