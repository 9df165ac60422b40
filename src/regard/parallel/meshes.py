"""Meshes of all devices, of which those of one slice are nearest along the last axes."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from regard.arguments import check_kind, whole_number


def build_mesh(sizes: Mapping[str, int], *, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices along named axes, also those of several slices or hosts.

    `jax.make_mesh` takes one slice: devices that a fast network joins. Of several, each slice holds the same
    part of the mesh, and the first axes go from slice to slice, over the slower network: put the axes that
    send least, such as those of the batch, first.

    Args:
        sizes: the size of each axis, in order; together the number of devices.
        devices: those to arrange; None means all, of all processes.

    Returns:
        A mesh whose axes are automatic: the compiler divides the work.

    Raises:
        ValueError: sizes that multiply to another number than there are devices; slices of unequal size.

    Example:
        >>> import jax
        >>> from regard import parallel
        >>> dict(parallel.build_mesh({"data": jax.device_count(), "sequence": 1}).shape)
        {'data': 1, 'sequence': 1}

    Reference: `jax.experimental.mesh_utils.create_hybrid_device_mesh`.
    """
    check_kind("sizes", sizes, Mapping, hint="write {'data': 8}")
    sizes = {name: whole_number(name, size, 1) for name, size in sizes.items()}
    devices = jax.devices() if devices is None else devices
    spelled = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(
            f"sizes: expected sizes that multiply to {len(devices)}, the number of devices; got {spelled}"
        )
    types = (AxisType.Auto,) * len(sizes)
    by_slice = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(by_slice) == 1:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)
    if len({*by_slice.values()}) > 1:
        counts = ", ".join(map(str, by_slice.values()))
        raise ValueError(f"devices: expected as many of each slice or host; got {counts}")
    outer, remaining = [], len(by_slice)
    for size in sizes.values():
        outer.append(math.gcd(size, remaining))
        remaining //= outer[-1]
    inner = [size // count for size, count in zip(sizes.values(), outer, strict=True)]
    arranged = mesh_utils.create_hybrid_device_mesh(inner, outer, devices)
    return Mesh(arranged, tuple(sizes), types)
