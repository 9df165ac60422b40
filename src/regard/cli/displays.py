"""Listeners to a training loop: a bar on a terminal, plain lines elsewhere, JSON lines for programs."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from regard.cli.console import Console
from regard.training.loop import Progress as Listener
from regard.training.metrics import LEADING, arrange, replace_nonfinite

PLAIN_INTERVAL_SECONDS = 10.0


class Bar(Listener):
    """One redrawn line: step, rate, time left and metrics; evaluations scroll away above it."""

    def __init__(self, console: Console, label: str, steps: int, done: int):
        self._console = console
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
        )
        self._bar = Progress(*columns, console=console.human, transient=True)
        self._task = self._bar.add_task(label, total=steps, completed=done, status="")

    def stop(self) -> None:
        """Leave the terminal as it was."""
        self._bar.stop()

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        self._bar.stop()
        start = time.perf_counter()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console.human, transient=True) as ticking:
            ticking.add_task(f"compiling {what} ...", total=None)
            yield
        self._console.say(f"compiled {what} in {time.perf_counter() - start:.1f} s")

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        self._bar.start()
        self._bar.update(
            self._task, completed=step, status=describe_step(step, steps, metrics, steps_per_second)
        )

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._console.say(describe_evaluation(step, metrics))


class Lines(Listener):
    """A plain line every few seconds, and one per evaluation and checkpoint, for logs and pipes."""

    def __init__(self, console: Console, label: str, every_seconds: float = PLAIN_INTERVAL_SECONDS):
        self._console, self._label, self._every = console, label, every_seconds
        self._spoken = time.perf_counter()

    def stop(self) -> None:
        """Do nothing: lines stay."""

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        self._console.say(f"{self._label}: compiling {what} ...")
        start = time.perf_counter()
        yield
        self._console.say(f"{self._label}: compiled {what} in {time.perf_counter() - start:.1f} s")

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        if time.perf_counter() - self._spoken >= self._every:
            self._spoken = time.perf_counter()
            self._console.say(
                f"{self._label}: step {step}/{steps}, {describe_step(step, steps, metrics, steps_per_second)}"
            )

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._console.say(f"{self._label}: {describe_evaluation(step, metrics)}")


class JsonLines(Listener):
    """One JSON object per event on standard output."""

    def __init__(self, console: Console, label: str):
        self._console, self._label = console, label

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        seconds = round(time.perf_counter() - start, 3)
        self._console.emit("compiled", task=self._label, what=what, seconds=seconds)

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        self._console.emit("step", task=self._label, step=step, steps=steps, **replace_nonfinite(metrics))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self._console.emit("evaluation", task=self._label, step=step, **replace_nonfinite(metrics))

    def saved(self, step: int) -> None:
        self._console.emit("checkpoint", task=self._label, step=step)


class Both(Listener):
    """A listener that passes everything on to two others."""

    def __init__(self, first: Listener, second: Listener):
        self._listeners = (first, second)

    @contextmanager
    def compiling(self, what: str) -> Iterator[None]:
        first, second = self._listeners
        with first.compiling(what), second.compiling(what):
            yield

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        for listener in self._listeners:
            listener.stepped(step, steps, metrics, steps_per_second)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        for listener in self._listeners:
            listener.evaluated(step, metrics)

    def saved(self, step: int) -> None:
        for listener in self._listeners:
            listener.saved(step)


@contextmanager
def open_display(console: Console, label: str, steps: int, done: int) -> Iterator[Listener]:
    """Choose how training is shown: a bar where it can be redrawn, else lines; JSON lines when asked."""
    shown = Bar(console, label, steps, done) if console.is_live else Lines(console, label)
    try:
        yield Both(shown, JsonLines(console, label)) if console.json_lines else shown
    finally:
        shown.stop()


def describe_step(step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> str:
    """Describe metrics, rate and time left in a few words."""
    values = "  ".join(f"{name.replace('_', ' ')} {metrics[name]:.4g}" for name in LEADING if name in metrics)
    if not math.isfinite(steps_per_second) or steps_per_second <= 0:
        return values
    left = (steps - step) / steps_per_second
    return f"{values}  {1000 / steps_per_second:.0f} ms/step  {left:.0f} s left"


def describe_evaluation(step: int, metrics: Mapping[str, float]) -> str:
    """Describe held-out metrics in a few words, the leading ones first."""
    values = "  ".join(f"{name.replace('_', ' ')} {metrics[name]:.4g}" for name in arrange(metrics))
    return f"step {step:>5} held out:  {values}"
