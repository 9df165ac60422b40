"""The mask that block diffusion language models are trained with."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from regard.arguments import check_reach, whole_number
from regard.axes import Array
from regard.masks.intervals import Intervals
from regard.masks.mask import Mask
from regard.records import record, static


def block_diffusion(length: int, size: int) -> Mask:
    """Let a noisy block see itself and the clean blocks before it, and a clean one those up to itself.

    A row holds a text twice: its noisy tokens at positions 0..length-1, then its clean tokens at length..2
    length-1. With block(p) = (p mod length) // size,

    keep(q, k) = (block(q) == block(k)) where query and key are noisy,
    (block(k) < block(q)) where the query is noisy and the key clean,
    (block(k) <= block(q)) where both are clean, False where the query is clean and the key noisy

    Args:
        length: tokens of the text, at least 1: half the row.
        size: tokens of a block, at least 1; the last block may be shorter. 1 is one token at a time.

    Returns:
        A mask on positions. What lies outside of both copies sees nothing and is seen by nobody. The clean
        half alone, with which blocks are sampled one after the other, is `causal() | chunked(size)`.

    Raises:
        TypeError, ValueError: an argument that is no integer, or below 1; a row longer than int32 counts.

    Example:
        >>> from regard import masks
        >>> print(masks.block_diffusion(4, 2).picture(8))
        8 queries x 8 keys   ■ may attend  · may not
        0 ■ ■ · · · · · ·
        1 ■ ■ · · · · · ·
        2 · · ■ ■ ■ ■ · ·
        3 · · ■ ■ ■ ■ · ·
        4 · · · · ■ ■ · ·
        5 · · · · ■ ■ · ·
        6 · · · · ■ ■ ■ ■
        7 · · · · ■ ■ ■ ■

    Reference: Arriola et al., "Block Diffusion", 2025, section 3.2.
    """
    length = whole_number("length", length, 1)
    check_reach("length", 2 * length)
    return BlockDiffusion(length, whole_number("size", size, 1, clamp=True))


@record
class BlockDiffusion(Intervals):
    """Noisy tokens, then the same tokens clean.

    Noisy blocks have the numbers 0, 1, ... and clean ones go on in reverse, so that whoever sees a clean
    block, noisy blocks after it and clean ones from it on, has numbers without a gap.
    """

    length: int = static()
    size: int = static()
    maker = staticmethod(block_diffusion)

    def _blocks(self, position: Array) -> tuple[Array, Array, Array, int]:
        """Return which positions are noisy, which clean, the blocks of each, and how many there are."""
        noisy = (position >= 0) & (position < self.length)
        clean = (position >= self.length) & (position < 2 * self.length)
        block = jnp.where(clean, position - self.length, position) // np.int32(self.size)
        return noisy, clean, block, -(-self.length // self.size)

    def number(self, position: Array, leading_axes: int) -> Array:
        noisy, clean, block, count = self._blocks(position)
        return jnp.where(noisy, block, jnp.where(clean, 2 * count - 1 - block, -1))

    def interval(self, position: Array, leading_axes: int) -> tuple[Array, Array]:
        noisy, clean, block, count = self._blocks(position)
        enter = jnp.where(noisy, block, jnp.where(clean, block + 1, 2 * count))
        return enter, jnp.where(noisy, block + 1, jnp.where(clean, 2 * count - block, 0))
