"""Scores by distance at both ends of int32, which holds the positions and not how far apart they are."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import scores
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from test_scores import bucket_by_hand

B, H, T, S, D = 2, 3, 5, 7, 2
LOW, HIGH, LARGEST = -(2**31), 2**31 - 9, 2**31 - 1
PLACES = [*itertools.product([LOW, -3, HIGH], repeat=2), (2**30, -(2**30) - 3), (-(2**30) - 3, 2**30 - 4)]
SLOPES, BUCKETS = np.array([1e-9, 4e-10, 2e-10]), 8
TABLE = np.random.default_rng(8).normal(size=(BUCKETS, H))


def look_up(bidirectional, farthest, table, distance):
    bucket = functools.partial(bucket_by_hand, bidirectional=bidirectional, count=BUCKETS, farthest=farthest)
    return np.moveaxis(np.asarray(table)[np.vectorize(bucket)(distance)], -1, 0)


# How a score is made of its parameter; that; and what it adds at a distance, key - query, in whole numbers.
CASES = [
    (
        lambda slopes: scores.alibi(slopes=slopes),
        SLOPES,
        lambda slopes, distance: -slopes[:, None, None] * abs(distance).astype(float),
    ),
    *(
        (
            functools.partial(scores.relative_bias, bidirectional=both, max_distance=farthest),
            factor * TABLE,
            functools.partial(look_up, both, farthest),
        )
        for factor, both, farthest in ((1, True, 9), (2, False, 15), (3, True, LARGEST - 2))
    ),
]
RUNS = {
    "dense": dense.run,
    "tiled": functools.partial(tiled.run, forward=Blocking(3, 4), backward=Blocking(2, 3)),
    "in pieces": functools.partial(
        tiled.run, forward=Blocking(2, 3, blocks=2, pieces=2), backward=Blocking(3, 2, blocks=3, pieces=2)
    ),
}
_count = functools.partial(jnp.arange, dtype=jnp.int32)
WHERE = {
    "offset": lambda place, length: place,
    "per row": lambda place, length: jnp.stack([place, jnp.int32(0)]),
    "positions": lambda place, length: jnp.stack([place + _count(length), _count(length)]),
}
ROWS = np.array([4, 1])


@pytest.mark.parametrize(
    ("run", "where"),
    [("dense", "per row"), ("tiled", "offset"), ("tiled", "positions"), ("in pieces", "per row")],
)
def test_distances_are_those_of_whole_numbers_without_end(run, where, x64):
    rng = np.random.default_rng(3)
    query, key, value = (jnp.asarray(rng.normal(size=(B, H, n, D))) for n in (T, S, S))
    parameters = [parameter for _, parameter, _ in CASES]

    @jax.jit
    def call(parameters, *place):
        score = [make(parameter) for (make, _, _), parameter in zip(CASES, parameters, strict=True)]
        options = {"score": score, "rows": ROWS}
        for name, first, length in zip(("query", "key"), place, (T, S), strict=True):
            options[f"{name}_{where if where == 'positions' else 'offset'}"] = WHERE[where](first, length)
        aux = RUNS[run](canonicalize(query, key, value, aux=("lse", "max_score", "scores"), **options))[1]
        return jnp.sum(aux["lse"]) + jnp.sum(aux["max_score"]), aux

    raw = np.einsum("bhtd,bhsd->bhts", query, key) / np.sqrt(D)
    steps = np.arange(S, dtype=object) - np.arange(T, dtype=object)[:, None]
    for place in PLACES:
        traced = map(jnp.int32, place)
        (_, aux), grads = jax.value_and_grad(call, has_aux=True)(list(map(jnp.asarray, parameters)), *traced)
        rows = [place, place if where == "offset" else (0, 0)]
        distances = [steps + k - q for q, k in rows]
        expected = raw + sum(add_everywhere(parameter, add, distances) for _, parameter, add in CASES)
        top = expected.max(-1, keepdims=True)
        weights = np.exp(expected - top)
        total = weights.sum(-1, keepdims=True)
        pull = weights / total + (expected == top)
        check = functools.partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11, err_msg=str(place))
        check(aux["scores"], expected[..., ROWS, :])
        check(aux["max_score"], top[..., 0])
        check(aux["lse"], (top + np.log(total))[..., 0])
        for (_, parameter, add), grad in zip(CASES, grads, strict=True):
            units = np.eye(parameter.size).reshape((-1, *parameter.shape))
            sums = [(add_everywhere(unit, add, distances) * pull).sum() for unit in units]
            check(grad, np.reshape(sums, parameter.shape))


def add_everywhere(parameter, add, distances):
    return np.stack([add(parameter, distance) for distance in distances])
