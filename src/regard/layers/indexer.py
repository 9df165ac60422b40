"""Indexers, whose small heads choose the keys of each query: of tokens, and of entries of blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.export import is_symbolic_dim

from regard import masks, readouts
from regard.axes import Array, ArrayLike
from regard.engine.dispatch.placement import demand_whole
from regard.layers.compressor import Compressor, turn_tail
from regard.layers.heads import split_heads
from regard.layers.residual import EPSILON, build_norm
from regard.masks import Mask
from regard.positions import Rotary


class Indexer(nnx.Module):
    """Chooser of `count` keys for each query of a layer, whose heads all attend to these.

    chosen_t = the keys s with the largest sum_h weights_ht relu(query_ht . key_s / sqrt(D))
    query = source Wq,  key = norm(x Wk),  weights = x Ww / sqrt(H)

    The first features of queries and keys are turned as those of the layer are, the first half with the
    second. A choice has no gradient: distil it with `readouts.index_divergence`.

    Reference: DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1 (the lightning indexer).
    """

    def __init__(
        self,
        d_model: int,
        source_dim: int,
        *,
        num_heads: int,
        head_dim: int,
        count: int,
        rotary: Rotary | None,
        rotary_dim: int,
        kernel_init: Any,
        precision: Any,
        **shared: Any,
    ):
        self.num_heads, self.head_dim, self.count, self.rotary_dim = num_heads, head_dim, count, rotary_dim
        self.rotary = None if rotary is None else dataclasses.replace(rotary, interleaved=False)
        options = {"use_bias": False, "kernel_init": kernel_init, "precision": precision, **shared}
        self.query_projection = nnx.Linear(source_dim, num_heads * head_dim, **options)
        self.key_projection = nnx.Linear(d_model, head_dim, **options)
        self.key_norm = build_norm(head_dim, kind="layer", epsilon=EPSILON, **shared)
        self.weight_projection = nnx.Linear(d_model, num_heads, **options)

    def make_keys(self, x: Array, index: ArrayLike) -> Array:
        """Make the keys of tokens at these positions, `(batch, T, D)`."""
        return self._turn(self.key_norm(self.key_projection(x))[..., None, :, :], index)[..., 0, :, :]

    def choose(
        self, x: Array, source: Array, index: ArrayLike, key: Array, mask: Mask | None, **offsets: Any
    ) -> Mask | None:
        """Return the mask of the keys that are chosen among those that the mask keeps, joined with it."""
        if _is_all(key, self.count):
            return mask
        query = self._turn(split_heads(self.query_projection(source), self.num_heads), index)
        return _choose(query, key, self.weight_projection(x), self.count, mask, **offsets)

    def _turn(self, features: Array, index: ArrayLike) -> Array:
        if self.rotary is None:
            return features
        turned, plain = jnp.split(features, [self.rotary_dim], axis=-1)
        return jnp.concatenate([self.rotary(turned, index), plain], axis=-1)


class BlockIndexer(nnx.Module):
    """Chooser of `count` entries for each query of compressed attention; its keys are entries of its own.

    chosen_t = the entries i with the largest sum_h weights_ht relu(query_ht . key_i / sqrt(D))
    query = turn(source Wq),  weights = x Ww / sqrt(H)

    Reference: DeepSeek-AI, "DeepSeek-V4", 2026, section 2.3.1.
    """

    def __init__(
        self, d_model: int, source_dim: int, *, num_heads: int, head_dim: int, count: int, **options: Any
    ):
        self.num_heads, self.head_dim, self.count = num_heads, head_dim, count
        self.compressor = Compressor(d_model, head_dim, **options)
        names = ("kernel_init", "precision", "dtype", "param_dtype", "rngs")
        shared = {name: options[name] for name in names}
        self.query_projection = nnx.Linear(source_dim, num_heads * head_dim, use_bias=False, **shared)
        self.weight_projection = nnx.Linear(d_model, num_heads, use_bias=False, **shared)

    def choose(
        self, x: Array, source: Array, index: ArrayLike, entries: Array, mask: Mask, **places: Any
    ) -> Mask | None:
        """Return the mask of the entries that are chosen among those that the mask keeps, joined with it."""
        if _is_all(entries, self.count):
            return mask
        query = split_heads(self.query_projection(source), self.num_heads)
        query = turn_tail(query, index, self.compressor.rotary, self.compressor.rotary_dim)
        return _choose(query, entries, self.weight_projection(x), self.count, mask, **places)


def _is_all(key: Array, count: int) -> bool:
    """Return whether so many keys are all; of a symbolic number of keys, that is not known."""
    return not is_symbolic_dim(key.shape[-2]) and key.shape[-2] <= count


def _choose(
    query: Array, key: Array, weights: Array, count: int, mask: Mask | None, **places: Any
) -> Mask | None:
    """Return the mask of the keys with the largest scores, whose heads have weights `(*B, T, H)`."""
    demand_whole("index_count")
    weights = jnp.moveaxis(weights, -1, -2) * query.shape[-3] ** -0.5
    options: dict[str, Any] = {"count": count, "mask": mask, **places}
    chosen = readouts.choose_keys(query, key.astype(query.dtype), weights, **options)
    listed = masks.chosen_keys(chosen[..., None, :, :], ascending=True)
    return listed if mask is None else mask & listed
