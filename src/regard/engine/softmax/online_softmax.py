"""Running: softmax-weighted sums over keys that arrive in parts. A monoid: parts may come in any order.

XLA's CPU loses NaN in the maximum of larger arrays, so a peak does not say that a row has NaN nor, where it
is -inf, that it has no key. The sum of exponentials does: NaN stays in it, and with a key it is at least 1.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.softmax.exponential import exp, finite_base, nan_where_total_is
from regard.engine.softmax.products import product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Running:
    """Sums over some keys for each query, shifted by the largest score among them.

    peak may be any number where total is NaN; `row_max` is NaN there.
    total = sum_s e^(score_s - peak), weighted = sum_s e^(score_s - peak) value_s,
    moment = sum_s e^(score_s - peak) (score_s - peak), argmax = the first key whose score is peak.
    The last two are None where nobody asks for them.
    """

    peak: Array  # (..., R)
    total: Array  # (..., R)
    weighted: Array  # (..., R, E)
    moment: Array | None = None  # (..., R)
    argmax: Array | None = None  # (..., R) int32, -1 before the first key

    @classmethod
    def empty(cls, shape: tuple[int, ...], width: int, dtype: Any, *, moment: bool, argmax: bool) -> Running:
        """Return the sums over no keys."""
        zeros = jnp.zeros(shape, dtype)
        return cls(
            jnp.full(shape, -jnp.inf, dtype),
            zeros,
            jnp.zeros((*shape, width), dtype),
            zeros if moment else None,
            jnp.full(shape, -1, jnp.int32) if argmax else None,
        )

    def block(
        self,
        scores: Array,
        value: Array,
        survivors: Array | None,
        keys: Any,
        precision: Any,
        subtract: Callable[[Array, Array], Array] = operator.sub,
    ) -> Running:
        """Add a block of keys: scores (..., R, C), of which `survivors` count in the weighted sum.

        `keys` has their numbers (C,), in any order, for the argmax; `subtract` takes the peak from scores.
        """
        block_peak = scores.max(-1)
        peak = jnp.maximum(self.peak, block_peak)
        base = finite_base(peak)
        shrink = exp(self.peak - base)
        shifted = subtract(scores, base[..., None])
        weights = exp(shifted)
        moment, argmax = self.moment, self.argmax
        if moment is not None:
            shift = self._shift(base)
            spread = jnp.sum(weights * jnp.maximum(shifted, -1e30), -1)
            moment = shrink * (moment + shift * self.total) + spread
        if argmax is not None:
            first_key = first_largest(scores, keys)
            # Blocks come in any order: among equal scores the smaller key wins.
            better = (block_peak > self.peak) | ((block_peak == self.peak) & (first_key < argmax))
            argmax = jnp.where(better & (block_peak != -jnp.inf), first_key, argmax)
        surviving = weights if survivors is None else jnp.where(survivors, weights, 0)
        return Running(
            peak,
            self.total * shrink + weights.sum(-1),
            self.weighted * shrink[..., None] + product(surviving, value, precision),
            moment,
            argmax,
        )

    def merge(self, other: Running) -> Running:
        """Add the keys of another."""
        peak = jnp.maximum(self.peak, other.peak)
        base = finite_base(peak)
        mine, theirs = self._onto(base), other._onto(base)
        moment = argmax = None
        if mine.moment is not None and theirs.moment is not None:
            moment = mine.moment + theirs.moment
        if self.argmax is not None and other.argmax is not None:
            earlier = (other.peak == self.peak) & (other.argmax < self.argmax)
            argmax = jnp.where((other.peak > self.peak) | earlier, other.argmax, self.argmax)
        return Running(peak, mine.total + theirs.total, mine.weighted + theirs.weighted, moment, argmax)

    def _onto(self, base: Array) -> Running:
        """Shift the sums by `base` instead."""
        shift = self._shift(base)
        shrink = exp(self.peak - base)
        moment = None if self.moment is None else shrink * (self.moment + shift * self.total)
        return dataclasses.replace(
            self, total=self.total * shrink, weighted=self.weighted * shrink[..., None], moment=moment
        )

    def _shift(self, base: Array) -> Array:
        """Return peak - base where there is something to shift; finite, as totals and then 0 multiply it."""
        return jnp.where(self.total > 0, jnp.maximum(self.peak - base, -1e30), 0)

    @property
    def alive(self) -> Array:
        """True for queries that have met a key."""
        return self.total != 0

    def row_max(self) -> Array:
        """Return the largest score; -inf without keys, NaN where the softmax is."""
        return nan_where_total_is(self.total, self.peak)

    def output(self) -> Array:
        """Return the weighted mean; 0 without keys."""
        total = jnp.where(self.alive, self.total, 1)
        return jnp.where(self.alive[..., None], self.weighted / total[..., None], 0)

    def log_total(self) -> Array:
        """Return the log of the sum of exponentials less the peak; 0 without keys."""
        return jnp.log(jnp.where(self.alive, self.total, 1))

    def entropy(self) -> Array:
        """Return the entropy in nats, log total - moment / total; 0 without keys."""
        assert self.moment is not None
        total = jnp.where(self.alive, self.total, 1)
        return jnp.where(self.alive, jnp.log(total) - self.moment / total, 0)


def first_largest(scores: Array, keys: Array) -> Array:
    """Return the first of the keys (C,) with the largest score of a row; NaN has none, the largest int32.

    Pairs are carried, not scores compared with their maximum: made anew by another kernel, they may be
    rounded otherwise, and none of them be the largest.
    """

    def choose(old: tuple[Array, Array], new: tuple[Array, Array]) -> tuple[Array, Array]:
        better = (new[0] > old[0]) | ((new[0] == old[0]) & (new[1] < old[1]))
        return jnp.where(better, new[0], old[0]), jnp.where(better, new[1], old[1])

    first = np.array(-np.inf, scores.dtype), np.array(np.iinfo(np.int32).max, np.int32)
    pairs = jax.lax.stop_gradient(scores), jnp.broadcast_to(keys, scores.shape)
    return jax.lax.reduce(pairs, first, choose, (scores.ndim - 1,))[1]
