"""Calls as plain data and arrays, and back: every entry is checked, because a file may say anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem
from regard.inspection.tokens import Tokens, same_tokens
from regard.inspection.traces import mask_codec
from regard.inspection.traces.calls import Call
from regard.readouts import Readout
from regard.readouts.reading import canonicalize_readable

_DESCRIBED: dict[str, tuple[type, ...]] = {
    "mask": (str, type(None)),
    "score": (str, type(None)),
    "scale": (float,),
    "bias": (bool,),
    "sinks": (bool,),
    "dropout_rate": (float,),
    "query_offset": (int,),
    "key_offset": (int,),
    "dtype": (str,),
    "backend": (str,),
    "width": (int,),
}
_PRECISIONS = {f"Precision.{one.name}": one for one in jax.lax.Precision}
_NAMED_PRECISIONS = ("default", "high", "highest", "fastest", "float32", "tensorfloat32", "bfloat16")


class Writer:
    """Collects the arrays and sequences that calls share."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.sequences: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._names: dict[int, tuple[str, Any]] = {}
        self._count = 0
        self._tokens: list[Tokens] = []

    def put(self, array: Any) -> str:
        """The name of an array, which is stored once."""
        if id(array) not in self._names:
            self._count += 1
            name = f"a{self._count}"
            self.arrays[name] = np.asarray(array)
            self._names[id(array)] = (name, array)  # kept, so that no other gets its id
        return self._names[id(array)][0]

    def put_or_none(self, array: Any) -> str | None:
        """Likewise; None is None."""
        return None if array is None else self.put(array)

    def write_call(self, call: Call, keep_queries: bool, grid: int, top_k: int) -> dict[str, Any]:
        """A call as plain data."""
        mask, score, problem = self._write_functions(call, keep_queries)
        return {
            **{name: getattr(call, name) for name in ("name", "layer", "kind", "heads", "rows", "keys")},
            "query_offset": call.query_offset,
            "key_offset": call.key_offset,
            "mask": mask,
            "score": score,
            "lse": self.put(call.lse),
            "max_score": self.put(call.max_score),
            "description": dict(call.description),
            "problem": problem,
            "query_tokens": self._write_tokens(call.query_tokens),
            "key_tokens": self._write_tokens(call.key_tokens),
            "positions": self._write_positions(call),
            "output_error": None if call.output_error is None else self.put(np.float32(call.output_error)),
            "readout": None if problem is not None else self._write_readout(call.readout(grid, top_k)),
        }

    def _write_functions(self, call: Call, keep_queries: bool) -> tuple[Any, Any, Any]:
        before = set(self.arrays)
        try:
            mask = None if call.mask is None else mask_codec.write_mask(call.mask, self.put)
            score = None if call.score is None else mask_codec.write_score(call.score, self.put)
            if not keep_queries or call.problem is None:
                return mask, score, None
            return mask, score, self._write_problem(call.problem)
        except mask_codec.NotDataError as reason:
            self.notes.append(f"{call.name}: statistics alone are kept, as {reason}")
            for name in set(self.arrays) - before:
                del self.arrays[name]
            self._names = {key: kept for key, kept in self._names.items() if kept[0] in self.arrays}
            return None, None, None

    def _write_problem(self, problem: Problem) -> dict[str, Any]:
        precision = problem.precision
        named = isinstance(precision, jax.lax.Precision)
        if not named and precision not in (None, *_NAMED_PRECISIONS):
            raise mask_codec.NotDataError(f"precision={precision!r} is no plain name")
        return {
            "query": self.put(problem.query),
            "key": self.put(problem.key),
            "bias": self.put_or_none(problem.bias),
            "sinks": self.put_or_none(problem.sinks),
            "scale": self.put(problem.scale),
            "precision": f"Precision.{precision.name}" if named else precision,
        }

    def _write_tokens(self, tokens: Tokens | None) -> int | None:
        if tokens is None:
            return None
        for number, known in enumerate(self._tokens):
            if same_tokens(known, tokens):
                return number
        self._tokens.append(tokens)
        self.sequences.append(
            {
                "texts": list(tokens.texts),
                "kind": tokens.kind,
                "patch_grid": None if tokens.patch_grid is None else list(tokens.patch_grid),
                "first_patch": tokens.first_patch,
                **{name: self.put_or_none(getattr(tokens, name)) for name in ("picture", "ids", "spans")},
            }
        )
        return len(self._tokens) - 1

    def _write_positions(self, call: Call) -> dict[str, Any] | None:
        known = call.positions
        if known is None:
            return None
        rotary = known.get("rotary")
        try:
            rotary = None if rotary is None else mask_codec.write_rotary(rotary)
        except mask_codec.NotDataError as reason:
            self.notes.append(f"{call.name}: {reason}")
            rotary = None
        return {
            "rotary": rotary,
            "table": self.put_or_none(known.get("table")),
            "table_kind": known.get("table_kind"),
            "trained_length": known.get("trained_length"),
        }

    def _write_readout(self, readout: Readout) -> dict[str, Any]:
        return {
            field.name: getattr(readout, field.name)
            if field.metadata.get("static")
            else self.put_or_none(getattr(readout, field.name))
            for field in dataclasses.fields(Readout)
        }


class Reader:
    """Takes calls out of plain data and arrays."""

    def __init__(self, arrays: Mapping[str, np.ndarray], sequences: Any):
        self._arrays = arrays
        listed = entry(sequences, "sequences", list)
        self._tokens = [self._read_tokens(f"sequences[{n}]", one) for n, one in enumerate(listed)]

    def read_call(self, place: str, data: Any) -> Call:
        """A call, or a ValueError that says what is wrong with which entry."""
        data = entry(data, place, dict)

        def take(name: str, *kinds: type) -> Any:
            return entry(data.get(name), f"{place}.{name}", *kinds)

        heads, rows, keys = (self._size(place, data, name) for name in ("heads", "rows", "keys"))
        if heads < 1:
            wrong(f"{place}.heads", "at least 1", heads)
        if take("kind", str) not in ("self", "cross"):
            wrong(f"{place}.kind", "self or cross", data["kind"])
        offsets = take("query_offset", int), take("key_offset", int)
        if max(map(abs, offsets)) >= 2**31:
            wrong(f"{place}.query_offset, key_offset", "numbers that fit int32", offsets)
        mask = None if data.get("mask") is None else mask_codec.read_mask(data["mask"], self._get(place))
        score = None if data.get("score") is None else mask_codec.read_score(data["score"], self._get(place))
        description = self._described(f"{place}.description", data.get("description"))
        per_row = (heads, rows)
        error = self._optional(f"{place}.output_error", data.get("output_error"), "f", ())
        call = Call(
            name=take("name", str),
            layer=self._size(place, data, "layer"),
            kind=data["kind"],
            heads=heads,
            rows=rows,
            keys=keys,
            query_offset=offsets[0],
            key_offset=offsets[1],
            mask=mask,
            score=score,
            lse=self._array(f"{place}.lse", data.get("lse"), "f", per_row),
            max_score=self._array(f"{place}.max_score", data.get("max_score"), "f", per_row),
            description=description,
            query_tokens=self._find_tokens(f"{place}.query_tokens", data.get("query_tokens"), rows),
            key_tokens=self._find_tokens(f"{place}.key_tokens", data.get("key_tokens"), keys),
            positions=self._read_positions(f"{place}.positions", data.get("positions")),
            output_error=None if error is None else float(error),
        )
        kept, stored = data.get("problem"), data.get("readout")
        if (kept is None) == (stored is None):
            wrong(place, "a problem or a readout, one of the two", "both" if kept else "neither")
        if kept is not None:
            return dataclasses.replace(call, problem=self._read_problem(f"{place}.problem", kept, call))
        self._check_functions(place, call)
        return dataclasses.replace(call, stored=self._read_readout(f"{place}.readout", stored, call))

    def _read_problem(self, place: str, data: Any, call: Call) -> Problem:
        data = entry(data, place, dict)
        query = self._array(f"{place}.query", data.get("query"), "f", (call.heads, call.rows, None))
        width = query.shape[-1]
        key = self._array(f"{place}.key", data.get("key"), "f", (None, call.keys, width))
        if not key.shape[0] or call.heads % key.shape[0]:
            wrong(f"{place}.key", f"heads that divide {call.heads}", key.shape[0])
        given = {
            "bias": self._optional(f"{place}.bias", data.get("bias"), "f", None),
            "sinks": self._optional(f"{place}.sinks", data.get("sinks"), "f", None),
            "scale": self._array(f"{place}.scale", data.get("scale"), "f", ()),
            "precision": self._read_precision(f"{place}.precision", data.get("precision")),
        }
        problem = self._canonicalize(place, call, query, key, **given)
        # The host's arrays, not copies on a device; NaN and the dtype as they were.
        value = np.zeros((1, call.keys, 1), key.dtype)
        return dataclasses.replace(
            problem, query=query, key=key, value=value, **{n: given[n] for n in ("bias", "sinks", "scale")}
        )

    def _check_functions(self, place: str, call: Call) -> None:
        """That mask and score fit the call: of arrays that hold nothing, but have its shape."""
        query = jax.ShapeDtypeStruct((call.heads, call.rows, 1), np.float32)
        key = jax.ShapeDtypeStruct((1, call.keys, 1), np.float32)
        self._canonicalize(place, call, query, key)

    def _canonicalize(self, place: str, call: Call, query: Any, key: Any, **given: Any) -> Problem:
        try:
            offsets = {"query_offset": call.query_offset, "key_offset": call.key_offset}
            if isinstance(key, jax.ShapeDtypeStruct):
                return canonicalize(query, key, key, mask=call.mask, score=call.score, **offsets)
            return canonicalize_readable(query, key, mask=call.mask, score=call.score, **offsets, **given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: its parts do not fit one another: {error}") from None

    def _read_precision(self, place: str, name: Any) -> Any:
        if name is None or name in _NAMED_PRECISIONS:
            return name
        if name not in _PRECISIONS:
            wrong(place, f"one of {', '.join((*_PRECISIONS, *_NAMED_PRECISIONS))}", name)
        return _PRECISIONS[name]

    def _read_readout(self, place: str, data: Any, call: Call) -> Readout:
        data = entry(data, place, dict)
        blocks = []
        for name, length in (("query_block", call.rows), ("key_block", call.keys)):
            size = self._size(place, data, name)
            if size < 1 or size & (size - 1):
                wrong(f"{place}.{name}", "a power of two", size)
            blocks.append(-(-length // size))
        rows, grid = (call.heads, call.rows), (call.heads, *blocks)
        shapes: dict[str, tuple[int | None, ...]] = {
            "top_keys": (*rows, None),
            "top_weights": (*rows, None),
            "key_mass": (call.heads, call.keys),
            "key_max": (call.heads, call.keys),
            "distance_mass": (call.heads, 63),
            "block_mass": grid,
            "block_max": grid,
            "block_rows": grid[:2],
            "trust": (call.heads,),
        }
        values: dict[str, Any] = {}
        for field in dataclasses.fields(Readout):
            name = field.name
            if field.metadata.get("static"):
                values[name] = self._size(place, data, name)
            elif name in ("same_mass", "induction_mass"):
                values[name] = self._optional(f"{place}.{name}", data.get(name), "f", rows)
            else:
                kind = "i" if name in ("keys", "top_keys", "block_rows") else "f"
                values[name] = self._array(f"{place}.{name}", data.get(name), kind, shapes.get(name, rows))
        top = values["top_keys"]
        if top.shape != values["top_weights"].shape or not top.shape[-1]:
            wrong(f"{place}.top_keys", "one weight for each", values["top_weights"].shape)
        for name, least, most in (("top_keys", -1, call.keys - 1), ("keys", 0, call.keys)):
            found = values[name]
            if found.size and not least <= found.min() <= found.max() <= most:
                wrong(f"{place}.{name}", f"numbers in {least}..{most}", f"{found.min()}..{found.max()}")
        return Readout(**values)

    def _read_positions(self, place: str, data: Any) -> Mapping[str, Any] | None:
        if data is None:
            return None
        data = entry(data, place, dict)
        found: dict[str, Any] = {}
        if data.get("rotary") is not None:
            found["rotary"] = mask_codec.read_rotary(data["rotary"])
        if data.get("table") is not None:
            length = data.get("trained_length")
            found["table"] = self._array(f"{place}.table", data["table"], "f", (None, None))
            found["table_kind"] = entry(data.get("table_kind"), f"{place}.table_kind", str)
            found["trained_length"] = None if length is None else self._size(place, data, "trained_length")
        return found or None

    def _read_tokens(self, place: str, data: Any) -> Tokens:
        data = entry(data, place, dict)
        texts = entry(data.get("texts"), f"{place}.texts", list)
        try:
            return Tokens(
                texts,
                kind=entry(data.get("kind"), f"{place}.kind", str),
                patch_grid=data.get("patch_grid"),
                first_patch=data.get("first_patch", 0),
                picture=self._optional(f"{place}.picture", data.get("picture"), "fu", None),
                ids=self._optional(f"{place}.ids", data.get("ids"), "i", None),
                spans=self._optional(f"{place}.spans", data.get("spans"), "i", None),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{place}: {error}") from None

    def _find_tokens(self, place: str, number: Any, length: int) -> Tokens | None:
        if number is None:
            return None
        if type(number) is not int or not 0 <= number < len(self._tokens):
            wrong(place, f"the number of one of {len(self._tokens)} sequences", number)
        found = self._tokens[number]
        if len(found) != length:
            wrong(place, f"a sequence of {length} tokens", len(found))
        return found

    def _described(self, place: str, data: Any) -> dict[str, Any]:
        data = entry(data, place, dict)
        for name, kinds in _DESCRIBED.items():
            if type(data.get(name)) not in kinds:
                wrong(f"{place}.{name}", " or ".join(kind.__name__ for kind in kinds), data.get(name))
        return {name: data[name] for name in _DESCRIBED}

    def _size(self, place: str, data: Mapping[str, Any], name: str) -> int:
        size = data.get(name)
        if type(size) is not int or not 0 <= size < 2**31:
            wrong(f"{place}.{name}", "a number in 0..2^31 - 1", size)
        return size

    def _get(self, place: str) -> Any:
        return lambda name: self._array(f"{place}: an array of its mask or score", name, "fiub", None)

    def _optional(self, place: str, name: Any, kinds: str, shape: Any) -> np.ndarray | None:
        return None if name is None else self._array(place, name, kinds, shape)

    def _array(self, place: str, name: Any, kinds: str, shape: tuple[int | None, ...] | None) -> np.ndarray:
        """An array of these kinds and, where it is given, this shape, in which None stands for any size."""
        array = self._arrays.get(name) if isinstance(name, str) else None
        if array is None:
            wrong(place, "the name of an array of the file", name)
        kind = "f" if array.dtype.name == "bfloat16" else array.dtype.kind
        fits = shape is None or (
            len(shape) == array.ndim
            and all(size in (None, have) for size, have in zip(shape, array.shape, strict=True))
        )
        if kind not in kinds or not fits:
            sizes = "any shape" if shape is None else f"shape {shape}"
            wrong(place, f"{' or '.join(kinds)} numbers of {sizes}", f"{array.dtype} {array.shape}")
        return array


def entry(value: Any, place: str, *kinds: type) -> Any:
    """The value, which must be of one of these types and not of a subtype, as bool is of int."""
    if type(value) not in kinds:
        wrong(place, " or ".join(kind.__name__ for kind in kinds), value)
    return value


def wrong(place: str, expected: str, got: Any) -> NoReturn:
    """Refuse a file."""
    raise ValueError(f"{place}: expected {expected}, got {str(got)[:120]!r}; the file is not a sound trace")
