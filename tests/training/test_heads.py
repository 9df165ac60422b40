"""Watching the heads while training: right numbers, the same after a kill, and no bit of training changed."""

import dataclasses
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx

from regard.training import checkpoints, heads, loop, metrics, runs, settings, tasks
from regard.training.history import training_document
from regard.training.loop import Progress
from small_runs import (
    CADENCE,
    Compiled,
    read_lines,
    stop_after,
    tiny_copy,
    train,
)

WATCHED = dataclasses.replace(CADENCE, heads_every=4)


def watched(**changes):
    return tiny_copy(cadence=WATCHED, **changes)


@pytest.fixture(scope="module")
def compiled():
    return Compiled()


@pytest.fixture(scope="module")
def whole(tmp_path_factory, compiled):
    directory = tmp_path_factory.mktemp("heads") / "whole"
    train(directory, watched(), compiled=compiled)
    return directory


def split(directory):
    """Lines about heads, and all others."""
    lines = read_lines(directory)
    return [line for line in lines if "split" in line], [line for line in lines if "split" not in line]


@pytest.mark.slow
def test_the_heads_are_looked_at_when_due_at_the_start_and_at_the_end(whole):
    seen, others = split(whole)
    assert [line["step"] for line in seen] == [0, 4, 8, 12, 16, 17]
    assert [line["step"] for line in others] == [1, 3, 5, 6, 9, 10, 12, 15, 17]
    steps = [line["step"] for line in read_lines(whole)]
    assert steps == sorted(steps)
    assert all(line["split"] == "heads" for line in seen)
    assert all(np.shape(line[name]["blocks.0"]) == (2,) for line in seen for name in heads.AUX)
    assert seen[0]["entropy"] != seen[-1]["entropy"]


SMALL = {
    "threshold": tasks.Threshold(length=5, held_out_size=13),
    "reverse": tasks.Reverse(vocab_size=7, min_length=2, max_length=5, held_out_size=13),
    "digits": tasks.Digits(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_entropy_and_logits_are_those_of_the_definition(name):
    """Against weights and scores in float64; the mask decides which logits count."""
    sizes = settings.Sizes(d_model=10, num_heads=2, d_ff=7, num_layers=2)
    task = dataclasses.replace(SMALL[name], model=sizes)
    model = task.make_model(nnx.Rngs(3))
    model.eval()
    found = jax.device_get(heads.measure_heads(task, model, task.probe))
    seen = dict(heads._walk(task.read(model, task.probe, ("entropy", "weights", "scores"))[1]))
    assert set(seen) == set(found["entropy"]) == set(found["max_score"])
    assert len(seen) == {"threshold": 2, "reverse": 6, "digits": 3}[name]
    for layer, aux in seen.items():
        weights = np.asarray(aux["weights"], np.float64)
        assert weights.shape[0] == 8
        reads = weights.sum(-1) > 0
        terms = weights * np.log(weights, where=weights > 0, out=np.zeros_like(weights))
        expected = [-terms[:, h].sum(-1)[reads[:, h]].mean() for h in range(2)]
        np.testing.assert_allclose(found["entropy"][layer], expected, rtol=1e-5)
        scores = np.where(weights > 0, np.asarray(aux["scores"], np.float64), -np.inf)
        np.testing.assert_allclose(found["max_score"][layer], scores.max((0, 2, 3)), rtol=1e-6)


@pytest.mark.slow
def test_the_text_task_looks_within_documents(tmp_path):
    for index in range(5):
        (tmp_path / f"{index}.txt").write_text(f"{index} tides and low tides\n" * 4)
    task = tasks.Text(
        files=(str(tmp_path),), length=17, model=settings.DecoderSizes(d_model=8, num_heads=2, d_ff=7)
    )
    model = task.make_model(nnx.Rngs(3))
    found = heads.measure_heads(task, model, task.probe)["entropy"]
    assert list(found) == [f"blocks.{layer}" for layer in range(4)]
    weights = np.asarray(task.read(model, task.probe, ("weights",))[1]["blocks"][1]["weights"], np.float64)
    terms = weights * np.log(weights, where=weights > 0, out=np.zeros_like(weights))
    np.testing.assert_allclose(found["blocks.1"], -terms.sum(-1).mean((0, 2)), rtol=1e-5)


@pytest.mark.slow
def test_looking_changes_no_bit_of_training(whole, tmp_path):
    train(tmp_path / "blind", tiny_copy())
    seen, others = split(tmp_path / "blind")
    assert seen == []
    assert others == split(whole)[1]
    one, other = (checkpoints.load(path / "checkpoints" / "00000017") for path in (whole, tmp_path / "blind"))
    assert all(one.arrays[name].tobytes() == array.tobytes() for name, array in other.arrays.items())


class Killer(Progress):
    """A listener that raises at one event."""

    def __init__(self, *moment):
        self.moment = moment

    def happen(self, *event):
        if event == self.moment:
            raise RuntimeError("killed")

    def stepped(self, step, steps, values, steps_per_second):
        self.happen("stepped", step)

    def evaluated(self, step, values):
        self.happen("evaluated", step)

    def saved(self, step):
        self.happen("saved", step)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [("stepped", 9), ("stepped", 1), ("saved", 7), ("evaluated", 17)], ids=str)
def test_killed_and_resumed_logs_the_same(whole, compiled, tmp_path, moment):
    """Also when killed before the first checkpoint, with the line of step 0 written."""
    with pytest.raises(RuntimeError, match="killed"):
        train(tmp_path / "run", watched(), compiled=compiled, progress=Killer(*moment))
    assert read_lines(tmp_path / "run")[0]["step"] == 0
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 16, "split": "heads", "entr')
    train(tmp_path / "run", watched(), compiled=compiled)
    assert read_lines(tmp_path / "run") == read_lines(whole)


@pytest.mark.slow
def test_interrupted_and_resumed_logs_the_same(whole, compiled, tmp_path):
    for stop in (1, 4, 11):
        train(tmp_path / "run", watched(), compiled=compiled, stop=stop_after(stop))
    train(tmp_path / "run", watched(), compiled=compiled)
    assert read_lines(tmp_path / "run") == read_lines(whole)


@pytest.mark.slow
def test_a_run_of_a_version_that_did_not_look_goes_on(whole, compiled, tmp_path):
    task = tiny_copy(cadence=dataclasses.replace(CADENCE, heads_every=20))
    train(tmp_path / "run", task, compiled=compiled, stop=stop_after(9))
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    del config["settings"]["cadence"]["heads_every"]
    path.write_text(json.dumps(config))
    assert train(tmp_path / "run", task, compiled=compiled).status == "finished"
    assert split(tmp_path / "run")[1] == split(whole)[1]
    assert split(tmp_path / "run")[0][-1] == split(whole)[0][-1]
    assert runs.load_run(tmp_path / "run")[0] == task


def test_what_is_not_finite_is_null(tmp_path):
    stats = {
        "entropy": {"a": np.float32([1.23456789, math.nan])},
        "max_score": {"a": np.float32([-math.inf, 3])},
    }
    metrics.append(tmp_path / "m.jsonl", [heads.describe_stats(3, stats)])
    (line,) = metrics.read(tmp_path / "m.jsonl")
    assert line["entropy"]["a"] == [1.23457, None]
    assert line["max_score"]["a"] == [None, 3.0]
    steps, rows, values = heads.read_heads([line], "max_score")
    assert (steps, rows) == ([3], ["a head 0", "a head 1"])
    np.testing.assert_array_equal(values, [[math.nan], [3.0]])


def test_layers_come_in_order():
    names = ["blocks.10", "blocks.2", "pooling", "decoder.0.self"]
    stats = {name: {layer: np.zeros(1, np.float32) for layer in names} for name in heads.AUX}
    line = heads.describe_stats(0, stats)
    assert list(line["entropy"]) == ["blocks.2", "blocks.10", "decoder.0.self", "pooling"]


def test_heads_that_come_and_go_leave_gaps():
    lines = [
        {"step": 2, "split": "heads", "entropy": {"b": [2.0]}},
        {"step": 1, "split": "heads", "entropy": {"a": [1.0], "b": [3.0]}},
        {"step": 2, "split": "heads", "entropy": {"b": [5.0]}},
        {"step": 3, "loss": 1.0, "entropy": 7.0},
    ]
    steps, rows, values = heads.read_heads(lines, "entropy")
    assert (steps, rows) == ([1, 2], ["a head 0", "b head 0"])
    np.testing.assert_array_equal(values, [[1.0, math.nan], [3.0, 5.0]])
    assert heads.read_heads([], "entropy")[2].shape == (0, 0)


def test_heads_every_must_not_be_negative():
    with pytest.raises(ValueError, match="heads_every must be at least 0, got -1"):
        settings.Cadence(heads_every=-1)


# The page's part about training


@pytest.mark.slow
def test_the_document_of_a_run_holds_its_curves(whole):
    document = training_document(whole)
    assert document["title"] == "whole"
    curves = {(curve["name"], curve["split"]): curve for curve in document["curves"]}
    names = ["loss", "accuracy", "token_accuracy"]
    split_names = [(name, part) for name in names for part in ("train", "test")]
    whole_names = [(name, None) for name in ("learning_rate", "grad_norm", "parameter_norm")]
    assert set(curves) - {("steps_per_second", None)} == {*split_names, *whole_names}
    lines = split(whole)[1]
    steps, values = curves["loss", "train"]["points"]
    assert steps.tolist() == [line["step"] for line in lines]
    np.testing.assert_array_equal(values, np.float32([line["loss"] for line in lines]))
    assert curves["loss", "test"]["points"][0].tolist() == [5, 10, 15, 17]
    assert [entry["name"] for entry in document["maps"]] == ["entropy", "max_score"]
    for entry in document["maps"]:
        assert entry["steps"] == [0, 4, 8, 12, 16, 17]
        assert entry["rows"] == ["blocks.0 head 0", "blocks.0 head 1"]
        assert (entry["values"].shape, entry["values"].dtype) == ((2, 6), np.float32)


def test_the_rate_is_that_of_the_clock(tmp_path):
    seconds = [(1, 0.5), (3, 1.0), (7, 1.0), (11, 3.0)]
    metrics.append(tmp_path / "metrics.jsonl", [{"step": step, "seconds": clock} for step, clock in seconds])
    (curve,) = training_document(tmp_path)["curves"]
    assert curve["name"] == "steps_per_second"
    assert curve["points"].tolist() == [[3.0, 11.0], [4.0, 2.0]]


def test_a_run_that_logged_nothing_has_an_empty_document(tmp_path):
    assert training_document(tmp_path) == {"title": tmp_path.name, "curves": [], "maps": []}


@pytest.mark.slow
def test_many_looks_are_optimized_and_see_the_same(compiled, tmp_path, monkeypatch):
    """17 looks count as many: the numbers agree with those of the program compiled fast."""
    asked = []
    compile_all = loop._Session._compile

    def compile_and_tell(self, what, *arguments, options=None):
        asked.append((what, options))
        return compile_all(self, what, *arguments, options=options)

    monkeypatch.setattr(loop._Session, "_compile", compile_and_tell)
    train(tmp_path / "few", watched(), compiled=compiled)
    monkeypatch.setattr(loop, "FEW_MEASUREMENTS", 3)
    train(tmp_path / "many", watched(), compiled=compiled)
    assert [options for what, options in asked if what == "heads"] == [loop.LITTLE_WORK, None]
    few, many = (split(tmp_path / name)[0] for name in ("few", "many"))
    for one, other in zip(few, many, strict=True):
        for name in heads.AUX:
            np.testing.assert_allclose(one[name]["blocks.0"], other[name]["blocks.0"], rtol=1e-4)
