"""Folders that can hold a run, and the entries of its config.json that decide how it goes on."""

import re
from pathlib import Path
from typing import Any

FORMAT = 1
_KINDS = {
    "format": int,
    "task": str,
    "seed": int,
    "settings": dict,
    "versions": dict,
    "kept": dict,
    "mesh": str | None,
    "continued_from": str | None,
}
_OPTIONAL = {"kept": {}, "mesh": None, "continued_from": None}  # runs of older versions are without


def describe_store(directory: Path) -> str | None:
    """Return why a directory is refused that is the address of an object store; None for any other.

    Example:
        >>> describe_store(Path("out/copy"))
    """
    # A path has one slash where the address had two; one letter is a drive of Windows.
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/|$)(.*)", directory.as_posix())
    return match and (
        f"{match[1]}://{match[2]} is the address of an object store, and runs lie in folders: give a local "
        "one and copy it there or back, or mount the bucket and give the folder where it is mounted"
    )


def check_entries(config: Any) -> dict[str, Any]:
    """Return the entries of a config.json; those that may be missing are filled in.

    Raises:
        ValueError: when it is no object, has another format, or an entry of another kind.
    """
    if not isinstance(config, dict):
        raise ValueError(f"expected an object, got {str(config)[:80]!r}")
    config = _OPTIONAL | config
    if config.get("format") != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got format {config.get('format')!r}")
    for name, kind in _KINDS.items():
        value = config.get(name)
        sound = isinstance(value, kind) and not isinstance(value, bool)
        if sound and isinstance(value, dict) and name in ("versions", "kept"):
            sound = all(isinstance(text, str) for text in value.values())
        if not sound:
            raise ValueError(f"expected {name} as `begin` writes it, got {str(value)[:80]!r}")
    return config
