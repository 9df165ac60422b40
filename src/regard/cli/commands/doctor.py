"""`regard doctor`: the facts that a bug report needs."""

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from regard.cli.console import Console
from regard.cli.declaration import Command
from regard.loading import remedy
from regard.training.run_configs import find_version

PACKAGES = ("regard", "jax", "jaxlib", "numpy", "jaxtyping")
# What each optional package gives, and the extra that installs it.
OPTIONAL = {
    "flax": ("layers and models", "models"),
    "optax": ("training", "train"),
    "orbax-checkpoint": ("checkpoints", "train"),
    "scikit-learn": ("the digits task", "train"),
    "matplotlib": ("figures", "look"),
    "safetensors": ("published weights", "weights"),
    "tokenizers": ("published weights", "weights"),
}
SETTINGS = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "JAX_THREEFRY_PARTITIONABLE")
SETTINGS += ("XLA_FLAGS", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Doctor(Command):
    """Print versions, devices, backends and optional packages, for bug reports.

    Example: regard doctor
    """

    EXTRA = None

    json: bool = False
    """One JSON object instead of text."""

    def run(self, console: Console) -> int:
        """Print what is installed, what runs where, and what is missing; always succeed."""
        facts = collect_facts()
        if self.json:
            sys.stdout.write(json.dumps(facts, indent=2) + "\n")
            return 0
        console.note("system", f"Python {facts['python']}, {facts['system']}, {facts['cpu_cores']} cores")
        packages = (f"{name} {version}" for name, version in facts["packages"].items())
        console.note("packages", ", ".join(packages))
        console.note("devices", "\n".join(facts["devices"]))
        for name, answer in facts["backends"].items():
            console.note("backend", f"{name}: {answer}")
        console.note("costs", facts["costs"])
        for name, entry in facts["optional"].items():
            status = entry["version"] or f"not installed; for {entry['gives']}: {entry['install']}"
            console.note("optional", f"{name} {status}")
        for name, value in facts["settings"].items():
            console.note("setting", f"{name}={value}")
        return 0


def collect_facts() -> dict[str, Any]:
    """Collect everything that is said, as plain values."""
    import jax

    from regard import explain
    from regard.engine.dispatch.registry import BACKENDS
    from regard.engine.flash.measurements import describe_costs

    def list_devices() -> list[str]:
        return [f"{device.id}: {device.device_kind} ({device.platform})" for device in jax.devices()]

    def ask_backend(name: str) -> str:
        example = jax.ShapeDtypeStruct((1, 2, 128, 64), "bfloat16")
        explain(example, example, example, backend=name)
        return "serves a plain call"

    optional = {
        name: {"version": find_version(name), "gives": gives, "install": remedy(extra)}
        for name, (gives, extra) in OPTIONAL.items()
    }
    devices = _answer(list_devices, "none: ")
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "packages": {name: find_version(name) for name in PACKAGES},
        "devices": [devices] if isinstance(devices, str) else devices,
        "backends": {name: _answer(partial(ask_backend, name)) for name in BACKENDS},
        "costs": _answer(describe_costs, "unknown: "),
        "optional": optional,
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def _answer(ask: Callable[[], Any], failure: str = "") -> Any:
    """Return an answer, or why there is none: a broken driver is what people run the doctor for."""
    try:
        return ask()
    except RuntimeError as error:  # also a NotImplementedError, where a backend refuses
        return f"{failure}{error}"
