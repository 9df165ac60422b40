"""Calls filled up to whole tiles, whose rows have the same bits however a sequence is cut."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.masks import from_array, valid_keys
from regard.masks.grid import Grid
from regard.masks.offsets import positions_of

ROWS, KEYS = 64, 128  # of tiles, the rows over the query heads that share keys


def size_tiles(group: int) -> tuple[int, int]:
    """Return the queries and keys of a tile, about which neither lengths nor batch decide."""
    return max(ROWS // group // 8 * 8, 8), KEYS


def fill_tiles(problem: Problem) -> Problem:
    """Return the call with whole tiles: what repeats the last query sees nothing, the last key is unseen.

    A tile that is moved back to fit would hold other keys than the same tile of a longer sequence.
    """
    # Rows by whole vectors for what follows the tiles, too: the last few of an array are rounded otherwise.
    row, column = _fill(problem.T, ROWS), _fill(problem.S, KEYS)
    if (row.size, column.size) == (problem.T, problem.S):
        return problem
    more = {-2: row.size - problem.T, -1: column.size - problem.S}
    grid = Grid.at(row, column, problem.query_offset, len(problem.leading), problem.key_offset)
    real = from_array((np.arange(row.size) < problem.T)[:, None])
    real = real & valid_keys(np.arange(column.size) < problem.S)
    query_offset, key_offset = problem.query_offset, problem.key_offset
    return dataclasses.replace(
        problem,
        query=_repeat_last(problem.query, {-2: more[-2]}),
        key=_repeat_last(problem.key, {-2: more[-1]}),
        value=_repeat_last(problem.value, {-2: more[-1]}),
        mask=real if problem.mask is None else problem.mask.slice_grid(grid) & real,
        bias=None if problem.bias is None else _repeat_last(problem.bias, more),
        query_offset=positions_of(query_offset).slice_rows(0, row),
        key_offset=None if key_offset is None else positions_of(key_offset).slice_rows(0, column),
    )


def _fill(length: int, size: int) -> Any:
    """Return indices up to a multiple of a size; those beyond the end repeat the last one."""
    return np.minimum(np.arange(-(-length // size) * size, dtype=np.int32), length - 1)


def _repeat_last(array: Array, more: dict[int, int]) -> Array:
    """Append the last entries of axes so many times; of a bias, which has both, one of size 1 serves all."""
    width = [(0, 0)] * array.ndim
    for axis, count in more.items():
        if array.ndim >= -axis and (array.shape[axis] != 1 or len(more) == 1):
            width[axis] = (0, count)
    return jnp.pad(array, width, mode="edge")


def cut(array: Array, problem: Problem, name: str) -> Array:
    """Take what belongs to the call out of a result; `name` is the output or what `aux` names."""
    if name in ("weights", "scores"):
        array = array[..., : problem.S]
        return array if problem.rows is not None else array[..., : problem.T, :]
    return array[..., : problem.T, :] if name == "output" else array[..., : problem.T]
