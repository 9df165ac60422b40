"""What each layer would predict, and what heads add to a logit: numbers, files and the page's data."""

import dataclasses
import json
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard import inspection
from regard.inspection.explorer import payload
from regard.inspection.explorer.payload import collect
from regard.models import Decoder, Encoder, TransformerConfig

RNG = np.random.default_rng(0)
IDS = np.array([[3, 1, 4, 1, 5, 9, 2]])
SIZES = {"d_model": 12, "num_heads": 3, "d_ff": 11, "num_layers": 2, "vocab_size": 13}


def build(**choices):
    """A decoder whose norms and biases are no plain ones and zeros, in evaluation mode."""
    model = Decoder(TransformerConfig(**SIZES, **choices), rngs=nnx.Rngs(0))
    for leaf in (*nnx.iter_graph(model),):
        if isinstance(leaf[1], nnx.Param):
            leaf[1][...] = jnp.asarray(leaf[1][...] + RNG.normal(size=leaf[1].shape) / 5, jnp.float32)
    model.eval()
    return model


def predict(model, **options):
    with inspection.capture(model) as trace:
        model(jnp.asarray(IDS))
    return inspection.predict_layers(trace, model, IDS, lambda token: f"<{token}>", **options)


@pytest.fixture(scope="module")
def predicted():
    return predict(build(norm_kind="rms"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"norm_kind": "rms", "output_softcap": 5.0, "num_key_heads": 1},
        {"norm_kind": "layer", "tied_output": False, "head_bias": True},
    ],
    ids=["rms", "layer"],
)
def test_layers_and_heads_are_those_of_the_model_by_hand(choices):
    model = build(**choices)
    found = predict(model, targets=[5, 5, 2, 0, 1, 7, 12]).predictions
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
    rows = (
        model.trunk.embedding.entry.table.embedding[...] if model.head is None else model.head.kernel[...].T
    )
    is_rms = choices["norm_kind"] == "rms"

    def center(x):
        return x if is_rms else x - x.mean(-1, keepdims=True)

    size = np.sqrt((center(stream) ** 2).mean(-1, keepdims=True) + norm.epsilon)
    for layer, output in enumerate(seen):
        kernel = model.trunk.stack.blocks[layer].attention.output_projection.kernel[...]
        wide = np.asarray(kernel, np.float64).reshape(3, 4, 12)
        for head in range(3):
            added = np.asarray(output[0, head], np.float64) @ wide[head]
            unembedded = (center(added) / size * scale) @ np.asarray(rows, np.float64).T
            wanted = np.take_along_axis(unembedded, ids[found.targets][:, None], -1)[:, 0]
            np.testing.assert_allclose(found.contributions[layer, head], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_likeliest_token_is_the_target_unless_another_is_given(predicted):
    found = predicted.predictions
    np.testing.assert_array_equal(found.targets, found.tokens[-1, :, 0])


def test_behind_a_norm_of_their_own_heads_add_nothing_that_sums():
    found = predict(build(norm="both")).predictions
    assert found.contributions is None
    assert found.tokens.shape == (2, 7, 3)


def test_what_fits_no_model_is_refused(predicted):
    model = build(norm_kind="rms")
    with pytest.raises(ValueError, match=r"trace: expected calls of the shapes"):
        inspection.predict_layers(predicted, model, IDS[:, :5])
    with pytest.raises(ValueError, match=r"targets: expected shape \(7,\), got \(2,\)"):
        inspection.predict_layers(predicted, model, IDS, targets=[1, 2])
    for wrong in (-1, 13):
        with pytest.raises(ValueError, match=rf"targets: expected tokens in 0\.\.12 .*got .*{wrong}"):
            inspection.predict_layers(predicted, model, IDS, targets=[5] * 6 + [wrong])
    with pytest.raises(TypeError, match="targets: expected integers, got float"):
        inspection.predict_layers(predicted, model, IDS, targets=[1.5] * 7)
    encoder = Encoder(TransformerConfig(**SIZES), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"model: expected a regard\.models\.Decoder, got Encoder"):
        inspection.predict_layers(predicted, encoder, IDS)


def rewrite(path, change, target):
    """Copy a file of a trace with another meta.json."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "meta.json":
                meta = json.loads(content)
                change(meta["trace"])
                content = json.dumps(meta).encode()
            new.writestr(name, content)
    return target


def test_files_keep_predictions_and_do_without(predicted, tmp_path):
    path = predicted.save(tmp_path / "one.regard")
    mine, theirs = vars(predicted.predictions), vars(inspection.load(path).predictions)
    for name, value in mine.items():
        np.testing.assert_array_equal(theirs[name], value)
        assert not hasattr(value, "dtype") or theirs[name].dtype == value.dtype
    old = rewrite(path, lambda trace: trace.pop("predictions"), tmp_path / "old.regard")
    assert inspection.load(old).predictions is None


WRONG = {
    "tokens": (lambda found: found.update(tokens=found["targets"]), r"tokens: expected i numbers of shape"),
    "kind": (lambda found: found.update(targets=found["contributions"]), "targets: expected i numbers"),
    "texts": (lambda found: found.update(texts=["a"]), "tokens: expected numbers of the 1 texts"),
    "text": (lambda found: found.update(texts=[1]), r"texts\[0\]: expected str"),
    "heads": (
        lambda found: found.update(contributions=found["probabilities"]),
        r"contributions: expected f numbers of shape \(2, 3, 7\)",
    ),
    "absent": (lambda found: found.pop("tokens"), "expected Predictions with texts, tokens"),
}


@pytest.mark.parametrize("what", WRONG)
def test_damaged_predictions_are_refused(predicted, tmp_path, what):
    change, message = WRONG[what]
    path = predicted.save(tmp_path / "one.regard")
    path = rewrite(path, lambda trace: change(trace["predictions"]), tmp_path / "other.regard")
    with pytest.raises(ValueError, match=message):
        inspection.load(path)


def test_probabilities_out_of_range_are_refused(predicted, tmp_path):
    for value in (np.nan, 1.5, -0.1):
        shares = predicted.predictions.probabilities.copy()
        shares[0, 0, 0] = value
        found = dataclasses.replace(predicted.predictions, probabilities=shares)
        path = dataclasses.replace(predicted, predictions=found).save(tmp_path / "one.regard")
        if np.isnan(value):  # as of a model whose logits are no numbers
            np.testing.assert_array_equal(inspection.load(path).predictions.probabilities, shares)
            continue
        with pytest.raises(ValueError, match=r"probabilities: expected numbers in 0\.\.1"):
            inspection.load(path)


@pytest.mark.slow
def test_pages_carry_predictions_of_texts_that_are_not_long(predicted, monkeypatch):
    (shown,) = collect([predicted]).document["traces"]
    assert set(shown["predictions"]) == set(vars(predicted.predictions))
    bare = dataclasses.replace(predicted, predictions=None)
    assert "predictions" not in collect([bare]).document["traces"][0]
    monkeypatch.setattr(payload, "LARGEST_PREDICTIONS", predicted.predictions.tokens.size - 1)
    document = collect([predicted]).document
    assert "predictions" not in document["traces"][0]
    assert "What layers would predict is left out: the text is long." in document["notes"]
