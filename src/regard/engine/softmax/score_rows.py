"""Chosen rows and heads of the score matrix, from the inputs: no larger part of it is ever computed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.softmax.online_softmax import product
from regard.masks.grid import Grid
from regard.scores.cells import Picks
from regard.scores.score import Chain


def take_chosen_rows(problem: Problem, array: Array) -> Array:
    """The chosen rows and heads of an array (*B, T, x)."""
    if problem.rows is not None:
        array = jnp.take(array, problem.rows, axis=-2)
    if problem.heads is not None:
        array = jnp.take(array, problem.heads, axis=-3)
    return array


def score_chosen_rows(problem: Problem) -> Array:
    """Scores (*B, R, S) of the chosen rows and heads, -inf where a query may not attend."""
    rows = _all(problem.T) if problem.rows is None else jnp.asarray(problem.rows)
    heads = _all(problem.leading[-1] if problem.leading else 1)
    heads = heads if problem.heads is None else jnp.asarray(problem.heads)
    return score_cells(problem, rows, None, heads)


def score_cells(problem: Problem, rows: Array, columns: Array | None, heads: Array) -> Array:
    """Scores (*B, R, C) of the rows, columns (None: all) and heads with these indices."""
    return score_stages(problem, rows, columns, heads)[-1]


def score_stages(problem: Problem, rows: Array, columns: Array | None, heads: Array) -> list[Array]:
    """The same and what they were before: products, scaled, after each score, with bias, kept by the mask.

    A stage that the call lacks is left out.
    """
    members = _all(problem.S) if columns is None else columns
    batch = problem.leading[:-1]
    shape = (*batch, heads.size, rows.size, members.size)

    query, key = map(problem.with_heads, (problem.query, problem.key))
    query = _choose(jnp.take(query, rows, -2), -3, heads).astype(problem.matmul_dtype)
    key = key if columns is None else jnp.take(key, columns, -2)
    key = _choose(key, -3, heads // problem.group).astype(problem.matmul_dtype)
    query, key = (jnp.broadcast_to(x, (*shape[:-2], *x.shape[-2:])) for x in (query, key))
    stages = [product(query, key, problem.precision, (-1, -1))]
    stages.append(stages[-1] * problem.scale)
    grid = Grid.at(rows, members, problem.query_offset, len(problem.leading), problem.key_offset)
    if problem.score is not None:
        first = _all(problem.leading[0] if len(problem.leading) > 1 else 1)
        first = first.reshape((-1, *(1,) * (len(shape) - 1)))
        query_position, key_position = map(problem.with_heads, (grid.query_position, grid.key_position))
        head = heads.reshape((*(1,) * len(batch), -1, 1, 1))
        cells = Picks(query_position, key_position, head, first)
        for part in problem.score.parts if isinstance(problem.score, Chain) else (problem.score,):
            stages.append(part.apply(stages[-1], cells))
    if problem.bias is not None:
        bias = _choose(_choose(_choose(problem.with_heads(problem.bias), -2, rows), -1, columns), -3, heads)
        scores = stages[-1]
        stages.append(jnp.where(bias == -jnp.inf, -jnp.inf, scores + bias.astype(scores.dtype)))
    if problem.mask is not None:
        keep = problem.with_heads(problem.mask.keep(grid))
        stages.append(jnp.where(_choose(keep, -3, heads), stages[-1], -jnp.inf))
    return [stage.reshape(shape if problem.leading else shape[-2:]) for stage in stages]


def _choose(array: Array, axis: int, index: Array | None) -> Array:
    """Entries along an axis; the one of an axis of size 1 serves all."""
    return array if index is None or array.shape[axis] == 1 else jnp.take(array, index, axis)


def _all(count: int) -> Any:
    return jnp.arange(count, dtype=np.int32)
