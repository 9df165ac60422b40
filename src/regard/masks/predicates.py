"""Masks that a function of the two positions decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from regard.axes import Array
from regard.masks.algebra import Mask
from regard.masks.grid import Grid
from regard.records import record, static


def predicate(fn: Callable[[Array, Array], Array]) -> Mask:
    """Let `fn` decide from the two positions.

    keep(q, k) = fn(q, k)

    Args:
        fn: called as `fn(query_position, key_position)` on int32 arrays that broadcast against each other;
            returns a boolean array of their broadcast shape. It is part of the compiled program: define it
            once, because a new function object compiles again.

    Returns:
        A mask on positions.

    Raises:
        TypeError: something that cannot be called, or (when evaluated) an answer that is not boolean.

    Example:
        >>> from regard import masks
        >>> def same_parity(query, key):
        ...     return query % 2 == key % 2
        >>> masks.predicate(same_parity).dense(3).astype(int).tolist()
        [[1, 0, 1], [0, 1, 0], [1, 0, 1]]
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function of (query_position, key_position), got {fn!r}")
    return Predicate(fn)


@record
class Predicate(Mask):
    """Pairs that a function of the positions keeps."""

    fn: Callable[[Array, Array], Array] = static()

    def keep(self, grid: Grid) -> Array:
        return _answer(self.fn(grid.query_position, grid.key_position), grid)

    def closure_convert(self, grid: Grid) -> Mask:
        program = jax.make_jaxpr(self.fn)(grid.query_position, grid.key_position)
        if not program.consts:
            return self
        return HoistedPredicate(tuple(program.consts), program.jaxpr, self.expression())

    def expression(self) -> str:
        return f"predicate({getattr(self.fn, '__qualname__', repr(self.fn))})"


@record
class HoistedPredicate(Mask):
    """A predicate whose function closes over arrays: they are leaves here, and may be traced."""

    constants: tuple[Any, ...]
    program: Any = static()
    text: str = static()

    def keep(self, grid: Grid) -> Array:
        (keep,) = eval_jaxpr(self.program, self.constants, grid.query_position, grid.key_position)
        return _answer(keep, grid)

    def slice_grid(self, grid: Grid) -> Mask:
        del grid
        return self

    def expression(self) -> str:
        return self.text


def _answer(found: Any, grid: Grid) -> Array:
    """Return a function's answer on the grid's positions, checked: booleans, one per cell."""
    keep = jnp.asarray(found)
    if keep.dtype != bool:
        raise TypeError(f"predicate: expected fn to return booleans (True = may attend), got {keep.dtype}")
    shape = np.broadcast_shapes(grid.query_position.shape, grid.key_position.shape)
    return jnp.broadcast_to(keep, shape)
