"""Every example in a docstring runs."""

import doctest
import importlib
import linecache
import pkgutil

import jax
import pytest

import regard
from economy import mostly_slow


def names():
    return [module.name for module in pkgutil.walk_packages(regard.__path__, "regard.")]


# Their examples train, write texts, draw or serve.
LONG = (
    "inspection.contributions",
    "inspection.layer_predictions",
    "inspection.explorer.live",
    "inspection.explorer.pages",
    "inspection.explorer.server",
    "inspection.figures.atlases",
    "inspection.figures.canvas",
    "inspection.figures.curves",
    "inspection.figures.head_curves",
    "inspection.figures.heatmaps",
    "inspection.figures.matrices",
    "inspection.figures.patches",
    "inspection.traces.captures",
    "inspection.traces.trace",
    "interop.huggingface",
    "models.beams",
    "models.decoder",
    "models.generation",
    "models.prompts",
    "models.sampling",
    "planning.steps",
    "readouts.labels",
    "readouts.record",
    "theory.gibbs",
    "theory.gradients",
    "theory.heads",
    "training.heads",
)


@pytest.mark.parametrize("name", mostly_slow(names(), *(set(names()) - {f"regard.{name}" for name in LONG})))
def test_examples_in_docstrings_hold(name, monkeypatch):
    # The debugger of doctest asks of every file that JAX has named a line of whether it has changed.
    monkeypatch.setattr(linecache, "checkcache", lambda filename=None: None)
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
