"""Score functions: what each says, and that both backends and every transform agree on it."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from mesh_cases import evaluate
from oracle import assert_close
from refusals import assert_refused
from regard import attend, explain, masks, scores
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.dispatch.registry import COMPLETE
from regard.engine.flash.blocking import Blocking
from regard.scores.distances import _borders

B, H, K, T, S, D, E = 2, 6, 3, 13, 17, 7, 5
OFFSET = 4
BUCKETS = 12


def draw(dtype=np.float64):
    rng = np.random.default_rng(21)
    return [rng.normal(size=shape).astype(dtype) for shape in ((B, H, T, D), (B, K, S, D), (B, K, S, E))]


def per_head(seed, low=0.5, high=2.0):
    return np.random.default_rng(seed).uniform(low, high, H)


TABLE = np.random.default_rng(8).normal(size=(BUCKETS, H))
# As (B, H, T, S) arrays.
BATCH, HEAD, QUERY, KEY = np.indices((B, H, T, S)) + np.reshape([0, 0, OFFSET, 0], (4, 1, 1, 1, 1))
FAR = abs(QUERY - KEY)


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


KINDS = np.vectorize(lambda d: bucket_by_hand(d, True, BUCKETS, 9))(KEY - QUERY)


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
        scores.softcap,
        per_head(3),
        lambda s, cap: column(cap) * np.tanh(s / column(cap)),
        lambda s, cap: 1 / np.cosh(s / column(cap)) ** 2,
        lambda s, cap: np.tanh(s / column(cap)) - s / column(cap) / np.cosh(s / column(cap)) ** 2,
    ),
    "alibi": (
        lambda slopes: scores.alibi(slopes=slopes),
        per_head(5, 0.0, 0.5),
        lambda s, slopes: s - column(slopes) * FAR,
        lambda s, slopes: np.ones_like(s),
        lambda s, slopes: -FAR.astype(float),
    ),
    "relative bias": (
        lambda table: scores.relative_bias(table, max_distance=9),
        TABLE,
        lambda s, table: s + np.asarray(table)[KINDS, HEAD],
        lambda s, table: np.ones_like(s),
        None,
    ),
    "modifier": (
        mixed,
        per_head(6),
        lambda s, rate: s * (1 + 0.1 * BATCH) + column(rate) * np.sin(s) - 0.05 * (QUERY - 2 * KEY),
        lambda s, rate: 1 + 0.1 * BATCH + column(rate) * np.cos(s),
        lambda s, rate: np.sin(s),
    ),
}
MASK = masks.causal() & ~masks.lengths([0, 6])  # the first queries of the second row see nothing
KEEP = np.asarray(MASK.dense(T, S, query_offset=OFFSET, leading_axes=2))


def truth(name, arrays, bias, cotangent):
    """Attention over scores changed by hand, as a bias; gradients by the chain rule."""
    _, given, function, by_score, by_parameter = CASES[name]
    query, key, value = (np.asarray(x, np.float64) for x in arrays)
    wide = np.repeat(key, H // K, 1)
    raw = np.einsum("bhtd,bhsd->bhts", query, wide) / np.sqrt(D)
    change = function(raw, given) - raw + bias
    found = oracle.batched(query, key, value, keep=KEEP, bias=change, cotangent=cotangent)
    pull = found.d_bias
    inner = pull * by_score(raw, given) / np.sqrt(D)
    d_key = np.einsum("bhts,bhtd->bhsd", inner, query).reshape(B, K, H // K, S, D).sum(2)
    if by_parameter is None:
        d_given = np.zeros(given.shape)
        np.add.at(d_given, (KINDS, HEAD), pull)
    else:
        d_given = (pull * by_parameter(raw, given)).sum((0, 2, 3))
    return found, (np.einsum("bhts,bhsd->bhtd", inner, wide), d_key, found.d_value, d_given)


def call(name, backend, *, biased=True):
    make = CASES[name][0]
    bias = np.random.default_rng(2).normal(size=(H, 1, S)) if biased else None

    def run(query, key, value, given, aux=()):
        options = {"mask": MASK, "bias": bias, "query_offset": OFFSET, "score": make(given), "aux": aux}
        if backend != "small tiles":
            return attend(query, key, value, **options, backend=backend)
        found = tiled.run(canonicalize(query, key, value, **options), Blocking(5, 4), Blocking(4, 3))
        return found if aux else found[0]

    return run, bias if biased else 0.0


@pytest.mark.parametrize(
    ("name", "backend"),
    [("softcap", "tiled"), *((name, "small tiles") for name in ("alibi", "relative bias", "modifier"))],
)
def test_values_and_gradients_are_those_of_the_definition(name, backend, x64):
    arrays, given = draw(), CASES[name][1]
    run, bias = call(name, backend)
    cotangent = np.random.default_rng(9).normal(size=(B, H, T, E))

    def loss(*inputs):
        output, aux = run(*inputs, aux=("lse", "entropy", "max_score", "argmax", "weights", "scores"))
        return jnp.sum(output * cotangent), {"output": output, **aux}

    grads, found = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(*arrays, given)
    expected, expected_grads = truth(name, arrays, bias, cotangent)
    for part, actual in found.items():
        np.testing.assert_allclose(actual, getattr(expected, part), rtol=1e-9, atol=1e-12, err_msg=part)
    assert_close(grads, expected_grads, 1e-9, 1e-11)
    assert not np.asarray(found["output"])[1, :, 0].any()


@pytest.mark.parametrize("learned", [False, True])
def test_a_cap_without_a_bias_has_the_derivatives_of_the_definition(learned, x64):
    """Unless the cap itself is learned, they are told from the capped scores alone."""
    given, rng = CASES["softcap"][1], np.random.default_rng(9)
    inputs = (*draw(), given) if learned else tuple(draw())
    cotangent = rng.normal(size=(B, H, T, E))
    tangents = tuple(rng.normal(size=x.shape) for x in inputs)

    def derive(backend):
        run = call("softcap", backend, biased=False)[0]
        loss = lambda *inputs: jnp.sum(run(*inputs, *() if learned else (given,)) * cotangent)
        return jax.jvp(jax.value_and_grad(loss, range(len(inputs))), inputs, tangents)

    ((_, grads), (slope, curvature)), of_dense = jax.jit(lambda: (derive("small tiles"), derive("dense")))()
    _, expected = truth("softcap", inputs[:3], 0.0, cotangent)
    assert_close(grads, expected[: len(inputs)], 1e-9, 1e-11)
    np.testing.assert_allclose(slope, sum(map(np.vdot, grads, tangents)), rtol=1e-9)
    assert_close(curvature, of_dense[1][1], 1e-8, 1e-10)


def test_every_transform_agrees_with_the_definition(x64):
    """Forward over reverse, and a gradient under vmap over the parameters, of output and lse."""
    inputs, rng = (*draw(), TABLE), np.random.default_rng(4)
    tangents = tuple(rng.normal(size=x.shape) for x in inputs)

    def result(backend, arrays, entries):
        run, _ = call("relative bias", backend)

        def loss(*inputs):
            output, aux = run(*inputs, aux=("lse",))
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.exp(aux["lse"] / 9))

        bent = jax.jvp(jax.grad(loss, (0, 1, 2, 3)), (*arrays, entries), tangents)[1]
        slope = lambda entries: jax.grad(loss, 3)(*arrays, entries)
        return bent, jax.vmap(slope)(jnp.stack([entries, 1.5 * entries]))

    both = jax.jit(lambda *given: [result(backend, *given) for backend in ("small tiles", "dense")])
    assert_close(*both(inputs[:3], inputs[3]), 1e-8, 1e-10)


def test_a_cap_keeps_the_digits_of_float32_and_is_never_passed():
    ends = np.float32([0, 1e-30, 3e38, np.inf])
    given = np.concatenate([np.geomspace(1e-6, 1e4, 20_011).astype(np.float32), ends])
    given = np.concatenate([given, -given])
    cells = SimpleNamespace(per_head=lambda array: array)
    for cap in (0.7, 5.0, 50.0):
        capped = scores.softcap(cap).apply(jnp.asarray(given), cells)
        np.testing.assert_allclose(capped, cap * np.tanh(given.astype(np.float64) / cap), rtol=6e-7, atol=0)
        assert jnp.abs(capped).max() == np.float32(cap)
    assert jnp.isnan(scores.softcap(1.0).apply(jnp.float32(np.nan), cells))


@pytest.mark.parametrize("backend", COMPLETE)
def test_products_beyond_all_numbers_are_capped(backend):
    query, key, value = draw(np.float32)
    query, key = query[..., :1], key[..., :1]  # of more, products might be inf - inf
    options = {"mask": masks.lengths(7), "score": scores.softcap(2.0), "backend": backend}
    large = np.float32(1e25)

    def run(query):
        output = attend(query, key * large, value, **options)
        return jnp.sum(output**2), output

    grad, output = jax.jit(jax.grad(run, has_aux=True))(query * large)
    signs = np.sign(np.einsum("bhtd,bhsd->bhts", query, np.repeat(key, H // K, 1)))
    expected = oracle.batched(np.zeros_like(query), key, value, keep=np.arange(S) < 7, bias=2 * signs).output
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize(
    ("name", "backend"), [("softcap", "dense"), ("softcap", "tiled"), ("modifier", "tiled")]
)
def test_what_is_masked_reaches_nothing(name, backend):
    make, given = CASES[name][:2]
    query, *others = draw(np.float32)
    options = {"mask": masks.valid_keys(np.arange(S) != 5), "query_offset": OFFSET, "backend": backend}

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    def run(key, value, given):
        return jnp.sum(attend(query, key, value, score=make(given), **options) ** 2)

    def with_unseen(number):
        unseen = np.arange(S)[:, None] == 5
        return run(*(np.where(unseen, np.float32(number), x) for x in others), given.astype(np.float32))

    for bad in (np.nan, np.inf):
        assert_close(with_unseen(bad), with_unseen(0), 1e-5, 1e-5)


@pytest.mark.parametrize("backend", COMPLETE)
def test_returned_scores_of_masked_pairs_pull_on_nothing(backend):
    arrays = draw(np.float32)
    options = {"mask": MASK, "query_offset": OFFSET, "aux": ("scores",), "backend": backend}

    @jax.jit
    def pull(slopes):
        returned = lambda slopes: attend(*arrays, score=scores.alibi(slopes=slopes), **options)[1]["scores"]
        return jax.vjp(returned, slopes)[1](jnp.ones((B, H, T, S)))[0]

    np.testing.assert_allclose(pull(per_head(5).astype(np.float32)), -(KEEP * FAR).sum((0, 2, 3)), rtol=1e-5)


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_query_whose_keys_a_score_removes_gets_nothing(backend, x64):
    """Without a mask, nothing but the scores says that a row is empty."""
    arrays, empty = draw(), np.arange(T) % 5 == 2
    cotangent = np.random.default_rng(4).normal(size=(B, H, T, E))
    remove = lambda score, batch, head, query, key: jnp.where(query % 5 == 2, -jnp.inf, score)
    call = functools.partial(attend, score=scores.modifier(remove), query_offset=0, backend=backend)
    expected = oracle.batched(*arrays, keep=~empty[:, None], cotangent=cotangent)
    assert_close(evaluate(call, arrays, cotangent), expected.parts, 1e-9, 1e-12)


@pytest.mark.parametrize("order", [1, -1])
def test_a_cap_before_or_after_another_score_has_the_gradients_of_both(order, x64):
    chain = [scores.softcap(1.3), scores.alibi(H)][::order]

    def grads(backend, arrays):
        options = {"mask": MASK, "query_offset": OFFSET, "score": chain, "backend": backend}
        return jax.grad(lambda *arrays: jnp.sum(attend(*arrays, **options) ** 2), (0, 1, 2))(*arrays)

    both = jax.jit(lambda *arrays: [grads(backend, arrays) for backend in ("tiled", "dense")])
    assert_close(*both(*draw()), 1e-9, 1e-11)


def test_slopes_of_alibi_are_the_published_ones():
    eight = [2.0**-i for i in range(1, 9)]
    published = {1: [2**-8], 2: [2**-4, 2**-8], np.int64(3): [2**-4, 2**-8, 2**-2], 8: eight}
    published[12] = [*eight, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    for count, slopes in published.items():
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
    far = [19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert _borders(32, 128).tolist() == [*range(1, 17), *far]
    assert _borders(16, 128).tolist() == [*range(1, 9), 12, 16, 23, 32, 46, 64, 91]
    one_each, zeros = np.arange(32, dtype=np.float32)[:, None], jnp.zeros((1, 1, 401, 1))
    for bidirectional in (True, False):
        score = scores.relative_bias(one_each, bidirectional=bidirectional)
        options = {"score": score, "query_offset": 200, "aux": ("scores",)}
        found = attend(zeros[:, :, :1], zeros, zeros, **options)[1]["scores"][0, 0, 0]
        assert found.tolist() == [bucket_by_hand(d, bidirectional, 32, 128) for d in range(-200, 201)]


def test_a_relative_bias_is_the_same_over_many_tiles():
    """Near tiles, far tiles on both sides, tiles that stick out, offsets by row."""
    rng, offsets = np.random.default_rng(1), np.array([-100, 170])
    query, key = (rng.normal(size=(2, 4, n, 3)).astype(np.float32) for n in (211, 307))
    entries, sides = rng.normal(size=(8, 4)).astype(np.float32), Blocking(96, 32, 2)

    def loss(entries):
        score = scores.relative_bias(entries, max_distance=20)
        problem = canonicalize(query, key, key, score=score, query_offset=offsets)
        output = tiled.run(problem, forward=sides, backward=sides)[0]
        return jnp.sum(output), output

    slope, output = jax.jit(jax.grad(loss, has_aux=True))(entries)
    distance = np.arange(307) - (offsets[:, None, None] + np.arange(211)[:, None])
    kind = np.vectorize(lambda d: bucket_by_hand(d, True, 8, 20))(distance)
    expected = oracle.batched(query, key, key, bias=np.moveaxis(entries[kind], -1, 1))
    d_entries = np.zeros((8, 4))
    np.add.at(d_entries, (kind[:, None], np.arange(4)[:, None, None]), expected.d_bias)
    np.testing.assert_allclose(output, expected.output, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope, d_entries, rtol=1e-4, atol=1e-3)


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

    both = lambda rates: [jax.value_and_grad(functools.partial(loss, b))(rates) for b in ("tiled", "dense")]
    assert_close(*jax.jit(both)(rates), 1e-9, 1e-11)


def test_a_float32_metric_meets_narrow_queries_in_float32():
    """1 + 2^-9 is no bfloat16, but what remains of it once 1 is taken away is."""
    query = jnp.array([[1, -1], [2, 1]], jnp.bfloat16)
    metric = np.array([[1 + 2**-9], [1]], np.float32)
    key = jnp.array([[512], [256], [-1024]], jnp.bfloat16)
    options = {"score": scores.bilinear(metric), "scale": 1.0, "aux": ("scores",)}
    found = attend(query, key, key, **options)[1]["scores"]
    np.testing.assert_array_equal(found, [[1, 0.5, -2], [1536, 768, -3072]])


def test_weights_of_chosen_rows_and_heads_are_those_of_the_whole():
    rows, heads, names = [3, 0, 12, 3], [5, 1], ("weights", "scores", "lse")
    parameters = [x.astype(np.float32) for x in (TABLE, per_head(6))]
    chain = [scores.alibi(H), scores.relative_bias(parameters[0]), mixed(parameters[1])]
    options = {"mask": MASK, "query_offset": OFFSET, "score": chain, "sinks": jnp.ones(H), "aux": names}

    @jax.jit
    def run(*arrays):
        whole = attend(*arrays, **options, backend="dense")[1]
        return whole, attend(*arrays, **options, rows=rows, heads=heads, backend="tiled")[1]

    whole, aux = run(*draw(np.float32))
    for name in ("weights", "scores"):
        expected = np.asarray(whole[name])[:, heads][:, :, rows]
        np.testing.assert_allclose(aux[name], expected, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(aux["lse"], whole["lse"], rtol=1e-6)


def test_chosen_rows_show_no_nan_of_a_key_that_a_bias_removes():
    query, key, value = draw(np.float32)
    bias = np.where(np.arange(S) == 5, -np.inf, 0).astype(np.float32)[None]
    unseen = np.where(np.arange(S)[:, None] == 5, np.float32(np.nan), key)
    options = {"bias": bias, "aux": ("weights", "scores"), "rows": [7, 0], "backend": "tiled"}
    _, aux = attend(query, unseen, value, **options)
    truth = oracle.batched(query, key, value, bias=bias)
    for name in options["aux"]:
        np.testing.assert_allclose(aux[name], getattr(truth, name)[:, :, [7, 0]], rtol=2e-6, atol=1e-6)


def test_a_few_rows_of_long_sequences_take_little_memory():
    x = jax.ShapeDtypeStruct((1, 2, 65_536, 16), jnp.float32)
    options = {"mask": masks.causal(), "aux": ("weights",), "heads": [1]}
    run = jax.jit(lambda x, rows: attend(x, x, x, rows=rows, **options)[1])
    compiled = run.lower(x, jax.ShapeDtypeStruct((3,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 40 * 2**20
    assert compiled.out_info["weights"].shape == (1, 1, 3, 65_536)


def test_rows_that_do_not_exist_are_refused():
    asked = {"aux": ("weights",)}
    assert_refused(
        ({"rows": [1]}, "rows: expected .weights. or .scores. in aux"),
        ({"rows": [T], **asked}, f"rows: expected indices in 0..{T - 1}"),
        ({"heads": [-1], **asked}, f"heads: expected indices in 0..{H - 1}"),
        ({"rows": [1.5], **asked}, "rows: expected a list of integers", TypeError),
        ({"rows": 3, **asked}, "rows: expected a list of integers", TypeError),
        run=lambda options: attend(*draw(np.float32), **options),
    )
    with pytest.raises(ValueError, match="heads: expected query with a heads axis, the one before T"):
        attend(*(array[0, 0] for array in draw(np.float32)), heads=[0], aux=("weights",))


BAD = [
    (lambda: scores.softcap(0.0), ValueError, "cap: .* above 0, got 0.0; without a cap, score=None"),
    (lambda: scores.softcap(None), TypeError, "cap: .* above 0, got None; without a cap, score=None"),
    (lambda: scores.softcap("a"), TypeError, "cap: expected a number"),
    (lambda: scores.softcap(np.ones((2, 3))), ValueError, r"cap: expected a number or an array \(H,\)"),
    (lambda: scores.temperature([1.0, 0.0]), ValueError, "temperature: expected more than 0"),
    (lambda: scores.softcap(np.nan), ValueError, "cap: expected more than 0, got nan"),
    (lambda: scores.softcap([1, np.inf]), ValueError, r"cap: expected finite numbers, got \[1.0, inf\]"),
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
]  # fmt: skip


def test_bad_parameters_are_explained():
    assert_refused(*((make, words, error) for make, error, words in BAD))


UNFIT = [
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
]  # fmt: skip


def test_scores_that_do_not_fit_are_refused():
    call = lambda make: attend(*draw(np.float32), score=make(), query_offset=0)
    assert_refused(*((make, words, error) for make, error, words in UNFIT), run=call)


def test_scores_on_positions_ask_where_the_queries_sit():
    arrays = draw(np.float32)
    for score in (scores.alibi(H), scores.relative_bias(np.ones((8, 1))), mixed(jnp.ones(H))):
        with pytest.raises(ValueError, match="query_offset: expected where the queries sit"):
            attend(*arrays, score=[scores.softcap(1), score])
    attend(*arrays, score=scores.softcap(1))


def test_scores_print_as_the_code_that_makes_them():
    made = [scores.softcap(2), scores.temperature([1.0, 2.0]), scores.bilinear(np.eye(5)), mixed(per_head(1))]
    words = "softcap(2.0)", "temperature([1.0, 2.0])", "bilinear(<float64[5, 5]>)"
    assert [*map(repr, made)] == [*words, "modifier(mixed.<locals>.change)"]
    x = jax.ShapeDtypeStruct((1, 2, 9, 4), "float32")
    said = str(explain(x, x, x, score=[scores.softcap(2), scores.alibi(2)]))
    assert "score      [softcap(2.0), alibi(slopes=[0.0625, 0.00390625])]" in said
    assert "score" not in str(explain(x, x, x)).split()


@pytest.mark.parametrize("backend", COMPLETE)
def test_a_relative_bias_of_no_pairs_has_a_gradient_of_0(backend):
    def total(entries, queries, keys):
        query, key = (jnp.ones((3, length, D)) for length in (queries, keys))
        options = {"score": scores.relative_bias(entries), "query_offset": np.array([0, 2, 5])}
        return attend(query, key, key, **options, backend=backend).sum()

    grads = jax.jit(lambda entries: [jax.grad(total)(entries, *sizes) for sizes in ((0, 5), (5, 0))])
    assert not np.any(grads(jnp.ones((BUCKETS, 3))))


def test_numbers_of_python_keep_their_digits_in_float64(x64):
    made = scores.softcap(0.3), scores.temperature(0.3), scores.alibi(slopes=[0.3] * H)
    digits = np.float64(0.3)
    wide = scores.softcap(digits), scores.temperature(digits), scores.alibi(slopes=np.full(H, digits))
    call = functools.partial(attend, query_offset=OFFSET, backend="dense")
    run = lambda *arrays: [[call(*arrays, score=score) for score in some] for some in (made, wide)]
    assert_close(*jax.jit(run)(*draw()), 1e-14, 1e-11)
    assert all("0.3" in repr(score) and "0.30" not in repr(score) for score in made)
    assert {output.dtype for output in jax.eval_shape(run, *draw(np.float32))[0]} == {np.dtype("float32")}
