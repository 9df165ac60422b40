"""Padding at the end of a row, said by `lengths`: what it holds never reaches a result or a gradient."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from regard import masks
from regard.axes import Array, Bool
from regard.masks.grid import is_concrete


def check_lengths(name: str, lengths: Any, leading: tuple[int, ...], num_positions: int) -> Any:
    """Lengths as an integer array, one per row, within the row where that can be known."""
    if lengths is None:
        return None
    lengths = lengths if hasattr(lengths, "dtype") else np.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise TypeError(f"{name}: expected integers, got {lengths.dtype}")
    if lengths.shape != leading:
        raise ValueError(f"{name}: expected one length per row, shape {leading}, got {tuple(lengths.shape)}")
    if not is_concrete(lengths):
        return lengths.astype(jnp.int32)
    # NumPy, because inside a trace arithmetic on a known jax array gives an unknown one.
    lengths = np.asarray(lengths)
    if lengths.size:
        low, high = int(lengths.min()), int(lengths.max())
        if low < 0 or high > num_positions:
            raise ValueError(
                f"{name}: expected lengths in 0..{num_positions}, the length of the input; got {low}..{high}"
            )
    return lengths.astype(np.int32)


def mark_valid(lengths: Any, num_positions: int) -> Bool[Array, "*B T"]:
    """True at the positions below each row's length."""
    lengths = jnp.asarray(lengths, jnp.int32)
    index = jnp.arange(num_positions, dtype=jnp.int32)
    return index.reshape((1,) * lengths.ndim + (-1,)) < lengths[..., None]


def blank_padding(x: Array, lengths: Any) -> Array:
    """x `(*B, T, M)` with zeros in the padding; where, not times, so that NaN goes too."""
    if lengths is None:
        return x
    return jnp.where(mark_valid(lengths, x.shape[-2])[..., None], x, jnp.zeros_like(x))


def mask_padding(lengths: Any, mask: masks.Mask | None = None) -> masks.Mask | None:
    """`mask`, and no keys in the padding."""
    if lengths is None:
        return mask
    # One unbatched example runs as a batch of 1.
    valid = masks.lengths(jnp.atleast_1d(jnp.asarray(lengths, jnp.int32)))
    return valid if mask is None else mask & valid
