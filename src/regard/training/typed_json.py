"""Values read from JSON as what type hints declare; a ValueError names what does not fit. No JAX here."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def read_record(record: Any, settings: Any, where: str) -> Any:
    """Build a dataclass from its dictionary, nested dataclasses included; name what does not fit."""
    kinds = get_type_hints(record)
    fields = {field.name: field for field in dataclasses.fields(record) if field.init}
    if not isinstance(settings, dict) or not settings.keys() <= fields.keys():
        got = sorted(settings) if isinstance(settings, dict) else _shorten(settings)
        raise ValueError(f"{where} must have the settings {sorted(fields)}, got {got}")
    for name, field in fields.items():
        is_needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if is_needed and name not in settings:
            raise ValueError(f"{where}.{name} is missing")
    for name, field in fields.items():
        if kinds[name] is Any and dataclasses.is_dataclass(field.default):
            kinds[name] = type(field.default)
    return record(
        **{name: read_value(kinds[name], value, f"{where}.{name}") for name, value in settings.items()}
    )


def read_value(kind: Any, value: Any, where: str) -> Any:
    """Return a value read from JSON as one of a type (a whole number will do for a float)."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if dataclasses.is_dataclass(kind):
        return read_record(kind, value, where)
    if origin in (Union, UnionType):
        for hint in inner:
            with contextlib.suppress(ValueError):
                return read_value(hint, value, where)
    elif origin is tuple and isinstance(value, list):
        hints = inner[:1] * len(value) if inner[1:] == (...,) else inner or (Any,) * len(value)
        if len(hints) == len(value):
            return tuple(read_value(hint, entry, where) for hint, entry in zip(hints, value, strict=True))
    elif origin in (list, Sequence) and isinstance(value, list) and inner:
        return [read_value(inner[0], entry, where) for entry in value]
    elif origin in (dict, Mapping) and isinstance(value, dict) and inner:
        key_hint, hint = inner
        return {
            read_value(key_hint, name, where): read_value(hint, entry, f"{where}[{name!r}]")
            for name, entry in value.items()
        }
    elif value in inner if origin is Literal else kind is Any or _is_of(origin, value):
        return value
    name = kind if inner else getattr(kind, "__name__", kind)
    raise ValueError(f"{where} must be {name}, got {_shorten(value)}")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_of(kind: Any, value: Any) -> bool:
    """Return True for a plain value of a class; a bool is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
