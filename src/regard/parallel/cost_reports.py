"""Bytes and tiles of a division, by which layouts are chosen, in numbers and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from regard.engine.call.problem import Problem
from regard.engine.dispatch.explanation import scaled
from regard.parallel.division import Division
from regard.parallel.exchange import moved_halves


@dataclass(frozen=True)
class CostReport:
    """The cost of a call over several devices; print it to read it.

    Example:
        >>> import jax
        >>> from regard import masks, parallel
        >>> x = jax.ShapeDtypeStruct((1, 8, 4096, 64), "bfloat16")
        >>> mesh = jax.sharding.AbstractMesh((8,), ("sequence",))
        >>> near = masks.sliding_window(500)
        >>> account = parallel.explain(x, x, x, mesh=mesh, axis="sequence", mask=near, plan="ring")
        >>> account.rounds, account.skipped_rounds, account.forward_bytes
        (2, 6, 1048576)
    """

    plan: str
    """"ring", "all_to_all", "both", or "whole": one program that the compiler divides."""
    reason: str
    """The reason for this plan."""
    refusals: dict[str, str]
    """The reasons against the others, where they cannot serve."""
    devices: int
    """The number of devices that share the sequence."""
    layout: str
    """"contiguous", "zigzag" or "balanced"."""
    rows_per_device: int
    """Queries on each device, padding included."""
    padding: tuple[int, int]
    """Queries and keys that are added so that devices divide the lengths."""
    rounds: int
    """Rounds of the ring in which some device has work, the first, with its own keys, included."""
    skipped_rounds: int
    """Rounds in which no device has work: they are skipped."""
    forward_bytes: int
    """Sent by each device in the forward pass."""
    backward_bytes: int
    """Sent by each device in the backward pass, but for sums of small gradients."""
    tiles: tuple[int, ...]
    """Tiles of the score matrix with work, on each member of the ring, in one head where heads are alike."""
    counted: str
    """Tile size: "128 x 128", less on short chunks and more in very long sequences, or "chunks of 512 x 512"
    where the mask is not known, or long and read pair by pair."""

    @property
    def balance(self) -> float:
        """The most tiles on a device over the fewest; 1 is even."""
        return max(self.tiles) / max(min(self.tiles), 1) if self.tiles else 1.0

    def __str__(self) -> str:
        named = zip(self.padding, ("queries", "keys"), strict=True)
        padded = " and ".join(f"{count} {name}" for count, name in named if count)
        lines = [
            ("plan", f"{self.plan}: {self.reason}"),
            *(("refused", f"{name}: {why}") for name, why in self.refusals.items()),
            ("devices", f"{self.devices}, {self.rows_per_device} queries each, {self.layout}"),
        ]
        if self.plan != "whole":
            forward, backward = scaled(self.forward_bytes, "B"), scaled(self.backward_bytes, "B")
            fewest, most = min(self.tiles), max(self.tiles)
            lines += [
                *([("padding", padded)] if padded else []),
                ("rounds", f"{self.rounds}; {self.skipped_rounds} without work are skipped"),
                ("sent", f"{forward} per device forward, {backward} backward"),
                ("tiles", f"{fewest} to {most} per device ({self.counted}), balance {self.balance:.2f}"),
            ]
        return "\n".join(f"{label:<10} {text}" for label, text in lines)


def sent_bytes(problem: Problem, division: Division) -> tuple[int, int]:
    """Count the bytes that each device sends forward and backward."""
    wide = problem.accumulation.itemsize
    query = local_bytes(problem, division, problem.query)
    arrays = (problem.key, problem.value)
    keys = sum(local_bytes(problem, division, array) for array in arrays)
    # A bias of one row is on every device.
    pairs = problem.bias is not None and problem.bias.shape[-2] > 1
    bias = local_bytes(problem, division, problem.bias) if pairs else 0
    rows = math.prod(problem.leading) // division.size(*division.batch, *division.heads, division.exchange)
    rows *= division.queries.padded // division.size(division.ring)
    output, statistic = rows * problem.E * problem.query.dtype.itemsize, rows * wide
    sums = sum(local_bytes(problem, division, array) // array.dtype.itemsize * wide for array in arrays)
    # Of what is exchanged, a share stays where it is.
    shared = division.size(division.exchange)
    away = (shared - 1) / shared
    if division.layout == "balanced":
        away += moved_halves(division)
    forward = away * (query + keys + bias + output + 2 * statistic)
    backward = away * (query + keys + bias + output + statistic)
    rounds = division.rounds
    if rounds:
        hops = len(rounds) - 1 + (rounds[0].number > 0)
        forward += hops * keys
        backward += hops * keys + (len(rounds) - 1 + (rounds[-1].number > 0)) * sums
    return round(forward), round(backward)


def local_bytes(problem: Problem, division: Division, array: Any) -> int:
    """Count the bytes of an array as it travels: a part of the heads, one ring member's sequence."""
    *batch, heads, _, width = (1,) * (3 - array.ndim) + tuple(array.shape)
    sequence = division.keys if array is problem.key or array is problem.value else division.queries
    count = math.prod(batch) * heads * (sequence.padded // division.size(division.ring)) * width
    if batch and batch[0] > 1:
        count //= division.size(*division.batch)
    if heads > 1:
        count //= division.size(*division.heads, division.exchange)
    return count * array.dtype.itemsize
