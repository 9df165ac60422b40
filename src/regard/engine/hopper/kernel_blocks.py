"""A block of a kernel on NVIDIA's Hopper: what it loads, when, and what it does to a tile of scores.

Two warpgroups of 64 rows compute, and one loads tiles through a ring of buffers in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from regard.axes import Array
from regard.engine.hopper.pair_programs import BLOCK, COLUMN, COMPUTING, HEAD, ROW, ROWS, PairProgram, Pairs

STAGES = 2  # tiles that are read ahead
_COMPUTE_REGISTERS, _LOAD_REGISTERS = 232, 40  # registers of a thread
_LOG2_E = np.float32(1 / np.log(2))

gpu: Any = mosaic_gpu  # as of jax 0.12
Ref = Any


class KernelBlock:
    """One block of a kernel: where it is, what it was given, and its buffers."""

    def __init__(
        self,
        pairs: Pairs,
        heads: tuple[int, int],
        operands: Any,
        read: Sequence[Sequence[Ref]],
        outputs: Sequence[Ref],
        *,
        resident: Sequence[Ref],
        resident_ready: Ref,
        ring: Sequence[Ref],
        ready: Sequence[Ref],
        free: Sequence[Ref],
        pingpong: Ref | None,
        weights: Ref | None,
        staged: Sequence[Ref | None],
        last_first: bool,
    ) -> None:
        self.pairs, self.outputs, self.read = pairs, outputs, read
        self.heads, self.key_heads = heads
        (self.starts, self.counts), self.scale_ref, *self.arrays = operands
        self.resident, self.resident_ready, self.weights = resident, resident_ready, weights
        self.staged = [own or resident[number] for number, own in enumerate(staged)]
        self.ring, self.ready, self.free, self.pingpong = ring, ready, free, pingpong
        self.batch, self.head, self.number = map(lax.axis_index, ("batch", "head", "block"))
        if last_first:
            self.number = np.int32(self.counts.shape[2] - 1) - self.number
        self.warpgroup = lax.axis_index("warpgroup")
        self.first = pl.multiple_of(
            self.number * BLOCK + lax.rem(self.warpgroup, np.int32(COMPUTING)) * ROWS, ROWS
        )
        self.tile = ring[0].shape[1]

    def at(self, ref: Ref, head: Any, heads: int) -> tuple[Any, Any]:
        """Return where an array has this batch row, and a head that several may share."""
        return (self.batch if ref.shape[0] > 1 else 0), lax.div(head, np.int32(heads // ref.shape[1]))

    def list_tiles(self, heads: int) -> tuple[Any, Any, Callable[[Any], Any]]:
        """Return how many tiles are FULL, how many there are, and the function of a turn that says where."""
        index = self.at(self.counts, self.head, heads)
        full, count = self.counts[*index, self.number, 0], self.counts[*index, self.number, 1]
        start_index = self.at(self.starts, self.head, heads)
        return full, count, lambda turn: self.starts[*start_index, self.number, turn]

    @property
    def scale(self) -> Any:
        return self.scale_ref[self.batch if self.scale_ref.shape[0] > 1 else 0]

    @property
    def unit(self) -> Any:
        """The factor that turns differences of scores, as `finish` returns them, into powers of 2."""
        return _LOG2_E if self.pairs.apply is not None else self.scale * _LOG2_E

    def in_logits(self, scores: Array) -> Array:
        """Return what softmax is of, from scores as `finish` returns them."""
        return scores if self.pairs.apply is not None else scores * self.scale

    def weigh(self, scores: Array, base: Array, log2_total: Array, axis: int = 0) -> Array:
        """Return softmax weights, given what logits are relative to and the total of their weights."""
        difference = self.in_logits(scores) - spread(base, scores, axis)
        return jnp.exp2(difference * _LOG2_E - spread(log2_total, scores, axis))

    def pass_turn(self, meanwhile: Ref | None = None) -> None:
        """Let the other warpgroup multiply, and wait until it has, and until a tile is there."""
        if self.pingpong is not None:
            gpu.barrier_arrive(self.pingpong)
        if meanwhile is not None:
            gpu.barrier_wait(meanwhile)
        if self.pingpong is not None:
            gpu.barrier_wait(self.pingpong)

    def stream(self, total: Any, tile_at: Callable[[Any], Any], sources: Callable[[Any], list[Ref]]) -> None:
        """Load tiles into the ring, each once its place is free."""

        def step(turn: Any, none: Any) -> Any:
            slot, start = lax.rem(turn, np.int32(STAGES)), pl.multiple_of(tile_at(turn), self.tile)
            for source, ring, ready, free in zip(
                sources(turn), self.ring, self.ready, self.free, strict=True
            ):
                pl.when(turn >= STAGES)(lambda free=free: gpu.barrier_wait(free.at[slot]))
                gpu.copy_gmem_to_smem(source.at[pl.ds(start, self.tile)], ring.at[slot], ready.at[slot])
            return none

        lax.fori_loop(0, total, step, 0)
        for slot in range(STAGES):
            for free in self.free:
                pl.when(slot < total)(lambda last=free.at[slot]: gpu.barrier_wait(last))

    def stream_keys(self, count: Any, start_of: Callable[[Any], Any], key: Ref, value: Ref) -> None:
        """Load the tiles of keys and values that a block of queries meets."""
        sources = [ref.at[*self.at(ref, self.head, self.heads)] for ref in (key, value)]
        self.stream(count, start_of, lambda turn: sources)

    def put(self, *results: Array) -> None:
        """Write this warpgroup's rows of the results, long ones by way of shared memory."""
        staged = iter(self.staged)
        rows = [ref.at[self.batch, self.head, pl.ds(self.first, ROWS)] for ref in self.outputs]
        for ref, array in zip(rows, results, strict=True):
            if array.ndim == 1:
                ref[...] = array
                continue
            buffer = next(staged).at[self.warpgroup]
            buffer[...] = array.astype(buffer.dtype)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(buffer, ref)
        gpu.wait_smem_to_gmem(0)

    def load_rows(self, *sources: Ref) -> list[Ref]:
        """Load this warpgroup's rows of some arrays, which stay."""
        for source, buffer in zip(sources, self.resident, strict=True):
            rows = source.at[pl.ds(self.first, ROWS)]
            gpu.copy_gmem_to_smem(rows, buffer.at[self.warpgroup], self.resident_ready.at[self.warpgroup])
        gpu.barrier_wait(self.resident_ready.at[self.warpgroup])
        return [buffer.at[self.warpgroup] for buffer in self.resident]

    def vector(self, ref: Ref, start: Any, length: int, axis: int, head: Any) -> Array:
        """Read one number per row, axis 0, or per column, axis 1, of a tile."""
        part = ref.at[*self.at(ref, head, self.heads), pl.ds(start, length)]
        return gpu.load(part, layout=gpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def finish(self, products: Array, start: Any, head: Any, masked: bool, across: bool = False) -> Finished:
        """Finish a tile of products: score function of the scaled ones, if any, then mask.

        Without a score function they stay unscaled. `across`, keys by queries.
        """
        pairs, shape = self.pairs, (products.shape[0], products.shape[1])
        places = {ROW: (self.first, 0), COLUMN: (start, 1)}
        if across:
            places = {COLUMN: (self.first, 0), ROW: (start, 1)}

        def run(program: PairProgram, which: int, *tiles: Array) -> Array:
            def read(number: int, kind: str) -> Array:
                ref = self.read[which][number]
                if kind == HEAD:
                    return ref[*self.at(ref, head, self.heads), 0]
                first, axis = places[kind]
                return self.vector(ref, first, shape[axis], axis, head)

            return program.run(read, shape, *tiles, across=across)

        keep = run(pairs.keep, 0) if masked and pairs.keep is not None else None
        raw = scores = products
        if pairs.apply is not None:
            raw = products * self.scale
            raw = raw if keep is None else jnp.where(keep, raw, 0.0)
            scores = run(pairs.apply, 1, raw)
        if keep is not None:
            scores = jnp.where(keep, scores, -jnp.inf)

        def vjp(change: Array) -> Array:
            return change if pairs.vjp is None else run(pairs.vjp, 2, raw, change)

        return Finished(scores, vjp)

    def factor(self, tile: Array) -> Any:
        """Return a tile of registers as a product takes it."""
        tile = tile.astype(jnp.bfloat16)
        if self.weights is None:
            return tile
        self.weights.at[self.warpgroup][...] = tile
        gpu.commit_smem()
        return self.weights.at[self.warpgroup]

    def settle(self, *values: Any) -> Sequence[Any]:
        """Have values there before what comes next."""
        return lax.optimization_barrier(values) if self.weights is None else values

    def add_product(self, sums: Array, a: Any, b: Any) -> Array:
        """Add a product to sums in registers."""
        if self.weights is not None:
            return sums + multiply(a, b)
        return pl.run_state(lambda ref: gpu.wgmma(ref, a, b))(gpu.ACC.init(sums))

    def ring_at(self, turn: Any) -> tuple[list[Ref], list[Ref], list[Ref]]:
        """Return the buffers of a turn, and the barriers that tell that they are ready, and free."""
        slot = lax.rem(turn, np.int32(STAGES))
        slots = [[ref.at[slot] for ref in refs] for refs in (self.ring, self.ready, self.free)]
        return slots[0], slots[1], slots[2]

    def divide_work(self, compute: Callable[[], None], load: Callable[[], None]) -> None:
        """Let the computing warpgroups compute, and the last one load for them."""

        @pl.when(self.warpgroup < COMPUTING)
        def _compute() -> None:
            gpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            compute()

        @pl.when(self.warpgroup == COMPUTING)
        def _load() -> None:
            gpu.set_max_registers(_LOAD_REGISTERS, action="decrease")
            load()


class Finished(NamedTuple):
    scores: Array
    vjp: Callable[[Array], Array]  # from the cotangent of the scores to that of the products


def multiply(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> Array:
    """Multiply tiles, a by b, into registers."""

    def into(sums: Ref) -> Array:
        gpu.wgmma(sums, a, b)
        meanwhile()
        return sums[...]

    return pl.run_scoped(into, gpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def fill(shape: tuple[int, ...], value: float) -> Array:
    layout = gpu.Layout.WGMMA if len(shape) == 2 else gpu.Layout.WGMMA.reduce(1)
    return gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def spread(vector: Array, like: Array, axis: int = 0) -> Array:
    return lax.broadcast_in_dim(vector, like.shape, (axis,))


def visit(full: Any, count: Any, step: Callable[..., Any], carry: Any) -> Any:
    """Visit FULL tiles, which need no mask, then the others."""
    for first, end, masked in ((0, full, False), (full, count, True)):
        carry = lax.fori_loop(
            first, end, lambda turn, carry, masked=masked: step(turn, carry, masked=masked), carry
        )
    return carry
