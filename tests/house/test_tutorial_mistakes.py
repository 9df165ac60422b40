"""The documents that docs/tutorials retells: what is wrong in them does not happen in Regard."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import regard
from regard import attend, masks
from regard.layers import MultiHeadAttention
from regard.training import tasks
from regard.training.task import TRAINING, make_stream
from regard.training.tasks import shrink
from tutorial_documents import draw, draw_uniform

B, H, T, S, D, E = 2, 3, 5, 7, 11, 13


@jax.jit
def weigh(x, mask):
    return attend(x, x, x, mask=mask, aux=("weights",))[1]["weights"]


# Masks, batches and heads.


@pytest.mark.parametrize("heads", [H, B])
def test_a_mask_per_example_is_refused_or_right_with_heads(heads):
    """Of queries and keys, or of keys alone; it is not read as heads where there are as many."""
    query = draw(0, B, heads, T, D)
    for rows in (T, 1):
        mask = np.random.default_rng(1).random((B, rows, T)) < 0.6
        with pytest.raises(ValueError, match=r"mask: expected an array that broadcasts.*mask\[:, None\]"):
            attend(query, query, query, mask=mask)
        expected = np.broadcast_to(mask[:, None], (B, heads, T, T))
        for reading in [mask[:, None]] + ([] if rows > 1 else [masks.valid_keys(mask[:, 0])]):
            np.testing.assert_array_equal(weigh(query, reading) > 0, expected)


@pytest.mark.parametrize(("length", "leading"), [(T, (B,)), (B, (B, H))])
def test_padding_of_shape_batch_by_keys_is_not_read_as_queries_by_keys(length, leading):
    query = draw(2, *leading, length, D)
    valid = np.arange(length) < np.array([[1], [2]])
    with pytest.raises(ValueError, match=r"masks\.valid_keys\(mask\)"):
        attend(query, query, query, mask=valid)
    spread = np.broadcast_to(valid.reshape(B, *(1,) * len(leading), length), (*leading, length, length))
    for mask in (masks.valid_keys(valid), masks.lengths([1, 2]), spread):
        np.testing.assert_array_equal(weigh(query, mask) > 0, spread)


def test_mask_shapes_that_worked_in_the_tutorial_still_do():
    query, causal = draw(3, B, H, T, D), np.tri(T, dtype=bool)
    expected = weigh(query, masks.causal())
    for mask in (causal, np.broadcast_to(causal, (B, 1, T, T))):
        np.testing.assert_array_equal(weigh(query, mask), expected)


def test_a_mask_that_drops_is_read_by_name():
    x, drop = draw(4, 3, 2), np.triu(np.ones((3, 3), bool), 1)
    expected = weigh(x, masks.causal())
    np.testing.assert_array_equal(weigh(x, masks.from_drop(drop)), expected)
    # The other polarity is another mask, and its last row, which keeps nothing, is zero instead of a mean.
    inverted = weigh(x, drop)
    assert not np.allclose(inverted, expected)
    assert not np.any(inverted[-1])


def test_an_additive_mask_is_refused_as_a_mask_and_right_as_a_bias():
    query, key, value = draw(4, 1, D), draw(5, 3, D), draw(6, 3, E)
    additive = np.array([[0, -np.inf, 0]], np.float32)
    with pytest.raises(TypeError, match="pass additive masks as `bias=`"):
        attend(query, key, value, mask=additive)
    expected = attend(query, key, value, mask=[[True, False, True]])
    np.testing.assert_array_equal(attend(query, key, value, bias=additive), expected)


def test_lengths_may_be_a_list():
    np.testing.assert_array_equal(
        masks.lengths([1, 2]).dense(1, 4)[:, 0], [[True, False, False, False], [True, True, False, False]]
    )
    with pytest.raises(TypeError, match="key_lengths: expected integers"):
        masks.lengths([1.5, 2.0])


def test_causal_includes_the_query_itself():
    np.testing.assert_array_equal(masks.causal().dense(5), np.tri(5, dtype=bool))
    assert weigh(jnp.eye(5), masks.causal())[0, 0] == 1


# What a masked score is.


def test_a_row_with_nothing_to_attend_to_is_zero_not_uniform_nor_nan():
    """In float16, where -1e9 is -inf."""
    query, value = (draw(seed, B, T, width).astype(np.float16) for seed, width in ((4, D), (5, E)))
    valid = np.zeros((B, T), bool)
    valid[1, 2] = True
    out, aux = attend(query, query, value, mask=masks.valid_keys(valid), aux=("weights", "lse", "entropy"))
    assert out.dtype == np.float16
    for name, expected in {"weights": 0, "lse": -np.inf, "entropy": 0}.items():
        assert np.all(aux[name][0] == expected), name
    assert not np.any(out[0])
    np.testing.assert_array_equal(out[1], np.broadcast_to(value[1, 2], (T, E)))


def test_no_kept_score_loses_to_a_masked_one():
    query, key = np.float32([[1e5]]), np.float32([[-1e5], [1.0]])
    _, aux = attend(query, key, key, mask=np.array([[True, False]]), aux=("weights", "scores"))
    assert aux["scores"][0, 0] < -1e9
    np.testing.assert_array_equal(aux["weights"], [[1.0, 0.0]])


def test_an_empty_row_sends_no_nan_into_anybodys_gradient():
    """Neither a row of a mask in a projected sequence, nor an example of length 0."""
    x, projection = draw(0, B, T, D), draw(1, D, E)
    keep = np.ones((T, T), bool)
    keep[2] = False

    @jax.jit
    @jax.grad
    def slope(arguments, mask):
        x, projection = arguments
        out = attend(x @ projection, x @ projection, x @ projection, mask=mask)
        return jnp.sum(out.at[..., 2, :].set(0) ** 2)

    for mask in (keep, masks.lengths([0, 4])):
        for gradient in slope((x, projection), mask):
            assert np.all(np.isfinite(gradient))
            assert np.any(gradient)
    assert not np.any(slope((x, projection), masks.lengths([0, 4]))[0][0])


def test_large_scores_do_not_overflow():
    scores, shares = np.array([100.0, 1e4, -1e4]), np.exp([0.0, -1.0, -2.0])
    key = (scores[:, None] - [0, 1, 2])[..., None].astype(np.float32)
    out, aux = attend(np.ones((3, 1, 1), np.float32), key, np.eye(3, dtype=np.float32), aux=("lse",))
    np.testing.assert_allclose(out[:, 0], np.tile(shares / shares.sum(), (3, 1)), rtol=1e-6)
    np.testing.assert_allclose(aux["lse"][:, 0], scores + np.log(shares.sum()), rtol=1e-6)


# Shapes and positions; odd widths, distant positions and the linear shift are in test_positions.py.


def test_the_output_is_as_wide_as_the_values_and_a_mean_of_them():
    """Keys and values may come from another sequence."""
    query, memory, value = draw(7, 10, D), draw(8, 20, D), draw(9, 20, 5)
    out = np.asarray(attend(query, memory, value))
    assert out.shape == (10, 5)
    # No coordinate leaves the range of the rows that it is a mean of.
    assert np.all(out <= value.max(0) + 1e-6)
    assert np.all(out >= value.min(0) - 1e-6)


# Chance, settings, and what models are trained on.


def correlate(one, other):
    return np.corrcoef(np.ravel(one).astype(float), np.ravel(other).astype(float))[0, 1]


def test_dropout_shares_no_numbers_with_inputs_drawn_from_the_same_key():
    rng, size = jax.random.key(3), 97
    # Equal scores and the identity as value show the pattern itself: 0 where dropped.
    equal, eye = np.zeros((size, 1), np.float32), np.eye(size, dtype=np.float32)
    kept = np.asarray(attend(equal, equal, eye, dropout_rate=0.5, rng=rng)) > 0
    bits = np.asarray(jax.random.bits(rng, (size, size))) >> 31
    for numbers in (jax.random.normal(rng, (size, size)), jax.random.uniform(rng, (size, size)), bits):
        assert abs(correlate(numbers, kept)) < 0.05  # five deviations of 9,409 independent pairs
    assert 0.45 < kept.mean() < 0.55


def test_a_layer_built_from_a_key_shares_no_numbers_with_data_split_from_it():
    rng, shape = jax.random.PRNGKey(456), (128, 128)
    layer = MultiHeadAttention(128, 8, rngs=nnx.Rngs(rng))
    parent, child = jax.random.normal(rng, shape), jax.random.normal(jax.random.split(rng)[1], shape)
    kernels = [leaf for leaf in jax.tree.leaves(nnx.state(layer, nnx.Param)) if leaf.ndim == 2]
    assert len(kernels) == 4
    for kernel in kernels:
        assert abs(correlate(parent, kernel)) < 0.04  # five deviations
        assert abs(correlate(child, kernel)) < 0.04
    # The trap itself: the document's key for its inputs is also that of its second kernel.
    assert correlate(child, draw_uniform(jax.random.split(rng, 4)[1], shape)) > 0.97


def test_the_package_leaves_the_settings_of_jax_alone():
    sets = re.compile(
        r"config\.update\(|config\.jax_\w+ = |(?<!with jax\.)enable_x64\(|environ\[.JAX_\w+.\] = "
    )
    assert sets.search('jax.config.update("jax_enable_x64", True)')
    sources = sorted(pathlib.Path(regard.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    assert [source.name for source in sources if sets.search(source.read_text())] == []


def test_threshold_labels_say_whether_the_sum_is_above_400():
    task = tasks.Threshold()
    tokens, labels = np.asarray(task.held_out["inputs"]), np.asarray(task.held_out["labels"])
    assert tokens.shape == (10_000, 8)
    assert (tokens.min(), tokens.max()) == (0, 99)
    np.testing.assert_array_equal(labels, tokens.sum(1) > 400)
    assert labels.mean() == pytest.approx(0.4784, abs=0.02)  # four deviations


def test_training_never_draws_what_is_held_out():
    task = tasks.Threshold(data_seed=0, held_out_size=2_000)
    held_out = {row.tobytes() for row in np.asarray(task.held_out["inputs"])}
    assert len(held_out) == 2_000
    for stream in (make_stream(seed, TRAINING) for seed in (0, 1)):
        for step in range(20):
            batch = task.make_batch(jax.random.fold_in(stream, step), 1_009)
            assert held_out.isdisjoint(row.tobytes() for row in np.asarray(batch["inputs"]))


def test_copy_data_are_moved_by_one_between_a_start_and_an_end():
    task = tasks.Copy(vocab_size=19, length=7, held_out_size=11)
    for batch in (task.held_out, task.make_batch(jax.random.key(0), 11)):
        inputs, targets = np.asarray(batch["inputs"]), np.asarray(batch["targets"])
        assert inputs.shape == targets.shape == (11, 8)
        assert set(inputs[:, 0]) == {19}  # start
        assert set(targets[:, -1]) == {20}  # end
        np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
        assert 0 <= targets[:, :-1].min() <= targets[:, :-1].max() < 19


@pytest.mark.slow
def test_the_model_that_copies_sees_to_its_right():
    task = shrink(tasks.Copy())
    model = task.make_model(nnx.Rngs(0))
    model.eval()
    tokens = task.held_out["inputs"][:1]
    changed = tokens.at[0, 5].set((tokens[0, 5] + 1) % 16)
    moved = np.abs(np.asarray(model(changed) - model(tokens))).max(-1)[0]
    assert np.all(moved[:5] > 1e-6)  # a causal model would not move here, and could not know its targets
