"""Masks of keys alone: prefix, lengths, valid keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.axes import Array, ArrayLike
from regard.masks.algebra import Mask, Take
from regard.masks.bounds import Bounds
from regard.masks.data import booleans, check_rows, check_width, integers, split
from regard.masks.grid import Blocks, Grid, spread
from regard.masks.tile_kinds import tile_kind
from regard.records import record


def prefix(length: ArrayLike) -> Mask:
    """Let every query attend to the keys below `length`, as in a prefix language model.

    keep(q, k) = (k < length)

    Args:
        length: an integer, or an integer array `(batch, ...)` with one length per row; may be traced.

    Returns:
        A mask, usually joined as `prefix(n) | causal()`.

    Raises:
        TypeError: lengths that are not integers.

    Example:
        >>> from regard import masks
        >>> (masks.prefix(2) | masks.causal()).dense(3).astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]

    Reference: Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 3.2.1.
    """
    return Prefix(integers("length", length))


def lengths(key_lengths: ArrayLike) -> Mask:
    """Let every query attend to the first `key_lengths` keys of its row: padding at the end.

    keep(b, q, k) = (k < key_lengths[b])

    Args:
        key_lengths: integer array `(batch, ...)`, aligned with the first leading axes of query, or one
            integer; may be traced. Length 0 is an empty row, which attention answers with 0.

    Returns:
        A mask on key positions.

    Raises:
        TypeError: lengths that are not integers.

    Example:
        >>> from regard import masks
        >>> masks.lengths([1, 3]).dense(1, 3).astype(int).tolist()
        [[[1, 0, 0]], [[1, 1, 1]]]
    """
    return Lengths(integers("key_lengths", key_lengths))


def valid_keys(valid: ArrayLike) -> Mask:
    """Let every query attend to the keys marked valid: padding anywhere.

    keep(b, q, k) = valid[b, k]

    Args:
        valid: boolean or integer array `(batch, ..., S)`, nonzero = a real token, aligned with the first
            leading axes of query; may be traced.

    Returns:
        A mask on keys.

    Raises:
        TypeError: a float array, or a scalar.

    Example:
        >>> from regard import masks
        >>> masks.valid_keys([[1, 1, 0], [0, 1, 1]]).dense(1, 3).astype(int).tolist()
        [[[1, 1, 0]], [[0, 1, 1]]]
    """
    array = booleans("valid", valid)
    if array.ndim == 0:
        raise TypeError("valid: expected an array (..., S) with one entry per key, got a scalar")
    return ValidKeys(array)


class KeysBelow(Mask):
    """Keys below a bound, the same for every query of a row."""

    bound: Any

    @property
    def reads_positions(self) -> bool:
        return False

    @property
    def bounds(self) -> Bounds:
        return Bounds(keys_below=self.bound)

    @property
    def leading_axes(self) -> int:
        return np.ndim(self.bound)

    def keep(self, grid: Grid) -> Array:
        return grid.key_position < spread(jnp.asarray(self.bound), grid.leading_axes + 2)

    def classify(self, blocks: Blocks) -> Array:
        bound = spread(jnp.asarray(self.bound), blocks.leading_axes + 2)
        return tile_kind(empty=blocks.key_position_first >= bound, full=blocks.key_position_last < bound)

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        return dataclasses.replace(self, bound=take(self.bound, 0))  # type: ignore[type-var]

    def slice_grid(self, grid: Grid) -> Mask:
        del grid
        return self

    def check(self, leading: tuple[int, ...], num_queries: int, num_keys: int) -> None:
        check_rows(type(self).__name__.lower(), np.shape(self.bound), leading)


@record
class Prefix(KeysBelow):
    """Keys of a prefix."""

    bound: Any
    maker = staticmethod(prefix)


@record
class Lengths(KeysBelow):
    """Keys before the padding at the end."""

    bound: Any
    maker = staticmethod(lengths)


@record
class ValidKeys(Mask):
    """Keys marked valid."""

    valid: Any
    maker = staticmethod(valid_keys)

    @property
    def reads_positions(self) -> bool:
        return False

    @property
    def leading_axes(self) -> int:
        return np.ndim(self.valid) - 1

    def keep(self, grid: Grid) -> Array:
        return spread(grid.take_columns(jnp.asarray(self.valid)), grid.leading_axes + 2, trailing=1)

    def classify(self, blocks: Blocks) -> Array:
        cells = split(jnp.asarray(self.valid), blocks.key_block)  # (..., K, key_block)
        some, every = (
            spread(reduced, blocks.leading_axes + 2, trailing=1) for reduced in (cells.any(-1), cells.all(-1))
        )
        return tile_kind(empty=~some, full=every)

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        return ValidKeys(take(self.valid, 1))

    def slice_grid(self, grid: Grid) -> Mask:
        return ValidKeys(grid.take_columns(jnp.asarray(self.valid)))

    def check(self, leading: tuple[int, ...], num_queries: int, num_keys: int) -> None:
        check_rows("valid_keys", np.shape(self.valid)[:-1], leading)
        check_width("valid_keys", "key", np.shape(self.valid)[-1], num_keys)
