"""Files of traces: a zip of plain data and plain arrays, checked before it is believed. No code is in it."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

FORMAT, VERSION = "regard-trace", 2
MOST_BYTES = 4 * 2**30  # of the arrays of a file, unless the caller says otherwise

_MOST_META = 64 * 2**20
_PLAIN = ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64")
_TYPES = {**{name: np.dtype(name) for name in _PLAIN}, "bfloat16": np.dtype(jnp.bfloat16)}
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same trace makes the same bytes


def write_archive(path: Any, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a file of a trace, whole or not at all.

    Args:
        path: of the file; an older file of a trace is replaced.
        meta: plain data for JSON.
        arrays: by names of letters and digits; any of the dtypes of a call.

    Returns:
        The path.

    Raises:
        FileExistsError: something else lies at the path.
        FileNotFoundError: its folder does not exist.
    """
    path = Path(path)
    _check_target(path)
    table = {name: _describe(array) for name, array in arrays.items()}
    text = json.dumps(
        {"format": FORMAT, "version": VERSION, "arrays": table, "trace": meta},
        sort_keys=True,
        allow_nan=False,
        separators=(",", ":"),
    )
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.draft")
    try:
        with draft.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
            archive.writestr(_entry("meta.json"), text, zipfile.ZIP_DEFLATED)
            for name, array in arrays.items():
                # Numbers such as queries have no pattern to be compressed by; one in eight bytes is tried.
                with archive.open(_entry(f"arrays/{name}", _method(array)), "w", force_zip64=True) as member:
                    member.write(_bytes(array))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path


def read_archive(path: Any, max_bytes: int = MOST_BYTES) -> tuple[Any, dict[str, np.ndarray]]:
    """Read what `write_archive` wrote, and nothing else.

    Args:
        path: of the file.
        max_bytes: how large its arrays may be, all together; a larger file is refused before they are read.

    Returns:
        The plain data, yet to be checked, and the arrays.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is cut short, damaged, of another kind or version, too large, or has members
            that do not fit its table.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = _list(path, archive)
            head = _head(path, archive, members)
            table = _check_table(path, head.get("arrays"), members, max_bytes)
            arrays = {
                name: _read(path, archive, members[f"arrays/{name}"], *entry) for name, entry in table.items()
            }
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        _refuse(path, f"it is no zip, cut short or damaged ({error})")
    return head.get("trace"), arrays


def _entry(name: str, method: int = zipfile.ZIP_DEFLATED) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _LONG_AGO)
    entry.compress_type = method
    return entry


def _method(array: np.ndarray) -> int:
    sample = _bytes(np.ascontiguousarray(array).reshape(-1)[: 1 << 14])
    pays = len(zlib.compress(sample, 1)) < 0.8 * len(sample)
    return zipfile.ZIP_DEFLATED if pays else zipfile.ZIP_STORED


def _bytes(array: np.ndarray) -> bytes:
    raw = np.ascontiguousarray(array).view(_stored(array.dtype))
    return raw.astype(raw.dtype.newbyteorder("<"), copy=False).tobytes()


def _stored(dtype: np.dtype) -> np.dtype:
    """The dtype of the bytes: NumPy itself does not know bfloat16."""
    return np.dtype(np.uint16) if dtype == _TYPES["bfloat16"] else dtype


def _describe(array: np.ndarray) -> dict[str, Any]:
    name = array.dtype.name
    if _TYPES.get(name) != array.dtype.newbyteorder("=") and name != "bfloat16":
        raise TypeError(f"arrays: expected one of {', '.join(_TYPES)}, got {array.dtype}")
    return {"dtype": name, "shape": list(array.shape), "crc32": zlib.crc32(_bytes(array))}


def _check_target(path: Path) -> None:
    if not path.exists():
        if not path.parent.is_dir():
            raise FileNotFoundError(f"path: expected a folder at {path.parent}, there is none; make it first")
        return
    try:
        with zipfile.ZipFile(path) as archive:
            _head(path, archive, _list(path, archive), any_version=True)
    except (ValueError, OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError):
        raise FileExistsError(
            f"path: expected nothing, or a trace that may be replaced, at {path}; something else is there."
            " Choose another name, or remove it first"
        ) from None


def _refuse(path: Path, reason: str) -> NoReturn:
    raise ValueError(f"path: expected a trace that Trace.save wrote at {path}: {reason}")


def _list(path: Path, archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    members = {info.filename: info for info in archive.infolist()}
    if len(members) != len(archive.infolist()):
        _refuse(path, "two members have one name")
    if "meta.json" not in members:
        _refuse(path, "it is a zip of another kind, without meta.json")
    return members


def _head(
    path: Path, archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], any_version: bool = False
) -> dict[str, Any]:
    info = members["meta.json"]
    if info.file_size > _MOST_META:
        _refuse(path, f"meta.json has {info.file_size} bytes, more than the {_MOST_META} that are read")

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        head = json.loads(archive.read(info).decode("utf-8"), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"meta.json does not read as JSON ({error})")
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        _refuse(path, "it is a zip of another kind")
    if not any_version and (type(head.get("version")) is not int or head["version"] != VERSION):
        _refuse(path, f"its version is {head.get('version')!r}, and this library reads {VERSION}")
    return head


def _check_table(
    path: Path, table: Any, members: Mapping[str, zipfile.ZipInfo], max_bytes: int
) -> dict[str, tuple[np.dtype, tuple[int, ...], int]]:
    """Every array's dtype, shape and checksum; its size is known to be that of its member."""
    if not isinstance(table, dict):
        _refuse(path, "its table of arrays is missing")
    strange = set(members) - {"meta.json"} - {f"arrays/{name}" for name in table}
    if strange:
        _refuse(path, f"it has members that its table does not name: {sorted(strange)[:3]}")
    found, total = {}, 0
    for name, entry in table.items():
        if not re.fullmatch(r"[a-z0-9_]{1,64}", name):
            _refuse(path, f"its table names an array {name[:80]!r}")
        info = members.get(f"arrays/{name}")
        if info is None:
            _refuse(path, f"array {name} is missing")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "crc32"}:
            _refuse(path, f"its table says of array {name}: {str(entry)[:80]}")
        shape, dtype = entry["shape"], _TYPES.get(str(entry["dtype"]))
        if dtype is None:
            _refuse(path, f"array {name} has the unknown dtype {str(entry['dtype'])[:80]!r}")
        sizes = isinstance(shape, list) and len(shape) <= 8
        if not sizes or not all(type(size) is int and 0 <= size < 2**48 for size in shape):
            _refuse(path, f"array {name} has the shape {str(shape)[:80]}")
        expected = math.prod(shape) * dtype.itemsize
        if info.file_size != expected:
            _refuse(path, f"array {name} has {info.file_size} bytes; {dtype} {shape} has {expected}")
        total += expected
        found[name] = (dtype, tuple(shape), entry["crc32"])
    if total > max_bytes:
        _refuse(path, f"its arrays have {total} bytes, more than max_bytes = {max_bytes}; pass a larger one")
    return found


def _read(
    path: Path,
    archive: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    dtype: np.dtype,
    shape: tuple[int, ...],
    crc32: Any,
) -> np.ndarray:
    with archive.open(info) as member:
        data = member.read(info.file_size)
        if len(data) != info.file_size or member.read(1):
            _refuse(path, f"{info.filename} has another length than it says")
    if zlib.crc32(data) != crc32:
        _refuse(path, f"{info.filename} does not have the checksum of the table")
    if dtype.kind == "b" and data.translate(None, b"\x00\x01"):
        _refuse(path, f"{info.filename} holds other bytes than 0 and 1")
    raw = np.frombuffer(data, _stored(dtype).newbyteorder("<"))
    return raw.astype(_stored(dtype), copy=False).view(dtype).reshape(shape)
