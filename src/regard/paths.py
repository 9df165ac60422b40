"""Paths of files and folders, read and checked, and files that are read or written whole. No JAX here."""

import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_path(name: str, path: Any) -> Path:
    """Return the path of a file or folder; raise for what is none, and for the address of an object store."""
    if not isinstance(path, str | os.PathLike):
        hint = "write where it lies, such as 'out/copy'"
        raise TypeError(f"{name}: expected str or PathLike, got {type(path).__name__}; {hint}")
    if refusal := describe_store(Path(path)):
        raise ValueError(f"{name}: {refusal}")
    return Path(path)


def describe_store(path: Path) -> str | None:
    """Return why a path is refused that is the address of an object store; None for any other.

    Example:
        >>> describe_store(Path("out/copy"))
    """
    # A path has one slash where the address had two; one letter is a drive of Windows.
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(?:/|$)(.*)", path.as_posix())
    return match and (
        f"expected a local file or folder, got {match[1]}://{match[2]}, the address of an object store;"
        " copy it there or back, or mount the bucket and give the folder where it is mounted"
    )


def find_file(directory: Path) -> Path | None:
    """Return the file that a directory would lie at or below; None where there may be one."""
    nearest = next((path for path in (directory, *directory.parents) if path.exists()), None)
    return None if nearest is None or nearest.is_dir() else nearest


def cache_folder() -> Path:
    """Return the folder of what can be made again, under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"


def name_final(path: Path) -> Path:
    """Return the path that a draft is moved to when it is whole; any other as it is.

    Example:
        >>> name_final(Path("out/.config.json.draft")).as_posix()
        'out/config.json'
    """
    draft = re.fullmatch(r"\.(.+?)(\.[0-9a-f]{8})?\.draft", path.name)
    return path.with_name(draft[1]) if draft else path


def read_object(path: Path) -> dict[str, Any]:
    """Read the object of a JSON file; an empty one where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside this one for a new file, which takes its place whole where the block ends well."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
