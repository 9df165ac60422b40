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

import jax
import jax.numpy as jnp
import jax.typing
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
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


def explicit_sharding(array: Any) -> NamedSharding | None:
    """Return how an array is divided if explicit axes divide it; outside jit, with the mesh's devices."""
    sharding = jax.typeof(array).sharding if isinstance(array, jax.Array) else None
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types or not any(sharding.spec):
        return None
    placed: Any = sharding if isinstance(array, Tracer) else array.sharding
    return NamedSharding(placed.mesh, sharding.spec)


def take_rows(table: Array, rows: Array) -> Array:
    """Return table[rows], divided as `rows` is where explicit axes divide it, with NaN for no row there."""
    sharding, columns = explicit_sharding(rows), explicit_sharding(table)
    if sharding is None:
        return table[rows]
    widths = (None,) * (table.ndim - 1) if columns is None else columns.spec[1:]
    divided = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *widths))
    return table.at[rows].get(mode="fill", out_sharding=divided)
