"""Zig-zag order: every device holds one chunk from the front of the sequence and one from its back."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST, as_array, whole_number
from regard.axes import Array, ArrayLike
from regard.engine.dispatch.explicit_axes import run_with_specs


def to_zigzag(array: ArrayLike, devices: int, *, axis: int = -2) -> Array:
    """Put tokens in zig-zag order, which balances causal work over a ring of devices.

    The sequence is cut into 2 n chunks of ceil(length / 2 n); device i gets chunks i and 2 n - 1 - i.

    Args:
        array: any array with a sequence axis; what goes through a model position by position, positions and
            targets included, can stay in this order from one end to the other.
        devices: n, how many devices the keys travel around, at least 1.
        axis: the sequence axis; the default is that of query, key and value.

    Returns:
        The same tokens, in zig-zag order.

    Raises:
        TypeError, ValueError: fewer than one device, an axis that the array does not have, or no integers.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import parallel
        >>> parallel.to_zigzag(jnp.arange(8), 2, axis=0).tolist()
        [0, 1, 6, 7, 2, 3, 4, 5]

    Reference: the order that Llama 3 was trained in: Dubey et al., 2024, section 3.3.2.
    """
    return _take(array, devices, axis, back=False)


def from_zigzag(array: ArrayLike, devices: int, *, axis: int = -2) -> Array:
    """Put tokens back in the order of the sequence: the inverse of `to_zigzag`.

    Args:
        array: what `to_zigzag` gave, or came of it token by token.
        devices, axis: as in `to_zigzag`.

    Returns:
        The same tokens, in the order of the sequence.

    Raises:
        TypeError, ValueError: as `to_zigzag`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import parallel
        >>> parallel.from_zigzag(jnp.asarray([0, 1, 6, 7, 2, 3, 4, 5]), 2, axis=0).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return _take(array, devices, axis, back=True)


def _take(array: Any, devices: int, axis: int, *, back: bool) -> Array:
    devices, array = whole_number("devices", devices, 1), as_array("array", "numbers", jnp.asarray, array)
    rank = array.ndim
    if not -rank <= whole_number("axis", axis, -LARGEST) < rank:
        raise ValueError(f"axis: expected a sequence axis, of an array of shape {array.shape}; got {axis!r}")
    reorder = partial(_reorder, devices=devices, axis=axis % rank, back=back)
    return run_with_specs(reorder, (array,), jax.typeof(array).sharding.spec)


def _reorder(array: Array, devices: int, axis: int, back: bool) -> Array:
    length = array.shape[axis]
    size = max(-(-length // (2 * devices)), 1)
    first = np.arange(devices)
    chunks = np.stack([first, 2 * devices - 1 - first], -1).reshape(-1)  # as devices hold them
    if length == 2 * devices * size:
        order = np.argsort(chunks) if back else chunks
        cut = array.reshape((*array.shape[:axis], 2 * devices, size, *array.shape[axis + 1 :]))
        parts = [cut[(*(slice(None),) * axis, slice(chunk, chunk + 1))] for chunk in order.tolist()]
        return jnp.concatenate(parts, axis).reshape(array.shape)
    # The last chunks are short or missing.
    order = (chunks[:, None] * size + np.arange(size)).reshape(-1)
    order = order[order < length]
    order = np.argsort(order) if back else order
    return jnp.take(array, jnp.asarray(order.astype(np.int32)), axis)
