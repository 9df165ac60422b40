"""exp for softmax: how exact, and where it ends."""

import jax
import jax.numpy as jnp
import numpy as np

from regard.engine.softmax.exponential import exp

EDGE = -127 * np.log(2)  # below, scores are clamped


def relative_error(x):
    return np.abs(np.asarray(exp(jnp.asarray(x)), np.float64) / np.exp(x.astype(np.float64)) - 1)


def test_the_error_is_a_rounding_or_two_and_grows_with_the_rounding_of_the_argument():
    x = np.linspace(-80, 0, 1_000_003).astype(np.float32)
    error = relative_error(x)
    assert error[x > -2].max() <= 2.5e-7
    # x log2(e) is rounded to half a unit in its last place, and log2(e) itself to 1.3e-8 of it.
    assert (error <= 2e-7 + 1e-7 * np.abs(x)).all()


def test_positive_arguments_are_as_exact():
    x = np.linspace(0, 80, 100_003).astype(np.float32)
    assert (relative_error(x) <= 2e-7 + 1e-7 * x).all()


def test_zero_gives_one_and_minus_infinity_gives_zero():
    found = np.asarray(exp(jnp.asarray([0.0, -0.0, -np.inf, np.finfo(np.float32).min, -1e4], jnp.float32)))
    np.testing.assert_array_equal(found, [1, 1, 0, 0, 0])
    assert not np.signbit(found).any()


def test_nan_stays_nan_whatever_its_payload():
    bits = [0x7FC00000, 0x7FC00001, 0x7FC00100, 0x7FC001FF, 0xFFC00000, 0xFFC00001, 0xFFC001FF, 0x7FFFFFFF]
    x = jax.lax.bitcast_convert_type(jnp.asarray(bits, jnp.uint32), jnp.float32)
    assert np.isnan(np.asarray(exp(x))).all()


def test_every_neighbour_of_the_clamp_is_zero_or_tiny():
    bits = np.float32(EDGE).view(np.int32) + np.arange(-4099, 4099, dtype=np.int32)
    found = np.asarray(exp(jnp.asarray(bits.view(np.float32))))
    assert (found >= 0).all()
    assert (found < np.finfo(np.float32).tiny).all()


def test_float64_is_left_to_xla(x64):
    x = jnp.linspace(-745.0, 0.0, 1009, dtype=jnp.float64)
    assert exp(x).dtype == jnp.float64
    np.testing.assert_array_equal(exp(x), jnp.exp(x))
    np.testing.assert_array_equal(jax.grad(lambda x: exp(x).sum())(x), jnp.exp(x))
