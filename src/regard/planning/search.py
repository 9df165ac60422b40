"""The search: the fastest mesh of any number of devices up to the one given."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from regard.engine.call.problem import Problem
from regard.parallel.cost_reports import sent_bytes
from regard.parallel.division import Chunking
from regard.parallel.work import favours_balance
from regard.planning.candidates import Candidate, list_candidates
from regard.planning.chips import Chip
from regard.planning.estimates import Assumptions, Estimate, Weighing
from regard.planning.rings import Rings

ALIKE = 1.02  # times that differ by less are the same: padding decides, then devices, then bytes
_EVERY = 64  # counts up to this are all weighed, and beyond it those of so many leading values


def list_counts(devices: int) -> list[int]:
    """Return the numbers of devices to weigh: all up to 64, then every 32nd to every 64th part, and all."""
    counts = {devices, *range(1, min(devices, _EVERY) + 1)}
    step = 2
    while step * _EVERY // 2 < devices:
        counts |= {step * lead for lead in range(_EVERY // 2, _EVERY) if step * lead <= devices}
        step *= 2
    return sorted(counts)


@dataclass(frozen=True)
class Beside:
    """Work and memory of a device beside attention."""

    seconds: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, order=True)
class _Node:
    """Selection of what is looked at: all meshes of so many devices, or one of them."""

    least: float  # seconds that it takes at least
    number: int  # of nodes that take as long, the first comes first
    devices: int = field(compare=False)
    mesh: Candidate | None = field(compare=False, default=None)

    @property
    def order(self) -> tuple[bool, int]:
        """The best that a mesh in it may have."""
        return (False, self.devices) if self.mesh is None else self.mesh.order


class _Shortlist:
    """The meshes that are as fast as the fastest so far."""

    def __init__(self, devices: int):
        self.fastest, self.first = math.inf, (True, devices)
        self._alike: list[tuple[float, Estimate]] = []

    def admits(self, node: _Node) -> bool:
        """Return whether a node may be better: faster than all, or else of an order that is as good."""
        return node.least <= self.fastest or node.order <= self.first

    def add(self, seconds: float, estimate: Estimate) -> None:
        """Add a mesh if it is as fast, and drop those that are slower."""
        self.fastest = min(self.fastest, seconds)
        every = [*self._alike, (seconds, estimate)]
        self._alike = [pair for pair in every if pair[0] <= ALIKE * self.fastest]
        self.first = min(item.candidate.order for _, item in self._alike)

    @property
    def best(self) -> Estimate | None:
        """The first in order; of those alike, that which sends least."""
        every = [(item.candidate.order, item.all_bytes, seconds) for seconds, item in self._alike]
        return self._alike[every.index(min(every))][1] if every else None


@dataclass(frozen=True)
class Search:
    """A call on chips of a kind, weighed on one mesh after the other."""

    problem: Problem
    chip: Chip  # a device, or the host that all devices share
    assumptions: Assumptions
    backward: bool  # gradients count, too
    fixed: Mapping[str, int]  # sizes of axes that are given
    rings: Rings
    beside: Callable[[Candidate], Beside] = lambda _: Beside()
    least: Callable[[int], Beside] = lambda _: Beside()  # the same of so many devices, at least
    times: float = 1.0  # calls one after the other
    also: tuple[Search, ...] = ()  # other calls on the same mesh
    adapt: Callable[[Candidate], Candidate] = lambda candidate: candidate  # how such a call is divided there
    serves: Callable[[Candidate], bool] = lambda _: True  # which meshes the caller runs on
    projects: bool = True  # the sums of the projection behind it count, too

    def chip_of(self, devices: int) -> Chip:
        """Return what each of so many devices has."""
        return self.chip.divide(devices)

    def room(self, devices: int) -> float:
        """Return the bytes for arrays that each of so many devices has."""
        return self.chip_of(devices).memory_bytes * self.assumptions.memory_share

    def list(self, devices: int) -> Iterator[Candidate]:
        """Yield the meshes of so many devices."""
        return filter(self.serves, list_candidates(self.problem, devices, self.fixed))

    def send(self, candidate: Candidate) -> tuple[int, int]:
        """Return the bytes that a device sends forward and back."""
        problem = candidate.pad(self.problem)
        return sent_bytes(problem, self.rings.divide(candidate.cut(problem))[0])

    def lay_out(self, candidate: Candidate) -> str:
        """Return the layout that `parallel.attend` chooses on a ring."""
        problem = candidate.pad(self.problem)
        plain = self.rings.divide(replace(candidate, layout="contiguous").cut(problem))[0]
        even = self.rings.divide(replace(candidate, layout="balanced").cut(problem))[0]
        return "balanced" if favours_balance(problem, self.rings.work, plain, even) else "contiguous"

    def peak(self, candidate: Candidate) -> float:
        """Return the bytes that a device holds."""
        problem = candidate.pad(self.problem)
        return Weighing(problem, candidate, candidate.cut(problem), self.backward).peak()

    def weigh(self, candidate: Candidate) -> Estimate:
        """Return what the call costs on a mesh."""
        problem = candidate.pad(self.problem)
        division, cells = self.rings.divide(candidate.cut(problem))
        weighing = Weighing(problem, candidate, division, self.backward)
        chip = self.chip_of(candidate.devices)
        return weighing.estimate(cells, chip, self.assumptions, projects=self.projects)

    def total(self, item: Estimate) -> float:
        """Return the seconds of all calls and of what is beside them."""
        others = sum(other.total(other.weigh(other.adapt(item.candidate))) for other in self.also)
        return self.times * item.seconds + self.beside(item.candidate).seconds + others

    def bound(self, candidate: Candidate) -> float:
        """Return seconds that a mesh takes at least, from sizes alone."""
        problem, devices, ring = self.problem, candidate.devices, candidate.sequence
        chip, shares = self.chip_of(devices), self.assumptions
        trips = 2 if self.backward else 1
        parts = 1 if candidate.layout == "contiguous" else 2
        chunk = Chunking(problem.T, parts, ring, candidate.exchange).chunk
        load = self.rings.load(ring, candidate.layout, chunk)
        # The busiest member of the ring, beside the mean.
        compute = self._spread(devices) * float(load.cells.max()) * ring / max(self.rings.work.total, 1.0)
        hops = trips * (load.least_rounds - 1)
        keys = sum(math.prod(array.shape) * array.dtype.itemsize for array in (problem.key, problem.value))
        each = keys / devices / max(chip.near_bandwidth, chip.far_bandwidth)
        travel = shares.reach(hops * each, hops)
        waiting = trips * candidate.messages * shares.message_seconds
        call = max(compute, self.times * travel) + self.times * waiting
        others = sum(other.bound(other.adapt(candidate)) for other in self.also)
        return call + self.beside(candidate).seconds + others

    def find_best(self, devices: int) -> Estimate | None:
        """Return the fastest that fits of at most so many devices; of those as fast, the first in order."""
        step = math.prod(self.fixed.values())
        numbers, shortlist = itertools.count(), _Shortlist(devices)
        # Numbers of devices, then their meshes: what cannot be the fastest is never looked at.
        calls, waiting = (self, *self.also), []
        for count in (step * multiple for multiple in list_counts(devices // step)):
            least = self.least(count)
            if least.bytes <= self.room(count):
                seconds = least.seconds + sum(call._spread(count) for call in calls)
                heapq.heappush(waiting, _Node(seconds, next(numbers), count))
        while waiting and waiting[0].least <= ALIKE * shortlist.fastest:
            node = heapq.heappop(waiting)
            if not shortlist.admits(node):
                continue
            if node.mesh is None:
                for mesh in self.list(node.devices):
                    heapq.heappush(waiting, _Node(self.bound(mesh), next(numbers), node.devices, mesh))
            elif self.peak(node.mesh) + self.beside(node.mesh).bytes <= self.room(node.devices):
                estimate = self.weigh(node.mesh)
                shortlist.add(self.total(estimate), estimate)
        return shortlist.best and self._span_slices(shortlist.best)

    def _span_slices(self, best: Estimate) -> Estimate:
        """Return a mesh with those axes between slices with which it is fastest; if alike, the first ones."""
        fastest = min(map(self.weigh, best.candidate.list_spanning()), key=self.total)
        return fastest if ALIKE * self.total(fastest) < self.total(best) else best

    def _spread(self, devices: int) -> float:
        """Return the seconds of the call's products, spread evenly."""
        problem, chip = self.problem, self.chip_of(devices)
        products = (problem.D + problem.E) + self.backward * (3 * problem.D + 2 * problem.E)
        flops = 2 * self.rings.work.total * math.prod(problem.leading) * products / devices
        rate = chip.flops[problem.matmul_dtype.name] * self.assumptions.compute_efficiency
        return self.times * flops / rate
