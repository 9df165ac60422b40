"""docs/theory.md keeps its word: its names exist, its list of a peer's names is whole, its example runs."""

import re
from pathlib import Path

import jax
import pytest

from test_tutorial_account import resolve

PAGE = (Path(__file__).parents[2] / "docs" / "theory.md").read_text()
ROWS = re.findall(r"^\| (`.*) \| (.*) \|$", PAGE, re.M)
NAMED = sorted(set(re.findall(r"`(regard\.[A-Za-z_.]+)`", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_name_exists(name):
    assert resolve(name) is not None


def test_a_name_that_does_not_exist_is_found_out():
    with pytest.raises((AttributeError, ModuleNotFoundError)):
        resolve("regard.theory.gibbs.partition_function")


def test_every_name_of_the_peer_has_one_row():
    theirs = [name for left, _ in ROWS for name in re.findall(r"`(\w+)`", left)]
    assert len(theirs) == len(set(theirs)) == 84
    assert len({ours for _, right in ROWS for ours in re.findall(r"`(regard\.theory\.[\w.]+)`", right)}) < 35
    assert all(right for _, right in ROWS)


def test_the_example_runs(capsys):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        exec(re.search(r"```python\n(.*?)```", PAGE, re.S)[1], {})
    assert "summed    a = 5" in capsys.readouterr().out


def test_every_module_of_theory_is_on_the_page():
    from regard import theory

    modules = [name for name, value in vars(theory).items() if hasattr(value, "__file__")]
    modules.remove("operands")  # no idea of its own
    assert len(modules) == 8
    for name in modules:
        assert name in PAGE, name
