"""Mask: what every mask can do, and how masks combine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Bool, Int
from regard.masks import picture
from regard.masks.grid import Blocks, Grid, Offset, is_concrete, place_queries
from regard.masks.tile_kinds import TileKind
from regard.records import record

# take(data, trailing) takes one leading index out of data that has `trailing` axes of its own.
Take = Callable[[Any, int], Array]


class Mask:
    """Which query may attend to which key, as an expression rather than a matrix.

    A mask is a frozen pytree: its arrays (lengths, segment ids) may be traced, so new values never retrace.
    It is evaluated on positions, tile by tile; a T x S array exists only when `dense` is called. True means
    the query may attend to the key. Combine masks with `&`, `|` and `~`.

    Example:
        >>> from regard import masks
        >>> mask = masks.causal() & masks.sliding_window(2)
        >>> mask
        causal() & sliding_window(2)
        >>> print(mask.picture(4))
        4 queries x 4 keys   ■ may attend  · may not
        0 ■ · · ·
        1 ■ ■ · ·
        2 ■ ■ ■ ·
        3 · ■ ■ ■
    """

    # NumPy would otherwise take `array & mask` apart element by element.
    __array_ufunc__ = None
    precedence = 4  # how tightly the printed expression holds together: calls 4, ~ 3, & 2, | 1

    # What a subclass says.

    @property
    def reads_positions(self) -> bool:
        """Whether the answer depends on where the queries sit, so that T != S needs `query_offset`."""
        raise NotImplementedError

    @property
    def local(self) -> bool:
        """Whether, in long sequences, a query keeps few neighbours: a hint for the choice of tiles."""
        return False

    @property
    def leading_axes(self) -> int:
        """How many leading axes the mask's own data needs at least."""
        return 0

    def keep(self, grid: Grid) -> Bool[Array, ...]:
        """True where the query may attend, broadcastable to the grid's cells, of the grid's rank."""
        raise NotImplementedError

    def classify(self, blocks: Blocks) -> Int[Array, ...]:
        """`TileKind` codes, broadcastable to the tiling, of its rank."""
        raise NotImplementedError

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        """The mask of one leading index, whose data keep their rank."""
        del take, leading_axes
        return self

    def closure_convert(self, grid: Grid) -> Mask:
        """The mask with what its functions close over as leaves, for grids shaped as this one."""
        del grid
        return self

    def slice_grid(self, grid: Grid) -> Mask:
        """The mask of the grid's rows and columns alone, for a call on them at their own positions."""
        del grid
        if jax.tree.leaves(self):
            raise NotImplementedError(
                f"{type(self).__name__} holds arrays and does not say how to slice them"
            )
        return self

    def check(self, leading: tuple[int, ...], num_queries: int, num_keys: int) -> None:
        """Raise ValueError where the mask's data does not fit a call with these sizes."""

    def expression(self) -> str:
        """The code that makes this mask."""
        raise NotImplementedError

    # What every mask can do.

    def dense(
        self,
        num_queries: int,
        num_keys: int | None = None,
        *,
        query_offset: Offset = None,
        key_offset: Offset = None,
        leading_axes: int | None = None,
    ) -> Bool[Array, ...]:
        """Evaluate the mask everywhere: True where the query may attend to the key.

        Args:
            num_queries: T.
            num_keys: S; None means T.
            query_offset: position of the first query, an int or an integer array `(batch,)`. None means 0
                when T == S, and is an error when T != S and the mask reads positions.
            key_offset: position of the first key, likewise; None means 0.
            leading_axes: how many axes the result has before (T, S); None means as many as the mask's own
                data has. Data of shape (batch, ...) keeps to the first of them.

        Returns:
            Boolean array `(*b, T, S)`, where axes of `b` that the mask does not depend on are 1.

        Example:
            >>> from regard import masks
            >>> masks.causal().dense(2, 3, query_offset=1)
            Array([[ True,  True, False],
                   [ True,  True,  True]], dtype=bool)
        """
        num_keys = num_queries if num_keys is None else num_keys
        offset = place_queries(num_queries, num_keys, query_offset, self.reads_positions, key_offset)
        axes = self._rank(leading_axes, offset, key_offset)
        keep = self.keep(Grid.cover(num_queries, num_keys, offset, axes, key_offset))
        return jnp.broadcast_to(keep, (*keep.shape[:axes], num_queries, num_keys))

    def tiles(
        self,
        num_queries: int,
        num_keys: int | None = None,
        *,
        query_block: int = 128,
        key_block: int = 128,
        query_offset: Offset = None,
        key_offset: Offset = None,
        leading_axes: int | None = None,
    ) -> Int[Array, ...]:
        """Say of every tile whether it is EMPTY (0), PARTIAL (1) or FULL (2), without a T x S array.

        EMPTY and FULL are promises; PARTIAL is always a safe answer. Built-in masks answer by interval
        arithmetic; `predicate` and `from_array` look at the cells, one row of tiles at a time.

        Args:
            num_queries: T.
            num_keys: S; None means T.
            query_block: queries per tile, at least 1.
            key_block: keys per tile, at least 1.
            query_offset: as in `dense`.
            key_offset: as in `dense`.
            leading_axes: as in `dense`.

        Returns:
            int8 array `(*b, ceil(T / query_block), ceil(S / key_block))` of `TileKind` codes.

        Raises:
            ValueError: a block below 1, or T != S without a needed `query_offset`.

        Example:
            >>> from regard import masks
            >>> masks.causal().tiles(4, query_block=2, key_block=2)
            Array([[1, 0],
                   [2, 1]], dtype=int8)
        """
        for name, block in (("query_block", query_block), ("key_block", key_block)):
            if block < 1:
                raise ValueError(f"{name}: expected at least 1, got {block}")
        num_keys = num_queries if num_keys is None else num_keys
        offset = place_queries(num_queries, num_keys, query_offset, self.reads_positions, key_offset)
        axes = self._rank(leading_axes, offset, key_offset)
        blocks = Blocks.cover(num_queries, num_keys, query_block, key_block, offset, axes, key_offset)
        codes = self.classify(blocks)
        return jnp.broadcast_to(
            codes, (*codes.shape[:axes], blocks.query_first.shape[-2], blocks.key_first.shape[-1])
        )

    def picture(self, num_queries: int, num_keys: int | None = None, *, query_offset: Offset = None) -> str:
        """Draw the mask for the terminal; beyond 64 queries or keys, one mark stands for a tile.

        Masks with per-row data are drawn for their first row.

        Args:
            num_queries: T.
            num_keys: S; None means T.
            query_offset: as in `dense`.

        Returns:
            Lines of text, one per query (or row of tiles), under a legend.

        Example:
            >>> from regard import masks
            >>> print(masks.chunked(2).picture(4))
            4 queries x 4 keys   ■ may attend  · may not
            0 ■ ■ · ·
            1 ■ ■ · ·
            2 · · ■ ■
            3 · · ■ ■
        """
        num_keys = num_queries if num_keys is None else num_keys
        if not is_concrete((self, query_offset)):
            raise TypeError("picture: expected a mask with concrete arrays, got one inside a trace")
        offset = place_queries(num_queries, num_keys, query_offset, self.reads_positions)
        if max(num_queries, num_keys) <= picture.LARGEST_EXACT:
            cells = np.asarray(self.dense(num_queries, num_keys, query_offset=offset))
            first = int(np.ravel(np.asarray(offset))[0])
            return picture.draw_cells(cells[(0,) * (cells.ndim - 2)], first)
        block = (-(-num_queries // 32) or 1, -(-num_keys // 32) or 1)
        codes = self.tiles(
            num_queries, num_keys, query_block=block[0], key_block=block[1], query_offset=offset
        )
        codes = np.asarray(codes)
        return picture.draw_tiles(codes[(0,) * (codes.ndim - 2)], (num_queries, num_keys), block)

    def _rank(self, leading_axes: int | None, *offsets: Offset) -> int:
        needed = max(self.leading_axes, *map(np.ndim, offsets))
        if leading_axes is None:
            return needed
        if leading_axes < needed:
            raise ValueError(
                f"leading_axes: expected at least {needed}, the axes of the mask's data and of"
                f" offsets; got {leading_axes}"
            )
        return leading_axes

    def __and__(self, other: Mask) -> Mask:
        return And(self, _operand("&", self, other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _operand("|", self, other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __rand__(self, other: Any) -> NoReturn:
        _operand("&", other, other)
        raise AssertionError

    def __ror__(self, other: Any) -> NoReturn:
        _operand("|", other, other)
        raise AssertionError

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a mask is neither true nor false: combine masks with & | ~ instead of and, or, not; test for"
            " absence with `mask is None`"
        )

    def __repr__(self) -> str:
        return self.expression()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        mine, theirs = jax.tree.flatten(self), jax.tree.flatten(other)
        return mine[1] == theirs[1] and all(
            a is b or (is_concrete((a, b)) and np.array_equal(a, b))
            for a, b in zip(mine[0], theirs[0], strict=True)
        )

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))


def _operand(symbol: str, left: Any, right: Any) -> Mask:
    """The right operand, or a word on how to bring an array into the algebra."""
    if isinstance(right, Mask):
        return right
    raise TypeError(
        f"{symbol}: expected masks on both sides, got {type(left).__name__} {symbol} {type(right).__name__};"
        " wrap a boolean array as masks.from_array(array)"
    )


class Pair(Mask):
    """Two masks and an operator."""

    left: Mask
    right: Mask
    symbol = "?"

    @property
    def reads_positions(self) -> bool:
        return self.left.reads_positions or self.right.reads_positions

    @property
    def leading_axes(self) -> int:
        return max(self.left.leading_axes, self.right.leading_axes)

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        left, right = (part.slice_batch(take, leading_axes) for part in (self.left, self.right))
        return self._join(left, right)

    def closure_convert(self, grid: Grid) -> Mask:
        return self._join(self.left.closure_convert(grid), self.right.closure_convert(grid))

    def slice_grid(self, grid: Grid) -> Mask:
        return self._join(self.left.slice_grid(grid), self.right.slice_grid(grid))

    def _join(self, left: Mask, right: Mask) -> Mask:
        return dataclasses.replace(self, left=left, right=right)  # type: ignore[type-var]

    def check(self, leading: tuple[int, ...], num_queries: int, num_keys: int) -> None:
        self.left.check(leading, num_queries, num_keys)
        self.right.check(leading, num_queries, num_keys)

    def expression(self) -> str:
        # The right operand needs parentheses at equal strength: the operators group to the left.
        left = _enclose(self.left, self.left.precedence < self.precedence)
        right = _enclose(self.right, self.right.precedence <= self.precedence)
        return f"{left} {self.symbol} {right}"


def _enclose(mask: Mask, needed: bool) -> str:
    return f"({mask.expression()})" if needed else mask.expression()


@record
class And(Pair):
    left: Mask
    right: Mask
    symbol = "&"
    precedence = 2

    @property
    def local(self) -> bool:
        return self.left.local or self.right.local

    def keep(self, grid: Grid) -> Array:
        return self.left.keep(grid) & self.right.keep(grid)

    def classify(self, blocks: Blocks) -> Array:
        return jnp.minimum(self.left.classify(blocks), self.right.classify(blocks))


@record
class Or(Pair):
    left: Mask
    right: Mask
    symbol = "|"
    precedence = 1

    @property
    def local(self) -> bool:
        return self.left.local and self.right.local

    def keep(self, grid: Grid) -> Array:
        return self.left.keep(grid) | self.right.keep(grid)

    def classify(self, blocks: Blocks) -> Array:
        return jnp.maximum(self.left.classify(blocks), self.right.classify(blocks))


@record
class Not(Mask):
    operand: Mask
    precedence = 3

    @property
    def reads_positions(self) -> bool:
        return self.operand.reads_positions

    @property
    def leading_axes(self) -> int:
        return self.operand.leading_axes

    def keep(self, grid: Grid) -> Array:
        return ~self.operand.keep(grid)

    def classify(self, blocks: Blocks) -> Array:
        return jnp.int8(TileKind.FULL) - self.operand.classify(blocks)

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        return Not(self.operand.slice_batch(take, leading_axes))

    def closure_convert(self, grid: Grid) -> Mask:
        return Not(self.operand.closure_convert(grid))

    def slice_grid(self, grid: Grid) -> Mask:
        return Not(self.operand.slice_grid(grid))

    def check(self, leading: tuple[int, ...], num_queries: int, num_keys: int) -> None:
        self.operand.check(leading, num_queries, num_keys)

    def expression(self) -> str:
        return f"~{_enclose(self.operand, self.operand.precedence < self.precedence)}"
