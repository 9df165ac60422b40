"""The indexer of latent attention, whose small heads choose the keys of each query."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from regard import masks, readouts
from regard.axes import Array, ArrayLike
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
        if key.shape[-2] <= self.count:
            return mask
        query = self._turn(split_heads(self.query_projection(source), self.num_heads), index)
        weights = jnp.moveaxis(self.weight_projection(x), -1, -2) * self.num_heads**-0.5
        options: dict[str, Any] = {"count": self.count, "mask": mask, **offsets}
        chosen = readouts.choose_keys(query, key.astype(query.dtype), weights, **options)
        listed = masks.chosen_keys(chosen[..., None, :, :], ascending=True)
        return listed if mask is None else mask & listed

    def _turn(self, features: Array, index: ArrayLike) -> Array:
        if self.rotary is None:
            return features
        turned, plain = jnp.split(features, [self.rotary_dim], axis=-1)
        return jnp.concatenate([self.rotary(turned, index), plain], axis=-1)
