"""Codes of the page's arrays: bytes on a log or linear scale, differenced and deflated."""

import json
import math
import zlib
from typing import Any

import numpy as np

OCTAVES = 24  # log8 reaches down to 2^-24
STEPS = 254  # between its codes 1 and 255
_PLAIN = {"u8": "u1", "u16": "<u2", "i32": "<i4", "f16": "<f2", "f32": "<f4"}

Entry = dict[str, Any]


def encode_log8(values: Any) -> np.ndarray:
    """Write numbers in 0..1 in a byte each, in steps of 6.8 %; others become the nearest, and NaN 0.

    code = 0 for 0, else clip(round(255 + 254/24 log2(value)), 1, 255),  value = 2^(24 (code - 255) / 254)
    """
    values = np.asarray(values, np.float64)
    positive = values > 0
    logs = np.log2(np.where(positive, values, 1.0))
    steps = np.clip(np.rint(255 + STEPS / OCTAVES * logs), 1, 255)
    return np.where(positive, steps, 0).astype(np.uint8)


def encode_linear8(values: Any, low: Any, high: Any) -> np.ndarray:
    """Write numbers between bounds, one for all or one per row `(..., 1)`, in a byte each.

    code = 0 for NaN, else clip(round(1 + 254 (value - low) / (high - low)), 1, 255), or 1 if low >= high;
    value = low + (high - low) (code - 1) / 254
    """
    values = np.asarray(values, np.float64)
    low, high = np.asarray(low, np.float64), np.asarray(high, np.float64)
    span = np.where(high > low, high - low, np.inf)
    is_number = ~np.isnan(values)
    steps = np.clip(np.where(is_number, values, low), low, np.maximum(low, high)) - low
    return np.where(is_number, np.rint(1 + STEPS * steps / span), 0).astype(np.uint8)


def pack(values: Any, code: str) -> tuple[Entry, bytes]:
    """Write an array as an entry of the page's list of chunks, and the chunk's bytes.

    The code is "log8", "linear8" (each row of the last axis between its own bounds), "json", or the dtype to
    keep, little endian. The entry has dtype, shape, code and bytes (their number before deflate), low and
    high of linear8, one number or one per row, and where it is so delta (each row differenced modulo 256) and
    deflate (the zlib format). The bytes are the shortest of these ways.
    """
    if code == "json":
        return _shortest({"dtype": "json", "shape": [], "code": "plain"}, [({}, dump_json(values))])
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
        code_names = ", ".join(["log8", "linear8", "json", *_PLAIN])
        raise ValueError(f"code: expected one of {code_names}; got {code!r}")
    ways = [({}, array.tobytes())]
    if array.dtype == np.uint8 and array.ndim:
        ways.append(({"delta": True}, np.diff(array, axis=-1, prepend=np.uint8(0)).tobytes()))
    return _shortest(entry, ways)


def dump_json(values: Any) -> bytes:
    """Write JSON as browsers read it: null stands for NaN and infinities.

    Example:
        >>> from regard.inspection.explorer.codes import dump_json
        >>> dump_json({"loss": float("nan"), "next": [0.5]})
        b'{"loss":null,"next":[0.5]}'
    """
    text = json.dumps(_read_finite(values), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def _read_finite(values: Any) -> Any:
    """Return trees of lists and dicts, None in place of floats that are not finite."""
    if isinstance(values, dict):
        return {name: _read_finite(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [_read_finite(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _shortest(entry: Entry, ways: list[tuple[Entry, bytes]]) -> tuple[Entry, bytes]:
    raw = ways[0][1]
    entry = {**entry, "bytes": len(raw)}
    shortest = entry, raw
    for more, way in ways:
        deflated = zlib.compress(way, 6)  # 9 takes 3.4 times as long for 0.3 % less
        if len(deflated) < len(shortest[1]):
            shortest = {**entry, **more, "deflate": True}, deflated
    return shortest


def _bounds(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and largest number of each row, as the shortest decimals of their float32."""
    finite = np.isfinite(array)

    def bound(reduce: Any, rest: float) -> np.ndarray:
        extreme = reduce(np.where(finite, array, rest), axis=-1, initial=rest)
        numbers = np.where(finite.any(-1), extreme, 0.0)
        return np.asarray(numbers, np.float32).astype(str).astype(np.float64)

    return bound(np.min, np.inf), bound(np.max, -np.inf)
