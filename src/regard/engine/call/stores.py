"""Stores of keys and values, which few queries read block by block: arrays, int8, pages.

A store multiplies queries with all its keys (`score`), or weights with all its values (`mix`). Blocks have
sizes for the caches of a CPU core, as measured in benchmarks/NOTES.md, "Decoding".
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.platforms import find_platform
from regard.engine.processors import multiplies_tiles
from regard.records import delegate, record, static

# Eigen packs what it multiplies: 512 keys stay in the second cache, a whole row of thousands does not.
_BLOCK, _LEAST_BLOCK = 512, 64


class Store:
    """Keys or values `(*B, K, S, width)` that a call of attention reads in a way of their own."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that is stored."""
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """Dtype in which it is read."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def array(self) -> Array:
        """Return all that is stored as one array."""
        raise NotImplementedError

    def __jax_array__(self) -> Array:
        raise TypeError(
            "expected an array; call cache.attend(query), which reads it block by block, or pass a copy,"
            " cache.key.array() and cache.value.array()"
        )

    def score(self, query: Array, precision: Any) -> Array:
        """Multiply queries (..., K, R, D) with all keys: (..., K, R, S)."""
        raise NotImplementedError

    def mix(self, weights: Array, precision: Any) -> Array:
        """Multiply weights (..., K, R, S) with all values: (..., K, R, E)."""
        raise NotImplementedError

    def zero_unless(self, used: Array) -> Store:
        """Zero the tokens that are not used, (..., K | 1, S, 1); they may be NaN."""
        raise NotImplementedError


@delegate("values", "shape", "dtype")
@record
class Whole(Store):
    """An array, multiplied at once or as a batch of blocks of `block` keys."""

    values: Array
    block: int = static()

    @classmethod
    def divide(cls, array: Array, rows: int) -> Whole:
        """Divide the keys for products with so many rows, where that is faster."""
        length = array.shape[-2]
        is_few = isinstance(rows, int) and 1 < rows <= FEW_QUERIES and find_platform(array).name == "cpu"
        divisors = (size for size in range(_BLOCK, _LEAST_BLOCK - 1, -1) if length % size == 0)
        return cls(array, next(divisors, length) if is_few else length)

    def array(self) -> Array:
        return self.values

    def score(self, query: Array, precision: Any) -> Array:
        if self.block == self.shape[-2]:
            return product("...td,...sd->...ts", query, self.values, precision)
        scores = product("...td,...sd->...ts", query[..., None, :, :], self._blocks(), precision)
        scores = scores.swapaxes(-3, -2)
        return scores.reshape((*scores.shape[:-2], self.shape[-2]))

    def mix(self, weights: Array, precision: Any) -> Array:
        if self.block == self.shape[-2]:
            return product("...ts,...se->...te", weights, self.values, precision)
        count = self.shape[-2] // self.block
        weights = weights.reshape((*weights.shape[:-1], count, self.block)).swapaxes(-3, -2)
        return product("...ts,...se->...te", weights, self._blocks(), precision).sum(-3)

    def zero_unless(self, used: Array) -> Whole:
        shared = tuple(axis for axis, size in enumerate(self.shape[:-1]) if size == 1 != used.shape[axis])
        return dataclasses.replace(self, values=jnp.where(used.any(shared, keepdims=True), self.values, 0))

    def _blocks(self) -> Array:
        *leading, length, width = self.shape
        return self.values.reshape((*leading, length // self.block, self.block, width))


@delegate("values", "dtype")
@record
class LengthFirst(Store):
    """An array `(*B, S, K, width)`, as other libraries have it, swapped by whoever reads it.

    XLA's CPU reads what is swapped beside a product as it lies, and copies it for a branch that is given it.
    """

    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, length, heads, width = self.values.shape
        return (*batch, heads, length, width)

    def array(self) -> Array:
        return jnp.swapaxes(self.values, -3, -2)


# Up to this many rows of queries per key head, products wait for memory: keys and values are read once.
FEW_QUERIES = 32
# XLA's CPU takes five times as long for a product of one row of bfloat16 as for one of four. Where processors
# multiply tiles, one row is better behind the keys, and of several eight are (benchmarks/NOTES.md).
_FEW_ROWS, _ROWS_OF_TILES = 4, 8


def product(subscripts: str, a: Array, b: Array, precision: Any) -> Array:
    """Multiply matrices of one dtype, summed in float32 at least."""
    rows = a.shape[-2]
    in_tiles = a.dtype == jnp.bfloat16 and find_platform(a).name == "cpu" and multiplies_tiles()
    least = _ROWS_OF_TILES if in_tiles and rows != 1 else _FEW_ROWS
    if a.dtype == jnp.bfloat16 and isinstance(rows, int) and 0 < rows < least:
        a = jnp.concatenate([a] * -(-least // rows), -2)
    options: Any = {"precision": precision, "preferred_element_type": np.promote_types(a.dtype, np.float32)}
    if a.dtype == jnp.bfloat16 and subscripts.endswith("e") and a.shape[:-2] != b.shape[:-2]:
        # Where rows share values, einsum turns the factors round, and XLA's CPU has no such product.
        return jnp.matmul(a, b, **options)[..., :rows, :]
    if in_tiles and rows == 1 and subscripts.endswith("s"):
        return jnp.matmul(b, a.swapaxes(-1, -2), **options)[..., :rows].swapaxes(-1, -2)
    return jnp.einsum(subscripts, a, b, **options)[..., :rows, :]


def as_array(stored: Any) -> Any:
    """Return what is stored as an array; an array is one."""
    return stored.array() if isinstance(stored, Store) else stored


def at(*places: Any) -> list[Array]:
    """Return where a block begins, as int32 even where integers are int64 by default."""
    return [jnp.asarray(start, jnp.int32) for start in places]


def zeros(shape: tuple[int, ...], factor: Array, store: Store) -> Array:
    """Return zeros of the dtype of sums that vary over manual mesh axes as products with a store do."""
    never, sums = jnp.zeros((), bool), jnp.zeros(shape, np.promote_types(factor.dtype, np.float32))
    for array in (factor, *jax.tree.leaves(store)):
        sums = jnp.where(never, array[(0,) * array.ndim].astype(sums.dtype), sums)
    return sums
