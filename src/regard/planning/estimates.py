"""Estimates: memory, work, bytes and time of a candidate, from what a chip offers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from regard.engine.call.problem import Problem
from regard.engine.flash.tuning import Tuning
from regard.parallel.cost_reports import local_bytes, sent_bytes
from regard.parallel.division import Division
from regard.parallel.exchange import moved_halves
from regard.planning.candidates import Candidate
from regard.planning.chips import Chip
from regard.planning.links import Line, exchange_seconds, hop_seconds, sum_seconds
from regard.planning.workload import Work


@dataclass(frozen=True)
class Assumptions:
    """What shares of a chip's published figures are taken to be reached.

    Example:
        >>> from regard import planning
        >>> planning.Assumptions(compute_efficiency=0.3).link_efficiency
        0.8
    """

    compute_efficiency: float = 0.5
    """Of the operations per second, in attention."""
    memory_efficiency: float = 0.8
    """Of the memory's bandwidth."""
    link_efficiency: float = 0.8
    """Of the bandwidth of links and network."""
    message_seconds: float = 1e-5
    """Before the first byte of a message arrives."""
    memory_share: float = 0.9
    """Of the memory, for arrays."""


@dataclass(frozen=True)
class Estimate:
    """What one call costs on each device of a mesh; of those with unequal shares, the most loaded one."""

    candidate: Candidate
    memory_bytes: int
    """Arguments, results and what lies between them at the same time."""
    fits: bool
    """Whether that is at most the share of the chip's memory that is for arrays."""
    flops: float
    """Of the matrix products, in tiles with work."""
    cells: tuple[float, float]
    """Pairs of query and key in tiles with work, per head: fewest on a device, and most."""
    rounds: int
    """Stops of the keys with work, the one at home included."""
    sent_bytes: int
    """By attention: keys, values, their gradients, and what is exchanged."""
    balancing_bytes: int
    """Of them, to put tokens in an order that spreads the work, and back."""
    summed_bytes: int
    """By the projection after it, where heads are divided: sums of its parts."""
    gathered_bytes: int
    """Where the length is not divided evenly, and rows are whole on every device before and after."""
    compute_seconds: float
    memory_seconds: float
    travel_seconds: float
    """Of keys and gradients on their way around, while devices compute."""
    exchange_seconds: float
    """Of all that nothing can be computed during: heads for sequence, halves for balance, sums of heads."""

    @property
    def seconds(self) -> float:
        """Of all: the slowest of computing, reading and travelling, and then what waits."""
        return self.exchange_seconds + max(self.compute_seconds, self.memory_seconds, self.travel_seconds)

    @property
    def all_bytes(self) -> int:
        """Sent by each device for whatever reason."""
        return self.sent_bytes + self.summed_bytes + self.gathered_bytes

    @property
    def balance(self) -> float:
        """Work on the busiest device over that on the idlest."""
        fewest, most = self.cells
        return most / fewest if fewest else float("inf")

    @property
    def bound(self) -> str:
        """What takes longest."""
        parts = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "travel": self.travel_seconds,
            "exchange": self.exchange_seconds,
        }
        return max(parts, key=lambda name: parts[name])


def estimate(
    problem: Problem,
    candidate: Candidate,
    division: Division,
    work: Work,
    chip: Chip,
    assumptions: Assumptions,
    backward: bool,
) -> Estimate:
    """Weigh a candidate, divided with its rounds."""
    held = _Held.measure(problem, division)
    cells = work.divide(division)
    share = (
        problem.leading[0] // candidate.data * problem.leading[-1] / (candidate.heads * candidate.exchange)
    )
    forward_products, backward_products = problem.D + problem.E, 3 * problem.D + 2 * problem.E
    products = forward_products + (backward_products if backward else 0)
    flops = 2 * float(cells.max()) * share * products
    memory = held.peak(candidate, backward)
    rate = chip.flops[problem.matmul_dtype.name] * assumptions.compute_efficiency
    kept = division if division.layout == "contiguous" else dataclasses.replace(division, layout="zigzag")
    sent, ordered = (sum(sent_bytes(problem, one)[: 2 if backward else 1]) for one in (division, kept))
    summed, waiting = _wait(problem, division, candidate, chip, assumptions, backward)
    gathered = held.gathered(backward)
    along = Line(candidate.sequence * candidate.exchange, candidate.heads)
    waiting += sum_seconds(chip, along, gathered) / assumptions.link_efficiency
    return Estimate(
        candidate=candidate,
        memory_bytes=memory,
        fits=memory <= chip.memory_bytes * assumptions.memory_share,
        flops=flops,
        cells=(float(cells.min()), float(cells.max())),
        rounds=len(division.rounds),
        sent_bytes=sent,
        balancing_bytes=sent - ordered,
        summed_bytes=summed,
        gathered_bytes=gathered,
        compute_seconds=flops / rate,
        memory_seconds=held.traffic(len(division.rounds), backward)
        / (chip.memory_bandwidth * assumptions.memory_efficiency),
        travel_seconds=_travel(problem, division, candidate, chip, assumptions, backward),
        exchange_seconds=waiting,
    )


def memory_of(problem: Problem, candidate: Candidate, backward: bool) -> int:
    """Bytes on each device."""
    return _Held.measure(problem, candidate.cut(problem)).peak(candidate, backward)


@dataclass(frozen=True)
class _Held:
    """Sizes, in bytes, of what a device has a part of."""

    query: int
    keys: int  # and values
    output: int
    sums: int  # the output while it is summed up
    query_sums: int
    key_sums: int  # gradients of keys and values while they are
    statistic: int
    tiles: float
    copies: int  # of the caller's rows on devices along the sequence, whose parts are uneven; 1: none

    @classmethod
    def measure(cls, problem: Problem, division: Division) -> _Held:
        wide = problem.accumulation.itemsize
        query, key, value = (
            local_bytes(problem, division, array) for array in (problem.query, problem.key, problem.value)
        )
        rows = query // problem.query.dtype.itemsize // problem.D
        scores = min(Tuning().forward_cells, rows * division.size(division.exchange) * problem.S)
        return cls(
            query=query,
            keys=key + value,
            output=rows * problem.E * problem.query.dtype.itemsize,
            sums=rows * problem.E * wide,
            query_sums=rows * problem.D * wide,
            key_sums=(key // problem.key.dtype.itemsize + value // problem.value.dtype.itemsize) * wide,
            statistic=rows * wide,
            tiles=2.5 * scores * wide,
            copies=1
            if division.queries.padded == division.queries.length
            else division.size(division.ring, division.exchange),
        )

    def peak(self, candidate: Candidate, backward: bool) -> int:
        """What is there at once. Counted against compiled programs: tests hold it to a factor of them."""
        travels = candidate.sequence > 1
        moved = candidate.exchange > 1 or candidate.layout == "balanced"
        inside = self.query + self.keys if moved else 0  # as the ring lies, beside what the caller has
        # What was summed up before and what a stop adds; the keys here and those that arrive.
        forward = (2 if travels else 1) * self.sums + (2 * self.keys if travels else 0) + inside
        forward += 2 * self.statistic + self.tiles
        caller = self.copies * (self.query + self.keys + self.output)
        if not backward:
            return round(caller + forward)
        # The gradient that comes, and those that go.
        caller += self.copies * (self.output + self.query + self.keys)
        later = (2 if travels else 1) * self.query_sums + (3 if travels else 1) * self.key_sums
        later += (2 * self.keys if travels else 0) + inside + (self.output + self.sums if moved else 0)
        later += 4 * self.statistic + self.tiles
        return round(caller + max(forward, later))

    def gathered(self, backward: bool) -> int:
        """Bytes sent so that all have all rows of the output, and of the gradients."""
        results = self.output + (self.query + self.keys if backward else 0)
        return (self.copies - 1) * results

    def traffic(self, rounds: int, backward: bool) -> float:
        """Read from and written to memory, if what a stop needs is read once there."""
        count = rounds * (self.query + self.keys + 2 * self.sums)
        if backward:
            read = self.query + self.keys + self.output + 2 * self.statistic
            count += rounds * (read + 2 * self.query_sums + 2 * self.key_sums)
        return count


def _travel(
    problem: Problem,
    division: Division,
    candidate: Candidate,
    chip: Chip,
    assumptions: Assumptions,
    backward: bool,
) -> float:
    """Keys, values and gradients from stop to stop."""
    held, line = _Held.measure(problem, division), candidate.line("sequence")
    stops = [stop.number for stop in division.rounds]
    hops = [later - earlier for earlier, later in zip([0, *stops], stops, strict=False)]
    carried = [(hop, held.keys) for hop in hops]
    if backward and stops:
        carried += [(hop, held.keys + held.key_sums) for hop in hops[1:]]
        carried += [(hops[0], held.keys), (-stops[-1], held.key_sums)]
    carried = [(hop, count) for hop, count in carried if hop % line.size]
    way = sum(hop_seconds(chip, line, count, hop) for hop, count in carried)
    return way / assumptions.link_efficiency + len(carried) * assumptions.message_seconds


def _wait(
    problem: Problem,
    division: Division,
    candidate: Candidate,
    chip: Chip,
    assumptions: Assumptions,
    backward: bool,
) -> tuple[int, float]:
    """Bytes of sums over heads, and seconds of them and of all that is exchanged before and after."""
    held = _Held.measure(problem, division)
    moved = held.query + held.keys + held.output
    messages, seconds = 0, 0.0
    trips = 2 if backward else 1
    if candidate.exchange > 1:
        away = trips * moved * (candidate.exchange - 1) / candidate.exchange
        seconds += exchange_seconds(chip, candidate.line("exchange"), away)
        messages += 4 * trips
    if candidate.layout == "balanced" and candidate.sequence > 1:
        seconds += exchange_seconds(chip, candidate.line("sequence"), trips * moved * moved_halves(division))
        messages += 8 * trips
    summed = 0
    if candidate.heads > 1:
        # The projection gives every device a part of each row: as wide as all heads together.
        whole = held.output * candidate.heads
        summed = round(trips * 2 * (candidate.heads - 1) / candidate.heads * whole)
        seconds += sum_seconds(chip, candidate.line("heads"), summed)
        messages += trips
    return summed, seconds / assumptions.link_efficiency + messages * assumptions.message_seconds
