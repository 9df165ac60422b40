"""Measurements of this machine for `regard tune`: the fastest tiles, and sizes at which dense is faster."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import regard.masks as masks
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from regard.engine.flash.tile_choice import choose_tiles_at_once
from regard.engine.flash.tuning import Tuning, default_tuning
from regard.masks import Mask

Shape = tuple[int, int, int, int]  # batch, heads, length, width
Tiles = tuple[int, int]  # side of a tile, cells of a tile over the heads that go together
Times = dict[Tiles, float]
Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is measured now
SHORT_SECONDS = 0.5
SETTLING_CALLS = 3


@dataclass(frozen=True)
class Workload:
    """One call of attention to time; value has the shape of key."""

    query: Shape
    key: Shape
    mask: Mask | None = None
    backward: bool = False

    def __str__(self) -> str:
        passes = "forward and backward" if self.backward else "forward"
        mask = "no mask" if self.mask is None else repr(self.mask)
        return f"{mask}, {passes}, {'x'.join(map(str, self.query))} on {self.key[2]} keys"

    def compile(self, run: Callable[..., Any]) -> Callable[[], Any]:
        """Compile `run(problem)`, with its VJP for a backward pass, on random arrays."""
        shapes = (self.query, self.key, self.key, *([self.query] if self.backward else []))
        rngs = jax.random.split(jax.random.key(0), len(shapes))
        arrays = [jax.random.normal(rng, shape) for rng, shape in zip(rngs, shapes, strict=True)]
        compiled = compile_passes(
            lambda *call: run(canonicalize(*call[:3], mask=call[3]))[0], arrays, self.mask
        )
        return lambda: jax.block_until_ready(compiled(arrays, self.mask))

    def fit(self, tuning: Tuning) -> tuple[Blocking, Blocking]:
        """Return the tiles that a tuning comes to."""
        query, key = (jax.ShapeDtypeStruct(shape, "float32") for shape in (self.query, self.key))
        problem = canonicalize(query, key, key, mask=self.mask)
        if tuning.step_bytes:
            choice = choose_tiles_at_once(problem, tuning)
            return choice.forward, choice.backward
        forward, backward = tuning.blocking(problem)
        sizes = (problem.T, problem.S, problem.key_heads)
        return forward.fit(*sizes), backward.fit(*sizes)


@dataclass(frozen=True)
class Grid:
    """Workloads and candidates of a tuning."""

    sides: tuple[int, ...]
    cells: tuple[int, ...]
    masked: tuple[Workload, ...]  # long sequences, for `tile_side` and cells
    full: tuple[Workload, ...]  # the same without a mask, for `full_side`
    thresholds: dict[str, tuple[Workload, ...]]  # growing, for the thresholds named


def _square(mask: Mask | None, shape: Shape) -> tuple[Workload, Workload]:
    """Return self-attention, forward alone and with the backward pass."""
    return Workload(shape, shape, mask), Workload(shape, shape, mask, backward=True)


# In which unit each threshold counts the size of a workload.
SIZES: dict[str, Callable[[Workload], int]] = {
    "dense_scores": lambda workload: math.prod(workload.query[:3]) * workload.key[2],
    "dense_side": lambda workload: workload.key[2],
    "dense_rows": lambda workload: workload.query[2] * workload.query[1] // workload.key[1],
}
_CAUSAL = masks.causal()
_MASKED = (
    *_square(_CAUSAL, (1, 8, 2048, 64)),
    *_square(_CAUSAL & masks.sliding_window(512), (1, 2, 8192, 64)),
)
_FULL = _square(None, (1, 8, 2048, 64))
_SCORES = tuple(
    workload
    for heads, length in ((2, 64), (8, 128), (8, 256), (4, 512), (8, 512), (4, 1024), (8, 1024))
    for workload in _square(_CAUSAL, (1, heads, length, 64))
)
_PLAIN = tuple(_square(None, (8, 8, length, 64))[0] for length in (128, 256, 512))
_ROWS = tuple(Workload((1, 8, rows, 64), (1, 8, 32768, 64)) for rows in (1, 4, 8, 16, 32))
FULL_GRID = Grid(
    (256, 512, 1024),
    (1 << 18, 1 << 19, 1 << 20),
    _MASKED,
    _FULL,
    {"dense_scores": _SCORES, "dense_side": _PLAIN, "dense_rows": _ROWS},
)
QUICK_GRID = Grid(
    (256, 512),
    (1 << 18, 1 << 19),
    _MASKED[:2],
    _FULL[:1],
    {"dense_scores": _SCORES[2:9:3], "dense_side": _PLAIN[1:], "dense_rows": _ROWS[1:4:2]},
)


# The tiles of devices whose steps hold all batch rows and heads.
_AT_ONCE: dict[str, Any] = {"sides": (512, 1024, 2048), "cells": (1 << 23, 1 << 25, 1 << 27)}


def choose_grid(*, quick: bool) -> Grid:
    """Return what to measure on the default device."""
    grid = QUICK_GRID if quick else FULL_GRID
    return dataclasses.replace(grid, **_AT_ONCE) if default_tuning().step_bytes else grid


@dataclass(frozen=True)
class Point:
    """Dense against tiled at one size; the size is in the unit of the threshold."""

    size: int
    dense_seconds: float
    tiled_seconds: float


@dataclass(frozen=True)
class Findings:
    """The tuning, and the measurements that it was chosen from."""

    tuning: Tuning
    forward: Times  # geometric mean over workloads of time over the workload's fastest
    backward: Times  # the same with the backward pass
    thresholds: dict[str, tuple[Point, ...]]


def measure_tuning(grid: Grid, rounds: int, progress: Progress) -> Findings:
    """Time every workload of the grid and choose by geometric means."""
    total = len(grid.masked) + len(grid.full) + sum(map(len, grid.thresholds.values()))
    numbers = iter(range(total))
    candidates = [(side, cells) for side in grid.sides for cells in grid.cells]

    def compare(workloads: Sequence[Workload]) -> tuple[Times, Times]:
        slowdowns: dict[bool, list[Times]] = {False: [], True: []}
        for workload in workloads:
            progress(next(numbers), total, str(workload))
            seconds = _time_tiles(workload, candidates, rounds)
            fastest = min(seconds.values())
            slowdowns[workload.backward].append({tiles: taken / fastest for tiles, taken in seconds.items()})
        forward, backward = (
            {
                tiles: statistics.geometric_mean(one[tiles] for one in each) if each else 1.0
                for tiles in candidates
            }
            for each in slowdowns.values()
        )
        return forward, backward

    forward, backward = compare(grid.masked)
    tiles = choose_tiles(forward, backward)
    tiles = dataclasses.replace(tiles, full_side=choose_full_side(*compare(grid.full), tiles))
    thresholds: dict[str, tuple[Point, ...]] = {}
    for name, workloads in grid.thresholds.items():
        points = []
        for workload in workloads:
            progress(next(numbers), total, str(workload))
            points.append(Point(SIZES[name](workload), *_time_both(workload, tiles, rounds)))
        thresholds[name] = tuple(sorted(points, key=lambda point: point.size))
    limits = {name: choose_limit(points) for name, points in thresholds.items()}
    limits["dense_rows"] += 1  # dense serves fewer than so many
    return Findings(dataclasses.replace(tiles, **limits), forward, backward, thresholds)


def choose_tiles(forward: Times, backward: Times) -> Tuning:
    """Choose the side, and the cells of either pass, with the least product of means; defaults win ties."""
    default = default_tuning()

    def cost(tiles: Tuning) -> tuple[float, int]:
        product = (
            forward[tiles.tile_side, tiles.forward_cells] * backward[tiles.tile_side, tiles.backward_cells]
        )
        changes = zip(dataclasses.astuple(tiles), dataclasses.astuple(default), strict=True)
        return product, sum(one != other for one, other in changes)

    choices = [
        dataclasses.replace(default, tile_side=side, forward_cells=cells, backward_cells=other)
        for side, cells in forward
        for same, other in backward
        if same == side
    ]
    return min(choices, key=cost)


def choose_full_side(forward: Times, backward: Times, tiles: Tuning) -> int:
    """Choose the side that is fastest with the cells of `tiles`; today's default wins ties."""

    def cost(side: int) -> tuple[float, bool]:
        product = forward[side, tiles.forward_cells] * backward[side, tiles.backward_cells]
        return product, side != default_tuning().full_side

    return min(sorted({side for side, _ in forward}), key=cost)


def choose_limit(points: Sequence[Point]) -> int:
    """Choose the size up to which to take dense, 0 for never: the geometric mean of times is then least."""

    def cost(limit: int) -> float:
        return sum(math.log(p.dense_seconds if p.size <= limit else p.tiled_seconds) for p in points)

    return min([0, *(point.size for point in points)], key=cost)


def _time_tiles(workload: Workload, candidates: Sequence[Tiles], rounds: int) -> Times:
    """Return median seconds of each candidate; those that come to the same tiles are measured once."""
    fitted = {}
    for side, cells in candidates:
        tuning = dataclasses.replace(
            default_tuning(), tile_side=side, full_side=side, forward_cells=cells, backward_cells=cells
        )
        fitted[side, cells] = workload.fit(tuning)
    calls = {blocking: _compile_tiled(workload, *blocking) for blocking in dict.fromkeys(fitted.values())}
    seconds = interleave(calls, rounds, settle=True)
    return {tiles: statistics.median(seconds[blocking]) for tiles, blocking in fitted.items()}


def _time_both(workload: Workload, tiles: Tuning, rounds: int) -> tuple[float, float]:
    """Return median seconds of dense and of the chosen tiles."""
    calls = {"dense": workload.compile(dense.run), "tiled": _compile_tiled(workload, *workload.fit(tiles))}
    seconds = interleave(calls, rounds, settle=True)
    return statistics.median(seconds["dense"]), statistics.median(seconds["tiled"])


def _compile_tiled(workload: Workload, forward: Blocking, backward: Blocking) -> Callable[[], Any]:
    return workload.compile(lambda problem: tiled.run(problem, forward, backward))


def compile_passes(attention: Callable[..., Any], arrays: Sequence[Any], extra: Any) -> Any:
    """Compile `attention(query, key, value, extra)`, with its VJP where a fourth array is the cotangent."""

    def run(arrays: Sequence[Any], extra: Any) -> tuple[Any, ...]:
        if len(arrays) == 3:
            return (attention(*arrays, extra),)
        output, vjp = jax.vjp(lambda *inputs: attention(*inputs, extra), *arrays[:3])
        return (output, *vjp(arrays[3]))

    return jax.jit(run).lower(arrays, extra).compile()


def interleave(
    calls: Mapping[Any, Callable[[], Any]], rounds: int, *, settle: bool = False
) -> dict[Any, list[float]]:
    """Time every call once a round in rotating order, so that a busy moment hits all; return the seconds.

    What ran before leaves its own data in the caches, its threads spinning and its memory to be faulted in
    again: after a call that freed a gigabyte, the next two or three take up to twice as long. `settle` runs
    short calls a few times untimed first.
    """
    names = list(calls)
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        order = names[first:] + names[:first]
        for name in order[:: -1 if turn % 2 else 1]:  # not always after the same one
            if settle and min(seconds[name], default=0.0) < SHORT_SECONDS:
                for _ in range(SETTLING_CALLS):
                    calls[name]()
            start = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds
