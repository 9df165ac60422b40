"""Public names say what they take, what they give, and show it."""

import dataclasses
import inspect
from types import ModuleType

import pytest

import regard
from regard import (
    cache,
    inspection,
    layers,
    linear,
    masks,
    models,
    parallel,
    planning,
    positions,
    readouts,
    scores,
)
from regard.inspection import figures
from regard.interop import flax, jax_nn, onnx_ops, torch_sdpa
from regard.models import sampling
from regard.theory import bilinear, gibbs, gradients, heads, hebbian, hopfield, notation, steps


def public_names():
    found = {f"regard.{name}": getattr(regard, name) for name in ("attend", "explain")}
    adapters = (jax_nn.dot_product_attention, flax.attention_fn, torch_sdpa.scaled_dot_product_attention)
    found |= {f"{value.__module__}.{value.__name__}": value for value in adapters}
    found |= {f"regard.inspection.{name}": getattr(inspection, name) for name in inspection._HOMES}
    for module in (
        cache,
        linear,
        masks,
        parallel,
        planning,
        positions,
        readouts,
        scores,
        layers,
        models,
        sampling,
        figures,
        onnx_ops,
        bilinear,
        gibbs,
        gradients,
        heads,
        hebbian,
        hopfield,
        notation,
        steps,
    ):
        for name, value in vars(module).items():
            home = getattr(value, "__module__", "")
            if name.startswith("_") or isinstance(value, ModuleType) or not home.startswith("regard."):
                continue
            if callable(value) and (module is not positions or home == positions.__name__):
                found[f"{module.__name__}.{name}"] = value
    return found


NAMES = public_names()
# Not called by users: an enumeration and records that functions return.
RECORDS = (
    "regard.masks.Tile",
    "regard.inspection.figures.Drawing",
    "regard.interop.onnx_ops.AttentionOutputs",
    "regard.interop.onnx_ops.LinearAttentionOutputs",
    "regard.planning.Estimate",
    "regard.planning.MemoryTooSmallError",
    "regard.theory.bilinear.MetricReport",
    "regard.theory.gibbs.Equilibrium",
    "regard.theory.gradients.Gradients",
    "regard.theory.hebbian.Recall",
    "regard.theory.hopfield.Retrieval",
    "regard.theory.steps.HeadSteps",
)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RECORDS])
def test_a_public_name_is_documented(name):
    value = NAMES[name]
    text = inspect.getdoc(value) or ""
    assert text.splitlines()[0].endswith("."), "the first line is a sentence"
    assert "Example:" in text
    assert ">>>" in text
    takes = [p for p in inspect.signature(value).parameters if p not in ("self", "args", "kwargs")]
    if dataclasses.is_dataclass(value) and "Args:" not in text:
        # Fields are described where they are declared.
        assert inspect.getsource(value).count('"""') >= 2 * len(takes)
    elif takes and name != "regard.masks.Mask":
        assert "Args:" in text
        missing = [parameter for parameter in takes if f"{parameter}:" not in text]
        assert not missing, f"not described: {missing}"
    if inspect.isfunction(value):
        assert "Returns:" in text


def test_the_list_is_not_empty():
    assert {"regard.attend", "regard.masks.causal", "regard.models.Encoder"} <= set(NAMES)
    assert len(NAMES) > 35
