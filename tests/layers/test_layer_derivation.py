"""layers.derive: from a layer's inputs to its output, for every kind of layer and call."""

import functools

import numpy as np
import pytest
from flax import nnx

from layer_oracle import build_drawn, draw
from refusals import assert_refused
from regard import layers, masks, positions, scores
from regard.layers import MultiHeadAttention

B, T, S, M, W, H, K, D = 2, 5, 7, 18, 11, 6, 3, 4
X, Y, Z = draw(0, B, T, M), draw(1, B, S, W), draw(2, B, S, W)


def build(**options):
    return build_drawn(MultiHeadAttention, M, **{"num_heads": H, "head_dim": D, **options})


# What the layer is, what it is given, and the options of the call.
CASES = {
    "grouped": ({"num_key_heads": K}, (X,), {"mask": masks.causal()}),
    "norm_rotary_metric": (
        {"query_key_norm": True, "rotary": positions.Rotary(), "dropout_rate": 0.4, "num_key_heads": K},
        (X,),
        {"score": scores.bilinear(draw(3, H, D, D)), "deterministic": True},
    ),
    "cross_value": (
        {"memory_width": W, "num_key_heads": K, "sinks": True, "use_bias": False, "project_output": False},
        (X, Y, Z),
        {"mask": masks.lengths(np.array([7, 2])), "bias": draw(4, T, S)},
    ),
}


@functools.cache
def derive(case):
    """The layer of a case, its call, and the derivation of it."""
    settings, inputs, options = CASES[case]
    layer = build(**settings)
    call = functools.partial(layers.derive, layer, *inputs, **options)
    return layer, call, call()


@pytest.mark.parametrize("case", CASES)
def test_it_ends_where_the_layer_ends(case):
    _, inputs, options = CASES[case]
    layer, _, derivation = derive(case)
    want = layer(*inputs, **options)
    assert derivation.output.shape == want.shape
    np.testing.assert_allclose(derivation.output, want, atol=1e-5)
    for step in derivation:
        assert len(step.indices) == len(step.shape), step
    assert max(map(len, str(derivation).splitlines())) <= 100
    assert derivation.to_html().count("<section>") == len(derivation)


def test_chosen_rows_and_heads_are_those_of_the_whole():
    rows, heads = [4, 1], [5, 2, 0]
    layer, call, whole = derive("grouped")
    assert "Y^{ic} = sum_h C^{hic}" in str(layers.derive(layer, X[0], heads=heads))
    derivation = call(rows=rows, heads=heads)
    np.testing.assert_allclose(derivation.output, np.take(whole.output, rows, -2), atol=1e-5)
    np.testing.assert_array_equal(derivation["hidden"].value, np.take(X, rows, -2))
    for name in ("weights", "contributions"):
        part = np.take(np.take(whole[name].value, rows, -2), heads, -3)
        np.testing.assert_allclose(derivation[name].value, part, atol=1e-5)


def test_every_contraction_is_what_its_subscripts_say():
    layer, _, derivation = derive("grouped")
    values = {step.name: np.asarray(step.value, np.float64) for step in derivation}
    operands = {name: ("hidden", f"{name}_weight") for name in ("query", "key", "value")}
    operands |= {"contributions": ("heads", "output_weight"), "output": ("contributions",)}
    for name, parts in operands.items():
        found = np.einsum(derivation[name].subscripts, *(values[part] for part in parts))
        bias = values.get(f"{name}_bias", np.zeros(1))
        found = found + (bias[:, None] if bias.ndim == 2 else bias)
        np.testing.assert_allclose(found, values[name], atol=1e-5, err_msg=name)
    # Weights are tensors per head.
    first, last = (part.kernel[...] for part in (layer.query_projection, layer.output_projection))
    np.testing.assert_array_equal(derivation["query_weight"].value[4], first[:, 4 * D : 5 * D])
    np.testing.assert_array_equal(derivation["output_weight"].value[4], last[4 * D : 5 * D])
    assert derivation["key_weight"].expression == "W_K^{gca}"
    assert derivation["key"].expression == "K^{ngja} = sum_c X^{njc} W_K^{gca} + b_K^{ga}"
    assert derivation["output"].expression == "Y^{nic} = sum_h C^{nhic} + b_O^{c}"


def test_values_are_made_of_their_own_memory():
    _, _, derivation = derive("cross_value")
    assert derivation["key"].expression == "K^{ngja} = sum_d Y^{njd} W_K^{gda}"
    assert derivation["value"].expression == "V^{ngjb} = sum_d Z^{njd} W_V^{gdb}"
    operands = Z, derivation["value_weight"].value
    found = np.einsum(derivation["value"].subscripts, *(np.asarray(part, np.float64) for part in operands))
    np.testing.assert_allclose(found, derivation["value"].value, atol=1e-5)


def test_a_remembered_memory_is_taken_as_it_is():
    layer = build(memory_width=W, rotary=positions.Rotary(), num_key_heads=K, query_key_norm=True)
    memory = layer.remember(Y)
    derivation = layers.derive(layer, X, memory, query_offset=1)
    np.testing.assert_allclose(derivation.output, layer(X, Y, query_offset=1), atol=1e-5)
    assert "memory" not in derivation
    assert derivation["remembered_key"].expression == "K_0^{ngja}"
    assert derivation["key"].expression == "K^{ngja} = turn(K_0^{ngja}, r^{j})"
    np.testing.assert_array_equal(derivation["value"].value, memory.value)


def test_wrong_calls_are_told():
    layer = build(num_key_heads=K)
    traced = nnx.jit(lambda layer: layers.derive(layer, X).output)
    assert_refused((lambda: layers.derive(layer, X, heads=[6]), r"heads: expected indices in 0\.\.5"))
    part = lambda: layers.derive(layer.query_projection, X)
    told = (part, "layer: expected a MultiHeadAttention"), (lambda: traced(layer), r"outside jax\.jit")
    assert_refused(*told, error=TypeError)
