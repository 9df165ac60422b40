"""Accumulators of a sweep over the weights, and the blocks and bins of distances that they count in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem

# Kinds of keys that weight is counted on; those after "local" are known where tokens are.
PATTERNS = ("first", "self", "previous", "next", "local", "duplicate", "induction", "delimiter")
SIDE = 512  # queries of all heads of a group, and keys, of a tile
NUM_BINS = 63  # of distances; their sizes double
NEAREST = 31  # the bin of distance 0


def choose_block(length: int, grid: int) -> int:
    """Return the smallest power of two that divides a length into no more blocks than the grid has."""
    return 1 << (-(-max(length, 1) // grid) - 1).bit_length()


@dataclass(frozen=True)
class SweepConfig:
    """The static settings of a sweep: what is counted, and in blocks of which size."""

    first: int
    local: int
    top_k: int
    query_block: int  # powers of two, as the tiles are, so that one always divides the other
    key_block: int
    side: int

    @classmethod
    def choose(
        cls, problem: Problem, grid: int, first: int | None, local: int | None, top_k: int
    ) -> SweepConfig:
        """Choose the blocks of the grid; few keys are first or local."""
        first = min(max(problem.S // 32, 1), 4) if first is None else first
        local = min(max(problem.S // 8, 2), 16) if local is None else local
        return cls(first, local, top_k, choose_block(problem.T, grid), choose_block(problem.S, grid), SIDE)


class Norm(NamedTuple):
    """Log of the sum of exponentials in two parts: as one number, large scores would cost weights digits."""

    peak: Array  # (*B, T), -inf where a query may attend to nothing
    rest: Array

    def logs(self, scores: Array) -> Array:
        """Compute the logs of the weights; -inf in a row without keys."""
        return scores - jnp.where(self.peak == -jnp.inf, jnp.inf, self.peak) - self.rest

    def is_nan(self) -> Array:
        """Mark the rows that hold NaN."""
        return jnp.isnan(self.peak + self.rest)


class PerQuery(NamedTuple):
    """Sums over keys: (R) each in a row block, (*B, T) each of a call."""

    total: Array
    distance: Array  # weight times query position - key position
    entropy_sum: Array  # weight times minus its log
    mass: tuple[Array, ...]  # weight on the keys of each of `PATTERNS` that is counted
    keys: tuple[Array, ...]  # how many they are, among those that the query may attend to

    @classmethod
    def like(cls, row: Array, tokens: Tokens | None) -> PerQuery:
        """Use the same array for each sum."""
        patterns = (row,) * (len(PATTERNS) if tokens is not None else PATTERNS.index("duplicate"))
        return cls(row, row, row, patterns, patterns)


class PerKey(NamedTuple):
    """Sums and maxima over queries; keys are padded to whole tiles, query blocks to whole tiles."""

    mass: Array  # (*batch, K, keys, G)
    largest: Array  # (*batch, K, keys, G)
    block_mass: Array  # (*batch, K, J, G, I)
    block_max: Array  # (*batch, K, J, G, I)
    diagonals: Array  # (*batch, K, G, distances)


class Tokens(NamedTuple):
    """Token ids (batch | 1, ..., length) of queries, keys, and the keys before these."""

    query: Array
    key: Array
    before_key: Array
    delimits: Array  # 1 for keys that hold a delimiter


class SweepResults(NamedTuple):
    """The results of a sweep, with the leading axes of the call."""

    norm: Norm  # (*B, T)
    rows: PerQuery  # (*B, T)
    keys: Array  # (*B, T) int32
    top_scores: Array  # (*B, T, k)
    top_keys: Array  # (*B, T, k)
    key_mass: Array  # (*B, S)
    key_max: Array  # (*B, S)
    block_mass: Array  # (*B, I, J) sums, not means
    block_max: Array  # (*B, I, J)
    distance_mass: Array  # (*B, 63) sums


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
