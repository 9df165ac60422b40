"""What each layer would predict, and what heads add to a logit: numbers, files and the page's data."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from refusals import check_refusals
from regard import inspection
from regard.inspection.explorer import payload
from regard.inspection.explorer.payload import collect
from regard.models import Decoder, Encoder, TransformerConfig
from test_trace_files import rewrite

RNG = np.random.default_rng(0)
IDS = np.array([[3, 1, 4, 1, 5, 9, 2]])
SIZES = {"d_model": 12, "num_heads": 3, "d_ff": 11, "num_layers": 2, "vocab_size": 13}
KINDS = {
    "rms": {"norm_kind": "rms", "output_softcap": 5.0, "num_key_heads": 1},
    "layer": {"norm_kind": "layer", "tied_output": False, "head_bias": True},
    "both": {"norm": "both"},
}


@functools.cache
def build(kind):
    """A decoder whose norms and biases are no plain ones and zeros, in evaluation mode; and its trace."""
    model = Decoder(TransformerConfig(**SIZES, **KINDS[kind]), rngs=nnx.Rngs(0))
    for _, leaf in nnx.iter_graph(model):
        if isinstance(leaf, nnx.Param):
            leaf[...] = jnp.asarray(np.asarray(leaf[...] + RNG.normal(size=leaf.shape) / 5, np.float32))
    model.eval()
    with inspection.capture(model) as trace:
        model(jnp.asarray(IDS))
    return model, trace


def predict(kind, **options):
    model, trace = build(kind)
    return inspection.predict_layers(trace, model, IDS, lambda token: f"<{token}>", **options)


@pytest.fixture(scope="module")
def predicted():
    return predict("rms")


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_layers_and_heads_are_those_of_the_model_by_hand(kind):
    model, _ = build(kind)
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
    model, trace = build("rms")
    ask = lambda *more, **options: inspection.predict_layers(trace, *more, **options)
    encoder = Encoder(TransformerConfig(**SIZES), rngs=nnx.Rngs(0))
    check_refusals(
        (lambda: ask(model, IDS[:, :5]), r"trace: expected calls of the shapes"),
        (lambda: ask(model, IDS, targets=[1, 2]), r"targets: expected shape \(7,\), got \(2,\)"),
        (lambda: ask(model, IDS, targets=[5] * 6 + [-1]), r"targets: expected tokens in 0\.\.12 .*got .*-1"),
        (lambda: ask(model, IDS, targets=[5] * 6 + [13]), r"targets: expected tokens in 0\.\.12 .*got .*13"),
        (lambda: ask(model, IDS, targets=[1.5] * 7), "targets: expected integers, got float", TypeError),
        (lambda: ask(encoder, IDS), r"model: expected a regard\.models\.Decoder, got Encoder", TypeError),
    )


WRONG = [
    (lambda found: found.update(tokens=found["targets"]), r"tokens: expected i numbers of shape"),
    (lambda found: found.update(targets=found["contributions"]), "targets: expected i numbers"),
    (lambda found: found.update(texts=["a"]), "tokens: expected numbers of the 1 texts"),
    (lambda found: found.update(contributions=found["probabilities"]), r"contributions: expected f numbers"),
    (lambda found: found.pop("tokens"), "expected Predictions with texts, tokens"),
]


def test_files_keep_predictions_and_damaged_ones_are_refused(predicted, tmp_path):
    path = predicted.save(tmp_path / "one.regard")
    mine, theirs = vars(predicted.predictions), vars(inspection.load(path).predictions)
    for name, value in mine.items():
        np.testing.assert_array_equal(theirs[name], value)
        assert not hasattr(value, "dtype") or theirs[name].dtype == value.dtype
    other, data = tmp_path / "other.regard", path.read_bytes()
    for change, message in WRONG:
        rewrite(other, data, lambda meta, change=change: change(meta["trace"]["predictions"]) and None)
        with pytest.raises(ValueError, match=message):
            inspection.load(other)
    for value in (np.nan, 1.5):
        shares = predicted.predictions.probabilities.copy()
        shares[0, 0, 0] = value
        found = dataclasses.replace(predicted.predictions, probabilities=shares)
        path = dataclasses.replace(predicted, predictions=found).save(path)
        if np.isnan(value):  # as of a model whose logits are no numbers
            np.testing.assert_array_equal(inspection.load(path).predictions.probabilities, shares)
    with pytest.raises(ValueError, match=r"probabilities: expected numbers in 0\.\.1"):
        inspection.load(path)


def test_pages_carry_predictions_of_texts_that_are_not_long(predicted, monkeypatch):
    (shown,) = collect([predicted]).document["traces"]
    assert set(shown["predictions"]) == set(vars(predicted.predictions))
    monkeypatch.setattr(payload, "LARGEST_PREDICTIONS", predicted.predictions.tokens.size - 1)
    document = collect([predicted]).document
    assert "predictions" not in document["traces"][0]
    assert "What layers would predict is left out: the text is long." in document["notes"]
