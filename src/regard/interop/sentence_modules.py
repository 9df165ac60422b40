"""Folders of sentence-transformers, whose modules.json says what runs after what, and where each lies."""

import json
from pathlib import Path


def find_transformer(directory: Path) -> Path:
    """Return the folder with config.json: in older folders of sentence-transformers, the first module's."""
    if (directory / "config.json").is_file():
        return directory
    return read_modules(directory).get("Transformer", directory)


def read_modules(directory: Path) -> dict[str, Path]:
    """Read which modules a folder of sentence-transformers has, and where; of another, none."""
    path = directory / "modules.json"
    if not path.is_file():
        return {}
    try:
        folders = {
            module["type"].rpartition(".")[2]: directory / module["path"]
            for module in json.loads(path.read_text(encoding="utf-8"))
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a list of modules, each with type and path; got {error!r}"
        ) from error
    for folder in folders.values():
        if not folder.resolve().is_relative_to(directory.resolve()):
            raise ValueError(f"{path}: expected folders in {directory}, got {folder}")
    return folders


def find_modules(directory: Path) -> dict[str, Path]:
    """Find the modules that a Transformer's folder belongs to: listed there or, in older ones, above."""
    for root in (directory, directory.parent):
        modules = read_modules(root)
        if "Transformer" in modules and modules["Transformer"].resolve() == directory.resolve():
            return modules
    return {}
