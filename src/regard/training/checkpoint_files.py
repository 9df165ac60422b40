"""The files of a checkpoint: listed with size and SHA-256 when written, checked before they are used.

A process that is alone takes the digests before the checkpoint appears, into `checkpoint.json`. Where there
are several, that lists sizes alone, so that saving takes no longer than writing; each process then takes the
digests of the files that it wrote, in the background, into `digests-PROCESS.json` beside it.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from regard.training.metrics import replace_text

FORMAT, DIVIDED_FORMAT = 1, 2  # with all digests, and with those of every process in a file of its own
INDEX = "checkpoint.json"
_DIGESTING = ThreadPoolExecutor(1, thread_name_prefix="digests")

Files = Mapping[str, tuple[int, str | None]]
"""The size and the SHA-256, if it was taken, of each file, by path in the checkpoint."""

Check = Callable[[Path, Files], None]
"""Raises a CheckpointError for the folder of a checkpoint that must not be used."""


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete, or belongs to something else."""


def write_index(
    draft: Path, step: int, kinds: Mapping[str, Any], record: Mapping[str, Any], *, divided: bool
) -> None:
    """Write checkpoint.json: arrays and files, with their digests unless the processes divide this work."""
    marks = {
        str(path.relative_to(draft)): [path.stat().st_size, None if divided else _digest(path)]
        for path in sorted(draft.rglob("*"))
        if path.is_file()
    }
    body = {"format": DIVIDED_FORMAT if divided else FORMAT, "step": step, "record": dict(record)}
    _write_sealed(draft / INDEX, body | {"arrays": dict(kinds), "files": marks})


def start_digests(path: Path, process: int) -> None:
    """Take the digests of what a process wrote of a checkpoint, in the background, after those before."""

    def take() -> None:
        with suppress(OSError, CheckpointError):  # it was dropped, or its sizes will have to do
            names = [name for name in read_index(path)["files"] if _find_writer(name) == process]
            digests = {name: _digest(path / name) for name in names}
            _write_sealed(path / f"digests-{process}.json", digests)

    _DIGESTING.submit(take)


def finish_digests() -> None:
    """Wait for the digests that this process takes in the background."""
    _DIGESTING.submit(lambda: None).result()


def read_index(path: Path) -> dict[str, Any]:
    """Read the body of checkpoint.json and the digests beside it; check all for what `load` reads."""
    body = _read_sealed(path, path / INDEX)
    version = body.get("format") if isinstance(body, dict) else None
    if _is_count(version) and version not in (FORMAT, DIVIDED_FORMAT):
        readable = f"{FORMAT} and {DIVIDED_FORMAT}"
        raise CheckpointError(f"{path / INDEX} has format {version}, this version of Regard reads {readable}")
    for expected, value in _list_faults(body):
        raise _damage_error(path / INDEX, expected, value)
    for file in sorted(path.glob("digests-*.json")):
        digests = _read_sealed(path, file)
        if not isinstance(digests, dict):
            raise _damage_error(file, "an object", digests)
        for name, digest in digests.items():
            if name not in body["files"] or not isinstance(digest, str):
                raise _damage_error(file, f"the SHA-256 of one of its files as {name!r}", digest)
            body["files"][name][1] = digest
    return body


def find_share(files: Files, process: int, count: int) -> list[str]:
    """Return the files that a process checks: what it wrote, or its share by size if others wrote them."""
    writers = {name: _find_writer(name) for name in files}
    if set(writers.values()) == set(range(count)):
        return [name for name in files if writers[name] == process]
    return sorted(files, key=lambda name: (files[name][0], name))[process::count]


def verify_files(path: Path, files: Files, names: list[str] | None = None) -> None:
    """Raise at the first file, of those named or all, that is missing, cut short or changed."""
    for name in files if names is None else names:
        (size, digest), file, cause = files[name], path / name, None
        try:
            if not file.is_file():
                problem = "is missing"
            elif file.stat().st_size != size:
                problem = f"has {file.stat().st_size} bytes, {size} were written"
            elif digest is not None and _digest(file) != digest:
                problem = "does not match the SHA-256 taken when it was written"
            else:
                continue
        except (OSError, ValueError) as error:  # ValueError: no file has such a name
            problem, cause = f"cannot be read ({error})", error
        raise CheckpointError(f"checkpoint {path} is damaged: {file} {problem}") from cause


def _find_writer(name: str) -> int:
    """Return the process that wrote a file; orbax names it, and the first one writes what is for all."""
    match = re.search(r"\bprocess_(\d+)\b", name)
    return int(match[1]) if match else 0


def _write_sealed(file: Path, body: Any) -> None:
    text = json.dumps(body, allow_nan=False)
    seal = hashlib.sha256(text.encode()).hexdigest()
    replace_text(file, f'{{"sha256": "{seal}", "body": {text}}}\n')


def _read_sealed(path: Path, file: Path) -> Any:
    """Read what `_write_sealed` wrote, and check it against its own digest."""
    try:
        sealed = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(sealed, dict) or sealed.keys() != {"body", "sha256"}:
            raise ValueError(f"expected an object of body and sha256, got {str(sealed)[:80]!r}")
        body = sealed["body"]
        if sealed["sha256"] != hashlib.sha256(json.dumps(body).encode()).hexdigest():
            raise ValueError("its contents do not match their SHA-256")
        return body
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a complete Regard checkpoint: it has no {file.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _damage_error(file: Path, what: str, value: Any) -> CheckpointError:
    return CheckpointError(f"{file} is damaged: expected {what}, got {str(value)[:80]!r}")


def _list_faults(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield what was expected in the body of checkpoint.json, and what is there."""
    body = body if isinstance(body, dict) else {}
    for name in ("format", "step"):
        if not _is_count(body.get(name)):
            yield f"a whole number as {name}", body.get(name)
    for name in ("record", "arrays", "files"):
        if not isinstance(body.get(name), dict):
            yield f"an object as {name}", body.get(name)
            return
    for name, kind in body["arrays"].items():
        shape, dtype = kind if isinstance(kind, list) and len(kind) == 2 else (None, None)
        if not (isinstance(shape, list) and all(map(_is_count, shape)) and _is_dtype(dtype)):
            yield f"a shape and a dtype as arrays[{name!r}]", kind
    digest_kind = str | None if body["format"] == DIVIDED_FORMAT else str
    for name, mark in body["files"].items():
        size, digest = mark if isinstance(mark, list) and len(mark) == 2 else (None, None)
        if not (_is_count(size) and isinstance(digest, digest_kind)):
            yield f"a size and a SHA-256 as files[{name!r}]", mark


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_dtype(name: Any) -> bool:
    try:
        dtype = jax.numpy.dtype(name) if isinstance(name, str) else np.dtype(object)
    except (TypeError, ValueError, SyntaxError):
        return False
    return any(jax.numpy.issubdtype(dtype, kind) for kind in (jax.numpy.number, jax.numpy.bool_))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
