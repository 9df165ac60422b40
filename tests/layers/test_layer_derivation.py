"""layers.derive: from a layer's inputs to its output, for every kind of layer and call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from regard import layers, masks, positions, scores
from regard.layers import MultiHeadAttention

B, T, S, M, W, H, K, D = 2, 5, 7, 18, 11, 6, 3, 4
RNG = np.random.default_rng(0)


def draw(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


X, ONE, Y, Z = draw(B, T, M), draw(T, M), draw(B, S, W), draw(B, S, W)


def build(**options):
    options = {"num_heads": H, "bias_init": nnx.initializers.normal(), "rngs": nnx.Rngs(0)} | options
    layer = MultiHeadAttention(M, **options)
    for norm in (layer.query_norm, layer.key_norm):
        if norm is not None:
            norm.scale[...] = draw(*norm.scale.shape)
    return layer


# What the layer is, what it is given, and the options of the call.
CASES = {
    "plain": ({}, (X,), {}),
    "one_example": ({}, (ONE,), {"mask": masks.causal()}),
    "no_bias": ({"use_bias": False}, (X,), {}),
    "grouped": ({"num_key_heads": K, "head_dim": D}, (X,), {"mask": masks.causal()}),
    "one_key_head": ({"num_key_heads": 1}, (ONE,), {}),
    "rotary": ({"rotary": positions.Rotary(base=50.0), "head_dim": D}, (X,), {"query_offset": 3}),
    "rotary_per_row": (
        {"rotary": positions.Rotary(), "head_dim": D, "memory_width": W},
        (X, Y),
        {"query_offset": jnp.asarray([0, 4])},
    ),
    "norm": ({"query_key_norm": True}, (X,), {}),
    "norm_rotary_metric": (
        {"query_key_norm": True, "rotary": positions.Rotary(), "head_dim": D},
        (X,),
        {"score": [scores.bilinear(draw(H, D, D)), scores.softcap(2.0)]},
    ),
    "cross": ({"memory_width": W}, (X, Y), {"mask": masks.lengths(jnp.asarray([7, 2]))}),
    "cross_value": ({"memory_width": W, "num_key_heads": K}, (X, Y, Z), {}),
    "cross_one_example": ({"memory_width": W}, (ONE, Y[0]), {}),
    "one_query_for_all": ({"memory_width": W}, (ONE, Y), {}),
    "concatenated": ({"project_output": False, "head_dim": D}, (X,), {}),
    "concatenated_one": ({"project_output": False}, (ONE,), {}),
    "sinks": ({"sinks": True}, (X,), {"bias": draw(T, T)}),
    "dropout": ({"dropout_rate": 0.4}, (X,), {"rngs": jax.random.key(3)}),
    "dropout_switched_off": ({"dropout_rate": 0.4}, (X,), {"deterministic": True}),
    "bfloat16": ({"dtype": jnp.bfloat16}, (X,), {}),
}


@pytest.mark.parametrize("case", mostly_slow(CASES, "grouped", "dropout_switched_off", "norm_rotary_metric"))
def test_it_ends_where_the_layer_ends(case):
    settings, inputs, options = CASES[case]
    layer = build(**settings)
    derivation = layers.derive(layer, *inputs, **options)
    want, aux = layer(*inputs, **options, aux=("weights", "lse", "entropy"))
    assert derivation.output.shape == want.shape
    assert derivation.output.dtype == want.dtype
    tolerance = 2e-2 if want.dtype == jnp.bfloat16 else 1e-5
    for name, array in {"output": want, **aux}.items():
        got = np.asarray(derivation[name].value, np.float64)
        np.testing.assert_allclose(got, np.asarray(array, np.float64), atol=tolerance, err_msg=name)
    for step in derivation:
        assert len(step.indices) == len(step.shape), step
    assert max(map(len, str(derivation).splitlines())) <= 100
    assert derivation.to_html().count("<section>") == len(derivation)


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        ["plain", "grouped", "rotary", "cross", "one_example", "concatenated"],
        "grouped",
        "cross",
    ),
)
def test_chosen_rows_and_heads_are_those_of_the_whole(case):
    settings, inputs, options = CASES[case]
    layer, rows, heads = build(**settings), [4, 1], [5, 2, 0]
    derivation = layers.derive(layer, *inputs, **options, rows=rows, heads=heads)
    want, aux = layer(*inputs, **options, aux=("weights",))
    np.testing.assert_allclose(derivation.output, np.take(want, rows, -2), atol=1e-5)
    weights = np.take(np.take(aux["weights"], rows, -2), heads, -3)
    np.testing.assert_allclose(derivation["weights"].value, weights, atol=1e-6)
    if "contributions" in derivation:
        whole = layers.derive(layer, *inputs, **options)["contributions"].value
        part = np.take(np.take(whole, rows, -2), heads, -3)
        np.testing.assert_allclose(derivation["contributions"].value, part, atol=1e-5)
        assert "those not derived included" in derivation["output"].words


def test_every_contraction_is_what_its_subscripts_say():
    layer = build(num_key_heads=H, head_dim=D)
    derivation = layers.derive(layer, X)
    values = {step.name: np.asarray(step.value, np.float64) for step in derivation}
    operands = {
        "query": ("hidden", "query_weight"),
        "key": ("hidden", "key_weight"),
        "value": ("hidden", "value_weight"),
        "contributions": ("heads", "output_weight"),
        "output": ("contributions",),
    }
    for name, parts in operands.items():
        found = np.einsum(derivation[name].subscripts, *(values[part] for part in parts))
        bias = values.get(f"{name}_bias", np.zeros(1))
        found = found + (bias[:, None] if bias.ndim == 2 else bias)
        np.testing.assert_allclose(found, values[name], atol=1e-5, err_msg=name)


def test_the_stages_of_queries_follow_one_another():
    layer = build(**CASES["norm_rotary_metric"][0])
    derivation = layers.derive(layer, X, **CASES["norm_rotary_metric"][2])
    values = {step.name: np.asarray(step.value, np.float64) for step in derivation}
    projected = values["projected_query"]
    root = np.sqrt((projected**2).mean(-1, keepdims=True) + 1e-6)
    gain = np.asarray(layer.query_norm.scale[...], np.float64)
    np.testing.assert_allclose(values["normed_query"], gain * projected / root, atol=1e-4)
    angle = np.arange(T)[:, None] * 10_000.0 ** (-np.arange(0, D, 2) / D)
    a, b = values["normed_query"][..., : D // 2], values["normed_query"][..., D // 2 :]
    cosine, sine = np.cos(angle), np.sin(angle)
    turned = np.concatenate([a * cosine - b * sine, a * sine + b * cosine], -1)
    np.testing.assert_allclose(values["turned_query"], turned, atol=1e-4)
    measured = np.einsum("nhie,hea->nhia", turned, values["metric"])
    np.testing.assert_allclose(values["query"], measured, atol=1e-4)
    assert [
        derivation[name].expression for name in ("projected_query", "normed_query", "turned_query", "query")
    ] == [
        "Q_0^{nhie} = sum_c X^{nic} W_Q^{hce} + b_Q^{he}",
        "Q_1^{nhie} = gamma_Q^{e} Q_0^{nhie} / rms(Q_0^{nhie})",
        "Q_2^{nhie} = turn(Q_1^{nhie}, p^{i})",
        "Q^{nhia} = sum_e Q_2^{nhie} g^{hea}",
    ]


def test_a_remembered_memory_is_taken_as_it_is():
    layer = build(memory_width=W, rotary=positions.Rotary(), head_dim=D, num_key_heads=K, query_key_norm=True)
    memory = layer.remember(Y)
    derivation = layers.derive(layer, X, memory, query_offset=1)
    np.testing.assert_allclose(derivation.output, layer(X, Y, query_offset=1), atol=1e-5)
    assert "memory" not in derivation
    assert derivation["remembered_key"].expression == "K_0^{ngja}"
    assert derivation["key"].expression == "K^{ngja} = turn(K_0^{ngja}, r^{j})"
    np.testing.assert_array_equal(derivation["value"].value, memory.value)


def test_weights_are_tensors_per_head():
    layer = build(num_key_heads=K, head_dim=D)
    derivation = layers.derive(layer, X)
    kernel = np.asarray(layer.query_projection.kernel[...])
    np.testing.assert_array_equal(derivation["query_weight"].value[4], kernel[:, 4 * D : 5 * D])
    kernel = np.asarray(layer.output_projection.kernel[...])
    np.testing.assert_array_equal(derivation["output_weight"].value[4], kernel[4 * D : 5 * D])
    assert derivation["key_weight"].expression == "W_K^{gca}"
    assert derivation["key"].expression == "K^{ngja} = sum_c X^{njc} W_K^{gca} + b_K^{ga}"
    assert derivation["output"].expression == "Y^{nic} = sum_h C^{nhic} + b_O^{c}"


def test_wrong_calls_are_told():
    layer = build()
    with pytest.raises(TypeError, match="layer: expected a MultiHeadAttention, got Linear"):
        layers.derive(layer.query_projection, X)
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        nnx.jit(lambda layer: layers.derive(layer, X).output)(layer)
    with pytest.raises(ValueError, match=r"heads: expected indices in 0\.\.5"):
        layers.derive(layer, X, heads=[6])
    with pytest.raises(ValueError, match="rows: expected at most"):
        layers.derive(layer, jnp.zeros((1000, M)))
