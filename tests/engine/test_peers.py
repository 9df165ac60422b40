"""Wrong answers found in other libraries, each asked of ours."""

import jax
import jax.numpy as jnp
import numpy as np

from regard import attend, scores


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes]


def test_precision_is_heard():
    query, key, value = arrays((2, 5, 7), (2, 11, 7), (2, 11, 3))
    text = str(jax.make_jaxpr(lambda q: attend(q, key, value, precision="highest"))(query))
    assert text.count("Precision.HIGHEST") >= 2 * 2
    assert "HIGHEST" not in str(jax.make_jaxpr(lambda q: attend(q, key, value))(query))


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
