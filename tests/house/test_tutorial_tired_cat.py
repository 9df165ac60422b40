"""The source of docs/tutorials/tired_cat.md: its numbers come out of Regard, its mistakes do not.

What one layer or model guards is tested beside it; docs/seeds.md lists every item with its test.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from regard import attend, masks, positions
from regard.training import tasks
from regard.training.task import TRAINING, make_stream
from tutorial_documents import assert_golden, build_tired_cat_block

B, H, T, S, D, E = 2, 3, 5, 7, 11, 13


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Golden numbers.


def test_attention_gives_the_numbers_of_the_tired_cat():
    query, key, value = (
        jax.random.normal(rng, (4, 8)) for rng in jax.random.split(jax.random.key(42), 4)[1:]
    )
    out, aux = attend(query, key, value, aux=("weights",))
    golden = [
        [0.6928185, 0.0508164, 0.0924486, 0.1639164],
        [0.2213887, 0.3612903, 0.2154238, 0.2018971],
        [0.2991428, 0.1330853, 0.2007512, 0.3670208],
        [0.2975411, 0.5813310, 0.0617600, 0.0593680],
    ]
    assert_golden(aux["weights"], golden, 3e-7)
    first = [-0.3014034, -0.9572111, -0.9110382, 0.0312845, -0.2483003, 0.2923333, 0.3162348, -0.3313690]
    assert_golden(out[0], first, 1e-6)
    # Every row of weights sums to 1.
    assert_golden(aux["weights"].sum(-1), np.ones(4), 3e-7)


def test_sinusoids_give_the_numbers_of_the_tired_cat():
    table = positions.sinusoidal(50, 64)
    assert_golden(table[0, :4], [0, 1, 0, 1], 0)
    assert_golden(table[1, :4], [0.8414710, 0.5403023, 0.6815614, 0.7317610], 1e-7)


# The training as the notebook writes it, with Regard's parts.


def draw_batch(rng, size):
    tokens = jax.random.randint(rng, (size, 8), 0, 100)
    return tokens, (tokens.sum(1) > 400).astype(jnp.int32)


def make_classifier(rng):
    """Parameters, and logits as a function of them."""
    embedding, block, head = jax.random.split(rng, 3)
    graph, state = nnx.split(build_tired_cat_block(block, 32, 4, 128))
    params = {
        "embedding": jax.random.normal(embedding, (100, 32)) * 0.02,
        "block": state,
        "head": jax.random.normal(head, (32, 2)) * 0.02,
        "bias": jnp.zeros(2),
    }

    def logits(params, tokens):
        hidden = params["embedding"][tokens] + positions.sinusoidal(8, 32)[None]
        return nnx.merge(graph, params["block"])(hidden).mean(1) @ params["head"] + params["bias"][None]

    return params, logits


@pytest.mark.slow
def test_training_as_written_prints_its_numbers_and_answers_no_to_everything():
    rng, init = jax.random.split(jax.random.key(42))
    params, logits = make_classifier(init)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 15_842

    def loss(params, tokens, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens), labels).mean()

    @jax.jit
    def update(params, tokens, labels):
        value, gradient = jax.value_and_grad(loss)(params, tokens, labels)
        return jax.tree.map(lambda p, g: p - 0.001 * g, params, gradient), value

    @jax.jit
    def predict(params, tokens):
        return logits(params, tokens).argmax(-1)

    printed = []
    for step in range(100):
        rng, batch_rng = jax.random.split(rng)
        tokens, labels = draw_batch(batch_rng, 32)
        params, value = update(params, tokens, labels)
        if step % 20 == 19:
            printed.append((float(value), float(np.mean(predict(params, tokens) == labels))))
    golden = [(0.6726, 0.6875), (0.7084, 0.4062), (0.6796, 0.6250), (0.7014, 0.4375), (0.6664, 0.7500)]
    np.testing.assert_allclose(printed, golden, rtol=0, atol=5.1e-5)  # four printed digits

    # The printed accuracies judge 32 examples just trained on; on new ones the model says 0 to everything.
    tokens, labels = draw_batch(jax.random.key(777), 20_000)
    assert not predict(params, tokens).any()
    assert float((labels == 0).mean()) == pytest.approx(0.5205, abs=5e-5)


def test_threshold_labels_say_whether_the_sum_is_above_400():
    task = tasks.Threshold()
    tokens, labels = np.asarray(task.held_out["inputs"]), np.asarray(task.held_out["labels"])
    assert tokens.shape == (10_000, 8)
    assert (tokens.min(), tokens.max()) == (0, 99)
    np.testing.assert_array_equal(labels, tokens.sum(1) > 400)
    assert labels.mean() == pytest.approx(0.4784, abs=0.02)  # four deviations


@pytest.mark.parametrize("seed", [0, 1])
def test_training_never_draws_what_is_held_out(seed):
    task = tasks.Threshold(data_seed=0, held_out_size=2_000)
    held_out = {row.tobytes() for row in np.asarray(task.held_out["inputs"])}
    assert len(held_out) == 2_000
    stream = make_stream(seed, TRAINING)
    for step in range(20):
        batch = task.make_batch(jax.random.fold_in(stream, step), 1_009)
        assert held_out.isdisjoint(row.tobytes() for row in np.asarray(batch["inputs"]))


# Masks, batches and heads.


@pytest.mark.parametrize("heads", [H, B])
def test_a_mask_for_the_batch_is_not_read_as_heads(heads):
    query = draw(0, B, heads, T, D)
    per_example = np.random.default_rng(1).random((B, T, T)) < 0.6
    with pytest.raises(ValueError, match=r"mask: expected an array that broadcasts.*mask\[:, None\]"):
        attend(query, query, query, mask=per_example)
    _, aux = attend(query, query, query, mask=per_example[:, None], aux=("weights",))
    assert not np.any(np.asarray(aux["weights"])[np.broadcast_to(~per_example[:, None], (B, heads, T, T))])


@pytest.mark.parametrize("length", [T, B])
@pytest.mark.parametrize("head_axis", [True, False])
def test_padding_of_shape_batch_by_keys_is_not_read_as_queries_by_keys(length, head_axis):
    leading = (B, H) if head_axis else (B,)
    query = draw(2, *leading, length, D)
    valid = np.arange(length) < np.array([[1], [2]])
    with pytest.raises(ValueError, match=r"masks\.valid_keys\(mask\)"):
        attend(query, query, query, mask=valid)
    spread = np.broadcast_to(valid.reshape(B, *(1,) * len(leading), length), (*leading, length, length))
    for mask in (masks.valid_keys(valid), masks.lengths([1, 2]), spread):
        _, aux = attend(query, query, query, mask=mask, aux=("weights",))
        np.testing.assert_array_equal(np.asarray(aux["weights"]) > 0, spread)


def test_mask_shapes_that_worked_in_the_tutorial_still_do():
    query = draw(3, B, H, T, D)
    causal = np.tri(T, dtype=bool)
    expected = attend(query, query, query, mask=masks.causal())
    for mask in (causal, np.broadcast_to(causal, (B, 1, T, T))):
        np.testing.assert_array_equal(attend(query, query, query, mask=mask), expected)


# What a masked score is.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_fully_masked_row_is_zero_in_every_dtype(dtype):
    query, value = draw(4, T, D).astype(dtype), draw(5, T, E).astype(dtype)
    keep = np.tri(T, k=-1, dtype=bool)  # row 0 keeps nothing
    out, aux = attend(query, query, value, mask=keep, aux=("weights", "lse"))
    assert out.dtype == dtype
    assert not np.any(out[0])
    assert not np.any(aux["weights"][0])
    assert aux["lse"][0] == -np.inf
    assert np.all(np.isfinite(np.asarray(out, np.float32)))


def test_no_kept_score_loses_to_a_masked_one():
    query, key = jnp.array([[1e5]]), jnp.array([[-1e5], [1.0]])
    _, aux = attend(query, key, key, mask=np.array([[True, False]]), aux=("weights", "scores"))
    assert aux["scores"][0, 0] < -1e9
    np.testing.assert_array_equal(aux["weights"], [[1.0, 0.0]])


# Positions. Odd widths, distant positions and the linear shift are in test_positions.py.


def test_positions_work_under_jit_with_a_traced_start_and_sizes_from_shapes():
    # Sizes come from shapes, which jit knows; where rows begin may be traced.
    table = jax.jit(lambda x: positions.sinusoidal(*x.shape))(jnp.zeros((T, D)))
    np.testing.assert_array_equal(table, positions.sinusoidal(T, D))
    late = jax.jit(lambda start: positions.sinusoidal_at(start + jnp.arange(T), D))(4_999)
    np.testing.assert_allclose(late, positions.sinusoidal(T, D, start=4_999), rtol=0, atol=2e-6)


def test_attention_without_positions_is_permutation_equivariant_not_invariant():
    x, order = draw(6, T, D), np.array([3, 0, 4, 1, 2])
    out = attend(x, x, x)
    np.testing.assert_allclose(attend(x[order], x[order], x[order]), out[order], rtol=0, atol=1e-6)
    assert not np.allclose(attend(x[order], x[order], x[order]), out, atol=0.1)
    # What is invariant is one query's output under a shuffle of its keys.
    np.testing.assert_allclose(attend(x, x[order], x[order]), out, rtol=0, atol=1e-6)


# Jit.


def test_jit_of_attend_needs_no_static_arguments():
    query, key, value = draw(7, B, H, T, D), draw(8, B, H, S, D), draw(9, B, H, S, E)
    mask = masks.causal() & masks.lengths(jnp.array([2, 6]))
    plain = attend(query, key, value, mask=mask, query_offset=2)
    jitted = jax.jit(lambda q, k, v, mask, offset: attend(q, k, v, mask=mask, query_offset=offset))
    np.testing.assert_allclose(jitted(query, key, value, mask, 2), plain, rtol=0, atol=1e-6)
