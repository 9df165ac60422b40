"""Running: a monoid whose blocks may come in any order and in any brackets."""

import functools
import itertools

import jax
import numpy as np
import pytest

from regard.engine.softmax.online_softmax import Running

ROWS, WIDTH = 3, 2
SIZES = (1, 2, 3, 5)
LEAST = float(np.finfo(np.float32).min)  # what others write for "masked"
INF = np.inf
block = jax.jit(lambda running, scores, value, keys: running.block(scores, value, None, keys, None))
merge = jax.jit(Running.merge)
assert_same_bits = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def nothing(dtype=np.float32):
    return Running.empty((ROWS,), WIDTH, dtype, moment=True, argmax=True)


def define(scores, value):
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
    output, lse, entropy, argmax = define(scores, value)
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


def arrange(scores, value, orders=ORDERS):
    """Blocks met one after another, and merged in several brackets, in some orders."""
    for order in orders:
        yield functools.reduce(lambda r, part: grow(r, scores, value, part), order, nothing(scores.dtype))
        alone = [grow(nothing(scores.dtype), scores, value, part) for part in order]
        yield functools.reduce(merge, alone)
        if len(alone) == 4:
            a, b, c, d = alone
            yield merge(a, merge(b, merge(c, d)))
            yield merge(merge(a, b), merge(c, d))
            yield merge(merge(a, merge(b, c)), d)


@pytest.mark.parametrize("size", [0.0, 1.0, 90.0, 1e4, 1e30])
def test_blocks_come_in_any_order_and_brackets_and_scores_of_any_size_keep_their_digits(size):
    scores, value = draw(size)
    scores[1] = -INF
    for running in arrange(scores, value):
        check(running, scores, value)


def test_no_keys_are_neutral_to_the_bit():
    scores, value = draw()
    scores[1] = -INF
    whole = grow(nothing(), scores, value, (0, 11))
    assert_same_bits(merge(whole, nothing()), whole)
    assert_same_bits(merge(nothing(), whole), whole)
    assert_same_bits(merge(nothing(), nothing()), nothing())
    unseen = block(whole, np.full((ROWS, 2), -INF, np.float32), np.ones((2, WIDTH), np.float32), 11)
    assert_same_bits(unseen, whole)


@pytest.mark.parametrize("far", [LEAST, -1e30])
def test_keys_that_others_mask_with_the_least_number_weigh_nothing(far):
    scores, value = draw(drop=0)
    scores[:, :5] = far
    for running in arrange(scores, value, [parts((5, 6)), parts((5, 6))[::-1]]):
        check(running, scores, value)


def test_among_equal_scores_the_smallest_key_is_the_argmax():
    scores, value = np.zeros((ROWS, 11), np.float32), draw()[1]
    scores[0, [0, 3]], scores[1, [1, 2, 5]], scores[2, [4, 10]] = -1, 7, 7
    for running in arrange(scores, value):
        np.testing.assert_array_equal(running.argmax, [1, 1, 4])
