"""The documents that docs/tutorials retells: what is wrong in them does not happen in Regard."""

import math
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

import regard
from layer_oracle import draw
from regard import attend, masks
from regard.layers import MultiHeadAttention
from regard.training import tasks
from regard.training.tasks import shrink

B, H, T, S, D, E = 2, 3, 5, 7, 11, 13


@jax.jit
def weigh(x, mask):
    return attend(x, x, x, mask=mask, aux=("weights",))[1]["weights"]


# Masks, batches and heads.


def test_a_mask_per_example_is_refused_or_right_with_heads():
    """Of queries and keys, or of keys alone; it is not read as heads, of which there are as many."""
    query = draw(0, B, B, T, D)
    for rows in (T, 1):
        mask = np.random.default_rng(1).random((B, rows, T)) < 0.6
        with pytest.raises(ValueError, match=r"mask: expected an array that broadcasts.*mask\[:, None\]"):
            attend(query, query, query, mask=mask)
        expected = np.broadcast_to(mask[:, None], (B, B, T, T))
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
    limit = math.sqrt(6 / sum(shape))
    drawn = jax.random.uniform(jax.random.split(rng, 4)[1], shape, minval=-limit, maxval=limit)
    assert correlate(child, drawn) > 0.97


def test_the_package_leaves_the_settings_of_jax_alone():
    sets = re.compile(r"config\.(update\(|jax_\w+ = )|(?<!with jax\.)enable_x64\(|environ\[.JAX_\w+.\] = ")
    assert sets.search('jax.config.update("jax_enable_x64", True)')
    sources = sorted(pathlib.Path(regard.__file__).parent.rglob("*.py"))
    assert len(sources) > 20
    assert [source.name for source in sources if sets.search(source.read_text())] == []


@pytest.mark.slow
def test_the_model_that_copies_sees_to_its_right():
    task = shrink(tasks.Copy())
    model = task.make_model(nnx.Rngs(0))
    model.eval()
    tokens = task.held_out["inputs"][:1]
    changed = tokens.at[0, 5].set((tokens[0, 5] + 1) % 16)
    moved = np.abs(np.asarray(model(changed) - model(tokens))).max(-1)[0]
    assert np.all(moved[:5] > 1e-6)  # a causal model would not move here, and could not know its targets
