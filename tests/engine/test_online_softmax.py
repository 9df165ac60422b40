"""Running: a monoid whose blocks may come in any order and in any brackets."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.engine.softmax.online_softmax import Running

ROWS, WIDTH = 3, 2
SIZES = (1, 2, 3, 5)
LEAST = float(np.finfo(np.float32).min)  # what others write for "masked"
INF = np.inf
block = jax.jit(lambda running, scores, value, keys: running.block(scores, value, None, keys, None))
merge = jax.jit(Running.merge)


def nothing(dtype=np.float32):
    return Running.empty((ROWS,), WIDTH, dtype, moment=True, argmax=True)


def truth(scores, value):
    """Output, lse, entropy and argmax by row, in float64, over keys whose score is not -inf."""
    scores, value = np.asarray(scores, np.float64), np.asarray(value, np.float64)
    output, lse, entropy = np.zeros((ROWS, WIDTH)), np.full(ROWS, -INF), np.zeros(ROWS)
    argmax = np.full(ROWS, -1)
    for row, s in enumerate(scores):
        if not (s > -INF).any():
            continue
        argmax[row] = np.argmax(s)
        total = np.exp(s - s.max()).sum()
        p = np.exp(s - s.max()) / total
        output[row], lse[row] = p @ value, s.max() + np.log(total)
        entropy[row] = -(p[p > 0] * np.log(p[p > 0])).sum()
    return output, lse, entropy, argmax


def check(running, scores, value):
    """Agreement to a few roundings of the dtype; of the lse, to those of the scores themselves."""
    few = 16 * np.finfo(running.peak.dtype).eps
    output, lse, entropy, argmax = truth(scores, value)
    np.testing.assert_array_equal(running.alive, argmax >= 0)
    np.testing.assert_array_equal(running.argmax, argmax)
    np.testing.assert_allclose(running.output(), output, rtol=few, atol=few * np.abs(value).max())
    found = np.asarray(running.peak, np.float64) + np.asarray(running.log_total(), np.float64)
    np.testing.assert_allclose(found, lse, rtol=few, atol=few)
    np.testing.assert_allclose(running.entropy(), entropy, rtol=few, atol=few)


def draw(size=3.0, dtype=np.float32, drop=0.2):
    rng = np.random.default_rng(11)
    scores = (rng.normal(size=(ROWS, sum(SIZES))) * size).astype(dtype)
    scores[rng.random(scores.shape) < drop] = -INF
    return scores, rng.normal(size=(sum(SIZES), WIDTH)).astype(dtype)


def parts(sizes=SIZES):
    """(first, last + 1) of each block."""
    ends = list(itertools.accumulate(sizes))
    return list(zip([0, *ends[:-1]], ends, strict=True))


ORDERS = [*itertools.permutations(parts())][::4]


def grow(running, scores, value, part):
    first, end = part
    return block(running, scores[:, first:end], value[first:end], np.arange(first, end, dtype=np.int32))


def alone(scores, value, part):
    return grow(nothing(scores.dtype), scores, value, part)


def in_blocks(scores, value, order):
    """One Running that meets the blocks in this order."""
    return functools.reduce(lambda r, part: grow(r, scores, value, part), order, nothing(scores.dtype))


def in_pairs(scores, value, order):
    """A Running for each block, merged in this order."""
    return functools.reduce(merge, [alone(scores, value, part) for part in order])


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_blocks_come_in_any_order(order):
    scores, value = draw()
    check(in_blocks(scores, value, order), scores, value)
    check(in_pairs(scores, value, order), scores, value)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_merging_is_associative(order):
    scores, value = draw()
    a, b, c, d = (alone(scores, value, part) for part in order)
    for merged in (
        merge(merge(merge(a, b), c), d),
        merge(a, merge(b, merge(c, d))),
        merge(merge(a, b), merge(c, d)),
        merge(merge(a, merge(b, c)), d),
    ):
        check(merged, scores, value)


def test_no_keys_are_neutral_to_the_bit():
    scores, value = draw()
    scores[1] = -INF
    whole = alone(scores, value, (0, 11))
    assert_same_bits(merge(whole, nothing()), whole)
    assert_same_bits(merge(nothing(), whole), whole)
    assert_same_bits(merge(nothing(), nothing()), nothing())
    unseen = block(whole, np.full((ROWS, 2), -INF, np.float32), np.ones((2, WIDTH), np.float32), 11)
    assert_same_bits(unseen, whole)


@pytest.mark.parametrize("size", [0.0, 1.0, 90.0, 1e4, 1e30])
def test_scores_of_any_size_keep_their_digits(size):
    scores, value = draw(size)
    for order in ORDERS:
        check(in_blocks(scores, value, order), scores, value)
        check(in_pairs(scores, value, order), scores, value)


@pytest.mark.parametrize("order", [parts((5, 6)), parts((5, 6))[::-1]], ids=["first", "last"])
@pytest.mark.parametrize("far", [LEAST, -1e30])
def test_keys_that_others_mask_with_the_least_number_weigh_nothing(far, order):
    scores, value = draw(drop=0)
    scores[:, :5] = far
    check(in_blocks(scores, value, order), scores, value)
    check(in_pairs(scores, value, order), scores, value)


def test_rows_without_keys_are_zero_and_minus_one():
    scores, value = draw()
    scores[1] = -INF
    for running in (nothing(), in_blocks(scores, value, parts())):
        row = jax.tree.map(lambda x: np.asarray(x)[1], running)
        assert row.peak == -INF
        assert row.argmax == -1
        for found in (running.output()[1], running.log_total()[1], running.entropy()[1]):
            assert not np.asarray(found).any()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_among_equal_scores_the_smallest_key_is_the_argmax(order):
    scores, value = np.zeros((ROWS, 11), np.float32), draw()[1]
    scores[0, [0, 3]], scores[1, [1, 2, 5]], scores[2, [4, 10]] = -1, 7, 7
    for running in (in_blocks(scores, value, order), in_pairs(scores, value, order)):
        np.testing.assert_array_equal(running.argmax, [1, 1, 4])


def test_what_does_not_survive_counts_in_the_total_only():
    scores, value = draw(drop=0)
    survivors = np.random.default_rng(2).random(scores.shape) < 0.5
    meet = jax.jit(lambda running, *block: running.block(*block, None))
    running = nothing()
    for first, end in parts():
        keys = slice(first, end)
        running = meet(
            running, scores[:, keys], value[keys], survivors[:, keys], np.arange(first, end, dtype=np.int32)
        )
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    kept = (weights * survivors) @ value / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(running.output(), kept, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(running.entropy(), truth(scores, value)[2], rtol=1e-5)


def test_statistics_nobody_asks_for_are_absent():
    scores, value = draw()
    plain = Running.empty((ROWS,), WIDTH, np.float32, moment=False, argmax=False)
    grown = grow(plain, scores, value, (0, 11))
    merged = merge(grow(plain, scores, value, (0, 5)), grow(plain, scores, value, (5, 11)))
    for running in (grown, merged):
        assert running.moment is None
        assert running.argmax is None
        np.testing.assert_allclose(running.output(), truth(scores, value)[0], rtol=1e-5, atol=1e-6)


def test_float64_is_kept(x64):
    scores, value = draw(dtype=np.float64)
    running = in_blocks(scores, value, parts()[::-1])
    assert running.output().dtype == np.float64
    check(running, scores, value)


@pytest.mark.slow
def test_heads_are_one_more_axis_outside_jit_as_well():
    scores, value = draw()
    heads = Running.empty((2, ROWS), WIDTH, np.float32, moment=True, argmax=True)
    stacked = jnp.stack([jnp.asarray(scores), -jnp.abs(jnp.asarray(scores))])
    for first, end in parts():
        both = jnp.stack([jnp.asarray(value), 2 * jnp.asarray(value)])
        heads = heads.block(
            stacked[..., first:end], both[:, first:end], None, np.arange(first, end, dtype=np.int32), None
        )
    for head in range(2):
        one = jax.tree.map(lambda x, head=head: x[head], heads)
        check(one, stacked[head], value * (head + 1))


columns = st.lists(st.sampled_from([-INF, -40.0, -1.0, 0.0, 0.5, 1.0, 40.0]), min_size=ROWS, max_size=ROWS)


@settings(max_examples=30)
@given(columns=st.lists(columns, min_size=1, max_size=7), data=st.data())
def test_any_split_any_order_and_any_brackets(columns, data):
    scores = np.array(columns, np.float32).T
    value = np.random.default_rng(3).normal(size=(len(columns), WIDTH)).astype(np.float32)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(columns) - 1)))) if len(columns) > 1 else []
    order = data.draw(st.permutations(list(zip([0, *cuts], [*cuts, len(columns)], strict=True))))
    pile = [alone(scores, value, part) for part in order]
    while len(pile) > 1:
        place = data.draw(st.integers(0, len(pile) - 2))
        pile[place : place + 2] = [merge(pile[place], pile[place + 1])]
    check(pile[0], scores, value)
    check(in_blocks(scores, value, order), scores, value)
