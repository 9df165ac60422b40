"""Mask: what every mask says of itself, and what can be done with each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp

from regard.arguments import keep_array, whole_number
from regard.axes import Array, ArrayLike, Bool, Int
from regard.masks.alignment import align_mask
from regard.masks.bounds import Bounds
from regard.masks.data import spell_record, suggest_call
from regard.masks.grid import Blocks, Grid, Offset, are_same, is_concrete
from regard.masks.picture import draw_mask
from regard.masks.tile_kinds import KeptTiles, classify_cells

# take(data, trailing) takes one leading index out of data that has `trailing` axes of its own.
Take = Callable[[Any, int], Any]
Known = tuple[tuple[str, Offset], ...]  # offsets that are no arrays, by side


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
    # What makes masks of masks, by the operation that it is.
    _operations: ClassVar[dict[str, Callable[..., Mask]]] = {}
    precedence = 4  # how tightly the printed expression holds together: calls 4, ~ 3, & 2, | 1

    def __init_subclass__(cls, operation: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if operation is not None:
            Mask._operations[operation] = cls

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
    kept_tiles: ClassVar[KeptTiles | None] = None
    """Numbers of those that it keeps, where it was prepared outside a trace."""
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

    def classify_every(self, blocks: Blocks) -> Int[Array, ...]:
        """Return the same for each tile, `(*b, Q, K)`."""
        codes, tiling = self.classify(blocks), (blocks.query_first.shape[-2], blocks.key_first.shape[-1])
        return jnp.broadcast_to(codes, (*codes.shape[:-2], *tiling))

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
        return self

    def pin(self) -> Mask:
        """Return the mask with functions as they are now, by what they compute."""
        return self

    def closure_convert(self, grid: Grid) -> Mask:
        """Return the mask with arrays that its functions close over as leaves, for grids shaped as this."""
        return self

    def slice_grid(self, grid: Grid) -> Mask:
        """Return the mask of the grid's rows and columns alone, for a call on them at their own positions."""
        if jax.tree.leaves(self):
            raise NotImplementedError(
                f"{type(self).__name__} holds arrays and does not say how to slice them"
            )
        return self

    def number_leading(self, leading: tuple[int, ...] | None) -> Mask:
        """Return the mask whose functions know batch rows and heads of a call; with None, of no call yet."""
        return self

    def check(self, leading: tuple[int, ...] | None, num_queries: int, num_keys: int) -> None:
        """Raise ValueError where the mask's data does not fit a call with these sizes.

        `leading` is None where nobody knows them, as in `dense`.
        """

    def check_positions(self, query: Offset, key: Offset) -> None:
        """Raise ValueError where the mask has no meaning for rows that sit there."""

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
        query_positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        leading_axes: int | None = None,
    ) -> Bool[Array, ...]:
        """Evaluate the mask everywhere: True where the query may attend to the key.

        Args:
            num_queries: T.
            num_keys: S; None means T.
            query_offset: position of the first query, an int or an integer array `(batch,)`. None means 0
                when T == S, and is an error when T != S and the mask reads positions.
            key_offset: position of the first key, likewise; None means 0.
            query_positions, key_positions: in place of an offset, a position for each query, `(T,)` or
                `(batch..., T)`, or for each key; in any order.
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
        offsets, positions = (query_offset, key_offset), (query_positions, key_positions)
        query, key, axes = align_mask(self, num_queries, num_keys, offsets, positions, leading_axes)
        return _keep_everywhere(self.pin(), *_divide(query, key), axes, (num_queries, num_keys))

    def tiles(
        self,
        num_queries: int,
        num_keys: int | None = None,
        *,
        query_block: int = 128,
        key_block: int = 128,
        query_offset: Offset = None,
        key_offset: Offset = None,
        query_positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        leading_axes: int | None = None,
    ) -> Int[Array, ...]:
        """Classify every tile as EMPTY (0), PARTIAL (1) or FULL (2), without a T x S array.

        EMPTY and FULL are promises; PARTIAL is always a safe answer. Built-in masks answer by interval
        arithmetic; `predicate` and `from_array` look at the cells, one row of tiles at a time.

        Args:
            num_queries, num_keys: as in `dense`.
            query_block, key_block: queries and keys per tile, at least 1.
            query_offset, key_offset, query_positions, key_positions, leading_axes: as in `dense`.

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
        whole_number("query_block", query_block, 1)
        whole_number("key_block", key_block, 1)
        num_keys = num_queries if num_keys is None else num_keys
        offsets, positions = (query_offset, key_offset), (query_positions, key_positions)
        query, key, axes = align_mask(self, num_queries, num_keys, offsets, positions, leading_axes)
        sizes = (num_queries, num_keys, query_block, key_block)
        return _classify_everywhere(self.pin(), *_divide(query, key), axes, sizes)

    def prepare(
        self,
        num_queries: int,
        num_keys: int | None = None,
        *,
        leading: tuple[int, ...] = (),
        query_offset: Offset = None,
        key_offset: Offset = None,
        query_positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
        block: int = 128,
    ) -> Mask:
        """Look at the mask's tiles once, for many calls: layers of a model, and both of their passes.

        Masks that answer by interval arithmetic gain little. `predicate` and `from_array` are looked at cell
        by cell, in every call and pass, unless they are prepared.

        Args:
            num_queries, num_keys: as in `dense`.
            leading: leading axes of the calls, `(batch, heads)`; needed where a predicate reads them.
            query_offset, key_offset, query_positions, key_positions: as in `dense`. In a call with others the
                answer is right, and no tile is skipped.
            block: queries and keys of the tiles that are looked at.

        Returns:
            The same mask, which knows its tiles; it may be made under jit, closed over or passed on.

        Raises:
            TypeError, ValueError: no tuple; a block below 1; a missing `query_offset`; other sizes in calls.

        Example:
            >>> from regard import masks
            >>> even = masks.predicate(lambda query, key: key % 2 == 0)
            >>> prepared = even.prepare(256)
            >>> prepared.dense(256).sum() == even.dense(256).sum(), prepared.reads_cells
            (Array(True, dtype=bool), False)
        """
        whole_number("block", block, 1)
        if not isinstance(leading, tuple):
            raise TypeError(f"leading: expected the calls' leading axes, (batch, heads); got {leading!r}")
        num_keys = num_queries if num_keys is None else num_keys
        mask = self.number_leading(leading).pin()
        mask.check(leading or None, num_queries, num_keys)
        offsets, positions = (query_offset, key_offset), (query_positions, key_positions)
        query, key, axes = align_mask(mask, num_queries, num_keys, offsets, positions, len(leading) or None)
        query, key = jax.tree.map(keep_array, (0 if query is None else query, 0 if key is None else key))
        kinds = _classify_everywhere(mask, *_divide(query, key), axes, (num_queries, num_keys, block, block))
        tiles = KeptTiles.count(kinds, block)
        return self._operations["prepare"](mask, query, key, kinds, tiles, num_queries, num_keys, block)

    def picture(
        self,
        num_queries: int,
        num_keys: int | None = None,
        *,
        query_offset: Offset = None,
        query_positions: ArrayLike | None = None,
        key_positions: ArrayLike | None = None,
    ) -> str:
        """Draw the mask for the terminal; beyond 64 queries or keys, one mark stands for a tile.

        Masks with per-row data are drawn for their first row, and the legend says so.

        Args:
            num_queries, num_keys, query_offset, query_positions, key_positions: as in `dense`.

        Returns:
            Lines of text, one per query (or row of tiles) and numbered by its position, under a legend.

        Example:
            >>> from regard import masks
            >>> print(masks.chunked(2).picture(4))
            4 queries x 4 keys   ■ may attend  · may not
            0 ■ ■ · ·
            1 ■ ■ · ·
            2 · · ■ ■
            3 · · ■ ■
        """
        if not is_concrete((self, query_offset, query_positions, key_positions)):
            raise TypeError("picture: expected a mask with concrete arrays, got one inside a trace")
        num_keys = num_queries if num_keys is None else num_keys
        offsets, positions = (query_offset, None), (query_positions, key_positions)
        query, key, _ = align_mask(self, num_queries, num_keys, offsets, positions)
        return draw_mask(self, num_queries, num_keys, query, key)

    def __and__(self, other: Mask) -> Mask:
        return _join("&", self, other)

    def __or__(self, other: Mask) -> Mask:
        return _join("|", self, other)

    def __invert__(self) -> Mask:
        return self._operations["~"](self)

    def __rand__(self, other: Any) -> Mask:
        return _join("&", other, self)

    def __ror__(self, other: Any) -> Mask:
        return _join("|", other, self)

    def _refuse_arithmetic(self, other: Any) -> NoReturn:
        raise TypeError(
            "masks are joined by & (both keep the pair) and | (one of them does) and turned by ~, not by"
            " arithmetic; for causal + window write masks.causal() & masks.sliding_window(before)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __xor__ = __rxor__ = _refuse_arithmetic

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a mask is neither true nor false: combine masks with & | ~ instead of and, or, not; test for"
            " absence with `mask is None`"
        )

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        del dtype, copy
        raise TypeError("a mask is no array: join several by & or |; mask.dense(T, S) makes an array of one")

    def __repr__(self) -> str:
        return self.expression()

    def __eq__(self, other: object) -> bool:
        return are_same(self, other) if isinstance(other, Mask) else NotImplemented

    def __hash__(self) -> int:
        return hash(jax.tree.structure(self))


def _divide(query: Offset, key: Offset) -> tuple[dict[str, Offset], Known]:
    """Return offsets that are arrays, and those that are known when a program is compiled."""
    offsets = {"query": query, "key": key}
    fixed = {name: offset for name, offset in offsets.items() if offset is None or isinstance(offset, int)}
    return {name: offset for name, offset in offsets.items() if name not in fixed}, tuple(fixed.items())


# One program each: operation by operation, a mask would be compiled, and stored, once for each of them.
@partial(jax.jit, static_argnames=("fixed", "axes", "sizes"))
def _keep_everywhere(
    mask: Mask, moved: dict[str, Offset], fixed: Known, axes: int, sizes: tuple[int, int]
) -> Array:
    offsets = moved | dict(fixed)
    keep = mask.keep(Grid.cover(*sizes, offsets["query"], axes, offsets["key"]))
    return jnp.broadcast_to(keep, (*keep.shape[:axes], *sizes))


@partial(jax.jit, static_argnames=("fixed", "axes", "sizes"))
def _classify_everywhere(
    mask: Mask, moved: dict[str, Offset], fixed: Known, axes: int, sizes: tuple[int, int, int, int]
) -> Array:
    offsets = moved | dict(fixed)
    return mask.classify_every(Blocks.cover(*sizes, offsets["query"], axes, offsets["key"]))


def _join(symbol: str, mask: Any, other: Any) -> Mask:
    """Join two masks, or say how to bring what is none into the algebra."""
    for operand in (mask, other):
        if not isinstance(operand, Mask):
            hint = suggest_call("masks", operand)
            if not hint and callable(operand):
                hint = "; wrap a function of positions as masks.predicate(fn)"
            elif not hint and (isinstance(operand, list) or hasattr(operand, "dtype")):
                hint = "; wrap a boolean array as masks.from_array(array)"
            elif operand is None:
                hint = "; leave out a mask that is None, which keeps all"
            raise TypeError(
                f"{symbol}: expected masks on both sides, got {type(mask).__name__} {symbol}"
                f" {type(other).__name__}{hint}"
            )
    return Mask._operations[symbol](mask, other)
