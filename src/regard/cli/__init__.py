"""The command line: `main` runs one of the commands that `commands.COMMANDS` lists.

Only tyro, rich and plain settings load before the arguments are understood, so that help and mistakes
answer at once; versions, the overview and commands without an `EXTRA` do without tyro and rich, too. Exit
codes: 0 done, 1 the run failed, 2 a wrong argument or setting, 130 interrupted.
"""

import codecs
import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from regard.loading import remedy

OK, FAILED, MISUSED, INTERRUPTED = 0, 1, 2, 130
# Packages that `pip install regard` leaves out, by the name they are imported under.
EXTRAS = ("tyro", "rich", "flax", "optax", "orbax", "filelock", "sklearn", "matplotlib")
EXTRAS += ("safetensors", "tokenizers")
# What is written where a terminal or a file has ASCII alone; a question mark stands for the rest.
PLAIN = {"■": "#", "▒": "+", "·": ".", "•": "*", "×": "x", "…": "...", "–": "-", "—": "-"}
PLAIN |= zip("▁▂▃▄▅▆▇█", "_.,-=+*#", strict=True)


def write_plain(error: UnicodeError) -> tuple[str, int]:
    """Replace characters that an encoding lacks by some that it has."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


codecs.register_error("plain", write_plain)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The variable REGARD_TASKS names files or modules with tasks of your own: see `training.tasks.load_tasks`.

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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="plain")
    if not os.environ.get("COLUMNS", "").strip("0"):
        os.environ.pop("COLUMNS", None)  # in a width of 0 nothing would be written
    words = sys.argv[1:] if arguments is None else arguments
    try:
        # Another program, such as a notebook, is not left.
        return _run(words, leaves=arguments is None)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        from regard.cli.command_words import find_extra

        extra = find_extra(words)
        sys.stderr.write(f"error: this needs {package}, which is not installed: {remedy(extra)}\n")
        return MISUSED
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough; Python would complain once more while shutting down.
        sys.stderr.close()
        return OK


def _run(words: Sequence[str], *, leaves: bool) -> int:
    """Understand the arguments, then run the command; expected errors become messages."""
    if os.environ.get("NO_COLOR"):
        os.environ.setdefault("PYTHON_TYRO_ANSI_CODES", "False")  # read when tyro is imported
    from regard.cli.console import Console, UsageError, expected_errors
    from regard.cli.interruption import leave_soon
    from regard.training.tasks import load_named_tasks

    try:
        with expected_errors():
            load_named_tasks()
    except UsageError as error:
        Console().fail(str(error))
        return MISUSED
    # Which makes an option of every setting of every task.
    from regard.cli.command_words import parse_arguments, translate_message

    command = parse_arguments(words)
    output = command.output
    console = Console(json_lines=output.json, quiet=output.quiet, words=words)
    try:
        with leave_soon("error: interrupted\n") if leaves else nullcontext():
            if command.EXTRA:
                import_module("rich")  # which the first table would miss, after the work
            return command.run(console)
    except UsageError as error:
        console.fail(translate_message(str(error), command))
        return error.code
    except KeyboardInterrupt:
        console.fail("interrupted")
        return INTERRUPTED
