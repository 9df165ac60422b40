"""Masks with arrays: one entry per row, query or key, or a whole mask."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import keep_array
from regard.axes import Array, ArrayLike
from regard.masks.data import check_boolean, check_broadcast, check_rows, check_width, split
from regard.masks.grid import Blocks, Grid
from regard.masks.mask import Mask, Take
from regard.masks.tile_kinds import tile_kind
from regard.records import record


class Stored(Mask):
    """A mask with arrays, whose leading axes are aligned with the first leading axes of query.

    `ends` says of each, by a word for each axis that is not leading, what that has an entry for: "query",
    "key", or something of the mask's own.
    """

    ends: ClassVar[Mapping[str, str]]
    reads_positions = False

    @property
    def leading_axes(self) -> int:
        return max(np.ndim(getattr(self, name)) - len(end.split()) for name, end in self.ends.items())

    def _map(self, change: Callable[[Any, str], Any]) -> Mask:
        changed = {name: change(getattr(self, name), end) for name, end in self.ends.items()}
        return dataclasses.replace(self, **changed)  # type: ignore[type-var]

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        return self._map(lambda data, end: take(data, len(end.split())))

    def slice_grid(self, grid: Grid) -> Mask:
        takes = {"query": grid.take_rows, "key": grid.take_columns}
        return self._map(lambda data, end: takes[end](jnp.asarray(data)) if end in takes else data)

    def check(self, leading: tuple[int, ...] | None, num_queries: int, num_keys: int) -> None:
        maker = getattr(self.maker, "__name__", "mask")
        for name, end in self.ends.items():
            shape = np.shape(getattr(self, name))
            title = f"{maker} {name}" if len(self.ends) > 1 else maker
            check_rows(title, shape[:-1] if end else shape, leading)
            if end in ("query", "key"):
                check_width(title, end, shape[-1], num_queries if end == "query" else num_keys)


def find_listed(listed: Array, numbers: Array) -> Array:
    """Return which of the numbers (..., N) each row (..., C) lists, without a scatter: (..., N)."""
    if listed.shape[-1] == 0:
        return jnp.zeros((*listed.shape[:-1], numbers.shape[-1]), bool)

    def equals(slot: Any) -> Array:
        return jax.lax.dynamic_slice_in_dim(listed, slot, 1, -1) == numbers

    first = equals(np.int32(0))
    return jax.lax.fori_loop(1, listed.shape[-1], lambda slot, keep: keep | equals(slot), first)


def from_array(array: ArrayLike) -> Mask:
    """Wrap a stored array: True (or nonzero) = may attend.

    keep(..., q, k) = array[..., q, k]

    Args:
        array: boolean or integer array that broadcasts to `(*B, T, S)` by NumPy's rules (aligned at the
            right); may be traced. For other conventions see `from_drop`, `from_torch_mha`.

    Returns:
        A mask that does not read positions.

    Raises:
        TypeError: a float array (pass additive masks as `bias=`), or fewer than two axes.

    Example:
        >>> from regard import masks
        >>> masks.from_array([[1, 0], [1, 1]]) & masks.causal()
        from_array([[True, False], [True, True]]) & causal()
    """
    keep = check_boolean("array", array)
    if keep.ndim < 2:
        raise TypeError(
            f"array: expected at least the axes (T, S), got shape {tuple(keep.shape)}; for one entry per key"
            " use masks.valid_keys"
        )
    return FromArray(keep_array(keep))


@record
class FromArray(Mask):
    """Pairs that a stored array says."""

    array: Any
    maker = staticmethod(from_array)
    reads_positions = False

    @property
    def leading_axes(self) -> int:
        return np.ndim(self.array) - 2

    @property
    def reads_cells(self) -> bool:
        return {0, 1}.isdisjoint(np.shape(self.array)[-2:])

    def _array_with_axes(self, leading_axes: int) -> Array:
        missing = leading_axes + 2 - np.ndim(self.array)
        if not missing:
            return self.array
        return jnp.asarray(self.array).reshape((*(1,) * missing, *np.shape(self.array)))

    def keep(self, grid: Grid) -> Array:
        array = self._array_with_axes(grid.leading_axes)
        if array.shape[-2] != 1:
            array = grid.take_rows(array, -2)
        return array if array.shape[-1] == 1 else grid.take_columns(array)

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        return FromArray(take(self._array_with_axes(leading_axes), 2))

    def slice_grid(self, grid: Grid) -> Mask:
        return FromArray(self.keep(grid))

    def classify(self, blocks: Blocks) -> Array:
        # One axis at a time, rows first: whole rows combine faster than entries of a row. The barrier keeps
        # XLA from evaluating a constant mask while it compiles, which takes half a minute at 4096 x 4096.
        some = every = jax.lax.optimization_barrier(self._array_with_axes(blocks.leading_axes))
        for axis, block in ((-2, blocks.query_block), (-1, blocks.key_block)):
            if some.shape[axis] > 1:
                some, every = split(some, block, axis).any(axis), split(every, block, axis).all(axis)
        return tile_kind(empty=~some, full=every)

    def check(self, leading: tuple[int, ...] | None, num_queries: int, num_keys: int) -> None:
        shape = np.shape(self.array)
        leading = shape[:-2] if leading is None else leading
        check_broadcast("mask", shape, (*leading, num_queries, num_keys), wrapped=True)
