"""Masks of patches on a grid: each sees those near it along every axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import reduce

import jax.numpy as jnp
import numpy as np

from regard.arguments import check_reach, whole_number
from regard.axes import Array
from regard.masks.bounds import Bounds
from regard.masks.grid import Blocks, Grid
from regard.masks.mask import Mask
from regard.masks.positional import FEW_NEIGHBOURS
from regard.masks.tile_kinds import tile_kind
from regard.records import record, static


def neighbourhood(shape: Sequence[int], radius: int | Sequence[int], start: int = 0) -> Mask:
    """Let each patch of a grid attend to those at most `radius` away along every axis.

    keep(q, k) = all_a (|x_a(q) - x_a(k)| <= radius_a), x(p) being the coordinates of patch p - start

    Args:
        shape: patches along each axis, such as (rows, columns) or (frames, rows, columns), at least 1 each.
            Patches lie in row-major order: the last axis is the fastest.
        radius: patches to either side, at least 0: an integer, or one per axis. A window has up to
            2 radius + 1 patches along an axis.
        start: position of the first patch, at least 0: the number of tokens before it, such as a class
            token's.

    Returns:
        A mask on positions. At a border a window is cut off, and so has fewer patches; NATTEN moves it
        inwards instead. Positions that are no patch see nothing and are seen by nobody:
        `neighbourhood(shape, radius, start=1) | global_tokens(1)` joins a class token.

    Raises:
        TypeError: sizes that are not integers.
        ValueError: no axis, a size below its least, more patches than int32 counts, or a radius whose length
            is not that of shape.

    Example:
        >>> from regard import masks
        >>> mask = masks.neighbourhood((3, 3), 1)
        >>> mask.dense(9)[4].reshape((3, 3)).astype(int).tolist()  # the middle sees all
        [[1, 1, 1], [1, 1, 1], [1, 1, 1]]
        >>> mask.dense(9)[0].reshape((3, 3)).astype(int).tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 0]]

    Reference: Hassani et al., "Neighborhood Attention Transformer", 2023, section 3.
    """
    try:
        sizes = tuple(whole_number(f"shape[{axis}]", size, 1) for axis, size in enumerate(shape))
    except TypeError:
        raise TypeError(f"shape: expected integers, one per axis of the grid, got {shape!r}") from None
    if not sizes:
        raise ValueError("shape: expected at least one axis, got none")
    radii = tuple(radius) if isinstance(radius, Sequence) else (radius,) * len(sizes)
    if len(radii) != len(sizes):
        raise ValueError(f"radius: expected an integer or {len(sizes)} of them, as shape has, got {radius!r}")
    radii = tuple(whole_number("radius", each, 0, clamp=True) for each in radii)
    start = whole_number("start", start, 0)
    check_reach("shape, start", start + math.prod(sizes))
    return Neighbourhood(sizes, radii, start)


@record
class Neighbourhood(Mask):
    """Patches near the query's along every axis of their grid."""

    shape: tuple[int, ...] = static()
    radius: tuple[int, ...] = static()
    start: int = static()
    maker = staticmethod(neighbourhood)

    @property
    def _strides(self) -> tuple[int, ...]:
        """Return how far apart neighbours along each axis are in row-major order."""
        return tuple(itertools.accumulate((1, *self.shape[:0:-1]), int.__mul__))[::-1]

    @property
    def local(self) -> bool:
        windows = (min(2 * radius + 1, size) for radius, size in zip(self.radius, self.shape, strict=True))
        return math.prod(windows) < FEW_NEIGHBOURS

    @property
    def bounds(self) -> Bounds:
        reach = sum(radius * stride for radius, stride in zip(self.radius, self._strides, strict=True))
        return Bounds(reach, reach, exact=False)

    def _inside(self, position: Array) -> Array:
        return (position >= self.start) & (position < self.start + math.prod(self.shape))

    def keep(self, grid: Grid) -> Array:
        query, key = grid.query_position, grid.key_position
        axes = zip(self._axes, self.radius, strict=True)
        near = [
            jnp.abs(_coordinate(query, *axis) - _coordinate(key, *axis)) <= radius for axis, radius in axes
        ]
        return reduce(jnp.logical_and, near, self._inside(query) & self._inside(key))

    @property
    def _axes(self) -> list[tuple[int, int, int]]:
        return [(self.start, stride, size) for stride, size in zip(self._strides, self.shape, strict=True)]

    def classify(self, blocks: Blocks) -> Array:
        queries, keys = blocks.query_ends, blocks.key_ends
        query_patch, key_patch = self._clip(queries), self._clip(keys)
        empty = (query_patch[0] > query_patch[1]) | (key_patch[0] > key_patch[1])
        full = self._inside(queries[0]) & self._inside(queries[1])
        full = full & self._inside(keys[0]) & self._inside(keys[1])
        for axis, radius in zip(self._axes, self.radius, strict=True):
            query_low, query_high = _range(*query_patch, *axis)
            key_low, key_high = _range(*key_patch, *axis)
            empty = empty | (key_low - query_high > radius) | (query_low - key_high > radius)
            full = full & (jnp.maximum(key_high - query_low, query_high - key_low) <= radius)
        return tile_kind(empty, full)

    def _clip(self, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        """Return the first and last of the positions between the ends that are patches."""
        last = self.start + math.prod(self.shape) - 1
        return jnp.maximum(ends[0], self.start), jnp.minimum(ends[1], last)

    def expression(self) -> str:
        radius = self.radius[0] if len(set(self.radius)) == 1 else self.radius
        start = f", start={self.start}" if self.start else ""
        return f"neighbourhood({self.shape}, {radius}{start})"


def _coordinate(position: Array, start: int, stride: int, size: int) -> Array:
    return (position - start) // np.int32(stride) % np.int32(size)


def _range(first: Array, last: Array, start: int, stride: int, size: int) -> tuple[Array, Array]:
    """Return bounds of a coordinate between two positions: exact unless a line ends between them."""
    ends_between = (last - start) // (stride * size) > (first - start) // (stride * size)
    low = _coordinate(first, start, stride, size)
    high = _coordinate(last, start, stride, size)
    return jnp.where(ends_between, 0, low), jnp.where(ends_between, size - 1, high)
