"""Frequencies, and sines and cosines of position times frequency, exact at any int32 position."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Float, Int

# An int32 is seven digits of base 32: |position| < 2**31 = 2 * 32**6.
_DIGIT_BITS = 5
_NUM_DIGITS = 7


def frequencies(width: int, base: float) -> np.ndarray:
    """Compute one frequency per pair of columns, in float64."""
    if not base > 0:
        raise ValueError(f"base: expected a positive number, got {base}")
    return float(base) ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def turns(
    position: Int[Array, "*B T"],
    frequencies: np.ndarray,
    dtype: jnp.dtype | type = jnp.float32,
    limit: int = 1 << 31,
) -> tuple[Float[Array, "*B T F"], Float[Array, "*B T F"]]:
    """Compute sine and cosine of position * frequency, exact to `dtype` at any |position| below `limit`.

    The product would lose its fraction in float32 at long positions. The position is split into digits of
    base 32 instead, and the turns of the digits, tabulated in float64, are composed.
    """
    magnitude = jnp.abs(position.astype(jnp.int32)).astype(jnp.uint32)
    sine = jnp.zeros((*position.shape, len(frequencies)), dtype)
    cosine = jnp.ones_like(sine)
    for digit in range(_NUM_DIGITS):
        shift = _DIGIT_BITS * digit
        if limit <= 1 << shift:
            break
        angles = np.arange(1 << _DIGIT_BITS)[:, None] * (2.0**shift) * frequencies[None]
        rows = (magnitude >> jnp.uint32(shift)) & jnp.uint32((1 << _DIGIT_BITS) - 1)
        step_sine, step_cosine = (jnp.asarray(turn, dtype)[rows] for turn in (np.sin(angles), np.cos(angles)))
        sine, cosine = sine * step_cosine + cosine * step_sine, cosine * step_cosine - sine * step_sine
    return jnp.where((position < 0)[..., None], -sine, sine), cosine
