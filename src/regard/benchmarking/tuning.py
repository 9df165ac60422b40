"""Measures a machine: which tiles are fastest, and up to which size the definition beats them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from regard.benchmarking.cases import Case
from regard.benchmarking.measuring import interleave
from regard.benchmarking.peers import canonicalize_plain, compile_call
from regard.engine.backends import dense, tiled
from regard.engine.flash.tiles import Blocking
from regard.engine.flash.tuning import Tuning

Tiles = tuple[int, int]  # side of a tile, cells of a tile over the heads that go together
Progress = Callable[[int, int, str], None]  # steps begun, steps in all, what is measured now


def _square(name: str, *shape: int, mask: str = "full", backward: bool = False) -> Case:
    batch, heads, length, width = shape
    sizes = (batch, heads, length, width)
    return Case(name, sizes, sizes, mask, "forward and backward" if backward else "forward")


@dataclass(frozen=True)
class Grid:
    """What a tuning measures; the threshold cases grow."""

    sides: tuple[int, ...]
    cells: tuple[int, ...]
    masked: tuple[Case, ...]  # long sequences, forward and backward, for `tile_side` and cells
    full: tuple[Case, ...]  # the same without a mask, for `full_side`
    scores: tuple[Case, ...]  # masked, for `dense_scores`
    plain: tuple[Case, ...]  # many heads without a mask, for `dense_side`
    rows: tuple[Case, ...]  # few queries on many keys, for `dense_rows`

    @property
    def steps(self) -> int:
        return len(self.masked) + len(self.full) + len(self.scores) + len(self.plain) + len(self.rows)


_SCORES = ((2, 64), (8, 128), (8, 256), (4, 512), (8, 512), (4, 1024), (8, 1024))
FULL_GRID = Grid(
    (256, 512, 1024),
    (1 << 18, 1 << 19, 1 << 20),
    tuple(
        _square(mask, *shape, mask=mask, backward=backward)
        for mask, shape in (("causal", (1, 8, 2048, 64)), ("window", (1, 2, 8192, 64)))
        for backward in (False, True)
    ),
    tuple(_square("full", 1, 8, 2048, 64, backward=backward) for backward in (False, True)),
    tuple(
        _square("causal", 1, heads, length, 64, mask="causal", backward=backward)
        for heads, length in _SCORES
        for backward in (False, True)
    ),
    tuple(_square("batched", 8, 8, length, 64) for length in (128, 256, 512)),
    tuple(Case("few queries", (1, 8, rows, 64), (1, 8, 32768, 64)) for rows in (1, 4, 8, 16, 32)),
)
QUICK_GRID = Grid(
    (256, 512),
    (1 << 18, 1 << 19),
    FULL_GRID.masked[:2],
    FULL_GRID.full[:1],
    FULL_GRID.scores[2:9:3],
    FULL_GRID.plain[1:],
    FULL_GRID.rows[1:4:2],
)


@dataclass(frozen=True)
class Point:
    """Dense against tiled at one size; the size is in the unit of the threshold."""

    size: int
    dense_seconds: float
    tiled_seconds: float


@dataclass(frozen=True)
class Findings:
    """The tuning, and what it was chosen from."""

    tuning: Tuning
    forward: dict[Tiles, float]  # geometric mean over cases of time over the case's fastest
    backward: dict[Tiles, float]  # the same with the backward pass
    thresholds: dict[str, tuple[Point, ...]]


def measure_tuning(grid: Grid, rounds: int, progress: Progress | None = None) -> Findings:
    """Measure every case of the grid and choose by geometric means."""
    begun = 0

    def begin(case: Case) -> None:
        nonlocal begun
        begun += 1
        if progress is not None:
            label = f"{case.name}, {case.passes}, {'x'.join(map(str, case.query))} on {case.key[-2]} keys"
            progress(begun, grid.steps, label)

    candidates = [(side, cells) for side in grid.sides for cells in grid.cells]

    def compare(cases: Sequence[Case]) -> tuple[dict[Tiles, float], dict[Tiles, float]]:
        slowdowns: dict[bool, list[dict[Tiles, float]]] = {False: [], True: []}
        for case in cases:
            begin(case)
            seconds = _time_tiles(case, candidates, rounds)
            fastest = min(seconds.values())
            slowdowns[case.is_backward].append({tiles: time / fastest for tiles, time in seconds.items()})
        return _average(slowdowns[False], candidates), _average(slowdowns[True], candidates)

    forward, backward = compare(grid.masked)
    tiles = choose_tiles(forward, backward)
    tiles = dataclasses.replace(tiles, full_side=choose_full_side(*compare(grid.full), tiles))

    sizes: dict[str, Callable[[Case], int]] = {
        "dense_scores": lambda case: math.prod(case.query[:3]) * case.key[2],
        "dense_side": lambda case: case.key[2],
        "dense_rows": lambda case: case.query[2] * case.query[1] // case.key[1],
    }
    thresholds: dict[str, tuple[Point, ...]] = {}
    for (name, measure), cases in zip(sizes.items(), (grid.scores, grid.plain, grid.rows), strict=True):
        points = []
        for case in cases:
            begin(case)
            points.append(Point(measure(case), *_time_both(case, tiles, rounds)))
        thresholds[name] = tuple(sorted(points, key=lambda point: point.size))
    limits = {name: choose_limit(points) for name, points in thresholds.items()}
    limits["dense_rows"] += 1  # dense serves fewer than so many
    chosen = dataclasses.replace(tiles, **limits)
    return Findings(chosen, forward, backward, thresholds)


def choose_tiles(forward: dict[Tiles, float], backward: dict[Tiles, float]) -> Tuning:
    """For each side the best cells of either pass, then the best side; today's defaults win ties."""
    default = Tuning()
    ranked = []
    for side in sorted({side for side, _ in forward}, key=lambda side: side != default.tile_side):
        costs, cells = [], []
        for means, usual in ((forward, default.forward_cells), (backward, default.backward_cells)):
            own = {tiles: mean for tiles, mean in means.items() if tiles[0] == side}
            best = min(own, key=lambda tiles: (own[tiles], tiles[1] != usual))
            costs.append(own[best])
            cells.append(best[1])
        ranked.append(
            (math.prod(costs), Tuning(tile_side=side, forward_cells=cells[0], backward_cells=cells[1]))
        )
    return min(ranked, key=lambda pair: pair[0])[1]


def choose_full_side(forward: dict[Tiles, float], backward: dict[Tiles, float], tiles: Tuning) -> int:
    """The side that is fastest with the cells of `tiles`; today's default wins ties."""
    default = Tuning().full_side
    sides = sorted({side for side, _ in forward}, key=lambda side: side != default)
    return min(
        sides, key=lambda side: forward[side, tiles.forward_cells] * backward[side, tiles.backward_cells]
    )


def choose_limit(points: Sequence[Point]) -> int:
    """The size up to which to take dense, 0 for never, so that the geometric mean of times is least."""

    def cost(limit: int) -> float:
        return sum(math.log(p.dense_seconds if p.size <= limit else p.tiled_seconds) for p in points)

    return min([0, *(point.size for point in points)], key=cost)


def _average(slowdowns: Sequence[dict[Tiles, float]], candidates: Sequence[Tiles]) -> dict[Tiles, float]:
    """Geometric means over cases; 1 where nothing was measured."""
    return {
        tiles: statistics.geometric_mean(each[tiles] for each in slowdowns) if slowdowns else 1.0
        for tiles in candidates
    }


def _time_tiles(case: Case, candidates: Sequence[Tiles], rounds: int) -> dict[Tiles, float]:
    """Median seconds of each candidate; those that come to the same tiles are measured once."""
    calls: dict[tuple[Blocking, Blocking], Any] = {}
    resolved = {}
    for side, cells in candidates:
        tuning = Tuning(tile_side=side, full_side=side, forward_cells=cells, backward_cells=cells)
        resolved[side, cells] = _resolve(case, tuning)
    for blocking in dict.fromkeys(resolved.values()):
        calls[blocking] = _compile_tiled(case, *blocking)
    names = {str(blocking): blocking for blocking in calls}
    seconds = interleave({name: calls[blocking].run for name, blocking in names.items()}, rounds, settle=True)
    return {tiles: statistics.median(seconds[str(blocking)]) for tiles, blocking in resolved.items()}


def _time_both(case: Case, tiles: Tuning, rounds: int) -> tuple[float, float]:
    """Median seconds of dense and of the chosen tiles."""
    calls = {
        "dense": compile_call(
            lambda *call: dense.run(canonicalize_plain(*call))[0], case, case.make_inputs(), case.make_mask()
        ),
        "tiled": _compile_tiled(case, *_resolve(case, tiles)),
    }
    seconds = interleave({name: call.run for name, call in calls.items()}, rounds, settle=True)
    return statistics.median(seconds["dense"]), statistics.median(seconds["tiled"])


def _resolve(case: Case, tuning: Tuning) -> tuple[Blocking, Blocking]:
    """The tiles that a tuning comes to."""
    query, key = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in (case.query, case.key))
    problem = canonicalize_plain(query, key, key, case.make_mask())
    forward, backward = (
        blocking.fit(problem.T, problem.S, problem.key_heads) for blocking in tuning.blocking(problem)
    )
    return forward, backward


def _compile_tiled(case: Case, forward: Blocking, backward: Blocking) -> Any:
    def attention(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return tiled.run(canonicalize_plain(query, key, value, mask), forward, backward)[0]

    return compile_call(attention, case, case.make_inputs(), case.make_mask())
