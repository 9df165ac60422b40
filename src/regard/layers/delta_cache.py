"""The cache of a layer of the delta rule, beside those of keys and values in one model."""

from __future__ import annotations

from regard.axes import Array, ArrayLike, Bool, Float, Int, Size
from regard.records import record


@record
class DeltaCache:
    """State of a layer of the delta rule after the tokens so far; its size does not depend on their number.

    A frozen pytree, every leaf with the batch first. Make one with the layer's `start_cache`.

    Example:
        >>> from flax import nnx
        >>> from regard.layers import GatedDeltaNet
        >>> cache = GatedDeltaNet(6, 3, rngs=nnx.Rngs(0)).start_cache(batch=2)
        >>> cache.memory.shape, cache.recent.shape
        ((2, 3, 2, 2), (2, 3, 18))
    """

    lengths: Int[Array, " batch"]
    """Tokens read so far."""
    memory: Float[Array, "batch H D E"]
    """The matrix of each head, `State.memory` of `regard.linear`."""
    recent: Float[Array, "batch N C"]
    """Newest tokens that the convolution still reads: queries, keys and values of all heads."""

    @property
    def batch(self) -> Size:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def overflowed(self) -> Bool[Array, " batch"]:
        """False for every row, `(batch,)`: a state has room for any number of tokens."""
        return self.lengths < 0

    def rewind(self, lengths: ArrayLike) -> DeltaCache:
        """Raise ValueError, as a state does not hold the tokens that it was made of."""
        raise ValueError(
            "rewind: expected caches of keys and values, got one with a state of the delta rule, which no"
            " token can be taken out of: keep the cache from before them and read on from it"
        )
