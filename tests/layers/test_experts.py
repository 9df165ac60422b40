"""A mixture of experts is the sum of its definition, for whatever way tokens are sent."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from layer_oracle import assert_close, build_drawn, compiled, draw, experts
from mesh_cases import on_eight_devices
from regard import parallel
from regard.layers import Experts, balance_experts

B, T, M, F, E, K = 2, 11, 5, 7, 13, 3
GPT_OSS = {"activation": "gelu_quick", "gated": True, "gate_limit": 0.75}
DEEPSEEK = {
    "activation": "silu", "gated": True, "use_bias": False, "num_experts": 12, "router_kind": "sigmoid",
    "expert_groups": 4, "groups_per_token": 2, "expert_scale": 2.5, "shared_width": 3, "shared_gate": True,
}  # fmt: skip
QWEN = {"activation": "silu", "gated": True, "use_bias": False, "normalize_chosen": False}


def build(**options):
    return build_drawn(Experts, M, F, **{"num_experts": E, "experts_per_token": K, **options})


def test_the_branch_is_the_definition():
    layers, x = [build(**options) for options in (GPT_OSS, QWEN, DEEPSEEK)], draw(0, B, T, M)
    few = x[:1, :1]  # fewer choices than experts
    outputs = nnx.jit(lambda layers, *xs: [[layer(x) for x in xs] for layer in layers])(layers, x, few)
    for layer, out in zip(layers, outputs, strict=True):
        assert_close(out[0], experts(layer, x))
        assert_close(out[1], experts(layer, few))


def test_no_token_is_dropped_however_they_are_sent():
    favoured = (0, 12)
    layer, x = build(experts_per_token=2), draw(1, B, T, M)
    layer.router.bias[...] = jnp.zeros(E).at[jnp.array(favoured)].set(100.0)
    (weights, chosen), out = nnx.jit(lambda layer, x: (layer.route(x), layer(x)))(layer, x)
    assert {*np.unique(chosen)} == {*favoured}
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert_close(out, experts(layer, x))


@pytest.mark.slow
def test_gradients_are_those_of_differences(x64):
    graph, state = nnx.split(build(**GPT_OSS))
    state = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), state)
    x, direction = (jnp.asarray(draw(seed, B, T, M), jnp.float64) for seed in (2, 3))
    measure = jax.jit(lambda state, x: jnp.sin(nnx.merge(graph, state)(x)).sum())
    # Kernels and biases move as they are, tokens along numbers of their own; nobody changes experts.
    grown = lambda step: measure(jax.tree.map(lambda leaf: (1 + step) * leaf, state), x + step * direction)
    slopes = jax.jit(jax.grad(measure, (0, 1)))(state, x)
    slope = sum(map(jnp.vdot, *map(jax.tree.leaves, (slopes, (state, direction)))))
    np.testing.assert_allclose(slope, (grown(1e-6) - grown(-1e-6)) / 2e-6, rtol=1e-7)


def test_at_most_about_twice_the_rows_needed_are_computed():
    layer = nnx.eval_shape(lambda: Experts(67, 131, num_experts=37, experts_per_token=3, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(layer)
    count = lambda rows: 2 * 2 * rows * 67 * 131
    for tokens in (1, 5, 211):
        x = jnp.zeros((1, tokens, 67))
        program = jax.jit(lambda state, x: nnx.merge(graph, state)(x)).lower(state, x)
        assert count(3 * tokens) < program.cost_analysis()["flops"] < 2.4 * count(3 * tokens)


def test_experts_are_balanced_by_how_often_each_is_chosen():
    layer, x = build(**DEEPSEEK), jnp.asarray(draw(6, B, T, M))
    measure = lambda layer: (layer(x).sum(), layer.route(x)[1])
    differentiate = nnx.jit(lambda layer: nnx.grad(measure, has_aux=True)(layer))
    plain, chosen = differentiate(layer)
    layer.set_attributes(counts_loads=True)
    slopes, _ = differentiate(layer)
    assert not plain["choice_bias"][...].any()
    loads = np.bincount(np.ravel(chosen), minlength=12)
    np.testing.assert_allclose(slopes["choice_bias"][...], loads / loads.mean() - 1, rtol=1e-6)
    # All else moves as if these were 0, clipped by a norm without them; their mean stays.
    optimizer, state = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0)), nnx.state(layer)
    slopes["choice_bias"] = plain["choice_bias"].replace(surplus := jnp.array([0.5, 0, 0.25] * 4))
    change, _ = balance_experts(optimizer, 0.125).update(slopes, optimizer.init(state))
    expected, _ = optimizer.update(plain, optimizer.init(state))
    expected["choice_bias"] = plain["choice_bias"].replace(-0.125 * (jnp.sign(surplus) - 2 / 3))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), change, expected)


@pytest.mark.parametrize("options", [QWEN, GPT_OSS, DEEPSEEK])
def test_a_router_learns_from_a_loss_of_imbalance_that_no_output_shows(options):
    layer, x = build(**options), jnp.asarray(draw(6, B, T, M))
    chosen = np.ravel(layer.route(x)[1])
    loads = np.bincount(chosen, minlength=layer.num_experts) / chosen.size

    def measure(layer, factor=0.0):
        scores = layer.router(x)
        shares = jax.nn.sigmoid(scores) if layer.choice_bias is not None else jax.nn.softmax(scores)
        shares = (shares / shares.sum(-1, keepdims=True)).mean((0, 1))
        output = jnp.sin(layer(x)).sum()
        return output + factor * layer.num_experts * jnp.sum(loads * shares), output

    differentiate = nnx.jit(lambda layer, factor: nnx.grad(measure, has_aux=True)(layer, factor))
    expected, output = differentiate(layer, 0.25)
    layer.set_attributes(balance_loss=0.25)
    slopes, same = differentiate(layer, 0.0)
    np.testing.assert_array_equal(same, output)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), slopes, expected)


def test_a_mesh_changes_no_number():
    on_eight_devices("from mesh_runs import *\ncheck_experts()")


def test_a_mesh_without_devices_may_be_explicit():
    """As newer versions of JAX make it by default."""
    layer = nnx.eval_shape(lambda: Experts(M, F, num_experts=E, rngs=nnx.Rngs(0)))
    mesh = AbstractMesh((B, 1), ("data", "sequence"), axis_types=(AxisType.Explicit,) * 2)
    with parallel.use(mesh, "sequence", batch_axis="data"):
        x = jax.ShapeDtypeStruct((B, T, M), "float32")
        assert nnx.eval_shape(lambda layer, x: layer(x), layer, x).shape == (B, T, M)


def test_dtype_is_what_is_computed_in():
    layer, x = build(**GPT_OSS, dtype=jnp.bfloat16), draw(5, B, T, M)
    with jax.numpy_dtype_promotion("standard"):
        out = compiled(layer, x)
        empty = jax.eval_shape(layer, jnp.zeros((B, 0, M)))
    assert out.dtype == jnp.bfloat16
    assert (empty.shape, empty.dtype) == ((B, 0, M), jnp.bfloat16)
    truth = experts(layer, x)
    assert np.abs(np.asarray(out, np.float64) - truth).mean() < 0.02 * np.abs(truth).mean()
