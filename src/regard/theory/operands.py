"""What theory computes with: floating-point arrays of one dtype, and masks in full shape."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.axes import Array


def floating(**arguments: Any) -> list[Array]:
    """The arguments in their common dtype, float32 at least."""
    arrays = {name: jnp.asarray(given) for name, given in arguments.items()}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(
                f"{name}: expected a floating-point array, got {array.dtype}; convert it with .astype(float)"
            )
    dtype = np.dtype(np.float32)
    for array in arrays.values():
        dtype = np.promote_types(dtype, array.dtype)
    return [array.astype(dtype) for array in arrays.values()]


def check_axes(count: int, meaning: str, **arrays: Array) -> None:
    """At least `count` axes in each array."""
    for name, array in arrays.items():
        if array.ndim < count:
            raise ValueError(f"{name}: expected {meaning}, got an array of shape {array.shape}")


def rows(name: str, given: Any, like: Array) -> Array:
    """A number, or one per row, to be combined with `like`: shape (..., 1)."""
    array = jnp.asarray(given)
    if not jnp.issubdtype(array.dtype, jnp.floating) and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: expected numbers, got {array.dtype}")
    return broadcast(name, array.astype(like.dtype), like.shape[:-1])[..., None]


def broadcast(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    """The array in this shape, or an error that names it."""
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{name}: expected an array that broadcasts to {tuple(shape)}, got shape {array.shape}"
        ) from None


def kept(keep: Any, shape: tuple[int, ...]) -> Array:
    """The mask in the scores' shape; None keeps all."""
    if keep is None:
        return jnp.ones(shape, bool)
    array = jnp.asarray(keep)
    if array.dtype != bool:
        raise TypeError(f"keep: expected booleans, True = may attend, got {array.dtype}; write keep != 0")
    return broadcast("keep", array, shape)


def reduce_to(array: Array, shape: tuple[int, ...]) -> Array:
    """Sum the axes along which an array of this shape was broadcast."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 != array.shape[axis])
    return array.sum(axes, keepdims=True) if axes else array
