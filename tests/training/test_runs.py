"""Run directories: started, resumed, refused; nothing of the user's is ever lost."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from refusals import assert_refused
from regard.training import checkpoints, programs, runs, settings, tasks
from regard.training.checkpoints import CheckpointError
from regard.training.runs import RunError
from small_runs import assert_same_run, snapshot, tiny_copy, train


@pytest.fixture
def run(half, tmp_path):
    return shutil.copytree(half, tmp_path / "run")


def refuse(directory, error, message, **options):
    """Opening raises, and not a byte below the directory's parent changes."""
    before = snapshot(directory.parent)
    task = options.pop("task", tiny_copy())
    with pytest.raises(error, match=message) as caught:
        runs.open_run(directory, task, **options)
    assert snapshot(directory.parent) == before
    return str(caught.value)


def test_a_new_directory_starts_from_scratch(tmp_path):
    for directory, resume in ((tmp_path / "missing", "never"), (tmp_path, "auto")):
        run = runs.open_run(directory, tiny_copy(), resume=resume, seed=2**63 - 1)
        assert (run.start, run.is_finished) == (None, False)
    assert not (tmp_path / "missing").exists(), "opening writes nothing"


def test_a_run_directory_holds_settings_metrics_and_checkpoints(whole):
    directory = whole[0]
    assert {path.name for path in directory.iterdir()} == {"checkpoints", "config.json", "metrics.jsonl"}
    config = json.loads((directory / "config.json").read_text())
    assert (config["task"], config["seed"], config["versions"]["jax"]) == ("copy", 0, jax.__version__)
    assert tasks.from_settings("copy", config["settings"]) == tiny_copy()
    assert runs.open_run(directory, tiny_copy()).is_finished


def test_other_settings_are_listed_and_refused(run):
    message = refuse(run, RunError, "holds another run", task=tiny_copy(steps=23, length=5), seed=3)
    told = "optimization.steps: it has 17, asked for 23", "length: it has 3, asked for 5", "force=True"
    assert all(words in message for words in told), message
    assert ("seed: it has 0, asked for 3" in message, "vocab_size" in message) == (True, False)
    refuse(run, RunError, "holds a run already", resume="never")
    runs.open_run(run, seldom := tiny_copy(cadence=settings.Cadence(evaluate_every=9))).begin({})
    written = json.loads((run / "config.json").read_text())["settings"]
    assert tasks.from_settings("copy", written) == seldom, "which changes no number"


def test_a_directory_of_something_else_is_refused_also_with_force(tmp_path):
    file = tmp_path / "photos" / "cat.jpg"
    file.parent.mkdir()
    file.write_bytes(b"cat")
    refuse(file, RunError, "is a file")
    refuse(tmp_path / "no\udcffUTF-8", RunError, "expected a path in UTF-8")
    for name in ("run[1]/a", "q/gs:", "q:/a"):
        refuse(tmp_path / name, CheckpointError, "expected a path without \\[ and")
    for force in (False, True):
        message = refuse(file.parent, RunError, r"not a Regard run \(it holds cat\.jpg\)", force=force)
        assert "directory=" in message


def test_a_foreign_damaged_or_later_config_is_refused_also_with_force(run):
    own = json.loads((run / "config.json").read_text())
    later, partial = (json.dumps(config) for config in (own | {"format": 2}, {"format": 1, "task": "copy"}))
    for text in ("", "{", "[" * 100_000, "[]", '{"model_type": "bert"}', later, partial):
        (run / "config.json").write_text(text)
        for force in (False, True):
            refuse(run, RunError, r"config\.json is damaged or not Regard's", force=force)


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(run):
    """As after copying checkpoints between runs: the settings say one thing, the arrays another."""
    arrays = checkpoints.load(run / "checkpoints" / "00000009").arrays
    arrays["params/head/kernel/value"] = np.zeros((8, 13), np.float32)
    shutil.rmtree(run / "checkpoints")
    checkpoints.save(run / "checkpoints", 9, arrays, {})
    before = snapshot(run)
    with pytest.raises(CheckpointError, match=r"optimizer:\n.*float32\[6, 13\], found float32\[8, 13\]"):
        train(run, tiny_copy())
    assert_refused((lambda: runs.load_run(run), "another model", CheckpointError))
    assert snapshot(run) == before


def test_force_deletes_the_run_and_nothing_else(run):
    (run / "figures").mkdir()
    (run / "figures" / "curves.png").write_bytes(b"old")
    (run / "notes.txt").write_text("mine")
    before = snapshot(run)
    opened = runs.open_run(run, tiny_copy(steps=23), force=True)
    assert opened.start is None
    opened.tidy()
    assert snapshot(run) == before, "until everything else is checked"
    opened.begin({})
    assert sorted(path.name for path in run.iterdir()) == ["config.json", "notes.txt"]
    assert json.loads((run / "config.json").read_text())["settings"]["optimization"]["steps"] == 23


def test_force_deletes_nothing_where_the_rest_is_refused(run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    inside, other = (str(folder / "checkpoints" / "00000007") for folder in (run, tmp_path / "other"))
    for resume, task, message in (
        (inside, tiny_copy(steps=23), "is inside the directory itself"),
        (str(tmp_path / "nowhere"), tiny_copy(), "is not a Regard run"),
        (other, tiny_copy(steps=7), "is at step 7 already"),
    ):
        refuse(run, RunError, message, task=task, resume=resume, force=True)
    (tmp_path / "other" / "metrics.jsonl").write_text("{\n")
    opened = runs.open_run(run, tiny_copy(), resume=other, force=True)
    before = snapshot(run)
    assert_refused((lambda: opened.begin({}), "line 1 is not JSON", RunError))
    assert snapshot(run) == before


def test_other_versions_are_mentioned_and_what_a_kill_leaves_is_a_run(run):
    config = json.loads((run / "config.json").read_text())
    config["versions"]["jax"] = "0.4.1"
    (run / "config.json").write_text(json.dumps(config))
    assert f"jax 0.4.1 -> {jax.__version__}" in runs.open_run(run, tiny_copy()).note
    # Settings go last, so what a kill leaves behind of a run that is deleted is still known as one.
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    assert runs.open_run(run, tiny_copy(steps=23), force=True).start is None
    told = (run, "no checkpoint yet"), (run / "nowhere", r"no config\.json")
    assert_refused(*told, error=RunError, run=runs.load_run)


def test_a_branch_goes_on_elsewhere_with_other_settings_of_training(whole, half, tmp_path):
    before, directory, source = snapshot(half), tmp_path / "branch", str(half)
    assert train(directory, tiny_copy(), resume=source).step == 17
    assert_same_run(directory, whole[0])
    assert json.loads((directory / "config.json").read_text())["continued_from"] == source
    assert runs.open_run(directory, tiny_copy(), resume=source).is_finished, "own checkpoint first"
    other, source = tiny_copy(steps=11, learning_rate=0.02), str(half / "checkpoints" / "00000007")
    opened = runs.open_run(tmp_path / "third", other, seed=5, resume=source)
    assert (opened.start.step, opened.source, opened.is_finished) == (7, half, False)
    assert snapshot(half) == before


def test_a_branch_may_loop_over_layers_keep_less_and_begin_or_end_an_average(half, tmp_path):
    def go_on(name, source, task):
        train(tmp_path / name, task, resume=str(source))
        return checkpoints.load_newest(tmp_path / name / "checkpoints")[0].arrays

    before, looped = checkpoints.load_newest(half / "checkpoints")[0], {"scan_layers": True, "remat": "full"}
    task = tiny_copy(steps=10, model=dataclasses.replace(tiny_copy().model, **looped), ema_decay=0.75)
    plain, averaged = go_on("plain", half, tiny_copy(steps=10)), go_on("averaged", half, task)
    names = [name.removeprefix("params/") for name in plain if name.startswith("params/")]
    assert len(names) > 10
    for name in names:
        params = averaged[f"params/{name}"]
        np.testing.assert_allclose(params, plain[f"params/{name}"], rtol=1e-4, atol=1e-6)
        mean = 0.75 * before.arrays[f"params/{name}"] + 0.25 * params
        np.testing.assert_allclose(averaged[f"average/{name}"], mean, rtol=1e-5, atol=1e-7)
    ended = go_on("ended", tmp_path / "averaged", tiny_copy(steps=11))
    assert {*ended} == {*plain}
    for source, asked in ((half, task), (tmp_path / "averaged", tiny_copy())):  # as on a mesh
        start = checkpoints.load_newest(source / "checkpoints")[0]
        shapes = programs.make_program(asked, 0).shapes
        places = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
        placed, whole = (checkpoints.fit(start, shapes, places=each) for each in (places, None))
        jax.tree.map(np.testing.assert_array_equal, placed, whole)


def test_a_branch_needs_a_checkpoint_of_the_same_model(half, tmp_path):
    (out := tmp_path / "out").mkdir()
    refuse(out, RunError, "is not a Regard run", resume=str(tmp_path / "nowhere"))
    (notes := tmp_path / "notes").mkdir()
    (notes / "a.txt").write_text("mine")
    refuse(out, RunError, r"not a Regard run \(it holds a.txt\); give another resume=", resume=str(notes))
    refuse(out, RunError, "length: it has 3, asked for 5", resume=str(half), task=tiny_copy(length=5))
    refuse(out, RunError, "is at step 9 already", resume=str(half), task=tiny_copy(steps=9))
    refuse(half, RunError, "holds another run", resume=str(half), task=tiny_copy(steps=23))


def test_a_branch_without_a_checkpoint_of_its_own_never_starts_from_nothing(half, tmp_path):
    """As after a kill before the first: fresh parameters would follow the metrics of trained ones."""
    directory, longer = tmp_path / "branch", tiny_copy(steps=21)
    runs.open_run(directory, longer).begin({})
    runs.open_run(directory, longer, resume=str(half)).begin({})
    assert json.loads((directory / "config.json").read_text())["continued_from"] == str(half)
    for resume in ("auto", "newest-whole"):
        told = rf"has no checkpoint of its own yet; give resume='{half}', or force=True"
        refuse(directory, RunError, told, task=longer, resume=resume)
    assert runs.open_run(directory, longer, resume=str(half)).start.step == 9
    assert runs.open_run(directory, longer, force=True).start is None
