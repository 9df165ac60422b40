"""A task of one's own: one class, whose runs resume; one variable, and every command knows it."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal
from unittest import mock

import pytest

from command_runs import run_command
from regard.training import runs, tasks
from regard.training.settings import Sizes
from small_runs import begin, share_programs

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_task.py"


@pytest.fixture(autouse=True)
def _own_tasks():
    with mock.patch.dict(tasks.TASKS):
        yield


def test_every_command_knows_the_tasks_of_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("REGARD_TASKS", str(EXAMPLE))
    directory = tmp_path / "run"
    sizes = ["--d-model", "6", "--num-heads", "2", "--d-ff", "7", "--length", "7", "--held-out-size", "7"]
    words = ["train", "parity", "--steps", "2", "--batch-size", "5", *sizes, "--out", str(directory)]
    with share_programs():
        told, again = (run_command(capsys, *words).out for _ in range(2))
    assert "parity: Tell if a row of bits holds an odd number of ones." in told
    assert "run is finished already" in again
    tasks.TASKS.pop("parity")
    with mock.patch.object(tasks, "_list_subclasses", return_value=()):  # as in another program
        task, model = runs.load_run(directory)
    tokens = task.watch(model).calls[0].query_tokens
    assert tokens.texts == tuple(map(str, task.held_out["inputs"][0].tolist())), "the first example"
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"task": "nobody's"}))
    told = 'one of your own, got "nobody\'s"; import the module that defines it, or name its file in the'
    for names, failed in ((str(EXAMPLE), "REGARD_TASKS"), ("nowhere", "which failed to be read (Val")):
        monkeypatch.setenv("REGARD_TASKS", names)
        with pytest.raises(runs.RunError, match=f"json: task: .*{told}.*{re.escape(failed)}"):
            runs.load_run(directory)


def test_a_class_without_a_name_of_its_own_is_refused_before_it_trains(tmp_path):
    class Mine(tasks.Copy):
        pass

    told = r"task: .*Mine has the name of Copy, 'copy'; give the class a name of its own"
    with pytest.raises(ValueError, match=told):
        runs.open_run(tmp_path / "run", Mine())


@dataclass(frozen=True)
class ManySettings(tasks.Copy):
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
    numbers: dict[int, int] = field(default_factory=dict)


GIVEN = {
    "mode": "b", "sizes": (2, 3), "pair": (5, 7.5), "plain": (1, "two"), "steps": [2, 3],
    "names": {"a": 1, "b": "two"}, "nested": {"small": (Sizes(d_model=8), Sizes(num_layers=2))},
    "other": Sizes(d_model=12), "anything": {"a": [None]},
}  # fmt: skip


def test_settings_of_many_types_come_back_and_a_subclass_of_a_preset_is_not_registered(tmp_path):
    sizes = {"length": 3, "held_out_size": 7, "model": Sizes(d_model=6, num_heads=2, d_ff=7)}
    for number, given in enumerate(({}, GIVEN)):
        task, directory = ManySettings(**sizes, **given), tmp_path / str(number)
        begin(directory, task)
        assert runs.open_run(str(directory), task).start.step == 1
        assert runs.load_run(str(directory))[0] == task
    with pytest.raises(runs.RunError) as caught:
        runs.open_run(directory, ManySettings())
    assert all(re.search(f"{name}.*: it has .*, asked for", str(caught.value)) for name in GIVEN)


def test_a_model_without_a_declared_type_comes_back():
    @dataclass(frozen=True)
    class Inherited(tasks.SyntheticTask):
        name: ClassVar[str] = "inherited"
        config = make_model = make_batch = measure = None

    task = Inherited(model=Sizes(d_model=12))
    assert tasks.from_settings(task.name, tasks.to_settings(task)) == task


def test_settings_that_would_not_come_back_are_refused_before_training(tmp_path):
    for given, told in (
        ({"anything": {1}}, "Object of type set is not JSON serializable"),
        ({"numbers": {1: 2}}, "many-settings.numbers must be int, got '1'"),
    ):
        with pytest.raises(ValueError, match=rf"Settings could not be opened again \(.*{told}\); give"):
            runs.open_run(tmp_path / "run", ManySettings(**given))


def test_what_holds_no_task_is_named(monkeypatch, capsys):
    for names, told in (
        ("nowhere.py", r"got nowhere\.py, which does not exist"),
        ("nowhere.at.all", "got nowhere.at.all, which Python does not find"),
        ("json", "expected a subclass of Task with a name in json, got none"),
        ("elsewhere/json.py", "the name of elsewhere/json.py is that of another module; rename the file"),
    ):
        with pytest.raises(ValueError, match=f"REGARD_TASKS: .*{told}"):
            tasks.load_tasks(names)
    monkeypatch.setenv("REGARD_TASKS", names)
    assert "REGARD_TASKS" in run_command(capsys, "doctor", code=2).err


def write_example(path, name):
    path.parent.mkdir(exist_ok=True)
    path.write_text(EXAMPLE.read_text().replace('"parity"', f'"{name}"'))
    return str(path)


def test_a_file_never_takes_the_name_of_a_package_or_of_another_task(tmp_path, monkeypatch):
    _, own = (write_example(tmp_path / name / "some_package.py", name) for name in ("packages", "own"))
    monkeypatch.syspath_prepend(tmp_path / "packages")
    with pytest.raises(ValueError, match=r"some_package\.py is that of another module"):
        tasks.load_tasks(own)
    tasks.load_tasks(str(tmp_path / "own" / ".." / "packages" / "some_package.py"))
    assert "packages" in tasks.TASKS
    with pytest.raises(ValueError, match=r"the name 'copy' of .* is taken"):
        tasks.load_tasks(write_example(tmp_path / "mine_that_is_taken.py", "copy"))


def test_a_file_that_failed_is_read_again(tmp_path):
    path = tmp_path / "mine_that_failed.py"
    path.write_text("from regard.training import tasks\nraise OSError('not yet')\n")
    for _ in range(2):
        with pytest.raises(OSError, match="not yet"):
            tasks.load_tasks(str(path))
    tasks.load_tasks(write_example(path, "mended"))
    assert "mended" in tasks.TASKS
