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
CADENCE = settings.Cadence(log_every=3, evaluate_every=5, checkpoint_every=7, heads_every=0)


def tiny_copy(**changes):
    """A copy task of 17 steps; changes may name fields of the task or of its optimization."""
    optimization = {"steps": 17, "batch_size": 5, "learning_rate": 0.01, "clip_norm": 0.125}
    names = {field.name for field in dataclasses.fields(settings.Optimization)}
    optimization |= {name: changes.pop(name) for name in list(changes) if name in names}
    chosen = {
        "vocab_size": 11,
        "length": 3,
        "held_out_size": 13,
        "model": SIZES,
        "cadence": CADENCE,
        **changes,
    }
    return tasks.Copy(optimization=settings.Optimization(**optimization), **chosen)


def train(directory, task, *, seed=0, resume="auto", force=False, compiled=None, **options):
    """Opens a run and trains it; with `Compiled`, by the programs of the last run of these settings."""
    run = runs.open_run(directory, task, seed=seed, resume=resume, force=force)
    with compiled.serve() if compiled else contextlib.nullcontext():
        return loop.train(run, **options)


def begin(directory, task):
    """What a training of no more than one step leaves: settings, what the task keeps, a checkpoint."""
    run = runs.open_run(directory, task)
    run.begin(task.keep())
    checkpoints.save(run.checkpoints_path, 1, programs.make_program(task, run.seed).start(), {})


class Compiled:
    """Programs by the settings and the seed that they were made from, each compiled once.

    For trainings that differ in where they begin and end, and in who listens.
    """

    def __init__(self):
        self.programs = {}

    def serve(self):
        """A block within which all training takes its programs from here."""
        return mock.patch.object(loop, "make_program", self.make_program)

    def make_program(self, task, seed, deployment=None):
        assert deployment is None
        # Where a text is read from, no program knows: it is given the text.
        known = dataclasses.replace(task, files=()) if hasattr(task, "files") else task
        key = (repr(known), seed)
        if key not in self.programs:
            self.programs[key] = self._keep(programs.make_program(task, seed))
        return self.programs[key]

    def _keep(self, program):
        first = functools.cache(lambda: jax.device_get(program.start()))

        def start():
            # The first update takes the memory of what it is given.
            return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), first())

        return _CompiledOnce(**vars(program) | {"start": start})


class _CompiledOnce(programs.Program):
    """A program that keeps what it compiled."""

    @functools.cached_property
    def found(self):
        return {}

    def compile(self, function, *arguments, options=None):
        name = next(
            name for name in ("update", "evaluate", "measure_heads") if getattr(self, name) is function
        )
        key = (name, str(jax.tree.map(jax.typeof, arguments)), repr(options))
        if key not in self.found:
            self.found[key] = super().compile(function, *arguments, options=options)
        return self.found[key]


def read_lines(directory):
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def snapshot(directory):
    """Every file below a directory with the digest of its contents."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def stop_after(count):
    """A stop function that answers yes from its count-th question on."""
    asked = iter(range(1, 10**9))
    return lambda: next(asked) >= count
