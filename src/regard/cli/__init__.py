"""The command line: `regard demo`, `train`, `generate`, `plot`, `inspect`, `view`, `explain`, `plan` ...

Only tyro and plain settings load before the arguments are understood, so that help and mistakes answer at
once. Exit codes: 0 done, 1 the run failed, 2 a wrong argument or setting, 130 interrupted.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.cli.console import Console

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
# Packages that `pip install regard` leaves out, by the name they are imported under.
EXTRAS = ("tyro", "rich", "flax", "optax", "orbax", "sklearn", "matplotlib", "safetensors", "tokenizers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        arguments: words after `regard`; None takes the process's own.

    Returns:
        0 done, 1 the run failed, 2 a wrong argument or setting, 130 interrupted.

    Raises:
        SystemExit: for help (0) and for arguments that cannot be understood (2).

    Example:
        >>> from regard.cli import main
        >>> main(["explain", "--shape", "2,3,5,7", "--mask", "causal()"])  # doctest: +ELLIPSIS
        arrays ...
        0
    """
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        sys.stderr.write(f"error: this needs {package}, which is not installed: pip install 'regard[all]'\n")
        return MISUSED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python would complain once more while shutting down.
        sys.stderr.close()
        return OK


def _run(arguments: Sequence[str] | None) -> int:
    """Understands the arguments, then runs the command; expected errors become messages."""
    from regard.cli.commands import parse_arguments
    from regard.cli.console import Console, UsageError

    command = parse_arguments(arguments)
    console = Console(json_lines=getattr(command, "json", False), quiet=getattr(command, "quiet", False))
    try:
        return _dispatch(command, console, sys.argv[1:] if arguments is None else arguments)
    except UsageError as error:
        console.fail(str(error))
        return MISUSED
    except KeyboardInterrupt:
        console.fail("interrupted")
        return INTERRUPTED


def _dispatch(command: Any, console: "Console", words: Sequence[str]) -> int:
    """Hands a command to its module, importing no other."""
    from regard.cli.commands import Demo, Doctor, Explain, Generate, Inspect, Plan, Plot, Train, Tune, View

    match command:
        case Train():
            from regard.cli.supervision import supervise_training

            return supervise_training(command, console, words)
        case Demo():
            from regard.cli.demonstration import run_demonstration

            return run_demonstration(command, console)
        case Generate():
            from regard.cli.generating import run_generating

            return run_generating(command, console)
        case Plot():
            from regard.cli.plotting import run_plotting

            return run_plotting(command, console)
        case Inspect():
            from regard.cli.inspecting import run_inspecting

            return run_inspecting(command, console)
        case View():
            from regard.cli.viewing import run_viewing

            return run_viewing(command, console)
        case Explain():
            from regard.cli.explaining import run_explaining

            return run_explaining(command, console)
        case Plan():
            from regard.cli.planning import run_planning

            return run_planning(command, console)
        case Tune():
            from regard.cli.tuning import run_tuning

            return run_tuning(command, console)
        case Doctor():
            from regard.cli.diagnosis import run_diagnosis

            return run_diagnosis(command, console)
    raise TypeError(f"command must be one of the dataclasses of regard.cli.commands, got {command!r}")
