"""The machine that numbers were measured on: never its name, nor a path."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("regard", "jax", "jaxlib", "numpy", "flax", "torch", "tokamax")


def describe_machine() -> dict[str, Any]:
    """Return processor, devices and versions, as plain values."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": read_cpu_model(),
        "cores": os.cpu_count(),
        "devices": [f"{device.platform}: {device.device_kind}" for device in jax.devices()],
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _find_version(name)) is not None},
    }


def read_cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _find_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
