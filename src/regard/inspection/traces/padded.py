"""Padded calls: one program per padded length serves texts of any length, and the padding is not seen."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from regard import masks
from regard.engine.call.problem import Problem
from regard.inspection.tokens import Tokens
from regard.inspection.traces.calls import Call, Indices
from regard.readouts import Readout
from regard.readouts.reading import choose_indices

SHORTEST = 64
_OF_BLOCKS = ("block_mass", "block_max", "block_rows")
_OF_KEYS = ("key_mass", "key_max")
_OF_HEADS = ("distance_mass", "trust")


def pad_length(count: int, most: int | None = None) -> int:
    """Return the length that so many tokens are padded to: a power of two, or the most there may be.

    Example:
        >>> from regard.inspection.traces.padded import pad_length
        >>> [pad_length(count, 150) for count in (3, 64, 65, 130)]
        [64, 64, 128, 150]
    """
    length = max(SHORTEST, 1 << (max(count, 1) - 1).bit_length())
    return length if most is None else min(length, most)


@dataclass(frozen=True, eq=False, repr=False)
class PaddedCall(Call):
    """The first rows and keys of a call, computed, and `first` and `local` measured, as of the whole one."""

    whole: Any = None  # with padding, whose rows attend to nothing

    @classmethod
    def cut(cls, call: Call, count: int, tokens: Tokens) -> Self:
        """Cut self-attention to so many rows and keys."""
        assert call.problem is not None
        real = np.arange(call.rows) < count
        # Rows and keys of padding have numbers that nobody else has.
        padding = masks.segments(np.where(real, 0, 1), np.where(real, 0, 2))
        mask = padding if call.mask is None else call.mask & padding
        problem = replace(call.problem, mask=mask)
        padded = tokens.part(0, call.rows)
        whole = replace(call, problem=problem, query_tokens=padded, key_tokens=padded)
        own = {field.name: getattr(call, field.name) for field in fields(Call) if field.init}
        own |= {"rows": count, "keys": count, "problem": problem}
        for name in ("lse", "max_score", "value_norms"):
            own[name] = None if own[name] is None else own[name][:, :count]
        return cls(**own, whole=whole)

    @property
    def trimmed(self) -> Problem:
        """The problem without padding."""
        problem = self.whole.problem
        parts = {name: getattr(problem, name)[:, : self.rows] for name in ("query", "key", "value")}
        bias = None if problem.bias is None else problem.bias[..., : self.rows, : self.keys]
        return replace(problem, **parts, bias=bias, mask=self.mask)

    def window(self, rows: Indices = None, columns: Indices = None, heads: Indices = None) -> np.ndarray:
        """Form weights as `Call.window`: of as many rows and columns as the next power of two."""
        chosen = self._choose_cells(rows, columns)
        return self.whole.window(*map(_fill, chosen), heads)[:, : len(chosen[0]), : len(chosen[1])]

    def permit(self, rows: Indices = None, columns: Indices = None) -> np.ndarray:
        """Return which queries and keys may attend, as `window` forms weights."""
        chosen = self._choose_cells(rows, columns)
        return self.whole.permit(*map(_fill, chosen))[:, : len(chosen[0]), : len(chosen[1])]

    def _choose_cells(self, rows: Indices, columns: Indices) -> list[list[int]]:
        sides = ("rows", rows, self.rows), ("columns", columns, self.keys)
        return [choose_indices(*side).tolist() for side in sides]

    def _count(self, sizes: tuple[int, int], heads: tuple[int, ...] | None) -> Readout:
        if (*sizes, heads) not in self._found:
            self._found[(*sizes, heads)] = _cut(self.whole.readout(*sizes, heads), self.rows, self.keys)
        return self._found[(*sizes, heads)]


def _fill(index: Sequence[int]) -> list[int]:
    """Repeat the last of some numbers up to the next power of two."""
    return [*index, *list(index[-1:]) * (pad_length(len(index)) - len(index))]


def _cut(whole: Readout, rows: int, keys: int) -> Readout:
    """Return the readout of the first rows and keys: the others hold nothing, and were not counted."""
    blocks = -(-rows // whole.query_block), -(-keys // whole.key_block)
    cut = {name: np.asarray(value) for name, value in vars(whole).items() if hasattr(value, "ndim")}
    for name, array in cut.items():
        if name in _OF_BLOCKS:
            cut[name] = array[:, : blocks[0]] if array.ndim == 2 else array[:, : blocks[0], : blocks[1]]
        elif name not in _OF_HEADS:
            cut[name] = array[:, : keys if name in _OF_KEYS else rows]
    return replace(whole, **cut)
