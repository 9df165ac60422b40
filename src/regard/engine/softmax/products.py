"""Products of matrices, in the dtype of their factors, that use every core."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.platforms import find_platform
from regard.engine.processors import lacks_bfloat16

# XLA's CPU computes a batch of small products on one core, however many there are of them.
BATCH_ON_ONE_CORE = jax.__version_info__ < (0, 11)
_SMALL = 1 << 22  # multiplications of one of them (benchmarks/NOTES.md)


def product(a: Array, b: Array, precision: Any, contract: tuple[int, int] = (-1, -2)) -> Array:
    """Multiply matrices over the named axes, one of the last two each; axes before those are a batch.

    What multiplies a narrower factor is rounded to its dtype first; sums are float32 at least.
    """
    batch = tuple(range(a.ndim - 2))
    axes = ((a.ndim + contract[0],), (b.ndim + contract[1],))
    factor = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    sum_dtype = np.promote_types(factor, np.float32)
    a, b = a.astype(factor), b.astype(factor)
    on_cpu = find_platform(a, b).name == "cpu"
    if factor == jnp.bfloat16 and on_cpu and lacks_bfloat16():
        a, b = a.astype(np.float32), b.astype(np.float32)  # faster, and the same: they are rounded
    sums = jax.lax.dot_general(a, b, (axes, (batch, batch)), precision, sum_dtype)
    work = sums.shape[-2] * sums.shape[-1] * a.shape[contract[0]]
    small = isinstance(work, int) and 0 < work <= _SMALL
    if not (small and BATCH_ON_ONE_CORE and sum_dtype == np.float32 and on_cpu):
        return sums
    # XLA divides a kernel along its batch if a maximum is part of it: here, of zeros, or of NaN where a row
    # or column of the product is NaN. What a loop does not change is found ahead of it, so they are not made
    # from the tile that meets all others, the first factor of scores.
    source, axis, along = (b, -1, -2) if contract[1] == -1 else (a, contract[0], -1)
    zeros = jnp.minimum(jnp.abs(jax.lax.stop_gradient(source).astype(sum_dtype)), 0)
    return sums + jnp.expand_dims(zeros.max(axis), along)
