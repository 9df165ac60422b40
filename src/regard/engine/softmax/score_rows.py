"""Chosen rows and heads of the score matrix, from the inputs: no larger part of it is ever computed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.softmax.products import product
from regard.engine.softmax.scoring import finish_scores, scale_early, scale_late
from regard.masks.grid import Grid
from regard.scores.cells import Picks


def take_chosen_rows(problem: Problem, array: Array) -> Array:
    """Take the chosen rows and heads of an array (*B, T, x)."""
    if problem.rows is not None:
        array = jnp.take(array, problem.rows, axis=-2)
    if problem.heads is not None:
        array = jnp.take(array, problem.heads, axis=-3)
    return array


def score_chosen_rows(problem: Problem) -> Array:
    """Compute scores (*B, R, S) of the chosen rows and heads, -inf where a query may not attend."""
    rows, heads = chosen_indices(problem)
    return score_cells(problem, rows, None, heads)


def chosen_indices(problem: Problem) -> tuple[Array, Array]:
    """Return the indices of the chosen rows and of the chosen heads."""
    rows = _all(problem.T) if problem.rows is None else jnp.asarray(problem.rows)
    heads = _all(problem.leading[-1] if problem.leading else 1)
    return rows, heads if problem.heads is None else jnp.asarray(problem.heads)


def score_cells(problem: Problem, rows: Array, columns: Array | None, heads: Array) -> Array:
    """Compute scores (*B, R, C) of the rows, columns (None: all) and heads with these indices."""
    chosen = _gather(problem, rows, columns, heads)
    query, key = chosen.query, chosen.key
    if chosen.keep is not None:
        # What sits in a masked slot may be NaN, which a gradient of 0 would pass on.
        query = jnp.where(chosen.keep.any(-1)[..., None], query, 0)
        key = jnp.where(chosen.keep.any(-2)[..., None], key, 0)
    query = scale_early(query, problem.scale, problem.low_precision)
    scores = product(query, key, problem.precision, (-1, -1))
    scores = scale_late(scores, problem.scale, problem.low_precision)
    finished = finish_scores(scores, chosen.keep, score=problem.score, cells=chosen.cells, bias=chosen.bias)
    return chosen.shape(finished.scores)


def score_stages(problem: Problem, rows: Array, heads: Array) -> list[Array]:
    """Compute scores of the rows and heads with these indices a step at a time.

    Products, scaled, after each score, with bias, kept by the mask; a stage that the call lacks is left out.
    """
    chosen = _gather(problem, rows, None, heads)
    stages = [product(chosen.query, chosen.key, problem.precision, (-1, -1))]
    stages.append(stages[-1] * problem.scale)
    for part in () if problem.score is None else problem.score.parts:
        stages.append(finish_scores(stages[-1], None, score=part, cells=chosen.cells).scores)
    if chosen.bias is not None:
        present = chosen.bias != -jnp.inf
        stages.append(finish_scores(stages[-1], present, bias=chosen.bias).scores)
    if problem.mask is not None:
        stages.append(finish_scores(stages[-1], chosen.keep).scores)
    return [chosen.shape(stage) for stage in stages]


class _Chosen(NamedTuple):
    """Arrays that the chosen cells are scored from; all but `keep` and `bias` have all leading axes."""

    query: Array
    key: Array
    cells: Picks
    bias: Array | None
    keep: Array | None  # by mask and bias
    shape: Callable[[Array], Array]  # to the call's own axes


def _gather(problem: Problem, rows: Array, columns: Array | None, heads: Array) -> _Chosen:
    members = _all(problem.S) if columns is None else columns
    batch = problem.leading[:-1]
    shape = (*batch, heads.size, rows.size, members.size)
    query, key = map(problem.with_heads, (problem.query, problem.key))
    query = _choose(jnp.take(query, rows, -2), -3, heads).astype(problem.matmul_dtype)
    key = key if columns is None else jnp.take(key, columns, -2)
    key = _choose(key, -3, heads // problem.group).astype(problem.matmul_dtype)
    query = jnp.broadcast_to(query, (*shape[:-2], *query.shape[-2:]))
    key = jnp.broadcast_to(key, (*shape[:-2], *key.shape[-2:]))
    grid = Grid.at(rows, members, problem.query_offset, len(problem.leading), problem.key_offset)
    first = _all(problem.leading[0] if len(problem.leading) > 1 else 1)
    first = first.reshape((-1, *(1,) * (len(shape) - 1)))
    query_position = _choose(problem.with_heads(grid.query_position), -3, heads)
    key_position = _choose(problem.with_heads(grid.key_position), -3, heads)
    head = heads.reshape((*(1,) * len(batch), -1, 1, 1))
    keep = bias = None
    if problem.mask is not None:
        keep = _choose(problem.with_heads(problem.mask.keep(grid)), -3, heads)
    if problem.bias is not None:
        bias = _choose(_choose(_choose(problem.with_heads(problem.bias), -2, rows), -1, columns), -3, heads)
        keep = bias != -jnp.inf if keep is None else keep & (bias != -jnp.inf)
    own = shape if problem.leading else shape[-2:]
    cells = Picks(query_position, key_position, head, first)
    return _Chosen(query, key, cells, bias, keep, lambda scores: scores.reshape(own))


def _choose(array: Array, axis: int, index: Array | None) -> Array:
    """Take entries along an axis; the one of an axis of size 1 serves all."""
    return array if index is None or array.shape[axis] == 1 else jnp.take(array, index, axis)


def _all(count: int) -> Any:
    return jnp.arange(count, dtype=np.int32)
