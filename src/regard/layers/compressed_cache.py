"""The cache of compressed attention: a window of tokens, entries of blocks, and what is not pooled yet."""

from __future__ import annotations

from regard.axes import Array, Bool, Float, Int, Size
from regard.records import record, static


@record
class CompressedCache:
    """Hold one entry for each block of the tokens so far, and the newest tokens as they are.

    A frozen pytree, every leaf with the batch first. Make one with the layer's `start_cache`. Under jit
    nothing can be raised: entries without room are dropped there, and `overflowed` says of which rows.

    Example:
        >>> from flax import nnx
        >>> from regard.layers import CompressedAttention
        >>> sizes = {"head_dim": 4, "rotary_dim": 2, "window": 3, "compress_rate": 5, "query_latent_dim": 7}
        >>> layer = CompressedAttention(6, 2, **sizes, output_latent_dim=3, rngs=nnx.Rngs(0))
        >>> cache = layer.start_cache(batch=1, capacity=1000)
        >>> cache.recent.shape, cache.entries[0].shape, cache.unfinished.shape
        ((1, 3, 4), (1, 200, 4), (1, 4, 8))
    """

    lengths: Int[Array, " batch"]
    """Tokens read so far."""
    recent: Float[Array, "batch W D"]
    """Keys, which are values too, of the newest tokens that the window of the next one reaches."""
    unfinished: Float[Array, "batch N C"]
    """Features and gates of the newest tokens that a block to come may read."""
    entries: tuple[Float[Array, "batch S _"], ...]
    """Entries of blocks in order, zero where there is none yet; behind them those of an indexer."""
    compress_rate: int = static()
    """Tokens of a block."""

    @property
    def batch(self) -> Size:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def overflowed(self) -> Bool[Array, " batch"]:
        """True where a row has ended more blocks than there is room for: its outputs are not right."""
        return self.lengths // self.compress_rate > self.entries[0].shape[1]
