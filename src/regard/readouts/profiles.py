"""Weight against distance: bins of distances that double, and sums along diagonals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array

NUM_BINS = 63
NEAREST = 31  # the bin of distance 0


def bin_of(distance: Array) -> Array:
    """Find the bin of a distance: 31 at 0, 31 + n for 2^(n-1) .. 2^n - 1, 31 - n for their negatives."""
    size = np.int32(32) - jax.lax.clz(jnp.abs(distance))
    return np.int32(NEAREST) + jnp.sign(distance) * size


def sum_diagonals(tile: Array) -> Array:
    """Sum diagonals, (C, G, R) -> (G, C + R + 1): entry C + d sums the cells (c, r) with r - c = d."""
    # Rows of the tile one after the other, cut into rows one longer than they are, move by one a row.
    columns, group, rows = tile.shape
    width = columns + rows
    laid = jnp.pad(jnp.moveaxis(tile, 1, 0), ((0, 0), (0, 0), (columns, 0))).reshape((group, -1))
    laid = jnp.pad(laid, ((0, 0), (0, columns)))
    return laid.reshape((group, columns, width + 1)).sum(1)


def sum_bins(diagonals: Array, first: Any) -> Array:
    """Sum diagonals (..., L) into bins (..., 63); entry x lies at distance first + x, `first` is (...)."""
    steps = jax.lax.broadcasted_iota(jnp.int32, (*(1,) * first.ndim, diagonals.shape[-1]), first.ndim)
    bins = bin_of(first[..., None] + steps)

    def total(number: Array) -> Array:
        return jnp.where(bins == number, diagonals, 0).sum(-1)

    return jnp.moveaxis(jax.lax.map(total, jnp.arange(NUM_BINS, dtype=jnp.int32)), 0, -1)
