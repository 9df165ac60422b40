"""A run's config.json: the entries that decide how it goes on, and versions."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regard.training.typed_json import read_record

FORMAT = 1
PACKAGES = ("regard", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclass(frozen=True)
class RunConfig:
    """The entries of a config.json; runs of older versions are without those that have defaults."""

    format: int
    task: str
    seed: int
    settings: dict[str, Any]
    versions: dict[str, str]
    kept: dict[str, str] = field(default_factory=dict)  # digests of the files that the task keeps, by name
    mesh: str | None = None
    outer: str | None = None
    continued_from: str | None = None


def read_config(config: Any) -> RunConfig:
    """Read the entries of a config.json; raise for another format, or an entry of another kind."""
    if isinstance(config, dict):
        if config.get("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got format {config.get('format')!r}")
        names = [entry.name for entry in dataclasses.fields(RunConfig)]
        config = {name: config[name] for name in names if name in config}
    return read_record(RunConfig, config, "config.json")


def compare_settings(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, str]:
    """Describe each setting in which a run differs from what is asked for; of another task, that alone.

    Example:
        >>> compare_settings({"task": "copy", "model": {"d_ff": 8}}, {"task": "copy", "model": {"d_ff": 16}})
        {'model.d_ff': 'it has 8, asked for 16'}
    """
    from flax.traverse_util import flatten_dict  # with JAX, which settings do without

    saved, asked = flatten_dict(dict(saved), sep="."), flatten_dict(dict(asked), sep=".")
    names = asked | saved if saved["task"] == asked["task"] else ["task"]
    pairs = {name: (saved.get(name), asked.get(name)) for name in names}
    return {name: f"it has {old!r}, asked for {new!r}" for name, (old, new) in pairs.items() if old != new}


def read_versions() -> dict[str, str]:
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
