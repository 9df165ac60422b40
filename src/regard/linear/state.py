"""The state of linear attention: its memory of the keys and values seen so far."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from regard.axes import Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The memory that a sequence leaves behind, of a size that does not depend on the length.

    memory = sum_s key_s value_s^T, where nothing decays and nothing is erased

    `attend(..., return_state=True)` and `step` make one; pass it as `initial`, or to `step`, to go on. It is
    a pytree of float32 arrays, float64 for float64 inputs.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import linear
        >>> x = jnp.eye(2)
        >>> _, state = linear.attend(x, x, x, return_state=True)
        >>> state.memory.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """

    memory: Array
    """`(*B, K, D, E)`, one matrix per key head; no head axis where key has none."""

    key_sum: Array | None = None
    """`(*B, K, D)`, the decayed sum of keys that `normalise` divides by; None without it."""
