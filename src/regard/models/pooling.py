"""Poolings: one vector per example from one per position."""

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx

from regard.axes import Array
from regard.engine.call.problem import accumulation_dtype
from regard.layers import MultiHeadAttention
from regard.layers.choices import check_choice
from regard.layers.multi_head import unpack
from regard.models.config import TransformerConfig
from regard.models.padding import blank_padding, mask_padding


class MeanPooling(nnx.Module):
    """The mean over the valid positions; zeros where there are none."""

    def __call__(self, hidden: Array, lengths: Any, aux: tuple[str, ...]) -> tuple[Array, dict[str, Any]]:
        # In half precision a sum overflows before the mean does.
        total = jnp.sum(blank_padding(hidden, lengths), axis=-2, dtype=accumulation_dtype(hidden))
        if lengths is None:
            return (total / max(hidden.shape[-2], 1)).astype(hidden.dtype), {}
        count = jnp.maximum(jnp.asarray(lengths, jnp.int32), 1).astype(total.dtype)
        return (total / count[..., None]).astype(hidden.dtype), {}


class FirstPooling(nnx.Module):
    """The first position; zeros where there is none."""

    def __call__(self, hidden: Array, lengths: Any, aux: tuple[str, ...]) -> tuple[Array, dict[str, Any]]:
        if hidden.shape[-2] == 0:
            return jnp.zeros((*hidden.shape[:-2], hidden.shape[-1]), hidden.dtype), {}
        return blank_padding(hidden, lengths)[..., 0, :], {}


class AttentionPooling(nnx.Module):
    """One learned query that attends over the valid positions."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        start = nnx.initializers.normal(1.0 / math.sqrt(config.d_model))
        self.query = nnx.Param(start(rngs.params(), (1, config.d_model), jnp.float32))
        self.attention = MultiHeadAttention(
            config.d_model,
            config.num_heads,
            num_key_heads=config.num_key_heads,
            head_dim=config.head_dim,
            use_bias=config.attention_bias,
            dropout_rate=config.attention_dropout_rate,
            rngs=rngs,
        )

    def __call__(self, hidden: Array, lengths: Any, aux: tuple[str, ...]) -> tuple[Array, dict[str, Any]]:
        query = self.query[...] * math.sqrt(hidden.shape[-1])
        query = jnp.broadcast_to(query, (*hidden.shape[:-2], 1, hidden.shape[-1]))
        pooled, seen = unpack(self.attention(query, hidden, mask=mask_padding(lengths), aux=aux), aux)
        return pooled[..., 0, :], seen


def build_pooling(name: str | None, config: TransformerConfig, rngs: nnx.Rngs) -> Any:
    """Build the named pooling; None for a prediction per position."""
    if name is None:
        return None
    check_choice("pooling, if not None", name, ("mean", "attention", "first"))
    if name == "attention":
        return AttentionPooling(config, rngs=rngs)
    return MeanPooling() if name == "mean" else FirstPooling()
