"""Blocks one after another: the one body that every model here shares."""

from __future__ import annotations

from typing import Any

from flax import nnx

from regard.axes import Array
from regard.layers import DecoderBlock, EncoderBlock
from regard.layers.multi_head import unpack
from regard.layers.residual import build_norm
from regard.models.config import TransformerConfig


class Stack(nnx.Module):
    """`config.num_layers` blocks, then a LayerNorm where the blocks leave the stream unnormalised ("pre").

    Args:
        config: sizes and choices.
        block: `EncoderBlock` or `DecoderBlock`.
        rngs: random streams.
    """

    def __init__(
        self, config: TransformerConfig, block: type[EncoderBlock] | type[DecoderBlock], *, rngs: nnx.Rngs
    ):
        self.blocks = nnx.List([_build_block(config, block, rngs) for _ in range(config.num_layers)])
        self.final_norm = build_norm(config.d_model, rngs=rngs) if config.norm == "pre" else None

    def __call__(
        self, x: Array, *memory: Array, aux: tuple[str, ...] = (), **options: Any
    ) -> tuple[Array, tuple[dict[str, Any], ...]]:
        """Run every block on x with the same memory and masks.

        Returns:
            The residual stream, and one aux dict per block (empty dicts without `aux`).
        """
        seen = []
        for block in self.blocks:
            x, seen_here = unpack(block(x, *memory, aux=aux, **options), aux)
            seen.append(seen_here)
        return (x if self.final_norm is None else self.final_norm(x)), tuple(seen)


def _build_block(
    config: TransformerConfig, block: type[EncoderBlock] | type[DecoderBlock], rngs: nnx.Rngs
) -> nnx.Module:
    """One block of the configured sizes."""
    return block(
        config.d_model,
        config.num_heads,
        config.d_ff,
        norm=config.norm,
        activation=config.activation,
        dropout_rate=config.dropout_rate,
        attention_dropout_rate=config.attention_dropout_rate,
        num_key_heads=config.num_key_heads,
        head_dim=config.head_dim,
        attention_bias=config.attention_bias,
        rngs=rngs,
    )
