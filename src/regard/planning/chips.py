"""Chips: what a device computes, holds and sends per second, each figure with where it is published."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

GB, TB = 1e9, 1e12
TERA = 1e12


@dataclass(frozen=True)
class Chip:
    """A kind of device and the links it has; bandwidths are bytes per second in one direction.

    Example:
        >>> from regard.planning import Chip
        >>> laptop = Chip("laptop", {"float32": 2e11}, 8e9, 3e10, 1, 1, 1e10, 1e9, {"compute": "A guess"})
        >>> laptop.flops["float32"] / laptop.memory_bandwidth  # FLOPs per byte at which both take as long
        6.666666666666667
    """

    name: str
    """How it is called on the command line."""
    flops: Mapping[str, float]
    """Floating-point operations per second in matrix products, by the dtype that is multiplied."""
    memory_bytes: float
    """What one device holds."""
    memory_bandwidth: float
    """Of the device's own memory."""
    devices_per_host: int
    """Devices in one machine: one process each machine."""
    near_devices: int
    """Devices that the fast links join: those of a host, or of a pod."""
    near_bandwidth: float
    """Over the fast links: of one device in all, or on a torus of one link."""
    far_bandwidth: float
    """Over the network, per device."""
    sources: Mapping[str, str]
    """Where figures are published: of compute, memory, links and network."""
    torus: bool = False
    """Whether the fast links go to neighbours alone, and not through a switch."""
    shared: bool = False
    """Whether the figures for compute and memory bandwidth are those of a host, which its devices share."""

    def name_source(self, figure: str) -> str:
        """Where a figure is published, as a sentence."""
        return f"{self.sources.get(figure, 'Given')}."

    def divide(self, devices: int) -> Chip:
        """What each of so many devices has of a host that they share."""
        return dataclasses.replace(
            self,
            flops={dtype: rate / devices for dtype, rate in self.flops.items()},
            memory_bytes=self.memory_bytes / devices,
            memory_bandwidth=self.memory_bandwidth / devices,
            near_bandwidth=self.near_bandwidth / devices,
            far_bandwidth=self.far_bandwidth / devices,
        )


_NVIDIA_NETWORK = "NVIDIA DGX {} user guide: eight devices, a {} Gb/s network adapter each"
_NVLINK = "NVIDIA {} data sheet: NVLink {} GB/s, of which half in one direction"
_DENSE = "NVIDIA {} data sheet: without sparsity; float32 as TF32, which XLA multiplies by default"


def _nvidia(
    name: str,
    system: str,
    bfloat16: float,
    tf32: float,
    float64: float,
    memory: float,
    bandwidth: float,
    nvlink: int,
    network: int,
) -> Chip:
    title = name.upper()
    return Chip(
        name=name,
        flops={"bfloat16": bfloat16 * TERA, "float32": tf32 * TERA, "float64": float64 * TERA},
        memory_bytes=memory * GB,
        memory_bandwidth=bandwidth * TB,
        devices_per_host=8,
        near_devices=8,
        near_bandwidth=nvlink / 2 * GB,
        far_bandwidth=network / 8 * GB,
        sources={
            "compute": _DENSE.format(title),
            "memory": f"NVIDIA {title} data sheet, the SXM module",
            "links": _NVLINK.format(title, nvlink),
            "network": _NVIDIA_NETWORK.format(system, network),
        },
    )


def _tpu(
    name: str,
    bfloat16: float,
    memory: float,
    bandwidth: float,
    host: int,
    pod: int,
    ici: int,
    ports: int,
    network: float,
) -> Chip:
    page = f"Google Cloud documentation, TPU {name}"
    return Chip(
        name=name,
        # Products of float32 are made of bfloat16 ones: one of them by default.
        flops={"bfloat16": bfloat16 * TERA, "float32": bfloat16 * TERA},
        memory_bytes=memory * GB,
        memory_bandwidth=bandwidth * GB,
        devices_per_host=host,
        near_devices=pod,
        near_bandwidth=ici / ports / 2 * GB,
        far_bandwidth=network / 8 * GB,
        sources={
            "compute": f"{page}: bfloat16; float32 by the default precision, one pass of bfloat16",
            "memory": page,
            "links": f"{page}: {ici} GB/s in both directions over {ports} links, {pod} chips in a pod",
            "network": f"{page}: data centre network, {network:g} Gb/s per chip",
        },
        torus=True,
    )


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _nvidia("a100", "A100", 312, 156, 19.5, 80, 2.039, 600, 200),
        _nvidia("h100", "H100", 989.5, 494.5, 67, 80, 3.35, 900, 400),
        _nvidia("h200", "H200", 989.5, 494.5, 67, 141, 4.8, 900, 400),
        _nvidia("b200", "B200", 2250, 1125, 37, 180, 8.0, 1800, 400),
        _tpu("v5e", 197, 16, 819, 8, 256, 400, 4, 25),
        _tpu("v5p", 459, 95, 2765, 4, 8960, 1200, 6, 50),
        _tpu("v6e", 918, 32, 1638, 8, 256, 800, 4, 100),
    )
}


def find_chip(name: str) -> Chip:
    """The chip of this name; an error lists the others."""
    chip = CHIPS.get(name.lower())
    if chip is None:
        known = ", ".join([*CHIPS, "cpu"])
        raise ValueError(f"chip: expected one of {known}, or a planning.Chip; got {name!r}")
    return chip
