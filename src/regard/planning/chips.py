"""Chips: what a device computes, holds and sends per second, and how long messages between devices take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from regard.arguments import read_number
from regard.engine.flash.measurements import DEFAULTS

GIGA, TERA = 1e9, 1e12
_SIDE, _NUMBERS, _REPEATS = 1024, 1 << 25, 5  # of what is measured


@dataclass(frozen=True)
class Chip:
    """A kind of device and the links it has; bandwidths are bytes per second in one direction.

    Example:
        >>> from regard.planning import Chip
        >>> laptop = Chip("laptop", {"float32": 2e11}, 8e9, 3e10, 1, 1, 1e10, 1e9, {}, platform="cpu")
        >>> laptop.flops["float32"] / laptop.memory_bandwidth  # FLOPs per byte at which both take as long
        6.666666666666667
    """

    name: str
    """Name on the command line."""
    flops: Mapping[str, float]
    """Floating-point operations per second in matrix products, by the dtype that is multiplied."""
    memory_bytes: float
    """Memory of one device."""
    memory_bandwidth: float
    """Bandwidth of a device's own memory."""
    devices_per_host: int
    """Devices in one machine: one process each machine."""
    near_devices: int
    """Devices that the fast links join: those of a host, or of a pod."""
    near_bandwidth: float
    """Bandwidth of the fast links: all those of a device, or on a torus one link."""
    far_bandwidth: float
    """Bandwidth of the network, per device."""
    sources: Mapping[str, str]
    """Publications of the figures of compute, memory, links and network."""
    platform: str = "gpu"
    """JAX's name of its platform, whose compiler makes its programs: gpu, tpu or cpu."""
    torus: bool = False
    """True if the fast links go to neighbours alone, and not through a switch."""
    shared: bool = False
    """True if the figures are those of a host, which its devices share."""

    def __post_init__(self) -> None:
        figures = {f"flops[{dtype!r}]": rate for dtype, rate in self.flops.items()}
        names = "memory_bytes memory_bandwidth devices_per_host near_devices near_bandwidth far_bandwidth"
        for name, figure in {**figures, **{name: getattr(self, name) for name in names.split()}}.items():
            if not read_number(name, figure) > 0:
                raise ValueError(f"{name}: expected a number above 0, got {figure}")
        if self.platform not in DEFAULTS:
            raise ValueError(f"platform: expected one of {', '.join(DEFAULTS)}, got {self.platform!r}")

    def name_source(self, figure: str) -> str:
        """Say where a figure is published, as a sentence."""
        return f"{self.sources.get(figure, 'Given')}."

    def divide(self, devices: int) -> Chip:
        """Return what each of so many devices has: of a host that they share, its part."""
        if not self.shared:
            return self
        shared = ("memory_bytes", "memory_bandwidth", "near_bandwidth", "far_bandwidth")
        parts = {name: getattr(self, name) / devices for name in shared}
        flops = {dtype: rate / devices for dtype, rate in self.flops.items()}
        return replace(self, flops=flops, **parts)


# TFLOP/s of bfloat16, TF32 and float64; GB and TB/s of memory; GB/s of NVLink both ways; Gb/s of network.
_NVIDIA = """
name  bfloat16  tf32   float64  memory  bandwidth  nvlink  network
a100  312       156    19.5     80      2.039      600     200
h100  989.5     494.5  67       80      3.35       900     400
h200  989.5     494.5  67       141     4.8        900     400
b200  2250      1125   37       180     8.0        1800    400
"""
# Chips of a host, of a pod; TFLOP/s; GB and GB/s of memory; GB/s of all links both ways, their number; Gb/s.
_TPU = """
name  host  pod   bfloat16  memory  bandwidth  ici   ports  network
v5e   8     256   197       16      819        400   4      25
v5p   4     8960  459       95      2765       1200  6      50
v6e   8     256   918       32      1638       800   4      100
"""


def _read_rows(table: str, make: Callable[..., Chip]) -> list[Chip]:
    """Make a chip of every row below the head of a table."""
    rows = [line.split() for line in table.strip().splitlines()[1:]]
    return [make(name, *(float(word) if "." in word else int(word) for word in row)) for name, *row in rows]


def _nvidia(name: str, *figures: float) -> Chip:
    bfloat16, tf32, float64, memory, bandwidth, nvlink, network = figures
    sheet, guide = f"NVIDIA {name.upper()} data sheet", f"NVIDIA DGX {name.upper()} user guide"
    return Chip(
        name=name,
        flops={"bfloat16": bfloat16 * TERA, "float32": tf32 * TERA, "float64": float64 * TERA},
        memory_bytes=memory * GIGA,
        memory_bandwidth=bandwidth * TERA,
        devices_per_host=8,
        near_devices=8,
        near_bandwidth=nvlink / 2 * GIGA,
        far_bandwidth=network / 8 * GIGA,
        sources={
            "compute": f"{sheet}: without sparsity; float32 as TF32, which XLA multiplies by default",
            "memory": f"{sheet}, the SXM module",
            "links": f"{sheet}: NVLink {nvlink} GB/s, of which half in one direction",
            "network": f"{guide}: eight devices, a {network} Gb/s network adapter each",
        },
    )


def _tpu(name: str, host: int, pod: int, *figures: float) -> Chip:
    bfloat16, memory, bandwidth, ici, ports, network = figures
    page = f"Google Cloud documentation, TPU {name}"
    return Chip(
        name=name,
        # Products of float32 are made of bfloat16 ones: one of them by default.
        flops={"bfloat16": bfloat16 * TERA, "float32": bfloat16 * TERA},
        memory_bytes=memory * GIGA,
        memory_bandwidth=bandwidth * GIGA,
        devices_per_host=host,
        near_devices=pod,
        near_bandwidth=ici / ports / 2 * GIGA,
        far_bandwidth=network / 8 * GIGA,
        sources={
            "compute": f"{page}: bfloat16; float32 by the default precision, one pass of bfloat16",
            "memory": page,
            "links": f"{page}: {ici} GB/s in both directions over {ports} links, {pod} chips in a pod",
            "network": f"{page}: data centre network, {network:g} Gb/s per chip",
        },
        platform="tpu",
        torus=True,
    )


CHIPS = {chip.name: chip for chip in (*_read_rows(_NVIDIA, _nvidia), *_read_rows(_TPU, _tpu))}
"""Chips by name: their speed, memory and links, each with the source of its numbers."""


def find_chip(chip: str | Chip) -> Chip:
    """Return the chip of this name, measured if it is "cpu"; an error lists the others."""
    if isinstance(chip, Chip):
        return chip
    name = str(chip).lower()
    if name not in (*CHIPS, "cpu"):
        raise ValueError(f"chip: expected one of {', '.join(CHIPS)}, cpu, or a planning.Chip; got {chip!r}")
    return measure_host() if name == "cpu" else CHIPS[name]


def measure_host() -> Chip:
    """Measure what this machine's processor multiplies and reads per second; its JAX devices share that.

    Returns:
        A chip called "cpu", whose figures are those of the whole machine, until `plan` divides them.

    Example:
        >>> from regard import planning
        >>> planning.measure_host().flops["float32"] > 1e6
        True
    """
    device = jax.devices("cpu")[0]
    with jax.default_device(device):
        flops = {name: _multiply(name) for name in ("float32", "bfloat16")}
        numbers = jnp.ones(_NUMBERS, jnp.float32)
        size = numbers.nbytes
        # In place: pages that are new would be most of the time.
        bandwidth = 2 * size / _time(jax.jit(lambda x: x + 1, donate_argnums=0), numbers)
    return Chip(
        name="cpu",
        flops=flops,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        memory_bandwidth=bandwidth,
        devices_per_host=1 << 30,
        near_devices=1 << 30,
        near_bandwidth=bandwidth / 2,
        far_bandwidth=bandwidth / 2,
        sources={
            "compute": f"Measured now: products of {_SIDE} x {_SIDE}, best of {_REPEATS}",
            "memory": f"Measured now: {size >> 20} MiB read and written; size from the system",
            "links": "Copies in memory, each read and written",
            "network": "None: all devices are on this machine",
        },
        platform="cpu",
        shared=True,
    )


def _multiply(dtype: str) -> float:
    matrix = jnp.ones((_SIDE, _SIDE), dtype)
    # Divided by the side, a matrix of ones stays one.
    product = jax.jit(lambda a: (jnp.matmul(a, a, preferred_element_type=jnp.float32) / _SIDE).astype(dtype))
    return 2 * _SIDE**3 / _time(product, matrix)


def _time(function: Callable[[Any], Any], array: Any) -> float:
    """Return seconds of the fastest of a few calls, each on the last one's result: others run here, too."""
    array = jax.block_until_ready(function(array))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        array = jax.block_until_ready(function(array))
        times.append(time.perf_counter() - start)
    return min(times)


@dataclass(frozen=True)
class Line:
    """Devices along mesh axes: how many, and how many of them the fast links join."""

    size: int
    near: int


def hop_seconds(chip: Chip, line: Line, count: float, steps: int = 1) -> float:
    """Return seconds in which every device sends bytes to the one some steps further, by the slowest hop."""
    steps = min(steps % line.size, -steps % line.size)
    if steps == 0:
        return 0.0
    if line.near < line.size:
        return count / chip.far_bandwidth
    # On a torus the way further leads through the neighbours, whose links carry as much of others.
    return count * (steps if chip.torus else 1) / chip.near_bandwidth


def exchange_seconds(chip: Chip, line: Line, count: float) -> float:
    """Return seconds in which every device sends so many bytes in all, as many to each of the others."""
    if line.size == 1:
        return 0.0
    near = line.near
    each = count / (line.size - 1)
    far = each * (line.size - near) / chip.far_bandwidth
    close = each * (near - 1) / chip.near_bandwidth
    if chip.torus and near > 1:
        # Both directions of a ring, on which a message crosses a quarter of the devices on average.
        close *= max(near / 8 * near / (near - 1), 0.5)
    return max(far, close)


def sum_seconds(chip: Chip, line: Line, count: float) -> float:
    """Return seconds in which every device sends so many bytes in all to add arrays up, around a ring."""
    if line.size == 1:
        return 0.0
    if line.near < line.size:
        return count / chip.far_bandwidth
    return count / (chip.near_bandwidth * (2 if chip.torus else 1))
