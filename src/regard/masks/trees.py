"""Masks of trees of tokens: each sees its ancestors, as in speculative decoding."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from regard.arguments import LARGEST, check_reach, evaluate, integers, keep_array
from regard.axes import Array, ArrayLike
from regard.explicit_meshes import explicit_mesh, in_automatic_axes
from regard.masks.bounds import Bounds
from regard.masks.data import literal
from regard.masks.grid import is_concrete, spread
from regard.masks.intervals import Intervals
from regard.masks.mask import Mask
from regard.masks.offsets import look_up
from regard.masks.stored_masks import Stored
from regard.records import derived, record


def tree(parents: ArrayLike, start: ArrayLike = 0) -> Mask:
    """Let each token of a tree attend to itself, its ancestors, and all that precedes the tree.

    keep(q, k) = (k is q or an ancestor of q) where both are nodes, (k <= q) where k < start

    The tree has one token per node: candidates of which a model that checks them accepts one path. Node i
    sits at position `start + i`; positions before `start` are the text so far, each seeing those up to its
    own.

    Args:
        parents: integer array `(batch, ..., N)`: for each node the index of its parent, which comes before
            it, or -1 for a root. Aligned with the first leading axes of query; may be traced, and then is not
            checked.
        start: position of the first node, an integer or an integer array `(batch, ...)`; may be traced. With
            a cache, the number of tokens in it, which is also the nodes' `query_offset`.

    Returns:
        A mask on positions. Positions after the last node, such as free slots of a cache, see nothing and are
        seen by nobody. It holds a few numbers per node: those of a walk through the tree, by which a subtree
        is an interval.

    Raises:
        TypeError: arguments that are not integers, or parents without an axis.
        ValueError: a parent that does not come before its child, or nodes at positions beyond int32.

    Example:
        >>> from regard import masks
        >>> mask = masks.tree([-1, 0, 0, 1], start=2)
        >>> print(mask.picture(4, 6, query_offset=2))
        4 queries x 6 keys   ■ may attend  · may not
        2 ■ ■ ■ · · ·
        3 ■ ■ ■ ■ · ·
        4 ■ ■ ■ · ■ ·
        5 ■ ■ ■ ■ · ■

    Reference: Miao et al., "SpecInfer", 2024, section 4.2; Cai et al., "Medusa", 2024, section 2.1.2.
    """
    indices = keep_array(integers("parents", parents))
    if indices.ndim == 0:
        raise TypeError("parents: expected an integer array with one parent per node, got a scalar")
    concrete = is_concrete(indices)
    if concrete:
        _check_order(np.asarray(indices))
    # What is known while tracing stays known, so that the mask still prints and compares.
    with jax.ensure_compile_time_eval() if concrete else contextlib.nullcontext():
        enter, leave = evaluate(_walk_each, indices)
    count = indices.shape[-1]
    first = keep_array(integers("start", start, most=LARGEST - count))
    if isinstance(first, np.ndarray | np.generic) and first.size:
        check_reach("parents, start", int(np.max(first)) + count)
    return Tree(indices, first, enter, leave)


def _check_order(parents: np.ndarray) -> None:
    for *row, node in np.argwhere((parents < -1) | (parents >= np.arange(parents.shape[-1]))).tolist():
        raise ValueError(
            "parents: expected -1 or the index of an earlier node,"
            f" got {parents[(*row, node)]} for node {node}"
            + (f" of row {row[0] if len(row) == 1 else tuple(row)}" if row else "")
            + "; number the nodes so that parents come first, as by depth"
        )


def _walk_each(parents: Array) -> tuple[Array, Array]:
    """Walk through each row's tree; rows stay divided as they are."""
    walk, mesh = jnp.vectorize(_walk, signature="(n)->(n),(n)"), explicit_mesh(parents)
    if mesh is None:
        return walk(parents)
    rows = PartitionSpec(*jax.typeof(parents).sharding.spec[:-1])
    return in_automatic_axes(mesh, walk, (rows, rows))(parents)


@jax.jit
def _walk(parents: Array) -> tuple[Array, Array]:
    """Return when a depth-first walk enters each of the nodes (N,), and when it leaves its subtree."""
    count = parents.size
    up = jnp.where(parents < 0, count, parents)  # roots hang on one more node, its own parent
    # Pointers to ancestors double their reach in each of log N steps, so that depth costs nothing.
    reaches = [jnp.append(up, jnp.int32(count))]
    for _ in range(count.bit_length() - 1):
        reaches.append(reaches[-1][reaches[-1]])

    sizes = jnp.ones(count + 1, jnp.int32)
    for reach in reaches:
        sizes = sizes.at[reach].add(sizes)
    sizes = sizes[:count]

    # A node is entered after its parent and the subtrees of its earlier siblings.
    order = jnp.argsort(up, stable=True)
    before = jnp.cumsum(sizes[order], dtype=jnp.int32) - sizes[order]
    eldest = jnp.searchsorted(up[order], up[order])
    steps = jnp.zeros(count + 1, jnp.int32).at[order].set(before - before[eldest] + 1)
    for reach in reaches:
        steps = steps + steps[reach]
    enter = steps[:count] - 1
    return enter, enter + sizes


@record
class Tree(Stored, Intervals):
    """Nodes of a tree, each below its parent, after a text that all of them continue."""

    parents: Any
    start: Any
    enter: Any = derived()
    leave: Any = derived()
    ends: ClassVar = {"parents": "node", "start": "", "enter": "node", "leave": "node"}
    maker = staticmethod(tree)
    reads_positions = True
    bounds = Bounds(after=0, exact=False)

    def interval(self, position: Array, leading_axes: int) -> tuple[Array, Array]:
        count = np.shape(self.parents)[-1]
        # The text before the tree is a chain that everything continues, whose numbers are its positions; what
        # comes after the tree, nothing. A position is subtracted from only where int32 holds the difference.
        first = jnp.minimum(spread(jnp.asarray(self.start), leading_axes + 2), LARGEST - count)
        end = first + count
        before, inside = position < first, (position >= first) & (position < end)
        node = jnp.where(inside, position - first, 0)
        enter = first + look_up(jnp.asarray(self.enter), node, leading_axes)
        leave = first + look_up(jnp.asarray(self.leave), node, leading_axes)
        return jnp.where(before, position, jnp.where(inside, enter, end)), jnp.where(inside, leave, end)

    def number(self, position: Array, leading_axes: int) -> Array:
        return self.interval(position, leading_axes)[0]

    def expression(self) -> str:
        from_zero = is_concrete(self.start) and np.ndim(self.start) == 0 and not int(self.start)
        return f"tree({literal(self.parents)}{'' if from_zero else f', {literal(self.start)}'})"
