"""`cache.attend` equals attention over all tokens at once, whatever the cache stores: floats, int8, pages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import test_cache
from mesh_cases import make_mesh
from regard import KVCache, PagedKVCache, attend, masks
from regard.engine.call.hooks import watch
from regard.engine.call.quantized import Quantized, quantize
from test_cache import CACHES, WINDOW, B, D, E, K, T, assert_full_pass, contiguous, draw, paged, table

int8 = functools.partial(contiguous, jnp.int8)
KINDS = {**CACHES, "int8": int8}


def rounded(tokens):
    """Tokens as an int8 cache keeps them, in NumPy."""
    scale = np.abs(tokens).max(-1, keepdims=True) / np.float32(127)
    return np.round(tokens / scale).astype(np.float32) * scale


def stored(kind, arrays):
    return [arrays[0], *(rounded(x) if "int8" in kind else x for x in arrays[1:])]


@functools.partial(jax.jit, static_argnames="aux")
def step(cache, query, key, value, counts=None, aux=(), **options):
    cache = cache.append(key, value, counts)
    return cache, cache.attend(query, counts=counts, aux=aux, **options)


decode = functools.partial(test_cache.decode, step=step)


@pytest.mark.parametrize("kind", ["int8", "paged"])
def test_a_token_attends_to_all_stored_without_a_mask(kind):
    """Slots without a token are garbage, and hidden."""
    arrays = draw()
    _, output = decode(KINDS[kind](), arrays, (1,) * T)
    assert_full_pass(output, stored(kind, arrays), table(lambda q, k: k <= q))


# Blocks.


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jnp.int8, "paged"])
def test_blocks_of_a_long_row_add_up(kind):
    """1009 keys of 67 numbers: more than a block of int8, the last of them moved back; 21 pages."""
    batch, heads, length, width = 2, 3, 1009, 67
    rng = np.random.default_rng(heads)
    query = rng.normal(size=(batch, 5 * heads, 1, width)).astype(np.float32)  # too many to be read in slices
    key, value = rng.normal(size=(2, batch, heads, length, width)).astype(np.float32)
    if kind == "paged":
        cache = PagedKVCache.create(batch, heads, width, num_pages=43, page_size=49, pages_per_row=21)
        order = rng.permutation(43)
        cache = cache.assign(0, order[:21]).assign(1, order[21:42])
    else:
        cache = KVCache.create(batch, heads, length, width, dtype=kind)
    output = cache.append(key, value, np.array([length, 503])).attend(query, counts=np.array([1, 1]))
    keep = np.arange(length) < np.array([length, 503])[:, None, None, None]
    key, value = (key, value) if kind == "paged" else (rounded(key), rounded(value))
    assert_full_pass(output, [query, key, value], keep)


def test_pages_of_bfloat16_are_summed_in_float32():
    """As an array is: scores and sums over eleven pages are rounded nowhere on the way."""
    query, *tokens = (jnp.asarray(x, jnp.bfloat16) for x in draw(33))
    pages = PagedKVCache.create(B, K, D, E, num_pages=22, page_size=3, pages_per_row=11, dtype=jnp.bfloat16)
    pages = pages.assign(0, np.arange(11)).assign(1, np.arange(11, 22))
    cache = KVCache.create(B, K, 33, D, E, dtype=jnp.bfloat16)
    run = jax.jit(lambda cache: cache.append(*tokens).attend(query[:, :, :1], aux=("scores", "lse")))
    (output, aux), (expected, wanted) = run(pages), run(cache)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), aux, wanted)
    # Sums in another order may round a few to the other side.
    assert np.mean(np.asarray(output) != np.asarray(expected)) < 0.05


# Int8.


def test_products_with_int8_are_those_with_what_it_stands_for(x64):
    """Slices divide the axes or do not, and there are too many rows for slices, or few enough."""
    rng = np.random.default_rng(5)
    cases = [(rows, *sizes) for rows in (1, 5) for sizes in [(17, 4), (31, 67)]]
    tokens = [quantize(jnp.asarray(rng.normal(size=(2, 3, *case[1:])))) for case in cases]
    given = [[rng.normal(size=(2, 3, rows, size)) for size in sizes[::-1]] for rows, *sizes in cases]
    multiply = lambda stored, query, weights: (stored.score(query, None), stored.mix(weights, None))
    products = jax.jit(lambda given: [multiply(t, *pair) for t, pair in zip(tokens, given, strict=True)])
    for one, (query, weights), (score, mix) in zip(tokens, given, products(given), strict=True):
        array = np.asarray(one.values, np.float64) * np.asarray(one.scale, np.float64)
        np.testing.assert_allclose(score, query @ array.swapaxes(-1, -2), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(mix, weights @ array, rtol=1e-12, atol=1e-12)


def test_no_number_is_off_by_more_than_half_a_scale():
    """Among rows of zeros, of huge and of tiny numbers."""
    tokens = draw(T)[1] * np.logspace(-30, 30, T, dtype=np.float32)[:, None]
    tokens[0, 1, 5] = 0
    cache = KVCache.create(B, K, T, D, dtype=jnp.int8).append(tokens, tokens)
    assert isinstance(cache.key, Quantized)
    largest = np.abs(tokens.astype(np.float64)).max(-1, keepdims=True)
    error = np.abs(np.asarray(cache.key.array(), np.float64) - tokens)
    assert (error <= largest / 254 * (1 + 1e-4)).all()
    assert not error[0, 1, 5].any()
    assert (np.asarray(cache.key.scale) >= 0).all()


def test_nan_is_stored_as_nan_and_reaches_those_who_read_it():
    arrays = draw()
    arrays[2][0, :, 3, 0] = np.inf
    _, output = decode(int8(), arrays, (1,) * T, mask=masks.causal() & masks.sliding_window(2))
    spoiled = np.isnan(output).any((1, 3))
    assert spoiled[0].tolist() == [3 <= t <= 5 for t in range(T)]
    assert not spoiled[1].any()


def test_a_derivative_through_an_int8_cache_is_refused():
    _, key, value = draw(3)
    with pytest.raises(NotImplementedError, match=r"no derivative through an int8 cache.*float32"):
        jax.grad(lambda key: int8().append(key, value).attend(draw(3)[0], mask=masks.causal()).sum())(key)


def test_queries_of_a_cache_have_gradients():
    query, key, value = draw(5)
    caches = {kind: KINDS[kind]().append(key, value) for kind in ("int8", "paged")}
    loss = lambda query, cache: cache.attend(query, mask=masks.causal()).sum()
    differentiate = jax.jit(lambda query: {kind: jax.grad(loss)(query, caches[kind]) for kind in caches})
    for kind, found in differentiate(query[:, :, :1]).items():
        arrays = [query[:, :, :1], *stored(kind, (query, key, value))[1:]]
        truth = oracle.batched(*arrays, keep=np.arange(5) <= 4)
        np.testing.assert_allclose(found, truth.d_query, atol=1e-5)


# First tokens beside a window.

FIRST = 3
BESIDE = masks.causal() & (masks.sliding_window(WINDOW) | masks.prefix(FIRST))


def beside(q, k):
    return k <= q and (q - k <= WINDOW or k < FIRST)


def test_first_tokens_and_the_newest_are_what_is_stored():
    """A key holds its own position: slots say where they sit, and every token of the window is there."""
    cache = KVCache.create(2, 1, None, 1, window=WINDOW, first=FIRST)
    assert cache.capacity == 2 * WINDOW + FIRST
    at = np.zeros(2, int)
    for counts in [(1, 2), (2, 0), (4, 4), (1, 1), (0, 4), (3, 1), *[(1, 1)] * 9, (4, 2)]:
        tokens = (at[:, None] + np.arange(4)).astype(np.float32)[:, None, :, None]
        cache = cache.append(tokens, -tokens, np.array(counts))
        at += counts
        where, kept = np.asarray(cache.positions), np.asarray(cache.key)[:, 0, :, 0]
        for row, length in enumerate(at):
            held = where[row] < length
            np.testing.assert_array_equal(kept[row][held], where[row][held])
            assert set(where[row]) >= {*range(min(FIRST, length)), *range(max(length - WINDOW, 0), length)}
            assert len(set(where[row])) == cache.capacity
        np.testing.assert_array_equal(np.asarray(cache.value), -np.asarray(cache.key))
    assert at.min() > cache.capacity


def test_first_tokens_with_attend_itself_rewind_and_reset():
    arrays, empty = draw(23), contiguous(capacity=11, window=WINDOW, garbage=77, first=FIRST)
    cache, _ = decode(empty, arrays, (1,) * 23, mask=BESIDE)
    query = arrays[0][:, :, 22:]
    options = {"mask": BESIDE, "query_offset": cache.query_offset(1), "key_positions": cache.positions}
    keep = table(beside, 23)[22:]
    assert_full_pass(attend(query, cache.key, cache.value, **options), [query, *arrays[1:]], keep)
    with pytest.raises(ValueError, match=r"lengths: expected 0\.\.3 or at least \d+ for row 0.*got 9"):
        cache.rewind(9)
    least = int(cache.start[0]) + FIRST + WINDOW
    assert least < 23
    with pytest.raises(ValueError, match=f"or at least {least} for row 0"):
        cache.rewind(least - 1)
    output = step(cache.rewind(least), *(x[:, :, least : least + 1] for x in arrays), mask=BESIDE)[1]
    assert_full_pass(output, [arrays[0][:, :, least : least + 1], *arrays[1:]], table(beside, 23)[least])
    again = cache.reset(jnp.array([True, False])).rewind([0, 1])
    at = np.asarray(again.lengths)
    assert again.start.tolist() == [0, 0]
    rows = [[x[row, None, :, at[row] : at[row] + 1] for row in range(B)] for x in arrays]
    output = step(again, *(np.concatenate(x) for x in rows), mask=BESIDE)[1]
    for row, length in enumerate(at):
        truth = oracle.batched(*(x[row, None] for x in arrays), keep=table(beside, 23)).output
        np.testing.assert_allclose(output[row, :, 0], truth[0, :, length], atol=1e-5)
    assert ", window=4, first=3, lengths=[23, 23]" in repr(cache)


@pytest.mark.parametrize("first", [0, 2])
def test_slots_beyond_the_last_position_are_empty(first):
    """The last token sits at the last position that int32 holds; what lies in slots after it is garbage."""
    cache = contiguous(capacity=14, window=4, garbage=77, first=first)
    query, key, value = draw(6)
    far = jnp.int32(2**31 - 1 - 6)
    moved = dataclasses.replace(cache, lengths=cache.lengths + far, start=cache.start + far)
    mask = masks.causal() | masks.prefix(first)
    here, there = (start.append(key, value).attend(query, mask=mask) for start in (cache, moved))
    np.testing.assert_array_equal(here, there)


# Memory and work.


def test_a_step_copies_neither_int8_nor_pages():
    """Temporary memory: less than a tenth of the keys and values in float32."""
    batch, heads, length, width = 3, 4, 1024, 64
    query = jnp.zeros((batch, heads, 1, width))
    whole = 2 * batch * heads * length * width * 4
    pages = {"num_pages": batch * 16, "page_size": 64, "pages_per_row": 16}
    integers = KVCache.create(batch, heads, length, width, dtype=jnp.int8)
    for cache in (integers, PagedKVCache.create(batch, heads, width, **pages)):
        run = jax.jit(lambda cache: cache.attend(query, mask=masks.causal()))
        memory = run.lower(cache).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < whole / 10


def test_only_pages_that_hold_tokens_are_read():
    """Others are NaN, and were they read, the score of a key that no mask hides would be, too."""
    cache, _ = step(paged(), *(x[:, :, :4] for x in draw()), mask=masks.causal())
    store, _ = cache._stores
    assert store.counts.tolist() == [1, 1]
    read = store.score(jnp.ones((B, K, 1, D)), None)
    assert np.isfinite(np.asarray(read)[..., 5:]).all()
    assert np.isnan(np.asarray(read)[..., 4]).all()


def test_many_queries_and_watchers_get_arrays():
    query, key, value = draw()
    cache, seen = paged().append(key, value), []
    with watch(seen.append):
        output = cache.attend(query, mask=masks.causal(), backend="tiled")
        cache.attend(query[:, :, :1], mask=masks.causal())
    assert_full_pass(output, (query, key, value), table(lambda q, k: k <= q))
    assert [call.backend for call in seen] == ["tiled", "dense"]
    assert all(isinstance(call.problem.key, jax.Array) for call in seen)


WRONG = [
    (lambda cache, q: cache.attend(q, query_offset=0), "query_offset: expected none.*regard.attend"),
    (lambda cache, q: cache.attend(q[0]), r"query: expected shape \(2, H, n, D\).*got \(6, 1, 10\)"),
    (lambda cache, q: cache.attend(q[:1]), r"query: expected shape \(2, H, n, D\).*got \(1, 6, 1, 10\)"),
    (lambda cache, q: cache.attend(q, counts=[0.5, 1]), "counts: expected integers"),
    (lambda cache, q: cache.attend(q, counts=[1, 2]), r"counts: expected 0\.\.1, .* got 2 for row 1"),
    (lambda cache, q: attend(q, cache.key, cache.value), r"key: .*cache.attend\(query\)"),
    (lambda cache, q: cache.append(q, q), "key: expected shape"),
    (lambda cache, q: cache.append(q[:, :K], None), "value: expected a floating-point array, got NoneType"),
    (lambda cache, q: cache.append(np.int32(q[:, :K]), q), r"got int32\. Cast it, key.astype\('float32'\)$"),
]


def test_bad_calls_are_explained():
    for call, message in WRONG:
        with pytest.raises((ValueError, TypeError), match=message):
            call(KVCache.create(B, K, 5, D, E, dtype="int8"), draw(1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "paged"])
def test_key_heads_may_share_a_query_and_rows_of_a_cache_divide(kind):
    """A query of one head asks every key head; in shard_map, types are checked."""
    query, *tokens = draw(5)
    cache, query = KINDS[kind]().append(*tokens), query[:, :1, 4:]
    rows, whole = jax.P("row"), jax.P()
    places = jax.tree.map(lambda x: rows, cache)
    if kind == "paged":
        places = dataclasses.replace(places, key_pages=whole, value_pages=whole)
    call = lambda cache, query: cache.attend(query, mask=masks.causal())
    inside = jax.shard_map(call, mesh=make_mesh(row=1), in_specs=(places, rows), out_specs=rows)
    run = jax.jit(lambda cache, query: (inside(cache, query), call(cache, np.repeat(query, K, 1))))
    np.testing.assert_allclose(*run(cache, query), atol=1e-6)
