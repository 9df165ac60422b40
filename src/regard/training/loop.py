"""The training loop: one compiled step that makes its own batch, measured, saved, resumable bit for bit.

Everything random in step n is a function of (seed, n): a resumed run does what an uninterrupted one does.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from regard.arguments import check_kind, whole_number
from regard.training import checkpoints, compilation, head_statistics, locks, metrics, processes
from regard.training.programs import make_feed, make_program
from regard.training.runs import Run
from regard.training.sharding import Deployment
from regard.training.task import Metrics
from regard.training.typed_json import read_record
from regard.training.work import Work, count_work

FEW_MEASUREMENTS = 100
MOST_SKIPPED = 10  # updates in a row that are not finite: more is no accident
LOWER = "A smaller learning_rate may help"


class Progress:
    """A listener that hears everything and says nothing; the loop never waits for the device to feed one."""

    def began(self, work: Work) -> None:
        """Receive the work of an update, before the first."""

    def preparing(self) -> AbstractContextManager[None]:
        """Surround all that comes before the first step, compiling above all: leaving here loses nothing."""
        return nullcontext()

    def compiling(self, what: str) -> AbstractContextManager[None]:
        """Surround a compilation, which may take a while."""
        return nullcontext()

    def stepped(self, step: int, steps: int, metrics: Mapping[str, float], steps_per_second: float) -> None:
        """Receive a logged step whose metrics have arrived; the rate leaves compiling and evaluating out."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive an evaluation on held-out data."""

    def saved(self, step: int) -> None:
        """Receive a checkpoint."""


@dataclass(frozen=True)
class Outcome:
    """The end of a training session.

    Attributes:
        status: "finished", "interrupted", or "already finished" when there was nothing left to do.
        step: updates done.
        held_out: metrics of the last evaluation on held-out data; empty when there was none yet.
        seconds: time spent updating, over all sessions of the run; compiling and evaluating left out.
        compile_seconds: time spent compiling, over all sessions of the run.
        elapsed_seconds: everything from start to end, over all sessions of the run.
    """

    status: Literal["finished", "interrupted", "already finished"]
    step: int
    held_out: dict[str, float]
    seconds: float
    compile_seconds: float
    elapsed_seconds: float


class DivergenceError(FloatingPointError):
    """The error raised when a metric becomes NaN or infinite.

    Attributes:
        metric: its name.
        step: the first step at which it was not finite.
    """

    def __init__(self, metric: str, value: float, step: int, last_good: Path | None, advice: str = LOWER):
        last = f"the last good checkpoint is {last_good}" if last_good else "no checkpoint had been saved yet"
        super().__init__(f"{metric} is {value} at step {step}; {last}. {advice}.")
        self.metric, self.step = metric, step


def train(
    run: Run,
    *,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    deployment: Deployment | None = None,
    log: Callable[[Mapping[str, Any]], Any] | None = None,
    profile: int = 0,
) -> Outcome:
    """Train to the last step, or until `stop` says so, and save; another call goes on from there.

    Where there are several processes, all of them call this alike, and the first one writes.

    Args:
        run: what to learn, where to write and where to start.
        progress: hears what happens; None means nobody does.
        stop: asked after every step; True saves a checkpoint and returns. All processes must say the same.
        deployment: the mesh to train on; None means one device. A run may go on on another mesh, or none.
        log: called in the first process with each line of metrics.jsonl, such as `wandb.log`.
        profile: steps, after the first, that JAX's profiler traces into the directory profile, which
            TensorBoard and Perfetto open; 0 traces none.

    Returns:
        The step and the metrics at the end.

    Raises:
        DivergenceError: when a metric is NaN or infinite; the last good checkpoint stays.
        checkpoints.CheckpointError: when the starting checkpoint does not fit the model; nothing is written.
        locks.LockError: when another process trains in the directory.
        ValueError: when `profile` is negative.
        OSError: when the system refuses to write; what was saved before is whole.
    """
    check_kind("run", run, Run, hint="open_run makes one")
    profile = whole_number("profile", profile, 0)
    with locks.hold(run.directory):
        processes.alone(run.tidy)
        if run.is_finished:
            assert run.start is not None
            return Outcome("already finished", run.start.step, **asdict(_read_record(run)))
        session = _Session(run, progress or Progress(), log, profile)
        with session.progress.preparing():
            session.prepare(deployment)
        return session.advance(stop)


@dataclass
class _Record:
    """Record of the sessions in a checkpoint: their clocks in seconds, the last held-out metrics."""

    seconds: float = 0.0
    compile_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    held_out: dict[str, float] = field(default_factory=dict)


def _read_record(run: Run) -> _Record:
    """Return what is said of the sessions before, by the checkpoint of a run that goes on."""
    if run.start is None or run.source is not None:
        return _Record()
    saved = {name: value for name, value in run.start.record.items() if name in vars(_Record())}
    try:
        return read_record(_Record, saved, "record")
    except ValueError as error:
        index = run.start.path / checkpoints.INDEX
        raise checkpoints.CheckpointError(f"{index} is damaged: {error}") from error


class _Session:
    """One process's share of a run: its clocks, and the metrics that are still on the device."""

    def __init__(
        self, run: Run, progress: Progress, log: Callable[[Mapping[str, Any]], Any] | None, profile: int
    ):
        self.task, self.run, self.progress, self.log, self.profile = run.task, run, progress, log, profile
        self.first, self.saved = (run.start.step, run.start.path) if run.start else (0, None)
        self.record = _read_record(run)
        # As if the sessions had followed one another without a gap.
        self.began = time.perf_counter() - self.record.elapsed_seconds
        self.saving: tuple[int, checkpoints.Saving] | None = None
        self.pending: list[tuple[int, Metrics]] = []
        self.head_stats: list[tuple[int, head_statistics.HeadStats]] = []
        self.settled = (self.first, self.record.seconds)
        self.skipped = 0  # updates in a row

    def prepare(self, deployment: Deployment | None) -> None:
        """Make ready to train a run whose lock is held: nothing that follows compiles."""
        run, task = self.run, self.task
        kept_files = processes.everyone(task.keep)
        self.program = program = make_program(task, run.seed, deployment)
        places = None if deployment is None else deployment.divide_state(program.shapes)
        start = run.start
        self.state = checkpoints.fit(start, program.shapes, places=places) if start else program.start()
        processes.demand_same("run", run.describe(kept_files))
        processes.alone(lambda: run.begin(kept_files))
        processes.everyone(run.demand_begun)
        num_devices = 1 if deployment is None else deployment.mesh.size
        device_kind = jax.devices()[0].device_kind
        self.progress.began(count_work(task, program.shapes.params, num_devices, device_kind))
        self.feed, self.held_out = make_feed(task, run.seed, deployment), program.place(task.held_out)
        self.update = self._compile("train step", program.update, self.state, np.int32(0), self.feed(0))
        self.measure = self._compile("evaluation", program.evaluate, self.state.evaluated, self.held_out)
        self.watch_heads = self._prepare_heads()

    def advance(self, stop: Callable[[], bool]) -> Outcome:
        """Update, measure and save until the end or a stop."""
        cadence, steps = self.task.cadence, self.task.optimization.steps
        self.mark = time.perf_counter()
        if self.first == 0:
            self.watch_heads(0)
        with self._leave_in_order(), ExitStack() as tracing:
            for step in range(self.first + 1, steps + 1):
                self._trace(step - self.first - 1, tracing)
                self.state, measured = self.update(self.state, np.int32(step - 1), self.feed(step - 1))
                self.pending.append((step, measured))
                self.watch_heads(step)
                last = stop() or step == steps
                if step % cadence.evaluate_every == 0 or step == steps:
                    self._evaluate(step)
                elif step % cadence.log_every == 0:
                    # Read one logging interval late: the device is never waited for while it has work.
                    self._settle(step - cadence.log_every)
                if step % cadence.checkpoint_every == 0 or last:
                    self._save(step)
                elif self.saving is not None and self.saving[1].is_done and jax.process_count() == 1:
                    self._finish_saving()
                if last:
                    break
            self._finish_saving()
            processes.everyone(checkpoints.finish_digests)
        return Outcome("finished" if step == steps else "interrupted", step, **asdict(self.record))

    def _prepare_heads(self) -> Callable[[int], None]:
        """Return a function that measures the heads at the steps that are due; it waits for nothing."""
        every, steps = self.task.cadence.heads_every, self.task.optimization.steps
        if not every:
            return lambda step: None
        probe = self.program.place(self.task.probe)
        # A few measurements are over before an optimized program would be compiled.
        options = compilation.LITTLE_WORK if steps < FEW_MEASUREMENTS * every else None
        measure = self._compile(
            "heads", self.program.measure_heads, self.state.params, probe, options=options
        )

        def watch(step: int) -> None:
            if step % every == 0 or step == steps:
                self.head_stats.append((step, measure(self.state.params, probe)))

        return watch

    def _trace(self, done: int, tracing: ExitStack) -> None:
        """Begin the profiler's trace after one step of this session, and end it after those wanted."""
        if self.profile and done in (1, 1 + self.profile):
            jax.block_until_ready(self.pending)
            tracing.close()
            if done == 1:
                jax.profiler.start_trace(str(self.run.directory / "profile"))
                tracing.callback(jax.profiler.stop_trace)

    def _compile(self, what: str, function: Any, *arguments: Any, options: Any = None) -> Any:
        """Compile ahead of the first call, so that compiling can be announced and timed apart."""
        start = time.perf_counter()
        with self.progress.compiling(what):
            compiled = self.program.compile(function, *arguments, options=options)
        self.record.compile_seconds += time.perf_counter() - start
        return compiled

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Wait for the steps under way, then stop the clock of training."""
        jax.block_until_ready((self.pending, self.head_stats))
        self.record.seconds += time.perf_counter() - self.mark
        self.mark = math.nan
        yield
        self.mark = time.perf_counter()

    def _evaluate(self, step: int) -> None:
        with self._pause():
            held_out = self.record.held_out = _fetch(self.measure(self.state.evaluated, self.held_out))
            self._settle(step, {f"held_out_{name}": value for name, value in held_out.items()})
            self.progress.evaluated(step, held_out)

    def _settle(self, last: int, extra: Mapping[str, float] | None = None) -> None:
        """Fetch the metrics up to a step, check each of them, and write the lines that are due."""
        ready = [entry for entry in self.pending if entry[0] <= last]
        self.pending = self.pending[len(ready) :]
        for step, measured in ready:
            while self.head_stats and self.head_stats[0][0] <= step:
                self._log(head_statistics.describe_stats(*self.head_stats.pop(0)))
            values = _fetch(measured) | (dict(extra) if extra and step == last else {})
            nonfinite = metrics.first_nonfinite(values)
            # What was skipped did no harm; what is held out comes of parameters that are there.
            self.skipped = self.skipped + 1 if values.get("skipped") else 0
            passes = 0 < self.skipped < MOST_SKIPPED
            fatal = metrics.first_nonfinite(_select_held_out(values)) if passes else nonfinite
            due = step == 1 or step % self.task.cadence.log_every == 0 or bool(extra and step == last)
            if due or nonfinite:
                self._log({"step": step, **values, "seconds": round(self._training_seconds(), 3)})
                self.progress.stepped(step, self.task.optimization.steps, values, self._rate(step))
            if fatal:
                self._finish_saving()
                raise DivergenceError(fatal, values[fatal], step, self.saved, self._advise(fatal, values))

    def _advise(self, metric: str, values: Mapping[str, float]) -> str:
        """Say what a metric that is not finite comes of, or what may help."""
        if metric in _select_held_out(values):
            finite = "parameters" if self.skipped else "parameters and the training loss"
            return f"The {finite} are finite: the held-out data or the evaluation is the cause"
        if self.skipped:
            cause = "the data or the settings make all updates NaN or infinite"
            return f"{self.skipped} updates in a row were skipped: {cause}"
        single = ", or nan='skip', which leaves single updates that are not finite out"
        return LOWER if self.task.optimization.nan == "skip" else LOWER + single

    def _log(self, line: Mapping[str, Any]) -> None:
        if processes.is_first():
            metrics.append(self.run.metrics_path, [line])
            if self.log is not None:
                self.log(line)

    def _training_seconds(self) -> float:
        running = 0.0 if math.isnan(self.mark) else time.perf_counter() - self.mark
        return self.record.seconds + running

    def _rate(self, step: int) -> float:
        """Return the steps per second of training since the last logged step."""
        (before, then), now = self.settled, self._training_seconds()
        self.settled = (step, now)
        return (step - before) / (now - then) if now > then else math.nan

    def _save(self, step: int) -> None:
        """Begin to save a checkpoint once every metric up to it proved finite."""
        with self._pause():
            self._settle(step)
            self._finish_saving()
            self.record.elapsed_seconds = time.perf_counter() - self.began
            path, keep = self.run.checkpoints_path, self.task.cadence.keep_checkpoints
            self.saving = (
                step,
                checkpoints.start_saving(path, step, self.state, asdict(self.record), keep=keep),
            )

    @contextmanager
    def _leave_in_order(self) -> Iterator[None]:
        """Let the checkpoint that is being written become whole also after an error."""
        try:
            yield
        finally:
            if self.saving is not None and jax.process_count() == 1:
                with suppress(Exception):
                    self.saving[1].end()

    def _finish_saving(self) -> None:
        if self.saving is not None:
            (step, saving), self.saving = self.saving, None
            self.saved = saving.wait()
            self.progress.saved(step)


def _select_held_out(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith("held_out_")}


def _fetch(measured: Metrics) -> dict[str, float]:
    """Fetch metrics from the device as plain numbers, the leading ones first."""
    values = jax.device_get(measured)
    names = metrics.arrange(values)
    # By way of text: the shortest number that is this float32, 0.003 and not 0.003000000026077032.
    return {name: float(str(values[name])) for name in names}
