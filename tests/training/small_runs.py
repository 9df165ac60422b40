"""Tiny trainings for tests: tasks that compile fast, and what a run directory holds byte for byte."""

import contextlib
import dataclasses
import functools
import hashlib
import json
from unittest import mock

import jax

from regard.training import checkpoints, loop, programs, runs, settings, tasks

SIZES = settings.Sizes(d_model=6, num_heads=2, d_ff=7, dropout_rate=0.25)
CADENCE = settings.Cadence(log_every=3, evaluate_every=5, checkpoint_every=7, heads_every=4)

# The words that train `tiny_copy()`.
COPY = [
    *("train", "copy", "--vocab-size", "11", "--length", "3", "--held-out-size", "13", "--steps", "17"),
    *("--d-model", "6", "--num-heads", "2", "--d-ff", "7", "--dropout-rate", "0.25", "--batch-size", "5"),
    *("--learning-rate", "0.01", "--clip-norm", "0.125", "--log-every", "3", "--evaluate-every", "5"),
    *("--checkpoint-every", "7", "--heads-every", "4", "--schedule", "cosine"),
]


def tiny_copy(**changes):
    """A copy task of 17 steps; changes may name fields of the task or of its optimization."""
    optimization = {"steps": 17, "batch_size": 5, "learning_rate": 0.01, "clip_norm": 0.125}
    names = {field.name for field in dataclasses.fields(settings.Optimization)}
    optimization |= {name: changes.pop(name) for name in list(changes) if name in names}
    chosen = {"vocab_size": 11, "length": 3, "held_out_size": 13, "model": SIZES, "cadence": CADENCE}
    return tasks.Copy(optimization=settings.Optimization(**optimization), **{**chosen, **changes})


def train(directory, task, *, seed=0, resume="auto", new_data=False, force=False, fresh=False, **options):
    """Opens a run and trains it, by the programs of an earlier run of these settings unless `fresh`."""
    run = runs.open_run(directory, task, seed=seed, resume=resume, new_data=new_data, force=force)
    with contextlib.nullcontext() if fresh else share_programs():
        return loop.train(run, **options)


def begin(directory, task):
    """What a training of no more than one step leaves: settings, what the task keeps, a checkpoint."""
    run = runs.open_run(directory, task)
    run.begin(task.keep())
    checkpoints.save(run.checkpoints_path, 1, _share(task, run.seed).start(), {})


def share_programs():
    """A block within which trainings that differ in where they begin and end compile each program once."""
    return mock.patch.object(loop, "make_program", _share)


def _share(task, seed, deployment=None):
    assert deployment is None
    # Neither how often is looked, nor where a text is read from, does a program know.
    known = dataclasses.replace(task, cadence=CADENCE, **{"files": ()} if hasattr(task, "files") else {})
    key = (repr(known), seed)
    if key not in _programs:
        _programs[key] = _keep(programs.make_program(task, seed))
    return _programs[key]


_programs = {}


def _keep(program):
    first = functools.cache(lambda: jax.device_get(program.start()))
    # The first update takes the memory of what it is given.
    start = lambda: jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), first())
    return _CompiledOnce(**vars(program) | {"start": start})


class _CompiledOnce(programs.Program):
    @functools.cached_property
    def found(self):
        return {}

    def compile(self, function, *arguments, options=None):
        known = ("update", "evaluate", "measure_heads")
        (name,) = (name for name in known if getattr(self, name) is function)
        key = (name, str(jax.tree.map(jax.typeof, arguments)), repr(options))
        if key not in self.found:
            self.found[key] = super().compile(function, *arguments, options=options)
        return self.found[key]


def read_lines(directory):
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def split_lines(directory):
    lines = read_lines(directory)
    return [line for line in lines if "split" in line], [line for line in lines if "split" not in line]


def list_saved(directory):
    return [int(path.name) for path in checkpoints.list_checkpoints(directory / "checkpoints")]


def last_arrays(directory):
    return checkpoints.load(checkpoints.list_checkpoints(directory / "checkpoints")[-1]).arrays


def assert_same_arrays(one, other):
    assert one.keys() == other.keys()
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def assert_same_run(one, other):
    assert_same_arrays(last_arrays(one), last_arrays(other))
    assert read_lines(one) == read_lines(other)


def snapshot(directory):
    """Every file below a directory with the digest of its contents."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stop_after(count):
    """A stop function that answers yes from its count-th question on."""
    asked = iter(range(1, 10**9))
    return lambda: next(asked) >= count


class Killer(loop.Progress):
    def __init__(self, *moment):
        self.events, self.moment = [], moment

    def remember(self, *event):
        self.events.append(event)
        if event == self.moment:
            raise RuntimeError("killed")

    @contextlib.contextmanager
    def preparing(self):
        self.remember("preparing", "began")
        yield
        self.remember("preparing", "ended")

    def compiling(self, what):
        self.remember("compiling", what)
        return contextlib.nullcontext()

    stepped = lambda self, step, *told: self.remember("stepped", step)
    evaluated = lambda self, step, metrics: self.remember("evaluated", step)
    saved = lambda self, step: self.remember("saved", step)
