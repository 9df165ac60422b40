"""Run directories: started, resumed, refused; nothing of the user's is ever lost."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from regard.training import checkpoints, programs, runs, settings, tasks
from regard.training.checkpoints import CheckpointError
from regard.training.runs import RunError
from small_runs import (
    Compiled,
    read_lines,
    snapshot,
    stop_after,
    tiny_copy,
    train,
)


@pytest.fixture(scope="module")
def compiled():
    return Compiled()


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compiled):
    directory = tmp_path_factory.mktemp("runs") / "finished"
    train(directory, tiny_copy(), compiled=compiled)
    return directory


@pytest.fixture(scope="module")
def half(tmp_path_factory, compiled):
    """Stopped after step 9, with checkpoints at 7 and 9."""
    directory = tmp_path_factory.mktemp("runs") / "half"
    train(directory, tiny_copy(), compiled=compiled, stop=stop_after(9))
    return directory


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
    for directory in (tmp_path / "missing", tmp_path):
        run = runs.open_run(directory, tiny_copy())
        assert run.start is None
        assert not run.is_finished
    assert not (tmp_path / "missing").exists(), "opening writes nothing"


@pytest.mark.slow
def test_a_run_directory_holds_settings_metrics_and_checkpoints(finished):
    assert sorted(path.name for path in finished.iterdir()) == ["checkpoints", "config.json", "metrics.jsonl"]
    config = json.loads((finished / "config.json").read_text())
    assert config["task"] == "copy"
    assert config["seed"] == 0
    assert config["settings"]["model"]["d_model"] == 6
    assert tasks.from_settings("copy", config["settings"]) == tiny_copy()
    assert config["versions"]["jax"] == jax.__version__
    assert [path.name for path in (finished / "checkpoints").iterdir()].count("00000017") == 1


def test_a_stopped_run_goes_on_from_its_last_checkpoint(run):
    opened = runs.open_run(run, tiny_copy())
    assert opened.start.step == 9
    assert opened.start.record["seconds"] > 0
    assert opened.note is None


def test_a_run_killed_before_its_first_checkpoint_starts_again(run):
    shutil.rmtree(run / "checkpoints")
    opened = runs.open_run(run, tiny_copy())
    assert opened.start is None
    opened.begin({})
    assert (run / "metrics.jsonl").read_text() == ""


def test_other_settings_are_listed_and_refused(run):
    other = tiny_copy(steps=23, length=5, learning_rate=0.5)
    message = refuse(run, RunError, "holds another run", task=other, seed=3)
    assert "optimization.steps: it has 17, asked for 23" in message
    assert "length: it has 3, asked for 5" in message
    assert "optimization.learning_rate: it has 0.01, asked for 0.5" in message
    assert "seed: it has 0, asked for 3" in message
    assert "--force" in message
    assert "vocab_size" not in message


def test_another_task_is_refused_without_comparing_its_settings(run):
    message = refuse(run, RunError, "task: it has 'copy', asked for 'digits'", task=tasks.Digits())
    assert "length" not in message


def test_a_directory_of_something_else_is_refused_also_with_force(tmp_path):
    directory = tmp_path / "photos"
    directory.mkdir()
    (directory / "cat.jpg").write_bytes(b"cat")
    for force in (False, True):
        message = refuse(directory, RunError, r"not a Regard run \(it holds cat\.jpg\)", force=force)
        assert "--out" in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        '{"model_type": "bert"}',
        '{"format": 1, "task": "copy", "seed": 0, "settings": {}}',
    ],
)
def test_a_foreign_or_damaged_config_is_refused_also_with_force(run, text):
    (run / "config.json").write_text(text)
    for force in (False, True):
        refuse(run, RunError, r"config\.json is damaged or not Regard's", force=force)


def test_a_truncated_config_is_refused(run):
    whole = (run / "config.json").read_text()
    (run / "config.json").write_text(whole[: len(whole) // 2])
    refuse(run, RunError, "damaged")


def test_a_config_of_a_later_format_is_refused(run):
    config = json.loads((run / "config.json").read_text()) | {"format": 2}
    (run / "config.json").write_text(json.dumps(config))
    refuse(run, RunError, "format 2")


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "run").write_text("x")
    refuse(tmp_path / "run", RunError, "is a file")


def test_a_damaged_checkpoint_is_named_with_the_way_out(run):
    file = next((run / "checkpoints" / "00000009").rglob("manifest.ocdbt"))
    file.write_bytes(file.read_bytes()[:-1])
    message = refuse(
        run, CheckpointError, r"00000009 is damaged: .*manifest\.ocdbt has \d+ bytes, \d+ were written"
    )
    assert "nothing was changed" in message
    assert "to go on from step 7" in message
    shutil.rmtree(run / "checkpoints" / "00000009")
    assert runs.open_run(run, tiny_copy()).start.step == 7


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(run):
    """As after copying checkpoints between runs: the settings say one thing, the arrays another."""
    wide = dataclasses.replace(tiny_copy(), model=settings.Sizes(d_model=8, num_heads=2, d_ff=7))
    shutil.rmtree(run / "checkpoints")
    checkpoints.save(run / "checkpoints", 9, programs.make_program(wide, 0).start(), {})
    before = snapshot(run)
    with pytest.raises(
        CheckpointError, match=r"another model or optimizer:\n.*float32\[13, 6\], found float32\[13, 8\]"
    ):
        train(run, tiny_copy())
    with pytest.raises(CheckpointError, match="another model"):
        runs.load_run(run)
    assert snapshot(run) == before


def test_never_refuses_what_is_there(run, tmp_path):
    refuse(run, RunError, "holds a run already", resume="never")
    assert runs.open_run(tmp_path / "new", tiny_copy(), resume="never").start is None


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
        (inside, tiny_copy(steps=23), "is inside --out"),
        (str(tmp_path / "nowhere"), tiny_copy(), "is not a Regard run"),
        (other, tiny_copy(steps=7), "is at step 7 already"),
    ):
        refuse(run, RunError, message, task=task, resume=resume, force=True)
    (tmp_path / "other" / "metrics.jsonl").write_text("{\n")
    opened = runs.open_run(run, tiny_copy(), resume=other, force=True)
    before = snapshot(run)
    with pytest.raises(RunError, match="line 1 is not JSON"):
        opened.begin({})
    assert snapshot(run) == before


def test_a_run_that_was_forced_once_replaces_nothing_later(run):
    opened = runs.open_run(run, tiny_copy(), force=True)
    opened.begin({})
    checkpoints.save(run / "checkpoints", 9, {"a": np.arange(3.0)}, {})
    with pytest.raises(RunError, match="has changed since it was opened"):
        opened.tidy()


def test_forcing_again_after_a_kill_in_between_works(run):
    """Settings go last, so what a kill leaves behind is still known as a run."""
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").unlink()
    assert runs.open_run(run, tiny_copy(steps=23), force=True).start is None


def test_a_finished_run_knows_it(finished):
    assert runs.open_run(finished, tiny_copy()).is_finished


def test_other_versions_are_mentioned(run):
    config = json.loads((run / "config.json").read_text())
    config["versions"]["jax"] = "0.4.1"
    (run / "config.json").write_text(json.dumps(config))
    assert f"jax 0.4.1 -> {jax.__version__}" in runs.open_run(run, tiny_copy()).note


@pytest.mark.slow
def test_a_branch_goes_on_elsewhere_with_other_steps(half, compiled, tmp_path):
    before = snapshot(half)
    longer = tiny_copy(steps=21, learning_rate=0.02)
    for source in (half, half / "checkpoints" / "00000009"):
        directory = tmp_path / f"branch-{source.name}"
        opened = runs.open_run(directory, longer, seed=5, resume=str(source))
        assert (opened.start.step, opened.source) == (9, half)
        assert train(directory, longer, seed=5, resume=str(source), compiled=compiled).step == 21
        assert json.loads((directory / "config.json").read_text())["continued_from"] == str(half)
        assert [line for line in read_lines(directory) if line["step"] <= 9] == read_lines(half)
        assert runs.open_run(directory, longer, seed=5, resume=str(source)).is_finished, (
            "own checkpoint first"
        )
    assert (
        runs.open_run(tmp_path / "third", longer, resume=str(half / "checkpoints" / "00000007")).start.step
        == 7
    )
    assert snapshot(half) == before


def test_a_branch_needs_a_checkpoint_of_the_same_model(half, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    refuse(out, RunError, "is not a Regard run", resume=str(tmp_path / "nowhere"))
    refuse(out, RunError, "length: it has 3, asked for 5", resume=str(half), task=tiny_copy(length=5))
    refuse(out, RunError, "is at step 9 already", resume=str(half), task=tiny_copy(steps=9))
    refuse(half, RunError, "holds another run", resume=str(half), task=tiny_copy(steps=23))


@pytest.mark.slow
def test_loading_a_run_gives_its_task_and_model(finished):
    task, model = runs.load_run(finished)
    assert task == tiny_copy()
    saved = checkpoints.load(finished / "checkpoints" / "00000017")
    kernel = np.asarray(model.head.kernel[...])
    assert np.array_equal(kernel, saved.arrays["params/head/kernel/value"])
    once, again = (model(task.held_out["inputs"]) for _ in range(2))
    assert np.array_equal(once, again), "evaluation mode: dropout is off"
    recorded = saved.record["held_out"]["loss"]
    assert float(task.evaluate(model, task.held_out)["loss"]) == pytest.approx(recorded, rel=1e-6)


def test_a_branch_without_a_checkpoint_of_its_own_never_starts_from_nothing(half, tmp_path):
    """As after a kill before the first: fresh parameters would follow the metrics of trained ones."""
    directory, longer = tmp_path / "branch", tiny_copy(steps=21)
    runs.open_run(directory, longer).begin({})
    runs.open_run(directory, longer, resume=str(half)).begin({})
    assert json.loads((directory / "config.json").read_text())["continued_from"] == str(half)
    for resume in ("auto", "newest-whole"):
        told = rf"has no checkpoint of its own yet; give --resume {half}, or --force"
        refuse(directory, RunError, told, task=longer, resume=resume)
    assert runs.open_run(directory, longer, resume=str(half)).start.step == 9
    assert runs.open_run(directory, longer, force=True).start is None


def test_loading_needs_a_run_with_a_checkpoint(run, tmp_path):
    with pytest.raises(RunError, match=r"no config\.json"):
        runs.load_run(tmp_path / "nowhere")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RunError, match="no checkpoint yet"):
        runs.load_run(run)
