"""Contributions of keys, heads and layers, and what layers would predict, against the models by hand."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from refusals import assert_refused
from regard import inspection, masks
from regard.inspection.contributions import measure_values
from regard.inspection.explorer import budgets
from regard.inspection.explorer.payload import collect
from regard.layers import LatentAttention, MultiHeadAttention
from regard.models import Encoder
from small_models import X, build

RNG = np.random.default_rng(0)


def test_what_keys_and_heads_pass_on_adds_up_to_what_the_layer_writes():
    layer = MultiHeadAttention(12, num_heads=6, num_key_heads=2, rngs=nnx.Rngs(0))
    layer.output_projection.bias[...] = jnp.asarray(RNG.normal(size=12).astype(np.float32))
    x = RNG.normal(size=(2, 7, 12)).astype(np.float32)
    call = lambda x: layer(x, mask=masks.causal(), aux=("weights",))
    run = inspection.observe(call, lambda problem, output: {"value": problem.value, "output": output})
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
    model = nnx.clone(build())
    found = inspection.read_layers(model, X)
    assert found.shape == (2, 2, 5, 13)
    np.testing.assert_allclose(found[-1], model(X), rtol=1e-5, atol=1e-5)
    # Without the blocks after the first, its stream is the last one.
    model.trunk.stack.blocks = nnx.List(model.trunk.stack.blocks[:1])
    np.testing.assert_allclose(found[0], model(X), rtol=1e-5, atol=1e-5)


def test_values_are_measured_where_the_layer_says_what_becomes_of_them():
    x = RNG.normal(size=(1, 5, 12)).astype(np.float32)
    sizes = {"latent_dim": 4, "head_dim": 4, "rotary_dim": 2, "rngs": nnx.Rngs(0)}
    latent = LatentAttention(12, 3, **sizes)
    with inspection.capture(latent) as trace:
        latent(x, mask=masks.causal())
    expanded = np.asarray(latent.latent_norm(latent.latent(x)[..., :4])[0], np.float64)
    kernel = np.asarray(latent.expansion.kernel[...], np.float64).reshape(4, 3, 8)[..., 4:]
    wide = np.asarray(latent.output_projection.kernel[...], np.float64).reshape(3, 4, 12)
    truth = [np.linalg.norm(expanded @ kernel[:, h] @ wide[h], axis=-1) for h in range(3)]
    np.testing.assert_allclose(trace[0].value_norms, truth, rtol=2e-5)
    # From a cache, latent vectors stand where values do: of one head, as many, and as wide.
    alone = LatentAttention(12, 1, **sizes)
    with inspection.capture() as trace:
        alone(x, mask=masks.causal(), cache=alone.start_cache(1, 5))
    assert trace[0].value_norms is None
    # More features than the stream has.
    assert measure_values(RNG.normal(size=(1, 7, 5)), RNG.normal(size=(10, 3)), 2).shape == (2, 7)


# What layers would predict, and what heads add to a logit.

IDS = np.array([[3, 1, 4, 1, 5, 9, 2]])
KINDS = {
    "rms": {"norm_kind": "rms", "output_softcap": 5.0, "num_key_heads": 1},
    "layer": {"norm_kind": "layer", "tied_output": False, "head_bias": True},
    "both": {"norm": "both"},
}


@functools.cache
def draw(kind):
    """A decoder whose norms and biases are no plain ones and zeros, and its trace."""
    model = nnx.clone(build(**KINDS[kind]))
    for _, leaf in nnx.iter_graph(model):
        if isinstance(leaf, nnx.Param):
            leaf[...] = jnp.asarray(np.asarray(leaf[...] + RNG.normal(size=leaf.shape) / 5, np.float32))
    with inspection.capture(model) as trace:
        model(jnp.asarray(IDS))
    return model, trace


def predict(kind, **options):
    model, trace = draw(kind)
    return inspection.predict_layers(trace, model, IDS, lambda token: f"<{token}>", **options)


@pytest.fixture(scope="module")
def predicted():
    return predict("rms")


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_layers_and_heads_are_those_of_the_model_by_hand(kind):
    model, _ = draw(kind)
    found = predict(kind, targets=[5, 5, 2, 0, 1, 7, 12]).predictions
    ids = np.array([int(text[1:-1]) for text in found.texts])
    logits = np.asarray(inspection.read_layers(model, IDS), np.float64)[:, 0]
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    order = np.argsort(-shares, axis=-1)[..., :3]
    np.testing.assert_array_equal(ids[found.tokens], order)
    np.testing.assert_allclose(found.probabilities, np.take_along_axis(shares, order, -1), rtol=1e-5)
    np.testing.assert_array_equal(ids[found.targets], [5, 5, 2, 0, 1, 7, 12])
    # The logit falls by this where a head's output is taken from the last stream, and the norm's size stays.
    _, seen = inspection.observe(lambda ids: model(ids), lambda problem, output: output)(jnp.asarray(IDS))
    _, aux = model.trunk(jnp.asarray(IDS), aux=("hidden",))
    stream, norm = np.asarray(aux["blocks"][-1]["hidden"][0], np.float64), model.trunk.stack.final_norm
    scale = np.asarray(norm.scale[...], np.float64)
    table = model.trunk.embedding.entry.table.embedding if model.head is None else model.head.kernel
    rows = np.asarray(table[...], np.float64)
    rows = rows.T if model.head is None else rows
    center = lambda x: x if kind == "rms" else x - x.mean(-1, keepdims=True)
    size = np.sqrt((center(stream) ** 2).mean(-1, keepdims=True) + norm.epsilon)
    for layer, output in enumerate(seen):
        kernel = model.trunk.stack.blocks[layer].attention.output_projection.kernel[...]
        added = np.asarray(output[0], np.float64) @ np.asarray(kernel, np.float64).reshape(3, 4, 12)
        unembedded = (center(added) / size * scale) @ rows
        wanted = np.take_along_axis(unembedded, ids[found.targets][None, :, None], -1)[..., 0]
        np.testing.assert_allclose(found.contributions[layer], wanted, rtol=1e-5, atol=1e-6)


def test_behind_a_norm_of_their_own_heads_add_nothing_that_sums(predicted):
    found = predict("both").predictions
    assert found.contributions is None
    assert found.tokens.shape == (2, 7, 3)
    # The likeliest token is the target unless another is given.
    np.testing.assert_array_equal(predicted.predictions.targets, predicted.predictions.tokens[-1, :, 0])


def test_what_fits_no_model_is_refused():
    model, trace = draw("rms")
    ask = lambda *more, **options: inspection.predict_layers(trace, *more, **options)
    encoder, X = build(Encoder), np.ones((3, 1, 2, 2))
    assert_refused(
        (lambda: inspection.weigh_values(X[:2], X[..., :1], np.eye(1)), r"value: .* got \(2, 1\), \(3, 1\)"),
        (lambda: ask(model, IDS[:, :5]), r"trace: expected calls of the shapes"),
        (lambda: ask(model, IDS, targets=[1, 2]), r"targets: expected shape \(7,\), got \(2,\)"),
        (lambda: ask(model, IDS, targets=[5] * 6 + [-1]), r"targets: expected tokens in 0\.\.12 .*got .*-1"),
        (lambda: ask(model, IDS, targets=[5] * 6 + [13]), r"targets: expected tokens in 0\.\.12 .*got .*13"),
        (lambda: ask(model, IDS, targets=[1.5] * 7), "targets: expected integers, got float", TypeError),
        (lambda: ask(encoder, IDS), r"model: expected a regard\.models\.Decoder, got Encoder", TypeError),
    )


def test_pages_carry_predictions_of_texts_that_are_not_long(predicted, monkeypatch):
    (shown,) = collect([predicted]).document["traces"]
    assert set(shown["predictions"]) == set(vars(predicted.predictions))
    monkeypatch.setattr(budgets, "LARGEST_PREDICTIONS", predicted.predictions.tokens.size - 1)
    document = collect([predicted]).document
    assert "predictions" not in document["traces"][0]
    assert "What layers would predict is left out: the text is long." in document["notes"]
