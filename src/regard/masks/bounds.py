"""Bounds of a mask, which kernels of other libraries and pictures ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Bounds:
    """Conditions that hold for every pair that a mask keeps; None stands for no condition."""

    before: int | None = None  # keys lie at most so far before the query; negative, at least so far after it
    after: int | None = None  # keys lie at most so far after the query
    keys_below: Any = None  # keys lie below this position: an array aligned with the first leading axes
    key_ids: Any = None  # query and key have the same id; these are the keys'
    query_ids: Any = None  # the queries' ids; None, a query has the id of the key at its position
    exact: bool = True  # the mask keeps all pairs that fulfil these conditions

    @property
    def empty(self) -> bool:
        """Return whether there is no condition."""
        return all(bound is None for bound in (self.before, self.after, self.keys_below, self.key_ids))

    def __and__(self, other: Bounds) -> Bounds:
        """Return the conditions of both, as far as one record holds them."""
        ids = other if self.key_ids is None else self
        lengths = other if self.keys_below is None else self
        two_ids = ids is self and other.key_ids is not None
        two_lengths = lengths is self and other.keys_below is not None
        exact = self.exact and other.exact and not (two_ids or two_lengths)
        before, after = _least(self.before, other.before), _least(self.after, other.after)
        return Bounds(before, after, lengths.keys_below, ids.key_ids, ids.query_ids, exact)


def _least(*bounds: int | None) -> int | None:
    return min((bound for bound in bounds if bound is not None), default=None)
