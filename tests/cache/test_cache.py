"""Decoding with a cache equals the full pass; tokens are never lost in silence or written over others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

import oracle
from refusals import assert_refused
from regard import KVCache, PagedKVCache, attend, masks

B, H, K, T, D, E = 2, 6, 3, 13, 10, 7
CAPACITY, PAGE, WINDOW = 17, 5, 4
NAN = float("nan")


def draw(length=T, dtype=np.float32):
    """NumPy, whose slices need no compiling."""
    rng = np.random.default_rng(length)
    shapes = ((B, H, length, D), (B, K, length, D), (B, K, length, E))
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def spoil(cache, garbage=NAN):
    """Put garbage where nothing was stored: 77 among integers."""
    filled = lambda x: x + x.dtype.type(garbage if jnp.issubdtype(x.dtype, jnp.inexact) else 77)
    return jax.tree.map(lambda x: filled(x) if x.ndim == 4 else x, cache)


def contiguous(dtype=jnp.float32, capacity=CAPACITY, window=None, garbage=NAN, **options):
    return spoil(KVCache.create(B, K, capacity, D, E, dtype=dtype, window=window, **options), garbage)


def paged(dtype=jnp.float32, garbage=NAN):
    """Scrambled pages, the rows' own in turns, some of nobody."""
    cache = PagedKVCache.create(B, K, D, E, num_pages=11, page_size=PAGE, pages_per_row=4, dtype=dtype)
    return spoil(cache, garbage).assign(1, [7]).assign(0, [3, 9]).assign(1, [0, 5]).assign(0, 1)


windowed = functools.partial(contiguous, capacity=11, window=WINDOW)
CACHES = {"contiguous": contiguous, "windowed": windowed, "paged": paged}


@functools.partial(jax.jit, static_argnames="careful")
def step(cache, query, key, value, mask, counts=None, careful=False):
    """Append tokens and attend from them."""
    cache = cache.append(key, value, counts)
    mask = mask & cache.valid if careful else mask
    offset = cache.query_offset(query.shape[2] if counts is None else counts)
    offsets = {"query_offset": offset, "key_offset": cache.start}
    return cache, attend(query, cache.key, cache.value, mask=mask, **offsets)


def decode(cache, arrays, sizes, step=step, **options):
    """All outputs when tokens come in chunks of these sizes."""
    assert sum(sizes) == arrays[0].shape[2]
    outputs, end = [], 0
    for size in sizes:
        end += size
        cache, output = step(cache, *(x[:, :, end - size : end] for x in arrays), **options)
        outputs.append(output)
    return cache, np.concatenate(outputs, axis=2)


def table(rule, length=T):
    """keep[q, k] by a rule in words of positions."""
    return np.array([[bool(rule(q, k)) for k in range(length)] for q in range(length)])


def assert_full_pass(output, arrays, keep):
    """As exact as attention over all tokens at once."""
    truth = oracle.batched(*arrays, keep=keep).output
    plainly = oracle.batched(*arrays, keep=keep, dtype=np.dtype(output.dtype).type).output
    oracle.assert_as_exact(output, truth, plainly)


RULES = {
    "causal": (masks.causal(), lambda q, k: k <= q),
    "window": (masks.causal() & masks.sliding_window(WINDOW), lambda q, k: q - WINDOW <= k <= q),
}


@pytest.mark.parametrize(("kind", "careful"), [("contiguous", False), ("windowed", True), ("paged", True)])
def test_rows_of_unequal_length_decode_as_each_alone(kind, careful):
    """Two prompts padded at the end, the padding NaN; then both go on, one twice as fast.

    Padded queries sit where no token is, so they would read garbage there unless told.
    """
    arrays, (mask, keep) = draw(), RULES["window" if kind == "windowed" else "causal"]
    cache = CACHES[kind](garbage=NAN if careful else 0.0)
    found = np.full((B, H, T, E), NAN, np.float32)
    at = np.zeros(B, int)
    for counts in ((7, 3), (1, 2), (0, 2), (1, 2), (4, 4)):
        padded = [np.full((*x.shape[:2], 7, x.shape[3]), NAN, np.float32) for x in arrays]
        for row, count in enumerate(counts):
            for whole, part in zip(arrays, padded, strict=True):
                part[row, :, :count] = whole[row, :, at[row] : at[row] + count]
        cache, output = step(cache, *padded, mask, np.array(counts), careful=careful)
        for row, count in enumerate(counts):
            found[row, :, at[row] : at[row] + count] = output[row, :, :count]
        at += counts
        assert cache.lengths.tolist() == at.tolist()
    assert_full_pass(found, arrays, table(keep))


def test_a_cache_is_written_in_place():
    """Given away, its memory is used again: a token costs no copy of the cache."""
    cache = KVCache.create(B, K, 1009, D, E)
    token = jnp.ones((B, K, 1, D)), jnp.ones((B, K, 1, E))
    append = jax.jit(lambda cache, *token: cache.append(*token), donate_argnums=0)
    memory = append.lower(cache, *token).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache.key.nbytes + cache.value.nbytes
    assert memory.temp_size_in_bytes < cache.value.nbytes / 10


def test_a_row_shorter_than_the_window_stays_where_it_is_while_others_move():
    cache, (_, key, value) = CACHES["windowed"](), draw(13)
    for token in range(13):
        chunk = key[:, :, token : token + 1], value[:, :, token : token + 1]
        cache = cache.append(*chunk, counts=np.array([1, token < 2]))
    assert cache.lengths.tolist() == [13, 2]
    assert cache.start.tolist() == [7, 0]
    for stored, tokens in ((cache.key, key), (cache.value, value)):
        np.testing.assert_array_equal(stored[1, :, :2], tokens[1, :, :2])


def test_a_window_of_the_token_itself_holds_one_token():
    arrays = draw()
    cache = KVCache.create(B, K, None, D, E, window=0)
    assert cache.capacity == 1
    _, output = decode(cache, arrays, (1,) * T, mask=masks.causal() & masks.sliding_window(0))
    assert_full_pass(output, arrays, np.eye(T, dtype=bool))
    assert KVCache.create(B, K, None, D, window=WINDOW).capacity == 2 * WINDOW


def full(kind, size=14):
    """A cache, its capacity, and a function that appends n tokens under jit."""
    cache = CACHES[kind](garbage=0.0)
    if kind == "paged":
        cache = cache.assign(1, [2])  # row 0: 15 tokens, row 1: 20
    _, key, value = draw(23)
    append = jax.jit(lambda cache, key, value: cache.append(key, value))
    return cache.append(key[:, :, :size], value[:, :, :size]), key, value, append


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
def test_overflow_under_jit_keeps_earlier_tokens(kind):
    cache, key, value, append = full(kind)
    capacity = np.array([17, 17] if kind == "contiguous" else [15, 20])
    over = append(cache, key[:, :, 14:21], value[:, :, 14:21])
    assert over.lengths.tolist() == [21, 21]
    assert over.overflowed.tolist() == [True, True]
    for row in range(B):
        stored = slice(0, capacity[row])
        np.testing.assert_array_equal(over.key[row, :, stored], key[row, :, stored])
        np.testing.assert_array_equal(over.value[row, :, stored], value[row, :, stored])
    with pytest.raises(ValueError, match=r"no row overflows, got \[21, 21\] tokens for rows \[0, 1\]"):
        over.check()
    seen = over.valid.dense(1, over.key.shape[2], query_offset=21)
    np.testing.assert_array_equal(np.broadcast_to(seen, (B, 1, seen.shape[2])).sum(2)[:, 0], capacity)
    again = append(over, key[:, :, 21:22], value[:, :, 21:22])
    assert again.lengths.tolist() == [22, 22]
    np.testing.assert_array_equal(again.key, over.key)
    np.testing.assert_array_equal(again.value, over.value)
    with pytest.raises(ValueError, match=r"lengths: expected 0\.\.(17|15).*got 18"):
        over.rewind([18, 11])
    if kind == "paged":  # what was lost cannot be shared
        with pytest.raises(ValueError, match="num_pages: expected at most 3, the full pages of row 0; got 4"):
            over.release(1).share(1, 0, 4)
        assert over.release(1).share(1, 0, 3).lengths.tolist() == [21, 15]
    back = over.rewind(capacity - 2)
    assert not back.overflowed.any()
    brim = back.append(key[:, :, :2], value[:, :, :2])
    np.testing.assert_array_equal(brim.lengths, capacity)
    assert not brim.overflowed.any()


def test_overflow_of_one_row_leaves_the_other():
    cache, key, value, append = full("paged")
    over = append(cache, key[:, :, 14:16], value[:, :, 14:16])
    assert over.overflowed.tolist() == [True, False]
    np.testing.assert_array_equal(over.key[1, :, :16], key[1, :, :16])
    with pytest.raises(ValueError, match="row: expected a row that has not overflowed, got row 0 with 16"):
        over.assign(0, [4])
    # Pages of nobody and of the other row are as they were.
    before, after = np.array(cache.key_pages), np.array(over.key_pages)
    others = np.setdiff1d(np.arange(11), [cache.page_table[0, 2], *cache.page_table[1]])
    np.testing.assert_array_equal(after[others], before[others])


def test_padding_may_reach_beyond_the_capacity():
    """Room is needed for real tokens alone."""
    for kind in ("contiguous", "paged"):
        cache, key, value, _ = full(kind)
        longer = cache.append(key[:, :, 14:21], value[:, :, 14:21], [1, 0])
        assert longer.lengths.tolist() == [15, 14]
        np.testing.assert_array_equal(longer.key[0, :, :15], key[0, :, :15])
        np.testing.assert_array_equal(longer.key[1], cache.key[1])
        assert not longer.overflowed.any()


def test_rewinding_behind_the_window_is_refused():
    cache = contiguous(capacity=11, window=WINDOW)
    _, key, value = draw()
    for t in range(T):
        cache = cache.append(key[:, :, t : t + 1], value[:, :, t : t + 1])
    first = int(cache.start[0])
    assert first > 0
    assert cache.rewind(first + WINDOW).lengths.tolist() == [first + WINDOW] * 2
    with pytest.raises(ValueError, match=rf"expected 0 or at least {first + WINDOW} for row 1.*Create"):
        cache.rewind([T, first + WINDOW - 1])
    for lengths in (first + 1, first, first - 2):
        lost = jax.jit(KVCache.rewind)(cache, lengths)
        assert lost.overflowed.all()
        with pytest.raises(ValueError, match=r"rows \[0, 1\] rewound behind the window of 4"):
            lost.check()
        # As many new tokens as the window holds, and the row is right again.
        lost = lost.append(key[:, :, :WINDOW], value[:, :, :WINDOW])
        lost.check()
        np.testing.assert_array_equal(lost.rewind(lost.lengths).lengths, lengths + WINDOW)
    assert cache.rewind(0).start.tolist() == [0, 0]
    assert not jax.jit(KVCache.rewind)(cache, 0).overflowed.any()


def test_spare_tokens_are_there_to_go_back_to():
    """Tokens came one by one; none is missed, and none is said to be."""
    cache, (_, key, value) = contiguous(capacity=WINDOW + 5, window=WINDOW, spare=3), draw()
    for t in range(T):
        cache = cache.append(key[:, :, t : t + 1], value[:, :, t : t + 1])
        for kept in range(max(t - 3, 0), t + 2):
            shorter, start = cache.rewind(kept), int(cache.start[0])
            assert not shorter.overflowed.any()
            assert not jax.jit(KVCache.rewind)(cache, kept).overflowed.any()
            first = max(kept - WINDOW, 0)
            stored = shorter.key[:, :, first - start : kept - start]
            np.testing.assert_array_equal(stored, key[:, :, first:kept])
    assert ", window=4, spare=3, " in repr(cache)
    with pytest.raises(ValueError, match="spare: expected 0 without a window"):
        contiguous(capacity=9, spare=1)
    with pytest.raises(ValueError, match="window of 4 tokens and 3 spare ones, best twice"):
        contiguous(capacity=7, window=WINDOW, spare=3)


def test_rewinding_under_jit_never_goes_forward():
    for kind in CACHES:
        cache, *_ = full(kind, 5)
        assert jax.jit(type(cache).rewind)(cache, jnp.array([9, -3])).lengths.tolist() == [5, 0]


def test_rows_share_a_prompt():
    arrays, (mask, keep) = draw(), RULES["causal"]
    for array in arrays:
        array[1, :, :10] = array[0, :, :10]
    cache = PagedKVCache.create(B, K, D, E, num_pages=7, page_size=PAGE, pages_per_row=3)
    cache = cache.assign(0, [6, 2, 4])
    prompt = [x[:, :, :10] for x in arrays]
    cache = step(cache, *prompt, mask, [10, 0])[0]
    cache = cache.share(1, 0, 2).assign(1, 0)
    assert cache.page_table.tolist() == [[6, 2, 4], [6, 2, 0]]
    assert cache.lengths.tolist() == [10, 10]
    assert cache.free_pages.tolist() == [1, 3, 5]
    grown, output = step(cache, *[x[:, :, 10:] for x in arrays], mask)
    whole = oracle.batched(*arrays, keep=table(keep), dtype=np.float32).output
    truth = oracle.batched(*arrays, keep=table(keep)).output
    oracle.assert_as_exact(output, truth[:, :, 10:], whole[:, :, 10:])
    np.testing.assert_array_equal(grown.key_pages[np.array([6, 2])], cache.key_pages[np.array([6, 2])])
    # Nobody writes into what both read.
    for row in range(B):
        with pytest.raises(ValueError, match=rf"lengths: expected 10\.\.13 for row {row}.*got 9"):
            grown.rewind(np.where(np.arange(B) == row, 9, 13))
    assert jax.jit(PagedKVCache.rewind)(grown, 3).lengths.tolist() == [10, 10]
    # The first goes, the second reads on.
    left = grown.release(0)
    assert left.free_pages.tolist() == [1, 3, 4, 5]
    np.testing.assert_array_equal(left.key[1], grown.key[1])
    assert left.release(1).free_pages.tolist() == list(range(7))
    assert left.lengths.tolist() == [0, 13]
    # The first may serve another request, and is held to nothing that it once shared.
    assert left.assign(0, 3).append(*prompt[1:], [4, 0]).rewind([0, 13]).lengths.tolist() == [0, 13]


# Against a list of tokens.

ROWS = {"append": st.integers(0, 3), "rewind": st.integers(0, 3), "reset": st.booleans()}
OPERATION = st.one_of(*(st.tuples(st.just(name), row, row) for name, row in ROWS.items()))


@pytest.mark.parametrize("kind", ["windowed", "paged"])
@settings(max_examples=15)
@given(operations=st.lists(OPERATION, min_size=1, max_size=25))
def test_a_cache_is_a_list_of_tokens(kind, operations):
    cache, model, count = CACHES[kind](garbage=0.0), [[], []], 0
    for name, *numbers in operations:
        lengths = np.array([len(row) for row in model])
        if name == "append":
            if kind != "windowed" and (lengths + numbers > 15).any():
                continue
            tokens = np.zeros((B, K, 3, 1), np.float32)
            for row, number in enumerate(numbers):
                fresh = np.arange(count, count + number) + 1
                model[row] += fresh.tolist()
                tokens[row, :, :number] = fresh[:, None]
                count += number
            key, value = (tokens * np.ones((B, K, 3, width), np.float32) for width in (D, E))
            cache = cache.append(key, value, numbers)
        elif name == "rewind":
            kept = np.maximum(lengths - numbers, 0)
            if ((kept < np.where(cache.start > 0, cache.start + WINDOW, 0)) & (kept > 0)).any():
                continue
            cache = cache.rewind(kept)
            model = [row[:n] for row, n in zip(model, kept, strict=True)]
        elif kind != "paged":
            cache = cache.reset(numbers)
            model = [[] if gone else row for row, gone in zip(model, numbers, strict=True)]
        cache.check()
        for row, tokens in enumerate(model):
            first = int(cache.start[row])
            assert int(cache.lengths[row]) == len(tokens)
            assert first <= max(len(tokens) - WINDOW, 0)
            for stored in (cache.key, cache.value):
                held = np.asarray(stored[row, :, : len(tokens) - first])
                expected = np.array(tokens[first:], np.float32)[None, :, None]
                np.testing.assert_array_equal(held, np.broadcast_to(expected, held.shape))


def test_unused_slots_are_zero_and_padding_is_not_stored():
    _, key, value = draw(3)
    value[0, :, 1:] = NAN
    for kind in CACHES:
        cache = CACHES[kind](garbage=0.0).append(key, value, [1, 3])
        assert not cache.key[0, :, 1:].any()
        assert not cache.value[0, :, 1:].any()
        assert cache.value[1, :, 2].any()


def test_counts_under_jit_are_clipped():
    _, key, value = draw(3)
    append = jax.jit(lambda counts: contiguous().append(key, value, counts))
    assert append(jnp.array([5, -1])).lengths.tolist() == [3, 0]


def test_a_cache_of_bfloat16_or_of_float32_keeps_bfloat16_whole():
    _, key, value = (jnp.asarray(x, jnp.bfloat16) for x in draw())
    cache = contiguous(jnp.bfloat16, garbage=0.0).append(key, value)
    np.testing.assert_array_equal(cache.key[:, :, :T], key)
    np.testing.assert_array_equal(cache.value[:, :, :T], value)
    empty = [CACHES[kind](jnp.bfloat16) for kind in CACHES]
    assert {stored.dtype for cache in empty for stored in (cache.key, cache.value)} == {jnp.dtype("bfloat16")}
    # float32 holds bfloat16 without loss.
    np.testing.assert_array_equal(contiguous().append(key, value).key[:, :, :T], key.astype(jnp.float32))


def test_vmap_appends_to_a_batch_of_caches():
    """vmap over append: several layers at once."""
    _, key, value = draw(14)
    one = CACHES["windowed"](garbage=0.0)
    layers = jax.tree.map(lambda leaf: np.stack([leaf] * 2), one)
    for first in (0, 7):
        chunk = key[:, :, first : first + 7], value[:, :, first : first + 7]
        layers = jax.vmap(KVCache.append)(layers, *(np.stack([x, 2 * x]) for x in chunk))
        one = one.append(*chunk)
    np.testing.assert_array_equal(layers.key[0], one.key)
    np.testing.assert_array_equal(layers.value[1], 2 * one.value)
    np.testing.assert_array_equal(layers.start, [one.start] * 2)


def test_repr_says_what_is_stored():
    cache, *_ = full("windowed", 5)
    assert repr(cache) == (
        "KVCache(batch=2, key_heads=3, capacity=11, key_width=10, value_width=7, float32, window=4,"
        " lengths=[5, 5])"
    )
    assert "page_size=5" in repr(paged())
    seen = []
    jax.jit(lambda cache: seen.append(repr(cache)))(cache)
    assert "lengths=traced" in seen[0]
    assert "PyTreeSpec" not in repr(jax.tree.map(lambda leaf: None, cache))


KEY, VALUE = np.ones((B, K, 3, D), np.float32), np.ones((B, K, 3, E), np.float32)


def holding(number, **options):
    return contiguous(garbage=0.0, **options).append(*(x[:, :, :number] for x in draw(17)[1:]))


WRONG = [
    (lambda: holding(15).append(KEY, VALUE), "key: .*at most 2 more tokens for row 0.*15 of .* 17; got 3"),
    (lambda: holding(15).append(KEY, VALUE, [2, 3]), "key: .*2 more tokens for row 1.*larger capacity"),
    (lambda: holding(1).append(*(np.repeat(x, 6, 2) for x in (KEY, VALUE))), "at most 17 .*got 18"),
    (lambda: contiguous(capacity=6, window=4).append(KEY, VALUE), "2 tokens .*6 less the .* 4; got 3. .*=7"),
    (lambda: holding(1).append(KEY[:, :, 0], VALUE), r"key: .*got \(2, 3, 10\); .*key\[:, :, None\]"),
    (lambda: holding(1).append(KEY[:, :2], VALUE), r"key: .*shape \(2, 3, n, 10\).*got \(2, 2, 3, 10\)"),
    (lambda: holding(1).append(KEY[:1], VALUE[:1]), r"key: .*got \(1, 3, 3, 10\)"),
    (lambda: holding(1).append(KEY, KEY), r"value: expected shape \(2, 3, n, 7\).*got \(2, 3, 3, 10\)"),
    (lambda: holding(1).append(KEY, VALUE[:, :, :2]), "value: expected as many tokens as key, 3.*got 2"),
    (lambda: contiguous(jnp.bfloat16).append(KEY, VALUE), "key: .*key.astype.'bfloat16'.*dtype='float32'"),
    (lambda: contiguous(jnp.bfloat16).append(KEY.astype(np.float16), VALUE), "key: .*got float16"),
    (lambda: holding(1).append(KEY, VALUE.astype(np.int8)), "value: expected float32.*got int8"),
    (lambda: holding(1).append(KEY, VALUE, [1, 4]), r"counts: expected 0\.\.3.*got 4 for row 1"),
    (lambda: holding(1).append(KEY, VALUE, [-1, 4]), r"counts: expected 0\.\.3.*got -1 for row 0"),
    (lambda: holding(1).append(KEY, VALUE, 2), r"counts: expected one per row, shape \(2,\); got \(\)"),
    (lambda: holding(1).append(KEY, VALUE, [1.0, 2.0]), "counts: expected integers, got float64"),
    (lambda: holding(5).rewind(6), r"lengths: expected 0\.\.5, the tokens stored for row 0; got 6"),
    (lambda: holding(5).rewind([5, -1]), r"lengths: expected 0\.\.5, .* row 1; got -1"),
    (lambda: holding(5).rewind([1, 2, 3]), r"lengths: expected one integer or one per row.*got \(3,\)"),
    (lambda: holding(5).rewind(2.5), "lengths: expected integers, got float64"),
    (lambda: holding(5).reset([0, 1]), "rows: expected booleans.*got int"),
    (lambda: holding(5).reset([True]), r"rows: expected one per row, shape \(2,\); got \(1,\)"),
    (lambda: holding(5).query_offset(0.5), "num_queries: expected integers, got float64"),
    (lambda: jax.jit(KVCache.check)(holding(5)), "check: expected a cache with concrete lengths"),
    (lambda: KVCache.create(B, K, None, D), "capacity: expected the slots per row, .*got None"),
    (lambda: KVCache.create(B, K, 4, D, window=4), "capacity: expected more than the window of 4.*got 4"),
    (lambda: KVCache.create(B, K, 19, D, first=3), "first: expected 0 without a window, .*got 3"),
    (lambda: KVCache.create(B, K, 19, D, window=4, first=-1), "first: expected an integer of at least 0"),
    (lambda: KVCache.create(B, K, 7, D, window=4, first=3), "window of 4 tokens and 3 first ones.*got 7"),
    (lambda: contiguous(capacity=8, window=4, first=3).append(KEY, VALUE), "1 tokens at .*3 first .*=10"),
    (lambda: KVCache.create(B, K, 4, D, window=-1), "window: expected an integer of at least 0, got -1"),
    (lambda: KVCache.create(0, K, 4, D), "batch: expected an integer of at least 1, got 0"),
    (lambda: KVCache.create(B, True, 4, D), "key_heads: .*got True"),
    (lambda: KVCache.create(B, K, 4.0, D), "capacity: expected an integer known before tracing, got 4.0"),
    (lambda: KVCache.create(B, K, 4, D, dtype=jnp.int32), "dtype: expected a floating-point.*got int32"),
    (lambda: PagedKVCache.create(B, K, D, num_pages=0, page_size=1, pages_per_row=1), "num_pages: .*got 0"),
    (lambda: full("paged")[0].append(KEY, VALUE), "key: .* at most 1 more tokens for row 0.*free_pages"),
    (lambda: paged().append(KEY, VALUE, [4, 0]), r"counts: expected 0\.\.3.*got 4"),
    (lambda: paged().rewind(1), r"lengths: expected 0\.\.0 for row 0.*got 1"),
    (lambda: paged().assign(0, [2, 7]), r"pages: expected free pages, got 7, in use by rows \[1\]"),
    (lambda: paged().assign(0, [11]), r"pages: expected 0\.\.10.*got 11"),
    (lambda: paged().assign(0, [-1]), r"pages: expected 0\.\.10.*got -1"),
    (lambda: paged().assign(0, [2, 2]), r"pages: expected each page once, got \[2, 2\]"),
    (lambda: paged().assign(0, [0.5]), "pages: expected integers, got float64"),
    (lambda: paged().assign(0, [2, 4]), "pages: expected at most 1 more pages for row 0.*3 of.*=4; got 2"),
    (lambda: paged().assign(2, [4]), r"row: expected 0\.\.1, the rows of the cache; got 2"),
    (lambda: paged().release(-1), "row: expected an integer of at least 0, got -1"),
    (lambda: paged().share(0, 1, 1), "num_pages: expected at most 0, the full pages of row 1; got 1"),
    (lambda: full("paged")[0].share(1, 0, 2), "row: expected a row without pages, got row 1; release"),
    (lambda: jax.jit(lambda cache: cache.assign(0, [2]))(paged()), "assign: expected a cache outside jit"),
    (lambda: jax.jit(lambda cache: cache.free_pages)(paged()), "free_pages: expected a cache outside jit"),
]  # fmt: skip


def test_bad_input_is_explained():
    assert_refused(*WRONG, error=(ValueError, TypeError))


def write_and_read(cache, query, key, value):
    cache = cache.append(key, value)
    return cache, cache.attend(query, mask=masks.causal())


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", [*CACHES, "int8"])
def test_a_step_is_exported_for_any_number_of_rows(kind, size):
    cache = contiguous(jnp.int8, garbage=77) if kind == "int8" else CACHES[kind]()
    rows, arrays = export.symbolic_shape("rows")[0], [array[:, :, :size] for array in draw()]
    describe = lambda x: jax.ShapeDtypeStruct((rows if len(x) == B else len(x), *x.shape[1:]), x.dtype)
    call = jax.jit(write_and_read)
    program = export.export(call)(*jax.tree.map(describe, (cache, *arrays)))
    found = export.deserialize(program.serialize()).call(cache, *arrays)
    oracle.assert_close(found, call(cache, *arrays))


def test_a_program_makes_its_own_cache_for_any_number_of_rows_and_tokens():
    def fill(x):
        cache = KVCache.create(x.shape[0], K, x.shape[2] + 2, D)
        return cache.append(x, x).attend(x, mask=masks.causal())

    shape = export.symbolic_shape(f"rows, {K}, length, {D}")
    program = export.export(jax.jit(fill))(jax.ShapeDtypeStruct(shape, jnp.float32))
    x = draw()[1]
    oracle.assert_close(program.call(x), attend(x, x, x, mask=masks.causal()))
