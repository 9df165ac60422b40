"""The source of docs/tutorials/index_notation.md: its numbers come out of Regard, its mistakes do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks
from regard.layers.heads import merge_heads, split_heads
from tutorial_documents import assert_golden


@pytest.fixture(scope="module")
def snippet():
    shapes = ((10, 64), (20, 64), (20, 64))
    return [
        jax.random.normal(rng, shape)
        for rng, shape in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    ]


def test_attention_gives_the_numbers_of_the_page_on_index_notation(snippet):
    out, aux = attend(*snippet, aux=("scores", "weights"))
    assert aux["scores"].shape == aux["weights"].shape == (10, 20)
    assert out.shape == (10, 64)
    assert_golden(out[0, :4], [0.1944103, 0.1830600, 1.1014320, -0.0557363], 1e-6)
    assert_golden(aux["weights"][0, :4], [0.0217443, 0.0234516, 0.1168045, 0.0529126], 2e-7)
    assert_golden(out.sum(), 11.98246, 2e-6)


def test_attention_is_its_three_steps_in_index_form(snippet):
    Q, K, V = (np.asarray(x, np.float64) for x in snippet)
    S = np.einsum("ia,ja->ij", Q, K) / np.sqrt(64)
    A = np.exp(S) / np.exp(S).sum(1, keepdims=True)
    out, aux = attend(*snippet, aux=("scores", "weights"))
    assert_golden(aux["scores"], S)
    assert_golden(aux["weights"], A)
    assert_golden(out, np.einsum("ij,jb->ib", A, V))


def test_attend_agrees_with_jax_nn(snippet):
    query, key, value = (x[None, :, None] for x in snippet)  # (batch, length, heads, width) there
    assert_golden(attend(*snippet), jax.nn.dot_product_attention(query, key, value)[0, :, 0])


def test_eight_heads_without_projections_are_slices_of_the_width(snippet):
    # The snippet gives no weights, so its heads are the eight slices of the width.
    out, aux = attend(*(split_heads(x, 8) for x in snippet), aux=("weights",))
    assert aux["weights"].shape == (8, 10, 20)
    query, key, value = (np.split(np.asarray(x), 8, axis=-1) for x in snippet)
    expected = np.concatenate([attend(q, k, v) for q, k, v in zip(query, key, value, strict=True)], -1)
    assert_golden(merge_heads(out), expected, 1e-6)


def test_the_output_is_as_wide_as_the_values(snippet):
    query, key, _ = snippet
    assert attend(query, key, jnp.ones((20, 5))).shape == (10, 5)


def test_causal_includes_the_query_itself():
    np.testing.assert_array_equal(masks.causal().dense(5), np.tri(5, dtype=bool))
    value = jnp.eye(5)
    assert float(attend(value, value, value, mask=masks.causal())[0, 0]) == 1.0


@pytest.mark.parametrize("score", [100.0, 1e4, -1e4])
def test_large_scores_do_not_overflow(score):
    query, key = jnp.array([[1.0]]), jnp.array([[score], [score - 1], [score - 2]])
    out, aux = attend(query, key, jnp.eye(3), aux=("lse",))
    expected = np.exp([0.0, -1.0, -2.0]) / np.exp([0.0, -1.0, -2.0]).sum()
    np.testing.assert_allclose(out[0], expected, rtol=1e-6)
    np.testing.assert_allclose(aux["lse"][0], score + np.log(np.exp([0.0, -1.0, -2.0]).sum()), rtol=1e-6)


def test_keys_and_values_may_come_from_another_sequence(snippet):
    query, memory, _ = snippet
    out = attend(query, memory, memory)
    assert out.shape == query.shape
    # Each row is a mean of memory rows: no coordinate leaves their range.
    assert np.all(np.asarray(out) <= np.asarray(memory).max(0) + 1e-6)
    assert np.all(np.asarray(out) >= np.asarray(memory).min(0) - 1e-6)
