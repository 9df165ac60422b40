"""Arrays on explicit mesh axes, whose types say how they are divided, as under `jax.set_mesh`."""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes


def explicit_mesh(tree: Any) -> Any:
    """Return the mesh whose explicit axes divide arrays of a tree, if there is one."""
    for leaf in jax.tree.leaves(tree):
        mesh = jax.typeof(leaf).sharding.mesh if isinstance(leaf, Array) else None
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def in_automatic_axes(mesh: Any, function: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    """Let the compiler divide what a function computes of arrays on explicit axes, and place its results."""
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in axes if kind is AxisType.Explicit)
    is_spec = lambda spec: isinstance(spec, PartitionSpec)  # noqa: E731
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    run: Any = auto_axes(function, axes=explicit, out_sharding=places)
    return run


def explicit_sharding(array: Any) -> NamedSharding | None:
    """Return how an array is divided if explicit axes divide it; outside jit, with the mesh's devices."""
    sharding = jax.typeof(array).sharding if isinstance(array, Array) else None
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types or not any(sharding.spec):
        return None
    placed: Any = sharding if isinstance(array, Tracer) else array.sharding
    return NamedSharding(placed.mesh, sharding.spec)


def take_rows(table: Array, rows: Array) -> Array:
    """Return table[rows], divided as `rows` is where explicit axes divide it, with NaN for no row there."""
    sharding, columns = explicit_sharding(rows), explicit_sharding(table)
    if sharding is None:
        return table[rows]
    widths = (None,) * (table.ndim - 1) if columns is None else columns.spec[1:]
    divided = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *widths))
    return table.at[rows].get(mode="fill", out_sharding=divided)
