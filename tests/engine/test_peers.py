"""Wrong answers found in other libraries, each asked of ours. Where jax.nn can serve, it is the witness."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks, scores


def arrays(*shapes, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)).astype(dtype) for shape in shapes]


def jax_nn(query, key, value, **kwargs):
    """jax.nn's attention in our layout."""
    swap = lambda x: jnp.swapaxes(x, -3, -2)
    return swap(jax.nn.dot_product_attention(swap(query), swap(key), swap(value), **kwargs))


@pytest.fixture
def loose():
    """jax.nn itself promotes ranks and dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, None),
        ({"is_causal": True}, masks.causal()),
        ({"local_window_size": (2, 1)}, masks.from_jax_window((2, 1))),
        ({"local_window_size": 2, "is_causal": True}, masks.from_jax_window(2) & masks.causal()),
        (
            {"key_value_seq_lengths": jnp.array([3, 7])},
            masks.lengths(jnp.array([3, 7])),
        ),
    ],
)
def test_converters_agree_with_jax_nn(loose, theirs, ours):
    query, key, value = arrays((2, 6, 7, 5), (2, 3, 7, 5), (2, 3, 7, 5))
    np.testing.assert_allclose(
        attend(query, key, value, mask=ours), jax_nn(query, key, value, **theirs), rtol=2e-5, atol=2e-6
    )


def test_float64_is_float64(x64):
    query, key, value = arrays((5, 7), (11, 7), (11, 3), dtype=jnp.float64)
    scores = np.asarray(query) @ np.asarray(key).T / np.sqrt(7)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    truth = weights / weights.sum(-1, keepdims=True) @ np.asarray(value)
    np.testing.assert_allclose(attend(query, key, value), truth, rtol=1e-14)


def test_rank_two_attends():
    query, key, value = arrays((5, 7), (5, 7), (5, 7))
    assert not np.allclose(attend(query, key, value), value)


def test_the_lse_of_bfloat16_is_float32_and_has_a_gradient():
    query, key, value = arrays((5, 7), (11, 7), (11, 3), dtype=jnp.bfloat16)
    lse = lambda q: attend(q, key, value, aux=("lse",))[1]["lse"]
    assert lse(query).dtype == jnp.float32
    assert np.asarray(jax.grad(lambda q: lse(q).sum())(query), np.float32).any()


def test_a_window_without_causal_does_not_see_the_future():
    weights = attend(*arrays((7, 5), (7, 5), (7, 5)), mask=masks.sliding_window(2), aux=("weights",))[1][
        "weights"
    ]
    assert not np.triu(np.asarray(weights), 1).any()


def test_padding_and_causal_combine_and_value_width_is_free():
    query, key, value = arrays((2, 3, 7, 5), (2, 3, 7, 5), (2, 3, 7, 11))
    valid = np.arange(7)[None] < np.array([[4], [7]])
    both = attend(query, key, value, mask=masks.valid_keys(valid) & masks.causal())
    explicit = np.tril(np.ones((7, 7), bool)) & valid[:, None, None, :]
    np.testing.assert_array_equal(both, attend(query, key, value, mask=explicit))
    assert both.shape == (2, 3, 7, 11)


def test_precision_is_heard():
    query, key, value = arrays((2, 5, 7), (2, 11, 7), (2, 11, 3))
    text = str(jax.make_jaxpr(lambda q: attend(q, key, value, precision="highest"))(query))
    assert text.count("Precision.HIGHEST") >= 2 * 2
    assert "HIGHEST" not in str(jax.make_jaxpr(lambda q: attend(q, key, value))(query))


def test_the_offset_of_causal_is_kept():
    query, key, value = arrays((7, 5), (7, 5), (7, 3))
    whole = attend(query, key, value, mask=masks.causal())
    tail = attend(query[4:], key, value, mask=masks.causal(), query_offset=4)
    np.testing.assert_allclose(tail, whole[4:], rtol=1e-6)


def test_a_positive_bias_is_not_clipped():
    query, key, value = arrays((5, 7), (11, 7), (11, 3))
    lifted = attend(query, key, value, bias=jnp.zeros((5, 11)).at[:, 3].set(50.0))
    np.testing.assert_allclose(lifted, jnp.broadcast_to(value[3], (5, 3)), rtol=1e-6)


def test_segments_that_come_back_still_see_themselves_and_no_other():
    ids = np.array([0, 1, 0, 1, 1, 0, 2])
    weights = attend(*arrays((7, 5), (7, 5), (7, 3)), mask=masks.segments(ids), aux=("weights",))[1][
        "weights"
    ]
    np.testing.assert_array_equal(np.asarray(weights) > 0, ids[:, None] == ids[None])


def test_the_mask_stays_with_dropout_and_with_aux():
    query, key, value = arrays((7, 5), (7, 5), (7, 7))
    value = jnp.eye(7)
    _, aux = attend(query, key, value, mask=masks.causal(), aux=("weights",))
    dropped = attend(query, key, value, mask=masks.causal(), dropout_rate=0.3, rng=jax.random.key(0))
    assert not np.triu(np.asarray(aux["weights"]), 1).any()
    assert not np.triu(np.asarray(dropped), 1).any()


def test_an_empty_row_does_not_depend_on_whether_weights_are_asked_for():
    query, key, value = arrays((7, 5), (7, 5), (7, 3))
    plain = attend(query, key, value, mask=masks.lengths(0))
    looked, aux = attend(query, key, value, mask=masks.lengths(0), aux=("weights",))
    assert not np.asarray(plain).any()
    assert not np.asarray(looked).any()
    assert not np.asarray(aux["weights"]).any()


def test_positions_beyond_two_to_the_thirty_first_pairs_are_masked_right():
    """70,000 x 70,000 pairs do not fit an int32 index; the mask compares positions, not pair numbers."""
    last = masks.causal().tiles(70_000, query_block=1000, key_block=1000)
    np.testing.assert_array_equal(last, np.tril(np.full((70, 70), 2), -1) + np.eye(70, dtype=int))
    query, key, value = arrays((1, 3), (70_000, 3), (70_000, 2))
    seen = attend(query, key, value, mask=masks.causal(), query_offset=46_341)
    np.testing.assert_allclose(seen, attend(query, key[:46_342], value[:46_342]), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("length", [7, 1031])
def test_the_backward_pass_knows_the_softcap_and_the_scale_at_every_length(length):
    """A flash backward without the softcap's derivative; a short path without the scale."""
    query, key, value, move = arrays((length, 5), (length, 5), (length, 3), (length, 5))

    def by_hand(query):
        weights = jax.nn.softmax(2 * jnp.tanh(query @ key.T * 0.7 / 2), -1)
        return jnp.vdot(weights @ value, value)

    def ours(query):
        return jnp.vdot(attend(query, key, value, score=scores.softcap(2.0), scale=0.7), value)

    np.testing.assert_allclose(ours(query), by_hand(query), rtol=1e-5)
    found, expected = (jnp.vdot(jax.grad(f)(query), move) for f in (ours, by_hand))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=1e-4)


def test_a_sink_counts_once_however_many_tiles_there_are():
    query, key, value = arrays((2, 1500, 5), (2, 1500, 5), (2, 1500, 3))
    sinks = jnp.asarray([1.0, 6.0])
    scale = 1 / np.sqrt(5)
    lse = jax.nn.logsumexp(scale * jnp.einsum("htd,hsd->hts", query, key), -1)
    share = jax.nn.sigmoid(lse - sinks[:, None])[..., None]
    expected = share * attend(query, key, value, backend="dense")
    np.testing.assert_allclose(
        attend(query, key, value, sinks=sinks, backend="tiled"), expected, rtol=2e-5, atol=2e-6
    )
