"""With `batch_invariant=True` a row's result does not depend, to the bit, on what else is in the batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import draw
from regard import attend, explain, masks, scores

BATCH, T, S, D = 3, 131, 137, 7
LENGTHS = np.array([S, 0, 71])
# Key heads; options of some rows.
CASES = {
    "causal, grouped": (2, lambda rows: {"mask": masks.causal(), "query_offset": S - T}),
    "lengths": (1, lambda rows: {"mask": masks.lengths(LENGTHS[rows])}),
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
        learned = [array - 0.1 * grad for array, grad in zip(arrays, grads, strict=True)]
        return grads, found, learned

    return learn


def outcome(case, arrays, *rows):
    found = program(case, rows)(*(array[np.array(rows)] for array in arrays))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


@pytest.mark.parametrize("case", CASES)
def test_a_row_alone_has_the_bits_that_it_has_among_others(case):
    arrays = arrays_of(CASES[case][0])
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

    def run(*rows, **options):
        call = functools.partial(attend, mask=masks.segments(ids[list(rows)]), **options)
        return jax.jit(call)(*(array[np.array(rows)] for array in arrays))

    together = run(0, 1, batch_invariant=True)
    np.testing.assert_array_equal(run(0, batch_invariant=True)[0], together[0])
    # Without the promise, the many short documents would be computed in smaller tiles.
    assert (run(0)[0] != together[0]).any()


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
