"""Traces made of arrays: they tell what captured ones do, and what is no attention is refused."""

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, inspection, masks, readouts
from regard.inspection import Trace
from regard.inspection.explorer import payload
from regard.inspection.explorer.position_curves import split_scores

B, H, K, T, S, D = 2, 6, 3, 11, 13, 5
WORDS = list("ab.abcab.ab")
EXAMPLE = 1


def draw(queries=T, keys=T, dtype="float64"):
    rng = np.random.default_rng(7)
    shapes = (B, H, queries, D), (B, K, keys, D)
    return [jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def capture(query, key, tokens=None, **options):
    with inspection.capture(tokens=tokens, example=EXAMPLE) as trace:
        attend(query, key, key, **options)
    return trace, attend(query, key, key, aux=("weights",), **options)[1]["weights"]


def assert_same_readouts(mine, theirs, atol=1e-12, but=("lse", "trust")):
    mine, theirs = mine.readout(), theirs.readout()
    for field in dataclasses.fields(mine):
        a, b = (getattr(one, field.name) for one in (mine, theirs))
        if field.name not in but and a is not None:
            np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=field.name)
        assert (a is None) == (b is None)


RAGGED = masks.causal() & masks.lengths([11, 7]) & ~masks.prefix(2)  # with rows that may attend to nothing


@pytest.mark.parametrize("told", [False, True], ids=["weights alone", "with the mask"])
def test_weights_tell_what_the_captured_trace_tells(told, x64, tmp_path):
    captured, weights = capture(*draw(), WORDS, mask=RAGGED)
    given = {"mask": RAGGED} if told else {"title": "of weights"}
    trace = Trace.from_arrays([weights], tokens=WORDS, example=EXAMPLE, **given)
    assert_same_readouts(trace[0], captured[0])
    assert float(np.max(trace[0].readout().trust)) < 1e-12
    np.testing.assert_allclose(trace[0].window(heads=[4, 1]), weights[EXAMPLE, np.array([4, 1])], atol=1e-7)
    assert readouts.label(trace[0].readout()) == readouts.label(captured[0].readout())
    described = trace[0].describe()
    assert (described["width"], described["backend"], described["dtype"]) == (0, "given", "float64")
    for keep in ("statistics", "qk"):
        loaded = inspection.load(trace.save(tmp_path / f"{keep}.regard", keep=keep))
        assert_same_readouts(loaded[0], captured[0])
        assert loaded[0].key_tokens.texts == tuple(WORDS)
        assert loaded.versions == trace.versions == {**loaded.versions, "jax": jax.__version__}
    assert split_scores(trace[0], 0) is None  # there is no content beside the biases


def test_a_weight_of_0_that_the_mask_allows_is_a_key_of_weight_0(x64):
    weights = np.zeros((1, 1, 3, 3))
    weights[0, 0, [0, 2], [0, 2]] = 1
    bare, told = (Trace.from_arrays([weights], mask=mask)[0] for mask in (None, masks.causal()))
    assert bare.readout().keys.tolist() == [[1, 0, 1]]
    assert told.readout().keys.tolist() == [[1, 0, 3]]
    np.testing.assert_array_equal(told.window(), weights[0])
    np.testing.assert_array_equal(told.readout().entropy, 0)


@pytest.mark.slow
def test_weights_of_fewer_queries_than_keys_and_of_bfloat16():
    tokens = {S: list("abcdefghijklm")}
    captured, weights = capture(*draw(T, S, "float32"), tokens, mask=masks.causal(), query_offset=2)
    for offset, kind in ((None, "cross"), (2, "self")):
        (call,) = Trace.from_arrays([weights], example=EXAMPLE, query_offset=offset, tokens=tokens)
        assert (call.kind, call.query_offset, call.rows, call.keys) == (kind, offset or 0, T, S)
        assert (call.query_tokens is None) == (offset is None)
        np.testing.assert_allclose(call.window(), captured[0].window(), atol=1e-6)
    # Weights of bfloat16 keep how much they miss 1.
    short = np.asarray(weights).astype(jnp.bfloat16)
    (call,) = Trace.from_arrays([short], example=EXAMPLE)
    assert call.describe()["dtype"] == "bfloat16"
    exact = short[EXAMPLE].astype(np.float64)
    np.testing.assert_allclose(call.window(), exact, rtol=1e-6)
    missed = np.abs(exact.sum(-1) - 1).max(-1)
    assert missed.max() > 1e-4
    np.testing.assert_allclose(call.readout().trust, missed, atol=1e-5)
    normed = exact / exact.sum(-1, keepdims=True)
    entropy = -(normed * np.log(np.where(normed > 0, normed, 1))).sum(-1)
    np.testing.assert_allclose(call.readout().entropy, entropy, atol=1e-5)


def test_tensors_with_graph_device_and_bfloat16_are_read():
    """Weights as PyTorch has them: NumPy takes neither graphs, nor devices, nor bfloat16."""
    weights = np.full((B, H, T, T), 1 / T).astype(jnp.bfloat16)
    tensor = mock.Mock(dtype="torch.bfloat16")
    tensor.detach().cpu().float.return_value = weights.astype(np.float32)
    (call,) = Trace.from_arrays([tensor])
    assert call.describe()["dtype"] == "bfloat16"
    np.testing.assert_allclose(call.window(), weights[0].astype(np.float32), rtol=1e-6)


def test_two_texts_are_those_of_cross_attention(tmp_path):
    even = np.full((1, 1, 3, 3), 1 / 3)
    trace = Trace.from_arrays([even], tokens=["das", "Haus", "."], key_tokens=["the", "house", "!"])
    loaded = inspection.load(trace.save(tmp_path / "two.regard"))
    for call in (trace[0], loaded[0]):
        assert (call.kind, call.query_tokens.texts[1], call.key_tokens.texts[1]) == ("cross", "Haus", "house")
    (shown,) = payload.collect([trace]).document["traces"][0]["calls"]
    assert (shown["query_sequence"], shown["key_sequence"]) == (0, 1)
    with pytest.raises(ValueError, match=r"key_tokens: expected one per position, \[3\]; got Tokens\(2 text"):
        Trace.from_arrays([even], tokens=["das", "Haus", "."], key_tokens=["the", "house"])
