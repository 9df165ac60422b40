"""The source of docs/tutorials/module_and_jit.md: its numbers come out of Regard, its mistakes do not.

The printed numbers themselves are in test_multi_head.py; here are those of today's random bits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from regard import attend, masks
from regard.layers import MultiHeadAttention
from tutorial_documents import PROJECTIONS, assert_golden

ENCODINGS = np.array([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]], np.float32)


class Attention(linen.Module):
    """The document's module around `attend`."""

    @linen.compact
    def __call__(self, x, mask=None):
        query, key, value = (linen.Dense(2, use_bias=False, name=name)(x) for name in ("W_q", "W_k", "W_v"))
        return attend(query, key, value, mask=mask)


class TwoHeads(linen.Module):
    def setup(self):
        self.heads = [Attention() for _ in range(2)]

    def __call__(self, x, mask=None):
        return jnp.concatenate([head(x, mask) for head in self.heads], axis=-1)


# Golden numbers.


def test_a_flax_module_and_the_layer_agree_on_the_random_bits_of_today():
    with jax.threefry_partitionable(True):
        single, _ = Attention().init_with_output(jax.random.PRNGKey(42), ENCODINGS)
        two, variables = TwoHeads().init_with_output(jax.random.PRNGKey(42), ENCODINGS)
    assert_golden(single, [[2.745961, 1.4091437], [4.1035733, 2.573457], [0.9419719, -0.24929526]], 1e-6)
    golden = [
        [-2.1585233, -0.9291224, -1.0160966, 2.2032692],
        [-1.8306779, -0.7111306, -0.8444760, 1.9673356],
        [-2.6130450, -1.2279204, -1.4894067, 2.8670964],
    ]
    assert_golden(two, golden, 1e-6)

    layer = load_heads(variables["params"])
    assert_golden(layer(ENCODINGS), golden, 1e-6)


def test_the_printed_numbers_need_the_random_bits_of_their_time():
    with jax.threefry_partitionable(True):
        new = Attention().init(jax.random.PRNGKey(42), ENCODINGS)["params"]["W_q"]["kernel"]
    with jax.threefry_partitionable(False):
        old = Attention().init(jax.random.PRNGKey(42), ENCODINGS)["params"]["W_q"]["kernel"]
    assert_golden(old, [[0.16799836, -0.14157924], [0.06251401, 0.34933484]], 1e-7)
    assert_golden(new, [[-0.20432013, -0.40271446], [-0.88146311, -0.01891009]], 1e-7)


def load_heads(params):
    """The same parameters in Regard's own layer: every head at full width, concatenated, no projection."""
    layer = MultiHeadAttention(
        2, len(params), head_dim=2, use_bias=False, project_output=False, rngs=nnx.Rngs(0)
    )
    for name, ours in zip(("W_q", "W_k", "W_v"), PROJECTIONS, strict=False):
        kernels = [params[f"heads_{index}"][name]["kernel"] for index in range(len(params))]
        getattr(layer, ours).kernel[...] = jnp.concatenate(kernels, axis=1)
    return layer


# What was wrong.


@pytest.mark.parametrize("size", [2, 3])
def test_a_batch_is_its_examples_also_where_batch_length_and_width_agree(size):
    x = jnp.asarray(np.random.default_rng(size).normal(size=(size, size, size)), jnp.float32)
    np.testing.assert_allclose(attend(x, x, x), [attend(one, one, one) for one in x], rtol=0, atol=1e-6)


def test_a_mask_that_drops_is_read_by_name():
    drop = np.triu(np.ones((3, 3), bool), 1)
    expected = attend(ENCODINGS, ENCODINGS, ENCODINGS, mask=masks.causal())
    out = attend(ENCODINGS, ENCODINGS, ENCODINGS, mask=masks.from_drop(drop))
    np.testing.assert_array_equal(out, expected)
    # The other polarity is another mask, and its last row, which keeps nothing, is zero instead of a mean.
    inverted = attend(ENCODINGS, ENCODINGS, ENCODINGS, mask=drop)
    assert not np.allclose(inverted, expected)
    np.testing.assert_array_equal(inverted[-1], [0.0, 0.0])


def test_the_mask_reaches_every_head():
    params = TwoHeads().init(jax.random.PRNGKey(42), ENCODINGS)
    masked = TwoHeads().apply(params, ENCODINGS, masks.causal())
    assert_golden(load_heads(params["params"])(ENCODINGS, mask=masks.causal()), masked, 1e-6)
    value = np.concatenate([ENCODINGS @ head["W_v"]["kernel"] for head in params["params"].values()], 1)
    assert_golden(masked[0], value[0], 1e-6)  # the first query sees itself alone


def test_heads_at_full_width_are_a_choice_with_a_name():
    full = MultiHeadAttention(4, 3, head_dim=4, use_bias=False, project_output=False, rngs=nnx.Rngs(0))
    assert full(jnp.ones((5, 4))).shape == (5, 12)
    standard = MultiHeadAttention(12, 3, rngs=nnx.Rngs(0))
    assert standard(jnp.ones((5, 12))).shape == (5, 12)


def test_weights_are_there_for_the_asking():
    out, aux = attend(ENCODINGS, ENCODINGS, ENCODINGS, aux=("weights", "scores"))
    scores = ENCODINGS.astype(np.float64) @ ENCODINGS.T / np.sqrt(2)
    assert_golden(aux["scores"], scores)
    assert_golden(aux["weights"], np.exp(scores) / np.exp(scores).sum(-1, keepdims=True))
    assert_golden(aux["weights"] @ ENCODINGS, out)
