"""Floor 6. Attention as Flax NNX modules: projections and heads, the feed-forward branch, the two blocks."""

from regard.layers.blocks import DecoderBlock as DecoderBlock
from regard.layers.blocks import EncoderBlock as EncoderBlock
from regard.layers.derivation import derive as derive
from regard.layers.feed_forward import FeedForward as FeedForward
from regard.layers.multi_head import MultiHeadAttention as MultiHeadAttention
