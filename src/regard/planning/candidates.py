"""Candidates: every mesh of so many devices that a call can be divided over, and how."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from regard.engine.call.problem import Problem
from regard.parallel.division import Division, Round
from regard.parallel.placements import MeshPlacement
from regard.parallel.schedule import plan_rounds
from regard.planning.links import Line

AXES = ("data", "sequence", "exchange", "heads")


@dataclass(frozen=True)
class Candidate:
    """A mesh, the plan on it, and the order of tokens.

    The axes, from the outermost to the innermost, which is that of neighbouring devices: `data` divides the
    batch; along `sequence` keys travel; along `exchange` sequence is exchanged for heads; `heads` divides
    them.
    """

    data: int
    sequence: int
    exchange: int
    heads: int
    layout: str

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and their sizes; those of one device are left out, but for the sequence."""
        sizes = {name: getattr(self, name) for name in AXES}
        needed = "exchange" if self.sequence == 1 < self.exchange else "sequence"
        return {name: size for name, size in sizes.items() if size > 1 or name == needed}

    @property
    def plan(self) -> str:
        """As in `parallel.attend`."""
        if self.exchange == 1:
            return "ring"
        return "both" if self.sequence > 1 else "all_to_all"

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that the sequence lies along."""
        return tuple(name for name in ("sequence", "exchange") if name in self.mesh)

    def place(self) -> MeshPlacement:
        """The mesh and what its axes are for."""
        mesh = jax.sharding.AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh))
        batch, heads = ((name,) if name in self.mesh else () for name in ("data", "heads"))
        return MeshPlacement.check(mesh, self.axes, batch, heads, self.layout, self.plan)

    def line(self, axis: str) -> Line:
        """Where the devices along an axis are."""
        after = AXES[AXES.index(axis) + 1 :]
        return Line(getattr(self, axis), math.prod(getattr(self, name) for name in after))

    def cut(self, problem: Problem) -> Division:
        """Which device has which part, without rounds."""
        place = self.place()
        ring, exchange = (name if name in self.mesh else None for name in ("sequence", "exchange"))
        return Division(
            place.mesh, ring, exchange, place.batch, place.heads, self.layout, problem.T, problem.S
        )

    def divide(self, problem: Problem, known: dict[Any, tuple[Round, ...]] | None = None) -> Division:
        """Which device has which part, and the rounds of the ring; `known` keeps those of one problem."""
        division, known = self.cut(problem), {} if known is None else known
        # The batch and the heads have no part in them.
        chunks = (self.sequence, self.layout, division.queries.chunk)
        if chunks not in known:
            known[chunks] = plan_rounds(problem, division)
        return dataclasses.replace(division, rounds=known[chunks])

    def code(self) -> str:
        """Python that runs attention like this."""
        sizes, names = tuple(self.mesh.values()), tuple(self.mesh)
        options = [
            f"{keyword}={name!r}"
            for keyword, name in (("batch_axis", "data"), ("head_axis", "heads"))
            if name in self.mesh
        ]
        first, *others = self.axes
        axes = self.axes if others else first
        call = ", ".join(["mesh", repr(axes), *options, f"layout={self.layout!r}", f"plan={self.plan!r}"])
        return f"mesh = jax.make_mesh({sizes}, {names})\nwith regard.parallel.use({call}):\n    ..."


def list_candidates(problem: Problem, devices: int, fixed: Mapping[str, int]) -> Iterator[Candidate]:
    """Meshes whose sizes divide batch and heads; tokens in the order of the sequence, and balanced."""
    batch, query_heads = problem.leading[0], problem.leading[-1]
    key_heads = problem.key_heads
    divisible = query_heads if key_heads == 1 else key_heads
    for data, heads in itertools.product(_divisors(math.gcd(devices, batch)), _divisors(divisible)):
        if devices % (data * heads):
            continue
        rest = devices // (data * heads)
        for exchange in _divisors(math.gcd(rest, key_heads // heads if key_heads > 1 else 1)):
            sizes = {"data": data, "sequence": rest // exchange, "exchange": exchange, "heads": heads}
            if any(sizes[name] != size for name, size in fixed.items()):
                continue
            # Fewer rows than devices are not worth a division.
            if rest > min(problem.T, problem.S):
                continue
            layouts = ("contiguous", "balanced") if sizes["sequence"] > 1 else ("contiguous",)
            yield from (Candidate(**sizes, layout=layout) for layout in layouts)


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
