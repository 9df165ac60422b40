"""metrics.jsonl: written line by line, read back, cut in one move."""

import json
import math
from pathlib import Path

import pytest

from regard.training import metrics


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_lines_come_back_in_order(path):
    metrics.append(path, [{"step": 2, "loss": 0.1}])
    metrics.append(path, [{"step": 3, "loss": 1e-7, "held_out_loss": 5.0}, {"step": 5}])
    assert metrics.read(path) == [
        {"step": 2, "loss": 0.1},
        {"step": 3, "loss": 1e-7, "held_out_loss": 5.0},
        {"step": 5},
    ]


def test_a_missing_file_has_no_lines(path):
    assert metrics.read(path) == []
    assert metrics.cut(path, 7) == 0
    assert not path.exists()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_lacks_become_null_and_then_nan(path, value):
    metrics.append(path, [{"step": 3, "loss": value}, {"step": 5, "loss": 0.25}])
    assert "null" in path.read_text()
    assert json.loads(path.read_text().splitlines()[0]) == {"step": 3, "loss": None}
    steps, losses = metrics.columns(metrics.read(path), "loss")
    assert steps == [3, 5]
    assert math.isnan(losses[0])
    assert losses[1] == 0.25


def test_columns_leave_out_lines_without_the_metric():
    lines = [{"step": 2, "loss": 0.5}, {"step": 3}, {"step": 5, "loss": 0.25}]
    assert metrics.columns(lines, "loss") == ([2, 5], [0.5, 0.25])


def test_a_line_torn_by_a_kill_is_left_out(path):
    metrics.append(path, [{"step": 2}, {"step": 3}])
    path.write_text(path.read_text() + '{"step": 5, "lo')
    assert [line["step"] for line in metrics.read(path)] == [2, 3]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ({"loss": "x"}, "loss"),
        ({"held_out_loss": [1.0]}, "held_out_loss"),
        ({"split": "heads", "entropy": [1.0]}, "entropy"),
        ({"split": "heads", "entropy": {"blocks.0": 1.0}}, "entropy"),
        ({"split": "heads", "max_score": {"blocks.0": [1.0, "x"]}}, "max_score"),
    ],
)
def test_a_value_of_another_kind_is_named(path, line, name):
    own = {"step": 2, "split": "mine", "words": ["kept"]}
    layers = {"blocks.0": [1.0, None, 3], "blocks.1": [2.0]}
    sound = [own, {"step": 3, "loss": None, "seconds": 7}, {"step": 3, "split": "heads", "entropy": layers}]
    metrics.append(path, sound)
    assert metrics.read(path) == sound
    metrics.append(path, [{"step": 5, **line}])
    with pytest.raises(ValueError, match=rf"metrics\.jsonl, line 4 has a {name} that training never logs: "):
        metrics.read(path)


def test_numbers_that_no_line_of_ours_has_are_read_as_null(path):
    path.write_text('{"step": 2, "loss": NaN}\n{"step": 3, "loss": 1e999}\n')
    assert [line["loss"] for line in metrics.read(path)] == [None, None]
    assert metrics.cut(path, 2) == 1


@pytest.mark.parametrize("line", ["{]", "[" * 100_000, "[3]", '{"loss": 1.0}', '{"step": "3"}', "\xff"])
def test_a_damaged_line_is_named(path, line):
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

    def fail(self, target):
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        metrics.cut(path, 2)
    assert path.read_bytes() == before


def test_the_first_bad_metric_is_named():
    assert metrics.first_not_finite({"loss": 1.0, "accuracy": 0.0}) is None
    assert metrics.first_not_finite({"loss": 1.0, "grad_norm": math.inf, "norm": math.nan}) == "grad_norm"
