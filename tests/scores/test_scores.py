"""Score functions: what each says, and that both backends and every transform agree on it."""

import functools
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from economy import mostly_slow
from regard import attend, explain, masks, scores
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch.registry import COMPLETE
from regard.engine.flash.blocking import Blocking
from regard.scores.cells import _toeplitz
from regard.scores.distances import _borders

B, H, K, T, S, D, E = 2, 6, 3, 13, 17, 7, 5
OFFSET = 4
BUCKETS = 12


def draw(dtype=np.float64):
    rng = np.random.default_rng(21)
    shapes = ((B, H, T, D), (B, K, S, D), (B, K, S, E))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def per_head(seed, low=0.5, high=2.0):
    return np.random.default_rng(seed).uniform(low, high, H)


def table():
    return np.random.default_rng(8).normal(size=(BUCKETS, H))


def places():
    """Batch, head, query and key position, as (B, H, T, S) arrays."""
    batch, head, query, key = np.indices((B, H, T, S))
    return batch, head, query + OFFSET, key


def bucket_by_hand(distance, bidirectional, count, farthest):
    """T5's buckets, from the definition, one distance at a time."""
    side = count // 2 if bidirectional else count
    start = side if bidirectional and distance > 0 else 0
    far = abs(distance) if bidirectional else max(-distance, 0)
    exact = side // 2
    if far < exact:
        return start + far
    share = np.log(far / exact) / np.log(farthest / exact)
    return start + min(exact + int(np.floor(share * (side - exact) + 1e-9)), side - 1)


def buckets(bidirectional, farthest):
    _, _, query, key = places()
    return np.vectorize(lambda d: bucket_by_hand(d, bidirectional, BUCKETS, farthest))(key - query)


def column(array):
    return np.asarray(array)[:, None, None]


def mixed(rate):
    """A modifier that reads everything there is to read."""
    rate = jnp.asarray(rate)

    def change(score, batch, head, query, key):
        growth = 1 + 0.1 * batch.astype(score.dtype)
        return score * growth + rate[head] * jnp.sin(score) - 0.05 * (query - 2 * key).astype(score.dtype)

    return scores.modifier(change)


# For each: how the score is made from its parameters; those; what it says and its derivative by the score;
# and its derivative by each parameter, times what pulls on the new scores, before summing to its shape.
CASES = {
    "softcap": (
        lambda cap: scores.softcap(cap),
        np.asarray(1.3),
        lambda s, cap: cap * np.tanh(s / cap),
        lambda s, cap: 1 / np.cosh(s / cap) ** 2,
        lambda s, cap: np.tanh(s / cap) - s / cap / np.cosh(s / cap) ** 2,
    ),
    "softcap by head": (
        lambda cap: scores.softcap(cap),
        per_head(3),
        lambda s, cap: column(cap) * np.tanh(s / column(cap)),
        lambda s, cap: 1 / np.cosh(s / column(cap)) ** 2,
        lambda s, cap: np.tanh(s / column(cap)) - s / column(cap) / np.cosh(s / column(cap)) ** 2,
    ),
    "temperature": (
        lambda t: scores.temperature(t),
        per_head(4),
        lambda s, t: s / column(t),
        lambda s, t: np.ones_like(s) / column(t),
        lambda s, t: -s / column(t) ** 2,
    ),
    "alibi": (
        lambda slopes: scores.alibi(slopes=slopes),
        per_head(5, 0.0, 0.5),
        lambda s, slopes: s - column(slopes) * abs(places()[2] - places()[3]),
        lambda s, slopes: np.ones_like(s),
        lambda s, slopes: -abs(places()[2] - places()[3]).astype(float),
    ),
    "relative bias": (
        lambda table: scores.relative_bias(table, max_distance=9),
        table(),
        lambda s, table: s + np.asarray(table)[buckets(True, 9), places()[1]],
        lambda s, table: np.ones_like(s),
        None,
    ),
    "relative bias, causal": (
        lambda table: scores.relative_bias(table, bidirectional=False, max_distance=15),
        table(),
        lambda s, table: s + np.asarray(table)[buckets(False, 15), places()[1]],
        lambda s, table: np.ones_like(s),
        None,
    ),
    "modifier": (
        mixed,
        per_head(6),
        lambda s, rate: (
            s * (1 + 0.1 * places()[0]) + column(rate) * np.sin(s) - 0.05 * (places()[2] - 2 * places()[3])
        ),
        lambda s, rate: 1 + 0.1 * places()[0] + column(rate) * np.cos(s),
        lambda s, rate: np.sin(s),
    ),
}
MASK = masks.causal() & ~masks.lengths([0, 6])  # the first queries of the second row see nothing


def truth(name, arrays, bias, cotangent):
    """Attention over scores changed by hand, as a bias; gradients by the chain rule."""
    _, given, function, by_score, by_parameter = CASES[name]
    query, key, value = (np.asarray(x, np.float64) for x in arrays)
    wide = np.repeat(key, H // K, 1)
    raw = np.einsum("bhtd,bhsd->bhts", query, wide) / np.sqrt(D)
    keep = np.asarray(MASK.dense(T, S, query_offset=OFFSET, leading_axes=2))
    change = function(raw, given) - raw + bias
    found = oracle.batched(query, key, value, keep=keep, bias=change, cotangent=cotangent)
    pull = found.d_bias
    inner = pull * by_score(raw, given) / np.sqrt(D)
    d_key = np.einsum("bhts,bhtd->bhsd", inner, query).reshape(B, K, H // K, S, D).sum(2)
    if by_parameter is None:
        d_given = np.zeros(given.shape)
        kind = buckets(name == "relative bias", 9 if name == "relative bias" else 15)
        np.add.at(d_given, (kind, places()[1]), pull)
    else:
        d_given = (pull * by_parameter(raw, given)).sum((0, 2, 3))
        d_given = d_given.sum() if given.ndim == 0 else d_given
    return found, (np.einsum("bhts,bhsd->bhtd", inner, wide), d_key, found.d_value, d_given)


def call(name, backend, *, biased=True):
    make = CASES[name][0]
    bias = jnp.asarray(np.random.default_rng(2).normal(size=(H, 1, S))) if biased else None

    def run(query, key, value, given, aux=()):
        options = {"mask": MASK, "bias": bias, "query_offset": OFFSET, "score": make(given), "aux": aux}
        if backend != "small tiles":
            return attend(query, key, value, **options, backend=backend)
        found = tiled.run(canonicalize(query, key, value, **options), Blocking(5, 4), Blocking(4, 3))
        return found if aux else found[0]

    return run, np.asarray(bias if biased else 0.0)


@pytest.mark.parametrize(
    ("name", "backend"),
    mostly_slow(
        itertools.product(CASES, [*COMPLETE, "small tiles"]),
        *itertools.product(["softcap", "alibi", "relative bias, causal", "modifier"], COMPLETE),
    ),
)
def test_values_and_gradients_are_those_of_the_definition(name, backend, x64):
    arrays, given = draw(), jnp.asarray(CASES[name][1])
    run, bias = call(name, backend)
    cotangent = np.random.default_rng(9).normal(size=(B, H, T, E))
    found, grads = truth(name, arrays, bias, cotangent)
    output, aux = run(*arrays, given, aux=("lse", "entropy", "max_score", "argmax", "weights", "scores"))
    np.testing.assert_allclose(output, found.output, rtol=1e-9, atol=1e-12)
    for part, actual in aux.items():
        np.testing.assert_allclose(actual, getattr(found, part), rtol=1e-9, atol=1e-12, err_msg=part)
    actual = jax.jit(jax.grad(lambda *x: jnp.sum(run(*x) * cotangent), (0, 1, 2, 3)))(*arrays, given)
    for one, other in zip(actual, grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)
    assert not np.asarray(output)[1, :, 0].any()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("backend", ["dense", "small tiles"])
def test_a_cap_without_a_bias_has_the_derivatives_of_the_definition(backend, learned, x64):
    """Unless the cap itself is learned, they are told from the capped scores alone."""
    arrays, given = draw(), jnp.asarray(CASES["softcap by head"][1])
    inputs = (*arrays, given) if learned else tuple(arrays)
    rng = np.random.default_rng(9)
    cotangent = rng.normal(size=(B, H, T, E))
    tangents = tuple(jnp.asarray(rng.normal(size=x.shape)) for x in inputs)

    def loss_of(backend):
        run = call("softcap by head", backend, biased=False)[0]

        def loss(*inputs):
            output = run(*inputs, *() if learned else (given,))
            return jnp.sum(output * cotangent), output

        return loss

    found, expected = truth("softcap by head", arrays, 0.0, cotangent)
    grad = jax.grad(loss_of(backend), range(len(inputs)), has_aux=True)
    grads, output = jax.jit(grad)(*inputs)
    np.testing.assert_allclose(output, found.output, rtol=1e-9, atol=1e-12)
    for one, other in zip(grads, expected, strict=learned):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)
    slope = jax.jvp(loss_of(backend), inputs, tangents)[1][0]
    np.testing.assert_allclose(slope, sum(map(np.vdot, grads, tangents)), rtol=1e-9)
    of_dense = jax.grad(loss_of("dense"), range(len(inputs)), has_aux=True)
    curvature, curvature_of_dense = (jax.jvp(one, inputs, tangents)[1][0] for one in (grad, of_dense))
    for one, other in zip(curvature, curvature_of_dense, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("name", CASES)
def test_statistics_have_gradients(name, backend, x64):
    arrays, given = draw(), jnp.asarray(CASES[name][1])
    run, _ = call(name, backend)

    def measure(*inputs):
        aux = run(*inputs, aux=("lse", "entropy", "max_score"))[1]
        kept = [jnp.where(jnp.isfinite(x), x, 0) for x in aux.values()]
        return sum(jnp.sum(jnp.sin(x + 1)) for x in kept)

    inputs = (*arrays, given)
    rng = np.random.default_rng(4)
    tangents = [jnp.asarray(rng.normal(size=x.shape)) for x in inputs]
    step, statistics = 1e-6, jax.jit(measure)
    ends = [
        statistics(*(x + sign * step * tangent for x, tangent in zip(inputs, tangents, strict=True)))
        for sign in (1, -1)
    ]
    slope = (ends[0] - ends[1]) / (2 * step)
    grads = jax.jit(jax.grad(statistics, (0, 1, 2, 3)))(*inputs)
    along = sum(jnp.vdot(grad, tangent) for grad, tangent in zip(grads, tangents, strict=True))
    np.testing.assert_allclose(along, slope, rtol=1e-6)
    np.testing.assert_allclose(jax.jvp(statistics, inputs, tuple(tangents))[1], slope, rtol=1e-6)


TRANSFORMS = {
    "hessian-vector": lambda loss, inputs, tangents: jax.jvp(jax.grad(loss, (0, 1, 2, 3)), inputs, tangents)[
        1
    ],
    "reverse over reverse": lambda loss, inputs, tangents: jax.grad(
        lambda *x: sum(
            jnp.vdot(g, m) for g, m in zip(jax.grad(loss, (0, 1, 2, 3))(*x), tangents, strict=True)
        ),
        (0, 1, 2, 3),
    )(*inputs),
    "vmap over parameters": lambda loss, inputs, tangents: jax.vmap(jax.grad(loss, 3), (None, None, None, 0))(
        *inputs[:3], jnp.stack([inputs[3], 1.5 * inputs[3]])
    ),
    "vmap over inputs": lambda loss, inputs, tangents: jax.vmap(
        jax.grad(loss, (0, 3)), (0, None, None, None)
    )(jnp.stack([inputs[0], -inputs[0]]), *inputs[1:]),
}


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        ("softcap by head", "hessian-vector"),
        ("relative bias", "vmap over parameters"),
        *(
            pytest.param(name, transform, marks=pytest.mark.slow)
            for name in ("softcap by head", "modifier", "relative bias")
            for transform in TRANSFORMS
            if (name, transform)
            not in {
                ("softcap by head", "hessian-vector"),
                ("relative bias", "vmap over parameters"),
                ("relative bias", "reverse over reverse"),
            }
        ),
    ],
)
def test_every_transform_agrees_with_the_definition(name, transform, x64):
    inputs = (*draw(), jnp.asarray(CASES[name][1]))
    rng = np.random.default_rng(4)
    tangents = tuple(jnp.asarray(rng.normal(size=x.shape)) for x in inputs)

    def result(backend):
        run, _ = call(name, backend)
        loss = lambda *x: jnp.sum(jnp.sin(run(*x)))
        return jax.jit(lambda *x: TRANSFORMS[transform](loss, x, tangents))(*inputs)

    for one, other in zip(*map(jax.tree.leaves, (result("small tiles"), result("dense"))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-10)


def test_a_cap_keeps_the_digits_of_float32_and_is_never_passed():
    ends = np.float32([0, 1e-30, 3e38, np.inf])
    given = np.concatenate([np.geomspace(1e-6, 1e4, 20_011).astype(np.float32), ends])
    given = np.concatenate([given, -given])
    cells = SimpleNamespace(per_head=lambda array: array)
    for cap in (0.7, 5.0, 50.0):
        capped = scores.softcap(cap).apply(jnp.asarray(given), cells)
        expected = cap * np.tanh(given.astype(np.float64) / cap)
        np.testing.assert_allclose(capped, expected, rtol=6e-7, atol=0)
        assert jnp.abs(capped).max() == np.float32(cap)
    assert jnp.isnan(scores.softcap(1.0).apply(jnp.float32(np.nan), cells))


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("mask", [None, masks.lengths(7)])
def test_products_beyond_all_numbers_are_capped(backend, mask):
    query, key, value = draw(np.float32)
    query, key = query[..., :1], key[..., :1]  # of more, products might be inf - inf
    large = jnp.float32(1e25)

    def run(query):
        output = attend(query, key * large, value, mask=mask, score=scores.softcap(2.0), backend=backend)
        return jnp.sum(output**2), output

    grad, output = jax.grad(run, has_aux=True)(query * large)
    signs = jnp.sign(jnp.einsum("bhtd,bhsd->bhts", query, jnp.repeat(key, H // K, 1)))
    expected = attend(jnp.zeros_like(query), key, value, mask=mask, bias=2 * signs, backend=backend)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", mostly_slow(CASES, "softcap", "relative bias"))
def test_what_is_masked_reaches_nothing(name, bad, backend):
    make, given = CASES[name][:2]
    query, key, value = draw(np.float32)
    keep = masks.valid_keys(np.arange(S) != 5)
    given = jnp.asarray(given.astype(np.float32))

    def loss(key, value, given):
        return jnp.sum(
            attend(query, key, value, mask=keep, query_offset=OFFSET, score=make(given), backend=backend) ** 2
        )

    spoilt = [x.at[:, :, 5].set(bad) for x in (key, value)]
    clean = jax.value_and_grad(loss, (0, 1, 2))(key.at[:, :, 5].set(0), value.at[:, :, 5].set(0), given)
    for one, other in zip(
        *map(jax.tree.leaves, (jax.value_and_grad(loss, (0, 1, 2))(*spoilt, given), clean)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_query_whose_keys_a_score_removes_gets_nothing(backend, x64):
    """Without a mask, nothing but the scores says that a row is empty."""
    arrays, empty = draw(), np.arange(T) % 5 == 2
    cotangent = np.random.default_rng(4).normal(size=(B, H, T, E))

    def remove(score, batch, head, query, key):
        return jnp.where(query % 5 == 2, -jnp.inf, score)

    def loss(*arrays):
        output = attend(*arrays, score=scores.modifier(remove), query_offset=0, backend=backend)
        return jnp.sum(output * cotangent), output

    grads, output = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    expected = oracle.batched(*arrays, keep=~empty[:, None], cotangent=cotangent)
    parts = expected.output, expected.d_query, expected.d_key, expected.d_value
    for one, other in zip((output, *grads), parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_narrow_dtypes_round_and_no_more(dtype, backend, x64):
    arrays = [x.astype(dtype) for x in draw()]
    chain = [scores.alibi(H), scores.softcap(2.0), scores.relative_bias(jnp.asarray(table()).astype(dtype))]
    options = {"mask": MASK, "query_offset": OFFSET, "score": chain, "backend": backend, "aux": ("lse",)}
    output, aux = attend(*arrays, **options)
    exact, exact_aux = attend(*(x.astype(np.float64) for x in arrays), **options)
    # What is exact is known: each score in its turn, by its formula.
    query, key, value = (np.asarray(x, np.float64) for x in arrays)
    raw = np.einsum("bhtd,bhsd->bhts", query, np.repeat(key, H // K, 1)) / np.sqrt(D)
    _, head, query_position, key_position = places()
    sloped = raw - column(chain[0].slopes) * abs(query_position - key_position)
    biased = 2 * np.tanh(sloped / 2) + np.asarray(chain[2].table, np.float64)[buckets(True, 128), head]
    keep = np.asarray(MASK.dense(T, S, query_offset=OFFSET, leading_axes=2))
    truth = oracle.batched(query, key, value, keep=keep, bias=biased - raw)
    np.testing.assert_allclose(exact, truth.output, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(exact_aux["lse"], truth.lse, rtol=1e-9)
    assert (output.dtype, aux["lse"].dtype) == (dtype, "float32")
    unit = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(output.astype(np.float64), exact, rtol=4 * unit, atol=4 * unit)
    np.testing.assert_allclose(aux["lse"], exact_aux["lse"], rtol=1e-5)


def test_scores_go_left_to_right_before_the_bias():
    query, key, value = draw(np.float32)
    cap, cool = scores.softcap(1.0), scores.temperature(2.0)
    raw = attend(query, key, value, aux=("scores",))[1]["scores"]
    found = attend(query, key, value, score=[cap, cool], bias=jnp.full((1, 1), 3.0), aux=("scores",))[1][
        "scores"
    ]
    np.testing.assert_allclose(found, np.tanh(raw) / 2 + 3, rtol=1e-6)
    found = attend(query, key, value, score=(cool, cap), aux=("scores",))[1]["scores"]
    np.testing.assert_allclose(found, np.tanh(raw / 2), rtol=1e-5)
    assert (attend(query, key, value, score=[]) == attend(query, key, value)).all()


@pytest.mark.parametrize("order", [1, -1])
def test_a_cap_before_or_after_another_score_has_the_gradients_of_both(order, x64):
    chain = [scores.softcap(1.3), scores.alibi(H)][::order]

    def grads(backend):
        def loss(*arrays):
            output = attend(*arrays, mask=MASK, query_offset=OFFSET, score=chain, backend=backend)
            return jnp.sum(output**2)

        return jax.grad(loss, (0, 1, 2))(*draw())

    for one, other in zip(grads("tiled"), grads("dense"), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("count", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (np.int64(3), [2**-4, 2**-8, 2**-2]),
        (8, [2.0**-i for i in range(1, 9)]),
        (12, [2.0**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
    ],
    ids=str,
)
def test_slopes_of_alibi_are_the_published_ones(count, slopes):
    np.testing.assert_allclose(scores.alibi(count).slopes, slopes, rtol=1e-6)


def test_alibi_counts_distances_to_both_sides_exactly_however_far_the_sequence():
    """Beyond 2^24, float32 has no odd numbers."""
    far = 2**24
    query, key = jnp.zeros((2, 3, 7)), jnp.zeros((2, 5, 7))
    options = {"query_offset": far + 1, "key_offset": far, "score": scores.alibi(slopes=[0.5, 2.0])}
    found = attend(query, key, key, **options, aux=("scores",))[1]["scores"]
    distance = np.array([[1, 0, 1, 2, 3], [2, 1, 0, 1, 2], [3, 2, 1, 0, 1]])
    np.testing.assert_array_equal(found, [-0.5 * distance, -2.0 * distance])


def test_buckets_are_those_of_t5_with_exact_borders():
    # From the definition: 16 distances on their own, then sixteenths of the way from log 16 to log 128.
    assert _borders(32, 128).tolist() == [
        *range(1, 17),
        19,
        21,
        24,
        27,
        31,
        35,
        40,
        46,
        52,
        59,
        67,
        77,
        87,
        99,
        113,
    ]
    assert _borders(16, 128).tolist() == [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]
    one_each = jnp.arange(32.0)[:, None]
    query, key = jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, 1, 401, 1))
    for bidirectional in (True, False):
        score = scores.relative_bias(one_each, bidirectional=bidirectional)
        found = attend(query, key, key, score=score, query_offset=200, aux=("scores",))[1]["scores"][0, 0, 0]
        expected = [bucket_by_hand(d, bidirectional, 32, 128) for d in range(-200, 201)]
        assert found.tolist() == expected


@pytest.mark.parametrize(("height", "width"), [(32, 32), (32, 96), (64, 32), (96, 160)])
def test_matrices_of_distances_hold_an_entry_per_distance(height, width):
    entries = np.random.default_rng(0).normal(size=(2, height + width)).astype(np.float32)
    row, column = np.indices((height, width))
    np.testing.assert_array_equal(
        _toeplitz(jnp.asarray(entries), height, width), entries[:, height - 1 + column - row]
    )


@pytest.mark.parametrize(
    "blocking", [Blocking(64, 96), Blocking(96, 32, 2)], ids=["64 x 96", "96 x 32, two heads"]
)
@pytest.mark.slow
def test_a_relative_bias_is_the_same_over_many_tiles(blocking, x64):
    """Near tiles, far tiles on both sides, tiles that stick out, offsets by row."""
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(rng.normal(size=(2, 4, n, 3))) for n in (211, 307))
    bias = jnp.asarray(rng.normal(size=(8, 4)))

    def loss(run, bias, where):
        score = scores.relative_bias(bias, max_distance=20)
        return jnp.sum(jnp.sin(run(canonicalize(query, key, key, score=score, query_offset=where))[0]))

    in_tiles = functools.partial(tiled.run, forward=blocking, backward=blocking)
    for where in (50, jnp.array([-100, 170])):
        found = jax.value_and_grad(functools.partial(loss, in_tiles))(bias, where)
        expected = jax.value_and_grad(functools.partial(loss, attend_densely))(bias, where)
        for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)


def test_a_score_of_many_parameters_keeps_their_order(x64):
    """More than ten, as text, do not sort as numbers do; what is no parameter comes after them."""
    query, key, value = draw()
    rates, kinds = [jnp.asarray(0.1 * (n + 1)) for n in range(13)], jnp.arange(S) % 3

    def loss(backend, rates):
        def change(score, batch, head, query, key):
            waves = sum(rate * jnp.sin((n + 1) * score) for n, rate in enumerate(rates))
            return waves + kinds[key].astype(score.dtype)

        score = scores.modifier(change)
        return jnp.sum(jnp.sin(attend(query, key, value, score=score, query_offset=0, backend=backend)))

    tangents = [1 + rate for rate in rates]
    found, expected = (
        (jax.grad(run)(rates), jax.jvp(run, (rates,), (tangents,)))
        for run in (functools.partial(loss, backend) for backend in ("tiled", "dense"))
    )
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


def attend_densely(problem):
    """With the bias looked up pair by pair."""
    (part,) = problem.score.parts
    offset = jnp.asarray(problem.query_offset, np.int32).reshape((-1, 1, 1))
    rows, columns = (np.arange(n, dtype=np.int32) for n in (problem.T, problem.S))
    distance = columns[None, None] - (offset + rows[None, :, None])
    bias = jnp.moveaxis(part.table[part._bucket(distance)], -1, 1)
    return (attend(problem.query, problem.key, problem.value, bias=bias, backend="dense"),)


@pytest.mark.slow
def test_memory_is_linear_with_scores():
    def peak(length):
        x = jax.ShapeDtypeStruct((1, 2, length, 16), jnp.float32)
        bias = jax.ShapeDtypeStruct((32, 2), jnp.float32)

        def loss(query, key, value, bias):
            chain = [scores.alibi(2), scores.softcap(5.0), scores.relative_bias(bias)]
            return attend(query, key, value, mask=masks.causal(), score=chain, backend="tiled").sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(x, x, x, bias).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak(16_384) < 24 * 2**20
    assert peak(32_768) < 1.7 * peak(16_384)


# Bilinear.


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize("shape", [(D, 11), (H, D, 11), (1, D, 11)], ids=str)
def test_bilinear_is_a_product_with_its_metric(shape, backend, x64):
    query, _, value = draw()
    rng = np.random.default_rng(3)
    key, metric = jnp.asarray(rng.normal(size=(B, K, S, 11))), jnp.asarray(rng.normal(size=shape))

    def run(query, key, metric, **options):
        chain = [scores.bilinear(metric), scores.softcap(3.0)]
        return attend(query, key, value, score=chain, scale=0.4, backend=backend, **options)

    def by_hand(query, key, metric):
        raw = 0.4 * jnp.einsum(
            "bkgtd,bkgde,bkse->bkgts",
            query.reshape(B, K, H // K, T, D),
            jnp.broadcast_to(metric, (B, H, D, 11)).reshape(B, K, H // K, D, 11),
            key,
        )
        weights = jax.nn.softmax(3 * jnp.tanh(raw / 3), -1)
        return jnp.einsum("bkgts,bkse->bkgte", weights, value).reshape(B, H, T, E)

    np.testing.assert_allclose(run(query, key, metric), by_hand(query, key, metric), rtol=1e-10, atol=1e-12)
    grads = (
        jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2))(query, key, metric)
        for f in (run, by_hand)
    )
    for one, other in zip(*grads, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_a_float32_metric_meets_narrow_queries_in_float32():
    """1 + 2^-9 is no bfloat16, but what remains of it once 1 is taken away is."""
    query = jnp.array([[1, -1], [2, 1]], jnp.bfloat16)
    metric = np.array([[1 + 2**-9], [1]], np.float32)
    key = jnp.array([[512], [256], [-1024]], jnp.bfloat16)
    options = {"score": scores.bilinear(metric), "scale": 1.0, "aux": ("scores",)}
    found = attend(query, key, key, **options)[1]["scores"]
    np.testing.assert_array_equal(found, [[1, 0.5, -2], [1536, 768, -3072]])


# Weights on demand.


@pytest.mark.parametrize("backend", COMPLETE)
@pytest.mark.parametrize(
    ("rows", "heads"),
    [
        ([3, 0, 12], None),
        *(
            pytest.param(*chosen, marks=pytest.mark.slow)
            for chosen in [([7], [5, 1]), (None, [2]), ([], [0]), ([4, 4], [1, 1])]
        ),
    ],
    ids=str,
)
def test_weights_of_chosen_rows_and_heads_are_those_of_the_whole(rows, heads, backend):
    arrays = draw(np.float32)
    bias = jnp.asarray(np.random.default_rng(3).normal(size=(H, T, 1)), jnp.float32).at[2, 7].set(-jnp.inf)
    chain = [
        scores.alibi(H),
        scores.relative_bias(table().astype(np.float32)),
        mixed(per_head(6).astype(np.float32)),
    ]
    options = {"mask": MASK, "query_offset": OFFSET, "score": chain, "bias": bias, "sinks": jnp.ones(H)}
    names = ("weights", "scores", "lse")
    _, whole = attend(*arrays, **options, aux=names, backend="dense")
    output, aux = attend(*arrays, **options, aux=names, backend=backend, rows=rows, heads=heads)
    assert (output == attend(*arrays, **options, backend=backend)).all()
    row, head = (range(n) if i is None else i for i, n in ((rows, T), (heads, H)))
    for name in ("weights", "scores"):
        expected = np.asarray(whole[name])[:, list(head)][:, :, np.asarray([*row], int)]
        np.testing.assert_allclose(aux[name], expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(aux["lse"], whole["lse"], rtol=1e-6)


def test_chosen_rows_show_no_nan_of_a_key_that_a_bias_removes():
    query, key, value = draw(np.float32)
    bias = jnp.zeros((1, S)).at[0, 5].set(-jnp.inf)
    options = {"bias": bias, "aux": ("weights", "scores"), "rows": [7, 0], "backend": "tiled"}
    _, aux = attend(query, key.at[:, :, 5].set(jnp.nan), value, **options)
    truth = oracle.batched(query, key, value, bias=bias)
    for name in options["aux"]:
        np.testing.assert_allclose(aux[name], getattr(truth, name)[:, :, [7, 0]], rtol=2e-6, atol=1e-6)


def test_a_few_rows_of_long_sequences_take_little_memory():
    x = jax.ShapeDtypeStruct((1, 2, 65_536, 16), jnp.float32)
    run = jax.jit(
        lambda x, rows: attend(x, x, x, mask=masks.causal(), aux=("weights",), rows=rows, heads=[1])[1]
    )
    compiled = run.lower(x, jax.ShapeDtypeStruct((3,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 40 * 2**20
    assert compiled.out_info["weights"].shape == (1, 1, 3, 65_536)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rows": [1]}, ValueError, "rows: expected .weights. or .scores. in aux"),
        ({"rows": [T], "aux": ("weights",)}, ValueError, f"rows: expected indices in 0..{T - 1}"),
        ({"heads": [-1], "aux": ("weights",)}, ValueError, f"heads: expected indices in 0..{H - 1}"),
        ({"rows": [1.5], "aux": ("weights",)}, TypeError, "rows: expected a list of integers"),
        ({"rows": 3, "aux": ("weights",)}, TypeError, "rows: expected a list of integers"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_rows_that_do_not_exist_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        attend(*draw(np.float32), **options)


def test_heads_of_a_call_without_heads_are_refused():
    query, key, value = (array[0, 0] for array in draw(np.float32))
    with pytest.raises(ValueError, match="heads: expected query with a heads axis, the one before T"):
        attend(query, key, value, heads=[0], aux=("weights",))


# Errors and words.


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: scores.softcap(0.0), ValueError, "cap: expected more than 0, got 0.0"),
        (lambda: scores.softcap(-2), ValueError, "cap: expected more than 0"),
        (lambda: scores.softcap("a"), TypeError, "cap: expected a number"),
        (lambda: scores.softcap(np.ones((2, 3))), ValueError, r"cap: expected a number or an array \(H,\)"),
        (lambda: scores.temperature([1.0, 0.0]), ValueError, "temperature: expected more than 0"),
        (lambda: scores.softcap(np.nan), ValueError, "cap: expected more than 0, got nan"),
        (lambda: scores.softcap([1, np.inf]), ValueError, r"cap: expected finite numbers, got \[1.0, inf\]"),
        (lambda: scores.temperature([1.0, np.nan]), ValueError, "temperature: expected more than 0"),
        (lambda: scores.alibi(0), ValueError, "num_heads: expected at least 1"),
        (lambda: scores.alibi(), TypeError, "expected num_heads or slopes"),
        (lambda: scores.alibi(4, slopes=[1.0]), TypeError, "expected num_heads or slopes"),
        (lambda: scores.relative_bias(np.ones((32, 2), int)), TypeError, "table: expected a floating-point"),
        (lambda: scores.relative_bias(np.ones(32)), ValueError, r"table: expected shape \(buckets, H\)"),
        (lambda: scores.relative_bias(np.ones((31, 2))), ValueError, "an even number"),
        (lambda: scores.relative_bias(np.ones((2, 3))), ValueError, "at least 4 buckets, an even number"),
        (lambda: scores.relative_bias(np.ones((1, 3)), bidirectional=False), ValueError, "least 2 buckets;"),
        (lambda: scores.relative_bias(np.ones((32, 2)), max_distance=8), ValueError, "max_distance: expect"),
        (lambda: scores.relative_bias(np.ones((8, 2)), max_distance=9.5), TypeError, "max_distance: .*9.5"),
        (lambda: scores.relative_bias(np.ones((8, 2)), max_distance=2**31), ValueError, "max_distance: .*32"),
        (lambda: scores.modifier(3), TypeError, "fn: expected a function of"),
        (lambda: scores.bilinear(np.ones(3)), ValueError, "metric: expected shape"),
        (lambda: scores.bilinear(np.ones((3, 3), int)), TypeError, "metric: expected a floating-point"),
    ],
)  # fmt: skip
def test_bad_parameters_are_explained(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(
    ("score", "error", "words"),
    [
        (lambda: 3, TypeError, "score: expected a scores.Score or a sequence of them, got int"),
        (lambda: [scores.softcap(1), abs], TypeError, "score: expected a scores.Score"),
        (lambda: scores.alibi(5), ValueError, "alibi slopes: expected one entry per query head, 6"),
        (lambda: scores.softcap(np.ones(3)), ValueError, "softcap cap: expected one entry per query head"),
        (lambda: scores.temperature(np.ones(3)), ValueError, "temperature value: expected one entry per"),
        (lambda: scores.relative_bias(np.ones((8, 3))), ValueError, "relative_bias table: expected one"),
        (lambda: scores.modifier(lambda s, b, h, q, k: q), TypeError, "expected fn to return one floating"),
        (lambda: scores.modifier(lambda s, b, h, q, k: s[None]), TypeError, r"one float.*got float32\[1\]"),
        (lambda: [scores.softcap(1), scores.bilinear(np.eye(D))], ValueError, "expected bilinear first"),
        (lambda: scores.bilinear(np.eye(5)), ValueError, "bilinear metric: expected"),
        (lambda: scores.bilinear(np.ones((2, D, D))), ValueError, "bilinear metric: expected"),
    ],
)  # fmt: skip
def test_scores_that_do_not_fit_are_refused(score, error, words):
    with pytest.raises(error, match=words):
        attend(*draw(np.float32), score=score(), query_offset=0)


def test_scores_on_positions_ask_where_the_queries_sit():
    arrays = draw(np.float32)
    for score in (scores.alibi(H), scores.relative_bias(np.ones((8, 1))), mixed(jnp.ones(H))):
        with pytest.raises(ValueError, match="query_offset: expected where the queries sit"):
            attend(*arrays, score=[scores.softcap(1), score])
    attend(*arrays, score=scores.softcap(1))


def test_scores_print_as_the_code_that_makes_them():
    chain = [
        scores.softcap(2),
        scores.temperature([1.0, 2.0]),
        scores.bilinear(np.eye(5)),
        mixed(per_head(1)),
    ]
    assert [repr(score) for score in chain] == [
        "softcap(2.0)",
        "temperature([1.0, 2.0])",
        "bilinear(<float64[5, 5]>)",
        "modifier(mixed.<locals>.change)",
    ]
    x = jax.ShapeDtypeStruct((1, 2, 9, 4), "float32")
    assert "score      [softcap(2.0), alibi(slopes=[0.0625, 0.00390625])]" in str(
        explain(x, x, x, score=[scores.softcap(2), scores.alibi(2)])
    )
    assert "score" not in str(explain(x, x, x)).split()


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_relative_bias_moves_by_an_offset_per_row_where_rows_are_heads(backend, x64):
    query, key, value = (np.asarray(array[0, :K]) for array in draw())
    offsets, entries = np.array([0, 11, 40]), table()[:, :K]
    options = {"score": scores.relative_bias(entries, max_distance=9), "key_offset": offsets - 3}
    output = attend(query, key, value, query_offset=offsets[::-1], backend=backend, **options)
    position = offsets[::-1, None] + np.arange(T), offsets[:, None] - 3 + np.arange(S)
    distance = position[1][:, None] - position[0][:, :, None]
    rows = np.vectorize(lambda d: bucket_by_hand(d, True, BUCKETS, 9))(distance)
    logits = query @ np.swapaxes(key, -1, -2) / np.sqrt(D) + entries[rows, np.arange(K)[:, None, None]]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    truth = weights / weights.sum(-1, keepdims=True) @ value
    np.testing.assert_allclose(output, truth, rtol=1e-12)


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0)])
@pytest.mark.parametrize("backend", COMPLETE)
def test_a_relative_bias_of_no_pairs_has_a_gradient_of_0(lengths, backend):
    query, key = (jnp.ones((3, length, D)) for length in lengths)

    def total(entries):
        options = {"score": scores.relative_bias(entries), "query_offset": np.array([0, 2, 5])}
        return attend(query, key, key, **options, backend=backend).sum()

    np.testing.assert_array_equal(jax.grad(total)(jnp.ones((BUCKETS, 3))), 0)


@pytest.mark.parametrize("make", [scores.softcap, scores.temperature, lambda c: scores.alibi(slopes=[c] * H)])
@pytest.mark.parametrize("backend", COMPLETE)
def test_numbers_of_python_keep_their_digits_in_float64(make, backend, x64):
    arrays = draw()
    run = functools.partial(attend, *arrays, query_offset=OFFSET, backend=backend)
    wide = (
        make(jnp.float64(0.3))
        if make in (scores.softcap, scores.temperature)
        else scores.alibi(slopes=jnp.full(H, 0.3))
    )
    np.testing.assert_allclose(run(score=make(0.3)), run(score=wide), rtol=1e-14)
    assert "0.3" in repr(make(0.3))
    assert "0.30" not in repr(make(0.3))
    narrow = [array.astype(jnp.float32) for array in arrays]
    assert attend(*narrow, score=make(0.3), query_offset=OFFSET, backend=backend).dtype == jnp.float32


def test_lists_of_tables_and_metrics_are_float64_where_calls_are(x64):
    for made, name in (
        (scores.relative_bias([[0.3, 1]] * 4), "table"),
        (scores.bilinear([[0.3, 1]]), "metric"),
    ):
        leaf = getattr(made, name)
        assert (leaf.dtype, leaf[0, 0]) == (np.float64, 0.3)


@pytest.mark.parametrize("backend", COMPLETE)
def test_one_unbatched_head_finds_its_largest_score(backend):
    """Rank 2: positions have no axis for heads to broadcast against."""
    query, key, _ = (np.asarray(array[0, 0]) for array in draw(np.float32))
    slope = scores.alibi(1).slopes
    options = {"score": scores.alibi(1), "query_offset": OFFSET, "key_offset": 2, "aux": ("max_score",)}
    _, aux = attend(query, key, key, backend=backend, **options)
    distance = np.abs(np.arange(S)[None] + 2 - (np.arange(T)[:, None] + OFFSET))
    truth = (
        query.astype(np.float64) @ key.T.astype(np.float64) / np.sqrt(D)
        - float(np.asarray(slope)[0]) * distance
    )
    np.testing.assert_allclose(aux["max_score"], truth.max(-1), rtol=1e-5)
