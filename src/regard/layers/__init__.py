"""Attention as Flax NNX modules: multi-head attention, the feed-forward branch, and blocks of both.

Start from `MultiHeadAttention`, or from `EncoderBlock` and `DecoderBlock`; `derive` shows a layer's call step
by step. Needs the extra `regard[models]`.
"""

from typing import TYPE_CHECKING

from regard.loading import defer

if TYPE_CHECKING:
    from regard.layers.blocks import DecoderBlock, EncoderBlock
    from regard.layers.derivation import derive
    from regard.layers.feed_forward import FeedForward
    from regard.layers.multi_head import MultiHeadAttention

__all__ = ["DecoderBlock", "EncoderBlock", "FeedForward", "MultiHeadAttention", "derive"]

__getattr__, __dir__ = defer(
    __name__,
    "models",
    __all__,
    blocks="DecoderBlock EncoderBlock",
    derivation="derive",
    feed_forward="FeedForward",
    multi_head="MultiHeadAttention",
)
