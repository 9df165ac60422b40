"""Masks made of masks: two joined by & or |, one turned by ~, one that knows its tiles."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.masks.bounds import Bounds
from regard.masks.data import check_rows, literal
from regard.masks.grid import Blocks, Grid, Offset, spread
from regard.masks.mask import Mask, Take
from regard.masks.offsets import positions_of
from regard.masks.tile_kinds import KeptTiles, TileKind, join_touched
from regard.records import delegate, derived, record, static


class Combination(Mask):
    """A mask made of others."""

    @property
    def operands(self) -> tuple[Mask, ...]:
        """Return the masks that it is made of."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))  # type: ignore[arg-type]

    def _map(self, change: Callable[[Mask], Mask]) -> Mask:
        return type(self)(*map(change, self.operands))

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

    def pin(self) -> Mask:
        return self._map(lambda mask: mask.pin())

    def closure_convert(self, grid: Grid) -> Mask:
        return self._map(lambda mask: mask.closure_convert(grid))

    def slice_grid(self, grid: Grid) -> Mask:
        return self._map(lambda mask: mask.slice_grid(grid))

    def number_leading(self, leading: tuple[int, ...] | None) -> Mask:
        return self._map(lambda mask: mask.number_leading(leading))

    def check(self, leading: tuple[int, ...] | None, num_queries: int, num_keys: int) -> None:
        for mask in self.operands:
            mask.check(leading, num_queries, num_keys)

    def check_positions(self, query: Offset, key: Offset) -> None:
        for mask in self.operands:
            mask.check_positions(query, key)


def _enclose(mask: Mask, least: int) -> str:
    return mask.expression() if mask.precedence >= least else f"({mask.expression()})"


@record
class And(Combination, operation="&"):
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
        return f"{_enclose(self.left, 2)} & {_enclose(self.right, 3)}"


@record
class Or(Combination, operation="|"):
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
        return f"{_enclose(self.left, 1)} | {_enclose(self.right, 2)}"


@record
class Not(Combination, operation="~"):
    """Pairs that a mask does not keep."""

    operand: Mask
    precedence = 3

    def keep(self, grid: Grid) -> Array:
        return ~self.operand.keep(grid)

    def combine_kinds(self, kinds_of: Callable[[Mask], Any]) -> Array:
        return jnp.int8(TileKind.FULL) - self.operand.combine_kinds(kinds_of)

    def expression(self) -> str:
        return f"~{_enclose(self.operand, 3)}"


@delegate("mask", "reads_positions", "local", "block_side", "bounds", "parts", "keep", "slice_grid")
@record
class Prepared(Mask, operation="prepare"):
    """A mask that knows the kinds of its tiles in calls of one size."""

    mask: Mask
    query_offset: Any
    key_offset: Any
    kinds: Any = derived()  # (*b, Q, K)
    kept_tiles: Any = derived(static=True)
    num_queries: int = static()
    num_keys: int = static()
    block: int = static()

    @staticmethod
    def maker(mask: Mask, query: Any, key: Any, num_queries: int, num_keys: int, block: int) -> Mask:
        axes = max(mask.leading_axes, *(positions_of(offset).leading_axes for offset in (query, key)))
        kinds = mask.classify_every(Blocks.cover(num_queries, num_keys, block, block, query, axes, key))
        tiles = KeptTiles.count(kinds, block)
        return Prepared(mask, query, key, kinds, tiles, num_queries, num_keys, block)

    @property
    def leading_axes(self) -> int:
        return max(self.mask.leading_axes, jnp.ndim(self.kinds) - 2)

    @property
    def reads_cells(self) -> bool:
        return False

    def classify(self, blocks: Blocks) -> Array:
        kinds = spread(jnp.asarray(self.kinds), blocks.leading_axes + 2, trailing=2)
        least, most = join_touched((jnp.minimum, jnp.maximum), kinds, blocks, (self.block, self.block))
        same = not self.reads_positions or _same_places(self.query_offset, blocks.query_offset)
        same = same & _same_places(self.key_offset, blocks.key_offset)
        same = same & jnp.all(blocks.query_last < self.num_queries) & jnp.all(blocks.key_last < self.num_keys)
        return jnp.where((least == most) & same, least, jnp.int8(TileKind.PARTIAL))

    def slice_batch(self, take: Take, leading_axes: int) -> Mask:
        mask = self.mask.slice_batch(take, leading_axes)
        query = positions_of(self.query_offset).slice_batch(take)
        key = positions_of(self.key_offset).slice_batch(take)
        kinds = take(self.kinds, 2)
        return dataclasses.replace(self, mask=mask, query_offset=query, key_offset=key, kinds=kinds)

    def pin(self) -> Mask:
        return dataclasses.replace(self, mask=self.mask.pin())

    def closure_convert(self, grid: Grid) -> Mask:
        return dataclasses.replace(self, mask=self.mask.closure_convert(grid))

    def number_leading(self, leading: tuple[int, ...] | None) -> Mask:
        numbered = self.mask if leading is None else self.mask.number_leading(leading)
        if jax.tree.structure(numbered) != jax.tree.structure(self.mask):
            raise ValueError(
                f"prepare: expected leading={leading}, because the mask reads batch rows or heads; it was"
                " prepared without"
            )
        return self

    def check(self, leading: tuple[int, ...] | None, num_queries: int, num_keys: int) -> None:
        # Elsewhere than in a call it answers for other sizes, too.
        if leading is not None and (num_queries, num_keys) != (self.num_queries, self.num_keys):
            raise ValueError(
                f"mask: expected a call with T = {self.num_queries} and S = {self.num_keys}, which it was"
                f" prepared for; got T = {num_queries}, S = {num_keys}"
            )
        check_rows("prepared mask", np.shape(self.kinds)[:-2], leading)
        self.mask.check(leading, num_queries, num_keys)

    def check_positions(self, query: Offset, key: Offset) -> None:
        self.mask.check_positions(query, key)

    def expression(self) -> str:
        sizes = f"{self.num_queries}, {self.num_keys}"
        offsets = {"query": self.query_offset, "key": self.key_offset}
        sizes += "".join(positions_of(offset).spell(name, literal) for name, offset in offsets.items())
        sizes += "" if self.block == 128 else f", block={self.block}"
        return f"{_enclose(self.mask, 4)}.prepare({sizes})"


def _same_places(prepared: Offset, called: Offset) -> Any:
    """Tell whether rows sit where they sat."""
    own_offsets, own_tree = jax.tree.flatten(0 if prepared is None else prepared)
    offsets, tree = jax.tree.flatten(0 if called is None else called)
    if own_tree != tree:
        return False
    both = zip(own_offsets, offsets, strict=True)
    pairs = [(jnp.asarray(a, jnp.int32), jnp.asarray(b, jnp.int32)) for a, b in both]
    if any(a.ndim and b.ndim and a.shape != b.shape for a, b in pairs):
        return False
    return functools.reduce(jnp.logical_and, [jnp.all(a == b) for a, b in pairs])
