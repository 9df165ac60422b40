"""The sizes of a call and of its tiles, known before anything is computed."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax

from regard.axes import Array
from regard.engine.softmax.exponential import subtract_peak

Arrays = TypeVar("Arrays")


class Trips(NamedTuple):
    """The number of tiles that each of some consecutive blocks visits, of which the first are FULL."""

    blocks: int
    full: int
    kept: int


@dataclass(frozen=True)
class Blocking:
    """The size of a tile, and how many a step of the loop computes.

    Tiles of several heads go together or, with `pieces`, tiles of several blocks, each against several tiles
    of its own list, read from wherever they lie; or, with `at_once`, one tile of every batch row and head.
    """

    queries: int
    keys: int
    heads: int = 1
    blocks: int = 1
    pieces: int = 0  # 0: one tile after the other
    in_order: bool = False  # with pieces: blocks go together as they lie, whatever their lists hold
    at_once: int = 0  # leading positions that a step may hold; 0: they are looped over
    trips: tuple[Trips, ...] = ()  # with `at_once`, where they are known beforehand: of all blocks, in order

    @property
    def overruns(self) -> bool:
        """Tell whether tiles may be visited that a list does not hold; they start beyond the end."""
        return bool(self.pieces or self.at_once)

    def turn(self) -> Blocking:
        """Return the same with queries for keys."""
        return dataclasses.replace(self, queries=self.keys, keys=self.queries)

    def fit(self, num_queries: int, num_keys: int, key_heads: int) -> Blocking:
        """Return a blocking no larger than the arrays, whose heads divide theirs."""
        heads = max(1, min(self.heads, key_heads))
        return dataclasses.replace(
            self,
            queries=max(1, min(self.queries, num_queries)),
            keys=max(1, min(self.keys, num_keys)),
            heads=max(count for count in range(1, heads + 1) if key_heads % count == 0),
        )


@dataclass(frozen=True)
class TileConfig:
    """Sizes of a call and of its tiles; static."""

    leading: tuple[int, ...]  # batch axes, key heads
    added: int  # leading axes that vmap put in front, which mask and offset do not know
    call_axes: int  # how many leading axes the call has, query heads last; masks and offsets know these
    group: int  # query heads per key head
    num_queries: int
    num_keys: int
    query_width: int
    value_width: int
    dtype: Any  # of sums
    matmul_dtype: Any  # dtype of what products multiply
    precision: Any
    dropout_rate: float
    masked: bool  # some tiles may be PARTIAL
    forward: Blocking
    backward: Blocking
    stats: frozenset[str] = frozenset()  # statistics asked for
    head_axes: tuple[int | None, ...] = ()  # of the score's parameters
    batch_invariant: bool = False  # no bit may depend on the number of batch rows

    @property
    def low_precision(self) -> bool:
        """True where products multiply numbers of fewer digits than they sum."""
        return self.matmul_dtype != self.dtype

    @property
    def subtract(self) -> Callable[[Array, Array], Array]:
        """Return what takes the peak from scores."""
        return subtract_peak if self.low_precision else operator.sub

    @property
    def rows(self) -> tuple[int, ...]:
        """Axes of what there is one of per query."""
        return (*self.leading[:-1], self.leading[-1] * self.group, self.num_queries)

    @property
    def columns(self) -> tuple[int, ...]:
        """Axes of what there is one of per key."""
        return (*self.leading, self.num_keys)

    def opaque(self, arrays: Arrays, beside: Any = ()) -> Arrays:
        """Hide from XLA what it knows of arrays, where no bit may depend on the batch.

        Of a batch of one nothing is sliced, and a loop of one step is none: XLA would compute more ahead of
        the loop, or together with the program around it, and round otherwise. What is hidden is computed in
        the loop in which `beside` changes.
        """
        return jax.lax.optimization_barrier((arrays, beside))[0] if self.batch_invariant else arrays
