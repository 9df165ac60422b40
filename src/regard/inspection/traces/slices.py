"""Slices of a canonical call: one example, or some heads, as the call that would have given them alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from regard.engine.call.problem import Problem
from regard.masks.mask import Take
from regard.masks.offsets import positions_of
from regard.scores.placed import Placed


def count_examples(problem: Problem) -> int:
    """Count the examples of a call: positions on its leading axes, heads left out."""
    return int(np.prod(problem.leading[:-1], dtype=np.int64))


def take_example(problem: Problem, example: int) -> Problem:
    """Take one example's call, in NumPy arrays with one leading axis, the heads', with integer offsets.

    Axes before the heads count as one, in reading order. Dropout and what is asked for beside are left out.
    """
    count = count_examples(problem)
    if 0 in problem.leading:
        expected = "at least one example and one head to keep a call of"
        raise ValueError(f"query: expected {expected}, got leading axes {problem.leading}")
    if not 0 <= example < count:
        raise ValueError(f"example: expected one of the {count} of the call, 0..{count - 1}; got {example}")
    batch = problem.leading[:-1]
    indices = [int(index) for index in np.unravel_index(example, batch)] if batch else []
    heads = problem.leading[-1] if problem.leading else 1

    def of_batch(array: Any, axes: Sequence[int], where: Sequence[int]) -> np.ndarray:
        # On the device: of a large batch, only this example travels.
        index = [0 if array.shape[axis] == 1 else number for axis, number in zip(axes, where, strict=True)]
        return np.asarray(array[tuple(index)] if index else array)

    def aligned_right(array: Any, after_heads: int) -> np.ndarray:
        """Take the example of an array whose leading axes are the last ones of the call."""
        leading = max(array.ndim - after_heads - 1, 0)
        return of_batch(array, range(leading), indices[len(indices) - leading :])

    def aligned_left(array: Any, trailing: int) -> Any:
        """Take the example of data whose leading axes are the first ones of the call."""
        array = array if hasattr(array, "ndim") else np.asarray(array)
        leading = min(array.ndim - trailing, len(indices))
        return of_batch(array, range(leading), indices[:leading])

    def laid(array: Any) -> np.ndarray:
        cut = aligned_right(array, 2)
        return cut if cut.ndim == 3 else cut[None]

    query = laid(problem.query)
    score = problem.score
    if score is not None and indices and indices[0] and any(part.reads_batch for part in score.parts):
        score = Placed(score, None, np.int32(indices[0]))
    unasked = {"rng": None, "dropout_rate": 0.0, "aux": (), "rows": None, "heads": None}
    return dataclasses.replace(
        problem,
        query=np.broadcast_to(query, (heads, *query.shape[1:])),
        key=laid(problem.key),
        value=laid(problem.value),
        mask=None if problem.mask is None else problem.mask.slice_batch(aligned_left, len(problem.leading)),
        score=jax.tree.map(np.asarray, score),
        bias=None if problem.bias is None else aligned_right(problem.bias, 2),
        sinks=None if problem.sinks is None else aligned_right(problem.sinks, 0),
        scale=np.asarray(problem.scale),
        query_offset=_offset(problem.query_offset, indices, aligned_left),
        key_offset=_offset(problem.key_offset, indices, aligned_left),
        **unasked,
    )


def take_heads(problem: Problem, heads: Sequence[int]) -> Problem:
    """Take some query heads of one example's call, each with keys of its own."""
    chosen = np.asarray(heads, np.int64)
    group = problem.group

    def take(array: Any, axis: int, index: np.ndarray) -> np.ndarray:
        array = np.asarray(array)
        if array.ndim < -axis or array.shape[axis] == 1:
            return array
        if index.size == 1:  # no copy
            return np.moveaxis(np.moveaxis(array, axis, 0)[index[0] : index[0] + 1], 0, axis)
        return np.take(array, index, axis)

    def of_mask(data: Any, trailing: int) -> Any:
        data = np.asarray(data)
        return take(data, -trailing - 1, chosen) if data.ndim > trailing else data

    query = take(problem.query, -3, chosen)
    return dataclasses.replace(
        problem,
        query=np.broadcast_to(query, (chosen.size, *query.shape[1:])),  # of one head as often as asked
        key=take(problem.key, -3, chosen // group),
        value=take(problem.value, -3, chosen // group),
        mask=None if problem.mask is None else problem.mask.slice_batch(of_mask, 1),
        score=None if problem.score is None else Placed(problem.score, chosen.astype(np.int32), np.int32(0)),
        bias=None if problem.bias is None else take(problem.bias, -3, chosen),
        sinks=None if problem.sinks is None else take(problem.sinks, -1, chosen),
    )


def _offset(offset: Any, indices: Sequence[int], take: Take) -> Any:
    if offset is None:
        return None
    if not positions_of(offset).is_consecutive:
        raise NotImplementedError(
            "query_positions, key_positions: expected none, because a trace keeps where the first row sits"
            " and counts on from there; got positions per token. Capture a call with offsets, or read its"
            " weights with attend(..., aux=) or readouts.window"
        )
    array = np.asarray(offset)
    # A call with heads alone may place each of them by itself.
    if array.ndim and not indices:
        if array.size and np.all(array == array[0]):
            return int(array[0])
        expected = "one position for all heads of an example, got one per head; give query a batch axis"
        raise ValueError(f"query_offset, key_offset: expected {expected}")
    return int(take(array, 0))
