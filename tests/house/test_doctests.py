"""Every example in a docstring runs."""

import doctest
import importlib
from pathlib import Path

import jax
import pytest

import regard

ROOT = Path(regard.__file__).parent
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(ROOT.rglob("*.py"))
    if ">>> " in path.read_text()
]
# Their examples build models, train, write texts, draw or serve: `make test-all` runs them.
LONG = """
conformance.checking
inspection.contributions inspection.layer_predictions inspection.explorer.live inspection.explorer.pages
inspection.explorer.server inspection.figures.atlases inspection.figures.canvas inspection.figures.curves
inspection.figures.head_curves inspection.figures.heatmaps inspection.figures.matrices
inspection.figures.patches inspection.head_search inspection.traces.captures inspection.traces.trace
interop.flax interop.huggingface layers.blocks layers.compressed_attention layers.derivation layers.experts
layers.expert_balance layers.latent_attention
models.beams models.classifier models.decoder models.encoder models.encoder_decoder models.generation
models.presets models.prompts models.sampling models.stack parallel.cost_reports planning.training_steps
inspection.paths readouts.labels readouts.reading readouts.readout theory.gibbs
theory.gradients theory.heads theory.hopfield theory.steps
"""
assert set(LONG.split()) < set(MODULES)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG.split())) for name in MODULES]
)
def test_examples_in_docstrings_hold(name):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        failed, tried = doctest.testmod(importlib.import_module(f"regard.{name}".removesuffix(".__init__")))
    assert tried
    assert not failed
