"""With `batch_invariant=True` a row's result does not depend, to the bit, on what else is in the batch."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import draw
from regard import KVCache, PagedKVCache, attend, explain, masks, scores

BATCH, T, S, D = 3, 131, 137, 7
LENGTHS = np.array([S, 0, 31])
# Key heads; options of some rows.
CASES = {
    "causal, grouped": (2, lambda rows: {"mask": masks.causal(), "query_offset": S - T}),
    "lengths": (1, lambda rows: {"mask": masks.lengths(LENGTHS[rows])}),  # of one head, in one step
    "a narrow window and a score": (
        1,
        lambda rows: {"mask": masks.sliding_window(9), "query_offset": 0, "score": scores.softcap(2.0)},
    ),
}


def arrays_of(heads):
    return draw((BATCH, 2 * heads, T, D), (BATCH, heads, S, D), (BATCH, heads, S, 5), seed=11)


@functools.cache
def program(case, rows):
    """Gradients, results and what is learned from them, of some rows of the batch."""

    def loss(*arrays):
        options = CASES[case][1](np.array(rows))
        output, found = attend(*arrays, aux=("lse",), batch_invariant=True, **options)
        alive = found["lse"] > -jnp.inf
        return jnp.sum(output**2) + jnp.sum(jnp.where(alive, found["lse"], 0)), (output, found)

    @jax.jit
    def learn(*arrays):
        grads, found = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
        # What follows would round otherwise if XLA took the last product and this sum for one.
        return grads, found, [array - 0.1 * grad for array, grad in zip(arrays, grads, strict=True)]

    return learn


def outcome(case, arrays, *rows):
    found = program(case, rows)(*(array[np.array(rows)] for array in arrays))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_has_the_bits_that_it_has_among_others(case):
    arrays = [array[:, :1, :53] if case == "lengths" else array for array in arrays_of(CASES[case][0])]
    together = outcome(case, arrays, 0, 1, 2)
    for rows in [(2, 0)] if "window" in case else [(0,), (2,), (2, 0)]:
        for alone, among in zip(outcome(case, arrays, *rows), together, strict=True):
            np.testing.assert_array_equal(alone, among[list(rows)])


def test_a_nan_of_another_row_changes_no_bit():
    query, key, value = arrays_of(1)
    spoiled = value.at[0].set(jnp.nan)
    clean, dirty = (outcome("lengths", (query, key, one), 0, 1, 2) for one in (value, spoiled))
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one[1:], other[1:])


def test_what_the_masks_of_other_rows_keep_does_not_choose_the_tiles():
    arrays = draw((2, 2, 1300, D), (2, 2, 1300, D), (2, 2, 1300, 5), seed=11)
    ids = np.stack([np.arange(1300) // 20, np.zeros(1300, int)])

    def run(call, *rows, **options):
        call = functools.partial(call, mask=masks.segments(ids[list(rows)]), **options)
        return call(*(array[np.array(rows)] for array in arrays))

    alone, together = (run(attend, *rows, batch_invariant=True) for rows in ((0,), (0, 1)))
    np.testing.assert_array_equal(alone[0], together[0])
    told = (str(run(explain, *rows, batch_invariant=True)) for rows in ((0,), (0, 1)))
    assert len({text.partition("computes")[2].splitlines()[0] for text in told}) == 1
    # Without the promise, the many short documents would be computed in smaller tiles.
    assert (run(attend, 0)[0] != together[0]).any()


def test_short_calls_take_the_same_way_whatever_their_number():
    one = jax.ShapeDtypeStruct((1, 2, 3, 5), jnp.float32)
    assert explain(one, one, one).backend == "dense"
    assert explain(one, one, one, batch_invariant=True).backend == "tiled"


def test_other_backends_and_values_that_are_not_known_are_refused():
    x = np.ones((1, 2, 3, 5), np.float32)
    with pytest.raises(NotImplementedError, match="batch_invariant"):
        attend(x, x, x, backend="dense", batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant: expected True or False"):
        attend(x, x, x, batch_invariant="yes")


LENGTH = 331  # three tiles of keys, of which a window leaves one whole
CUTS = [(0, 5, 5), (100, 300, 300), (330, 331, 331), (140, 141, LENGTH)]  # from, to, of so many keys
ANY_CUT = {
    "a window and a softcap, grouped": (
        3,
        lambda bias: {"mask": masks.causal() & masks.sliding_window(170), "score": scores.softcap(9.0)},
    ),
    "a bias and dropout": (
        1,
        lambda bias: {"mask": masks.causal(), "bias": bias, "dropout_rate": 0.2, "rng": jax.random.key(2)},
    ),
    "bfloat16, with sinks": (8, lambda bias: {"mask": masks.causal(), "sinks": jnp.arange(16.0)}),
}


@pytest.mark.parametrize("case", ANY_CUT)
def test_a_row_has_the_same_bits_however_its_sequence_is_cut(case):
    group, options = ANY_CUT[case]
    query, key, value, bias = draw(
        (1, 2 * group, LENGTH, 16), (1, 2, LENGTH, 16), (1, 2, LENGTH, 11), (1, 2 * group, LENGTH, LENGTH)
    )
    if "bfloat16" in case:
        query, key, value = (jnp.asarray(array, jnp.bfloat16) for array in (query, key, value))

    @jax.jit
    def call(query, key, value, bias, first):
        asked = {"query_offset": first, "aux": ("lse", "max_score", "argmax"), "batch_invariant": True}
        return attend(query, key, value, **options(bias), **asked)

    whole = call(query, key, value, bias, 0)
    for first, end, stored in CUTS:
        seen = key[:, :, :stored], value[:, :, :stored], bias[:, :, first:end, :stored]
        output, aux = call(query[:, :, first:end], *seen, first)
        np.testing.assert_array_equal(output, whole[0][:, :, first:end])
        for name, statistic in aux.items():
            np.testing.assert_array_equal(statistic, whole[1][name][:, :, first:end], name)


@pytest.mark.parametrize("kind", ["int8", "paged"])
def test_prefill_chunks_and_decoding_from_a_cache_have_the_same_bits(kind):
    length = 203
    query, key, value = draw((2, 6, length, 16), (2, 2, length, 16), (2, 2, length, 11))
    mask = masks.causal() & masks.sliding_window(90)
    if kind == "paged":
        empty = PagedKVCache.create(2, 2, 16, 11, num_pages=40, page_size=16, pages_per_row=14)
        empty = empty.assign(0, [7, 3, *range(20, 32)]).assign(1, [*range(8, 20), 1])
    else:
        empty = KVCache.create(2, 2, 211, 16, 11, dtype=kind)

    @jax.jit
    def extend(cache, *chunk):
        query, key, value = chunk
        cache = cache.append(key, value)
        return cache.attend(query, mask=mask, batch_invariant=True), cache

    def run(*cuts):
        cache, outputs = empty, []
        for first, end in itertools.pairwise(cuts):
            output, cache = extend(cache, *(array[:, :, first:end] for array in (query, key, value)))
            outputs.append(output)
        return jnp.concatenate(outputs, 2)

    whole = run(0, length)
    np.testing.assert_array_equal(run(0, 101, 102, length), whole)
    if kind != "int8":  # whose numbers are others
        np.testing.assert_array_equal(attend(query, key, value, mask=mask, batch_invariant=True), whole)
