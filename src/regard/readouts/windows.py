"""Windows: any part of the weights, exactly, from the saved lse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import integers, read_array
from regard.axes import Array, ArrayLike
from regard.engine.call.options import ScoreOptions
from regard.engine.call.problem import Problem
from regard.engine.softmax.score_rows import score_cells
from regard.masks.grid import is_concrete
from regard.readouts.reading import canonicalize_readable, check_lse


def window(
    query: ArrayLike,
    key: ArrayLike,
    lse: ArrayLike,
    *,
    rows: slice | ArrayLike | Sequence[int] | None = None,
    columns: slice | ArrayLike | Sequence[int] | None = None,
    heads: slice | ArrayLike | Sequence[int] | None = None,
    **options: Unpack[ScoreOptions],
) -> Array:
    """Form the weights of chosen rows, columns and heads: work and memory are those of the window alone.

    p_ts = exp(score_ts - lse_t) for t in rows, s in columns

    Windows of one size share one compiled program, wherever they lie.

    Args:
        query, key: as in `attend`.
        lse: floating-point array `(*B, T)`: `Readout.lse`, or what `attend(..., aux=("lse",))` gave.
        rows: which queries: a slice, or a list of indices, also traced. None means all.
        columns: which keys, likewise.
        heads: which query heads, the axis before T, likewise.
        **options: those of `attend` that scores depend on, as in `read`; the share of sinks is already in
            `lse`, so they only have to fit.

    Returns:
        The weights `(*B, rows, columns)` in the accumulation dtype, with as many heads as asked for; 0
        where a query may not attend. They are constant under differentiation.

    Raises:
        TypeError: as `attend`; indices that are not integers.
        ValueError: as `attend`; an index out of range, an lse that does not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> x = jnp.eye(5)
        >>> readout = readouts.read(x, x, mask=masks.causal(), scale=0.0)
        >>> part = readouts.window(
        ...     x, x, readout.lse, mask=masks.causal(), scale=0.0, rows=slice(2, 4), columns=slice(1, 4)
        ... )
        >>> [[f"{weight:.2f}" for weight in row] for row in part]
        [['0.33', '0.33', '0.00'], ['0.25', '0.25', '0.25']]
    """
    problem = canonicalize_readable(query, key, **options)
    if heads is not None and not problem.leading:
        raise ValueError("heads: expected query with a heads axis, the one before T; got rank 2")
    return weigh(
        *jax.lax.stop_gradient((problem, check_lse(problem, lse))),
        _indices("rows", rows, problem.T),
        _indices("columns", columns, problem.S),
        _indices("heads", heads, problem.leading[-1] if problem.leading else 1),
    )


@jax.jit
def weigh(problem: Problem, lse: Array, rows: Array, columns: Array, heads: Array) -> Array:
    """Form the weights of a checked call from its lse, in one program for windows of one size."""
    scores = score_cells(problem, rows, columns, heads)
    lse = jnp.take(lse, rows, -1)
    lse = jnp.take(lse, heads, -2) if problem.leading else lse
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    return jnp.exp(scores - lse[..., None])


def _indices(name: str, index: Any, size: int) -> Any:
    if index is None or isinstance(index, slice):
        return np.arange(size, dtype=np.int32)[slice(None) if index is None else index]
    array: Any = read_array(name, index)
    if array.ndim != 1 or not (array.size == 0 or jnp.issubdtype(array.dtype, jnp.integer)):
        raise TypeError(f"{name}: expected a slice or a list of integers, got {index!r}")
    if is_concrete(array) and not np.all((np.asarray(array) >= 0) & (np.asarray(array) < size)):
        raise ValueError(f"{name}: expected indices in 0..{size - 1}, got {np.asarray(array).tolist()}")
    return integers(name, array) if array.size else np.zeros(0, np.int32)
