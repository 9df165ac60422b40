"""Keys and values in pages, of which each row reads its own by a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.call.stores import Store, at, product, zeros
from regard.records import delegate, record


@delegate("pages", "dtype")
@record
class Pages(Store):
    """Pages of tokens, read one after another: those of a row that hold tokens, and no other."""

    pages: Array  # (num_pages, K, page_size, width)
    table: Array  # (batch, n) int32, pages of each row in order, -1 after the last
    counts: Array  # (batch,) int32, pages of each row that hold tokens
    used: Array | None = None  # (batch, K | 1, S), False: read as 0

    @property
    def shape(self) -> tuple[int, ...]:
        _, heads, size, width = self.pages.shape
        return (self.table.shape[0], heads, self.table.shape[1] * size, width)

    def array(self) -> Array:
        pages = jnp.take(self.pages, jnp.maximum(self.table, 0), axis=0, mode="clip")
        pages = jnp.where((self.table >= 0)[..., None, None, None], pages, 0).swapaxes(1, 2)
        return pages.reshape(self.shape)

    def score(self, query: Array, precision: Any) -> Array:
        def add(row: Array, first: Array, page: Array, scores: Array) -> Array:
            asked = jax.lax.dynamic_index_in_dim(query, row, keepdims=False)
            page_scores = product("krd,ksd->krs", asked, page, precision)
            return jax.lax.dynamic_update_slice(scores, page_scores[None], at(row, 0, 0, first))

        return self._read(add, zeros((*query.shape[:-1], self.shape[-2]), query, self), query.dtype)

    def mix(self, weights: Array, precision: Any) -> Array:
        size = self.pages.shape[2]

        def add(row: Array, first: Array, page: Array, total: Array) -> Array:
            part = jax.lax.dynamic_slice(weights, at(row, 0, 0, first), (1, *weights.shape[1:3], size))[0]
            if self.used is not None:
                used = jax.lax.dynamic_slice(self.used, at(row, 0, first), (1, self.used.shape[1], size))[0]
                page = jnp.where(used[..., None], page, 0)
            return total.at[row].add(product("krs,kse->kre", part, page, precision))

        return self._read(add, zeros((*weights.shape[:-1], self.shape[-1]), weights, self), weights.dtype)

    def zero_unless(self, used: Array) -> Pages:
        shape = (self.shape[0], used.shape[-3], self.shape[-2])
        return dataclasses.replace(self, used=jnp.broadcast_to(used[..., 0], shape))

    def _read(self, add: Callable[..., Array], carry: Array, dtype: Any) -> Array:
        """Fold `add(row, first slot, page, carry)` over all pages that hold tokens."""
        size = self.pages.shape[2]

        def read_row(row: Array, carry: Array) -> Array:
            def read_page(number: Array, carry: Array) -> Array:
                page = jax.lax.dynamic_index_in_dim(self.pages, self.table[row, number], keepdims=False)
                return add(row, number * size, page.astype(dtype), carry)

            return jax.lax.fori_loop(0, self.counts[row], read_page, carry)

        return jax.lax.fori_loop(0, self.table.shape[0], read_row, carry)
