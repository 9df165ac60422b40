"""Readout: statistics of the weights of one call, and levels of blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.records import record, static


@record
class Level:
    """Blocks of the T x S weights; the last one of each axis may hold fewer rows or keys.

    mass_ij = mean_t sum_s p_ts over keys s of block j and those rows t of block i that have keys
    max_ij = max over the cells of the block of p_ts

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> x = jnp.eye(4)
        >>> level = readouts.read(x, x, mask=masks.causal(), scale=0.0).level(1)
        >>> [[f"{mass:.3f}" for mass in row] for row in level.mass]
        [['1.000', '0.000'], ['0.583', '0.417']]
        >>> [[f"{largest:.3f}" for largest in row] for row in level.max]
        [['1.000', '0.000'], ['0.333', '0.333']]
    """

    mass: Array
    """(*B, I, J) weight that an average row of block i gives to block j."""
    max: Array
    """(*B, I, J) largest weight in the block."""
    rows: Array
    """(*B, I) rows of block i that may attend to something, int32; the others count as nothing."""
    query_block: int = static()
    """Rows per block."""
    key_block: int = static()
    """Keys per block."""

    def coarser(self) -> Level:
        """Merge two by two blocks: rows weighted by how many there are, keys summed; the largest maximum."""
        counts = self.rows.astype(self.mass.dtype)
        rows = _join(self.rows, -1, jnp.sum)
        sums = _join(_join(self.mass * counts[..., None], -1, jnp.sum), -2, jnp.sum)
        largest = _join(_join(self.max, -1, jnp.max), -2, jnp.max)
        mass = sums / jnp.maximum(rows, 1).astype(sums.dtype)[..., None]
        return Level(mass, largest, rows, 2 * self.query_block, 2 * self.key_block)


@partial(jax.jit, static_argnames=("number",))
def _coarsen(level: Level, number: int) -> Level:
    for _ in range(number):
        level = level.coarser()
    return level


def _join(array: Array, axis: int, reduce: Callable[..., Array]) -> Array:
    """Reduce neighbours along an axis to one; an odd one out meets a 0."""
    axis = axis % array.ndim
    array = jnp.pad(array, [(0, size % 2 if a == axis else 0) for a, size in enumerate(array.shape)])
    halved = (*array.shape[:axis], array.shape[axis] // 2, 2, *array.shape[axis + 1 :])
    return reduce(array.reshape(halved), axis + 1)


@record
class Readout:
    """Statistics of the weights p_ts of one call, before dropout, in float32 at least.

    Rows that may attend to nothing have `keys` 0: their numbers are 0 (with sinks, `sink_mass` is 1), their
    top keys -1, and they take no part in the means over rows.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> readout = readouts.read(jnp.eye(5), jnp.eye(5), mask=masks.causal(), top_k=2)
        >>> readout.argmax.tolist(), readout.top_keys[4].tolist(), readout.keys.tolist()
        ([0, 1, 2, 3, 4], [4, 0], [1, 2, 3, 4, 5])
    """

    lse: Array
    """(*B, T) log of the sum of exponentials, sinks included, that the weights were formed with."""
    keys: Array
    """(*B, T) how many keys the query may attend to, int32."""
    entropy: Array
    """(*B, T) -sum_s p log p in nats, the sink's share included."""
    distance: Array
    """(*B, T) mean of query position - key position, weighted by p."""
    first_mass: Array
    """(*B, T) weight on the first keys, those at positions below `first`."""
    sink_mass: Array
    """(*B, T) share of the learned sink; 0 without sinks."""
    local_mass: Array
    """(*B, T) weight on keys less than `local` positions away."""
    self_mass: Array
    """(*B, T) weight on the key at the query's own position."""
    previous_mass: Array
    """(*B, T) weight on the key one position before."""
    next_mass: Array
    """(*B, T) weight on the key one position after."""
    duplicate_mass: Array | None
    """(*B, T) weight on keys at other positions that hold the query's token; None without tokens."""
    induction_mass: Array | None
    """(*B, T) weight on keys that follow the query's token elsewhere; None without tokens."""
    delimiter_mass: Array | None
    """(*B, T) weight on keys that hold a delimiter; None without tokens."""
    pattern_keys: Array
    """(*B, T, 8) how many keys each mass is the weight on, of those that the query may attend to, int32.

    In the order first, self, previous, next, local, duplicate, induction, delimiter; without tokens, the last
    three are 0. Divided by `keys`, they are what even weights would give.
    """
    top_keys: Array
    """(*B, T, top_k) keys with the largest scores, largest first, among equals the smaller; -1 for none."""
    top_weights: Array
    """(*B, T, top_k) their weights."""
    key_mass: Array
    """(*B, S) sum over queries of the weight on the key."""
    key_max: Array
    """(*B, S) largest weight on the key."""
    distance_mass: Array
    """(*B, 63) mean over rows of the weight by distance, query position - key position.

    Entry 31 is distance 0; 31 + n holds distances `2^(n-1)` to `2^n - 1`, and 31 - n their negatives, of
    keys that come later.
    """
    block_mass: Array
    """(*B, I, J) of the finest level."""
    block_max: Array
    """(*B, I, J) of the finest level."""
    block_rows: Array
    """(*B, I) of the finest level."""
    trust: Array
    """(*B) max over rows of |sum_s p_ts + sink - 1|: far above rounding, lse and scores do not match."""
    query_block: int = static()
    """Rows per block of the finest level, a power of two."""
    key_block: int = static()
    """Keys per block of the finest level, a power of two."""
    first: int = static()
    """The number of positions that `first_mass` counts."""
    local: int = static()
    """From which distance on `local_mass` does not count."""

    @property
    def argmax(self) -> Array:
        """(*B, T) the key with the largest weight, -1 in an empty row."""
        return self.top_keys[..., 0]

    @property
    def max_weight(self) -> Array:
        """(*B, T) the largest weight."""
        return self.top_weights[..., 0]

    @property
    def empty(self) -> Array:
        """(*B, T) True for queries that may attend to nothing."""
        return self.keys == 0

    @property
    def num_levels(self) -> int:
        """The number of levels, down to a single block."""
        return max(max(self.block_mass.shape[-2:]) - 1, 0).bit_length() + 1

    def level(self, number: int) -> Level:
        """Merge blocks until they are `2^number` times as large as the finest, along both axes.

        Args:
            number: 0 is the finest level, `num_levels - 1` a single block.

        Returns:
            The level, which follows exactly from the finer one.

        Raises:
            ValueError: there is no such level.

        Example:
            >>> import jax.numpy as jnp
            >>> from regard import readouts
            >>> readout = readouts.read(jnp.eye(6), jnp.eye(6))
            >>> [readout.level(number).mass.shape for number in range(readout.num_levels)]
            [(6, 6), (3, 3), (2, 2), (1, 1)]
        """
        if not 0 <= number < self.num_levels:
            raise ValueError(f"number: expected a level in 0..{self.num_levels - 1}, got {number}")
        level = Level(self.block_mass, self.block_max, self.block_rows, self.query_block, self.key_block)
        return _coarsen(level, number) if number else level

    def __repr__(self) -> str:
        shape, kind = jax.typeof(self.entropy).shape, self.entropy.dtype
        grid = "x".join(map(str, self.block_mass.shape[-2:]))
        return f"Readout(rows {shape}, keys {self.key_mass.shape[-1]}, blocks {grid}, {kind})"
