"""The letters that name axes, and the jaxtyping aliases built from them.

One letter, one meaning, in every signature and docstring of the package:

    *B  leading axes, batch first and heads last     D  head width of query and key
    T   queries                                      E  head width of value and output
    S   keys                                         M  model width (`d_model`)
    H   query heads                                  F  feed-forward width (`d_ff`)
    K   key heads                                    V  vocabulary
    G   query heads per key head, H = K * G          L  layers
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import jax.typing
import numpy as np
from jaxtyping import Array, Bool, Float, Int  # noqa: F401 (for all modules)

# What a caller may pass where an array is expected: jax, NumPy, numbers, nested lists.
ArrayLike: TypeAlias = jax.typing.ArrayLike | Sequence[Any]

# A number of rows, or a symbol for one, in programs that are exported for every number (`jax.export`).
Size: TypeAlias = Any

Hidden: TypeAlias = Float[Array, "*B T M"]


def broadcast_shapes(*shapes: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return the shape that shapes broadcast to, of which any size may be symbolic."""
    has_symbols = not all(isinstance(size, int) for shape in shapes for size in shape)
    return np.broadcast_shapes(*shapes) if not has_symbols else jnp.broadcast_shapes(*shapes)


def broadcast_named(**shapes: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return what the leading axes of these arguments broadcast to, or raise an error that names them."""
    try:
        return broadcast_shapes(*shapes.values())
    except ValueError:
        got = ", ".join(map(str, shapes.values()))
        raise ValueError(f"{', '.join(shapes)}: expected leading axes that broadcast, got {got}") from None


def broadcast(name: str, array: Array, shape: tuple[Size, ...]) -> Array:
    """Broadcast the array to this shape, or raise an error that names it."""
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(
            f"{name}: expected an array that broadcasts to {tuple(shape)}, got shape {array.shape}"
        ) from None
