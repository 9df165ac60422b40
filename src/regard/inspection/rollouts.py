"""Rollouts: how much of each word reaches each output, through all layers at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import as_array, read_number, whole_number
from regard.axes import Array, ArrayLike
from regard.engine.call.problem import Problem
from regard.engine.dispatch.registry import BACKENDS, choose
from regard.masks.grid import is_concrete


def roll_out(weights: ArrayLike, residual: float = 0.5) -> Array:
    """Multiply the layers' weights, averaged over heads, as if each passed its inputs on unchanged.

    R_0 = I,  R_l = (I + (1 - residual) (A_l - diag(A_l 1))) R_{l-1},  A_l = sum_h p_lh / H

    Where rows of A_l sum to 1 that is residual I + (1 - residual) A_l; what a sink or an empty row keeps
    from the keys stays at its own position, so that rows of R_l always sum to 1.

    Args:
        weights: `(L, *B, H, T, T)`, of self-attention, first layer first.
        residual: the share of the residual stream, in [0, 1].

    Returns:
        `(*B, T, T)`: how much of each position's input reaches each position's last output.

    Raises:
        ValueError: weights of another shape; a share out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import inspection
        >>> previous = jnp.array([[1.0, 0.0], [1.0, 0.0]])
        >>> inspection.roll_out(jnp.stack([previous[None]] * 2)).tolist()
        [[1.0, 0.0], [0.75, 0.25]]

    Reference: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3.
    """
    array: Any = as_array("weights", "an array (L, *B, H, T, T)", jnp.asarray, weights)
    if array.ndim < 4 or array.shape[-1] != array.shape[-2]:
        raise ValueError(f"weights: expected shape (L, *B, H, T, T), got {tuple(array.shape)}")
    _check_share(residual)
    mean = array.mean(-3)
    rolled = jnp.broadcast_to(jnp.eye(mean.shape[-1], dtype=mean.dtype), mean.shape[1:])
    for layer in mean:
        rolled += (1 - residual) * (layer @ rolled - layer.sum(-1, keepdims=True) * rolled)
    return rolled


def roll_out_row(trace: Any, row: int, call: int = -1, residual: float = 0.5) -> np.ndarray:
    """Follow one query of a trace down to the words: a row of `roll_out`, in memory linear in T.

    r_L = e_row,  r_{l-1} = r_l + (1 - residual) (A_l^T r_l - r_l * A_l 1),  A_l = sum_h p_lh / H

    Args:
        trace: of `capture` or `Trace.from_arrays`, with queries and keys; cross attention is left out.
        row: the query, counted from 0.
        call: number of the call that is followed down, -1 for the last; those below it have its name, but
            for numbers, and its length, and are of the same run of the model.
        residual: the share of the residual stream, in [0, 1].

    Returns:
        float32 `(T,)`, which sums to 1: how much of each position's embedding reaches the query's output.

    Raises:
        TypeError: a row or call that is no integer.
        ValueError: no such call, row or residual; no self-attention; queries and keys that are not kept.

    Example:
        >>> import numpy as np
        >>> from regard import inspection
        >>> previous = np.array([[[[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]])
        >>> trace = inspection.Trace.from_arrays([previous, previous])
        >>> inspection.roll_out_row(trace, 2).tolist()
        [0.25, 0.5, 0.25]

    Reference: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3.
    """
    if not hasattr(trace, "calls"):
        raise TypeError(f"trace: expected a Trace, as of capture; got {type(trace).__name__}")
    calls = list(trace.calls)
    if not -len(calls) <= whole_number("call", call, -len(calls) or -1) < len(calls):
        raise ValueError(f"call: expected one of the {len(calls)} of the trace, got {call}")
    number, below = call % len(calls), find_below(calls)
    if below[number] is None:
        raise ValueError(f"call: expected self-attention over one sequence, got {calls[number]}")
    if whole_number("row", row, 0) >= calls[number].rows:
        raise ValueError(f"row: expected one in 0..{calls[number].rows - 1}, got {row}")
    _check_share(residual)
    stack = [number]
    while (lower := below[stack[-1]]) is not None and lower >= 0:
        stack.append(lower)
    rows = calls[number].rows
    shares = np.zeros(rows, np.float32)
    shares[row] = 1
    for index in stack:
        whole = calls[index].whole  # programs are compiled for padded lengths
        if whole.problem is None:
            expected = "one with queries and keys, got statistics; see Trace.save(keep=)"
            raise ValueError(f"trace: expected {expected}")
        padded = np.pad(shares, (0, whole.rows - rows))
        shares = np.asarray(_pass_down(whole.problem, padded, residual), np.float32)[:rows]
    return shares


def _check_share(residual: Any) -> None:
    """Raise for a share out of range, where it is known."""
    if is_concrete(residual) and not 0 <= read_number("residual", residual) <= 1:
        raise ValueError(f"residual: expected a share in [0, 1], got {residual}")


def find_below(calls: Sequence[Any]) -> list[int | None]:
    """Return the number of the call below each in its stack: -1 under the lowest, None where none can be."""
    last: dict[Any, int] = {}
    lower_calls: list[int | None] = []
    for number, call in enumerate(calls):
        stack = re.sub(r"\d+", "#", call.name), call.rows, call.run
        own = call.kind == "self" and call.rows == call.keys and call.query_offset == call.key_offset
        lower = last.get(stack, -1)
        # Above a later layer, the model runs once more.
        lower = -1 if lower >= 0 and calls[lower].layer > call.layer else lower
        lower_calls.append(lower if own else None)
        if own:
            last[stack] = number
    return lower_calls


@jax.jit
def _pass_down(problem: Problem, shares: Array, residual: Array) -> Array:
    """Pass shares (T,) of a layer's outputs on to its inputs."""
    wide = {name: getattr(problem, name).astype(problem.accumulation) for name in ("query", "key")}

    def average(value: Array) -> Array:
        values = jnp.broadcast_to(value, (*problem.key.shape[:-1], 1))
        filled = dataclasses.replace(problem, **wide, value=values)
        return BACKENDS[choose(filled).name].run(filled)[0][..., 0].mean(0)

    row_sums, pull = jax.vjp(average, jnp.ones((problem.S, 1), problem.accumulation))
    (arrived,) = pull(shares.astype(row_sums.dtype))
    return shares + (1 - residual) * (arrived[:, 0] - shares * row_sums)
