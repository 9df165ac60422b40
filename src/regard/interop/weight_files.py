"""Tensors in safetensors files, one at a time: nothing in such a file can run, and nothing else is opened."""

import difflib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from regard.paths import read_object, read_path

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Names of element types in a file's header.
DTYPES = {
    "F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16), "I64": np.dtype(np.int64), "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16), "I8": np.dtype(np.int8), "U8": np.dtype(np.uint8), "BOOL": np.dtype(np.bool_),
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
# A zip archive, as torch.save writes, and the opcode that starts a pickle of protocol 2 and later.
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class WeightFileError(ValueError):
    """A file of weights that is absent, damaged, or of a kind that is not read."""


@dataclass(frozen=True)
class Stored:
    """The file, shape and element type of a stored tensor, known without reading it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """Element type as the file names it, such as "F32" or "BF16"."""


class WeightFiles(dict[str, Stored]):
    """The tensors of one or several safetensors files by name; `read` fetches one."""

    def __init__(self, tensors: Mapping[str, Stored], handles: Mapping[Path, Any]):
        super().__init__(tensors)
        self.handles = dict(handles)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor; bfloat16 as the NumPy dtype of ml_dtypes."""
        if name not in self:
            near = difflib.get_close_matches(name, self, n=1, cutoff=0.0)
            hint = f" (nearest: {near[0]})" if near else ""
            raise KeyError(f"{name}: no such tensor among {len(self)}{hint}")
        stored = self[name]
        if stored.dtype not in DTYPES:
            raise WeightFileError(
                f"{stored.path}: tensor {name} has element type {stored.dtype}; expected one of"
                f" {', '.join(DTYPES)}; convert it before loading"
            )
        return self.handles[stored.path].get_tensor(name)


def open_weights(path: str | os.PathLike[str]) -> WeightFiles:
    """Look into safetensors files without reading their tensors.

    The path is that of a file, of an index of shards, or of a folder with model.safetensors or, else, its
    index. Reference: https://github.com/huggingface/safetensors, section "Format".
    """
    path = _find(read_path("path", path))
    return _open_shards(path) if path.name.endswith(".json") else _open_file(path)


def _find(path: Path) -> Path:
    """Return the safetensors file or index that the path means."""
    if path.is_dir():
        for name in (SINGLE, INDEX):
            if (path / name).is_file():
                return path / name
        names = sorted(file.name for file in path.iterdir())
        pickles = [name for name in names if Path(name).suffix in PICKLES]
        content = ", ".join(pickles or names) or "nothing"
        reason = f", which is pickle: {_PICKLE_REASON}" if pickles else ""
        raise WeightFileError(f"{path}: expected {SINGLE} or {INDEX}; found {content}{reason}")
    if path.suffix in PICKLES:
        raise WeightFileError(f"{path}: a pickle file: {_PICKLE_REASON}")
    if not path.is_file():
        raise WeightFileError(f"{path}: expected a safetensors file or a folder with one, found nothing")
    return path


_PICKLE_REASON = (
    "opening one runs whatever code it holds, so it is never opened here; convert it where you trust it, with"
    " safetensors.torch.save_file or save_pretrained(..., safe_serialization=True)"
)


def _open_file(path: Path) -> WeightFiles:
    """Open one file, whose header is checked."""
    from safetensors import SafetensorError, safe_open

    with open(path, "rb") as file:
        start = file.read(9)
    # A length of the header may begin as a pickle does; the header itself begins with a brace.
    if start.startswith(_PICKLE_STARTS) and start[8:] != b"{":
        raise WeightFileError(f"{path}: named like a safetensors file but a pickle: {_PICKLE_REASON}")
    try:
        handle = safe_open(path, "numpy")
    except SafetensorError as error:
        raise WeightFileError(
            f"{path}: expected a whole safetensors file, got {path.stat().st_size} bytes that are not one"
            f" ({error}); it is truncated or damaged: fetch it again"
        ) from error
    views = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (not a mapping)
    tensors = {n: Stored(path, tuple(view.get_shape()), view.get_dtype()) for n, view in views.items()}
    return WeightFiles(tensors, {path: handle})


def _open_shards(index: Path) -> WeightFiles:
    """Open the files that an index names, each tensor from the file the index gives."""
    try:
        file_names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # A name with folders in it could point anywhere.
        files = {index.parent / Path(file_name).name for file_name in file_names.values()}
        absent = sorted(file.name for file in files if not file.is_file())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightFileError(
            f"{index}: expected JSON with a weight_map of tensor and file names ({error!r})"
        ) from error
    if absent:
        raise WeightFileError(f"{index}: names files that are not beside it: {', '.join(absent)}")
    held = {file: _open_file(file) for file in sorted(files)}
    tensors = {}
    for name, file_name in file_names.items():
        file = index.parent / Path(file_name).name
        if name not in held[file]:
            raise WeightFileError(f"{index}: expected tensor {name} in {file.name}, which does not hold it")
        tensors[name] = held[file][name]
    return WeightFiles(tensors, {file: opened.handles[file] for file, opened in held.items()})


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to write: its shape and dtype are known before it is computed."""

    shape: tuple[int, ...]
    dtype: np.dtype
    compute: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def _list_shards(index: Path) -> set[str]:
    """Return the names of the files that an index lists; none where it cannot be read."""
    listed = read_object(index).get("weight_map")
    return {file for file in listed.values() if isinstance(file, str)} if isinstance(listed, dict) else set()


def write_weights(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray | LazyTensor],
    *,
    force: bool = False,
    shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write tensors as safetensors, one at a time, complete or not at all.

    Files are written under temporary names beside their place and renamed when all are complete. Returns the
    path of the file, or of the index where `shard_bytes`, as in `huggingface.save`, asks for several. The
    default `metadata`, {"format": "pt"}, is what transformers requires.
    """
    path = read_path("path", path)
    if path.suffix != ".safetensors":
        raise WeightFileError(f"{path}: expected a name that ends in .safetensors")
    lazy = {name: _make_lazy(name, tensor) for name, tensor in tensors.items()}
    shards = _divide(lazy, shard_bytes)
    index = path.with_name(path.name + ".index.json")
    files = {path: lazy}
    if len(shards) > 1:
        end = f"of-{len(shards):05d}.safetensors"
        files = {path.with_name(f"{path.stem}-{n:05d}-{end}"): shard for n, shard in enumerate(shards, 1)}
    written = [*files] if len(shards) == 1 else [*files, index]
    # A file left beside an index, or the other way round, would be read in the new one's place.
    taken = sorted(file.name for file in {*written, path, index} if file.exists())
    if taken and not force:
        raise WeightFileError(
            f"{path.parent}: {', '.join(taken)} exists already; choose another place, or pass force=True to"
            " replace it"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    name = re.compile(re.escape(path.stem) + r"-\d{5}-of-\d{5}\.safetensors")
    earlier = {path.with_name(file) for file in _list_shards(index) if name.fullmatch(file)}
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=path.parent) as draft:
        for file, held in files.items():
            _write_file(Path(draft) / file.name, held, {"format": "pt"} if metadata is None else metadata)
        if len(shards) > 1:
            file_of = {name: file.name for file, held in files.items() for name in held}
            total = sum(tensor.nbytes for tensor in lazy.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": file_of}, indent=2)
            (Path(draft) / index.name).write_text(text + "\n")
        for file in written:
            os.replace(Path(draft) / file.name, file)
    for file in {path, index, *earlier} - {*written}:
        file.unlink(missing_ok=True)
    return written[-1]


def _make_lazy(name: str, tensor: np.ndarray | LazyTensor) -> LazyTensor:
    """Return the tensor as a lazy one of a dtype that can be written."""
    if not isinstance(tensor, LazyTensor):
        array = np.asarray(tensor)
        tensor = LazyTensor(array.shape, array.dtype, lambda: array)
    if tensor.dtype not in _CODES:
        raise WeightFileError(
            f"tensors: expected dtypes {', '.join(str(dtype) for dtype in _CODES)}; {name} has {tensor.dtype}"
        )
    return tensor


def _divide(tensors: Mapping[str, LazyTensor], most: int | None) -> list[dict[str, LazyTensor]]:
    """Divide tensors, in their order, into files of at most so many bytes."""
    shards: list[dict[str, LazyTensor]] = [{}]
    for name, tensor in tensors.items():
        filled = sum(held.nbytes for held in shards[-1].values())
        if most is not None and shards[-1] and filled + tensor.nbytes > most:
            shards.append({})
        shards[-1][name] = tensor
    return shards


def _write_file(path: Path, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> None:
    """Write one file: the header's length in 8 bytes, the header, then the bytes of every tensor."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, tensor in tensors.items():
        span = [offset, offset + tensor.nbytes]
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            array = np.ascontiguousarray(tensor.compute(), dtype=tensor.dtype.newbyteorder("<"))
            if array.nbytes != tensor.nbytes:
                raise WeightFileError(f"{name}: expected shape {tensor.shape}, computed {array.shape}")
            file.write(array.reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
