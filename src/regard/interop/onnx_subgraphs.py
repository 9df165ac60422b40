"""ONNX subgraphs of elementwise operators, evaluated for one score at a time."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST
from regard.axes import Array
from regard.interop.onnx_tensors import FLOATS


@dataclass(frozen=True)
class Spread:
    """One entry of a tensor of this shape, which follows from the scores or their places.

    As a whole number it is at most `most` beside 0, where that is known.
    """

    entry: Array
    shape: tuple[int, ...]
    most: float = math.inf


# What is known before the scores are is a NumPy array.
Value = Spread | np.ndarray


@dataclass(frozen=True)
class Cell:
    """The place of one score in the tensor of scores."""

    index: tuple[Array, ...]  # batch, head, query, key
    shape: tuple[int, ...]
    dtype: Any

    def entry(self, value: Value) -> Array:
        """Return the entry that meets this score when the tensor broadcasts against the scores."""
        if isinstance(value, Spread):
            return value.entry
        if not _fits(value.shape, self.shape):
            raise NotImplementedError(
                f"a tensor of shape {value.shape} does not broadcast to the scores {self.shape}"
            )
        if jnp.issubdtype(value.dtype, jnp.integer) and value.size and np.abs(value).max() > LARGEST:
            raise NotImplementedError(f"expected whole numbers of at most {LARGEST}, got {value.tolist()}")
        value = value.astype(self.kind(value.dtype))
        varying = [axis for axis in range(-value.ndim, 0) if value.shape[axis] > 1]
        if not varying:
            return jnp.asarray(value.reshape(()))
        if len(varying) == 1 and value.dtype.kind != "b":
            line, position = value.reshape(-1), self.index[varying[0]]
            first, step = line[0], line[1] - line[0]
            if np.array_equal(first + step * np.arange(line.size).astype(line.dtype), line):
                return jnp.asarray(first) + jnp.asarray(step) * position.astype(line.dtype)  # no look-up
        indices = (self.index[axis] if axis in varying else 0 for axis in range(-value.ndim, 0))
        return jnp.asarray(value)[tuple(indices)]

    def kind(self, dtype: np.dtype) -> Any:
        """Return the dtype to compute in: that of the scores, or of positions for integers."""
        if np.issubdtype(dtype, np.bool_):
            return dtype
        return self.dtype if jnp.issubdtype(dtype, jnp.floating) else np.int32


def _fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    return len(shape) <= len(whole) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(whole), strict=False)
    )


def cell_function(name: str, graph: Any, shape: Sequence[int]) -> Callable[..., Array]:
    """Compile a graph from scores to scores into `fn(score, batch, head, query, key)`, a function of scalars.

    The same graph gives the same function object, so that it is compiled once.
    """
    return _compile(name, graph.SerializeToString(deterministic=True), tuple(shape))


@functools.lru_cache(maxsize=64)
def _compile(name: str, serialized: bytes, shape: tuple[int, ...]) -> Callable[..., Array]:
    import onnx
    from onnx.helper import get_attribute_value
    from onnx.numpy_helper import to_array

    graph = onnx.GraphProto.FromString(serialized)
    constants: dict[str, Value] = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    inputs = [value.name for value in graph.input if value.name not in constants]
    if len(inputs) != 1 or len(graph.output) != 1:
        raise ValueError(
            f"{name}: expected a graph of one input and one output, got {len(inputs)} and {len(graph.output)}"
        )
    steps = []
    for node in graph.node:
        if node.op_type not in (*_OPERATORS, *_ON_KNOWN) or node.domain not in ("", "ai.onnx"):
            raise NotImplementedError(
                f"{name}: the operator {node.op_type} cannot be evaluated one score at a time; known are"
                f" {', '.join(sorted((*_OPERATORS, *_ON_KNOWN)))}"
            )
        operate = functools.partial(_evaluate_known, node)
        if node.op_type in _OPERATORS:
            attributes = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
            operate = functools.partial(_OPERATORS[node.op_type], **attributes)
        steps.append((node, operate))
    result = graph.output[0].name

    def evaluate(score: Array, *index: Array) -> Array:
        cell = Cell(index, shape, score.dtype)
        values = {**constants, inputs[0]: Spread(score, shape)}
        for node, operate in steps:
            if unknown := [source for source in node.input if source and source not in values]:
                raise NotImplementedError(
                    f"{name}: {node.op_type} reads {unknown[0]!r}, which is neither the graph's input nor"
                    " made in it"
                )
            try:
                arguments = [values[source] if source else None for source in node.input]
                values[node.output[0]] = operate(cell, *arguments)
            except (NotImplementedError, ValueError) as error:
                kind = NotImplementedError if isinstance(error, NotImplementedError) else ValueError
                raise kind(f"{name}: {node.op_type}: {error}") from None
        return cell.entry(values[result]).astype(score.dtype)

    evaluate.__qualname__ = graph.name or name
    return evaluate


def _find_most(value: Value) -> float:
    if isinstance(value, Spread):
        return value.most
    if jnp.issubdtype(value.dtype, jnp.floating):
        return math.inf
    return float(np.abs(value.astype(np.float64)).max(initial=0))


def _elementwise(function: Callable[..., Any], reach: Callable[..., float] = max) -> Callable[..., Value]:
    """Make an operator of `function(library, *entries)`, where the library is NumPy or jax.numpy.

    `reach` says how large a whole number may become, from how large those of the entries may be.
    """

    def operate(cell: Cell, *arguments: Value | None, **attributes: Any) -> Value:
        operands = [argument for argument in arguments if argument is not None]
        shape = np.broadcast_shapes(*(argument.shape for argument in operands))
        # A matrix of places, such as a mask, is never stored: its entry follows from those of its parts.
        is_constant = all(isinstance(argument, np.ndarray) for argument in operands)
        if is_constant and (sum(n > 1 for n in shape) < 2 or not _fits(shape, cell.shape)):
            with np.errstate(all="ignore"):
                return np.asarray(function(np, *arguments, **attributes))
        entries = [None if argument is None else cell.entry(argument) for argument in arguments]
        entry = function(jnp, *entries, **attributes)
        whole = jnp.issubdtype(entry.dtype, jnp.integer)
        most = reach(0, *map(_find_most, operands)) if whole else math.inf
        if LARGEST < most < math.inf:
            raise NotImplementedError(
                f"expected whole numbers of at most {LARGEST}, these may reach {most:.0f}; cast them to"
                " floating point first"
            )
        return Spread(entry, shape, 1 if entry.dtype == bool else most)

    return operate


def _named(name: str, reach: Callable[..., float] = max) -> Callable[..., Value]:
    return _elementwise(lambda library, *entries: getattr(library, name)(*entries), reach)


def _folded(name: str) -> Callable[..., Value]:
    return _elementwise(lambda library, *entries: functools.reduce(getattr(library, name), entries))


def _raise(library: ModuleType, a: Any, b: Any) -> Any:
    if jnp.issubdtype(a.dtype, jnp.floating) or not jnp.issubdtype(b.dtype, jnp.floating):
        return library.power(a, b.astype(a.dtype))
    return library.power(a.astype(b.dtype), b).astype(a.dtype)


def _reach_power(_: float, a: float, b: float) -> float:
    return math.inf if math.inf in (a, b) else 2.0 ** min(b * math.log2(max(a, 1)), 64)


def _divide(library: ModuleType, a: Any, b: Any) -> Any:
    if jnp.issubdtype(a.dtype, jnp.floating):
        return a / b
    # Whole numbers are divided towards zero.
    return library.sign(a) * library.sign(b) * (abs(a) // abs(b))


def _remainder(library: ModuleType, a: Any, b: Any, fmod: int = 0) -> Any:
    return library.fmod(a, b) if fmod else library.mod(a, b)


def _clip(library: ModuleType, a: Any, low: Any = None, high: Any = None) -> Any:
    a = a if low is None else library.maximum(a, low)
    return a if high is None else library.minimum(a, high)


def _cast(cell: Cell, value: Value, to: int, **_: Any) -> Value:  # the rounding of 8-bit numbers
    if to not in _ELEMENTS:
        raise NotImplementedError(f"element type {to} is not known here")
    if isinstance(value, np.ndarray):
        return value.astype(_ELEMENTS[to])
    # Floating-point entries have the dtype of the scores, whatever the graph declares.
    return Spread(value.entry.astype(cell.kind(_ELEMENTS[to])), value.shape, value.most)


def _evaluate_known(node: Any, _: Cell, *arguments: Value | None) -> Value:
    """Evaluate a node on what is known before the scores are, by ONNX's own evaluator."""
    from onnx.reference import ReferenceEvaluator

    if any(isinstance(argument, Spread) for argument in arguments):
        raise NotImplementedError("expected tensors that depend neither on scores nor on two positions")
    feeds = {name: array for name, array in zip(node.input, arguments, strict=True) if name}
    results: Any = ReferenceEvaluator(node).run(None, feeds)
    return np.asarray(results[0])


# Element types of tensors, numbered as in onnx.proto.
_ELEMENTS = FLOATS | {6: np.dtype(np.int32), 7: np.dtype(np.int64), 9: np.dtype(bool)}

# Operators on what is known before the scores are.
_ON_KNOWN = ("Concat", "Constant", "Gather", "Range", "Reshape", "Squeeze", "Unsqueeze")
# Operators that NumPy and jax.numpy have under the same name in small letters, and under another name.
_SAME = ("Abs", "Ceil", "Cos", "Equal", "Exp", "Floor", "Greater", "Less", "Log")
_SAME += ("Round", "Sign", "Sin", "Sqrt", "Tanh", "Where")
_RENAMED = {
    "And": "logical_and", "GreaterOrEqual": "greater_equal", "LessOrEqual": "less_equal", "Neg": "negative",
    "Not": "logical_not", "Or": "logical_or", "Xor": "logical_xor",
}  # fmt: skip
_OPERATORS: dict[str, Callable[..., Value]] = {
    **{operator: _named(operator.lower()) for operator in _SAME},
    **{operator: _named(name) for operator, name in _RENAMED.items()},
    "Add": _named("add", lambda *most: sum(most)),
    "Cast": _cast,
    "Clip": _elementwise(_clip),
    "Div": _elementwise(_divide),
    "Identity": _elementwise(lambda _, a: a),
    "Max": _folded("maximum"),
    "Min": _folded("minimum"),
    "Mod": _elementwise(_remainder),
    "Mul": _named("multiply", lambda _, a, b: a * b),
    "Pow": _elementwise(_raise, _reach_power),
    "Reciprocal": _elementwise(lambda _, a: 1 / a),
    "Relu": _elementwise(lambda library, a: library.maximum(a, a.dtype.type(0))),
    "Shape": lambda _, value, start=0, end=None: np.asarray(value.shape[start:end], np.int64),
    "Sub": _named("subtract", lambda *most: sum(most)),
    "Sigmoid": _elementwise(lambda library, a: 0.5 + 0.5 * library.tanh(0.5 * a)),
}


def spread_over(function: Callable[..., Array], array: Array) -> Array:
    """Apply a function of an entry and its four indices to every entry of (batch, heads, T, S)."""
    indices = (jnp.arange(n, dtype=jnp.int32) for n in array.shape)
    return jnp.vectorize(function)(array, *jnp.ix_(*indices))
