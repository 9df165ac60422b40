"""Keys and values in int8 with a scale per token and head; start from `quantize`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.stores import Store, at, zeros
from regard.records import delegate, record

# Numbers that are converted to float at a time, 256 KiB: products find them in the cache of a CPU core.
_CONVERTED = 1 << 16
# With more queries per key head than this, numbers are converted for products; with fewer, anew for each.
_FEW_ROWS = 4
# XLA computes what more than 15 slices read once, and anew for every number what fewer read.
_SLICES = 16


@delegate("values", "shape")
@delegate("scale", "dtype")
@record
class Quantized(Store):
    """Tokens in int8 and their scales: token_sd = scale_s values_sd, |error| <= scale_s / 2.

    A token has one scale, which multiplies scores and weights, so that only the int8 numbers are read:

    query . token_s = scale_s (query . values_s),  sum_s weight_s token_s = sum_s (weight_s scale_s) values_s
    """

    values: Array  # (*B, K, S, width) int8
    scale: Array  # (*B, K, S, 1) float32; NaN where the token was not finite

    def array(self) -> Array:
        return self.values.astype(self.dtype) * self.scale

    def score(self, query: Array, precision: Any) -> Array:
        scales = self.scale.swapaxes(-1, -2).astype(query.dtype)
        if query.shape[-2] > _FEW_ROWS:
            return self._score_blocks(query, precision) * scales
        lanes = 1 << max((self.shape[-1] // _SLICES).bit_length() - 1, 2)  # a power of two, at least 4
        sums = _sum_slices(query[..., :, None, :], self.values[..., None, :, :], -1, lanes)
        ones = jnp.ones(sums.shape[-1], sums.dtype)
        return jnp.einsum("...l,l->...", sums, ones, precision="highest") * scales

    def _score_blocks(self, query: Array, precision: Any) -> Array:
        queries, blocks = _pair_heads(query), _Blocks.divide(self.values)

        def score_block(step: Array, scores: Array) -> Array:
            row, first = blocks.row(step), blocks.first(step)
            asked = jax.lax.dynamic_index_in_dim(queries, row, keepdims=False)
            block = jnp.einsum("prd,psd->prs", asked, blocks.read(step, asked.dtype), precision=precision)
            return jax.lax.dynamic_update_slice(scores, block[None], at(row, 0, 0, first))

        scores = zeros((*queries.shape[:3], blocks.length), query, self)
        return jax.lax.fori_loop(0, blocks.steps, score_block, scores).reshape((*query.shape[:-1], -1))

    def mix(self, weights: Array, precision: Any) -> Array:
        weights = weights * self.scale.swapaxes(-1, -2).astype(weights.dtype)
        if weights.shape[-2] > _FEW_ROWS:
            return self._mix_blocks(weights, precision)
        size = -(-self.shape[-2] // _SLICES)
        sums = _sum_slices(weights[..., None], self.values[..., None, :, :], -2, size)
        ones = jnp.ones((*sums.shape[:-2], 1, size), sums.dtype)
        return jnp.einsum("...rs,...se->...re", ones, sums, precision="highest")[..., 0, :]

    def _mix_blocks(self, weights: Array, precision: Any) -> Array:
        scaled = _pair_heads(weights)
        blocks = _Blocks.divide(self.values)

        def mix_block(step: Array) -> Array:
            row, first = blocks.row(step), blocks.first(step)
            shape = (1, *scaled.shape[1:3], blocks.size)
            part = jax.lax.dynamic_slice(scaled, at(row, 0, 0, first), shape)[0]
            if blocks.count * blocks.size != blocks.length:
                own = first + jnp.arange(blocks.size, dtype=jnp.int32) >= step % blocks.count * blocks.size
                part = jnp.where(own, part, 0)
            return jnp.einsum("prs,pse->pre", part, blocks.read(step, part.dtype), precision=precision)

        mixed = jax.lax.map(mix_block, jnp.arange(blocks.steps, dtype=jnp.int32))
        mixed = mixed.reshape((-1, blocks.count, *mixed.shape[1:])).sum(1)
        return mixed.reshape((*weights.shape[:-1], -1))

    def zero_unless(self, used: Array) -> Quantized:
        return dataclasses.replace(self, scale=jnp.where(used, self.scale, 0))


@jax.custom_jvp
def quantize(tokens: Array) -> Quantized:
    """Round tokens (..., width) to int8, by the largest number of each: scale = max_d |token_d| / 127."""
    # Products with reciprocals, which XLA makes of some quotients: half the largest number, a tie, would be
    # rounded up in one program and down in another.
    scale = jnp.abs(tokens.astype(np.float32)).max(-1, keepdims=True) * np.float32(1 / 127)
    finite = jnp.isfinite(tokens).all(-1, keepdims=True)  # XLA's CPU loses NaN in a maximum
    divisor = jnp.where(finite & (scale >= np.finfo(np.float32).tiny), scale, 1)
    values = jnp.where(finite, jnp.round(tokens.astype(np.float32) * (1 / divisor)), 0)
    return Quantized(values.astype(jnp.int8), jnp.where(finite, scale, jnp.nan))


@quantize.defjvp
def _quantize_jvp(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "append: expected no derivative through an int8 cache, as rounding has none; got one asked for."
        " Train without a cache, or create the cache with dtype='float32'"
    )


def _sum_slices(floats: Array, integers: Array, axis: int, size: int) -> Array:
    """Multiply, and sum slices of `size` along an axis; the last is moved back where it would stick out.

    XLA's CPU converts int8 as fast as it reads it in such a sum, which all its threads share; number by
    number in a reduction, or in what it fuses with one.
    """
    length, axis = integers.shape[axis], axis % integers.ndim
    size = min(size, length)
    total: Any = 0
    for first in range(0, length, size):
        start = min(first, length - size)
        few = jax.lax.slice_in_dim(floats, start, start + size, axis=axis)
        many = jax.lax.slice_in_dim(integers, start, start + size, axis=axis)
        if start != first:
            few = jnp.where(jax.lax.broadcasted_iota(jnp.int32, few.shape, axis) >= first - start, few, 0)
        total = total + few * many.astype(few.dtype)
    return total


def _pair_heads(array: Array) -> Array:
    """Reshape (..., x, y) to (N / P, P, x, y), P = 2 if there are pairs: of one row XLA's CPU is slow."""
    count = int(np.prod(array.shape[:-2]))
    pair = 2 if count % 2 == 0 else 1
    return array.reshape((count // pair, pair, *array.shape[-2:]))


class _Blocks(NamedTuple):
    """Blocks of keys, read one after another; the last is moved back where it would stick out."""

    tokens: Array  # (N / P, P, S, width)
    size: int
    count: int

    @classmethod
    def divide(cls, values: Array) -> _Blocks:
        tokens = _pair_heads(values)
        _, heads, length, width = tokens.shape
        count = -(-length // max(_CONVERTED // (heads * width), 1))
        return cls(tokens, -(-length // count), count)

    @property
    def length(self) -> int:
        return self.tokens.shape[2]

    @property
    def steps(self) -> int:
        return len(self.tokens) * self.count

    def row(self, step: Array) -> Array:
        return step // self.count

    def first(self, step: Array) -> Array:
        return jnp.minimum(step % self.count * self.size, self.length - self.size)

    def read(self, step: Array, dtype: Any) -> Array:
        """Convert one block, (P, size, width)."""
        _, heads, _, width = self.tokens.shape
        starts = at(self.row(step), 0, self.first(step), 0)
        return jax.lax.dynamic_slice(self.tokens, starts, (1, heads, self.size, width))[0].astype(dtype)
