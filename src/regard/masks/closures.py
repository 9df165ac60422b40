"""Functions of callers, known to compiled programs by what they compute, and not by who they are.

A function may read what changes between two calls: a global, an attribute, an array that is written to. A
program that is kept for the function would go on with what it read first. So calls pin functions: what is
read is looked at anew, arrays become operands of the program, and it is kept for all functions alike.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from regard.arguments import keep_array
from regard.explicit_meshes import explicit_mesh
from regard.manual_meshes import run_anywhere, trace_anywhere, varying_axes

_RULED = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


class Pinned:
    """A function as it is now, equal to every other of its code that computes the same with its arrays."""

    def __init__(self, fn: Callable[..., Any], key: Hashable):
        self.fn, self.key = fn, key
        self.__qualname__ = getattr(fn, "__qualname__", repr(fn))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.fn(*arguments, **named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pinned) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def pin(
    fn: Callable[..., Any], call: Callable[..., Any], *examples: Sequence[Any]
) -> tuple[Pinned, tuple[Any, ...]]:
    """Pin a function that `call` calls; return it, and the arrays that it reads from around it.

    Where these are not the same for all examples of arguments, lie on explicit mesh axes, or vary over manual
    ones, which a program does not say, the function equals no other, and reads them by itself.
    """
    unlike = Pinned(fn, object()), ()
    if jax.sharding.get_abstract_mesh().manual_axes:
        return unlike
    try:
        programs = [trace_anywhere(call, *arguments) for arguments in examples]
        program = programs[0]
        derivative = _describe_derivative(program) if _has_rules(program.jaxpr) else None
    except Exception:  # which the call itself will raise, and explain
        return unlike
    is_alike = all(_are_same(program.consts, other.consts) for other in programs[1:])
    if not is_alike or explicit_mesh(program.consts) is not None:
        return unlike
    key = _source(fn), _describe_equations(program.jaxpr), derivative
    return Pinned(fn, key), tuple(map(keep_array, program.consts))


def demand_unchanged(pinned: Pinned, call: Callable[..., Any], *examples: Sequence[Any]) -> None:
    """Raise for a function that computes something else than when it was pinned, as in a prepared mask."""
    present: Any = pin(pinned.fn, call, *examples)[0].key
    past: Any = pinned.key
    if present == past or not (isinstance(present, tuple) and isinstance(past, tuple)):
        return
    # What does not equal itself cannot be told, nor what is asked for scores of another dtype.
    arguments = slice(-len(examples[0]), None)
    is_asked = present[1][0][arguments] == past[1][0][arguments]
    if is_asked and present == pin(pinned.fn, call, *examples)[0].key:
        raise ValueError(
            f"fn: expected {pinned.__qualname__} to compute what it did when its mask was prepared, or its"
            " call captured; what it reads from around it has changed. Prepare the mask again, or bind"
            " numbers as they are: `lambda query, key, width=width: ...`"
        )


def freeze(call: Callable[[Any], Any], operand: Any) -> Callable[[Any], Any]:
    """Return a call as a program made now, if masks or scores of the operand have functions of callers.

    A rule that JAX asks when it differentiates, which may be later, then calls none of them. With operands of
    another structure, or such as vary over manual mesh axes, the call itself is made.
    """
    nodes = jax.tree.leaves(operand, is_leaf=lambda node: hasattr(node, "constants"))
    if varying_axes(operand) or not any(hasattr(node, "constants") for node in nodes):
        return call
    leaves, structure = jax.tree.flatten(operand)
    shapes: Any = []

    def flat(*leaves: Any) -> list[Any]:
        results, tree = jax.tree.flatten(call(jax.tree.unflatten(structure, leaves)))
        shapes.append(tree)
        return results

    program = trace_anywhere(flat, *leaves)

    def run_frozen(operand: Any) -> Any:
        others, present = jax.tree.flatten(operand)
        if present != structure or varying_axes(operand):
            return call(operand)
        return jax.tree.unflatten(shapes[0], run_anywhere(program.jaxpr, program.consts, *others))

    return run_frozen


def reads_argument(call: Callable[..., Any], index: int, arguments: Sequence[Any]) -> bool:
    """Return whether a function computes with this one of its arguments; True where it cannot be called."""
    try:
        program = trace_anywhere(call, *arguments).jaxpr
    except Exception:  # which the call itself will raise, and explain
        return True
    atoms = [*program.outvars, *(atom for equation in program.eqns for atom in equation.invars)]
    return any(atom is program.invars[index] for atom in atoms)


def reads_arrays(tree: Any) -> bool:
    """Return True where a pinned function of a mask or score has arrays from around it."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, "constants"))
    return any(getattr(node, "constants", ()) for node in nodes)


class Program(NamedTuple):
    """A call of a function as a program."""

    jaxpr: Jaxpr
    consts: tuple[Any, ...]
    out_avals: Sequence[Any]


def trace_pinned(call: Callable[..., Any], arrays: Sequence[Any], *arguments: Any) -> Program:
    """Make a program of a call of a pinned function, whose constants are these arrays."""
    program = trace_anywhere(call, *arguments)
    types = [[jax.typeof(array).str_short() for array in each] for each in (arrays, program.consts)]
    consts = arrays if arrays and types[0] == types[1] else program.consts
    return Program(program.jaxpr, tuple(consts), program.out_avals)


def run_pinned(call: Callable[..., Any], arrays: Sequence[Any], *arguments: Any) -> Any:
    """Call a pinned function with these arrays in place of those around it."""
    if not arrays:
        return call(*arguments)
    program = trace_pinned(call, arrays, *arguments)
    return run_anywhere(program.jaxpr, program.consts, *arguments)[0]


def _are_same(arrays: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(arrays) == len(others) and all(
        array is other or _describe(array) == _describe(other)
        for array, other in zip(arrays, others, strict=True)
    )


def _source(fn: Any) -> Any:
    """Return what all functions of the same code have in common."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(fn)
    fn = getattr(fn, "__func__", fn)
    return getattr(fn, "__code__", type(fn))


def _describe(part: Any, names: dict[Any, int] | None = None) -> Hashable:
    """Describe a part of a program so that two are equal only if they compute the same."""
    if isinstance(part, ClosedJaxpr | Jaxpr):
        jaxpr: Any = getattr(part, "jaxpr", part)
        return _describe_equations(jaxpr), _describe(getattr(part, "consts", ()))
    if isinstance(part, Literal):
        return part.aval, _describe(part.val)
    if names is not None:
        return names[part]
    if isinstance(part, dict):
        return tuple((name, _describe(value)) for name, value in sorted(part.items()))
    if isinstance(part, list | tuple):
        return tuple(map(_describe, part))
    if isinstance(part, Tracer):
        return object()
    if isinstance(part, np.ndarray | jax.Array | np.generic | float):  # of numbers -0 is 0, and no NaN itself
        array: Any = part
        is_key = jnp.issubdtype(getattr(part, "dtype", np.float64), jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(array) if is_key else array)
        return array.shape, str(array.dtype), array.tobytes()
    try:
        hash(part)
    except TypeError:
        return object()
    return part


def _has_rules(part: Any) -> bool:
    """Return whether functions with derivatives of their own are in a part of a program."""
    if isinstance(part, list | tuple):
        return any(map(_has_rules, part))
    equations = getattr(getattr(part, "jaxpr", part), "eqns", ())
    return any(each.primitive.name in _RULED or _has_rules([*each.params.values()]) for each in equations)


def _describe_derivative(program: ClosedJaxpr, order: int = 1) -> Hashable:
    """Describe a program of numbers with its first and second derivative: equations do not show rules."""
    if not all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in program.out_avals):
        return None
    count = len(program.consts)
    avals = [var.aval for var in (*program.jaxpr.constvars, *program.jaxpr.invars)]
    is_real = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in avals]

    def compute(*operands: Any) -> list[Any]:
        return run_anywhere(program.jaxpr, operands[:count], *operands[count:])

    def differentiate(operands: list[Any], cotangents: list[Any]) -> Any:
        outputs, transpose = jax.vjp(compute, *operands)
        return outputs, [*itertools.compress(transpose(cotangents), is_real)]

    shapes = [
        [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in side] for side in (avals, program.out_avals)
    ]
    both = trace_anywhere(differentiate, *shapes)
    more = _describe_derivative(both, order + 1) if order < 2 and _has_rules(both.jaxpr) else None
    return _describe_equations(both.jaxpr), _describe(both.consts), more


def _describe_equations(program: Jaxpr) -> Hashable:
    """Describe what a program computes of its constants and inputs."""
    numbers = {var: index for index, var in enumerate((*program.constvars, *program.invars))}
    lines = []
    for equation in program.eqns:
        operands = tuple(_describe(atom, numbers) for atom in equation.invars)
        for var in equation.outvars:
            numbers[var] = len(numbers)
        types = tuple(var.aval for var in equation.outvars)
        params = equation.params
        if equation.primitive.name in _RULED:  # its rules are made anew in every trace
            params = {name: value for name, value in params.items() if isinstance(value, ClosedJaxpr)}
        lines.append((equation.primitive, operands, types, _describe(params)))
    inputs = tuple(var.aval for var in (*program.constvars, *program.invars))
    return inputs, tuple(lines), tuple(_describe(atom, numbers) for atom in program.outvars)
