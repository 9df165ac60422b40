"""Kernel masks: a call's mask as libraries' kernels can express it, and arrays of four axes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.masks.bounds import Bounds
from regard.masks.grid import is_concrete
from regard.masks.offsets import positions_of


def read_kernel_mask(problem: Problem) -> Bounds | str:
    """Return the call's mask as bounds counted by rows, or the part of it that is not made of bounds.

    Query row t reads key rows t - before to t + after, those below `keys_below`, of its id.
    """
    found = Bounds()
    for part in () if problem.mask is None else problem.mask.parts:
        found &= part.bounds
        if not found.exact:
            return f"the mask has {part!r}, which it does not know"
    if found.empty:
        return found
    if not all(positions_of(one).is_consecutive for one in (problem.query_offset, problem.key_offset)):
        return "the mask reads the position of every token, and it counts rows from an offset"
    offsets = (problem.query_offset, problem.key_offset or 0)
    if not is_concrete(offsets) or any(np.ndim(offset) for offset in offsets):
        return "the mask is placed by offsets that are arrays, or not known until it runs"
    query_offset, key_offset = (int(offset) for offset in offsets)
    shift = query_offset - key_offset
    before = None if found.before is None else found.before - shift
    after = None if found.after is None else found.after + shift
    return dataclasses.replace(
        found,
        # A band wider than the matrix is none.
        before=None if before is not None and before >= problem.T - 1 else before,
        after=None if after is not None and after >= problem.S - 1 else after,
        keys_below=None if found.keys_below is None else found.keys_below - key_offset,
    )


def row_bounds(kernel_mask: Bounds, problem: Problem) -> Array | str | None:
    """Return the keys' bound as one number per batch row, all axes before heads taken together."""
    if kernel_mask.keys_below is None:
        return None
    batch = problem.leading[:-1]
    bound = jnp.asarray(kernel_mask.keys_below)
    if bound.ndim > len(batch):
        return "lengths differ between heads"
    bound = bound.reshape((*bound.shape, *(1,) * (len(batch) - bound.ndim)))
    return jnp.clip(jnp.broadcast_to(bound, batch).reshape(-1), 0, problem.S).astype(jnp.int32)


def four_axes(array: Array, batch: tuple[int, ...]) -> Array:
    """Reshape (..., heads, length, width) to four axes: all batch axes become one."""
    heads = array.shape[-3] if array.ndim > 2 else 1
    full = jnp.broadcast_to(array, (*batch, heads, *array.shape[-2:]))
    return full.reshape((-1, heads, *array.shape[-2:]))
