"""Products of matrices, in the dtype of their factors, that use every core."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array

BATCH_ON_ONE_CORE = jax.__version_info__ < (0, 11)
"""Whether XLA's CPU computes a batch of small products on one core, however many there are of them."""
_SMALL = 1 << 22  # multiplications of one of them; measured (benchmarks/NOTES.md)


def product(
    a: Array, b: Array, precision: Any, contract: tuple[int, int] = (-1, -2), beside: int | None = None
) -> Array:
    """Multiply matrices over the named axes, one of the last two each; axes before those are a batch.

    What multiplies a narrower factor is rounded to its dtype first; sums are float32 at least. Where it takes
    that to use every core, zeros are added that are made from one factor: `beside` says which, 0 or 1. It is
    the one that a loop around the product reads or computes anew, by default the second along its last axis,
    else the first. A number in it that is not finite makes its whole row or column of the product NaN.
    """
    batch = tuple(range(a.ndim - 2))
    axes = ((a.ndim + contract[0],), (b.ndim + contract[1],))
    factor = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    total = np.promote_types(factor, np.float32)
    a, b = a.astype(factor), b.astype(factor)
    found = jax.lax.dot_general(a, b, (axes, (batch, batch)), precision, total)
    small = 0 < found.shape[-2] * found.shape[-1] * a.shape[contract[0]] <= _SMALL
    if not (small and BATCH_ON_ONE_CORE and total == np.float32 and jax.default_backend() == "cpu"):
        return found
    # A kernel with a sum or a maximum beside the product is divided along its batch, and rounds as before.
    place = int(contract[1] == -1) if beside is None else beside
    zeros = jax.lax.stop_gradient(0 * (a, b)[place].astype(total)).max(contract[place])
    return found + jnp.expand_dims(zeros, -1 - place)
