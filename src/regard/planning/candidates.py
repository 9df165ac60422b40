"""Candidates: every mesh of so many devices that a call can be divided over, and how."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from regard.engine.call.problem import Problem
from regard.parallel.division import Chunking, Division
from regard.parallel.meshes import divide_slices
from regard.parallel.placements import MeshPlacement
from regard.planning.chips import Chip, Line

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
    tokens: int = 0
    """Tokens that the caller appends and masks out, so that the mesh divides the length."""
    rows: int = 0
    """Sequences that the caller appends, so that the mesh divides the batch."""
    spanning: tuple[str, ...] = AXES
    """Axes in the order in which they span slices: each as many as fit."""

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(getattr(self, name) for name in AXES)

    @property
    def order(self) -> tuple[bool, int]:
        """The order of meshes that are as fast: those without padding, then those of few devices."""
        return bool(self.tokens + self.rows), self.devices

    @property
    def mesh(self) -> dict[str, int]:
        """Axes and their sizes; those of one device are left out, but for the sequence."""
        sizes = {name: getattr(self, name) for name in AXES}
        needed = "exchange" if self.sequence == 1 < self.exchange else "sequence"
        return {name: size for name, size in sizes.items() if size > 1 or name == needed}

    @property
    def plan(self) -> str:
        """The plan's name in `parallel.attend`."""
        if self.exchange == 1:
            return "ring"
        return "both" if self.sequence > 1 else "all_to_all"

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that the sequence lies along."""
        return tuple(name for name in ("sequence", "exchange") if name in self.mesh)

    @property
    def messages(self) -> int:
        """Messages of a pass that nothing overlaps with: of exchanges, of balance, of a sum over heads."""
        balanced = self.layout == "balanced" and self.sequence > 1
        return 4 * (self.exchange > 1) + 8 * balanced + (self.heads > 1)

    def place(self) -> MeshPlacement:
        """Return the mesh and what its axes are for."""
        mesh = jax.sharding.AbstractMesh(tuple(self.mesh.values()), tuple(self.mesh))
        batch = ("data",) if "data" in self.mesh else ()
        heads = ("heads",) if "heads" in self.mesh else ()
        return MeshPlacement.check(mesh, self.axes, batch, heads, self.layout, self.plan)

    def spans(self, chip: Chip) -> dict[str, int]:
        """Return the slices that each axis spans, where each slice has as many devices."""
        counts = (count for count in _divisors(self.devices) if count * chip.near_devices >= self.devices)
        return divide_slices({name: getattr(self, name) for name in self.spanning}, next(counts))

    def outer(self, chip: Chip) -> dict[str, int]:
        """Return `outer` of `parallel.build_mesh`; nothing where that is its own rule."""
        return name_outer({name: getattr(self, name) for name in AXES}, self.spans(chip))

    def list_spanning(self) -> Iterator[Candidate]:
        """Yield this mesh with its axes in every order of spanning slices."""
        for groups in itertools.permutations((("data",), ("sequence", "exchange"), ("heads",))):
            yield replace(self, spanning=tuple(itertools.chain(*groups)))

    def line(self, chip: Chip, *axes: str) -> Line:
        """Return how many devices lie along axes, and how many of them in one slice."""
        size, spans = math.prod(getattr(self, name) for name in axes), self.spans(chip)
        return Line(size, size // math.prod(spans[name] for name in axes))

    def cut(self, problem: Problem) -> Division:
        """Return the part that each device has, without rounds."""
        placement = self.place()
        ring = "sequence" if "sequence" in self.mesh else None
        exchange = "exchange" if "exchange" in self.mesh else None
        axes = (ring, exchange, placement.batch, placement.heads)
        return Division(placement.mesh, *axes, self.layout, problem.T, problem.S)

    def pad(self, problem: Problem) -> Problem:
        """Return the call with what the caller appends; the mask is that of the call without."""
        if not self.tokens + self.rows:
            return problem

        def grow(array: Any) -> jax.ShapeDtypeStruct:
            batch, heads, length, width = array.shape
            return jax.ShapeDtypeStruct((batch + self.rows, heads, length + self.tokens, width), array.dtype)

        arrays = {name: grow(getattr(problem, name)) for name in ("query", "key", "value")}
        return replace(problem, **arrays)

    def code(self, chip: Chip, available: int | None = None) -> str:
        """Return Python that runs attention like this on so many devices; None: on as many as it takes."""
        names_of = {"batch_axis": "data", "head_axis": "heads"}
        options = [f"{keyword}={name!r}" for keyword, name in names_of.items() if name in self.mesh]
        axes = self.axes[0] if len(self.axes) == 1 else self.axes
        call = ", ".join(["mesh", repr(axes), *options, f"layout={self.layout!r}", f"plan={self.plan!r}"])
        padding = {"tokens, masked out": self.tokens, "sequences": self.rows}
        remarks = "".join(f"# append {count} {what}\n" for what, count in padding.items() if count)
        sizes = ", outer=".join(str(sizes) for sizes in (self.mesh, self.outer(chip)) if sizes)
        sizes += f", devices=jax.devices()[:{self.devices}]" if self.devices < (available or 0) else ""
        mesh = f"mesh = regard.parallel.build_mesh({sizes})"
        return f"{remarks}{mesh}\nwith regard.parallel.use({call}):\n    ..."


def name_outer(sizes: Mapping[str, int], spans: Mapping[str, int]) -> dict[str, int]:
    """Return `outer` of `parallel.build_mesh` for what axes span; nothing where that is its own rule."""
    by_rule = divide_slices(sizes, math.prod(spans.values()))
    return {} if spans == by_rule else {name: span for name, span in spans.items() if span > 1}


def list_candidates(problem: Problem, devices: int, fixed: Mapping[str, int]) -> Iterator[Candidate]:
    """Yield meshes of so many devices, and those that divide the call with something appended."""
    batch, query_heads, key_heads = problem.leading[0], problem.leading[-1], problem.key_heads
    divisible = query_heads if key_heads == 1 else key_heads
    for data, heads in itertools.product(_divisors(devices, batch), _divisors(divisible)):
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
            for layout in ("contiguous", "balanced") if sizes["sequence"] > 1 else ("contiguous",):
                parts = 1 if layout == "contiguous" else 2
                tokens = Chunking(problem.T, parts, sizes["sequence"], exchange).padded - problem.T
                if batch % data == 0:
                    yield Candidate(*sizes.values(), layout=layout)
                if tokens or batch % data:
                    yield Candidate(*sizes.values(), layout=layout, tokens=tokens, rows=-batch % data)


@functools.cache
def _divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors up to `most`, in order."""
    low = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return [size for size in sorted({*low, *(number // size for size in low)}) if size <= (most or number)]
