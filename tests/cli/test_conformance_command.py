"""`regard conformance`: exit codes, functions in modules and files, and what is printed."""

import functools
import json
import sys

import pytest

from command_runs import run_command

KERNEL = """
import numpy as np

def attend(query, key, value, *, hidden=None):
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** {power}
    scores = scores if hidden is None else np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ value).astype(query.dtype)
"""
WORDS = ["--arrays", "numpy", "--feature", "mask=hidden", "--dtypes", "float32"]


def test_a_function_of_a_file_is_checked(tmp_path, capsys):
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.format(power=0.5))
    check = functools.partial(run_command, capsys, "conformance", f"{path}:attend", *WORDS, "--only")
    told = "differs  a boolean mask                    value      True hides"
    assert told in check("a boolean mask").out
    path.write_text(KERNEL.format(power=1))
    streams = check("definition", "--json", code=1)
    row = json.loads(streams.out.splitlines()[-1])["rows"][0]
    assert (row["verdict"], row["finding"], row["line"]) == ("wrong", "scores are scaled twice", "scaled")
    assert "from kernel import attend" in streams.err
    assert "contradicts X = scale P" in streams.err
    assert check("definition", "--markdown", code=1).out.startswith("| promise | of | verdict |")


def test_ours_is_checked_by_its_name(capsys):
    words = "conformance", "regard:attend", "--only", "one query and one key"
    assert "2 hold" in run_command(capsys, *words).out


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["nothing_of_this_name:attend"], 2, "cannot be imported"),
        (["{folder}/json.py:attend"], 2, "a module json is loaded already"),
        (["{folder}/broken.py:attend"], 2, "ZeroDivisionError"),
        (["math:pi"], 2, "expected a function of the name pi, got 3.14"),
        (["jax.nn"], 2, "expected MODULE:FUNCTION"),
        (["jax.nn:gelu"], 1, "TypeError"),
        (["jax.nn:gelu", "--layout", "BTX"], 2, "layout: expected letters"),
        (["jax.nn:gelu", "--tolerance", "nan"], 2, "--tolerance: expected a number above 0"),
    ],
)
def test_what_cannot_be_checked_is_said(words, code, told, tmp_path, capsys):
    for name in ("json", "broken"):
        (tmp_path / f"{name}.py").write_text("1 / 0")
    words = [word.format(folder=tmp_path) for word in words]
    assert told in "".join(run_command(capsys, "conformance", *words, code=code))
    assert str(tmp_path) not in sys.path  # whose files would stand for others
