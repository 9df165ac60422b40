"""Records as plain data and arrays, and back: every entry is checked, because a file may say anything."""

import dataclasses
import functools
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from regard.records import record_classes

_DEEPEST = 200  # records within records
_ARRAYS = (Any, np.ndarray, jax.Array)
_PLAIN = (bool, int, float, str)


class NotDataError(TypeError):
    """A function or an object, of which a file can keep no more than the name."""


class Writer:
    """A writer of records as plain data for JSON, which collects their arrays."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._names: dict[int, tuple[str, Any]] = {}

    def write(self, path: str, value: Any, depth: int = 0) -> Any:
        """Return a value as plain data, in which a name stands for an array, or raise NotDataError."""
        if value is None or type(value) in _PLAIN:
            return value
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            if id(value) not in self._names:
                name = f"a{len(self.arrays) + 1}"
                self.arrays[name] = np.asarray(value)
                self._names[id(value)] = name, value  # kept, so that no other gets its id
            return self._names[id(value)][0]
        if isinstance(value, tuple):
            return [self.write(path, entry, depth) for entry in value]
        if isinstance(value, Mapping):
            return {name: self.write(path, entry, depth) for name, entry in value.items()}
        types = field_types(type(value)) if dataclasses.is_dataclass(value) else None
        if types is None:
            reason = "is a function or object, of which a file can keep no more than the name"
            raise NotDataError(f"{path}: {value!r} {reason}")
        if depth > _DEEPEST:
            raise NotDataError(f"{path}: more than {_DEEPEST} records lie within one another")
        fields = {name: _fit(getattr(value, name), kind) for name, kind in types.items()}
        for name, field in fields.items():
            if types[name] in _ARRAYS and dataclasses.is_dataclass(field):
                got = f"{field!r}, which a file cannot keep"
                raise NotDataError(f"{path}.{name}: expected an array, got {got}")
        written = {name: self.write(path, field, depth + 1) for name, field in fields.items()}
        return {"class": class_name(type(value)), **written}


def _fit(value: Any, kind: Any) -> Any:
    """Return Python's numbers as arrays in fields for arrays, NumPy's as Python's in other fields."""
    holds_arrays = any(annotation in _ARRAYS for annotation in (kind, *get_args(kind)))
    if holds_arrays and type(value) in (bool, int, float):
        return jnp.asarray(value)
    return value.item() if isinstance(value, np.generic) and not holds_arrays else value


class Reader:
    """A reader of records from plain data and arrays."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays

    def read(self, path: str, data: Any, kind: Any, depth: int = 0) -> Any:
        """Return what was written as a value of a type: an annotation of a record's field, or a class."""
        arguments = get_args(kind)
        if get_origin(kind) in (Union, UnionType):
            if data is None and NoneType in arguments:
                return None
            kind = next(option for option in arguments if option is not NoneType)
            arguments = get_args(kind)
        if kind in _ARRAYS:
            array = self._arrays.get(data) if isinstance(data, str) else None
            return wrong(path, "the name of an array of the file", data) if array is None else array
        if kind in _PLAIN:
            if type(data) is int and not -(2**31) <= data < 2**31:
                wrong(path, "a number that fits int32", data)
            kinds = (int, float) if kind is float else (kind,)
            return _demand(path, data, *kinds)
        if get_origin(kind) is dict:
            items = _demand(path, data, dict).items()
            return {name: self.read(f"{path}[{name!r}]", entry, arguments[1], depth) for name, entry in items}
        if get_origin(kind) is tuple:
            listed = _demand(path, data, list)
            kinds = [arguments[0]] * len(listed) if arguments[-1] is ... else list(arguments)
            if len(kinds) != len(listed):
                wrong(path, f"{len(kinds)} entries", data)
            parts = enumerate(zip(listed, kinds, strict=True))
            return tuple(self.read(f"{path}[{n}]", entry, part, depth) for n, (entry, part) in parts)
        return self._read_record(path, data, kind, depth)

    def _read_record(self, path: str, data: Any, base: type, depth: int) -> Any:
        if depth > _DEEPEST:
            wrong(path, f"at most {_DEEPEST} records within one another", "more")
        name = data.get("class") if isinstance(data, dict) else None
        if not isinstance(name, str):
            wrong(path, "a record with a class", data)
        classes = {class_name(cls): cls for cls in record_classes(base) if field_types(cls) is not None}
        if name not in classes:
            wrong(path, f"one of {', '.join(classes)}, or a class defined before the file is read", name)
        record, types = classes[name], field_types(classes[name]) or {}
        # Files from before a field existed are without it.
        absent = {field.name: None for field in dataclasses.fields(record) if field.metadata.get("optional")}
        data = absent | data
        if set(data) - {"class"} != set(types):
            wrong(path, f"{name} with {', '.join(types) or 'nothing'}", sorted(set(data) - {"class"}))
        within = f"{path}." if path else ""
        values = {field: self.read(within + field, data[field], types[field], depth + 1) for field in types}
        maker = getattr(record, "maker", None)
        try:
            return record(**values) if maker is None else maker(*values.values())
        except Exception as error:  # a class of the user's may raise anything
            raise ValueError(f"{path}: {name} cannot be made: {error}") from None


def class_name(record: type) -> str:
    """Return the name by which a file knows a class; those from outside Regard bear their module's."""
    inside = record.__module__.startswith("regard.")
    return record.__name__ if inside else f"{record.__module__}.{record.__qualname__}"


@functools.cache
def field_types(record: type) -> dict[str, Any] | None:
    """Return the types of a record's fields, but for derived ones; None where a file cannot hold them."""
    try:
        types = get_type_hints(record)
    except (NameError, TypeError):
        return None
    kinds = {}
    for field in dataclasses.fields(record):
        if field.metadata.get("derived"):
            continue
        kind = kinds[field.name] = types[field.name]
        # `Any` stands for an array where it is a leaf, for an object in the structure of the tree.
        if (kind is Any and field.metadata.get("static")) or not _is_data(kind):
            return None
    return kinds


def _is_data(kind: Any) -> bool:
    if kind in _ARRAYS or kind in _PLAIN or kind is NoneType:
        return True
    if get_origin(kind) in (Union, UnionType):
        return len(set(get_args(kind)) - {NoneType}) == 1 and all(map(_is_data, get_args(kind)))
    if get_origin(kind) in (tuple, dict):
        return all(_is_data(argument) for argument in get_args(kind) if argument is not ...)
    return isinstance(kind, type) and any(record_classes(kind))


def _demand(path: str, data: Any, *kinds: type) -> Any:
    """Return the data, which must be of one of these types and not of a subtype, as bool is of int."""
    return data if type(data) in kinds else wrong(path, kinds[-1].__name__, data)


def wrong(path: str, expected: str, got: Any) -> NoReturn:
    """Refuse a file."""
    path = (path or "trace") if len(path) <= 120 else f"{path[:120]}..."
    raise ValueError(f"{path}: expected {expected}, got {str(got)[:120]!r}; the file is not a sound trace")
