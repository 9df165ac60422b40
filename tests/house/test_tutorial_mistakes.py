"""The documents that docs/tutorials retells: what is wrong in them does not happen in Regard."""

import math
import pathlib
import re

import jax
import numpy as np
import pytest
from flax import nnx

import regard
from regard import attend, masks
from regard.layers import MultiHeadAttention
from regard.training import tasks
from regard.training.tasks import shrink

B, H, T, S, D, E = 2, 3, 5, 7, 11, 13


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


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


def test_a_mask_that_drops_is_read_by_name():
    x, drop = draw(4, 3, 2), np.triu(np.ones((3, 3), bool), 1)
    expected = weigh(x, masks.causal())
    np.testing.assert_array_equal(weigh(x, masks.from_drop(drop)), expected)
    # The other polarity is another mask, and its last row, which keeps nothing, is zero instead of a mean.
    inverted = weigh(x, drop)
    assert not np.allclose(inverted, expected)
    assert not np.any(inverted[-1])


# What a masked score is.


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
    sets = re.compile(
        r"config\.update\(|config\.jax_\w+ = |(?<!with jax\.)enable_x64\(|environ\[.JAX_\w+.\] = "
    )
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
