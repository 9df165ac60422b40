"""Sampling against its definitions in float64 NumPy, and its frequencies against their probabilities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import assert_as_exact
from refusals import assert_refused
from regard.models import Sampling, sampling
from regard.models.speculation import probabilities

B, V = 5, 31
ALL = Sampling(temperature=1.7, top_k=13, top_p=0.9, min_p=0.05, repetition_penalty=1.2)


def draw_logits(seed=0, rows=B, size=V, scale=3.0, dtype=np.float32):
    return (scale * np.random.default_rng(seed).standard_normal((rows, size))).astype(dtype)


def softmax(x):
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def keep_most_probable(row, count=None, share=None):
    """Token by token from the most probable one on, until there are enough."""
    probability, kept, total = softmax(row.astype(np.float64)), [], 0.0
    for token in np.argsort(-row, kind="stable"):
        if (count is not None and len(kept) >= count) or (share is not None and kept and total >= share):
            break
        kept.append(token)
        total += probability[token]
    return set(kept)


def kept_tokens(row):
    return set(np.flatnonzero(np.asarray(row) > -np.inf))


def test_top_p_leaves_the_smallest_nucleus():
    logits, leave = draw_logits(), jax.jit(sampling.top_p)
    for share in (1e-50, 1e-6, 0.3, 0.5, 0.9, 0.99):
        left = np.asarray(leave(logits, share))
        assert [kept_tokens(own) for own in left] == [keep_most_probable(row, share=share) for row in logits]
        assert share > 1e-5 or [len(kept_tokens(own)) for own in left] == [1] * B
    flat = draw_logits(scale=1.0)
    np.testing.assert_array_equal(leave(flat, 1.0), flat)


def test_equal_logits_stay_or_go_together():
    logits = jnp.array([[1.0, 2.0, 0.0, 2.0, -0.0, 1.0]])
    leave = jax.jit(sampling.top_k)
    for count, kept in ((1, {1, 3}), (3, {0, 1, 3, 5}), (5, {0, 1, 2, 3, 4, 5}), (9, {0, 1, 2, 3, 4, 5})):
        assert kept_tokens(leave(logits, count)[0]) == kept, "0 and -0 are equal"
    assert Sampling(temperature=1.0, top_k=2**63 - 1).top_k == 2**31 - 1, "more than any vocabulary"
    # Probabilities e/15.6.., so one of the two largest holds 0.37 of the whole.
    assert kept_tokens(jax.jit(sampling.top_p)(logits, 0.3)[0]) == {1, 3}


def adjust_plainly(logits, seen, settings, dtype):
    """The chain by its definition, everything in one dtype."""
    x = logits.astype(dtype)
    if settings.repetition_penalty is not None:
        penalty = dtype(settings.repetition_penalty)
        x = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
    x = x / dtype(settings.temperature)
    for row in x:
        if settings.top_k is not None:
            row[sorted(set(range(row.size)) - keep_most_probable(row, count=settings.top_k))] = -np.inf
        if settings.top_p is not None:
            row[sorted(set(range(row.size)) - keep_most_probable(row, share=settings.top_p))] = -np.inf
        if settings.min_p is not None:
            row[row < row.max() + np.log(settings.min_p)] = -np.inf
    return x


SOME = Sampling(temperature=1.3, top_k=11, repetition_penalty=0.8)
LEAST = Sampling(temperature=0.7, min_p=1.0)
UNCUT = Sampling(temperature=1.1, repetition_penalty=1.5)  # tokens of negative logit stay


@pytest.mark.parametrize("settings", [SOME, ALL, LEAST, UNCUT], ids=str)
def test_the_chain_is_its_definition(settings):
    logits, seen = draw_logits(1), np.random.default_rng(2).random((B, V)) < 0.3
    got = jax.jit(sampling.adjust)(logits, settings, seen)
    truth = adjust_plainly(logits, seen, settings, np.float64)
    assert_as_exact(got, truth, adjust_plainly(logits, seen, settings, np.float32))
    assert np.isfinite(truth).sum() > B or settings == LEAST


def test_each_prompt_may_have_numbers_of_its_own():
    logits, seen = draw_logits(1), np.random.default_rng(2).random((B, V)) < 0.3
    numbers = {
        "temperature": [0.0, 0.7, 1, 0.0, 1.9],
        "top_k": [3, 40, 9, V, 2**40],
        "min_p": [0.1, 0.0, 1e-3, 0, 0.5],
    }
    numbers |= {"top_p": [0.5, 1.0, 0.9, 0.7, 0.8], "repetition_penalty": np.array([1.5, 1.0, 0.7, 1.2, 1.1])}
    adjusted = jax.jit(sampling.adjust)(logits, Sampling(**numbers), seen)
    laws = jax.jit(probabilities)(np.stack([logits] * 3, 1), Sampling(**numbers), np.stack([seen] * 3, 1))
    for row in range(B):
        own = {name: values[row] for name, values in numbers.items()}
        rest = {name: own[name] for name in (own if own["temperature"] else ["repetition_penalty"])}
        settings, operands = Sampling(**rest), (jnp.asarray(logits[[row]]), jnp.asarray(seen[[row]]))
        alone = np.asarray(sampling.adjust(operands[0], settings, operands[1]))[0]
        cold = np.where(np.arange(V) == alone.argmax(), alone, -np.inf)
        np.testing.assert_allclose(adjusted[row], cold if settings.greedy else alone, rtol=1e-6)
        law = probabilities(operands[0], settings, operands[1])
        np.testing.assert_allclose(laws[row], np.repeat(law, 3, 0), rtol=1e-5)


def test_penalty_needs_no_temperature_and_no_seen_tokens():
    logits, seen = jnp.array([[3.0, 2.5, -1.0]]), jnp.array([[True, False, False]])
    assert sampling.choose(logits, Sampling(repetition_penalty=1.5), seen=seen).tolist() == [1]
    assert sampling.choose(logits, Sampling(repetition_penalty=1.5)).tolist() == [0]


def test_every_dtype_of_logits_serves(x64):
    for dtype in (jnp.bfloat16, jnp.float16):
        adjusted = jax.jit(sampling.adjust)(jnp.asarray(draw_logits(), dtype), ALL, jnp.zeros((B, V), bool))
        assert adjusted.dtype == dtype
        assert np.all(np.isfinite(np.asarray(adjusted, np.float32)).sum(-1) >= 1)
    # Float64 keeps its digits.
    assert kept_tokens(jax.jit(sampling.top_k)(1 + 1e-12 * np.arange(5.0)[None], 2)[0]) == {3, 4}


def test_unhealthy_logits_choose_no_token():
    logits = draw_logits(5)
    logits[1, 3], logits[2, 4], logits[3] = np.nan, np.inf, -np.inf
    keys = sampling.row_keys(jax.random.key(1), B)
    choose = jax.jit(lambda settings: sampling.choose(jnp.asarray(logits), settings, rng=keys))
    for settings in (Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)):
        token = np.asarray(choose(settings))
        np.testing.assert_array_equal(token[1:4], -1)
        assert np.all(token[[0, 4]] >= 0)


def test_tokens_removed_by_minus_infinity_are_never_chosen():
    logits, seen = draw_logits(6), jnp.ones((B, V), bool)
    barred = np.where(logits > np.sort(logits)[:, -4:-3], np.float32(-np.inf), np.float32(0))
    settings = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.3)
    rest = jnp.asarray(logits + barred)
    adjusted = sampling.adjust(rest, settings, seen)
    allowed = np.isfinite(adjust_plainly(logits + barred, seen, settings, np.float64))
    np.testing.assert_array_equal(np.isfinite(adjusted), allowed)
    biased = dataclasses.replace(settings, logit_bias=barred)
    np.testing.assert_array_equal(sampling.adjust(jnp.asarray(logits), biased, seen), adjusted)
    assert sampling.choose(rest, Sampling()).tolist() == rest.argmax(-1).tolist()
    token = sampling.choose(adjusted, Sampling(temperature=1.0), rng=sampling.row_keys(jax.random.key(2), B))
    assert np.all(allowed[np.arange(B), token])
    np.testing.assert_allclose(probabilities(rest, settings, seen).sum(-1), 1, rtol=1e-6)
    bias = np.zeros((B, V), np.float32)
    bias[0], bias[1, 3], bias[2, 4] = -np.inf, np.nan, np.inf
    token = sampling.choose(jnp.asarray(logits), Sampling(logit_bias=bias))
    np.testing.assert_array_equal(token < 0, np.arange(B) < 3)


def test_numbers_may_be_traced_where_settings_are_made():
    logits, seen = jnp.asarray(draw_logits(7)), jnp.ones((B, V), bool)
    numbers = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3}
    adjust = jax.jit(lambda numbers: sampling.adjust(logits, Sampling(**numbers), seen))
    expected = sampling.adjust(logits, Sampling(**numbers), seen)
    for given in (numbers, {name: np.asarray(number) for name, number in numbers.items()}):
        np.testing.assert_allclose(adjust(given), expected, rtol=1e-6)
    for dtype, number in ((np.int8, 3), (np.uint8, 200), (np.uint64, 2**31 - 1), (np.int32, 3)):
        own = Sampling(temperature=jnp.float32(1.0), top_k=np.array([number, 1], dtype))
        assert own.top_k.tolist() == [number, 1]
        assert {own: 7}[Sampling(1.0, [number, 1])] == 7 != own != Sampling(1.0, [1, number])
    short = lambda: sampling.adjust(logits, Sampling(logit_bias=np.zeros((4, V), np.float32)))
    assert_refused(
        (lambda: jax.eval_shape(lambda k: Sampling(1.0, k), 1.5), "top_k: expected an integer", TypeError),
        (lambda: Sampling(temperature=jnp.ones((3, 1))), "temperature: expected a number, or one", TypeError),
        (lambda: sampling.top_k(logits, np.ones(3, int)), r"count: .* one per prompt, shape \(5,\); got \(3"),
        (lambda: sampling.adjust(logits, Sampling([0.0, 1])), r"temperature: .*shape \(5,\); got \(2"),
        (short, r"logit_bias: expected shape \(31,\) or \(5, 31\), got \(4, 31\)"),
    )  # fmt: skip


def test_settings_out_of_range_are_refused():
    for settings, message in (
        ({"temperature": -0.1}, r"temperature: expected a finite .* at least 1e-20, or 0, got -0\.1; log"),
        ({"temperature": [0.0, 1e-38]}, "temperature: .*1e-20, or 0, got 1e-38; .*, and 0 takes the most"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: expected at least 1, got 0; leave it out to keep all"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0\.0"),
        ({"temperature": 1.0, "min_p": -0.1}, r"min_p: expected a number in \(0, 1\], got -0\.1"),
        ({"temperature": 1.0, "min_p": 1.5}, r"min_p: expected a number in \(0, 1\], got 1\.5"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty: expected 1e-20 to 1e20"),
        ({"top_k": 3, "min_p": 0.1}, "top_k, min_p: expected a temperature above 0 with it, got temperature"),
    ):
        with pytest.raises(ValueError, match=message):
            Sampling(**settings)
    assert Sampling(temperature=1.0, min_p=0.0) == Sampling(temperature=1.0)


def test_random_keys_are_asked_for_and_checked():
    logits, split = jnp.asarray(draw_logits()), jax.random.split(jax.random.key(0))
    for call, message in (
        (lambda: sampling.choose(logits, Sampling(temperature=1.0)), "rng: expected one random"),
        (lambda: sampling.row_keys(jnp.zeros(3), 3), r"rng: expected a random key, .*got float32"),
        (lambda: sampling.row_keys(split, 3), r"one per row, shape \(3,\); got \(2,\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            jax.eval_shape(call)
    assert sampling.row_keys(jax.random.PRNGKey(0), 3)[1] == sampling.row_keys(jax.random.key(0), 3)[1]
