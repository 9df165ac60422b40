"""Gradients of half precision that are added up in float32: of rows that many places read, and over loops.

JAX adds the gradients of what a gather or a loop reads many times in the dtype that is read, and in bfloat16
a sum of ones stops growing at 256.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

Read = Callable[[Array, Array], Array]


def gather(read: Read, array: Array, index: Array, wide: Array | None = None) -> Array:
    """Return `read(array, index)`, entries of an array, whose gradient is added up in float32 at least.

    In a loop it goes to `wide`, what `widen` made of the array before the loop, and is added up there.
    """
    return _gather(read, array, wide, index) if is_narrow(array) else read(array, index)


def widen(array: Array) -> Array | None:
    """Return a copy in float32 of an array of half precision, for the sake of its gradient alone."""
    return array.astype(jnp.float32) if is_narrow(array) else None


def add_up_wide(tree: Any) -> Callable[[], Any]:
    """Return a function that gives a tree's arrays; in each step of a loop it is called once more.

    The gradients of all that it has given are added up in float32 at least.
    """
    leaves, structure = jax.tree.flatten(tree)
    wides = [widen(leaf) for leaf in leaves]

    def give() -> Any:
        pairs = zip(leaves, wides, strict=True)
        return structure.unflatten([leaf if wide is None else _give(leaf, wide) for leaf, wide in pairs])

    return give


def is_narrow(leaf: Any) -> bool:
    """Return whether it is an array of half precision."""
    return isinstance(leaf, jax.Array) and leaf.dtype in (jnp.bfloat16, jnp.float16)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gather(read: Read, array: Array, wide: Array | None, index: Array) -> Array:
    return read(array, index)


@_gather.defjvp
def _(read: Read, primals: Any, tangents: Any) -> tuple[Array, Array]:
    array, wide, index = primals
    slope = tangents[0].astype(jnp.float32) if wide is None else tangents[1]
    return _gather(read, array, wide, index), read(slope, index).astype(array.dtype)


@jax.custom_jvp
def _give(narrow: Array, wide: Array) -> Array:
    """Return the narrow one of two equal arrays, whose gradient is that of the wide one alone."""
    return narrow


@_give.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    narrow, wide = primals
    return _give(narrow, wide), tangents[1].astype(narrow.dtype)
