"""What a sweep counts, and in which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from regard.axes import Array
from regard.engine.call.problem import Problem

SIDE = 512  # queries of all heads of a group, and keys, of a tile


@dataclass(frozen=True)
class Plan:
    """What is counted, and in which blocks; static."""

    first: int
    local: int
    top_k: int
    query_block: int  # powers of two, as the tiles are, so that one always divides the other
    key_block: int
    side: int

    @classmethod
    def choose(cls, problem: Problem, grid: int, first: int, local: int, top_k: int) -> Plan:
        """The least powers of two for which the grid holds all blocks."""
        rows, keys = (-(-max(length, 1) // grid) for length in (problem.T, problem.S))
        return cls(first, local, top_k, 1 << (rows - 1).bit_length(), 1 << (keys - 1).bit_length(), SIDE)


class Norm(NamedTuple):
    """Log of the sum of exponentials in two parts: as one number, large scores would cost weights digits."""

    peak: Array  # (*B, T), -inf where a query may attend to nothing
    rest: Array

    def logs(self, scores: Array) -> Array:
        """Logs of the weights; of no keys, -inf."""
        return scores - jnp.where(self.peak == -jnp.inf, jnp.inf, self.peak) - self.rest

    def is_sound(self) -> Array:
        """Where neither is NaN."""
        return ~jnp.isnan(self.peak + self.rest)

    def expand(self) -> Norm:
        """For several scores per query."""
        return Norm(self.peak[..., None], self.rest[..., None])


class PerQuery(NamedTuple):
    """Sums over keys, (R) each or the arrays they go to."""

    total: Array
    first: Array
    distance: Array  # weight times query position - key position
    surprise: Array  # weight times minus its log
    itself: Array
    previous: Array
    local: Array
    same: Array
    induction: Array

    @classmethod
    def like(cls, row: Array) -> PerQuery:
        """The same array for each."""
        return cls(row, row, row, row, row, row, row, row, row)


class PerKey(NamedTuple):
    """Sums and maxima over queries; keys are padded to whole tiles, query blocks to whole tiles."""

    mass: Array  # (*batch, K, keys, G)
    largest: Array  # (*batch, K, keys, G)
    block_mass: Array  # (*batch, K, J, G, I)
    block_max: Array  # (*batch, K, J, G, I)
    diagonals: Array  # (*batch, K, G, distances)


class Tokens(NamedTuple):
    """Ids (batch | 1, ..., length); -1 before the first key stands for none."""

    query: Array
    key: Array
    before_key: Array


class Found(NamedTuple):
    """What a sweep found, with the leading axes of the call."""

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
