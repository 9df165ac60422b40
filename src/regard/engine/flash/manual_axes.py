"""Manual mesh axes, inside `jax.shard_map`: what varies over them, and arrays made to vary alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


def varying_axes(*trees: Any) -> tuple[str, ...]:
    """Return the manual mesh axes over which any of the arrays varies."""
    names = (jax.typeof(leaf).mat.varying for leaf in jax.tree.leaves(trees))
    return tuple(sorted(frozenset().union(*names)))


def vary(tree: Any, names: Sequence[str]) -> Any:
    """Say of all arrays that they vary over these axes; nothing is sent."""

    def one(array: Any) -> Any:
        missing = tuple(name for name in names if name not in jax.typeof(array).mat.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(one, tree)


def vary_alike(arrays: Sequence[Any]) -> list[Any]:
    """Say of all arrays that they vary where one does."""
    return vary(list(arrays), varying_axes(arrays))
