"""Flax NNX layers: `MultiHeadAttention`, `FeedForward`, and the blocks of a Transformer.

`EncoderBlock` and `DecoderBlock` join them with residuals and norms; `derive` shows one call of a
`MultiHeadAttention` step by step.
"""

from regard.layers.blocks import DecoderBlock as DecoderBlock
from regard.layers.blocks import EncoderBlock as EncoderBlock
from regard.layers.derivation import derive as derive
from regard.layers.feed_forward import FeedForward as FeedForward
from regard.layers.multi_head import MultiHeadAttention as MultiHeadAttention
