"""The platform that a call is traced for, which may be another than the machine's own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import jax
from jax._src import config
from jax._src import mesh as meshes  # has no public name for what `jax.set_mesh` sets
from jax.core import Tracer
from jax.sharding import AxisType

_context: Any = None
_set_mesh: Any = getattr(meshes, "device_context", None) or config.device_context  # before jax 0.12
_LOWERED = {"cuda": "gpu", "rocm": "gpu"}  # what programs are lowered for, by the name that devices have


class Platform(NamedTuple):
    """A kind of device: cpu, gpu or tpu, and the name that its maker gives it; "" where that is unknown."""

    name: str
    device_kind: str

    @classmethod
    def of(cls, device: Any) -> Platform:
        """Return that of one of JAX's devices, concrete or abstract."""
        return cls(device.platform, device.device_kind)


def find_platform(*arrays: Any) -> Platform:
    """Find the platform of a call: of its context, its arrays, the mesh around it, or JAX's default device.

    Inside of `jax.jit`, arrays know the mesh on which they lie: also one of devices that are not here.
    """
    if _context is not None and _context.value is not None:
        return _context.value
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, Tracer):
            return Platform.of(next(iter(array.devices())))
        if (platform := _read_mesh(_find_mesh(array))) is not None:
            return platform
    return _read_mesh(jax.sharding.get_abstract_mesh()) or _find_default()


def is_divided_by_compiler(*arrays: Any) -> bool:
    """Return whether arrays lie on several devices, and no `jax.shard_map` around them divides the work."""
    meshes_found = (mesh for mesh in map(_find_mesh, arrays) if mesh is not None and not mesh.empty)
    mesh = next(meshes_found, jax.sharding.get_abstract_mesh())
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind is not AxisType.Manual for size, kind in axes)


def tracing_for(platform: Platform) -> AbstractContextManager[Any]:
    """Return a context in which calls are traced for a platform, which `jax.jit` knows programs by."""
    is_known = platform == find_platform()
    return nullcontext() if is_known and find_present(platform) is not None else _enter(platform)


@contextmanager
def _enter(platform: Platform) -> Iterator[None]:
    # Made when first needed: with a new context, JAX compiles anew what it had compiled before.
    global _context
    if _context is None:
        _context = jax.make_user_context(None)
    with _context(platform):
        # What is computed while tracing, such as lists of tiles, is not for devices that are not here.
        is_here = find_present(platform) is not None
        mesh = _set_mesh.swap_local(_set_mesh.value if is_here else meshes.empty_concrete_mesh)
        try:
            yield
        finally:
            _set_mesh.set_local(mesh)


def lowering_for(context: Any) -> AbstractContextManager[Any]:
    """Return the context in which the rule of a primitive traces for what its program is lowered for."""
    platform = _read_mesh(context.avals_in[0].sharding.mesh)
    names = {_LOWERED.get(name, name) for name in context.module_context.platforms}
    if platform is None and len(names) == 1 and names != {find_platform().name}:
        platform = Platform(str(*names), "")
    return nullcontext() if platform is None else tracing_for(platform)


@functools.cache
def find_present(platform: Platform) -> Any:
    """Find a device of this process that is of a platform, or None."""
    devices = (device for device in jax.local_devices() if Platform.of(device) == platform)
    return next(devices, None)


def _find_mesh(array: Any) -> Any:
    """Return the mesh on which an array lies, or a shape that stands for one; or None."""
    sharding = jax.typeof(array).sharding if isinstance(array, Tracer) else None
    return getattr(sharding or getattr(array, "sharding", None), "mesh", None)


def _read_mesh(mesh: Any) -> Platform | None:
    """Return the platform of a mesh's devices, or None where it does not say."""
    device = getattr(getattr(mesh, "abstract_mesh", mesh), "abstract_device", None)
    return None if device is None else Platform.of(device)


def _find_default() -> Platform:
    """Find the platform on which JAX computes what lies nowhere yet."""
    device: Any = config.default_device.value
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return Platform.of(jax.devices()[0] if device is None else device)
