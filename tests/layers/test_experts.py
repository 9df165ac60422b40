"""A mixture of experts is the sum of its definition, for whatever way tokens are sent, in every transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import assert_close, build_drawn, compiled, draw, experts
from mesh_cases import on_eight_devices
from regard.layers import Experts
from regard.layers.feed_forward import ACTIVATIONS

B, T, M, F, E, K = 2, 11, 5, 7, 13, 3
GPT_OSS = {"activation": "gelu_quick", "gated": True, "gate_limit": 0.75}
QWEN = {"activation": "silu", "gated": True, "use_bias": False, "normalize_chosen": False}


def build(**options):
    return build_drawn(Experts, M, F, **{"num_experts": E, "experts_per_token": K, **options})


def test_the_branch_is_the_definition():
    layer, other, x = build(**GPT_OSS), build(**QWEN), draw(0, B, T, M)
    few = x[:1, :1]  # fewer choices than experts
    found = nnx.jit(lambda layer, other, x, few: (layer(x), other(x), layer(few)))(layer, other, x, few)
    for out, expected in zip(found, (experts(layer, x), experts(other, x), experts(layer, few)), strict=True):
        assert_close(out, expected)


def test_no_token_is_dropped_however_they_are_sent():
    favoured = (0, 12)
    layer, x = build(experts_per_token=2), draw(1, B, T, M)
    layer.router.bias[...] = jnp.zeros(E).at[jnp.array(favoured)].set(100.0)
    (weights, chosen), out = nnx.jit(lambda layer, x: (layer.route(x), layer(x)))(layer, x)
    assert {*np.unique(chosen)} == {*favoured}
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert_close(out, experts(layer, x))


def run_all(state, x, graph):
    """Every expert on every token, in a few products that JAX differentiates by itself."""
    layer = nnx.merge(graph, state)
    scores = layer.router(x)
    best, chosen = jax.lax.top_k(scores, K)
    share = jnp.einsum("btk,btke->bte", jax.nn.softmax(best), jax.nn.one_hot(chosen, E, dtype=x.dtype))
    apply = lambda part, x, axes: jnp.einsum(axes, x, part.kernels[...]) + part.biases[...][None, None]
    gate, wide = (apply(part, x, "bti,eio->bteo") for part in (layer.gate, layer.widen))
    limit = layer.gate_limit
    hidden = ACTIVATIONS[layer.activation](jnp.minimum(gate, limit)) * (jnp.clip(wide, -limit, limit) + 1)
    return jnp.einsum("bte,btem->btm", share, apply(layer.narrow, hidden, "btei,eio->bteo"))


def test_gradients_and_tangents_are_those_of_all_experts_on_all_tokens(x64):
    graph, state = nnx.split(build(**GPT_OSS))
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), state)
    x, cotangent = (jnp.asarray(draw(seed, B, T, M), jnp.float64) for seed in (2, 3))

    @functools.partial(jax.jit, static_argnums=0)
    def differentiate(run):
        loss = lambda state, x: jnp.vdot(jax.vmap(lambda row: run(state, row[None])[0])(x), cotangent)
        tangent = jax.jvp(run, (state, x), (state, cotangent))[1]
        return jax.grad(loss, argnums=(0, 1))(state, x), tangent

    found = differentiate(lambda state, x: nnx.merge(graph, state)(x))
    expected = differentiate(functools.partial(run_all, graph=graph))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.float64
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


def test_at_most_about_twice_the_rows_needed_are_computed():
    layer = nnx.eval_shape(lambda: Experts(67, 131, num_experts=37, experts_per_token=3, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    count = lambda rows: 2 * 2 * rows * 67 * 131
    for tokens in (1, 5, 211):
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(
            state, jnp.zeros((1, tokens, 67))
        )
        assert count(3 * tokens) < program.cost_analysis()["flops"] < 2.4 * count(3 * tokens)


@pytest.mark.slow
def test_a_mesh_changes_no_number():
    on_eight_devices("from mesh_runs import *\ncheck_experts()")


def test_dtype_is_what_is_computed_in():
    layer, x = build(**GPT_OSS, dtype=jnp.bfloat16), draw(5, B, T, M)
    with jax.numpy_dtype_promotion("standard"):
        out = compiled(layer, x)
        empty = jax.eval_shape(layer, jnp.zeros((B, 0, M)))
    assert out.dtype == jnp.bfloat16
    assert (empty.shape, empty.dtype) == ((B, 0, M), jnp.bfloat16)
    truth = experts(layer, x)
    assert np.abs(np.asarray(out, np.float64) - truth).mean() < 0.02 * np.abs(truth).mean()


def test_what_makes_no_layer_is_refused():
    for options, message in (
        ({"experts_per_token": 14}, "experts_per_token: expected at most num_experts = 13, got 14"),
        ({"num_experts": 0}, "num_experts: expected an integer of at least 1, got 0"),
        ({"activation": "swish"}, "did you mean silu"),
        ({"gate_limit": 7.0}, "gate_limit: expected None, or a number above 0 with gated=True"),
    ):
        with pytest.raises(ValueError, match=message):
            build(**options)
