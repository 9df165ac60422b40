"""Calls whose sizes are symbolic, in a program exported for every batch and length: a few rows at a time.

Tiles are listed and loops are counted while a program is made, for sizes that are then known. Where they are
not, each step is the definition, of some rows and all keys: linear in memory, without leaving tiles out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.backends import dense
from regard.engine.call.problem import Problem
from regard.engine.softmax.score_rows import score_chosen_rows, take_chosen_rows
from regard.masks import from_array
from regard.masks.grid import Grid
from regard.masks.offsets import positions_of
from regard.masks.spans import Span
from regard.wide_sums import add_up_wide

ROWS = 128
_MATRICES = ("weights", "scores")


def run(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the output and what `problem.aux` names; gradients keep no scores but those of one step."""
    if isinstance(problem.T, int) and problem.T <= ROWS:
        return dense.run(problem)
    chosen = {*_MATRICES} if problem.rows is not None or problem.heads is not None else set[str]()
    per_row = [name for name in problem.aux if name not in chosen]
    aux = tuple(dict.fromkeys([*per_row, "lse"] if chosen else per_row))
    of_all = dataclasses.replace(problem, aux=aux, rows=None, heads=None)
    count = -(-problem.T // ROWS)
    rows = {
        "first": jnp.arange(count, dtype=jnp.int32) * ROWS,
        "query": split_rows(problem.query, count, ROWS),
    }
    if problem.bias is not None and problem.bias.shape[-2] != 1:
        rows["bias"] = split_rows(problem.bias, count, ROWS)

    give = add_up_wide(of_all)

    @jax.checkpoint
    def step(carry: None, rows: dict[str, Array]) -> tuple[None, Any]:
        return carry, dense.run(_take_rows(give(), **rows))

    _, (output, stacked) = jax.lax.scan(step, None, rows)
    extra = {name: join_rows(array, problem, -1 - (name in _MATRICES)) for name, array in stacked.items()}
    if chosen:
        extra |= _choose_from(problem, extra["lse"])
    return join_rows(output, problem, -2), {name: extra[name] for name in problem.aux}


def split_rows(array: Array, count: Any, size: int) -> Array:
    """Divide rows (..., T, x) into (count, ..., size, x); the last one is repeated."""
    length = array.shape[-2]
    rows = jnp.take(array, jnp.minimum(jnp.arange(count * size), length - 1), -2)
    *leading, _, width = array.shape
    return jnp.moveaxis(rows.reshape((*leading, count, size, width)), -3, 0)


def join_rows(array: Array, problem: Problem, axis: int) -> Array:
    """Join steps (count, ...), whose rows lie on an axis, and leave out what was repeated."""
    array = jnp.moveaxis(array, 0, axis - 1)
    index = array.ndim + axis
    array = array.reshape((*array.shape[: index - 1], -1, *array.shape[index + 1 :]))
    return jax.lax.slice_in_dim(array, 0, problem.T, axis=axis)


def _take_rows(problem: Problem, first: Array, **arrays: Array) -> Problem:
    """Return the call of the rows from `first` on alone; those that repeat the last one see nothing."""
    rows = Span(first, ROWS).members
    row = jnp.minimum(rows, problem.T - 1)
    mask = problem.mask
    if mask is not None:
        columns = Span(None, problem.S).members
        grid = Grid.at(row, columns, problem.query_offset, len(problem.leading), problem.key_offset)
        mask = mask.slice_grid(grid) & from_array((rows < problem.T)[:, None])
    offset = positions_of(problem.query_offset).slice_rows(first, row)
    return dataclasses.replace(problem, mask=mask, query_offset=offset, **arrays)


def _choose_from(problem: Problem, lse: Array) -> dict[str, Array]:
    """Compute chosen rows of scores and weights from the inputs and lse."""
    scores = score_chosen_rows(problem)
    lse = take_chosen_rows(problem, lse[..., None])
    alive = lse != -jnp.inf
    return {"scores": scores, "weights": jnp.where(alive, jnp.exp(scores - jnp.where(alive, lse, 0)), 0)}
