"""What libraries' kernels know of a call: a band, lengths, segments; arrays of four axes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.masks import Mask
from regard.masks.algebra import And
from regard.masks.documents import Documents, Segments
from regard.masks.grid import is_concrete
from regard.masks.keys import KeysBelow
from regard.masks.positional import Causal, SlidingWindow


@dataclass(frozen=True)
class KernelMask:
    """Which keys a query may attend to, counted by rows: query t reads keys t - before to t + after."""

    before: int | None = None  # None: all keys before; negative, none closer than that
    after: int | None = None
    bound: Any = None  # array aligned with the first leading axes: keys below it
    segments: Mask | None = None  # of the same documents

    @property
    def plain(self) -> bool:
        """Whether every query may attend to every key."""
        return all(part is None for part in (self.before, self.after, self.bound, self.segments))


def read_kernel_mask(problem: Problem) -> KernelMask | str:
    """The call's mask as a kernel_mask, or which part of it is none."""
    found = KernelMask()
    for part in [] if problem.mask is None else _parts(problem.mask):
        if isinstance(part, Causal):
            found = _narrow(found, None, 0)
        elif isinstance(part, SlidingWindow):
            found = _narrow(found, part.before, part.after)
        elif isinstance(part, KeysBelow) and found.bound is None:
            found = dataclasses.replace(found, bound=part.bound)
        elif isinstance(part, Segments | Documents) and found.segments is None:
            found = dataclasses.replace(found, segments=part)
        else:
            return f"the mask has {part!r}, which it does not know"
    return _by_rows(found, problem)


def _parts(mask: Mask) -> list[Mask]:
    return [*_parts(mask.left), *_parts(mask.right)] if isinstance(mask, And) else [mask]


def _narrow(kernel_mask: KernelMask, before: int | None, after: int | None) -> KernelMask:
    return dataclasses.replace(
        kernel_mask, before=_least(kernel_mask.before, before), after=_least(kernel_mask.after, after)
    )


def _least(one: int | None, other: int | None) -> int | None:
    return min((bound for bound in (one, other) if bound is not None), default=None)


def _by_rows(kernel_mask: KernelMask, problem: Problem) -> KernelMask | str:
    """Positions as indices of rows, which kernels count by."""
    if kernel_mask.plain:
        return kernel_mask
    offsets = (problem.query_offset, problem.key_offset or 0)
    if not is_concrete(offsets) or any(np.ndim(offset) for offset in offsets):
        return "the mask is placed by offsets that are arrays, or not known until it runs"
    query_offset, key_offset = (int(offset) for offset in offsets)
    shift = query_offset - key_offset
    before = None if kernel_mask.before is None else kernel_mask.before - shift
    after = None if kernel_mask.after is None else kernel_mask.after + shift
    # A band wider than the matrix is none.
    before = None if before is not None and before >= problem.T - 1 else before
    after = None if after is not None and after >= problem.S - 1 else after
    bound = None if kernel_mask.bound is None else kernel_mask.bound - key_offset
    return KernelMask(before, after, bound, kernel_mask.segments)


def row_bounds(kernel_mask: KernelMask, problem: Problem) -> Array | str | None:
    """The keys' bound as one number per batch row, all axes before heads taken together."""
    if kernel_mask.bound is None:
        return None
    batch = problem.leading[:-1]
    bound = jnp.asarray(kernel_mask.bound)
    if bound.ndim > len(batch):
        return "lengths differ between heads"
    bound = bound.reshape((*bound.shape, *(1,) * (len(batch) - bound.ndim)))
    return jnp.clip(jnp.broadcast_to(bound, batch).reshape(-1), 0, problem.S).astype(jnp.int32)


def four_axes(array: Array, batch: tuple[int, ...]) -> Array:
    """(..., heads, length, width) with all batch axes as one."""
    heads = array.shape[-3] if array.ndim > 2 else 1
    full = jnp.broadcast_to(array, (*batch, heads, *array.shape[-2:]))
    return full.reshape((-1, heads, *array.shape[-2:]))
