"""Masks that follow from positions alone: causal, window, chunked, dilated, global tokens."""

from __future__ import annotations

import jax.numpy as jnp

from regard.arguments import LARGEST, guided, whole_number
from regard.axes import Array
from regard.masks.bounds import Bounds
from regard.masks.grid import Blocks, Grid
from regard.masks.mask import Mask
from regard.masks.tile_kinds import tile_kind
from regard.records import record, static

FEW_NEIGHBOURS = 1024  # neighbours, for a mask to count as local


def causal() -> Mask:
    """Let each query attend to its own position and those before it.

    keep(q, k) = (k <= q)

    Returns:
        A mask on positions.

    Example:
        >>> from regard import masks
        >>> masks.causal().dense(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.3.
    """
    return Causal()


@guided
def sliding_window(before: int | None, after: int | None = 0) -> Mask:
    """Let each query attend to `before` keys before its own position, its own, and `after` keys after it.

    keep(q, k) = (q - before <= k <= q + after)

    Args:
        before: keys before the query's own, not counting it; None means all of them.
        after: keys after the query's own, not counting it; None means all of them.

    Returns:
        A mask on positions. Windows that count otherwise: `from_flash_window`, `from_hf_window`.

    Raises:
        TypeError, ValueError: an argument that is no integer, or negative.

    Example:
        >>> from regard import masks
        >>> masks.sliding_window(1).dense(3).astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [0, 1, 1]]

    Reference: Beltagy et al., "Longformer", 2020, section 3.1.
    """
    before = None if before is None else whole_number("before", before, 0, clamp=True)
    after = None if after is None else whole_number("after", after, 0, clamp=True)
    return SlidingWindow(before, after)


def chunked(size: int) -> Mask:
    """Let each query attend within its own chunk of `size` positions.

    keep(q, k) = (q // size == k // size)

    Args:
        size: positions per chunk, at least 1.

    Returns:
        A mask on positions.

    Raises:
        TypeError, ValueError: a size that is no integer, or below 1.

    Example:
        >>> from regard import masks
        >>> masks.chunked(2).dense(3).astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """
    return Chunked(whole_number("size", size, 1, clamp=True))


def dilated(stride: int) -> Mask:
    """Let each query attend to keys at a distance divisible by `stride`, before and after.

    keep(q, k) = ((k - q) mod stride == 0)

    Args:
        stride: distance between kept keys, at least 1; 1 keeps everything.

    Returns:
        A mask on positions.

    Raises:
        TypeError, ValueError: a stride that is no integer, or below 1.

    Example:
        >>> from regard import masks
        >>> masks.dilated(2).dense(3).astype(int).tolist()
        [[1, 0, 1], [0, 1, 0], [1, 0, 1]]

    Reference: Child et al., "Generating Long Sequences with Sparse Transformers", 2019, section 4.2.
    """
    return Dilated(whole_number("stride", stride, 1, clamp=True))


def global_tokens(count: int) -> Mask:
    """Let the first `count` queries attend to every key, and every query to the first `count` keys.

    keep(q, k) = (0 <= q < count or k < count)

    Args:
        count: how many positions are global, at least 0.

    Returns:
        A mask on positions, meant to be joined with another by `|`.

    Raises:
        TypeError, ValueError: a count that is no integer, or negative.

    Example:
        >>> from regard import masks
        >>> masks.global_tokens(1).dense(3).astype(int).tolist()
        [[1, 1, 1], [1, 0, 0], [1, 0, 0]]

    Reference: Beltagy et al., "Longformer", 2020, section 3.1.
    """
    return GlobalTokens(whole_number("count", count, 0, clamp=True))


@record
class Causal(Mask):
    """Keys at the query's position and before it."""

    maker = staticmethod(causal)
    bounds = Bounds(after=0)

    def keep(self, grid: Grid) -> Array:
        return grid.key_position <= grid.query_position

    def classify(self, blocks: Blocks) -> Array:
        # Compared and never subtracted: int32 holds the positions, and may not hold their difference.
        (low, high), (first, last) = blocks.query_ends, blocks.key_ends
        return tile_kind(empty=first > high, full=last <= low)


@record
class SlidingWindow(Mask):
    """Keys near the query's position."""

    before: int | None = static()
    after: int | None = static()
    maker = staticmethod(sliding_window)

    @property
    def bounds(self) -> Bounds:
        return Bounds(self.before, self.after)

    @property
    def local(self) -> bool:
        return (
            self.before is not None and self.after is not None and self.before + self.after < FEW_NEIGHBOURS
        )

    def keep(self, grid: Grid) -> Array:
        first, last = self._ends(grid.query_position)
        return (grid.key_position >= first) & (grid.key_position <= last)

    def classify(self, blocks: Blocks) -> Array:
        (lowest, low), (high, highest) = map(self._ends, blocks.query_ends)
        first, last = blocks.key_ends
        empty = (last < lowest) | (first > highest)
        return tile_kind(empty, full=(first >= high) & (last <= low))

    def _ends(self, position: Array) -> tuple[Array, Array]:
        """Return the first and the last position that queries here attend to, as far as int32 reaches."""
        first, last = jnp.full_like(position, -LARGEST - 1), jnp.full_like(position, LARGEST)
        if self.before is not None:
            first = jnp.maximum(position, self.before - LARGEST - 1) - self.before
        if self.after is not None:
            last = jnp.minimum(position, LARGEST - self.after) + self.after
        return first, last

    def expression(self) -> str:
        after = "" if self.after == 0 else f", {self.after}"
        return f"sliding_window({self.before}{after})"


@record
class Chunked(Mask):
    """Keys in the query's chunk."""

    size: int = static()
    maker = staticmethod(chunked)

    @property
    def local(self) -> bool:
        return self.size <= FEW_NEIGHBOURS

    def keep(self, grid: Grid) -> Array:
        return grid.query_position // self.size == grid.key_position // self.size

    def classify(self, blocks: Blocks) -> Array:
        return same_value_kind(*(end // self.size for end in (*blocks.query_ends, *blocks.key_ends)))


def same_value_kind(query_low: Array, query_high: Array, key_low: Array, key_high: Array) -> Array:
    """Classify tiles by `value(query) == value(key)`, from the ranges of both values in each."""
    empty = (query_high < key_low) | (key_high < query_low)
    full = (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
    return tile_kind(empty, full)


@record
class Dilated(Mask):
    """Keys at multiples of a distance."""

    stride: int = static()
    maker = staticmethod(dilated)

    def keep(self, grid: Grid) -> Array:
        return grid.key_position % self.stride == grid.query_position % self.stride

    def classify(self, blocks: Blocks) -> Array:
        (low, high), (first, last) = blocks.query_ends, blocks.key_ends
        # The least distance is first - high, the next multiple so far beyond it; uint32 holds them all.
        missing = ((high % self.stride - first % self.stride) % self.stride).astype(jnp.uint32)
        rows, columns = (high - low).astype(jnp.uint32), (last - first).astype(jnp.uint32)
        empty = (missing > rows) & (missing - rows > columns)
        single = (rows == 0) & (columns == 0)
        return tile_kind(empty, full=~empty & (single | (self.stride == 1)))


@record
class GlobalTokens(Mask):
    """Pairs in which query or key is one of the first."""

    count: int = static()
    maker = staticmethod(global_tokens)

    def keep(self, grid: Grid) -> Array:
        query = (grid.query_position >= 0) & (grid.query_position < self.count)
        return query | (grid.key_position < self.count)

    def classify(self, blocks: Blocks) -> Array:
        (first, last), (key_first, key_last) = blocks.query_ends, blocks.key_ends
        empty = ((first >= self.count) | (last < 0)) & (key_first >= self.count)
        return tile_kind(empty, full=((first >= 0) & (last < self.count)) | (key_last < self.count))
