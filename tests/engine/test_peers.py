"""Wrong answers found in other libraries, each asked of ours. Where jax.nn can serve, it is the witness."""

import jax
import jax.numpy as jnp
import numpy as np

from regard import attend, masks, scores


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]


def test_converters_agree_with_jax_nn():
    given = arrays((2, 6, 7, 5), (2, 3, 7, 5), (2, 3, 7, 5))
    lengths = jnp.array([3, 7])
    pairs = [
        ({"is_causal": True}, masks.causal()),
        ({"local_window_size": (2, 1)}, masks.from_jax_window((2, 1))),
        ({"local_window_size": 2, "is_causal": True}, masks.from_jax_window(2) & masks.causal()),
        ({"key_value_seq_lengths": lengths}, masks.lengths(lengths)),
    ]
    swap = lambda x: jnp.swapaxes(x, -3, -2)

    def theirs(*given):
        return [swap(jax.nn.dot_product_attention(*map(swap, given), **options)) for options, _ in pairs]

    # jax.nn itself promotes ranks and dtypes.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = jax.jit(theirs)(*given)
    found = jax.jit(lambda *given: [attend(*given, mask=mask) for _, mask in pairs])(*given)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_precision_is_heard():
    query, key, value = arrays((2, 5, 7), (2, 11, 7), (2, 11, 3))
    text = str(jax.make_jaxpr(lambda q: attend(q, key, value, precision="highest"))(query))
    assert text.count("Precision.HIGHEST") >= 2 * 2
    assert "HIGHEST" not in str(jax.make_jaxpr(lambda q: attend(q, key, value))(query))


def test_positions_beyond_two_to_the_thirty_first_pairs_are_masked_right():
    """70,000 x 70,000 pairs do not fit an int32 index; the mask compares positions, not pair numbers."""
    last = masks.causal().tiles(70_000, query_block=1000, key_block=1000)
    np.testing.assert_array_equal(last, np.tril(np.full((70, 70), 2), -1) + np.eye(70, dtype=int))
    query, key, value = arrays((1, 3), (70_000, 3), (70_000, 2))
    seen = attend(query, key, value, mask=masks.causal(), query_offset=46_341)
    np.testing.assert_allclose(seen, attend(query, key[:46_342], value[:46_342]), rtol=2e-5, atol=1e-6)


def test_the_backward_pass_knows_the_softcap_the_scale_and_the_sink_beyond_one_tile():
    """A flash backward without the softcap's derivative; a short path without the scale."""
    query, key, value, tangent = arrays((1, 1031, 5), (1, 1031, 5), (1, 1031, 3), (1, 1031, 5))

    def by_hand(query):
        logits = 2 * jnp.tanh(query @ jnp.swapaxes(key, 1, 2) * 0.7 / 2)
        weights = jax.nn.softmax(jnp.concatenate([logits, jnp.full((1, 1031, 1), 6.0)], -1))
        return jnp.vdot(weights[..., :-1] @ value, value)

    def ours(query):
        options = {"score": scores.softcap(2.0), "scale": 0.7, "sinks": jnp.asarray([6.0])}
        return jnp.vdot(attend(query, key, value, backend="tiled", **options), value)

    (found, found_grad), (expected, grad) = (jax.jit(jax.value_and_grad(f))(query) for f in (ours, by_hand))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(*(jnp.vdot(one, tangent) for one in (found_grad, grad)), rtol=2e-4, atol=1e-4)
