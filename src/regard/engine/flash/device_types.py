"""Types of arrays in divided programs: what varies over manual mesh axes, as inside `jax.shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config  # has no public name
from jax.core import ShapedArray
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from regard.engine.platforms import lowering_for
from regard.manual_meshes import varying_axes

NO_MESH = AbstractMesh((), ())


def most_varying(types: Sequence[Any]) -> Any:
    """Return that type of an operand which varies over most manual mesh axes, the first of several."""
    return max(types, key=lambda operand: len(operand.mat.varying))


def sum_as(array: Any, operand: ShapedArray) -> Any:
    """Turn devices' cotangents into that of an operand: summed where devices share it, then in its dtype."""
    shared = tuple(name for name in varying_axes(array) if name not in operand.mat.varying)
    return (jax.lax.psum(array, shared) if shared else array).astype(operand.dtype)


def result_types(operands: Sequence[Any], shapes: Sequence[Any]) -> list[ShapedArray]:
    """Return the types of a primitive's results, which vary where any of its operands does."""
    like = most_varying(operands)
    varying = frozenset().union(*(operand.mat.varying for operand in operands))
    like = like.update(manual_axis_type=like.mat.update(varying=varying))

    def unsharded(rank: int) -> NamedSharding:
        return NamedSharding(like.sharding.mesh, PartitionSpec(*(None,) * rank))

    return [
        like.update(shape=out.shape, dtype=out.dtype, weak_type=False, sharding=unsharded(len(out.shape)))
        for out in shapes
    ]


def shapes_of_one_device(function: Callable[..., list[Any]], *shapes: Any) -> list[Any]:
    """Find the shapes of a function's results, of kernels that are written for one device's arrays, too."""
    with use_abstract_mesh(NO_MESH), config._check_vma(False):
        return jax.eval_shape(function, *shapes)


def lower_for_one_device(context: Any, function: Callable[..., list[Any]], *operands: Any) -> Any:
    """Lower a function of the arrays of one device, whose types say nothing of others."""
    # Programs that were traced before, as of predicates, do not know that.
    with use_abstract_mesh(NO_MESH), config._check_vma(False):
        return _lower_without_types(context, function, *operands)


def lower_among_devices(context: Any, function: Callable[..., list[Any]], *operands: Any) -> Any:
    """Lower a function of this device's arrays that speaks to the others over manual mesh axes."""
    mesh = context.avals_in[0].sharding.mesh
    # Its derivatives are known: what differs among devices was needed for them alone.
    with use_abstract_mesh(mesh), config._check_vma(False):
        return _lower_without_types(context, function, *operands)


def _lower_without_types(context: Any, function: Callable[..., list[Any]], *operands: Any) -> Any:
    plain = context.replace(avals_in=[ShapedArray(aval.shape, aval.dtype) for aval in context.avals_in])
    with lowering_for(context):
        return mlir.lower_fun(function, multiple_results=True)(plain, *operands)
