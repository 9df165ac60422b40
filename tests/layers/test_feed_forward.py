import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import (
    assert_close,
    count_parameters,
    draw,
    feed_forward,
    float64,
    linear,
    precisions,
    randomize,
)
from regard.layers import FeedForward
from regard.layers.feed_forward import ACTIVATIONS

B, T, M, F = 2, 5, 11, 13


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("use_bias", [True, False])
def test_the_branch_is_the_definition(activation, use_bias):
    layer = randomize(FeedForward(M, F, activation=activation, use_bias=use_bias, rngs=nnx.Rngs(0)))
    x = draw(0, B, T, M)
    assert_close(layer(x), feed_forward(layer, x))


def test_the_branch_has_the_parameters_of_from_scratch():
    assert count_parameters(FeedForward(256, 1024, rngs=nnx.Rngs(0))) == 525_568


def test_glorot_has_the_textbook_scale():
    layer = FeedForward(64, 256, rngs=nnx.Rngs(0))
    for part in (layer.widen, layer.narrow):
        assert np.asarray(part.kernel[...]).std() == pytest.approx(np.sqrt(2 / 320), rel=0.03)
        assert not np.any(part.bias[...])


def test_the_branch_gives_the_numbers_of_from_scratch():
    key = jax.random.PRNGKey(111)
    first, second = jax.random.split(key)
    limit = np.float32(np.sqrt(6 / (128 + 512)))
    layer = FeedForward(128, 512, activation="gelu_tanh", rngs=nnx.Rngs(0))
    layer.widen.kernel[...] = jax.random.uniform(first, (128, 512), minval=-limit, maxval=limit)
    layer.narrow.kernel[...] = jax.random.uniform(second, (512, 128), minval=-limit, maxval=limit)
    out = layer(jax.random.normal(second, (2, 10, 128)))
    np.testing.assert_allclose(out[0, 0, :4], [0.2377698, -0.0421765, 0.5578117, -0.1864442], atol=5e-6)


def test_the_two_gelus_are_near_and_not_the_same():
    x = np.linspace(-6, 6, 4001, dtype=np.float32)
    gap = np.abs(float64(ACTIVATIONS["gelu_tanh"](x)) - float64(ACTIVATIONS["gelu_erf"](x)))
    assert 4e-4 < gap.max() < 5e-4


def test_a_limit_bounds_the_gate_above_and_what_it_multiplies_on_both_sides():
    layer = randomize(
        FeedForward(M, F, activation="gelu_quick", gated=True, gate_limit=0.75, rngs=nnx.Rngs(0))
    )
    x = draw(0, B, T, M)
    gate, wide = linear(layer.gate, x), linear(layer.widen, x)
    assert (np.abs(wide) > 0.75).mean() > 0.2
    gate = np.minimum(gate, 0.75)
    hidden = gate / (1 + np.exp(-1.702 * gate)) * (np.clip(wide, -0.75, 0.75) + 1)
    assert_close(layer(x), linear(layer.narrow, hidden))
    for options in ({}, {"gated": True, "gate_limit": 0.0}):
        with pytest.raises(
            ValueError, match="gate_limit: expected None, or a number above 0 with gated=True"
        ):
            FeedForward(M, F, **{"gate_limit": 7.0, **options}, rngs=nnx.Rngs(0))


def test_unknown_activations_are_refused_and_the_nearest_named():
    with pytest.raises(
        ValueError, match=r"relu, gelu_tanh, gelu_erf, gelu_quick, silu; got 'sillu' \(nearest: silu\)"
    ):
        FeedForward(M, F, activation="sillu", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"activation: expected one of .*got 'tanh'"):
        FeedForward(M, F, activation="tanh", rngs=nnx.Rngs(0))


def test_gelu_alone_is_ambiguous():
    with pytest.raises(ValueError, match=r"'gelu' has two meanings: choose gelu_tanh.*gelu_erf"):
        FeedForward(M, F, activation="gelu", rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(M,), (B, T, F)])
def test_wrong_shapes_name_the_argument(shape):
    layer = FeedForward(M, F, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x: expected shape \(\*B, length, 11\), got"):
        layer(jnp.zeros(shape))


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match=r"d_ff: expected an integer of at least 1, got 0"):
        FeedForward(M, 0, rngs=nnx.Rngs(0))


def test_dropout_falls_on_the_hidden_layer():
    layer = randomize(FeedForward(M, 4999, activation="relu", dropout_rate=0.25, rngs=nnx.Rngs(0)))
    # With narrow = ones the output is the sum of the hidden layer, to which each kept unit brings 4/3.
    layer.widen.kernel[...] = jnp.zeros_like(layer.widen.kernel[...])
    layer.widen.bias[...] = jnp.ones_like(layer.widen.bias[...])
    layer.narrow.kernel[...] = jnp.ones_like(layer.narrow.kernel[...])
    layer.narrow.bias[...] = jnp.zeros_like(layer.narrow.bias[...])
    kept = float64(layer(jnp.zeros((T, M)))) * 3 / 4
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-2)
    np.testing.assert_allclose(kept[:, 0], 4999 * 0.75, atol=6 * np.sqrt(4999 * 0.75 * 0.25))
    assert len(np.unique(kept[:, 0])) > 1
    layer.eval()
    np.testing.assert_array_equal(layer(jnp.zeros((T, M))), np.full((T, M), 4999.0))


def test_precision_is_that_of_every_map():
    layer = FeedForward(M, F, gated=True, precision="highest", rngs=nnx.Rngs(0))
    assert precisions(layer, draw(3, B, T, M)) == {"HIGHEST"}
    assert precisions(FeedForward(M, F, rngs=nnx.Rngs(0)), draw(3, B, T, M)) == {"None"}


def test_jit_and_gradients_agree_with_the_definition():
    layer = randomize(FeedForward(M, F, activation="silu", rngs=nnx.Rngs(0)))
    x = jnp.asarray(draw(1, B, T, M))
    assert_close(nnx.jit(lambda layer, x: layer(x))(layer, x), layer(x))
    step = 1e-5 * draw(2, B, T, M).astype(np.float64)
    slope = np.sum(float64(jax.grad(lambda x: jnp.sum(layer(x)))(x)) * step)
    expected = (feed_forward(layer, float64(x) + step) - feed_forward(layer, float64(x) - step)).sum() / 2
    assert slope == pytest.approx(expected, rel=1e-4)
