"""The dropout pattern: a function of (rng, batch, head, query, key), whatever computes it.

Threefry gives every query and every key of every head two random words, in O(T + S). The bit of a pair mixes
the four words with a 32-bit finaliser, cheap enough to fuse into a tile of scores: drawing Threefry for each
pair costs more than the attention it drops.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from regard.axes import Array, Bool, Size
from regard.masks.grid import Grid

# Words are two arrays of uint32, side by side on the first axis.
Words = Array
Pair = tuple[Array, Array]  # or taken apart
_QUERY, _KEY = 0xFFFF0001, 0xFFFF0002  # second counter word: apart from the leading axes' numbers


def head_seeds(rng: Array, leading: tuple[Size, ...]) -> Words:
    """Draw two words of seed per leading index, `(2, *B)`.

    Axis by axis, so that the seeds of a smaller call are a corner of a larger one's; an absent batch or head
    axis counts as index 0.
    """
    padded = (*(1,) * (2 - len(leading)), *leading)
    words = jax.random.bits(rng, (2,), jnp.uint32).reshape((2, *(1,) * len(padded)))
    for axis, size in enumerate(padded):
        index = jnp.arange(size, dtype=jnp.uint32).reshape((-1, *(1,) * (len(padded) - axis - 1)))
        words = _draw(words, index.reshape((*(1,) * axis, *index.shape)), axis)
    return words.reshape((2, *leading))


def pair_words(seeds: Words, grid: Grid) -> tuple[Words, Words]:
    """Draw two words per query, `(2, *B, T, 1)`, and two per key, `(2, *B, 1, S)`."""

    def draw(number: Array, stream: int) -> Words:
        return _draw(seeds[..., None, None], number.astype(jnp.uint32), stream)

    return draw(grid.query_number, _QUERY), draw(grid.key_number, _KEY)


def survivors(query: Words | Pair, key: Words | Pair, rate: float) -> Bool[Array, "*B T S"]:
    """Return True where a weight survives."""
    # Multipliers and shifts of the finaliser `lowbias32` (C. Wellons, hash-prospector, 2018).
    bits = query[0] + key[0]
    bits = (bits ^ (bits >> np.uint32(16))) * np.uint32(0x7FEB352D)
    bits = bits ^ (query[1] + key[1])
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x846CA68B)
    bits = bits ^ (bits >> np.uint32(16))
    return bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def _draw(words: Words, counter: Array, stream: int) -> Words:
    """Draw Threefry under the key `words` at (counter, stream)."""
    # Every operand depends on both: under vmap, Threefry wants all of them batched or none.
    counter = counter + (words[0] - words[0])
    zero = counter - counter
    return jnp.stack(threefry2x32_p.bind(words[0] + zero, words[1] + zero, counter, zero + np.uint32(stream)))
