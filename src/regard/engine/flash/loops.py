"""Loop over tiles: one after the other, or several blocks at once, each against pieces of its own list."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.flash.blocking import Blocking, TileConfig, Trips
from regard.engine.flash.sparsity import TileLists
from regard.engine.flash.tiles import PieceKind, slice_at
from regard.manual_meshes import vary

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class TileLoop:
    """Loop over the listed tiles or, for reverse mode through the loop, scan all of them and skip the rest.

    A loop whose length is known only when it runs cannot be reversed by JAX; a scan can, and keeps no more
    than one block of tiles because each is recomputed.
    """

    config: TileConfig
    blocking: Blocking
    reversible: bool = False
    varying: tuple[str, ...] = ()  # manual mesh axes over which the arrays vary
    trips: Trips | None = None  # of the blocks at hand, where they are known beforehand

    def blocks(
        self,
        count: int,
        body: Callable[[TileLoop, Any, Any, Carry], Carry],
        carry: Carry,
        order: Array | None = None,
    ) -> Carry:
        """Loop over `count` blocks of each leading position.

        carry = body(the loop over their tiles, leading position, block, carry). With pieces, `body` gets
        several blocks as they come in `order`, the last of which may not exist.
        """
        if not self.blocking.trips:
            return self._blocks(0, count, functools.partial(body, self), carry, order)
        first = 0
        for trips in self.blocking.trips:
            # A loop whose length the program knows runs without the host, which would look at each count.
            loop = dataclasses.replace(self, trips=trips)
            carry = self._blocks(first, trips.blocks, functools.partial(body, loop), carry)
            first += trips.blocks
        return carry

    def _blocks(
        self,
        start: int,
        count: int,
        body: Callable[[Any, Any, Carry], Carry],
        carry: Carry,
        order: Array | None = None,
    ) -> Carry:
        *batch, key_heads = self.config.leading
        sizes = (*batch, key_heads // self.blocking.heads)
        if self.blocking.pieces:
            count, body = -(-count // self.blocking.blocks), self._several(body, order)

        def step(number: Any, carry: Carry) -> Carry:
            # Of numbers that are not negative, as all here: jnp's % and // compile to several times the code.
            rest, block = jax.lax.div(number, np.int32(count)), jax.lax.rem(number, np.int32(count))
            leading = []
            for size in reversed(sizes):
                leading.append(jax.lax.rem(rest, np.int32(size)))
                rest = jax.lax.div(rest, np.int32(size))
            leading[0] = leading[0] * self.blocking.heads
            leading, block = self.config.opaque((leading, block), number)
            return body(leading[::-1], block + np.int32(start) if start else block, carry)

        return self._scan(math.prod(sizes) * count, step, carry)

    def _several(self, body: Callable[[Any, Any, Carry], Carry], order: Array | None) -> Any:
        size = self.blocking.blocks

        def of_group(leading: Sequence[Any], group: Any, carry: Carry) -> Carry:
            first = group * np.int32(size)
            if order is None:
                return body(leading, first + jnp.arange(size, dtype=jnp.int32), carry)
            index = self._place_in(order.shape[:-1], leading)
            ones = (1,) * len(index)
            return body(leading, slice_at(order, [*index, first], (*ones, size)).reshape(-1), carry)

        return of_group

    def _place_in(self, shape: tuple[int, ...], leading: Sequence[Any]) -> list[Any]:
        """Return the place of a leading position in lists, which know no axes that vmap added."""
        return [
            0 if size == 1 else start for size, start in zip(shape, leading[self.config.added :], strict=True)
        ]

    def map_blocks(self, function: Callable[..., Any], *tiles: Any) -> Any:
        """Apply a function of one block's tiles to each block that goes with it."""
        return jax.vmap(function)(*tiles) if self.blocking.pieces else function(*tiles)

    def each_block(self, function: Callable[..., Carry], carry: Carry, *tiles: Any) -> Carry:
        """Update what all blocks share, one after the other: carry = function(carry, one block's tiles)."""
        if not self.blocking.pieces:
            return function(carry, *tiles)

        def step(number: Any, carry: Carry) -> Carry:
            return function(carry, *jax.tree.map(lambda tile: tile[number], tiles))

        return jax.lax.fori_loop(0, self.blocking.blocks, step, carry)

    def put_blocks(self, put: Callable[..., Carry], carry: Carry, first: Array, *tiles: Any) -> Carry:
        """Write what was found of all blocks, at once where they lie in order; see `each_block`."""
        if self.blocking.in_order:
            return put(carry, first, *tiles)
        return self.each_block(put, carry, first, *tiles)

    def tiles(
        self,
        lists: TileLists,
        leading: Sequence[Any],
        block: Any,
        body: Callable[[Any, Any, Carry], Carry],
        carry: Carry,
    ) -> Carry:
        """Loop over the tiles listed for one block: carry = body(start, whether PARTIAL, carry).

        With pieces, `block` numbers several, `start` is (blocks, pieces), and the step's `PieceKind` stands
        in place of whether the tile is PARTIAL.
        """

        def listed(block: Any) -> tuple[Array, Array, Array]:
            index = self._place_in(lists.full.shape[:-1], leading)
            index = [*index, 0 if lists.full.shape[-1] == 1 else block]
            ones = (1,) * len(index)
            starts = slice_at(lists.starts, [*index, 0], (*ones, lists.starts.shape[-1])).reshape(-1)
            num_full = slice_at(lists.full, index, ones).reshape(())
            num_kept = slice_at(lists.kept, index, ones).reshape(())
            return starts, num_full, num_kept

        starts, num_full, num_kept = self.config.opaque(self.map_blocks(listed, block), leading)
        pieces, count = self.blocking.pieces, starts.shape[-1]

        def step(slot: Any, carry: Carry, partial: Any = None) -> Carry:
            start = jax.lax.dynamic_index_in_dim(starts, slot, 0, False, allow_negative_indices=False)
            if partial is None:  # FULL tiles come first; at once, all masks are read: a branch would wait
                partial = bool(self.blocking.at_once) or slot >= num_full
            return body(start, partial, carry)

        def step_of_pieces(slot: Any, carry: Carry) -> Carry:
            first = slot * np.int32(pieces)
            start = jax.lax.dynamic_slice_in_dim(starts, first, pieces, 1, allow_negative_indices=False)
            end = first + np.int32(pieces)
            partial = jnp.any((end > num_full) & (first < num_kept) & (num_full < num_kept))
            short = jnp.any(end > num_kept)
            kind = jnp.where(short, np.int32(PieceKind.SHORT), np.int32(PieceKind.FULL))
            return body(start, jnp.where(partial, np.int32(PieceKind.PARTIAL), kind), carry)

        if pieces:
            steps = jax.lax.div(num_kept.max() + np.int32(pieces - 1), np.int32(pieces))
            return self._steps(count // pieces, steps, step_of_pieces, carry)
        if self.trips is None:
            return self._steps(count, num_kept, step, carry)

        whole = self.trips.full
        carry = self._scan(whole, lambda slot, carry: step(slot, carry, False), carry)
        return self._scan(
            self.trips.kept - whole, lambda slot, carry: step(slot + np.int32(whole), carry, True), carry
        )

    def _steps(self, count: int, end: Any, step: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        if not self.reversible:
            return jax.lax.fori_loop(0, end, step, vary(carry, self.varying))
        return self._scan_all(
            count, lambda slot, carry: jax.lax.cond(slot < end, step, lambda _, c: c, slot, carry), carry
        )

    def _scan(self, count: int, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        if not count:  # without jit, a scan of no steps is refused
            return vary(carry, self.varying)
        if self.config.batch_invariant:
            return self._steps(max(count, 2), self.config.opaque(np.int32(count)), body, carry)
        return self._scan_all(count, body, carry)

    def _scan_all(self, count: int, body: Callable[[Any, Carry], Carry], carry: Carry) -> Carry:
        def step(carry: Carry, i: Any) -> tuple[Carry, None]:
            return body(i, carry), None

        step = jax.checkpoint(step) if self.reversible else step
        return jax.lax.scan(step, vary(carry, self.varying), jnp.arange(count, dtype=jnp.int32))[0]
