"""Kernel masks: a call's mask and score as libraries' kernels can express them, and arrays of four axes."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard import scores
from regard.arguments import LARGEST
from regard.axes import Array
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem
from regard.masks import Mask
from regard.masks.bounds import Bounds
from regard.masks.grid import is_concrete
from regard.masks.offsets import positions_of


def refuses_call(problem: Problem) -> str | None:
    """Return why a library's kernel cannot serve a call, whatever its mask and dtypes, or None."""
    if others := [name for name in problem.aux if name != "lse"]:
        return f"of statistics it returns lse alone, aux asks for {', '.join(others)}"
    if not is_concrete(problem.scale):
        return "its scale is part of the program, and this one is traced"
    if 0 in (*problem.leading, problem.T, problem.S, problem.E):
        return "there is nothing to compute"
    if problem.leading and (problem.query.ndim < 3 or problem.leading[-1] != problem.query.shape[-3]):
        return "it takes no query that several heads share"
    return None


def read_kernel_mask(problem: Problem) -> Bounds | str:
    """Return the call's mask as bounds counted by rows, or the part of it that is not made of bounds.

    Query row t reads key rows t - before to t + after, those below `keys_below`, of its id: `query_ids` holds
    one for every row.
    """
    bounds = Bounds()
    for part in () if problem.mask is None else problem.mask.parts:
        bounds &= part.bounds
        if not bounds.exact:
            return f"the mask has {part!r}, which it does not know"
    if bounds.empty:
        return bounds
    if not all(positions_of(offset).is_consecutive for offset in (problem.query_offset, problem.key_offset)):
        return "the mask reads the position of every token, and it counts rows from an offset"
    offsets = (problem.query_offset, 0 if problem.key_offset is None else problem.key_offset)
    if not is_concrete(offsets) or any(np.ndim(offset) for offset in offsets):
        return "the mask is placed by offsets that are arrays, or not known until it runs"
    query_offset, key_offset = int(offsets[0]), int(offsets[1])
    shift = query_offset - key_offset
    query_ids = bounds.query_ids
    if bounds.key_ids is not None:
        if query_ids is None and (shift or problem.T != problem.S):
            return "the mask reads the document of keys that other rows than theirs have"
        query_ids = bounds.key_ids if query_ids is None else query_ids
        if any(np.ndim(ids) > max(len(problem.leading), 1) for ids in (query_ids, bounds.key_ids)):
            return "segments differ between heads"
    keys_below = bounds.keys_below
    if keys_below is not None:  # within the keys: int32 may not hold the difference
        keys_below = jnp.clip(keys_below, key_offset, min(key_offset + problem.S, LARGEST)) - key_offset
    before = None if bounds.before is None else bounds.before - shift
    after = None if bounds.after is None else bounds.after + shift
    return dataclasses.replace(
        bounds,
        # A band wider than the matrix is none.
        before=None if before is not None and before >= problem.T - 1 else before,
        after=None if after is not None and after >= problem.S - 1 else after,
        keys_below=keys_below,
        query_ids=query_ids,
    )


def read_cap(problem: Problem) -> float | str | None:
    """Return the cap of the call's softcap, None where it has no score, or why it is none of these."""
    parts = () if problem.score is None else problem.score.parts
    if not parts:
        return None
    cap = parts[0].caps if len(parts) == 1 else None
    if cap is None:
        return f"of score functions it has softcap alone, got {problem.score!r}"
    if not is_concrete(cap):
        return "the cap of a softcap is part of its program, and this one is traced"
    if np.size(cap) > 1:
        return "it has one cap for all heads"
    with jax.transfer_guard("allow"):
        return float(np.asarray(cap).reshape(()))


def row_bounds(kernel_mask: Bounds, problem: Problem) -> Array | str | None:
    """Return the keys' bound as one number per batch row, all axes before heads taken together."""
    if kernel_mask.keys_below is None:
        return None
    batch = problem.leading[:-1]
    bound = jnp.asarray(kernel_mask.keys_below)
    if bound.ndim > len(batch):
        return "lengths differ between heads"
    bound = bound.reshape((*bound.shape, *(1,) * (len(batch) - bound.ndim)))
    return jnp.broadcast_to(bound, batch).reshape(-1).astype(jnp.int32)


def row_ids(ids: Any, batch: tuple[int, ...]) -> Any:
    """Return ids (..., length), one for each position, as (batch, length); NumPy's stay so."""
    length = ids.shape[-1]
    ids = ids.reshape((*ids.shape[:-1], *(1,) * (len(batch) + 1 - ids.ndim), length))
    broadcast = np.broadcast_to if isinstance(ids, np.ndarray) else jnp.broadcast_to
    return broadcast(ids, (*batch, length)).reshape((-1, length))


def find_documents(kernel_mask: Bounds, problem: Problem) -> tuple[np.ndarray, np.ndarray] | str | None:
    """Return where documents begin and how long they are, (batch, most) with -1 where a row has fewer.

    None where there is one document in every row; else why the ids are no such documents.
    """
    ids = (kernel_mask.query_ids, kernel_mask.key_ids)
    if kernel_mask.key_ids is None:
        return None
    if not is_concrete(ids):
        return "it counts documents while the program is made, and ids are not known until it runs"
    with jax.transfer_guard("allow"):
        queries = row_ids(np.asarray(ids[0]), problem.leading[:-1])
        keys = row_ids(np.asarray(ids[1]), problem.leading[:-1])
    if not np.array_equal(queries, keys):
        return "it takes documents of the same rows of queries and keys"
    begins = [np.flatnonzero(np.append(True, row[1:] != row[:-1])) for row in keys]
    if any(len(np.unique(row)) < len(begin) for row, begin in zip(keys, begins, strict=True)):
        return "it takes documents in one piece, and one comes back after another"
    most = max(map(len, begins))
    if most == 1:
        return None
    starts, lengths = np.full((2, len(keys), most), -1, np.int32)
    for row, begin in enumerate(begins):
        starts[row, : len(begin)] = begin
        lengths[row, : len(begin)] = np.diff(begin, append=problem.S)
    return starts, lengths


def compute_by_tiles(
    arrays: Sequence[Array], keep: Sequence[Mask], scale: float, cap: float | None
) -> list[Array]:
    """Compute output and lse by Regard's tiles; keys and queries are counted from 0."""
    mask = functools.reduce(operator.and_, keep) if keep else None
    score = None if cap is None else scores.softcap(cap)
    problem = canonicalize(*arrays, mask=mask, score=score, scale=scale, query_offset=0, aux=("lse",))
    output, aux = tiled.run(problem)
    return [output, aux["lse"]]


def four_axes(array: Array, batch: tuple[int, ...]) -> Array:
    """Reshape (..., heads, length, width) to four axes: all batch axes become one."""
    heads = array.shape[-3] if array.ndim > 2 else 1
    full = jnp.broadcast_to(array, (*batch, heads, *array.shape[-2:]))
    return full.reshape((-1, heads, *array.shape[-2:]))
