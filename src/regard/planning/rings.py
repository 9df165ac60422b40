"""Rings: the rounds of many rings over one call, and the work of their members, each found once."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from regard.engine.call.problem import Problem
from regard.masks import TileKind
from regard.masks.grid import Blocks
from regard.parallel.division import Division, Round
from regard.parallel.schedule import find_rounds, is_countable, plan_rounds
from regard.parallel.work import Work
from regard.planning.candidates import Candidate

# Chunks that are classified together: shapes that are few are compiled once.
_SHAPES = (128, 1024)


@dataclasses.dataclass(frozen=True)
class Load:
    """Work of the members of one ring."""

    cells: np.ndarray
    least_rounds: int
    """Rounds that the chunk with most work takes at least."""


class Rings:
    """Rounds and work of the rings over one call, whatever its batch and heads; each is found once."""

    def __init__(self, problem: Problem, work: Work):
        self.problem, self.work = problem, work
        self._rounds: dict[tuple[int, str, int], tuple[Round, ...]] = {}
        self.load = functools.cache(self._load)
        self._list_pairs = functools.cache(self._classify)

    def _load(self, ring: int, layout: str, chunk: int) -> Load:
        parts = 1 if layout == "contiguous" else 2
        cells = self.work.count_chunks(ring, parts, chunk)
        # One round brings it as many chunks of keys as a member has.
        least = math.ceil(cells.max() / (chunk * chunk * parts) - 1e-6)
        return Load(cells.sum(0), max(least, 1))

    def divide(self, division: Division) -> tuple[Division, np.ndarray]:
        """Return the division with its rounds, and the cells of each member.

        Beyond 1024 chunks, rounds are those of a ring of as many as that, counted as finer ones: at least as
        many as they are, and about twice as many at most.
        """
        key = (division.queries.ring, division.layout, division.queries.chunk)
        if key not in self._rounds:
            self._rounds[key] = self._find(division)
        return dataclasses.replace(division, rounds=self._rounds[key]), self.load(*key).cells

    def _find(self, division: Division) -> tuple[Round, ...]:
        ring, parts = division.queries.ring, division.parts
        if self.problem.mask is None or not is_countable(self.problem, self.problem.mask):
            return _list_rounds(ring)
        if ring * parts <= _SHAPES[-1]:
            held = self._list_pairs(ring * parts, division.queries.chunk)
            return plan_rounds(self.problem, division) if held is None else find_rounds(held, division)
        # A pair of large chunks stands for all pairs of small ones within them.
        coarse = _SHAPES[-1] // parts
        held = self._list_pairs(coarse * parts, -(-self.problem.T // (coarse * parts)))
        if held is None:
            return _list_rounds(ring)
        large = Candidate(1, coarse, 1, 1, division.layout).cut(self.problem)
        scale, met = ring / coarse, np.zeros(ring, bool)
        for step in find_rounds(held, large):
            first, last = int((step.number - 1) * scale) + 1, int((step.number + 1) * scale)
            met[np.arange(first, last) % ring] = True
        return tuple(Round(int(number), ()) for number in np.flatnonzero(met))

    def _classify(self, count: int, chunk: int) -> np.ndarray | None:
        """Return the pairs of chunks that have work; None where the mask takes chunks of its own alone."""
        problem, axes = self.problem, len(self.problem.leading)
        if problem.mask is None or problem.mask.reads_cells:
            return None
        real = -(-problem.T // chunk)
        # The last chunk again and again, which is known to lie in the call.
        number = np.minimum(np.arange(next(size for size in _SHAPES if size >= count)), real - 1)
        first = (number * chunk).astype(np.int32)
        last = np.minimum(first + chunk, problem.T).astype(np.int32) - 1

        def lay(ends: np.ndarray, *shape: int) -> jax.Array:
            return jnp.asarray(ends.reshape((*(1,) * axes, *shape)))

        blocks = Blocks(
            query_first=lay(first, -1, 1),
            query_last=lay(last, -1, 1),
            query_offset=problem.query_offset,
            key_first=lay(first, 1, -1),
            key_last=lay(last, 1, -1),
            key_offset=problem.key_offset,
            query_block=chunk,
            key_block=chunk,
            leading_axes=axes,
        )
        try:
            with jax.ensure_compile_time_eval():
                kinds = np.asarray(problem.mask.classify(blocks))
        except (TypeError, ValueError):
            return None
        if any(size not in (1, number.size) for size in kinds.shape[-2:]):
            return None
        kinds = np.broadcast_to(kinds, (*kinds.shape[:-2], number.size, number.size))
        kinds = kinds.reshape((-1, number.size, number.size)).max(0)[:count, :count]
        held = np.asarray(kinds != TileKind.EMPTY)
        held[real:], held[:, real:] = False, False
        return held


@functools.cache
def _list_rounds(count: int) -> tuple[Round, ...]:
    """Return the first rounds of a ring; which parts meet in them costs nothing, and is left out."""
    return tuple(Round(number, ()) for number in range(count))
