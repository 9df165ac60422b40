"""A score's function sees parameters in their own dtype over a mesh, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import draw, evaluate, on_eight_devices, run
from regard import attend, masks, scores


def lower(slopes, scale):
    """Multiply two numbers of the parameters' dtype: of another, `mul` takes neither."""

    def apply(score, batch, head, query, key):
        distance = (query - key).astype(slopes.dtype)
        return score * scale.astype(score.dtype) - jax.lax.mul(slopes[head], distance).astype(score.dtype)

    return scores.modifier(apply)


def check(way):
    """As in float32 on one device, but for the rounding of gradients."""
    arrays, (cotangent,) = draw(*[(2, 4, 19, 7)] * 3), draw((2, 4, 19, 7), seed=5)
    parameters = np.array([0.5, 0.25, -0.125, 0.0625]), np.array(0.5)

    def find(dtype, function):
        call = lambda *arrays: function(*arrays[:3], score=lower(*arrays[3:]), mask=masks.causal())
        own = [jnp.asarray(parameter, dtype) for parameter in parameters]
        return evaluate(call, [*arrays, *own], cotangent)

    found = find(jnp.bfloat16, lambda *arrays, **options: run(way, *arrays, **options))
    expected = find(jnp.float32, lambda *arrays, **options: attend(*arrays, backend="dense", **options))
    for one, other in zip(found[:4], expected[:4], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    for one, other in zip(found[4:], expected[4:], strict=True):
        assert one.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(jnp.float32), other, atol=2**-6 * float(abs(other).max()))


@pytest.mark.parametrize("way", ["ring", "both zigzag", "ring of shards"])
def test_a_function_computes_in_the_dtype_of_its_parameter(way):
    on_eight_devices(f"import test_narrow_parameters\ntest_narrow_parameters.check({way!r})")
