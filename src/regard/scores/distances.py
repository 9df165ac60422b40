"""Scores by the distance between query and key: linear biases and learned relative ones."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from regard.arguments import check_reach, guided, keep_array, read_array, whole_number
from regard.axes import Array, ArrayLike
from regard.formulas import Formula, Function, Row, Symbol, Terms, product
from regard.masks.data import literal
from regard.records import record, static
from regard.scores.cells import Cells
from regard.scores.score import Score, parameter, per_head_symbol


def alibi(num_heads: int | None = None, *, slopes: ArrayLike | None = None) -> Score:
    """Lower each score in proportion to the distance, at a different rate per head.

    s'_ts = s_ts - slope_h |query_position_t - key_position_s|

    The slopes of n heads, n a power of two, are `2^(-8/n)`, `2^(-16/n)`, ... `2^-8`. For other head counts
    they are those of the power of two below, followed by every other slope of twice that power.

    Args:
        num_heads: number of query heads, to compute slopes for.
        slopes: instead, one slope per query head `(H,)`; may be traced, and has a gradient.

    Returns:
        A score on positions.

    Raises:
        TypeError: neither or both arguments, or slopes that are not numbers.
        ValueError: fewer than one head, or slopes of a wrong shape.

    Example:
        >>> from regard import scores
        >>> scores.alibi(4)
        alibi(slopes=[0.25, 0.0625, 0.015625, 0.00390625])

    Reference: Press et al., "Train Short, Test Long", 2022, section 3; head counts that are no power of two
    as in the authors' code. They give keys after the query no meaning; here the distance counts both ways.
    """
    if (num_heads is None) == (slopes is None):
        raise TypeError("alibi: expected num_heads or slopes, one of the two")
    if slopes is None:
        if not isinstance(num_heads, int | np.integer) or num_heads < 1:
            raise ValueError(
                f"num_heads: expected at least 1 query head, got {num_heads!r}; slopes of your own go as"
                " slopes="
            )
        slopes = _slopes(int(num_heads))
    return Alibi(parameter("slopes", slopes, positive=False))


def _slopes(count: int) -> np.ndarray:
    below = 1 << (count.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2.0 ** (-8 * (i + 1) / (2 * below)) for i in range(0, 2 * below, 2)]
    return np.asarray((slopes + between)[:count])


@record
class Alibi(Score):
    """Scores lowered in proportion to the distance."""

    slopes: Any
    head_axes: ClassVar = {"slopes": 0}
    meaning = ": a key loses in proportion to its distance."
    reads_batch = False
    adds = True
    casts_parameters = True

    @staticmethod
    def maker(slopes: Any) -> Score:
        return alibi(slopes=slopes)

    def apply(self, scores: Array, cells: Cells) -> Array:
        slopes = cells.per_head(jnp.asarray(self.slopes).astype(scores.dtype))
        # Rounded only once: positions are whole numbers, exact as integers beyond 2^24 too. Of two of them
        # that are far apart uint32 holds the distance, and int32 does not.
        query, key = cells.query_position, cells.key_position
        distance = (jnp.maximum(query, key) - jnp.minimum(query, key)).astype(jnp.uint32)
        return scores - slopes * distance.astype(scores.dtype)

    def formula(self, terms: Terms) -> Formula:
        distance = Function("abs", (Row((terms.query_position, terms.key_position), "-"),))
        return Row((terms.before, product(per_head_symbol("slope", self.slopes), distance)), "-")

    def expression(self) -> str:
        return f"alibi(slopes={literal(self.slopes)})"


@guided
def relative_bias(table: ArrayLike, *, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """Add a learned number for each head and bucket of distances, fine near the query and coarse afar.

    s'_ts = s_ts + table[bucket(key_position_s - query_position_t), h]

    Of n buckets for distances on one side, the first n/2 hold one distance each; the others grow
    geometrically up to `max_distance`, and the last holds all beyond it:
    bucket(d) = n/2 + floor(log(d / (n/2)) / log(max_distance / (n/2)) n/2), at most n - 1.

    Args:
        table: floating-point array `(buckets, H)`, or `(buckets, 1)` for all heads; may be traced, and has a
            gradient. Entries must be finite: remove keys with a mask.
        bidirectional: whether half of the buckets are for keys after the query; they are the second half.
            Otherwise these keys fall into bucket 0, with distance 0, as suits a causal mask.
        max_distance: from where on all distances share a bucket; above half of the buckets of a side.

    Returns:
        A score on positions.

    Raises:
        TypeError: a table that is not of floating point.
        ValueError: a table of a wrong shape, or a max_distance too small for it.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import scores
        >>> scores.relative_bias(jnp.zeros((32, 8)), bidirectional=False)
        relative_bias(<float32[32, 8]>, bidirectional=False, max_distance=128)

    Reference: Raffel et al., "Exploring the Limits of Transfer Learning" (T5), 2020, section 2.1, and its
    code, which evaluates the logarithm in float32; bucket borders here are exact.
    """
    array = read_array("table", table, float)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"table: expected a floating-point array (buckets, H), got {array.dtype}")
    sides = 2 if bidirectional else 1
    if array.ndim != 2 or array.shape[0] % sides or array.shape[0] < 2 * sides:
        raise ValueError(
            f"table: expected shape (buckets, H) with at least {2 * sides} buckets"
            f"{', an even number' if bidirectional else ''}; got {tuple(array.shape)}"
        )
    exact = array.shape[0] // sides // 2
    max_distance = whole_number("max_distance", max_distance, 1)
    check_reach("max_distance", max_distance + 2)
    if max_distance <= exact:
        raise ValueError(
            f"max_distance: expected more than {exact}, the distances with a bucket of their own; got"
            f" {max_distance}"
        )
    return RelativeBias(keep_array(array), bool(bidirectional), max_distance)


@record
class RelativeBias(Score):
    """Scores with a learned number for each bucket of distances."""

    table: Any
    bidirectional: bool = static()
    max_distance: int = static()
    head_axes: ClassVar = {"table": 1}
    meaning = ": a learned number for each distance, near ones apart, far ones in coarse buckets."
    reads_batch = False
    adds = True
    casts_parameters = True

    @staticmethod
    def maker(table: Any, bidirectional: bool, max_distance: int) -> Score:
        return relative_bias(table, bidirectional=bidirectional, max_distance=max_distance)

    def apply(self, scores: Array, cells: Cells) -> Array:
        table = jnp.asarray(self.table).astype(scores.dtype)
        return cells.add_looked_up(scores, table, self._bucket, self.max_distance)

    def _bucket(self, distance: Array) -> Array:
        """Return the bucket of each distance, key position - query position."""
        count = self.table.shape[0]
        if not self.bidirectional:
            return _one_sided(jnp.maximum(-distance, 0), count, self.max_distance)
        after = jnp.where(distance > 0, np.int32(count // 2), np.int32(0))
        return after + _one_sided(jnp.abs(distance), count // 2, self.max_distance)

    def formula(self, terms: Terms) -> Formula:
        bucket = Function("bucket", (Row((terms.key_position, terms.query_position), "-"),))
        entry = Function("table", (bucket, *([Symbol("h")] if self.table.shape[1] > 1 else [])))
        return Row((terms.before, entry), "+")

    def expression(self) -> str:
        return (
            f"relative_bias({literal(self.table)}, bidirectional={self.bidirectional},"
            f" max_distance={self.max_distance})"
        )


def _one_sided(distance: Array, count: int, max_distance: int) -> Array:
    borders = jnp.asarray(_borders(count, max_distance)).reshape((*(1,) * distance.ndim, -1))
    return jnp.sum(distance[..., None] >= borders, -1, dtype=jnp.int32)


def _borders(count: int, max_distance: int) -> np.ndarray:
    """Return the least distance of each bucket but the first, in whole numbers: no logarithm is rounded."""
    exact = count // 2
    coarse = count - exact
    borders = list(range(1, exact + 1))
    for step in range(1, coarse):
        # The least d with (d / exact)^coarse >= (max_distance / exact)^step.
        bound = max_distance**step * exact ** (coarse - step)
        guess = max(1, math.floor(exact * (max_distance / exact) ** (step / coarse)) - 1)
        while guess**coarse < bound:
            guess += 1
        borders.append(guess)
    return np.asarray(borders, np.int32)
