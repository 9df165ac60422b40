"""Logits: a bias on them, whether there is a token to choose, and the largest of a row."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Bool, Float
from regard.engine.call.problem import accumulation_dtype


def add_bias(logits: Float[Array, "*B V"], bias: Any) -> Float[Array, "*B V"]:
    """Add a bias `(V,)`, or `(batch, V)` with a row for each along the first axis; None is none."""
    if bias is None:
        return logits
    bias, vocab_size = jnp.asarray(bias, logits.dtype), logits.shape[-1]
    if bias.shape not in ((vocab_size,), (logits.shape[0], vocab_size)):
        rows = (logits.shape[0], vocab_size)
        raise ValueError(f"logit_bias: expected shape {rows[1:]} or {rows}, got {bias.shape}")
    return logits + bias.reshape((*bias.shape[:-1], *(1,) * (logits.ndim - bias.ndim), vocab_size))


def spread(name: str, setting: Any, logits: Float[Array, "*B V"], dtype: Any = None) -> Array:
    """Return a number, or one for each index along the first axis, to compute with logits."""
    numbers = jnp.asarray(setting, dtype or logits.dtype)
    if numbers.ndim and numbers.shape != logits.shape[:1]:
        rows = logits.shape[:1]
        raise ValueError(f"{name}: expected a number, or one per prompt, shape {rows}; got {numbers.shape}")
    return numbers.reshape(numbers.shape + (1,) * (numbers.ndim and logits.ndim - 1))


def are_sound(logits: Float[Array, "*B V"]) -> Bool[Array, "*B"]:
    """Return where there is a token to choose: no logit is NaN or inf, and not all are -inf."""
    return jnp.all(logits < jnp.inf, axis=-1) & jnp.any(logits > -jnp.inf, axis=-1)


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
        return jnp.where(enough(order >= raised), raised, threshold)

    threshold = jax.lax.fori_loop(0, size, try_bit, jnp.zeros((*logits.shape[:-1], 1), word))
    return jnp.where(order >= threshold, logits, jnp.full_like(logits, -jnp.inf))
