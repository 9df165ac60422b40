"""Mask: what every mask can do, and the masks that combine others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Bool, Int
from regard.masks.alignment import place_queries
from regard.masks.bounds import Bounds
from regard.masks.data import integers, literal, spell_record, whole_number
from regard.masks.grid import Blocks, Grid, Offset, is_concrete, offset_column, spread
from regard.masks.picture import draw_mask
from regard.masks.tile_kinds import TileKind, classify_cells, join_touched
from regard.records import derived, record, static

# take(data, trailing) takes one leading index out of data that has `trailing` axes of its own.
Take = Callable[[Any, int], Any]


class Mask:
    """The pairs of a query and a key that may attend, as an expression rather than a matrix.

    A mask is a frozen pytree: its arrays (lengths, segment ids) may be traced, so new values never retrace.
    It is evaluated on positions, tile by tile; a T x S array exists only when `dense` is called. True means
    the query may attend to the key. Combine masks with `&`, `|` and `~`.

    A mask of your own is a class with `keep` under `regard.records.record`; other methods have safe answers.

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

    maker: ClassVar[Callable[..., Mask] | None] = None
    """The function that makes such a mask from its fields and checks them; None, the class."""
    reads_positions: ClassVar[bool] = True
    """True if the answer depends on where the queries sit: T != S then needs `query_offset`."""
    local: ClassVar[bool] = False
    """True if, in long sequences, a query keeps few neighbours: a hint for the choice of tiles."""
    block_side: ClassVar[int | None] = None
    """The side of the squares of pairs that are kept or left out as a whole; None, there are none."""
    kinds: ClassVar[Any] = None
    """Kinds of its tiles, where it was prepared."""
    leading_axes: ClassVar[int] = 0
    """Number of leading axes that the mask's own data needs at least."""
    bounds: ClassVar[Bounds] = Bounds(exact=False)
    """Bounds on the pairs that it keeps."""

    def keep(self, grid: Grid) -> Bool[Array, ...]:
        """Return True where the query may attend, broadcastable to the grid's cells, of the grid's rank."""
        raise NotImplementedError

    def classify(self, blocks: Blocks) -> Int[Array, ...]:
        """Return `TileKind` codes, broadcastable to the tiling, of its rank."""
        return classify_cells(self.keep, blocks)

    @property
    def reads_cells(self) -> bool:
        """Return whether `classify` evaluates every cell, which takes long."""
        return type(self).classify is Mask.classify

    @property
    def parts(self) -> tuple[Mask, ...]:
        """Return the masks that all have to agree."""
        return (self,)

    def combine_kinds(self, kinds_of: Callable[[Mask], Any]) -> Any:
        """Return the kinds of tiles from those of the masks that it is made of."""
        return kinds_of(self)

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        """Return the mask of one leading index, whose data keep their rank."""
        del take, leading_axes
        return self

    def closure_convert(self, grid: Grid) -> Mask:
        """Return the mask with arrays that its functions close over as leaves, for grids shaped as this."""
        del grid
        return self

    def slice_grid(self, grid: Grid) -> Mask:
        """Return the mask of the grid's rows and columns alone, for a call on them at their own positions."""
        del grid
        if jax.tree.leaves(self):
            raise NotImplementedError(
                f"{type(self).__name__} holds arrays and does not say how to slice them"
            )
        return self

    def number_leading(self, leading: tuple[int, ...]) -> Mask:
        """Return the mask for these leading axes: its functions then know their batch row and head."""
        del leading
        return self

    def check(self, leading: tuple[int, ...], num_queries: int, num_keys: int) -> None:
        """Raise ValueError where the mask's data does not fit a call with these sizes."""

    def expression(self) -> str:
        """Return the code that makes this mask."""
        return spell_record(self)

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
        offset, axes = self._place(num_queries, num_keys, query_offset, key_offset, leading_axes)
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
        """Classify every tile as EMPTY (0), PARTIAL (1) or FULL (2), without a T x S array.

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
            whole_number(name, block, 1)
        num_keys = num_queries if num_keys is None else num_keys
        offset, axes = self._place(num_queries, num_keys, query_offset, key_offset, leading_axes)
        blocks = Blocks.cover(num_queries, num_keys, query_block, key_block, offset, axes, key_offset)
        codes = self.classify(blocks)
        return jnp.broadcast_to(
            codes, (*codes.shape[:axes], blocks.query_first.shape[-2], blocks.key_first.shape[-1])
        )

    def prepare(
        self,
        num_queries: int,
        num_keys: int | None = None,
        *,
        leading: tuple[int, ...] = (),
        query_offset: Offset = None,
        key_offset: Offset = None,
        block: int = 128,
    ) -> Mask:
        """Look at the mask's tiles once, for many calls: layers of a model, and both of their passes.

        Masks that answer by interval arithmetic gain little. `predicate` and `from_array` are looked at cell
        by cell, in every call and pass, unless they are prepared.

        Args:
            num_queries: T.
            num_keys: S; None means T.
            leading: leading axes of the calls, `(batch, heads)`; needed where a predicate reads them.
            query_offset: as in `dense`. A call with other offsets is right, and skips no tile.
            key_offset: as in `dense`.
            block: queries and keys of the tiles that are looked at.

        Returns:
            The same mask, which knows its tiles; it may be made under jit, closed over or passed on.

        Raises:
            ValueError: a block below 1, or T != S without a needed `query_offset`; in a call, other sizes.

        Example:
            >>> from regard import masks
            >>> even = masks.predicate(lambda query, key: key % 2 == 0)
            >>> prepared = even.prepare(256)
            >>> prepared.dense(256).sum() == even.dense(256).sum(), prepared.reads_cells
            (Array(True, dtype=bool), False)
        """
        num_keys = num_queries if num_keys is None else num_keys
        mask = self.number_leading(leading)
        kinds = mask.tiles(
            num_queries,
            num_keys,
            query_block=block,
            key_block=block,
            query_offset=query_offset,
            key_offset=key_offset,
            leading_axes=max(len(leading), mask.leading_axes, np.ndim(query_offset), np.ndim(key_offset)),
        )
        placed = place_queries(num_queries, num_keys, query_offset, mask.reads_positions, key_offset)
        offsets = (
            integers(name, 0 if offset is None else offset)
            for name, offset in (("query_offset", placed), ("key_offset", key_offset))
        )
        return Prepared(mask, *offsets, kinds, num_queries, num_keys, block)

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
        if not is_concrete((self, query_offset)):
            raise TypeError("picture: expected a mask with concrete arrays, got one inside a trace")
        return draw_mask(self, num_queries, num_queries if num_keys is None else num_keys, query_offset)

    def _place(self, T: int, S: int, offset: Offset, key_offset: Offset, axes: Any) -> tuple[Offset, int]:
        offset = place_queries(T, S, offset, self.reads_positions, key_offset)
        needed = max(self.leading_axes, np.ndim(offset), np.ndim(key_offset))
        if axes is not None and axes < needed:
            raise ValueError(
                f"leading_axes: expected at least {needed}, the axes of the mask's data and of"
                f" offsets; got {axes}"
            )
        return offset, needed if axes is None else axes

    def __and__(self, other: Mask) -> Mask:
        return And(self, _operand("&", self, other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _operand("|", self, other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __rand__(self, other: Any) -> Mask:
        return _operand("&", other, other)

    def __ror__(self, other: Any) -> Mask:
        return _operand("|", other, other)

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
    """Return the right operand, or say how to bring an array into the algebra."""
    if isinstance(right, Mask):
        return right
    raise TypeError(
        f"{symbol}: expected masks on both sides, got {type(left).__name__} {symbol} {type(right).__name__};"
        " wrap a boolean array as masks.from_array(array)"
    )


@record
class Prepared(Mask):
    """A mask that knows the kinds of its tiles in calls of one size."""

    mask: Mask
    query_offset: Any
    key_offset: Any
    kinds: Any = derived()  # (*b, Q, K)
    num_queries: int = static()
    num_keys: int = static()
    block: int = static()

    @staticmethod
    def maker(
        mask: Mask, query_offset: Any, key_offset: Any, num_queries: int, num_keys: int, block: int
    ) -> Mask:
        leading = (1,) * mask.leading_axes
        return mask.prepare(
            num_queries,
            num_keys,
            leading=leading,
            query_offset=query_offset,
            key_offset=key_offset,
            block=block,
        )

    @property
    def reads_positions(self) -> bool:
        return self.mask.reads_positions

    @property
    def local(self) -> bool:
        return self.mask.local

    @property
    def leading_axes(self) -> int:
        return self.mask.leading_axes

    @property
    def bounds(self) -> Bounds:
        return self.mask.bounds

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.mask.parts

    @property
    def reads_cells(self) -> bool:
        return False

    def keep(self, grid: Grid) -> Array:
        return self.mask.keep(grid)

    def classify(self, blocks: Blocks) -> Array:
        least = most = spread(jnp.asarray(self.kinds), blocks.leading_axes + 2, trailing=2)
        for axis, ends, tile in (
            (-2, (blocks.query_first, blocks.query_last), blocks.query_block),
            (-1, (blocks.key_first, blocks.key_last), blocks.key_block),
        ):
            least = join_touched(jnp.minimum, least, ends, tile, self.block, axis)
            most = join_touched(jnp.maximum, most, ends, tile, self.block, axis)
        query_offset, key_offset, found = (
            offset_column(offset, blocks.leading_axes)
            for offset in (self.query_offset, self.key_offset, blocks.key_offset)
        )
        same = jnp.all(query_offset == blocks.query_offset) & jnp.all(key_offset == found)
        return jnp.where((least == most) & same, least, jnp.int8(TileKind.PARTIAL))

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        return dataclasses.replace(
            self,
            mask=self.mask.slice_batch(take, leading_axes),
            query_offset=take(self.query_offset, 0),
            key_offset=take(self.key_offset, 0),
            kinds=take(self.kinds, 2),
        )

    def closure_convert(self, grid: Grid) -> Mask:
        return dataclasses.replace(self, mask=self.mask.closure_convert(grid))

    def slice_grid(self, grid: Grid) -> Mask:
        return self.mask.slice_grid(grid)

    def number_leading(self, leading: tuple[int, ...]) -> Mask:
        numbered = self.mask.number_leading(leading)
        if jax.tree.structure(numbered) != jax.tree.structure(self.mask):
            raise ValueError(
                f"prepare: expected leading={leading}, because the mask reads batch rows or heads; it was"
                " prepared without"
            )
        return self

    def check(self, leading: tuple[int, ...], num_queries: int, num_keys: int) -> None:
        if (num_queries, num_keys) != (self.num_queries, self.num_keys):
            raise ValueError(
                f"mask: expected a call with T = {self.num_queries} and S = {self.num_keys}, which it was"
                f" prepared for; got T = {num_queries}, S = {num_keys}"
            )
        self.mask.check(leading, num_queries, num_keys)

    def expression(self) -> str:
        mask = self.mask.expression()
        mask = mask if self.mask.precedence > 3 else f"({mask})"
        sizes = f"{self.num_queries}, {self.num_keys}"
        offsets = {"query_offset": self.query_offset, "key_offset": self.key_offset}
        given = "".join(f", {name}={literal(offset)}" for name, offset in offsets.items() if np.any(offset))
        return f"{mask}.prepare({sizes}{given}{'' if self.block == 128 else f', block={self.block}'})"


class Combination(Mask):
    """A mask made of others."""

    @property
    def operands(self) -> tuple[Mask, ...]:
        """Return the masks that it is made of."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def _map(self, change: Callable[[Mask], Mask]) -> Mask:
        return type(self)(*map(change, self.operands))

    def _enclose(self, mask: Mask, least: int) -> str:
        return mask.expression() if mask.precedence >= least else f"({mask.expression()})"

    @property
    def reads_positions(self) -> bool:
        return any(mask.reads_positions for mask in self.operands)

    @property
    def leading_axes(self) -> int:
        return max(mask.leading_axes for mask in self.operands)

    @property
    def reads_cells(self) -> bool:
        return any(mask.reads_cells for mask in self.operands)

    @property
    def block_side(self) -> int | None:
        return max((mask.block_side for mask in self.operands if mask.block_side), default=None)

    def classify(self, blocks: Blocks) -> Array:
        return self.combine_kinds(lambda mask: mask.classify(blocks))

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        return self._map(lambda mask: mask.slice_batch(take, leading_axes))

    def closure_convert(self, grid: Grid) -> Mask:
        return self._map(lambda mask: mask.closure_convert(grid))

    def slice_grid(self, grid: Grid) -> Mask:
        return self._map(lambda mask: mask.slice_grid(grid))

    def number_leading(self, leading: tuple[int, ...]) -> Mask:
        return self._map(lambda mask: mask.number_leading(leading))

    def check(self, leading: tuple[int, ...], num_queries: int, num_keys: int) -> None:
        for mask in self.operands:
            mask.check(leading, num_queries, num_keys)


@record
class And(Combination):
    """Pairs that two masks keep."""

    left: Mask
    right: Mask
    precedence = 2

    @property
    def local(self) -> bool:
        return self.left.local or self.right.local

    @property
    def bounds(self) -> Bounds:
        return self.left.bounds & self.right.bounds

    @property
    def parts(self) -> tuple[Mask, ...]:
        return *self.left.parts, *self.right.parts

    def keep(self, grid: Grid) -> Array:
        return self.left.keep(grid) & self.right.keep(grid)

    def combine_kinds(self, kinds_of: Callable[[Mask], Any]) -> Array:
        return jnp.minimum(self.left.combine_kinds(kinds_of), self.right.combine_kinds(kinds_of))

    def expression(self) -> str:
        # The right operand needs parentheses at equal strength: the operators group to the left.
        return f"{self._enclose(self.left, 2)} & {self._enclose(self.right, 3)}"


@record
class Or(Combination):
    """Pairs that either of two masks keeps."""

    left: Mask
    right: Mask
    precedence = 1

    @property
    def local(self) -> bool:
        return self.left.local and self.right.local

    def keep(self, grid: Grid) -> Array:
        return self.left.keep(grid) | self.right.keep(grid)

    def combine_kinds(self, kinds_of: Callable[[Mask], Any]) -> Array:
        return jnp.maximum(self.left.combine_kinds(kinds_of), self.right.combine_kinds(kinds_of))

    def expression(self) -> str:
        return f"{self._enclose(self.left, 1)} | {self._enclose(self.right, 2)}"


@record
class Not(Combination):
    """Pairs that a mask does not keep."""

    operand: Mask
    precedence = 3

    def keep(self, grid: Grid) -> Array:
        return ~self.operand.keep(grid)

    def combine_kinds(self, kinds_of: Callable[[Mask], Any]) -> Array:
        return jnp.int8(TileKind.FULL) - self.operand.combine_kinds(kinds_of)

    def expression(self) -> str:
        return f"~{self._enclose(self.operand, 3)}"
