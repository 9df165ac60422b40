"""Watching the heads while training: right numbers, in order, and the page's part about a run."""

import math
from types import SimpleNamespace

import jax
import numpy as np

from regard.training import head_statistics, metrics
from regard.training.history import training_document


def test_entropy_is_a_mean_and_the_logit_a_maximum_over_queries_that_read():
    """By hand, for two rows, two heads and three queries, some of which may attend to nothing."""
    entropy = np.float32([[[1, 2, 0], [3, 0, 0]], [[6, 0, 0], [4, 5, 0]]])
    none = -np.inf
    largest = np.float32([[[7, -1, none], [2, none, none]], [[5, none, none], [3, 8, none]]])
    layer, empty = {"entropy": entropy, "max_score": largest}, np.full((2, 2, 3), -np.inf, np.float32)
    seen = {"encoder": [layer], "decoder": [{"self": layer, "cross": layer | {"max_score": empty}}]}
    task = SimpleNamespace(read=lambda model, batch, aux: (None, set(aux) == {*layer} and seen))
    found = jax.device_get(head_statistics.measure_heads(task, None, {}))
    assert set(found["entropy"]) == {"encoder.0", "decoder.0.self", "decoder.0.cross"}
    assert found["entropy"]["encoder.0"].tolist() == [3, 4]
    assert found["max_score"]["decoder.0.self"].tolist() == [7, 8]
    assert np.isnan(found["entropy"]["decoder.0.cross"]).all()
    assert (found["max_score"]["decoder.0.cross"] == -np.inf).all()


def test_lines_are_in_order_of_layers_and_hold_null_for_what_is_not_finite(tmp_path):
    layers = ["blocks.10", "blocks.2", "pooling", "decoder.0.self"]
    stats = {"entropy": {layer: np.float32([1.23456789, math.nan]) for layer in layers}}
    stats["max_score"] = {layer: np.float32([-math.inf, 3]) for layer in layers}
    metrics.append(tmp_path / "m.jsonl", [head_statistics.describe_stats(3, stats)])
    (line,) = metrics.read(tmp_path / "m.jsonl")
    assert list(line["entropy"]) == ["blocks.2", "blocks.10", "decoder.0.self", "pooling"]
    assert line["entropy"]["pooling"] == [1.23457, None]
    assert line["max_score"]["pooling"] == [None, 3.0]
    steps, rows, values = head_statistics.read_heads([line], "max_score")
    assert (steps, rows[:2]) == ([3], ["blocks.2 head 0", "blocks.2 head 1"])
    np.testing.assert_array_equal(values[:2], [[math.nan], [3.0]])


def test_heads_that_come_and_go_leave_gaps():
    lines = [
        {"step": 2, "split": "heads", "entropy": {"b": [2.0]}},
        {"step": 1, "split": "heads", "entropy": {"a": [1.0], "b": [3.0]}},
        {"step": 2, "split": "heads", "entropy": {"b": [5.0]}},
        {"step": 3, "loss": 1.0, "entropy": 7.0},
    ]
    steps, rows, values = head_statistics.read_heads(lines, "entropy")
    assert (steps, rows) == ([1, 2], ["a head 0", "b head 0"])
    np.testing.assert_array_equal(values, [[1.0, math.nan], [3.0, 5.0]])
    assert head_statistics.read_heads([], "entropy")[2].shape == (0, 0)


def test_a_run_has_curves_the_rate_is_that_of_the_clock_and_nothing_logged_is_no_curve(tmp_path):
    assert training_document(tmp_path) == {"title": tmp_path.name, "curves": [], "maps": []}
    seconds = [(1, 0.5), (3, 0.501), (7, 1.0), (9, 1.0), (11, 3.0)]  # 1 and 3 as one
    metrics.append(tmp_path / "metrics.jsonl", [{"step": step, "seconds": clock} for step, clock in seconds])
    (curve,) = training_document(tmp_path)["curves"]
    assert curve["name"] == "steps_per_second"
    np.testing.assert_allclose(curve["points"], [[9, 11], [6 / 0.499, 1.0]], rtol=1e-6)
    metrics.append(tmp_path / "metrics.jsonl", [{"step": 13, "loss": 0.5, "held_out_loss": 0.75}])
    found = {(line["name"], line["split"]): line["points"] for line in training_document(tmp_path)["curves"]}
    assert found["loss", "train"].tolist() == [[13.0], [0.5]]
    assert found["loss", "test"].tolist() == [[13.0], [0.75]]
