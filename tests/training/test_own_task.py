"""A task of one's own: one class, whose runs resume; one variable, and every command knows it."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard.cli import main
from regard.cli.console import Console
from regard.cli.overview import print_overview
from regard.inspection import Tokens, figures
from regard.models import Classifier, TransformerConfig
from regard.training import loop, runs, tasks
from regard.training.accuracy import measure_labels
from regard.training.settings import Cadence, Goal, Optimization, Sizes
from regard.training.task import Picture


@dataclass(frozen=True)
class Parity(tasks.SyntheticTask):
    """Tell if a row of bits holds an odd number of ones.

    Expect nothing of three steps. Example: regard train parity
    """

    name: ClassVar[str] = "parity"
    goal: ClassVar[Goal] = Goal("accuracy", 0.9)

    length: int = 5
    """Bits of a row."""
    held_out_size: int = 7
    model: Sizes = Sizes(d_model=6, num_heads=2, d_ff=7)
    optimization: Optimization = Optimization(steps=3, batch_size=5)
    cadence: Cadence = Cadence(log_every=1, heads_every=1)

    @property
    def config(self):
        return TransformerConfig(vocab_size=2, max_length=self.length, **asdict(self.model))

    def make_model(self, rngs):
        return Classifier(self.config, 2, pooling="mean", rngs=rngs)

    def make_batch(self, rng, batch_size):
        bits = jax.random.randint(rng, (batch_size, self.length), 0, 2)
        return {"inputs": bits, "labels": (bits.sum(-1) % 2).astype(jnp.int32)}

    def measure(self, model, batch):
        return measure_labels(self.read(model, batch), batch["labels"])

    def example(self):
        batch = self.pick(3)
        tokens = Tokens([("zero", "one")[bit] for bit in batch["inputs"][0]])
        return tasks.Example(batch, {"": tokens}, "parity: a row of bits")

    def pictures(self, model) -> Iterator[Picture]:
        _, aux = self.read_with_weights(model, self.example().batch)
        yield "bits", figures.head_grid(np.asarray(aux["blocks"][0]["weights"][0]), title="parity")


@pytest.mark.slow
def test_a_task_of_ones_own_trains_is_plotted_and_is_inspected(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(tasks.TASKS, Parity.name, Parity)
    directory = tmp_path / "parity"
    stop = iter([False, True, False])
    assert loop.train(runs.open_run(directory, Parity()), stop=lambda: next(stop)).step == 2
    assert loop.train(runs.open_run(directory, Parity())).status == "finished"
    task, model = runs.load_run(directory)
    assert task == Parity()
    call = task.watch(model).calls[0]
    assert call.query_tokens is not None
    assert call.query_tokens.texts == tuple(("zero", "one")[bit] for bit in task.held_out["inputs"][3])

    assert main(["plot", str(directory)]) == 0
    drawn = {path.stem for path in (directory / "figures").iterdir()}
    assert {"curves", "heads-entropy", "heads-max-score", "bits"} <= drawn
    capsys.readouterr()
    assert main(["inspect", str(directory)]) == 0
    assert "parity: a row of bits: Classifier, 1 attention layer" in capsys.readouterr().out
    assert (directory / "figures" / "explorer.html").exists()


@dataclass(frozen=True)
class LongCopy(tasks.Copy):
    """A subclass of a preset, with a setting more."""

    name: ClassVar[str] = "long-copy"

    extra: int = 3


@pytest.mark.slow
def test_a_subclass_of_a_preset_resumes_without_being_registered(tmp_path):
    task = LongCopy(
        extra=5,
        vocab_size=5,
        length=3,
        held_out_size=7,
        model=Sizes(d_model=6, num_heads=2, d_ff=7),
        optimization=Optimization(steps=3, batch_size=5),
        cadence=Cadence(heads_every=0),
    )
    stop = iter([False, True])
    assert loop.train(runs.open_run(tmp_path / "run", task), stop=lambda: next(stop)).step == 2
    assert runs.open_run(str(tmp_path / "run"), task).start.step == 2
    found, model = runs.load_run(str(tmp_path / "run"))
    assert found == task
    assert [name for name, _ in found.pictures(model)] == ["attention", "attention-heads"]


def test_a_class_without_a_name_of_its_own_is_refused_before_it_trains(tmp_path):
    class Mine(tasks.Copy):
        pass

    told = r"task: .*Mine has the name of Copy, 'copy'; give the class a name of its own"
    with pytest.raises(ValueError, match=told):
        runs.open_run(tmp_path / "run", Mine())


class Undescribed(Parity):
    name: ClassVar[str] = "undescribed"


def test_a_class_without_a_docstring_is_announced_by_its_name(tmp_path, capsys):
    assert Undescribed.__doc__ is None
    print_overview(Console(), Undescribed(), runs.open_run(tmp_path / "run", Undescribed()))
    assert re.match(r"task +undescribed\n", capsys.readouterr().out)


@dataclass(frozen=True)
class ManySettings(Parity):
    """Settings of every type that JSON can bring back."""

    name: ClassVar[str] = "many-settings"

    mode: Literal["a", "b"] | None = None
    sizes: tuple[int, ...] | None = None
    pair: tuple[int, float] = (1, 0.5)
    plain: tuple = ()
    steps: list[int] = field(default_factory=list)
    names: dict[str, int | str] = field(default_factory=dict)
    nested: Mapping[str, tuple[Sizes, ...]] = field(default_factory=dict)
    other: Sizes | None = None
    anything: Any = None


GIVEN = {
    "mode": "b",
    "sizes": (2, 3),
    "pair": (5, 7.5),
    "plain": (1, "two"),
    "steps": [2, 3],
    "names": {"a": 1, "b": "two"},
    "nested": {"small": (Sizes(d_model=8), Sizes(num_layers=2))},
    "other": Sizes(d_model=12),
    "anything": {"a": [None]},
}


@pytest.mark.parametrize("given", [{}, *({name: value} for name, value in GIVEN.items()), GIVEN], ids=list)
def test_settings_of_many_types_come_back(tmp_path, given):
    task = ManySettings(**given)
    runs.open_run(tmp_path, task).begin({})
    runs.open_run(tmp_path, task)
    assert tasks.from_settings(task.name, tasks.to_settings(task)) == task
    if given:
        with pytest.raises(runs.RunError, match=f"{next(iter(given))}.*: it has .*, asked for"):
            runs.open_run(tmp_path, ManySettings())


def test_a_model_without_a_declared_type_comes_back():
    @dataclass(frozen=True)
    class Inherited(tasks.SyntheticTask):
        name: ClassVar[str] = "inherited"
        config = make_model = make_batch = measure = None

    task = Inherited(model=Sizes(d_model=12))
    assert tasks.from_settings(task.name, tasks.to_settings(task)) == task


@dataclass(frozen=True)
class Unwritable(Parity):
    """Settings that JSON does not bring back."""

    name: ClassVar[str] = "unwritable"

    chosen: Any = None
    numbers: dict[int, int] = field(default_factory=dict)
    count: int = 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"chosen": {1}}, "Object of type set is not JSON serializable"),
        ({"numbers": {1: 2}}, "unwritable.numbers must be int, got '1'"),
        ({"count": None}, "unwritable.count must be int, got None"),
    ],
)
def test_settings_that_would_not_come_back_are_refused_before_training(tmp_path, given, told):
    with pytest.raises(ValueError, match=rf"task: Unwritable could not be opened again \(.*{told}\); give"):
        runs.open_run(tmp_path / "run", Unwritable(**given))


@pytest.mark.slow
def test_the_defaults_draw_the_first_held_out_example(tmp_path):
    task = OWN(model=Sizes(d_model=6, num_heads=2, d_ff=7))
    example = task.example()
    row = np.asarray(task.held_out["inputs"][0])
    assert example.tokens[""].texts == tuple(map(str, row))
    model = task.make_model(nnx.Rngs(0))
    drawings = dict(task.pictures(model))
    assert set(drawings) == {"attention", "attention-heads"}


@pytest.mark.slow
def test_every_command_knows_the_tasks_of_a_file(tmp_path):
    words = ["train", "parity", "--steps", "2", "--batch-size", "5", "--length", "7", "--held-out-size", "7"]
    done = run([*words, "--out", "run"], tmp_path, EXAMPLE)
    assert done.returncode == 0, done.stderr
    assert "parity: Tell if a row of bits holds an odd number of ones." in done.stdout
    assert "run is finished already" in run([*words, "--out", "run"], tmp_path, EXAMPLE).stdout
    assert run(["plot", "run"], tmp_path, EXAMPLE).returncode == 0
    assert (tmp_path / "run" / "figures" / "attention.png").exists()
    unknown = run(["plot", "run"], tmp_path, "")
    assert unknown.returncode == 2
    assert "one of your own, whose file or module REGARD_TASKS names; got 'parity'" in unknown.stderr


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("nowhere.py", r"got nowhere\.py, which does not exist"),
        ("nowhere.at.all", "got nowhere.at.all, which Python does not find"),
        ("json", "expected a subclass of Task with a name in json, got none"),
        ("elsewhere/json.py", "the name of elsewhere/json.py is that of another module; rename the file"),
    ],
)
def test_what_holds_no_task_is_named(names, told, monkeypatch, capsys):
    with pytest.raises(ValueError, match=f"REGARD_TASKS: .*{told}"):
        tasks.load_tasks(names)
    monkeypatch.setenv("REGARD_TASKS", names)
    assert main(["doctor"]) == 2
    assert "REGARD_TASKS" in capsys.readouterr().err


def test_a_file_never_takes_the_name_of_a_package(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    for folder in ("packages", "own"):
        (tmp_path / folder).mkdir()
        source = EXAMPLE.read_text().replace('"parity"', f'"{folder}"')
        (tmp_path / folder / "some_package.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    with pytest.raises(ValueError, match=r"some_package\.py is that of another module"):
        tasks.load_tasks(str(tmp_path / "own" / "some_package.py"))
    tasks.load_tasks(str(tmp_path / "own" / ".." / "packages" / "some_package.py"))
    assert "packages" in tasks.TASKS


def test_a_file_that_failed_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    path = tmp_path / "mine_that_failed.py"
    path.write_text("from regard.training import tasks\nraise OSError('not yet')\n")
    for _ in range(2):
        with pytest.raises(OSError, match="not yet"):
            tasks.load_tasks(str(path))
    path.write_text(EXAMPLE.read_text().replace('"parity"', '"mended"'))
    tasks.load_tasks(str(path))
    assert "mended" in tasks.TASKS


def test_a_name_that_is_taken_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    source = EXAMPLE.read_text().replace('"parity"', '"copy"')
    (tmp_path / "mine_that_is_taken.py").write_text(source)
    with pytest.raises(ValueError, match=r"the name 'copy' of .* is taken"):
        tasks.load_tasks(str(tmp_path / "mine_that_is_taken.py"))


EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task.py"
with mock.patch.dict(tasks.TASKS):
    tasks.load_tasks(str(EXAMPLE))
    OWN = tasks.TASKS["parity"]


def run(words, where, names):
    code = "import sys; from regard.cli import main; sys.exit(main())"
    source = str(EXAMPLE.parents[1] / "src")
    environment = os.environ | {"REGARD_TASKS": str(names), "PYTHONPATH": source}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=300)
