"""Files of traces: a zip of JSON and NumPy arrays, checked before it is believed. No code is in it."""

import io
import json
import math
import re
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from regard.paths import read_path, replacing

FORMAT, VERSION = "regard-trace", 4
MOST_BYTES = 4 * 2**30  # of the arrays of a file, unless the caller says otherwise

_MOST_META = 64 * 2**20
_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same trace makes the same bytes
_MEMBER = re.compile(r"arrays/([a-z0-9_]{1,64})(\.bfloat16)?\.npy")  # NumPy itself does not know bfloat16


def write_archive(path: Any, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Path:
    """Write plain data and arrays, named by letters and digits, as a file of a trace, whole or not at all."""
    path = read_path("path", path)
    check_target(path)
    head = {"format": FORMAT, "version": VERSION, "trace": meta}
    text = json.dumps(head, sort_keys=True, allow_nan=False, separators=(",", ":"))
    with replacing(path) as draft, draft.open("xb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("meta.json", _LONG_AGO), text, zipfile.ZIP_DEFLATED)
        for name, array in arrays.items():
            short = array.dtype == jnp.bfloat16
            plain = np.asarray(array.view(np.uint16) if short else array, order="C")
            entry = _entry(f"arrays/{name}{'.bfloat16' * short}.npy", plain)
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, plain, (1, 0), allow_pickle=False)
    return path


def read_archive(path: Any, max_bytes: int = MOST_BYTES) -> tuple[Any, dict[str, np.ndarray]]:
    """Read what `write_archive` wrote and nothing else: the plain data, yet to be checked, and the arrays."""
    with _open(read_path("path", path)) as archive:
        head = _read_head(archive)
        version = head.get("version")
        if type(version) is not int or version != VERSION:
            raise _RefusedError(f"its version is {version!r}, and this library reads {VERSION}")
        infos = [info for info in archive.infolist() if info.filename != "meta.json"]
        strange = [info.filename for info in infos if not _MEMBER.fullmatch(info.filename)]
        if strange:
            raise _RefusedError(f"it has members that are no arrays: {strange[:3]}")
        total = sum(info.file_size for info in infos)
        if total > max_bytes:
            limit = f"max_bytes = {max_bytes}; pass more"
            raise _RefusedError(f"its arrays have {total} bytes, more than {limit}")
        return head.get("trace"), dict(_read_array(archive, info) for info in infos)


class _RefusedError(ValueError):
    """A reason why a file is no trace."""


@contextmanager
def _open(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the zip of a trace; whatever is wrong with it is a ValueError that names the file."""
    with path.open("rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        way = "is compressed in another way than Trace.save compresses"
                        raise _RefusedError(f"{info.filename} {way}")
                yield archive
        except Exception as error:  # of damaged zips, Python raises errors of any kind
            refused = isinstance(error, _RefusedError)
            reason = error if refused else f"it is no zip, cut short or damaged ({error})"
            raise ValueError(f"path: expected a trace that Trace.save wrote at {path}: {reason}") from None


def _entry(name: str, array: np.ndarray) -> zipfile.ZipInfo:
    """Return a member's entry, compressed where that saves a fifth: queries, say, have no pattern."""
    entry = zipfile.ZipInfo(name, _LONG_AGO)
    sample = array.reshape(-1)[: 1 << 14].tobytes()
    pays = len(zlib.compress(sample, 1)) < 0.8 * len(sample)
    entry.compress_type = zipfile.ZIP_DEFLATED if pays else zipfile.ZIP_STORED
    return entry


def check_target(path: Path) -> None:
    """Raise where there is anything but a trace, of whatever version, or no folder."""
    if not path.exists():
        if not path.parent.is_dir():
            raise FileNotFoundError(f"path: expected a folder at {path.parent}, there is none; make it first")
        return
    try:
        with _open(path) as archive:
            _read_head(archive)
    except (ValueError, OSError):
        expected = f"nothing, or a trace that may be replaced, at {path}"
        hint = "something else is there. Choose another name, or remove it first"
        raise FileExistsError(f"path: expected {expected}; {hint}") from None


def _read_head(archive: zipfile.ZipFile) -> dict[str, Any]:
    """Return the plain data of a trace of any version."""
    names = archive.namelist()
    if len(set(names)) != len(names):
        raise _RefusedError("two members have one name")
    if "meta.json" not in names:
        raise _RefusedError("it is a zip of another kind, without meta.json")
    info = archive.getinfo("meta.json")
    if info.file_size > _MOST_META:
        raise _RefusedError(f"meta.json has {info.file_size} bytes, more than the {_MOST_META} that are read")

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    try:
        head = json.loads(archive.read(info).decode("utf-8"), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"meta.json does not read as JSON ({error})") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise _RefusedError("it is a zip of another kind")
    return head


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[str, np.ndarray]:
    """Return the name and the array of a member; its header is checked before an array is made."""
    data = archive.read(info)
    if len(data) != info.file_size:
        raise _RefusedError(f"{info.filename} has another length than it says")
    file = io.BytesIO(data)
    try:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("it has another version")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, tokenize.TokenError) as error:
        raise _RefusedError(f"{info.filename} has no header of NumPy's ({error})") from None
    name, *marks, _ = Path(info.filename).name.split(".")
    strange = dtype.kind not in "biuf" or dtype.itemsize > 8 or dtype.byteorder == ">"
    if strange or (marks and dtype != np.uint16):
        raise _RefusedError(f"{info.filename} has the unknown dtype {dtype}")
    if is_fortran or min(shape, default=0) < 0 or len(shape) > 8:
        raise _RefusedError(f"{info.filename} has the shape {shape}, or another order")
    start = file.tell()
    size = len(data) - start
    if size != math.prod(shape) * dtype.itemsize:
        raise _RefusedError(f"{info.filename} has {size} bytes; {dtype} {shape} has another number")
    if dtype.kind == "b" and data[start:].translate(None, b"\x00\x01"):
        raise _RefusedError(f"{info.filename} holds other bytes than 0 and 1")
    array = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return name, array.view(jnp.bfloat16) if marks else array
