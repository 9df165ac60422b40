"""Problem: one attention call as a frozen record, made by `canonicalize`. Backends take nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, broadcast_shapes
from regard.engine.call.stores import as_array
from regard.masks import Mask
from regard.masks.grid import Grid, Offset
from regard.records import static
from regard.scores.score import Score


class Sizes(NamedTuple):
    """The sizes of a call's score matrix."""

    leading: tuple[int, ...]
    key_heads: int
    T: int
    S: int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """The call, checked and filled in: a pytree whose arrays are the call's arrays."""

    query: Array  # (*B, T, D)
    key: Any  # an array, or a `Store` that `dense` reads; broadcasts to (*B, S, D) once heads are grouped
    value: Any  # likewise, (*B, S, E)
    mask: Mask | None
    bias: Array | None
    scale: Any  # one number in the accumulation dtype, maybe traced
    query_offset: Offset  # never None; TokenPositions, where each row has a position of its own
    key_offset: Offset
    rng: Array | None
    sinks: Array | None  # broadcasts to *B
    score: Score | None
    rows: Array | None  # of "weights" and "scores" in aux; None, all
    heads: Array | None
    dropout_rate: float = static()
    aux: tuple[str, ...] = static()
    precision: Any = static()
    batch_invariant: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def T(self) -> int:  # noqa: N802 - the axis letter
        return self.query.shape[-2]

    @property
    def S(self) -> int:  # noqa: N802
        return self.key.shape[-2]

    @property
    def D(self) -> int:  # noqa: N802
        return self.query.shape[-1]

    @property
    def E(self) -> int:  # noqa: N802
        return self.value.shape[-1]

    @property
    def leading(self) -> tuple[int, ...]:
        """*B: the leading axes of the output, heads last."""
        return broadcast_leading(self.query.shape[:-2], self.key.shape[:-2], self.value.shape[:-2])

    @property
    def key_heads(self) -> int:
        """K: how many groups the query heads form; 1 where there is no head axis."""
        heads = (array.shape[-3] for array in (self.key, self.value) if array.ndim > 2)
        return next((count for count in heads if count != 1), 1)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.leading, self.key_heads, self.T, self.S)

    @property
    def is_symbolic(self) -> bool:
        """True in a program exported for sizes that are known only when it is called."""
        return not all(isinstance(size, int) for size in (*self.leading, self.T, self.S))

    @property
    def accumulation(self) -> np.dtype:
        """The dtype of scores, softmax and sums."""
        return accumulation_dtype(self.query, self.key, self.value)

    @property
    def matmul_dtype(self) -> np.dtype:
        """The dtype that matrix products multiply: bfloat16 if every input is, unless more is asked for."""
        is_bfloat16 = all(array.dtype == jnp.bfloat16 for array in (self.query, self.key, self.value))
        return np.dtype(jnp.bfloat16) if is_bfloat16 and self.may_round_weights else self.accumulation

    @property
    def may_round_weights(self) -> bool:
        """True where no precision asks for more digits than the inputs have."""
        precision = self.precision or jax.config.jax_default_matmul_precision  # pyright: ignore
        return precision in (None, "default", "fastest", "bfloat16", jax.lax.Precision.DEFAULT)

    @property
    def low_precision(self) -> bool:
        """True where products multiply numbers of fewer digits than they sum."""
        return self.matmul_dtype != self.accumulation

    # Grouped heads, without repeating a key: the query heads of a group become rows of one matrix. An axis of
    # size 1 for the group would do, too, but XLA copies whole arrays for it.

    @property
    def group(self) -> int:
        """G: query heads per key head."""
        return self.leading[-1] // self.key_heads if self.leading else 1

    def with_heads(self, array: Array) -> Array:
        """Give an array over queries, keys or pairs all leading axes, of size 1 if need be."""
        missing = max(len(self.leading), 1) + 2 - array.ndim
        return array.reshape((*(1,) * missing, *array.shape))

    def fold(self, array: Array) -> Array:
        """Reshape (..., H, T, x) to (..., K, G * T, x); an array with one head for all stays."""
        if self.group == 1 or array.shape[-3] == 1:
            return array
        *batch, heads, length, width = array.shape
        return array.reshape((*batch, heads // self.group, self.group * length, width))

    def unfold(self, array: Array) -> Array:
        """Reshape (..., K, G * T, x) to (..., H, T, x)."""
        if self.group == 1:
            return array
        *batch, heads, rows, width = array.shape
        return array.reshape((*batch, heads * self.group, rows // self.group, width))

    def by_group(self, array: Array) -> Array:
        """Reshape (..., H | K | 1, T, x) to (..., K | 1, G | 1, T, x)."""
        *batch, heads, rows, width = array.shape
        split = (heads // self.group, self.group) if heads == self.leading[-1] else (heads, 1)
        return array.reshape((*batch, *split, rows, width))

    def with_arrays(self) -> Problem:
        """Return the call with what it stores otherwise as arrays, for whoever reads nothing else."""
        return dataclasses.replace(self, key=as_array(self.key), value=as_array(self.value))

    def sink_column(self) -> Array:
        """Return the sinks, one per head, to be combined with one number per query (..., H, T, 1)."""
        assert self.sinks is not None
        return self.with_heads(self.sinks[..., None, None])

    def spread(self, array: Array, *rest: int) -> Array:
        """Broadcast (..., H, *rest) to the call's (*B, *rest)."""
        shape = (*(self.leading or (1,)), *rest)
        return jnp.broadcast_to(array, shape).reshape((*self.leading, *rest))

    def grid(self) -> Grid:
        """Return all cells of the score matrix."""
        return Grid.cover(self.T, self.S, self.query_offset, len(self.leading), self.key_offset)

    def keep(self) -> Array | None:
        """Return which query may attend to which key, mask and -inf biases together; None means all."""
        keep = None
        if self.mask is not None:
            keep = self.with_heads(self.mask.keep(self.grid()))
        if self.bias is not None:
            present = self.with_heads(self.bias != -jnp.inf)
            keep = present if keep is None else keep & present
        return keep


def accumulation_dtype(*arrays: Any) -> np.dtype:
    """Return float32, or float64 when any array is."""
    wide = any(array.dtype == jnp.float64 for array in arrays)
    return np.dtype(np.float64 if wide else np.float32)


def broadcast_leading(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> tuple[int, ...]:
    """Return the output's leading axes; the last, heads, may be a multiple of that of key and value."""
    try:
        pair = broadcast_shapes(tuple(key), tuple(value))
    except ValueError:
        raise ValueError("expected leading axes of key and value that broadcast") from None
    if query and pair and query[-1] != pair[-1] and {0, 1}.isdisjoint((query[-1], pair[-1])):
        if query[-1] % pair[-1]:
            raise ValueError(f"expected query heads ({query[-1]}) to be a multiple of key heads ({pair[-1]})")
        pair = (*pair[:-1], query[-1])
    try:
        return broadcast_shapes(tuple(query), tuple(pair))
    except ValueError:
        raise ValueError("expected leading axes that broadcast") from None
