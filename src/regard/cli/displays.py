"""Listeners to a training loop: a bar on a terminal, plain lines elsewhere, JSON lines for programs."""

import math
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from rich import progress

from regard.cli.console import Console
from regard.cli.interruption import leave_at_once
from regard.training.loop import Progress as Listener
from regard.training.metrics import LEADING, arrange
from regard.training.work import Work

PLAIN_INTERVAL_SECONDS = 10.0
NOTHING_LOST = "\ninterrupted before the first step; nothing is lost\n"


class Display(Listener):
    """The listener below every display: lines about what is done, and all events as JSON where asked for."""

    def __init__(self, console: Console, label: str, prefix: str = ""):
        self._console, self._label, self._prefix = console, label, prefix
        self._work: Work | None = None
        self._rates: deque[float] = deque(maxlen=15)

    def began(self, work: Work) -> None:
        self._work = work

    def stop(self) -> None:
        """Leave the terminal as it was."""

    def preparing(self) -> AbstractContextManager[None]:
        return leave_at_once(NOTHING_LOST) if jax.process_count() == 1 else nullcontext()

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self._console.say(f"{self._prefix}compiled {what} in {seconds:.1f} s")
        self._emit("compiled", what=what, seconds=round(seconds, 3))

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        self._emit("step", step=step, steps=steps, **metrics)
        if 0 < steps_per_second < math.inf:
            self._rates.append(steps_per_second)

    def describe(self, step: int, steps: int, metrics: Mapping[str, float]) -> str:
        """Describe a step at the median of the latest rates: one slow step leaves the time left as it was."""
        rate = statistics.median(self._rates) if self._rates else math.nan
        return describe_step(step, steps, metrics, rate, self._work)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        values = spell_metrics(metrics, arrange(metrics))
        self._console.say(f"{self._prefix}step {step:>5} held out:  {values}")
        self._emit("evaluation", step=step, **metrics)

    def saved(self, step: int) -> None:
        self._emit("checkpoint", step=step)

    def _emit(self, event: str, **values: Any) -> None:
        self._console.emit(event, task=self._label, **values)


class Bar(Display):
    """One redrawn line: step, rate, time left and metrics; evaluations scroll away above it."""

    def __init__(self, console: Console, label: str, steps: int, done: int):
        super().__init__(console, label)
        counted = (progress.BarColumn(bar_width=20), progress.MofNCompleteColumn())
        name = progress.TextColumn("{task.description}", style="bold", markup=False)
        columns = (name, *counted, progress.TextColumn("{task.fields[status]}", markup=False))
        self._bar = progress.Progress(*columns, console=console.human, transient=True)
        self._task = self._bar.add_task(label, total=steps, completed=done, status="")

    def stop(self) -> None:
        self._bar.stop()

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        self._bar.stop()
        what_column = progress.TextColumn("{task.description}", markup=False)
        columns = (progress.SpinnerColumn(), what_column, progress.TimeElapsedColumn())
        ticking = progress.Progress(*columns, console=self._console.human, transient=True)
        with super().compiling(what), ticking:
            ticking.add_task(f"compiling {what} ...", total=None)
            yield

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        super().stepped(step, steps, metrics, steps_per_second)
        self._bar.start()
        self._bar.update(self._task, completed=step, status=self.describe(step, steps, metrics))


class Lines(Display):
    """A plain line every few seconds, and one per evaluation, for logs and pipes."""

    def __init__(self, console: Console, label: str):
        super().__init__(console, label, prefix=f"{label}: ")
        self._spoken = time.perf_counter()

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        self._console.say(f"{self._prefix}compiling {what} ...")
        with super().compiling(what):
            yield

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        super().stepped(step, steps, metrics, steps_per_second)
        if time.perf_counter() - self._spoken >= PLAIN_INTERVAL_SECONDS:
            self._spoken = time.perf_counter()
            self._console.say(f"{self._prefix}step {step}/{steps}, {self.describe(step, steps, metrics)}")


@contextmanager
def open_display(console: Console, label: str, steps: int, done: int) -> Iterator[Listener]:
    """Choose how training is shown: a bar where it can be redrawn, else lines; JSON lines when asked."""
    shown = Bar(console, label, steps, done) if console.is_live else Lines(console, label)
    try:
        yield shown
    finally:
        shown.stop()


def describe_step(
    step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float, work: Work | None = None
) -> str:
    """Describe metrics, rate, use of the devices and time left in a few words."""
    values = spell_metrics(metrics, [name for name in LEADING if name in metrics])
    if not 0 < steps_per_second < math.inf:
        return values
    seconds = (steps - step) / steps_per_second
    used = "" if work is None else f"  {work.describe(steps_per_second)}"
    return f"{values}  {1000 / steps_per_second:.0f} ms/step{used}  {seconds:.0f} s left"


def spell_metrics(metrics: Mapping[str, float], names: Iterable[str]) -> str:
    """Spell the metrics of these names in a few words."""
    return "  ".join(f"{name.replace('_', ' ')} {metrics[name]:.4g}" for name in names)
