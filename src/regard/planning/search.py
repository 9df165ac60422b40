"""The search: the fastest mesh of any number of devices up to the one given."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from regard.engine.call.problem import Problem
from regard.parallel.division import Chunking
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
    times: float = 1.0  # calls one after the other
    also: tuple[Search, ...] = ()  # other calls on the same mesh

    def chip_of(self, devices: int) -> Chip:
        """Return what each of so many devices has."""
        return self.chip.divide(devices) if self.chip.shared else self.chip

    def list(self, devices: int) -> Iterator[Candidate]:
        """Yield the meshes of so many devices."""
        return list_candidates(self.problem, devices, self.fixed)

    def peak(self, candidate: Candidate) -> float:
        """Return the bytes that a device holds."""
        problem = candidate.pad(self.problem)
        return Weighing(problem, candidate, candidate.cut(problem), self.backward).peak()

    def weigh(self, candidate: Candidate) -> Estimate:
        """Return what the call costs on a mesh."""
        problem = candidate.pad(self.problem)
        division, cells = self.rings.divide(candidate.cut(problem))
        weighing = Weighing(problem, candidate, division, self.backward)
        return weighing.estimate(cells, self.chip_of(candidate.devices), self.assumptions)

    def total(self, item: Estimate) -> float:
        """Return the seconds of all calls and of what is beside them."""
        others = sum(other.total(other.weigh(item.candidate)) for other in self.also)
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
        return call + self.beside(candidate).seconds + sum(other.bound(candidate) for other in self.also)

    def find_best(self, devices: int) -> Estimate | None:
        """Return the fastest that fits of at most so many devices; of those as fast, the first in order."""
        step = math.prod(self.fixed.values())
        # Numbers of devices, then their meshes: what cannot be the fastest is never looked at.
        waiting: list[tuple[float, int, int | Candidate]] = [
            (self._spread(count * step), count, count * step) for count in list_counts(devices // step)
        ]
        heapq.heapify(waiting)
        numbers = itertools.count(devices + 1)
        alike: list[tuple[float, Estimate]] = []
        fastest, first = math.inf, (True, devices)
        room = self.chip.memory_bytes * self.assumptions.memory_share
        while waiting and waiting[0][0] <= ALIKE * fastest:
            least, _, entry = heapq.heappop(waiting)
            order = (False, entry) if isinstance(entry, int) else entry.order
            # From there on nothing is faster: only a better order counts.
            if least > fastest and order > first:
                continue
            if isinstance(entry, int):
                for candidate in self.list(entry):
                    heapq.heappush(waiting, (self.bound(candidate), next(numbers), candidate))
            elif self.peak(entry) + self.beside(entry).bytes <= room:
                item = self.weigh(entry)
                seconds = self.total(item)
                fastest = min(fastest, seconds)
                alike = [pair for pair in [*alike, (seconds, item)] if pair[0] <= ALIKE * fastest]
                first = min(estimate.candidate.order for _, estimate in alike)
        ordered = sorted(alike, key=lambda pair: (pair[1].candidate.order, pair[1].all_bytes, pair[0]))
        return ordered[0][1] if ordered else None

    def _spread(self, devices: int) -> float:
        """Return the seconds of the call's products, spread evenly."""
        problem, chip = self.problem, self.chip_of(devices)
        products = (problem.D + problem.E) + self.backward * (3 * problem.D + 2 * problem.E)
        flops = 2 * self.rings.work.total * math.prod(problem.leading) * products / devices
        rate = chip.flops[problem.matmul_dtype.name] * self.assumptions.compute_efficiency
        return self.times * flops / rate
