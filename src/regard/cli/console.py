"""The streams of a command: text for people, JSON lines for programs, errors on standard error."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.paths import name_final
from regard.training.metrics import replace_nonfinite

if TYPE_CHECKING:
    from rich.console import Console as Printer
    from rich.console import RenderableType
    from rich.progress import TaskID
    from rich.table import Table
else:
    try:
        from rich.console import Console as Printer
    except ModuleNotFoundError:
        from regard.cli.plain import Printer

LABEL_WIDTH = 11
# A model may write anything, and a terminal obeys control characters: pictures stand for them there.
_UNSEEN = (*range(128, 160), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
VISIBLE |= dict.fromkeys(_UNSEEN, 0xFFFD)
_SYSTEM_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free some space"),
    errno.EROFS: "; name a place where you may write",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "; name one that you may read and write"),
}


class UsageError(Exception):
    """A wrong argument, setting or directory: the message is for the user."""

    code = 2


class RunFailedError(UsageError):
    """A command that could not be finished, by no fault of its arguments."""

    code = 1


@contextmanager
def expected_errors() -> Iterator[None]:
    """Turn errors about settings, directories and missing packages into messages without a traceback."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader has seen enough; `main` knows
    except OSError as error:
        raise UsageError(_describe_refusal(error)) from error
    except (ValueError, TypeError, ImportError, OverflowError) as error:
        raise UsageError(str(error)) from error


def _describe_refusal(error: OSError) -> str:
    """Describe what the system refused, by the name of the file that was asked for."""
    if error.strerror is None:
        return str(error)
    remedy = _SYSTEM_REMEDIES.get(error.errno or 0, "")
    if error.filename is None:
        return f"{error.strerror}{remedy}"
    return f"{name_final(Path(os.fsdecode(error.filename)))}: {error.strerror}{remedy}"


@contextmanager
def enough_memory(what: str, remedy: str) -> Iterator[None]:
    """Turn the error of JAX about memory that is too small into a message."""
    try:
        yield
    except RuntimeError as error:
        is_jax = type(error).__name__ == "JaxRuntimeError"  # which is not imported here
        if not (is_jax and re.search("RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE)):
            raise
        problem = f"does not fit into the memory of the devices ({str(error).splitlines()[0][:200]})"
        raise RunFailedError(f"{what} {problem}; {remedy}") from error


def new_table(*headers: str, gap: int = 3) -> Table:
    """Return a table without lines; columns after the first that have a header are of numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index and header else "left")
    return table


def count_things(count: int, noun: str) -> str:
    """Return how many things there are, in words: 1 layer, 2,000 layers."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


class Console:
    """The streams of one command; with `json_lines`, objects go to standard output, the text elsewhere."""

    def __init__(self, *, json_lines: bool = False, quiet: bool = False, words: Sequence[str] = ()):
        self.json_lines, self.words = json_lines, words
        self.human = Printer(stderr=json_lines, quiet=quiet, highlight=False, soft_wrap=True)
        self._errors = Printer(stderr=True, highlight=False, soft_wrap=True)

    @property
    def is_live(self) -> bool:
        """True where text goes to a terminal that can be redrawn."""
        return self.human.is_terminal and not self.human.is_dumb_terminal and not self.human.quiet

    @contextmanager
    def show_steps(self) -> Iterator[Callable[[int, int, str], None]]:
        """Show progress: yield a function to call with steps done, steps in all and the name of the next."""
        if not self.is_live:
            yield lambda done, total, label: self.say(f"{done + 1}/{total} {label}")
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        label_column = TextColumn("{task.description}", markup=False)
        columns = (BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn(), label_column)
        with Progress(*columns, console=self.human, transient=True) as shown:
            bar = shown.add_task("", total=None)
            yield lambda done, total, label: shown.update(bar, completed=done, total=total, description=label)

    @contextmanager
    def show_bytes(self) -> Iterator[Callable[[str, int, int], None]]:
        """Show progress: yield a function to call with what is done, bytes done and bytes in all."""
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(bar_width=20), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.human, transient=True, disable=not self.is_live) as shown:
            bars: dict[str, TaskID] = {}

            def report(what: str, done: int, total: int) -> None:
                if what not in bars:
                    self.say(what)
                    for bar in bars.values():
                        shown.update(bar, visible=False)
                    bars[what] = shown.add_task("", total=total)
                shown.update(bars[what], completed=done)

            yield report

    def say(self, text: RenderableType = "") -> None:
        """Print text, as it is, or a table."""
        self.human.print(text, markup=False)

    def note(self, label: str, text: str) -> None:
        """Print a line with a label, aligned with the other labels."""
        self.human.print(f"{label:<{LABEL_WIDTH}}", style="bold", markup=False, end="")
        self.human.print(text.replace("\n", "\n" + " " * LABEL_WIDTH), markup=False)

    def write(self, text: str) -> None:
        """Write text as it is, at once; in place of JSON lines, never beside them."""
        if text and not self.json_lines:
            encoding = sys.stdout.encoding or "utf-8"
            text = text.translate(VISIBLE) if sys.stdout.isatty() else text
            sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
            sys.stdout.flush()

    def remark(self, text: str) -> None:
        """Print a remark about a text that goes to standard output, on standard error."""
        if not self.human.quiet:
            self._errors.print(text, markup=False)

    def emit(self, event: str, **values: Any) -> None:
        """Write one JSON line, when JSON lines were asked for."""
        if self.json_lines:
            line = replace_nonfinite({"event": event, **values})  # JSON has no NaN
            sys.stdout.write(json.dumps(line, allow_nan=False) + "\n")
            sys.stdout.flush()

    def fail(self, text: str) -> None:
        """Print an error, also when quiet."""
        self._errors.print("error:", style="bold red", end="")
        self._errors.print(" ", end="")
        self._errors.print(text, markup=False)
