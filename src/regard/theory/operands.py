"""Operands of theory: floating-point arrays of one dtype, and masks in full shape."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from regard.arguments import as_array
from regard.axes import Array, broadcast


def floating(meaning: str = "(...)", /, **arguments: Any) -> list[Array]:
    """Convert arrays to their common dtype, float32 at least; each has the axes of `meaning` at least."""
    arrays = {name: as_array(name, "numbers", jnp.asarray, argument) for name, argument in arguments.items()}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name}: expected a floating-point array, got {array.dtype}; convert it with .astype(float)"
            )
        if array.ndim < meaning.count(","):
            raise ValueError(f"{name}: expected {meaning}, got an array of shape {array.shape}")
    dtype = np.dtype(np.float32)
    for array in arrays.values():
        dtype = np.promote_types(dtype, array.dtype)
    return [array.astype(dtype) for array in arrays.values()]


def above_zero(name: str, numbers: Any, dtype: Any) -> Array:
    """Convert numbers above 0 to this dtype; traced ones are taken as they are."""
    array = as_array(name, "numbers", jnp.asarray, numbers)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected numbers, got {array.dtype}")
    if not isinstance(array, Tracer) and not (array > 0).all():
        raise ValueError(f"{name}: expected more than 0, got {array}")
    return array.astype(dtype)


def one_above_zero(name: str, number: Any, dtype: Any) -> Array:
    """Convert one number above 0 to this dtype, as `above_zero`."""
    array = above_zero(name, number, dtype)
    if array.ndim:
        raise ValueError(f"{name}: expected one number, got shape {array.shape}")
    return array


def rows(name: str, numbers: Any, like: Array) -> Array:
    """Shape a number above 0, or one per row, to be combined with `like`: (..., 1)."""
    return broadcast(name, above_zero(name, numbers, like.dtype), like.shape[:-1])[..., None]


def kept(keep: Any, shape: tuple[int, ...]) -> Array:
    """Broadcast the mask to the scores' shape; None keeps all."""
    if keep is None:
        return jnp.ones(shape, bool)
    array = as_array("keep", "booleans", jnp.asarray, keep)
    if array.dtype != bool:
        raise TypeError(f"keep: expected booleans, True = may attend, got {array.dtype}; write keep != 0")
    return broadcast("keep", array, shape)


def diagonal(shape: tuple[int, ...]) -> Array:
    """Mark the diagonal of square matrices `(..., N, N)`."""
    return jnp.broadcast_to(jnp.eye(shape[-1], dtype=bool), shape)


def reduce_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Sum the axes along which an array of this shape was broadcast."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 != array.shape[axis])
    return array.sum(axes, keepdims=True) if axes else array
