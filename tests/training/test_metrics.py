"""metrics.jsonl: written line by line, read back, cut in one move."""

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from regard.training import metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_values_that_json_lacks_become_null_and_then_nan(path):
    values = [math.nan, math.inf, -math.inf, 0.25]
    metrics.append(path, [{"step": 3}, *({"step": 5, "loss": value} for value in values)])
    assert "NaN" not in path.read_text()
    with path.open("a") as file:
        file.write('{"step": 7, "loss": NaN}\n{"step": 7, "loss": 1e999}\n')  # which no line of ours has
    assert [line.get("loss") for line in metrics.read(path)] == [None, None, None, None, 0.25, None, None]
    steps, losses = metrics.columns(metrics.read(path), "loss")
    assert steps == [5, 5, 5, 5, 7, 7], "without the line that lacks it"
    np.testing.assert_array_equal(losses, [*[math.nan] * 3, 0.25, math.nan, math.nan])


def test_a_line_torn_by_a_kill_is_left_out(path):
    metrics.append(path, [{"step": 2}, {"step": 3}])
    path.write_text(path.read_text() + '{"step": 5, "lo')
    assert [line["step"] for line in metrics.read(path)] == [2, 3]


def test_a_value_of_another_kind_is_named(path):
    own, layers = {"step": 2, "split": "mine", "words": ["kept"]}, {"blocks.0": [1.0, None, 3]}
    sound = [own, {"step": 3, "loss": None, "seconds": 7}, {"step": 3, "split": "heads", "entropy": layers}]
    for line, name in (
        ({"loss": "x"}, "loss"),
        ({"split": "heads", "entropy": {"blocks.0": 1.0}}, "entropy"),
        ({"split": "heads", "max_score": {"blocks.0": [1.0, "x"]}}, "max_score"),
    ):
        path.unlink(missing_ok=True)
        metrics.append(path, sound)
        assert metrics.read(path) == sound
        metrics.append(path, [{"step": 5, **line}])
        with pytest.raises(ValueError, match=rf"\.jsonl, line 4 has a {name} that training never logs"):
            metrics.read(path)


def test_a_damaged_line_is_named(path):
    for line in ("{]", "[" * 100_000, "[3]", '{"loss": 1.0}', '{"step": "3"}', "\xff"):
        path.write_bytes(b'{"step": 2}\n' + line.encode("latin-1") + b'\n{"step": 5}\n')
        with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
            metrics.read(path)


def test_cutting_keeps_the_steps_up_to_the_last(path):
    metrics.append(path, [{"step": step, "loss": step / 7} for step in (2, 3, 5, 7, 11)])
    path.write_text(path.read_text() + '{"step": 13')
    assert metrics.cut(path, 5) == 2
    assert path.read_text().count("\n") == 3
    metrics.append(path, [{"step": 7, "loss": 1.0}])
    assert [line["step"] for line in metrics.read(path)] == [2, 3, 5, 7]


def test_cutting_is_all_or_nothing(path, monkeypatch):
    metrics.append(path, [{"step": 2}, {"step": 3}])
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=OSError("no space left")))
    with pytest.raises(OSError, match="no space"):
        metrics.cut(path, 2)
    assert path.read_bytes() == before


def test_the_first_bad_metric_is_named():
    assert metrics.first_nonfinite({"loss": 1.0, "accuracy": 0.0}) is None
    assert metrics.first_nonfinite({"loss": 1.0, "grad_norm": math.inf, "norm": math.nan}) == "grad_norm"
