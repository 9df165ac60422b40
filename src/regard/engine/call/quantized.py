"""Keys and values in int8 with a scale per token and head; start from `quantize`."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.stores import Store
from regard.records import record

# Numbers that are converted to float at a time, 256 KiB: products find them in the cache of a CPU core.
_CONVERTED = 1 << 16


@record
class Quantized(Store):
    """Tokens in int8 and their scales: token_sd = scale_s values_sd, |error| <= scale_s / 2.

    A token has one scale, which multiplies scores and weights, so that only the int8 numbers are read:

    query . token_s = scale_s (query . values_s),  sum_s weight_s token_s = sum_s (weight_s scale_s) values_s
    """

    values: Array  # (*B, K, S, width) int8
    scale: Array  # (*B, K, S, 1) float32; NaN where the token was not finite

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> Any:
        return self.scale.dtype

    def array(self) -> Array:
        return self.values.astype(self.dtype) * self.scale

    def score(self, query: Array, precision: Any) -> Array:
        length, width = self.shape[-2:]
        queries, tokens = _pair_heads(query), _pair_heads(self.values)
        size, number = _blocks(tokens.shape)

        def add(step: Array, scores: Array) -> Array:
            row, first = _place(step, number, size, length)
            found = jnp.einsum(
                "prd,psd->prs",
                jax.lax.dynamic_index_in_dim(queries, row, keepdims=False),
                _convert(tokens, (row, 0, first, 0), (tokens.shape[1], size, width), query.dtype),
                precision=precision,
            )
            return jax.lax.dynamic_update_slice(scores, found[None], (row, 0, 0, first))

        scores = jnp.zeros((*queries.shape[:-1], length), query.dtype)
        scores = jax.lax.fori_loop(0, len(tokens) * number, add, scores)
        return scores.reshape((*query.shape[:-1], length)) * self.scale.swapaxes(-1, -2).astype(query.dtype)

    def mix(self, weights: Array, precision: Any) -> Array:
        length, width = self.shape[-2:]
        parts = _pair_heads(weights * self.scale.swapaxes(-1, -2).astype(weights.dtype))
        tokens = _pair_heads(self.values)
        size, number = _blocks(tokens.shape)

        def sum_row(row: Array) -> Array:
            def add(block: Array, total: Array) -> Array:
                _, first = _place(block, number, size, length)
                part = jax.lax.dynamic_slice(parts, (row, 0, 0, first), (1, *parts.shape[1:3], size))[0]
                # The last block is moved back; what it repeats belongs to the block before.
                part = jnp.where(first + jnp.arange(size, dtype=jnp.int32) < block * size, 0, part)
                block_tokens = _convert(tokens, (row, 0, first, 0), (parts.shape[1], size, width), part.dtype)
                return total + jnp.einsum("prs,pse->pre", part, block_tokens, precision=precision)

            return jax.lax.fori_loop(0, number, add, jnp.zeros((*parts.shape[1:3], width), parts.dtype))

        rows = jax.lax.map(sum_row, jnp.arange(len(parts), dtype=jnp.int32))
        return rows.reshape((*weights.shape[:-1], width))

    def zero_unless(self, used: Array) -> Quantized:
        return dataclasses.replace(self, scale=jnp.where(used, self.scale, 0))


@jax.custom_jvp
def quantize(tokens: Array) -> Quantized:
    """Round tokens (..., width) to int8, by the largest number of each: scale = max_d |token_d| / 127."""
    scale = jnp.abs(tokens.astype(np.float32)).max(-1, keepdims=True) / 127
    finite = jnp.isfinite(scale)
    divisor = jnp.where(finite & (scale > 0), scale, 1)
    values = jnp.where(finite, jnp.round(tokens.astype(np.float32) / divisor), 0)
    return Quantized(values.astype(jnp.int8), jnp.where(finite, scale, jnp.nan))


@quantize.defjvp
def _quantize_jvp(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "append: expected no derivative through an int8 cache, as rounding has none; got one asked for."
        " Train without a cache, or create the cache with dtype='float32'"
    )


def _pair_heads(array: Array) -> Array:
    """Reshape (..., x, y) to (N / P, P, x, y), P = 2 if there are pairs: of one row XLA's CPU is slow."""
    count = int(np.prod(array.shape[:-2]))
    pair = 2 if count % 2 == 0 else 1
    return array.reshape((count // pair, pair, *array.shape[-2:]))


def _blocks(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the size and number of the blocks of keys that tokens (N, P, S, width) are read in."""
    _, heads, length, width = shape
    number = -(-length // max(_CONVERTED // (heads * width), 1))
    return -(-length // number), number


def _place(step: Array, number: int, size: int, length: int) -> tuple[Array, Array]:
    """Return the row of a step, and the first key of its block."""
    return step // number, jnp.minimum(step % number * size, length - size)


def _convert(tokens: Array, starts: Any, sizes: tuple[int, ...], dtype: Any) -> Array:
    return jax.lax.dynamic_slice(tokens, starts, (1, *sizes))[0].astype(dtype)
