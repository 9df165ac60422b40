"""Estimates: work, memory, bytes and time of a candidate, from what a chip offers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from regard.arguments import read_number
from regard.engine.call.problem import Problem
from regard.engine.flash.measurements import Tuning
from regard.parallel.cost_reports import local_bytes, sent_bytes
from regard.parallel.division import Division
from regard.parallel.exchange import moved_halves
from regard.planning.candidates import Candidate
from regard.planning.chips import Chip, exchange_seconds, hop_seconds, sum_seconds

PARTS = ("compute", "memory", "travel", "exchange")


@dataclass(frozen=True)
class Assumptions:
    """Shares of a chip's published figures that are taken to be reached.

    Example:
        >>> from regard import planning
        >>> planning.Assumptions(compute_efficiency=0.3).link_efficiency
        0.8
    """

    compute_efficiency: float = 0.5
    """Share of the operations per second that attention reaches."""
    memory_efficiency: float = 0.8
    """Share of the memory's bandwidth that is reached."""
    link_efficiency: float = 0.8
    """Share of the bandwidth of links and network that is reached."""
    message_seconds: float = 1e-5
    """Seconds before the first byte of a message arrives."""
    memory_share: float = 0.9
    """Share of the memory that is for arrays."""

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if name == "message_seconds":
                if not 0 <= read_number(name, number) < math.inf:
                    raise ValueError(f"{name}: expected seconds of at least 0, got {number}")
            elif not 0 < read_number(name, number) <= 1:
                raise ValueError(f"{name}: expected a share in (0, 1], got {number}")

    def reach(self, seconds: float, messages: int) -> float:
        """Return seconds on links of which a share is reached, with those before each message."""
        return seconds / self.link_efficiency + messages * self.message_seconds


@dataclass(frozen=True)
class Estimate:
    """The cost of a call on each device of a mesh, or on the most loaded one."""

    candidate: Candidate
    memory_bytes: int
    """Bytes of arguments, results and what lies between them at the same time."""
    fits: bool
    """True if that is at most the share of the chip's memory that is for arrays."""
    flops: float
    """Operations of the matrix products in tiles with work."""
    cells: tuple[float, float]
    """Pairs of query and key in tiles with work, per head: fewest on a device, and most."""
    rounds: int
    """Steps of the ring with work, the one at home included."""
    sent_bytes: int
    """Bytes that attention sends: keys, values, their gradients, and what is exchanged."""
    balancing_bytes: int
    """Bytes among them that put tokens in an order that spreads the work, and back."""
    summed_bytes: int
    """Bytes that the projection after it sends to sum its parts, where heads are divided."""
    gathered_bytes: int
    """Bytes sent where the length is not divided evenly, and every device has whole rows before and after."""
    compute_seconds: float
    memory_seconds: float
    travel_seconds: float
    """Time of keys and gradients on their way around, while devices compute."""
    exchange_seconds: float
    """Time in which nothing can be computed: heads for sequence, halves for balance, sums of heads."""

    @property
    def seconds(self) -> float:
        """Time of the call: the slowest of computing, reading and travelling, and then what waits."""
        return self.exchange_seconds + max(self.compute_seconds, self.memory_seconds, self.travel_seconds)

    @property
    def all_bytes(self) -> int:
        """Bytes that each device sends, for whatever reason."""
        return self.sent_bytes + self.summed_bytes + self.gathered_bytes

    @property
    def balance(self) -> float:
        """Work on the busiest device over that on the idlest."""
        fewest, most = self.cells
        if not fewest:
            return math.inf if most else 1.0
        return most / fewest

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(PARTS, key=lambda part: getattr(self, f"{part}_seconds"))


class Weighing:
    """A call divided over devices, and the bytes of the arrays that a device has a part of."""

    def __init__(self, problem: Problem, candidate: Candidate, division: Division, backward: bool):
        self.problem, self.candidate, self.division, self.backward = problem, candidate, division, backward
        self.query = local_bytes(problem, division, problem.query)
        key = local_bytes(problem, division, problem.key)
        value = local_bytes(problem, division, problem.value)
        size, wide = problem.query.dtype.itemsize, problem.accumulation.itemsize
        rows = self.query // size // problem.D
        self.keys = key + value
        self.output = rows * problem.E * size
        # What is summed up is wider meanwhile.
        self.sums, self.query_sums = rows * problem.E * wide, rows * problem.D * wide
        self.key_sums = (key // problem.key.dtype.itemsize + value // problem.value.dtype.itemsize) * wide
        self.statistic = rows * wide
        self.tiles = 3 * self._count_scores() * wide
        # Devices along the sequence whose parts are uneven have all of the caller's rows.
        uneven = division.queries.padded != division.queries.length
        self.copies = division.size(division.ring, division.exchange) if uneven else 1

    def _count_scores(self) -> int:
        """Return the scores that are there at once: of a tile of the heads that go together, or few, all."""
        problem, candidate, ring = self.problem, self.candidate, self.division.size(self.division.ring)

        def cut(array: Any, rows: int) -> jax.ShapeDtypeStruct:
            batch, heads, _, width = array.shape
            heads = max(heads // (candidate.heads * candidate.exchange), 1)
            return jax.ShapeDtypeStruct((max(batch // candidate.data, 1), heads, rows, width), array.dtype)

        rows, keys = self.division.queries.padded // ring, -(-problem.S // ring)
        key, value = cut(problem.key, keys), cut(problem.value, keys)
        own = replace(problem, query=cut(problem.query, rows), key=key, value=value)
        tuning = Tuning()
        if ring == 1 and tuning.favours_dense(own) and not tuning.tiles_derivatives(own):
            return math.prod(own.leading) * own.T * own.S
        tile = tuning.blocking(own)[0]
        return own.group * tile.queries * tile.keys * min(tile.heads, own.key_heads)

    def peak(self) -> int:
        """Return the bytes that are there at once; tests hold them to a factor of compiled programs."""
        travels = self.candidate.sequence > 1
        moved = self.candidate.exchange > 1 or self.candidate.layout == "balanced"
        inside = self.query + self.keys if moved else 0  # as the ring lies, beside what the caller has
        # What was summed up before and what a step adds; the keys here and those that arrive.
        forward = (2 if travels else 1) * self.sums + (2 * self.keys if travels else 0) + inside
        forward += 2 * self.statistic + self.tiles
        caller = self.copies * (self.query + self.keys + self.output)
        if not self.backward:
            return round(caller + forward)
        # The gradient that comes, and those that go.
        caller += self.copies * (self.output + self.query + self.keys)
        later = (2 if travels else 1) * self.query_sums + (3 if travels else 1) * self.key_sums
        later += (2 * self.keys if travels else 0) + inside + (self.output + self.sums if moved else 0)
        later += 4 * self.statistic + self.tiles
        return round(caller + max(forward, later))

    def estimate(
        self, cells: np.ndarray, chip: Chip, assumptions: Assumptions, *, projects: bool = True
    ) -> Estimate:
        """Return what the call costs on chips of a kind, from the cells of each member of the ring.

        With what the projection behind it sums over heads, or, if that is counted elsewhere, without.
        """
        problem, candidate, division = self.problem, self.candidate, self.division
        memory, steps = self.peak(), len(division.rounds)
        heads = problem.leading[-1] / (candidate.heads * candidate.exchange)
        products = problem.D + problem.E
        read = self.query + self.keys + 2 * self.sums  # and written, if each step reads once what it needs
        if self.backward:
            products += 3 * problem.D + 2 * problem.E
            read += self.query + self.keys + self.output + 2 * self.statistic
            read += 2 * self.query_sums + 2 * self.key_sums
        flops = 2 * float(cells.max()) * (-(-problem.leading[0] // candidate.data) * heads) * products
        rate = chip.flops[problem.matmul_dtype.name] * assumptions.compute_efficiency
        layout = "contiguous" if division.layout == "contiguous" else "zigzag"
        in_order = replace(division, layout=layout)
        trips = 2 if self.backward else 1
        sent = sum(sent_bytes(problem, division)[:trips])
        sent_in_order = sum(sent_bytes(problem, in_order)[:trips])
        # All have all rows of the output, and of the gradients.
        gathered = (self.copies - 1) * (self.output + (self.query + self.keys if self.backward else 0))
        # The projection gives every device a part of each row: as wide as all heads together.
        summed = round(projects * trips * 2 * (candidate.heads - 1) * self.output)
        return Estimate(
            candidate=candidate,
            memory_bytes=memory,
            fits=memory <= chip.memory_bytes * assumptions.memory_share,
            flops=flops,
            cells=(float(cells.min()), float(cells.max())),
            rounds=steps,
            sent_bytes=sent,
            balancing_bytes=sent - sent_in_order,
            summed_bytes=summed,
            gathered_bytes=gathered,
            compute_seconds=flops / rate,
            memory_seconds=steps * read / (chip.memory_bandwidth * assumptions.memory_efficiency),
            travel_seconds=self._travel(chip, assumptions),
            exchange_seconds=self._wait(chip, assumptions, gathered, summed),
        )

    def _travel(self, chip: Chip, assumptions: Assumptions) -> float:
        """Return seconds of keys, values and gradients on their way around the ring."""
        line = self.candidate.line(chip, "sequence")
        steps = np.array([step.number for step in self.division.rounds], int)
        hops = np.diff(steps, prepend=0)
        carried = Counter()

        def carry(count: int, hops: np.ndarray) -> None:
            for hop, times in zip(*np.unique(hops, return_counts=True), strict=True):
                carried[count, int(hop)] += int(times)

        carry(self.keys, hops)
        if self.backward and steps.size:
            carry(self.keys + self.key_sums, hops[1:])
            carried.update([(self.keys, int(hops[0])), (self.key_sums, -int(steps[-1]))])
        sent = {(size, hop): times for (size, hop), times in carried.items() if hop % line.size}
        seconds = sum(times * hop_seconds(chip, line, size, hop) for (size, hop), times in sent.items())
        return assumptions.reach(seconds, sum(sent.values()))

    def _wait(self, chip: Chip, assumptions: Assumptions, gathered: int, summed: int) -> float:
        """Return seconds of all that overlaps with nothing."""
        candidate, trips = self.candidate, 2 if self.backward else 1
        moved = trips * (self.query + self.keys + self.output)
        away = moved * (candidate.exchange - 1) / candidate.exchange
        halves = moved * moved_halves(self.division) if candidate.layout == "balanced" else 0.0
        along, line = candidate.line(chip, "sequence", "exchange"), partial(candidate.line, chip)
        seconds = sum_seconds(chip, along, gathered) + sum_seconds(chip, line("heads"), summed)
        seconds += exchange_seconds(chip, line("exchange"), away)
        seconds += exchange_seconds(chip, line("sequence"), halves)
        return assumptions.reach(seconds, trips * candidate.messages)
