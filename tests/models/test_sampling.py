"""Sampling against its definitions in float64 NumPy, and its frequencies against their probabilities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from plain import assert_as_exact
from regard.models import Sampling, sampling

B, V = 5, 31


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


@pytest.mark.parametrize("count", [1, 2, 7, V, V + 5])
def test_top_k_leaves_the_largest_k(count):
    logits = draw_logits()
    left = np.asarray(jax.jit(sampling.top_k)(logits, count))
    for row, own in zip(logits, left, strict=True):
        assert kept_tokens(own) == keep_most_probable(row, count=count)
        np.testing.assert_array_equal(own[own > -np.inf], row[own > -np.inf])


@pytest.mark.parametrize("share", [1e-50, 1e-6, 0.3, 0.5, 0.9, 0.99])
def test_top_p_leaves_the_smallest_nucleus(share):
    logits = draw_logits()
    left = np.asarray(jax.jit(sampling.top_p)(logits, share))
    sizes = [len(kept_tokens(own)) for own in left]
    for row, own in zip(logits, left, strict=True):
        assert kept_tokens(own) == keep_most_probable(row, share=share)
    assert share > 1e-5 or sizes == [1] * B
    assert share < 0.9 or max(sizes) > 5


def test_top_p_of_one_leaves_all_that_has_weight():
    logits = jnp.asarray(draw_logits(scale=1.0))
    np.testing.assert_array_equal(sampling.top_p(logits, 1.0), logits)


def test_equal_logits_stay_or_go_together():
    logits = jnp.array([[1.0, 2.0, 0.0, 2.0, -0.0, 1.0]])
    assert kept_tokens(sampling.top_k(logits, 1)[0]) == {1, 3}
    assert kept_tokens(sampling.top_k(logits, 3)[0]) == {0, 1, 3, 5}
    assert kept_tokens(sampling.top_k(logits, 5)[0]) == {0, 1, 2, 3, 4, 5}, "0 and -0 are equal"
    # Probabilities e/15.6.., so one of the two largest holds 0.37 of the whole.
    assert kept_tokens(sampling.top_p(logits, 0.3)[0]) == {1, 3}


@pytest.mark.parametrize("share", [0.02, 0.2, 1.0])
def test_min_p_is_relative_to_the_largest(share):
    logits = draw_logits()
    left = np.asarray(sampling.min_p(jnp.asarray(logits), share))
    probability = softmax(logits.astype(np.float64))
    for own, p in zip(left, probability, strict=True):
        assert kept_tokens(own) == set(np.flatnonzero(p >= share * p.max() * (1 - 1e-6)))
    assert share < 1 or all(len(kept_tokens(own)) == 1 for own in left)


def test_tokens_removed_before_count_for_nothing():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    # Of the three that top-k leaves, the first two hold 7/9 of the weight: enough for 0.75, where all four
    # would need a third.
    settings = Sampling(temperature=1.0, top_k=3, top_p=0.75)
    assert kept_tokens(sampling.adjust(logits, settings)[0]) == {0, 1}
    assert kept_tokens(sampling.top_p(logits, 0.75)[0]) == {0, 1, 2}


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


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.3, repetition_penalty=1.7),
        Sampling(temperature=1.3, top_k=11, repetition_penalty=0.8),
        Sampling(temperature=2.0, top_p=0.8),
        Sampling(temperature=1.7, top_k=13, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    ],
    ids=str,
)
def test_the_chain_is_its_definition(settings):
    logits, seen = draw_logits(1), np.random.default_rng(2).random((B, V)) < 0.3
    got = jax.jit(sampling.adjust)(logits, settings, seen)
    truth = adjust_plainly(logits, seen, settings, np.float64)
    plain = adjust_plainly(logits, seen, settings, np.float32)
    assert_as_exact(got, truth, plain)
    assert np.isfinite(truth).sum() > B


def test_penalty_needs_no_temperature_and_no_seen_tokens():
    logits = jnp.array([[3.0, 2.5, -1.0]])
    seen = jnp.array([[True, False, False]])
    assert sampling.choose(logits, Sampling(repetition_penalty=1.5), seen=seen).tolist() == [1]
    assert sampling.choose(logits, Sampling(repetition_penalty=1.5)).tolist() == [0]
    np.testing.assert_array_equal(sampling.repetition_penalty(logits, seen, 2.0), [[1.5, 2.5, -1.0]])
    np.testing.assert_array_equal(sampling.repetition_penalty(-logits, seen, 2.0), [[-6.0, -2.5, 1.0]])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_every_dtype_of_logits_serves(dtype):
    logits = jnp.asarray(draw_logits(), dtype)
    settings = Sampling(temperature=0.5, top_k=7, top_p=0.5, min_p=0.01, repetition_penalty=1.1)
    adjusted = jax.jit(sampling.adjust)(logits, settings, jnp.zeros((B, V), bool))
    assert adjusted.dtype == dtype
    assert bool(jnp.all(jnp.isfinite(adjusted).sum(-1) >= 1))
    token = sampling.choose(logits, settings, rng=sampling.row_keys(jax.random.key(0), B))
    assert token.dtype == jnp.int32


def test_float64_keeps_its_digits(x64):
    logits = np.zeros((1, 5))
    logits[0] = 1 + 1e-12 * np.arange(5)
    assert kept_tokens(sampling.top_k(jnp.asarray(logits), 2)[0]) == {3, 4}
    assert sampling.adjust(jnp.asarray(logits), Sampling(temperature=0.5, top_p=0.5)).dtype == jnp.float64


@pytest.mark.parametrize(
    "settings",
    [Sampling(temperature=1.0), Sampling(temperature=0.6, top_k=7), Sampling(temperature=1.5, top_p=0.8)],
    ids=str,
)
def test_frequencies_are_probabilities(settings):
    draws = 20_000
    logits = draw_logits(3, 1, 11, scale=1.0)
    expected = softmax(np.asarray(sampling.adjust(jnp.asarray(logits), settings), np.float64))[0]
    draw = jax.jit(
        lambda keys: sampling.choose(jnp.broadcast_to(jnp.asarray(logits), (draws, 11)), settings, rng=keys)
    )
    token = np.asarray(draw(sampling.row_keys(jax.random.key(5), draws)))
    counts = np.bincount(token, minlength=11)
    assert counts[expected == 0].sum() == 0
    # Pearson's statistic has mean d and variance 2d for d degrees of freedom: this bound is about 6 sigma.
    alive = expected > 0
    degrees = alive.sum() - 1
    statistic = np.sum((counts[alive] - draws * expected[alive]) ** 2 / (draws * expected[alive]))
    assert statistic < degrees + 6 * np.sqrt(2 * degrees)
    # The bound can fail: other probabilities, off by a tenth, are told from these.
    other = expected ** (0.9)
    other = draws * other[alive] / other[alive].sum()
    assert np.sum((counts[alive] - other) ** 2 / other) > degrees + 6 * np.sqrt(2 * degrees)


def test_a_row_draws_the_same_whatever_the_batch():
    logits, settings = jnp.asarray(draw_logits(4, 7)), Sampling(temperature=1.5)
    keys = sampling.row_keys(jax.random.key(1), 7)
    whole = np.asarray(sampling.choose(logits, settings, rng=keys))
    alone = [int(sampling.choose(logits[r : r + 1], settings, rng=keys[r : r + 1])[0]) for r in range(7)]
    np.testing.assert_array_equal(whole, alone)
    few = sampling.choose(logits[:3], settings, rng=sampling.row_keys(jax.random.key(1), 3))
    np.testing.assert_array_equal(whole[:3], few)
    assert len(np.unique(whole)) > 2


def test_unhealthy_logits_choose_no_token():
    logits = draw_logits(5)
    logits[1, 3], logits[2, 4], logits[3, 5] = np.nan, np.inf, -np.inf
    keys = sampling.row_keys(jax.random.key(1), B)
    for settings in (Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)):
        token = np.asarray(sampling.choose(jnp.asarray(logits), settings, rng=keys))
        np.testing.assert_array_equal(token[1:4], -1)
        assert np.all(token[[0, 4]] >= 0)


def test_other_numbers_compile_nothing_anew():
    traces = []

    @jax.jit
    def adjust(logits, settings):
        traces.append(1)
        return sampling.adjust(logits, settings)

    logits = jnp.asarray(draw_logits())
    warm = adjust(logits, Sampling(temperature=0.9, top_k=5, top_p=0.9))
    adjust(logits, Sampling(temperature=0.8, top_k=3, top_p=0.5))
    assert len(traces) == 1
    np.testing.assert_array_equal(warm, adjust(logits, Sampling(temperature=0.9, top_k=5, top_p=0.9)))
    adjust(logits, Sampling())
    adjust(logits, Sampling(temperature=0.8))
    assert len(traces) == 3


def test_a_record_survives_the_tree():
    for settings in (Sampling(), Sampling(temperature=0.5, min_p=0.1)):
        leaves, tree = jax.tree.flatten(settings)
        assert jax.tree.unflatten(tree, leaves) == settings
        assert {settings: 1}[dataclasses.replace(settings)] == 1
    assert len(jax.tree.leaves(Sampling())) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature: expected a finite number of at least 0, got -0\.1; 0 takes"),
        ({"temperature": float("nan")}, "temperature: expected a finite number of at least 0, got nan"),
        ({"temperature": 1e-38}, "temperature: expected at least 1e-20, or 0, .*; got 1e-38"),
        ({"temperature": 1.0, "top_k": 0}, "top_k: expected at least 1, got 0; None keeps all"),
        ({"temperature": 1.0, "top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0\.0"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p: expected a number in \(0, 1\], got 1\.5"),
        ({"temperature": 1.0, "min_p": -1.0}, r"min_p: expected a number in \(0, 1\], got -1\.0"),
        *(
            ({"repetition_penalty": penalty}, "repetition_penalty: expected a number from 1e-20 to 1e20")
            for penalty in (0.0, 1e-40, 1e300, float("inf"), float("nan"))
        ),
        (
            {"top_k": 3, "min_p": 0.1},
            "top_k, min_p: expected a temperature above 0 with it, got temperature=0",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


def test_random_keys_are_asked_for_and_checked():
    logits = jnp.asarray(draw_logits())
    with pytest.raises(ValueError, match="rng: expected one random key per row because the temperature"):
        sampling.choose(logits, Sampling(temperature=1.0))
    with pytest.raises(TypeError, match=r"rng: expected a random key, .*got float32"):
        sampling.row_keys(jnp.zeros(3), 3)
    with pytest.raises(ValueError, match=r"one per row, shape \(3,\); got \(2,\)"):
        sampling.row_keys(jax.random.split(jax.random.key(0)), 3)
    old = jax.random.PRNGKey(0)
    assert sampling.row_keys(old, 3)[1] == sampling.row_keys(jax.random.key(0), 3)[1]
