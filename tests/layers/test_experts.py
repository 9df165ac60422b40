"""A mixture of experts is the sum of its definition, for whatever way tokens are sent, in every transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from layer_oracle import assert_close, compiled, draw, experts, randomize
from mesh_cases import on_eight_devices
from regard.layers import EncoderBlock, Experts
from regard.layers.feed_forward import ACTIVATIONS

B, T, M, F, E, K = 2, 11, 5, 7, 13, 3
GPT_OSS = {"activation": "gelu_quick", "gated": True, "gate_limit": 0.75}
QWEN = {"activation": "silu", "gated": True, "use_bias": False, "normalize_chosen": False}


def build(**options):
    sizes = {"num_experts": E, "experts_per_token": K}
    return randomize(Experts(M, F, **{**sizes, **options}, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    "options",
    [GPT_OSS, QWEN, pytest.param({"activation": "relu", "experts_per_token": 1}, marks=pytest.mark.slow)],
)
def test_the_branch_is_the_definition(options):
    layer, x = build(**options), draw(0, B, T, M)
    assert_close(compiled(layer, x), experts(layer, x))
    assert_close(compiled(layer, x[:1, :1]), experts(layer, x[:1, :1]))  # fewer choices than experts


@pytest.mark.parametrize("favoured", mostly_slow([((4,),), ((0, 12),), (tuple(range(E)),)], ((4,),)))
def test_no_token_is_dropped_however_they_are_sent(favoured):
    layer, x = build(**QWEN | {"use_bias": True, "experts_per_token": len(favoured)}), draw(1, B, T, M)
    layer.router.bias[...] = jnp.zeros(E).at[jnp.array(favoured)].set(100.0)
    weights, chosen = layer.route(jnp.asarray(x).reshape(-1, M))
    assert {*np.unique(chosen)} == {*favoured}
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert_close(compiled(layer, x), experts(layer, x))


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
    state, step = (jax.tree.map(lambda leaf: leaf.astype(jnp.float64), one) for one in (state, state))
    x, cotangent = (jnp.asarray(draw(seed, B, T, M), jnp.float64) for seed in (2, 3))
    run = lambda state, x: nnx.merge(graph, state)(x)
    whole = functools.partial(run_all, graph=graph)

    @functools.partial(jax.jit, static_argnums=0)
    def differentiate(run):
        loss = lambda state, x: jnp.vdot(jax.checkpoint(run)(state, x), cotangent)
        tangent = jax.jvp(run, (state, x), (step, cotangent))[1]
        rows = jax.vmap(lambda row: run(state, row[None]))(x)[:, 0]
        return jax.grad(loss, argnums=(0, 1))(state, x), tangent, rows

    found, expected = differentiate(run), differentiate(whole)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == jnp.float64
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


@pytest.mark.slow
def test_at_most_about_twice_the_rows_needed_are_computed():
    layer = Experts(67, 131, num_experts=37, experts_per_token=3, rngs=nnx.Rngs(0))
    count = lambda rows: 2 * 2 * rows * 67 * 131
    for tokens in (1, 5, 211):
        program = jax.jit(layer).lower(jnp.zeros((1, tokens, 67))).compile()
        flops = program.cost_analysis()["flops"]
        assert count(3 * tokens) < flops < 2.4 * count(3 * tokens)


@pytest.mark.slow
def test_a_mesh_changes_no_number():
    on_eight_devices("from mesh_runs import *\ncheck_experts()")


@pytest.mark.slow
def test_a_block_has_experts_where_their_number_is_given():
    options = {"num_experts": E, "experts_per_token": K, "gated": True}
    block = EncoderBlock(6, 3, F, feed_forward=options, dropout_rate=0.25, rngs=nnx.Rngs(0))
    assert isinstance(block.feed_forward, Experts)
    assert block.feed_forward.dropout.rate == 0.25
    block.eval()
    assert jax.eval_shape(block, jnp.zeros((B, T, 6))).shape == (B, T, 6)
    empty = build(dtype=jnp.bfloat16)(jnp.zeros((B, 0, M)))
    assert (empty.shape, empty.dtype) == ((B, 0, M), jnp.bfloat16)


@pytest.mark.slow
def test_dtype_is_what_is_computed_in():
    layer = build(**GPT_OSS, dtype=jnp.bfloat16)
    x = draw(5, B, T, M)
    with jax.numpy_dtype_promotion("standard"):
        out = compiled(layer, x)
    assert out.dtype == jnp.bfloat16
    truth = experts(layer, x)
    assert np.abs(np.asarray(out, np.float64) - truth).mean() < 0.02 * np.abs(truth).mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts_per_token": 14}, "experts_per_token: expected at most num_experts = 13, got 14"),
        ({"num_experts": 0}, "num_experts: expected an integer of at least 1, got 0"),
        ({"activation": "swish"}, "did you mean silu"),
        ({"gate_limit": 7.0}, "gate_limit: expected None, or a number above 0 with gated=True"),
    ],
)
def test_what_makes_no_layer_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
