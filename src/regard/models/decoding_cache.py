"""The state of decoding: a cache per block, and keys and values of a source."""

from __future__ import annotations

from typing import Any

from regard.axes import Array, Int
from regard.cache import KVCache
from regard.layers.multi_head import Memory
from regard.records import record


@record
class DecodingCache:
    """Keys and values of the tokens so far, as `Decoder.read` and `EncoderDecoder.read` need them.

    A frozen pytree; every leaf has the batch first, so `jax.tree.map(lambda leaf: leaf[rows], cache)`
    reorders rows. Make one with the model's `start_cache`.

    Example:
        >>> from flax import nnx
        >>> from regard.models import Decoder, TransformerConfig
        >>> config = TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> cache = Decoder(config, rngs=nnx.Rngs(0)).start_cache(batch=2, capacity=5)
        >>> cache.lengths.tolist(), cache.layers[0].capacity
        ([0, 0], 5)
    """

    lengths: Int[Array, " batch"]
    """Tokens read so far, which is the position of the next one."""
    layers: tuple[KVCache, ...]
    """Keys and values of each block's self-attention."""
    memory: tuple[Memory, ...] | None = None
    """Keys and values of each block's cross-attention; None without a source."""
    memory_lengths: Any = None
    """Valid positions per row of the source, `(batch,)`; None means all."""

    @property
    def overflowed(self) -> Any:
        """True where a row has lost tokens that its next queries need, `(batch,)`."""
        lost = self.lengths < 0
        for layer in self.layers:
            lost = lost | layer.overflowed
        return lost
