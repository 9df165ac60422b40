"""Topologies: devices that are elsewhere, for which programs are compiled and never run."""

from __future__ import annotations

import os
import re
from typing import Any

from jax.experimental.topologies import get_topology_desc

from regard.arguments import check_kind, whole_number

# What XLA's compiler is told of a GPU: figures of NVIDIA's data sheets and of CUDA's occupancy tables.
_GPU = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: {shared} shared_memory_per_block_optin: {optin} threads_per_core_limit: 2048
core_count: {cores} fpus_per_core: {fpus} block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
block_dim_limit_z: 65535 registers_per_core_limit: 65536 registers_per_block_limit: 65536
l2_cache_size: {cache} memory_bandwidth: {bandwidth} device_memory_size: {memory} clock_rate_ghz: {clock}
cuda_compute_capability {{ major: {major} }} }} platform_name: "CUDA" device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 8 }} runtime_version {{ major: 12 minor: 9 }}"""
# What the compilers would else look for on this machine: the chips of a host, Google's servers, a GPU.
_SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
_SETTINGS |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
_HOPPER = {"shared": 233472, "optin": 232448, "cores": 132, "fpus": 128, "cache": 52428800, "clock": 1.98}
_HOPPER |= {"major": 9}
_AMPERE = {"shared": 167936, "optin": 166912, "cores": 108, "fpus": 64, "cache": 41943040, "clock": 1.41}
_AMPERE |= {"major": 8}
_GPUS = {
    "a100": _AMPERE | {"kind": "NVIDIA A100-SXM4-80GB", "bandwidth": 2039 * 10**9, "memory": 80 << 30},
    "h100": _HOPPER | {"kind": "NVIDIA H100 80GB HBM3", "bandwidth": 3352 * 10**9, "memory": 80 << 30},
    "h200": _HOPPER | {"kind": "NVIDIA H200", "bandwidth": 4800 * 10**9, "memory": 141 * 10**9},
}


def find_topology(name: str, *, slices: int = 1) -> tuple[Any, ...]:
    """Find devices by the name of their topology: programs are compiled for them without having one.

    Args:
        name: TPUs by generation and chips along each link, as JAX names them: v5e:4x4, v5p:2x2x2; or NVIDIA
            GPUs by kind and count, on one host: a100, h100 or h200, as h100:8.
        slices: of TPUs, so many of the topology, joined by a slower network.

    Returns:
        The devices, for `build_mesh` and `jax.sharding.Mesh`. What is lowered for shapes that lie on such a
        mesh compiles as there, and says its memory; it cannot be run, and no array can be put there.

    Raises:
        ValueError: a name that is none, or that the compiler refuses.
        ModuleNotFoundError: the compiler is not installed: libtpu for TPUs, jax[cuda12] for GPUs.

    Example:
        >>> import contextlib
        >>> from regard import parallel
        >>> with contextlib.suppress(ModuleNotFoundError):  # libtpu may not be installed
        ...     assert len(parallel.find_topology("v5e:2x4")) == 8

    Reference: `jax.experimental.topologies`, ahead-of-time compilation.
    """
    check_kind("name", name, str)
    slices = whole_number("slices", slices, 1)
    if not re.fullmatch(r"\w+:\d+(x\d+)*", name):
        raise ValueError(f"name: expected a kind and sizes, such as v5e:2x4 or h100:8; got {name!r}")
    kind, _, sizes = name.partition(":")
    more: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    platform, package = "tpu", "libtpu, as pip install 'jax[tpu]' brings it"
    if kind in _GPUS:
        if slices > 1 or "x" in sizes:
            raise ValueError(f"name: expected GPUs of one host, such as {kind}:8; got {name!r}, {slices=}")
        platform, package = "cuda", "JAX's plugin for CUDA, as pip install 'jax[cuda12]' brings it"
        more, name = {"target_config": _GPU.format(**_GPUS[kind]), "topology": f"1x1x{sizes}"}, ""
    for variable, setting in _SETTINGS.items():
        os.environ.setdefault(variable, setting)
    try:
        return tuple(get_topology_desc(name, platform, **more).devices)
    except NotImplementedError as error:
        raise ModuleNotFoundError(
            f"name: {kind} needs {package}; where no GPU is, set JAX_PLATFORMS=cpu"
        ) from error
    except RuntimeError as error:
        if "not installed" in str(error):
            raise ModuleNotFoundError(f"name: {kind} needs {package}") from error
        raise ValueError(f"name: the compiler knows no {name or kind}: {error}") from error
