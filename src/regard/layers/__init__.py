"""Flax NNX modules: attention, linear attention, feed-forward branches, mixtures of experts, and blocks.

Start from `MultiHeadAttention`, or from `EncoderBlock` and `DecoderBlock`; `derive` shows a layer's call step
by step. Needs the extra `regard[models]`.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.layers.blocks import DecoderBlock, DeltaBlock, EncoderBlock
    from regard.layers.compressed_attention import CompressedAttention
    from regard.layers.compressed_cache import CompressedCache
    from regard.layers.delta import GatedDeltaNet, KimiDelta
    from regard.layers.delta_cache import DeltaCache
    from regard.layers.derivation import derive
    from regard.layers.expert_balance import balance_experts
    from regard.layers.experts import Experts
    from regard.layers.feed_forward import FeedForward
    from regard.layers.latent_attention import LatentAttention
    from regard.layers.multi_head import MultiHeadAttention

__all__ = [
    "CompressedAttention", "CompressedCache", "DecoderBlock", "DeltaBlock", "DeltaCache", "EncoderBlock",
    "Experts", "FeedForward", "GatedDeltaNet", "KimiDelta", "LatentAttention", "MultiHeadAttention",
    "balance_experts", "derive",
]  # fmt: skip

__getattr__, __dir__ = defer(
    __name__,
    "models",
    __all__,
    blocks="DecoderBlock DeltaBlock EncoderBlock",
    compressed_attention="CompressedAttention",
    compressed_cache="CompressedCache",
    delta="GatedDeltaNet KimiDelta",
    delta_cache="DeltaCache",
    derivation="derive",
    expert_balance="balance_experts",
    experts="Experts",
    feed_forward="FeedForward",
    latent_attention="LatentAttention",
    multi_head="MultiHeadAttention",
)
