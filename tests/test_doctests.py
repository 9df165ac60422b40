"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import jax
import pytest

import regard


def names():
    return [module.name for module in pkgutil.walk_packages(regard.__path__, "regard.")]


@pytest.mark.parametrize("name", names())
def test_examples_in_docstrings_hold(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


def test_examples_exist():
    tried = sum(
        len(test.examples)
        for name in (
            "regard.attention",
            "regard.positions",
            "regard.masks.positional",
            "regard.masks.conventions",
        )
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
    )
    assert tried >= 30
