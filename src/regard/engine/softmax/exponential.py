"""exp for softmax, of differences to a peak and so never of large numbers; these, and NaN among them."""

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array

# 2^r on [-1/2, 1/2] through Chebyshev nodes, constant first: relative error below 1e-7. The constant is
# exactly 1, so that e^0 is; at -127, where masked scores are clamped, the power of 2 is 0.
_POLYNOMIAL = (1.0, 0.6931472, 0.24022651, 0.05550327, 0.009618057, 0.0013400428, 0.00015461445)
_LOG2_E = 1.4426950408889634
_LEAST = -127.0
_MAGIC = 1.5 * 2.0**23  # adding it leaves the nearest integer in the low bits


@jax.custom_jvp
def exp(x: Array) -> Array:
    """Compute e^x for x up to about 80, 0 at -inf, NaN at NaN; below 2^-126 it is 0.

    The relative error in float32 is about 2e-7 + 1e-7 |x|: weights far below the largest are less exact.

    In float32 a polynomial and a shift of the exponent take half the time of XLA's `exp` on the CPU, which
    guards ranges that a softmax does not have (`benchmarks/NOTES.md`).
    """
    if x.dtype != jnp.float32:
        return jnp.exp(x)
    y = x * np.float32(_LOG2_E)
    # Not a maximum, which loses NaN where XLA's CPU makes it part of a product's kernel.
    y = jnp.where(y < np.float32(_LEAST), np.float32(_LEAST), y)
    fraction = y - jax.lax.round(y, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
    power = jnp.full_like(fraction, _POLYNOMIAL[-1])
    for coefficient in _POLYNOMIAL[-2::-1]:
        power = power * fraction + np.float32(coefficient)
    exponent = jax.lax.bitcast_convert_type(y + np.float32(_MAGIC), jnp.int32) + np.int32(127)
    # A product, so that NaN stays NaN whatever its bits.
    return power * jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)


@exp.defjvp
def _exp_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    power = exp(*primals)
    return power, power * tangents[0]


def subtract_peak(scores: Array, peak: Array) -> Array:
    """Return scores - peak, exactly 0 at the peak, for scores that end in a product.

    A compiler fuses the product with the difference, unrounded, while the peak is rounded: at 1e9 they differ
    by up to 32, and e^32 would be added up. The 0 keeps the derivatives of the difference; by a rule of its
    own for them, jax 0.10 gets second ones wrong within `lax.scan`.
    """
    difference = scores - peak
    zero = difference - jax.lax.stop_gradient(difference)
    return jnp.where(scores == peak, zero, difference)


def finite_base(peak: Array) -> Array:
    """Return what scores are lessened by: their peak; 0 where it is -inf or NaN, less which -inf is NaN."""
    return jnp.where(peak > -jnp.inf, peak, 0)


def nan_where_total_is(total: Array, statistic: Array) -> Array:
    """Return a statistic of rows, NaN where their sums of exponentials are.

    The NaN is theirs: XLA's CPU computes the exponential of a selected constant NaN wrongly.
    """
    return jnp.where(jnp.isnan(total), total, statistic)
