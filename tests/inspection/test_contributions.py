"""Contributions of keys, heads and layers against the layers that they are parts of."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard import inspection, masks
from regard.inspection.contributions import measure_values
from regard.layers import LatentAttention, MultiHeadAttention
from regard.models import Decoder, Encoder, TransformerConfig

RNG = np.random.default_rng(0)


def test_what_keys_and_heads_pass_on_adds_up_to_what_the_layer_writes():
    layer = MultiHeadAttention(12, num_heads=6, num_key_heads=2, rngs=nnx.Rngs(0))
    layer.output_projection.bias[...] = jnp.asarray(RNG.normal(size=12).astype(np.float32))
    x = RNG.normal(size=(2, 7, 12)).astype(np.float32)
    run = inspection.observe(
        lambda x: layer(x, mask=masks.causal(), aux=("weights",)),
        lambda problem, output: {"value": problem.value, "output": output},
    )
    (written, aux), (seen,) = run(x)
    kernel = layer.output_projection.kernel
    added = np.asarray(inspection.contribute(seen["output"], kernel))
    assert added.shape == (2, 6, 7, 12)
    bias = np.asarray(layer.output_projection.bias[...])
    np.testing.assert_allclose(added.sum(1) + bias, written, atol=1e-5)
    direction = RNG.normal(size=12).astype(np.float32)
    along = inspection.contribute(seen["output"], kernel, direction)
    np.testing.assert_allclose(along, added @ direction, atol=1e-5)
    lengths = inspection.weigh_values(aux["weights"], seen["value"], kernel)
    weights, value = (np.asarray(array, np.float64) for array in (aux["weights"], seen["value"]))
    wide = np.asarray(kernel[...], np.float64).reshape(6, 2, 12)
    norms = np.linalg.norm(np.repeat(value, 3, 1) @ wide, axis=-1)
    np.testing.assert_allclose(lengths, weights * norms[:, :, None], atol=1e-6)
    # A trace keeps the lengths that weights multiply.
    with inspection.capture(layer, example=1) as trace:
        layer(x, mask=masks.causal())
    np.testing.assert_allclose(trace[0].value_norms, norms[1], rtol=2e-6)
    np.testing.assert_allclose(trace[0].window() * trace[0].value_norms[:, None], lengths[1], atol=1e-6)
    with pytest.raises(ValueError, match=r"projection: expected shape \(H \* E, M\) with H = 6 and value"):
        inspection.weigh_values(aux["weights"], seen["value"], jnp.eye(5))


def test_values_of_any_size_have_a_length_and_none_where_nothing_is_passed_on():
    weights = np.array([[[0.5, 0.5, 0.0]]], np.float32)
    value = np.array([[[300.0, 400.0], [3e4, 4e4], [np.nan, 1.0]]], np.float16)
    eye = np.eye(2, dtype=np.float16)
    np.testing.assert_allclose(inspection.weigh_values(weights, value, eye), [[[250, 25000, 0]]])
    with pytest.raises(ValueError, match="weights: expected 3 keys, as value has, got shape"):
        inspection.weigh_values(weights[..., 1:], value, eye)
    with pytest.raises(ValueError, match=r"direction: expected shape \(2,\), got \(3,\)"):
        inspection.contribute(value, eye, np.ones(3, np.float16))


def test_the_last_layer_is_read_as_the_model_reads_it():
    config = TransformerConfig(d_model=12, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
    model, tokens = Decoder(config, rngs=nnx.Rngs(0)), jnp.array([[1, 2, 3, 4, 5]])
    model.eval()
    found = inspection.read_layers(model, tokens)
    assert found.shape == (2, 1, 5, 13)
    np.testing.assert_allclose(found[-1], model(tokens), rtol=1e-5, atol=1e-5)
    # Without the blocks after the first, its stream is the last one.
    model.trunk.stack.blocks = nnx.List(model.trunk.stack.blocks[:1])
    np.testing.assert_allclose(found[0], model(tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"model: expected a regard\.models\.Decoder, got Encoder"):
        inspection.read_layers(Encoder(config, rngs=nnx.Rngs(0)), tokens)


def test_values_are_measured_where_the_layer_says_what_becomes_of_them():
    x = RNG.normal(size=(1, 5, 12)).astype(np.float32)
    # As wide as its values: from a cache, latent vectors stand where values do.
    sizes = {"latent_dim": 4, "head_dim": 4, "rotary_dim": 2, "rngs": nnx.Rngs(0)}
    latent = LatentAttention(12, 3, **sizes)
    with inspection.capture(latent) as trace:
        latent(x, mask=masks.causal())
        latent(x, mask=masks.causal(), cache=latent.start_cache(1, 5))
    expanded = np.asarray(latent.latent_norm(latent.latent(x)[..., :4])[0], np.float64)
    kernel = np.asarray(latent.expansion.kernel[...], np.float64).reshape(4, 3, 8)[..., 4:]
    wide = np.asarray(latent.output_projection.kernel[...], np.float64).reshape(3, 4, 12)
    truth = [np.linalg.norm(expanded @ kernel[:, h] @ wide[h], axis=-1) for h in range(3)]
    np.testing.assert_allclose(trace[0].value_norms, truth, rtol=2e-5)
    assert trace[1].value_norms is None
    # Of one head, too, for which there are as many latent vectors as values.
    alone = LatentAttention(12, 1, **sizes)
    bare = MultiHeadAttention(12, num_heads=3, project_output=False, rngs=nnx.Rngs(0))
    with inspection.capture() as trace:
        alone(x, mask=masks.causal(), cache=alone.start_cache(1, 5))
        bare(x)
    assert [call.value_norms for call in trace] == [None, None]
    # More features than the stream has.
    assert measure_values(RNG.normal(size=(1, 7, 5)), RNG.normal(size=(10, 3)), 2).shape == (2, 7)
