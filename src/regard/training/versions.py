"""The versions that decide the bits of a run, which config.json records."""

import importlib.metadata
import platform
from collections.abc import Mapping

PACKAGES = ("regard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def read_versions() -> dict[str, str]:
    """Return the versions that decide the bits of a run."""
    installed = {package: version for package in PACKAGES if (version := find_version(package))}
    return {"python": platform.python_version()} | installed


def find_version(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compare_versions(recorded: Mapping[str, str]) -> str | None:
    """Return a sentence about packages that changed since a run began, or None.

    Example:
        >>> compare_versions(read_versions() | {"numpy": "1.0"})  # doctest: +ELLIPSIS
        'begun under other versions, so bits may differ: numpy 1.0 -> ...'
    """
    now = read_versions().items()
    changed = [f"{name} {recorded.get(name)} -> {new}" for name, new in now if recorded.get(name) != new]
    return f"begun under other versions, so bits may differ: {', '.join(changed)}" if changed else None
