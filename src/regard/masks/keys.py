"""Masks of keys alone: prefix, lengths, valid keys."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from regard.arguments import integers, keep_array
from regard.axes import Array, ArrayLike
from regard.masks.bounds import Bounds
from regard.masks.data import check_boolean, split
from regard.masks.grid import Blocks, Grid, spread
from regard.masks.mask import Mask
from regard.masks.stored_masks import Stored
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
        ValueError: a negative number or NumPy array; JAX arrays are not looked at, and keep nothing there.

    Example:
        >>> from regard import masks
        >>> (masks.prefix(2) | masks.causal()).dense(3).astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]

    Reference: Raffel et al., "Exploring the Limits of Transfer Learning", 2020, section 3.2.1.
    """
    return Prefix(keep_array(integers("length", length, least=0, clamp=True)))


def lengths(key_lengths: ArrayLike) -> Mask:
    """Let every query attend to the first `key_lengths` keys of its row: padding at the end.

    keep(b, q, k) = (k < key_lengths[b])

    Here k is a position, as everywhere: where keys have `key_positions`, mark padding with `valid_keys`.

    Args:
        key_lengths: integer array `(batch, ...)`, aligned with the first leading axes of query, or one
            integer; may be traced. Length 0 is an empty row, which attention answers with 0.

    Returns:
        A mask on key positions.

    Raises:
        TypeError, ValueError: lengths that are no integers, or negative, as in `prefix`.

    Example:
        >>> from regard import masks
        >>> masks.lengths([1, 3]).dense(1, 3).astype(int).tolist()
        [[[1, 0, 0]], [[1, 1, 1]]]
    """
    return Lengths(keep_array(integers("key_lengths", key_lengths, least=0, clamp=True)))


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
    array = check_boolean("valid", valid)
    if array.ndim == 0:
        raise TypeError("valid: expected an array (..., S) with one entry per key, got a scalar")
    return ValidKeys(keep_array(array))


class KeysBelow(Stored):
    """Keys below a bound, the same for every query of a row."""

    bound: Any
    ends: ClassVar = {"bound": ""}

    @property
    def bounds(self) -> Bounds:
        return Bounds(keys_below=self.bound)

    def keep(self, grid: Grid) -> Array:
        return grid.key_position < spread(jnp.asarray(self.bound), grid.leading_axes + 2)

    def classify(self, blocks: Blocks) -> Array:
        bound = spread(jnp.asarray(self.bound), blocks.leading_axes + 2)
        first, last = blocks.key_ends
        return tile_kind(empty=first >= bound, full=last < bound)


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
class ValidKeys(Stored):
    """Keys marked valid."""

    valid: Any
    ends: ClassVar = {"valid": "key"}
    maker = staticmethod(valid_keys)

    def keep(self, grid: Grid) -> Array:
        return spread(grid.take_columns(jnp.asarray(self.valid)), grid.leading_axes + 2, trailing=1)

    def classify(self, blocks: Blocks) -> Array:
        cells = split(jnp.asarray(self.valid), blocks.key_block)  # (..., K, key_block)
        some = spread(cells.any(-1), blocks.leading_axes + 2, trailing=1)
        every = spread(cells.all(-1), blocks.leading_axes + 2, trailing=1)
        return tile_kind(empty=~some, full=every)
