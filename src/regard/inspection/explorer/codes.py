"""How the explorer's page carries arrays: bytes on a log or linear scale, differenced and deflated."""

from __future__ import annotations

import json
import zlib
from typing import Any

import numpy as np

OCTAVES = 24  # log8 reaches down to 2^-24
STEPS = 254  # between its codes 1 and 255
_PLAIN = {"u8": "u1", "u16": "<u2", "i32": "<i4", "f16": "<f2", "f32": "<f4"}

Entry = dict[str, Any]


def encode_log8(values: Any, unit: float = 1.0) -> np.ndarray:
    """Write non-negative numbers in a byte each, in steps of 6.8 %.

    code = 0 for 0, else clip(round(255 + 254/24 log2(value / unit)), 1, 255)

    Args:
        values: numbers; those above the unit become the unit. What is not a number, or below 0, becomes 0.
        unit: the number that code 255 stands for.

    Returns:
        uint8 array of the same shape.

    Example:
        >>> from regard.inspection.explorer import codes
        >>> codes.encode_log8([0.0, 1e-9, 0.5, 1.0]).tolist()
        [0, 1, 244, 255]
    """
    values = np.asarray(values, np.float64) / unit
    positive = values > 0
    logs = np.log2(np.where(positive, values, 1.0))
    steps = np.clip(np.rint(255 + STEPS / OCTAVES * logs), 1, 255)
    return np.where(positive, steps, 0).astype(np.uint8)


def decode_log8(codes: np.ndarray, unit: float = 1.0) -> np.ndarray:
    """Read what `encode_log8` wrote, right within half a step, 3.4 %.

    value = 0 for code 0, else unit 2^(24 (code - 255) / 254)

    Args:
        codes: uint8 array.
        unit: as in `encode_log8`.

    Returns:
        float64 array of the same shape.

    Example:
        >>> import numpy as np
        >>> from regard.inspection.explorer import codes
        >>> codes.decode_log8(np.array([0, 255], np.uint8), unit=2.0).tolist()
        [0.0, 2.0]
    """
    values = 2.0 ** (OCTAVES * (np.asarray(codes, np.float64) - 255) / STEPS)
    return np.where(np.asarray(codes) == 0, 0.0, unit * values)


def encode_linear8(values: Any, low: Any, high: Any) -> np.ndarray:
    """Write numbers between bounds in a byte each; 0 stands for what is not a number.

    code = 0 for NaN, else clip(round(1 + 254 (value - low) / (high - low)), 1, 255)

    Args:
        values: numbers `(..., n)`.
        low: the number of code 1, one or one per row `(..., 1)`.
        high: the number of code 255, likewise; where it is not above `low`, all codes are 1.

    Returns:
        uint8 array of the same shape.

    Example:
        >>> from regard.inspection.explorer import codes
        >>> codes.encode_linear8([0.0, 5.0, 10.0, float("nan")], 0.0, 10.0).tolist()
        [1, 128, 255, 0]
    """
    values = np.asarray(values, np.float64)
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    span = np.where(high > low, high - low, np.inf)
    known = ~np.isnan(values)
    steps = np.clip(np.where(known, values, low), low, np.maximum(low, high)) - low
    return np.where(known, np.rint(1 + STEPS * steps / span), 0).astype(np.uint8)


def decode_linear8(codes: np.ndarray, low: Any, high: Any) -> np.ndarray:
    """Read what `encode_linear8` wrote, right within (high - low) / 508.

    value = NaN for code 0, else low + (high - low) (code - 1) / 254

    Args:
        codes: uint8 array `(..., n)`.
        low: as in `encode_linear8`.
        high: likewise.

    Returns:
        float64 array of the same shape.

    Example:
        >>> import numpy as np
        >>> from regard.inspection.explorer import codes
        >>> codes.decode_linear8(np.array([1, 255, 0], np.uint8), -1.0, 1.0).tolist()
        [-1.0, 1.0, nan]
    """
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    steps = (np.asarray(codes, np.float64) - 1) / STEPS
    return np.where(np.asarray(codes) == 0, np.nan, low + np.maximum(high - low, 0) * steps)


def pack(values: Any, code: str) -> tuple[Entry, bytes]:
    """Write an array as an entry of the page's list of chunks, and the chunk's bytes.

    Args:
        values: an array; with code "json", whatever `json.dumps` takes.
        code: "log8", "linear8" (each row of the last axis between its own bounds), "json", or the dtype to
            keep: "u8", "u16", "i32", "f16", "f32", little endian.

    Returns:
        The entry: dtype, shape, code and bytes (their number before deflate); low and high of linear8, one
        number or one per row; and, where it is so, delta (each row differenced modulo 256) and deflate
        (the zlib format). Then the bytes, the shortest of these ways.

    Raises:
        ValueError: another code.

    Example:
        >>> from regard.inspection.explorer import codes
        >>> entry, data = codes.pack([[0.5, 0.25]], "f16")
        >>> entry, data.hex()
        ({'dtype': 'f16', 'shape': [1, 2], 'code': 'plain', 'bytes': 4}, '00380034')
    """
    if code == "json":
        text = json.dumps(values, ensure_ascii=True, separators=(",", ":")).encode()
        return _shortest({"dtype": "json", "shape": [], "code": "plain"}, [({}, text)])
    array = np.asarray(values)
    entry: Entry = {"dtype": code, "shape": list(array.shape), "code": "plain"}
    if code == "log8":
        entry |= {"dtype": "u8", "code": "log8"}
        array = encode_log8(array)
    elif code == "linear8":
        low, high = _bounds(array)
        entry |= {"dtype": "u8", "code": "linear8", "low": low.tolist(), "high": high.tolist()}
        array = encode_linear8(array, low[..., None], high[..., None])
    elif code in _PLAIN:
        array = array.astype(_PLAIN[code])
    else:
        known = ", ".join(["log8", "linear8", "json", *_PLAIN])
        raise ValueError(f"code: expected one of {known}; got {code!r}")
    ways = [({}, array.tobytes())]
    if array.dtype == np.uint8 and array.ndim:
        ways.append(({"delta": True}, np.diff(array, axis=-1, prepend=np.uint8(0)).tobytes()))
    return _shortest(entry, ways)


def unpack(entry: Entry, data: bytes) -> Any:
    """Read a chunk: the mirror of what the page does.

    Args:
        entry: of `pack`.
        data: likewise.

    Returns:
        What json wrote; else an array: float64 from log8 and linear8, or of the kept dtype.

    Example:
        >>> from regard.inspection.explorer import codes
        >>> codes.unpack(*codes.pack([1.0, 0.0], "log8")).tolist()
        [1.0, 0.0]
    """
    data = zlib.decompress(data) if entry.get("deflate") else data
    if entry["dtype"] == "json":
        return json.loads(data)
    array = np.frombuffer(data, _PLAIN[entry["dtype"]]).reshape(entry["shape"])
    if entry.get("delta"):
        array = np.add.accumulate(array, axis=-1, dtype=np.uint8)
    if entry["code"] == "log8":
        return decode_log8(array, entry.get("unit", 1.0))
    if entry["code"] == "linear8":
        return decode_linear8(array, *(np.asarray(entry[name])[..., None] for name in ("low", "high")))
    return array


def _shortest(entry: Entry, ways: list[tuple[Entry, bytes]]) -> tuple[Entry, bytes]:
    raw = ways[0][1]
    entry = {**entry, "bytes": len(raw)}
    found = entry, raw
    for more, way in ways:
        deflated = zlib.compress(way, 9)
        if len(deflated) < len(found[1]):
            found = {**entry, **more, "deflate": True}, deflated
    return found


def _bounds(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least and largest number of each row, as the shortest decimals that are the same in float32."""
    known = np.isfinite(array)
    low, high = (
        np.where(known.any(-1), reduce(np.where(known, array, rest), axis=-1, initial=rest), 0.0)
        for reduce, rest in ((np.min, np.inf), (np.max, -np.inf))
    )
    return _short(low), _short(high)


def _short(numbers: np.ndarray) -> np.ndarray:
    flat = [float(str(np.float32(number))) for number in numbers.ravel()]
    return np.asarray(flat, np.float64).reshape(numbers.shape)
