"""The largest logits of a row, down to a threshold that is found without sorting."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import accumulation_dtype


def keep_largest(logits: Array, enough: Callable[[Array], Array]) -> Array:
    """Leave the largest logits that are `enough`: those above the greatest threshold that lets enough pass.

    The threshold is found bit by bit; from some thousand tokens on, sorting takes longer.
    """
    # A bit set may only rise with the number: negative floats count down, and have the highest bit.
    wide = logits.astype(accumulation_dtype(logits))
    word = jnp.uint64 if wide.dtype == jnp.float64 else jnp.uint32
    bits = jax.lax.bitcast_convert_type(jnp.where(wide == 0, jnp.zeros_like(wide), wide), word)
    size = 8 * np.dtype(word).itemsize
    highest = np.array(1 << (size - 1), word)
    order = jnp.where(bits >= highest, ~bits, bits | highest)

    def try_bit(index: Array, threshold: Array) -> Array:
        raised = threshold | (highest >> index.astype(word))
        return jnp.where(enough(order >= raised[..., None]), raised, threshold)

    threshold = jax.lax.fori_loop(0, size, try_bit, jnp.zeros(logits.shape[:-1], word))
    return jnp.where(order >= threshold[..., None], logits, jnp.full_like(logits, -jnp.inf))
