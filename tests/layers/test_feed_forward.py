import jax.numpy as jnp
import numpy as np
from flax import nnx

from layer_oracle import assert_close, build_drawn, draw, feed_forward, float64, precisions
from refusals import assert_refused
from regard.layers import FeedForward
from regard.layers.feed_forward import ACTIVATIONS

B, T, M, F = 2, 5, 11, 13
GPT_OSS = {"activation": "gelu_quick", "gated": True, "gate_limit": 0.75}


def build(d_ff=F, **options):
    return build_drawn(FeedForward, M, d_ff, **options)


def test_the_branch_is_the_definition():
    choices = [{"activation": name, "use_bias": name != "silu"} for name in ACTIVATIONS]
    layers = [build(**options) for options in (*choices, {"activation": "silu", "gated": True}, GPT_OSS)]
    x = draw(0, B, T, M)
    assert (np.abs(x @ np.asarray(layers[-1].widen.kernel[...])) > 0.75).mean() > 0.2, "the limit acts"
    outputs = nnx.jit(lambda layers, x: [layer(x) for layer in layers])(layers, x)
    for layer, output in zip(layers, outputs, strict=True):
        assert_close(output, feed_forward(layer, x))


def test_the_two_gelus_are_near_and_not_the_same():
    x = np.linspace(-6, 6, 4001, dtype=np.float32)
    gap = np.abs(float64(ACTIVATIONS["gelu_tanh"](x)) - float64(ACTIVATIONS["gelu_erf"](x)))
    assert 4e-4 < gap.max() < 5e-4


def test_what_does_not_fit_is_refused():
    layer, limit = build(), "gate_limit: expected None, or a number above 0 with gated=True"
    named = r"relu, gelu_tanh, gelu_erf, gelu_quick, silu; got 'sillu' \(nearest: silu\)"
    assert_refused(
        (lambda: build(activation="sillu"), named),
        (lambda: build(activation="gelu"), r"'gelu' has two meanings: choose gelu_tanh.*gelu_erf"),
        (lambda: layer(jnp.zeros((B, T, F))), r"x: expected shape \(\*B, length, 11\), got"),
        (lambda: build(d_ff=0), "d_ff: expected an integer of at least 1, got 0"),
        (lambda: build(gate_limit=7.0), limit),
        (lambda: build(gated=True, gate_limit=0.0), limit),
    )


def test_dropout_falls_on_the_hidden_layer():
    layer = build(4999, activation="relu", dropout_rate=0.25)
    # With narrow = ones the output is the sum of the hidden layer, to which each kept unit brings 4/3.
    for part, kernel, bias in ((layer.widen, 0.0, 1.0), (layer.narrow, 1.0, 0.0)):
        part.kernel[...], part.bias[...] = np.full_like(part.kernel, kernel), np.full_like(part.bias, bias)
    run = nnx.jit(lambda layer: layer(jnp.zeros((T, M))))
    kept = float64(run(layer)) * 3 / 4
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-2)
    np.testing.assert_allclose(kept[:, 0], 4999 * 0.75, atol=6 * np.sqrt(4999 * 0.75 * 0.25))
    assert len(np.unique(kept[:, 0])) > 1
    layer.eval()
    np.testing.assert_array_equal(run(layer), np.full((T, M), 4999.0))


def test_precision_is_that_of_every_map():
    assert precisions(build(gated=True, precision="highest"), draw(3, B, T, M)) == {"HIGHEST"}
    assert precisions(build(), draw(3, B, T, M)) == {"None"}
