"""With `batch_invariant=True` a row's result does not depend, to the bit, on what else is in the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from economy import mostly_slow
from mesh_cases import draw
from regard import attend, explain, masks, scores

BATCH, T, S, D = 3, 131, 137, 7
LENGTHS, IDS = np.array([S, 0, 71]), np.arange(BATCH * S).reshape((BATCH, S)) // 61
CASES = {
    "no mask": lambda rows: {},
    "causal, grouped": lambda rows: {"mask": masks.causal(), "query_offset": S - T},
    "lengths": lambda rows: {"mask": masks.lengths(LENGTHS[rows])},
    "documents": lambda rows: {"mask": masks.segments(IDS[rows][:, :T], IDS[rows])},
    "a narrow window and a score": lambda rows: {
        "mask": masks.sliding_window(9), "query_offset": 0, "score": scores.softcap(2.0)
    },
}  # fmt: skip


def outcome(case, arrays, rows):
    def loss(*arrays):
        output, found = attend(*arrays, aux=("lse",), batch_invariant=True, **CASES[case](rows))
        alive = found["lse"] > -jnp.inf
        return jnp.sum(output**2) + jnp.sum(jnp.where(alive, found["lse"], 0)), (output, found)

    @jax.jit
    def learn(*arrays):
        grads, found = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
        # What follows would round otherwise if XLA took the last product and this sum for one.
        learned = [array - 0.1 * grad for array, grad in zip(arrays, grads, strict=True)]
        return grads, found, learned

    return [np.asarray(leaf) for leaf in jax.tree.leaves(learn(*(array[rows] for array in arrays)))]


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("case", mostly_slow(CASES, "causal, grouped"))
def test_a_row_alone_has_the_bits_that_it_has_among_others(case, heads):
    arrays = draw((BATCH, 2 * heads, T, D), (BATCH, heads, S, D), (BATCH, heads, S, 5), seed=11)
    together = outcome(case, arrays, np.arange(BATCH))
    for row in range(BATCH):
        for alone, among in zip(outcome(case, arrays, np.array([row])), together, strict=True):
            np.testing.assert_array_equal(alone[0], among[row])
    shuffled = outcome(case, arrays, np.array([2, 0]))
    for one, among in zip(shuffled, together, strict=True):
        np.testing.assert_array_equal(one, among[[2, 0]])


@pytest.mark.slow
def test_further_derivatives_of_a_row_do_not_depend_on_others():
    arrays = draw((BATCH, 2, T, D), (BATCH, 1, S, D), (BATCH, 1, S, 5), seed=11)

    def change(*arrays):
        def loss(*arrays):
            return jnp.sum(
                attend(*arrays, mask=masks.causal(), query_offset=S - T, batch_invariant=True) ** 2
            )

        of_grad = jax.vjp(jax.grad(loss, (0, 1, 2)), *arrays)[1](arrays)
        return of_grad, jax.jvp(jax.grad(loss, (0, 1, 2)), arrays, arrays)[1]

    together, alone = jax.jit(change)(*arrays), jax.jit(change)(*(array[1:2] for array in arrays))
    for one, among in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
        np.testing.assert_array_equal(one[0], among[1])


@pytest.mark.slow
def test_what_the_masks_of_other_rows_keep_does_not_choose_the_tiles():
    query, key, value = draw((2, 2, 1300, D), (2, 2, 1300, D), (2, 2, 1300, 5), seed=11)
    ids = np.stack([np.arange(1300) // 20, np.zeros(1300, int)])

    def run(rows, **options):
        mask = masks.segments(ids[rows])
        return jax.jit(lambda *arrays: attend(*arrays, mask=mask, **options))(
            query[rows], key[rows], value[rows]
        )

    together = run(np.arange(2), batch_invariant=True)
    for row in range(2):
        np.testing.assert_array_equal(run(np.array([row]), batch_invariant=True)[0], together[row])
    # Without the promise, the many short documents would be computed in smaller tiles.
    assert (run(np.array([0]))[0] != together[0]).any()


def test_a_nan_of_another_row_changes_no_bit():
    query, key, value = draw((BATCH, 4, T, D), (BATCH, 2, S, D), (BATCH, 2, S, 5), seed=11)
    spoiled = value.at[0].set(jnp.nan)
    clean, dirty = (outcome("lengths", (query, key, one), np.arange(BATCH)) for one in (value, spoiled))
    for one, other in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(one[1:], other[1:])


def test_short_calls_take_the_same_way_whatever_their_number():
    one = jax.ShapeDtypeStruct((1, 2, 3, 5), jnp.float32)
    assert explain(one, one, one).backend == "dense"
    assert explain(one, one, one, batch_invariant=True).backend == "tiled"


def test_other_backends_and_values_that_are_not_known_are_refused():
    x = jnp.ones((1, 2, 3, 5))
    with pytest.raises(NotImplementedError, match="batch_invariant"):
        attend(x, x, x, backend="dense", batch_invariant=True)
    with pytest.raises(TypeError, match="batch_invariant: expected True or False"):
        attend(x, x, x, batch_invariant="yes")
