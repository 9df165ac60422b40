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


@pytest.mark.slow
def test_what_keys_and_heads_pass_on_adds_up_to_what_the_layer_writes():
    layer = MultiHeadAttention(12, num_heads=6, num_key_heads=2, rngs=nnx.Rngs(0))
    layer.output_projection.bias[...] = jnp.asarray(RNG.normal(size=12), jnp.float32)
    x = jnp.asarray(RNG.normal(size=(2, 7, 12)), jnp.float32)
    run = inspection.observe(
        lambda x: layer(x, mask=masks.causal(), aux=("weights",)),
        lambda problem, output: {"value": problem.value, "output": output},
    )
    (written, aux), (seen,) = run(x)
    kernel = layer.output_projection.kernel
    added = inspection.contribute(seen["output"], kernel)
    assert added.shape == (2, 6, 7, 12)
    np.testing.assert_allclose(
        np.asarray(added).sum(1) + np.asarray(layer.output_projection.bias[...]), written, atol=1e-5
    )
    direction = jnp.asarray(RNG.normal(size=12), jnp.float32)
    along = inspection.contribute(seen["output"], kernel, direction)
    np.testing.assert_allclose(along, np.asarray(added) @ np.asarray(direction), atol=1e-5)
    lengths = inspection.weigh_values(aux["weights"], seen["value"], kernel)
    weights, value = np.asarray(aux["weights"], np.float64), np.asarray(seen["value"], np.float64)
    wide = np.asarray(kernel[...], np.float64).reshape(6, 2, 12)
    for b, h, t, s in ((0, 0, 3, 2), (1, 4, 6, 0), (1, 5, 2, 5)):
        vector = weights[b, h, t, s] * value[b, h // 3, s] @ wide[h]
        np.testing.assert_allclose(lengths[b, h, t, s], np.linalg.norm(vector), atol=1e-6)
    # A trace keeps the lengths that weights multiply.
    with inspection.capture(layer, example=1) as trace:
        layer(x, mask=masks.causal())
    (call,) = trace
    assert call.value_norms.shape == (6, 7)
    truth = [np.linalg.norm(value[1, h // 3] @ wide[h], axis=-1) for h in range(6)]
    np.testing.assert_allclose(call.value_norms, truth, rtol=2e-6)
    np.testing.assert_allclose(call.window() * call.value_norms[:, None], lengths[1], atol=1e-6)
    with pytest.raises(ValueError, match=r"projection: expected shape \(H \* E, M\) with H = 6 and value"):
        inspection.weigh_values(aux["weights"], seen["value"], jnp.eye(5))


def test_values_of_any_size_have_a_length_and_none_where_nothing_is_passed_on():
    weights, value = jnp.array([[[0.5, 0.5, 0.0]]]), jnp.array([[[300.0, 400.0], [3e4, 4e4], [np.nan, 1.0]]])
    lengths = inspection.weigh_values(weights, value.astype(jnp.float16), jnp.eye(2, dtype=jnp.float16))
    np.testing.assert_allclose(lengths, [[[250, 25000, 0]]])
    with pytest.raises(ValueError, match="weights: expected 3 keys, as value has, got shape"):
        inspection.weigh_values(weights[..., 1:], value, jnp.eye(2))
    with pytest.raises(ValueError, match=r"direction: expected shape \(2,\), got \(3,\)"):
        inspection.contribute(value, jnp.eye(2), jnp.ones(3))


@pytest.mark.slow
def test_the_last_layer_is_read_as_the_model_reads_it():
    config = TransformerConfig(d_model=12, num_heads=3, d_ff=11, num_layers=3, vocab_size=13)
    model, tokens = Decoder(config, rngs=nnx.Rngs(0)), jnp.array([[1, 2, 3, 4, 5]])
    model.eval()
    found = inspection.read_layers(model, tokens)
    assert found.shape == (3, 1, 5, 13)
    np.testing.assert_allclose(found[-1], model(tokens), rtol=1e-5, atol=1e-5)
    # Without the blocks after the first, its stream is the last one.
    model.trunk.stack.blocks = nnx.List(model.trunk.stack.blocks[:1])
    np.testing.assert_allclose(found[0], model(tokens), rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match=r"model: expected a regard\.models\.Decoder, got Encoder"):
        inspection.read_layers(Encoder(config, rngs=nnx.Rngs(0)), tokens)


@pytest.mark.slow
def test_values_are_measured_where_the_layer_says_what_becomes_of_them():
    x = jnp.asarray(RNG.normal(size=(1, 5, 12)), jnp.float32)
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
    for width in (4, 7):
        alone = LatentAttention(12, 1, **sizes | {"latent_dim": width})
        with inspection.capture(alone) as trace:
            alone(x, mask=masks.causal(), cache=alone.start_cache(1, 5))
        assert trace[0].value_norms is None
    bare = MultiHeadAttention(12, num_heads=3, project_output=False, rngs=nnx.Rngs(0))
    with inspection.capture() as trace:
        bare(x)
    assert trace[0].value_norms is None
    # More features than the stream has.
    found = measure_values(np.asarray(RNG.normal(size=(1, 7, 5))), RNG.normal(size=(10, 3)), 2)
    assert found.shape == (2, 7)
