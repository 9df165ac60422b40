"""Calls inside the caller's own `jax.shard_map`: arrays are this device's part, all else is the whole."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.call.canonicalization import float_array
from regard.engine.call.problem import Problem, broadcast_leading
from regard.engine.flash.device_types import vary, varying_axes
from regard.parallel.division import Axes, Division
from regard.parallel.shard import Shard
from regard.parallel.shard_mapping import attend_here, finish, operands

Arrays = Mapping[str, Any]  # query, key, value, and bias or None


def manual_axes() -> frozenset[str]:
    """Return the mesh axes over which the code around the call is one device's."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def check_parts(arrays: Arrays) -> dict[str, Any]:
    """Return this device's part of the arrays, checked to be arrays."""
    return {
        name: None if array is None else float_array(name, array, 0 if name == "bias" else 2)
        for name, array in arrays.items()
    }


def describe_whole(arrays: Arrays, mesh: Any, sequence: Axes, batch: Axes, heads: Axes) -> dict[str, Any]:
    """Return shapes and dtypes of the arrays of all devices together."""
    rank = len(_leading(arrays))
    rows = arrays["query"].shape[-2]

    def grow(name: str, array: Any) -> Any:
        shape, varying = [1] * (2 - array.ndim) + list(array.shape), varying_axes(array)

        def multiply(axis: int, names: Sequence[str]) -> None:
            shape[axis] *= math.prod(mesh.shape[axis_name] for axis_name in names)

        if name != "bias" or shape[-2] > 1:
            multiply(-2, sequence)
        elif rows == 1 and set(sequence) & set(varying):
            raise NotImplementedError(
                "bias: expected more than one row per device, or one for all, inside jax.shard_map"
            )
        # Heads and rows of a batch that do not differ among devices are those of all.
        if heads and len(shape) > 2 and set(heads) <= set(varying):
            multiply(-3, heads)
        if batch and rank > 1 and len(shape) == rank + 2 and set(batch) <= set(varying):
            multiply(0, batch)
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    return {name: None if array is None else grow(name, array) for name, array in arrays.items()}


def run_part(
    whole: Problem, division: Division, arrays: Arrays, sequence: Axes
) -> tuple[Array, dict[str, Array]]:
    """Compute this device's part of the output and of what `whole.aux` names; all devices do so together."""
    varied = {name: vary(array, sequence) for name, array in arrays.items() if name != "bias"}
    parts, call = operands(whole, division, {**varied, "bias": arrays["bias"]}, padded=False)
    rows = attend_here(division, parts, call)
    sinks = None
    if whole.sinks is not None:
        apart = dataclasses.replace(division, exchange=None)
        sinks = Shard.here(apart, call).take(whole.sink_column(), 2)
    return finish(rows, _leading(arrays), whole.aux, arrays["query"].dtype, sinks)


def _leading(arrays: Arrays) -> tuple[int, ...]:
    return broadcast_leading(*(jnp.shape(arrays[name])[:-2] for name in ("query", "key", "value")))
