"""The loop: reproducible bit for bit, across interruptions too; honest clocks; loud about divergence."""

import contextlib
import dataclasses
import errno
import json
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from economy import mostly_slow
from regard.training import checkpoints, loop, runs, settings, tasks
from regard.training.loop import DivergenceError
from regard.training.optimization import make_optimizer, make_schedule
from regard.training.task import TRAINING, make_stream
from small_runs import (
    Compiled,
    read_lines,
    snapshot,
    stop_after,
    tiny_copy,
    train,
)


class Recorder(loop.Progress):
    """A listener that remembers; it may raise at a given event."""

    def __init__(self, die_at=None):
        self.events = []
        self.die_at = die_at

    def remember(self, *event):
        self.events.append(event)
        if event == self.die_at:
            raise RuntimeError("killed")

    @contextlib.contextmanager
    def preparing(self):
        self.remember("preparing", "began")
        yield
        self.remember("preparing", "ended")

    def compiling(self, what):
        self.remember("compiling", what)
        return contextlib.nullcontext()

    def stepped(self, step, steps, metrics, steps_per_second):
        self.remember("stepped", step)

    def evaluated(self, step, metrics):
        self.remember("evaluated", step)

    def saved(self, step):
        self.remember("saved", step)


@pytest.fixture(scope="module")
def compiled():
    return Compiled()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compiled):
    directory = tmp_path_factory.mktemp("loop") / "whole"
    recorder = Recorder()

    def listen(name, *ignored, **more):
        if "backend_compile" in name and ("preparing", "ended") in recorder.events:
            recorder.remember("compiled", None)

    jax.monitoring.register_event_duration_secs_listener(listen)
    outcome = train(directory, tiny_copy(), compiled=compiled, progress=recorder)
    jax.monitoring.unregister_event_duration_listener(listen)
    return directory, outcome, recorder


def last_arrays(directory):
    return checkpoints.load(checkpoints.list_checkpoints(directory / "checkpoints")[-1]).arrays


def assert_same_run(one, other):
    """Parameters, optimizer and metrics, bit for bit."""
    a, b = last_arrays(one), last_arrays(other)
    assert a.keys() == b.keys()
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    assert read_lines(one) == read_lines(other)


def test_a_run_reports_what_it_did(whole):
    directory, outcome, _ = whole
    assert outcome.status == "finished"
    assert outcome.step == 17
    assert set(outcome.held_out) == {"loss", "accuracy", "token_accuracy"}
    lines = read_lines(directory)
    assert [line["step"] for line in lines] == [1, 3, 5, 6, 9, 10, 12, 15, 17]
    measured = {"step", "loss", "accuracy", "token_accuracy", "learning_rate", "grad_norm", "parameter_norm"}
    held_out = {"held_out_loss", "held_out_accuracy", "held_out_token_accuracy"}
    for line in lines:
        assert set(line) == measured | (held_out if line["step"] in (5, 10, 15, 17) else set())
    assert lines[-1]["held_out_loss"] == outcome.held_out["loss"]
    assert [path.name for path in checkpoints.list_checkpoints(directory / "checkpoints")] == [
        "00000014",
        "00000017",
    ]


def test_training_learns(whole):
    lines = read_lines(whole[0])
    assert lines[-1]["held_out_loss"] < lines[0]["loss"] - 0.1


def test_a_listener_hears_everything_in_order(whole):
    events = whole[2].events
    compiled = [("compiling", what) for what in ("train step", "evaluation")]
    assert events[:4] == [("preparing", "began"), *compiled, ("preparing", "ended")]
    assert ("compiled", None) not in events, "an interrupt would wait for it"
    assert [step for name, step in events if name == "evaluated"] == [5, 10, 15, 17]
    assert [step for name, step in events if name == "saved"] == [7, 14, 17]
    assert [step for name, step in events if name == "stepped"] == [1, 3, 5, 6, 9, 10, 12, 15, 17]
    assert events[-1] == ("saved", 17), "the last is waited for"


def test_training_goes_on_while_a_checkpoint_is_written(whole, compiled, tmp_path, monkeypatch):
    """And what is written is the state of its step, whose memory updates have taken by then."""
    recorder, write = Recorder(), checkpoints._write_index

    def write_later(draft, step, *arguments):
        deadline = time.monotonic() + 60
        while step == 14 and ("evaluated", 15) not in recorder.events and time.monotonic() < deadline:
            time.sleep(0.01)
        write(draft, step, *arguments)

    monkeypatch.setattr(checkpoints, "_write_index", write_later)
    train(tmp_path / "run", tiny_copy(), compiled=compiled, progress=recorder)
    assert recorder.events.index(("evaluated", 15)) < recorder.events.index(("saved", 14))
    one, other = (
        checkpoints.load(run / "checkpoints" / "00000014").arrays for run in (whole[0], tmp_path / "run")
    )
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    assert_same_run(whole[0], tmp_path / "run")


def test_what_fails_while_training_goes_on_ends_it(compiled, tmp_path, monkeypatch):
    write = checkpoints._write_index

    def fail(draft, step, *arguments):
        if step == 14:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(draft, step, *arguments)

    monkeypatch.setattr(checkpoints, "_write_index", fail)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "run", tiny_copy(), compiled=compiled)
    saved = checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == ["00000007"]


def test_an_error_waits_for_the_checkpoint_that_is_being_written(compiled, tmp_path, monkeypatch):
    write = checkpoints._write_index
    monkeypatch.setattr(checkpoints, "_write_index", lambda *arguments: (time.sleep(0.3), write(*arguments)))
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "run", tiny_copy(), compiled=compiled, progress=Recorder(("evaluated", 10)))
    saved = checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == ["00000007"]


def test_the_same_seed_gives_the_same_bits_and_another_does_not(whole, compiled, tmp_path):
    train(tmp_path / "again", tiny_copy())
    assert_same_run(whole[0], tmp_path / "again")
    task = tiny_copy()
    found = compiled.make_program(task, 0), loop.make_program(task, 1)
    one, other = (program.start().params["head"]["kernel"] for program in found)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("stop", mostly_slow([1, 7, 16], 7))
def test_interrupted_and_resumed_is_uninterrupted(whole, compiled, tmp_path, stop):
    first = train(tmp_path / "run", tiny_copy(), compiled=compiled, stop=stop_after(stop))
    assert (first.status, first.step) == ("interrupted", stop)
    second = train(tmp_path / "run", tiny_copy(), compiled=compiled)
    assert second.status == "finished"
    assert second.seconds > first.seconds
    assert second.compile_seconds > first.compile_seconds
    assert_same_run(whole[0], tmp_path / "run")


@pytest.mark.parametrize(
    "moment",
    [
        ("stepped", 9),
        *(pytest.param(each, marks=pytest.mark.slow) for each in [("saved", 7), ("evaluated", 17)]),
    ],
    ids=str,
)
def test_killed_and_resumed_is_uninterrupted(whole, compiled, tmp_path, moment):
    """Killed at any moment, a run has no more than its last checkpoint and some lines too many."""
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "run", tiny_copy(), compiled=compiled, progress=Recorder(die_at=moment))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss": 0.')
    assert train(tmp_path / "run", tiny_copy(), compiled=compiled).status == "finished"
    assert_same_run(whole[0], tmp_path / "run")


@pytest.mark.slow
def test_interrupted_many_times_is_uninterrupted(whole, compiled, tmp_path):
    for _ in range(20):
        outcome = train(tmp_path / "run", tiny_copy(), compiled=compiled, stop=stop_after(5))
        if outcome.status == "finished":
            break
    assert_same_run(whole[0], tmp_path / "run")


def test_a_negative_number_of_steps_to_trace_is_refused(tmp_path):
    with pytest.raises(ValueError, match="profile: expected a number of steps, at least 0, got -1"):
        loop.train(runs.open_run(tmp_path / "run", tiny_copy()), profile=-1)
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_alone(whole):
    directory, outcome, _ = whole
    before = snapshot(directory)
    recorder = Recorder()
    again = train(directory, tiny_copy(), progress=recorder)
    assert again == dataclasses.replace(outcome, status="already finished")
    assert recorder.events == []
    assert snapshot(directory) == before


def test_a_stop_at_the_last_step_is_the_end(compiled, tmp_path):
    outcome = train(tmp_path / "run", tiny_copy(), compiled=compiled, stop=stop_after(17))
    assert outcome.status == "finished"


@pytest.mark.slow
def test_held_out_data_do_not_touch_training(whole, tmp_path):
    """Other held-out data, another size of them, evaluated at other steps: the same parameters."""
    cadence = settings.Cadence(log_every=3, evaluate_every=4, checkpoint_every=7, heads_every=0)
    train(tmp_path / "run", tiny_copy(data_seed=3, held_out_size=29, cadence=cadence))
    a, b = last_arrays(whole[0]), last_arrays(tmp_path / "run")
    assert all(a[name].tobytes() == b[name].tobytes() for name in a)
    assert read_lines(whole[0])[-1]["held_out_loss"] != read_lines(tmp_path / "run")[-1]["held_out_loss"]


@pytest.fixture(scope="module")
def exploding():
    return Compiled()


@pytest.mark.slow
@pytest.mark.parametrize("stop", [None, 9])
def test_a_divergence_names_metric_and_step_and_keeps_the_good_checkpoint(
    exploding, tmp_path, monkeypatch, stop
):
    """A task whose loss turns infinite at step 9, found at the next look at the metrics."""
    monkeypatch.setattr(tasks.Copy, "measure", explode_after(tasks.Copy.measure))
    options = {"stop": stop_after(stop)} if stop else {}
    with pytest.raises(DivergenceError, match=r"loss is inf at step 9; .*00000007") as caught:
        train(tmp_path / "run", tiny_copy(), compiled=exploding, **options)
    assert (caught.value.metric, caught.value.step) == ("loss", 9)
    saved = checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert [path.name for path in saved] == ["00000007"]
    assert all(np.isfinite(array).all() for array in checkpoints.load(saved[0]).arrays.values())
    assert read_lines(tmp_path / "run")[-1]["step"] == 9
    assert read_lines(tmp_path / "run")[-1]["loss"] is None


def explode_after(measure):
    """Infinite loss once the batch is that of the ninth update."""

    def wrapped(self, model, batch):
        loss, metrics = measure(self, model, batch)
        ninth = self.make_batch(jax.random.fold_in(make_stream(0, TRAINING), 8), 5)
        if batch["inputs"].shape != ninth["inputs"].shape:
            return loss, metrics
        return jnp.where((batch["inputs"] == ninth["inputs"]).all(), jnp.inf, loss), metrics

    return wrapped


@pytest.mark.slow
def test_a_learning_rate_that_destroys_the_parameters_is_noticed(tmp_path):
    task = tiny_copy(learning_rate=1e38, schedule="constant", clip_norm=0.0)
    with pytest.raises(DivergenceError, match=r"is (inf|nan) at step 1; no checkpoint had been saved yet"):
        train(tmp_path / "run", task)
    assert checkpoints.list_checkpoints(tmp_path / "run" / "checkpoints") == []


@pytest.mark.slow
def test_seconds_leave_compiling_out(compiled, tmp_path):
    class Slow(Recorder):
        def compiling(self, what):
            time.sleep(0.5)
            return contextlib.nullcontext()

    outcome = train(tmp_path / "run", tiny_copy(), compiled=compiled, progress=Slow())
    assert outcome.compile_seconds > 0
    assert outcome.seconds + outcome.compile_seconds <= outcome.elapsed_seconds
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["seconds"] <= outcome.seconds + 0.001


def test_dropout_is_off_in_evaluation(compiled):
    task = tiny_copy()
    dry = dataclasses.replace(task, model=dataclasses.replace(task.model, dropout_rate=0.0))
    held_out = task.held_out
    evaluated = []
    for variant in (task, dry):
        program = compiled.make_program(variant, 0)
        params = program.start().params
        evaluated.append(program.compile(program.evaluate, params, held_out)(params, held_out))
    assert evaluated[0]["loss"] == evaluated[1]["loss"]


@pytest.mark.slow
def test_dropout_is_on_in_training_and_a_function_of_seed_and_step(monkeypatch):
    batch = tiny_copy().held_out
    monkeypatch.setattr(tasks.Copy, "make_batch", lambda self, rng, batch_size: batch)
    monkeypatch.setattr(tasks.Copy, "make_held_out", lambda self: batch)
    program = loop.make_program(tiny_copy(), 0)
    update = jax.jit(program.update)
    losses = [float(update(program.start(), np.int32(step))[1]["loss"]) for step in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_schedules_in_closed_form():
    cosine = make_schedule(settings.Optimization(steps=10, learning_rate=0.5, warmup_steps=2))
    assert [float(cosine(step)) for step in (0, 1, 2)] == pytest.approx([0.0, 0.25, 0.5])
    assert float(cosine(6)) == pytest.approx(0.25)
    assert float(cosine(4)) == pytest.approx(0.25 * (1 + math.cos(math.pi / 4)))
    assert float(cosine(10)) == pytest.approx(0.0, abs=1e-8)
    constant = make_schedule(settings.Optimization(steps=10, learning_rate=0.5, schedule="constant"))
    assert [float(constant(step)) for step in (0, 5, 10)] == [0.5, 0.5, 0.5]
    everything = settings.Optimization(steps=3, learning_rate=0.5, warmup_steps=3)
    assert float(make_schedule(everything)(1)) == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("clip_norm", [0.0, 1.5, 100.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_the_optimizer_is_adamw_after_clipping(clip_norm, weight_decay):
    """Against the definition in float64; decay touches matrices alone."""
    optimization = settings.Optimization(
        steps=5, learning_rate=0.125, schedule="constant", clip_norm=clip_norm, weight_decay=weight_decay
    )
    optimizer = make_optimizer(optimization)
    rng = np.random.default_rng(7)
    params = {"matrix": rng.normal(size=(2, 3)), "gain": rng.normal(size=5)}
    state = optimizer.init(jax.tree.map(jnp.float32, params))
    moving = jax.tree.map(jnp.float32, params)
    moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in params.items()}
    for step in range(1, 4):
        gradients = {name: rng.normal(size=value.shape) for name, value in params.items()}
        with jax.numpy_dtype_promotion("standard"):
            change, state = optimizer.update(jax.tree.map(jnp.float32, gradients), state, moving)
        moving = jax.tree.map(jnp.add, moving, change)
        norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
        scale = min(1.0, clip_norm / norm) if clip_norm else 1.0
        for name, gradient in gradients.items():
            first, second = moments[name]
            first, second = (
                0.9 * first + 0.1 * scale * gradient,
                0.999 * second + 0.001 * (scale * gradient) ** 2,
            )
            moments[name] = first, second
            direction = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
            decay = weight_decay * params[name] if params[name].ndim > 1 else 0.0
            params[name] = params[name] - 0.125 * (direction + decay)
    for name, value in params.items():
        np.testing.assert_allclose(moving[name], value, rtol=2e-5, atol=2e-6)


def test_gradients_are_logged_before_clipping(whole):
    clip_norm = tiny_copy().optimization.clip_norm
    assert all(line["grad_norm"] > clip_norm for line in read_lines(whole[0]))


def test_a_start_that_does_not_fit_writes_nothing(compiled, tmp_path):
    train(tmp_path / "small", tiny_copy(), compiled=compiled, stop=stop_after(2))
    run = runs.open_run(tmp_path / "small", tiny_copy())
    wide = dataclasses.replace(tiny_copy(), vocab_size=13)
    before = snapshot(tmp_path)
    with pytest.raises(checkpoints.CheckpointError, match="another model"):
        loop.train(dataclasses.replace(run, task=wide))
    assert snapshot(tmp_path) == before
