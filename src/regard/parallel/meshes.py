"""Meshes of all devices, of which those of one slice are nearest along the last axes."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from regard.arguments import check_kind, whole_number


def build_mesh(
    sizes: Mapping[str, int], *, outer: Mapping[str, int] | None = None, devices: Sequence[Any] | None = None
) -> Mesh:
    """Arrange devices along named axes, also those of several slices or hosts.

    `jax.make_mesh` takes one slice: devices that a fast network joins. Of several, each slice holds the same
    part of the mesh, and some axes go from slice to slice, over the slower network: those that send least,
    such as those of the batch. By default these are the first ones.

    Args:
        sizes: the size of each axis, in order; together the number of devices.
        outer: the number of slices that an axis spans, a divisor of its size; axes left out stay within a
            slice. None means the most that fit, from the first axis on.
        devices: those to arrange; None means all, of all processes.

    Returns:
        A mesh whose axes are automatic: the compiler divides the work.

    Raises:
        ValueError: sizes that multiply to another number than there are devices; slices of unequal size;
            `outer` of an unknown axis, that does not divide its size, or multiplies to another number than
            there are slices.

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
    if math.prod(sizes.values()) != len(devices):
        expected = f"sizes that multiply to {len(devices)}, the number of devices"
        raise ValueError(f"sizes: expected {expected}; got {_spell(sizes)}")
    by_slice = collections.Counter(map(find_slice, devices))
    if len({*by_slice.values()}) > 1:
        counts = ", ".join(map(str, by_slice.values()))
        raise ValueError(f"devices: expected as many of each slice or host; got {counts}")
    spans = [*divide_slices(sizes, len(by_slice), outer).values()]
    types = (AxisType.Auto,) * len(sizes)
    if len(by_slice) == 1:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)
    inner = [size // span for size, span in zip(sizes.values(), spans, strict=True)]
    return Mesh(mesh_utils.create_hybrid_device_mesh(inner, spans, devices), tuple(sizes), types)


def divide_slices(
    sizes: Mapping[str, int], slices: int, outer: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the slices that each axis spans: as `outer` says, or as many as fit from the first axis on."""
    if outer is None:
        spans = {}
        for name, size in sizes.items():
            spans[name] = math.gcd(size, slices)
            slices //= spans[name]
        return spans
    check_kind("outer", outer, Mapping, hint="write {'data': 2}")
    if slices == 1 and any(span != 1 for span in outer.values()):
        reason = "as all devices are of one slice or host"
        raise ValueError(f"outer: expected None, {reason}; got {_spell(outer)}; leave it out")
    for name, span in outer.items():
        if name not in sizes:
            raise ValueError(f"outer: expected axes among {', '.join(sizes)}; got {name!r}")
        if sizes[name] % whole_number(f"outer[{name!r}]", span, 1):
            expected = f"a divisor of {name}={sizes[name]}, its devices in all slices"
            raise ValueError(f"outer: expected {expected}; got {name}={span}")
    if math.prod(outer.values()) != slices:
        expected = f"numbers that multiply to {slices}, the slices or hosts, or None for the first axes"
        raise ValueError(f"outer: expected {expected}; got {_spell(outer)}")
    return {name: outer.get(name, 1) for name in sizes}


def measure_spans(mesh: Mesh) -> dict[str, int]:
    """Return the number of slices that each axis of a mesh spans."""
    slices = np.vectorize(find_slice, otypes=[int])(mesh.devices)
    lines = (np.moveaxis(slices, axis, 0).reshape(size, -1)[:, 0] for axis, size in enumerate(slices.shape))
    return {name: len(np.unique(line)) for name, line in zip(mesh.axis_names, lines, strict=True)}


def find_slice(device: Any) -> int:
    """Return the number of a device's slice; that of all is 0 where JAX knows none."""
    return getattr(device, "slice_index", None) or 0


def _spell(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items()) or "none"
