"""Padding at the ends of rows, given by `lengths`, which reaches no result; `prompts` pads."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import regard.masks as masks
from regard.arguments import integers
from regard.axes import Array, Bool, Size
from regard.engine.dispatch.placement import demand_whole, divided_here, place_here
from regard.masks.grid import is_concrete


def check_lengths(name: str, lengths: Any, leading: tuple[Size, ...], num_positions: Size) -> Any:
    """Check for one integer length per row, within the row where values are known, and return them."""
    if lengths is None:
        return None
    lengths = integers(name, lengths, clamp=True)
    if lengths.shape != leading:
        raise ValueError(f"{name}: expected one length per row, shape {leading}, got {tuple(lengths.shape)}")
    if not is_concrete(lengths) or not isinstance(num_positions, int) or divided_here():
        return lengths
    # NumPy, because inside a trace arithmetic on a known jax array gives an unknown one.
    lengths = np.asarray(lengths)
    check_range(name, "lengths", lengths, num_positions, "the length of the input")
    return lengths


def check_range(name: str, kind: str, values: Any, most: int, reason: str, lengths: Any = None) -> None:
    """Raise ValueError where known values, padding aside, are not in 0..most, for the reason given."""
    values = np.asarray(values)
    outside = (values < 0) | (values > most)
    if lengths is not None:
        outside &= np.arange(values.shape[-1]) < np.asarray(lengths)[..., None]
    if outside.any():
        index = f" at {np.argwhere(outside)[0].tolist()}" * bool(values.ndim)
        more = f" and {outside.sum() - 1} more" * bool(outside.sum() > 1)
        wrong = f"{values[outside][0]}{index}{more}"
        raise ValueError(f"{name}: expected {kind} in 0..{most} ({reason}), got {wrong}")


def mark_valid(lengths: Any, num_positions: Size) -> Bool[Array, "*B T"]:
    """Mark the positions below each row's length."""
    lengths = jnp.asarray(lengths, jnp.int32)
    index = place_here(jnp.arange(num_positions, dtype=jnp.int32), num_positions)
    return index.reshape((1,) * lengths.ndim + (-1,)) < lengths[..., None]


def blank_padding(x: Array, lengths: Any) -> Array:
    """Set the padding of x `(*B, T, M)` to zero, NaN included."""
    if lengths is None:
        return x
    return jnp.where(mark_valid(lengths, x.shape[-2])[..., None], x, jnp.zeros_like(x))


def mask_padding(
    lengths: Any, mask: masks.Mask | None = None, num_keys: Size | None = None
) -> masks.Mask | None:
    """Restrict a mask, or None for all, to keys outside the padding.

    With `num_keys` keys are counted by row, as where they have positions of their own; else by position.
    """
    if lengths is None:
        return mask
    if num_keys is not None:
        demand_whole("positions, beside lengths")
    # One unbatched example runs as a batch of 1.
    lengths = jnp.atleast_1d(jnp.asarray(lengths, jnp.int32))
    valid = masks.lengths(lengths) if num_keys is None else masks.valid_keys(mark_valid(lengths, num_keys))
    return valid if mask is None else mask & valid
