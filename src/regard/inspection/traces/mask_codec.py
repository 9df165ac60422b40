"""Recipes: masks, scores and rotary positions as plain data, made again by their makers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from regard import masks, scores
from regard.masks import documents, keys, positional, stored
from regard.masks.algebra import And, Mask, Not, Or
from regard.positions import Rotary, scaling
from regard.scores import Score, distances, pointwise
from regard.scores.score import Chain

Put = Callable[[Any], Any]  # an array, to the data that stand for it
Get = Callable[[Any], np.ndarray]  # and back

_DEEPEST = 200  # masks within masks


def _size(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"expected an integer, got {value!r}")
    return value


def _size_or_none(value: Any) -> int | None:
    return None if value is None else _size(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"expected true or false, got {value!r}")
    return value


# Of each kind: its maker, and what its fields hold ("array", or how to check a plain value).
_MASKS: dict[type, tuple[Callable[..., Any], dict[str, Any]]] = {
    positional.Causal: (masks.causal, {}),
    positional.SlidingWindow: (masks.sliding_window, {"before": _size_or_none, "after": _size_or_none}),
    positional.Chunked: (masks.chunked, {"size": _size}),
    positional.Dilated: (masks.dilated, {"stride": _size}),
    positional.GlobalTokens: (masks.global_tokens, {"count": _size}),
    keys.Prefix: (masks.prefix, {"bound": "array"}),
    keys.Lengths: (masks.lengths, {"bound": "array"}),
    keys.ValidKeys: (masks.valid_keys, {"valid": "array"}),
    documents.Segments: (masks.segments, {"query_ids": "array", "key_ids": "array"}),
    documents.Documents: (masks.segments, {"ids": "array"}),
    stored.FromArray: (masks.from_array, {"array": "array"}),
}
_SCORES: dict[type, tuple[Callable[..., Any], dict[str, Any]]] = {
    distances.Alibi: (lambda slopes: scores.alibi(slopes=slopes), {"slopes": "array"}),
    distances.RelativeBias: (
        lambda table, sides, farthest: scores.relative_bias(
            table, bidirectional=sides, max_distance=farthest
        ),
        {"table": "array", "bidirectional": _flag, "max_distance": _size},
    ),
    pointwise.Softcap: (scores.softcap, {"cap": "array"}),
    pointwise.Temperature: (scores.temperature, {"value": "array"}),
}
_SCALINGS = {rule.__name__: rule for rule in (scaling.Scaling, *scaling.Scaling.__subclasses__())}


class NotDataError(TypeError):
    """A function of Python's, of which a file can keep no more than the name."""


def write_mask(mask: Mask, put: Put) -> dict[str, Any]:
    """A mask as plain data.

    Args:
        mask: any but those of `masks.predicate`.
        put: takes an array and gives what stands for it.

    Returns:
        A dict for JSON; "kind" names the class.

    Raises:
        NotDataError: a mask that is a function.
    """
    if isinstance(mask, And | Or):
        left, right = write_mask(mask.left, put), write_mask(mask.right, put)
        return {"kind": type(mask).__name__, "left": left, "right": right}
    if isinstance(mask, Not):
        return {"kind": "Not", "operand": write_mask(mask.operand, put)}
    return _write("mask", mask, _MASKS, put)


def read_mask(data: Any, get: Get) -> Mask:
    """The mask that `write_mask` wrote.

    Raises:
        ValueError: data that are no such mask.
    """
    return _read_mask(data, get, 0)


def _read_mask(data: Any, get: Get, depth: int) -> Mask:
    if depth > _DEEPEST:
        raise ValueError(f"mask: expected at most {_DEEPEST} masks within one another, got more")
    kind = _kind("mask", data)
    if kind in ("And", "Or"):
        left, right = (_read_mask(_part("mask", data, side), get, depth + 1) for side in ("left", "right"))
        return left & right if kind == "And" else left | right
    if kind == "Not":
        return ~_read_mask(_part("mask", data, "operand"), get, depth + 1)
    return _read("mask", data, _MASKS, get)


def write_score(score: Score, put: Put) -> list[dict[str, Any]]:
    """Scores as plain data, from left to right; as `write_mask`."""
    parts = score.parts if isinstance(score, Chain) else (score,)
    return [_write("score", part, _SCORES, put) for part in parts]


def read_score(data: Any, get: Get) -> Score:
    """The chain of scores that `write_score` wrote; as `read_mask`."""
    if not isinstance(data, list) or not data:
        raise ValueError(f"score: expected a list of scores, got {str(data)[:80]}")
    return Chain(tuple(_read("score", part, _SCORES, get) for part in data))


def write_rotary(rotary: Rotary) -> dict[str, Any]:
    """Rotary settings as plain data."""
    rule = rotary.scaling
    if rule is not None and _SCALINGS.get(type(rule).__name__) is not type(rule):
        raise NotDataError(f"rotary: {type(rule).__name__} is no rule of regard.positions")
    plain = {name: getattr(rotary, name) for name in ("base", "width", "interleaved")}
    if rule is not None:
        plain["scaling"] = {"kind": type(rule).__name__, **dataclasses.asdict(rule)}
    return plain


def read_rotary(data: Any) -> Rotary:
    """The settings that `write_rotary` wrote; as `read_mask`."""
    try:
        settings = dict(data)
        rule = settings.pop("scaling", None)
        scaling_rule = None if rule is None else _make(_SCALINGS[rule["kind"]], rule)
        rotary = _make(Rotary, settings)
        return dataclasses.replace(rotary, scaling=scaling_rule)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"rotary: expected settings of Rotary, got {str(data)[:80]} ({error!r})") from None


def _make(cls: Any, settings: Mapping[str, Any]) -> Any:
    plain = {name: value for name, value in settings.items() if name != "kind"}
    wrong = [name for name, value in plain.items() if not isinstance(value, int | float | None)]
    if wrong:
        raise ValueError(f"{wrong} is no number")
    return cls(**plain)


def _write(what: str, record: Any, kinds: Mapping[type, Any], put: Put) -> dict[str, Any]:
    if type(record) not in kinds:
        raise NotDataError(
            f"{what}: {record!r} is a function, of which a file can keep no more than the name"
        )
    fields = kinds[type(record)][1]
    values = {
        name: put(getattr(record, name)) if check == "array" else getattr(record, name)
        for name, check in fields.items()
    }
    return {"kind": type(record).__name__, **values}


def _read(what: str, data: Any, kinds: Mapping[type, Any], get: Get) -> Any:
    name = _kind(what, data)
    found = next((made for kind, made in kinds.items() if kind.__name__ == name), None)
    if found is None:
        raise ValueError(f"{what}: expected one of {', '.join(k.__name__ for k in kinds)}, got {name[:80]!r}")
    maker, fields = found
    if set(data) - {"kind"} != set(fields):
        raise ValueError(f"{what}: expected {name} with {', '.join(fields) or 'nothing'}, got {sorted(data)}")
    try:
        values = [
            get(data[name]) if check == "array" else check(data[name]) for name, check in fields.items()
        ]
        return maker(*values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {name} cannot be made: {error}") from None


def _kind(what: str, data: Any) -> str:
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError(f"{what}: expected a record with a kind, got {str(data)[:80]}")
    return data["kind"]


def _part(what: str, data: dict[str, Any], name: str) -> Any:
    if set(data) - {"kind"} - {"left", "right", "operand"} or name not in data:
        raise ValueError(f"{what}: expected {data['kind']} with {name}, got {sorted(data)}")
    return data[name]
