"""The command line: `regard demo | train | plot | explain | doctor`.

Only tyro and plain settings load before the arguments are understood, so that help and mistakes answer at
once. Exit codes: 0 done, 1 the run failed, 2 a wrong argument or setting, 130 interrupted.
"""

import sys
from collections.abc import Sequence

from regard.cli.commands import Command, Demo, Doctor, Explain, Plot, Train, parse_arguments
from regard.cli.console import Console, UsageError

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130


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
    command = parse_arguments(arguments)
    console = Console(json_lines=getattr(command, "json", False), quiet=getattr(command, "quiet", False))
    try:
        return _run(command, console)
    except UsageError as error:
        console.fail(str(error))
        return MISUSED
    except KeyboardInterrupt:
        console.fail("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python would complain once more while shutting down.
        sys.stderr.close()
        return OK


def _run(command: Command, console: Console) -> int:
    """Hands a command to its module, importing no other."""
    match command:
        case Train():
            from regard.cli.training import run_training

            return run_training(command, console)
        case Demo():
            from regard.cli.demonstration import run_demonstration

            return run_demonstration(command, console)
        case Plot():
            from regard.cli.plotting import run_plotting

            return run_plotting(command, console)
        case Explain():
            from regard.cli.explaining import run_explaining

            return run_explaining(command, console)
        case Doctor():
            from regard.cli.diagnosis import run_diagnosis

            return run_diagnosis(command, console)
