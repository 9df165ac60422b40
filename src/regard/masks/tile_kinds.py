"""Classify tiles by what a mask keeps of them."""

from __future__ import annotations

import enum

import jax.numpy as jnp

from regard.axes import Array


class TileKind(enum.IntEnum):
    """Say what a mask keeps of a tile. The order makes `&` a minimum, `|` a maximum and `~` a reflection."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


def tile_kind(empty: Array, full: Array) -> Array:
    """TileKind codes from two conditions; neither means PARTIAL, which is always a safe answer."""
    code = jnp.where(full, jnp.int8(TileKind.FULL), jnp.int8(TileKind.PARTIAL))
    return jnp.where(empty, jnp.int8(TileKind.EMPTY), code)
