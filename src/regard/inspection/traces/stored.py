"""Traces and calls as files hold them, made from those in memory, and checked when they are restored."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem
from regard.inspection.tokens import Tokens, number_sequence
from regard.inspection.traces.calls import Call, CallRecord, KnownPositions
from regard.inspection.traces.codec import NotDataError, Writer, wrong
from regard.inspection.traces.predictions import Predictions
from regard.readouts import Readout
from regard.readouts.accumulators import PATTERNS
from regard.readouts.reading import canonicalize_readable

_DEPTH = 2  # of the fields of a call: a trace, and calls in it
_WIDEST = 1 << 16  # of a head: a page has a frequency for every other feature
_MOST_IDLE = 1 << 12
_NAMED_PRECISIONS = ("default", "high", "highest", "fastest", "float32", "tensorfloat32", "bfloat16")
_PRECISIONS: dict[Any, Any] = {f"Precision.{precision.name}": precision for precision in jax.lax.Precision}
_PRECISIONS |= {name: name for name in (*_NAMED_PRECISIONS, None)}


@dataclass(frozen=True)
class StoredProblem:
    """Arrays from which the weights of a call can be formed anew."""

    query: np.ndarray
    key: np.ndarray
    bias: np.ndarray | None
    sinks: np.ndarray | None
    scale: np.ndarray
    precision: str | None


@dataclass(frozen=True)
class StoredCall(CallRecord):
    """A call; tokens are numbers of sequences of the trace, and either a problem or a readout is there."""

    problem: StoredProblem | None
    query_tokens: int | None
    key_tokens: int | None
    positions: KnownPositions | None
    output_error: np.ndarray | None
    value_norms: np.ndarray | None
    readout: Readout | None
    run: int | None = dataclasses.field(default=None, metadata={"optional": True})


@dataclass(frozen=True)
class StoredTrace:
    """A trace; calls share their sequences of tokens."""

    title: str
    model: str | None
    versions: dict[str, str]
    notes: tuple[str, ...]
    sequences: tuple[Tokens, ...]
    calls: tuple[StoredCall, ...]
    predictions: Predictions | None = dataclasses.field(default=None, metadata={"optional": True})


class Store:
    """A maker of calls for a file, which collects their sequences and notes on what is left out."""

    def __init__(self, keep_queries: bool, grid: int, top_k: int):
        self._keep_queries, self._sizes = keep_queries, (grid, top_k)
        self.sequences: list[Tokens] = []
        self.notes: list[str] = []

    def take(self, call: Call) -> StoredCall:
        """Return a call for the file, with statistics where queries and keys are not kept."""
        fields, problem = _same_fields(call), None
        if not np.isfinite(call.description.scale or 0):
            fields["description"] = dataclasses.replace(call.description, scale=None)
        try:
            Writer().write("mask", call.mask, _DEPTH)
            Writer().write("score", call.score, _DEPTH)
            trimmed = call.trimmed if self._keep_queries else None
            problem = None if trimmed is None else _store_problem(trimmed)
        except NotDataError as reason:
            self.notes.append(f"{call.name}: statistics alone are kept, as {reason}")
            fields |= {"mask": None, "score": None}
        try:
            Writer().write("positions", call.positions, _DEPTH)
        except NotDataError as reason:
            self.notes.append(f"{call.name}: {reason}")
            fields["positions"] = None
        return StoredCall(
            **fields,
            problem=problem,
            query_tokens=number_sequence(self.sequences, call.query_tokens),
            key_tokens=number_sequence(self.sequences, call.key_tokens),
            output_error=None if call.output_error is None else np.asarray(call.output_error, np.float32),
            readout=None if problem is not None else call.readout(*self._sizes, exact=False),
        )


def _same_fields(call: Call | StoredCall) -> dict[str, Any]:
    """Return the fields that are alike in memory and in a file."""
    fields = [{(field.name, field.type) for field in dataclasses.fields(c)} for c in (Call, StoredCall)]
    return {name: getattr(call, name) for name, _ in fields[0] & fields[1]}


def _store_problem(problem: Problem) -> StoredProblem:
    precisions = [name for name, precision in _PRECISIONS.items() if precision == problem.precision]
    if not precisions:
        raise NotDataError(f"precision={problem.precision!r} is no plain name")
    arrays: Any = {name: getattr(problem, name) for name in ("query", "key", "bias", "sinks", "scale")}
    return StoredProblem(**arrays, precision=precisions[0])


def restore_call(path: str, stored: StoredCall, sequences: Sequence[Tokens]) -> Call:
    """Return the call of a file, or raise a ValueError that says which entry makes no sense."""
    for name, least in (("layer", 0), ("heads", 1), ("rows", 0), ("keys", 0)):
        if getattr(stored, name) < least:
            wrong(f"{path}.{name}", f"at least {least}", getattr(stored, name))
    if not stored.rows and stored.heads > _MOST_IDLE:  # heads without queries are no bytes in the file
        wrong(f"{path}.heads", f"at most {_MOST_IDLE} without queries", stored.heads)
    if stored.kind not in ("self", "cross"):
        wrong(f"{path}.kind", "self or cross", stored.kind)
    for name in ("lse", "max_score"):
        _check_array(f"{path}.{name}", getattr(stored, name), "f", (stored.heads, stored.rows))
    error = _check_array(f"{path}.output_error", stored.output_error, "f", ())
    _check_array(f"{path}.value_norms", stored.value_norms, "f", (stored.heads, stored.keys))
    positions = stored.positions
    turned = None if positions is None or positions.rotary is None else positions.rotary.width
    for name, width in (("description.width", stored.description.width), ("positions.rotary.width", turned)):
        if not 0 <= (width or 0) <= _WIDEST:
            wrong(f"{path}.{name}", f"0 to {_WIDEST}", width)
    if positions is not None and positions.table is not None:
        _check_array(f"{path}.positions.table", positions.table, "f", (None, None))
        if positions.table_kind is None or (positions.trained_length or 0) < 0:
            named = (positions.table_kind, positions.trained_length)
            wrong(f"{path}.positions.table_kind, trained_length", "str and at least 0", named)
    call = Call(
        **_same_fields(stored),
        query_tokens=_find_tokens(f"{path}.query_tokens", stored.query_tokens, sequences, stored.rows),
        key_tokens=_find_tokens(f"{path}.key_tokens", stored.key_tokens, sequences, stored.keys),
        output_error=None if error is None else float(error),
    )
    if (stored.problem is None) == (stored.readout is None):
        wrong(path, "a problem or a readout, one of the two", "both" if stored.problem else "neither")
    if stored.problem is not None:
        return dataclasses.replace(call, problem=_restore_problem(f"{path}.problem", stored.problem, call))
    # Of arrays that hold nothing, but have the call's shape.
    shapes = (call.heads, call.rows, 1), (1, call.keys, 1)
    _canonicalize(path, call, *(jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes))
    assert stored.readout is not None
    _check_readout(f"{path}.readout", stored.readout, call)
    return dataclasses.replace(call, stored=stored.readout)


def _restore_problem(path: str, stored: StoredProblem, call: Call) -> Problem:
    query, key = stored.query, stored.key
    _check_array(f"{path}.query", query, "f", (call.heads, call.rows, None))
    if not query.shape[-1]:  # keys without features are no bytes in the file, whatever their number
        wrong(f"{path}.query", "at least one feature", query.shape)
    _check_array(f"{path}.key", key, "f", (None, call.keys, query.shape[-1]))
    if not key.shape[0] or call.heads % key.shape[0]:
        wrong(f"{path}.key", f"heads that divide {call.heads}", key.shape[0])
    _check_array(f"{path}.scale", stored.scale, "f", ())
    if stored.precision not in _PRECISIONS:
        wrong(f"{path}.precision", f"one of {', '.join(filter(None, _PRECISIONS))}", stored.precision)
    optional = {name: getattr(stored, name) for name in ("bias", "sinks", "scale")}
    precision = _PRECISIONS[stored.precision]
    problem = _canonicalize(path, call, query, key, **optional, precision=precision)
    # The host's arrays, not copies on a device; NaN and the dtype as they were.
    value = np.zeros((1, call.keys, 1), key.dtype)
    return dataclasses.replace(problem, query=query, key=key, value=value, **optional)


def _canonicalize(path: str, call: Call, query: Any, key: Any, **options: Any) -> Problem:
    parts = {name: getattr(call, name) for name in ("mask", "score", "query_offset", "key_offset")}
    try:
        if isinstance(key, jax.ShapeDtypeStruct):
            return canonicalize(query, key, key, **parts)
        return canonicalize_readable(query, key, **parts, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its parts do not fit one another: {error}") from None


def _find_tokens(path: str, number: int | None, sequences: Sequence[Tokens], length: int) -> Tokens | None:
    if number is None:
        return None
    if not 0 <= number < len(sequences):
        wrong(path, f"the number of one of {len(sequences)} sequences", number)
    if len(sequences[number]) != length:
        wrong(path, f"a sequence of {length} tokens", len(sequences[number]))
    return sequences[number]


def _check_readout(path: str, readout: Readout, call: Call) -> None:
    blocks = []
    for name, length in (("query_block", call.rows), ("key_block", call.keys)):
        size = getattr(readout, name)
        if size < 1 or size & (size - 1):
            wrong(f"{path}.{name}", "a power of two", size)
        blocks.append(-(-length // size))
    rows, grid = (call.heads, call.rows), (call.heads, *blocks)
    shapes: dict[str, tuple[int | None, ...]] = dict.fromkeys(("top_keys", "top_weights"), (*rows, None))
    shapes |= dict.fromkeys(("key_mass", "key_max"), (call.heads, call.keys))
    shapes |= {"block_mass": grid, "block_max": grid, "block_rows": grid[:2], "trust": grid[:1]}
    shapes |= {"distance_mass": (call.heads, 63), "pattern_keys": (*rows, len(PATTERNS))}
    for field in dataclasses.fields(Readout):
        if not field.metadata.get("static"):
            kind = "i" if field.name in ("keys", "top_keys", "block_rows", "pattern_keys") else "f"
            shape = shapes.get(field.name, rows)
            _check_array(f"{path}.{field.name}", getattr(readout, field.name), kind, shape)
    if readout.top_keys.shape != readout.top_weights.shape or not readout.top_keys.shape[-1]:
        wrong(f"{path}.top_keys", "one weight for each", readout.top_weights.shape)
    for name, least, most in (("top_keys", -1, call.keys - 1), ("keys", 0, call.keys)):
        numbers = getattr(readout, name)
        if numbers.size and not least <= numbers.min() <= numbers.max() <= most:
            wrong(f"{path}.{name}", f"numbers in {least}..{most}", f"{numbers.min()}..{numbers.max()}")


def _check_array(path: str, array: Any, kind: str, shape: tuple[int | None, ...]) -> Any:
    """Return the array, if it is there, of this kind and shape, in which None stands for any size."""
    if array is None:
        return None
    own = "f" if array.dtype.name == "bfloat16" else array.dtype.kind
    sizes = zip(shape, array.shape, strict=False)
    fits = len(shape) == array.ndim and all(size in (None, have) for size, have in sizes)
    if own != kind or not fits:
        wrong(path, f"{kind} numbers of shape {shape}", f"{array.dtype} {array.shape}")
    return array
