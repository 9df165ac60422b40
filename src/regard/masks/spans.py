"""Runs of consecutive rows or columns, which are read, taken and written as slices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array

Update = Callable[[Array, Any, Array], Array]  # of an array, at a start, with a tile


@dataclass(frozen=True)
class Span:
    """Consecutive indices; data that has one entry per index can be sliced instead of gathered."""

    start: Any  # None: from the first to the last, so nothing needs to be taken out
    size: int

    @property
    def members(self) -> Array:
        index = jnp.arange(self.size, dtype=jnp.int32)
        return index if self.start is None else self.start + index

    @property
    def length(self) -> int:
        return self.size

    @property
    def first(self) -> Any:
        return 0 if self.start is None else self.start

    def read(self, slice_at: Callable[[Any], Array], axis: int) -> Array:
        """Return what `slice_at(start)` reads."""
        return slice_at(self.first)

    def write(self, array: Array, tile: Array, update: Update, axis: int) -> Array:
        """Return `update(array, start, tile)`."""
        return update(array, self.first, tile)

    def take(self, data: Array, axis: int) -> Array:
        """Take the entries at these indices."""
        if self.start is None:
            return data
        return jax.lax.dynamic_slice_in_dim(data, self.start, self.size, axis, allow_negative_indices=False)


@dataclass(frozen=True)
class Pieces:
    """Several runs of consecutive indices, all of one length, one after the other."""

    starts: Array  # (pieces,)
    length: int

    @property
    def size(self) -> int:
        return self.starts.size * self.length

    @property
    def first(self) -> Any:
        return self.starts[0]

    @property
    def members(self) -> Array:
        return (self.starts[:, None] + jnp.arange(self.length, dtype=jnp.int32)[None]).reshape(-1)

    def read(self, slice_at: Callable[[Any], Array], axis: int) -> Array:
        """Join what `slice_at(start)` reads for each run along `axis`, a negative number."""
        joined = jnp.moveaxis(jax.vmap(slice_at)(self.starts), 0, axis - 1)
        return joined.reshape((*joined.shape[: axis - 1], self.size, *joined.shape[axis:][1:]))

    def write(self, array: Array, tile: Array, update: Update, axis: int) -> Array:
        """Update an array with each run's part of a tile along `axis`, one after the other."""

        def step(number: Any, array: Array) -> Array:
            first = number * np.int32(self.length)
            part = jax.lax.dynamic_slice_in_dim(tile, first, self.length, axis, allow_negative_indices=False)
            return update(array, self.starts[number], part)

        return jax.lax.fori_loop(0, self.starts.size, step, array)

    def take(self, data: Array, axis: int) -> Array:
        """Take the entries at these indices."""
        axis = axis if axis < 0 else axis - data.ndim

        def slice_at(start: Any) -> Array:
            return jax.lax.dynamic_slice_in_dim(data, start, self.length, axis, allow_negative_indices=False)

        return self.read(slice_at, axis)


Run = Span | Pieces
