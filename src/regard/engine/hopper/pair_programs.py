"""Pair programs: functions of pairs of a query and a key, cut in two where a kernel's work begins.

A mask or a score is traced on one tile. What depends on its rows alone, its columns alone or neither is
computed before the kernel, once per row, column or head, by XLA; what is left is done to every pair, in
registers, and must be arithmetic that knows no other pair.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array

COMPUTING = 2  # warpgroups that compute; one more loads
ROWS = 64  # of a warpgroup's products; queries of a tile that the gradient of keys reads
BLOCK = COMPUTING * ROWS  # rows of a block, and keys of a tile
ROW, COLUMN, BATCH, HEAD, TILE = "row", "column", "batch", "head", "tile"

# Function(batch, head, rows, columns, *tiles) -> pairs
PairFunction = Callable[..., Array]
# read(number of an operand, ROW, COLUMN or HEAD) -> its entries of the tile, or its entry
Read = Callable[[int, str], Array]

_CALLS = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
_SHAPES = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "copy", "reshard"}
# What ran on an H100, and what is lowered for one.
_PROVEN = {
    *("add", "sub", "mul", "rem", "max", "min", "neg", "abs", "sign", "square", "integer_pow"),
    *("exp2", "rsqrt", "logistic", "round", "and", "or", "eq", "ne", "lt", "le", "gt", "ge", "select_n"),
    *("clamp", "convert_element_type", "shift_left", "div of integers"),
}
_LOWERED = {"add_any", "div", "exp", "log", "tanh", "sqrt", "sin", "cos", "xor", "not"}


class UnpairedError(NotImplementedError):
    """A function does more than arithmetic on each pair."""


@dataclass(frozen=True)
class _Known:
    """A value that is there before anything runs."""

    value: Any


@dataclass(frozen=True)
class _Step:
    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Any, ...]  # a number of a value, or _Known
    outputs: tuple[int, ...]


@dataclass
class _Tape:
    """The steps of a function, calls of other functions written out."""

    steps: list[_Step] = field(default_factory=list)
    types: list[Any] = field(default_factory=list)
    maker: dict[int, _Step] = field(default_factory=dict)

    def number(self, value: Any) -> int:
        self.types.append(value.aval)
        return len(self.types) - 1

    def write(self, closed: Any, arguments: Sequence[Any]) -> list[Any]:
        """Write the steps of a program, and return its results."""
        program, constants = getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())
        atoms = dict(zip(program.invars, arguments, strict=True))
        atoms |= dict(zip(program.constvars, map(_Known, constants), strict=True))

        def read(atom: Any) -> Any:
            return _Known(atom.val) if hasattr(atom, "val") else atoms[atom]

        for equation in program.eqns:
            inputs = tuple(map(read, equation.invars))
            if equation.primitive.name in _CALLS:
                inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
                results = self.write(inner, inputs)
            else:
                results = [self.number(out) for out in equation.outvars]
                step = _Step(equation.primitive, equation.params, inputs, tuple(results))
                self.steps.append(step)
                self.maker |= dict.fromkeys(results, step)
            atoms |= dict(zip(equation.outvars, results, strict=True))
        return list(map(read, program.outvars))


@dataclass(frozen=True)
class Side:
    """One side of the score matrix: the tile that is traced, and the length in whole tiles of the kernel."""

    tile: int
    whole: int

    def indices(self) -> Array:
        """Return the index of every row or column, (tiles, tile), those beyond the end, too."""
        count = -(-self.whole // self.tile)
        return jnp.arange(count * self.tile, dtype=jnp.int32).reshape(count, self.tile)


class PairProgram:
    """A function of a tile's pairs: `operands` is computed before the kernel, `run` inside."""

    def __init__(
        self, function: PairFunction, rows: Side, columns: Side, leading: tuple[int, int], tiles: int = 0
    ) -> None:
        """Trace the function of batch row, head, indices of rows and columns, and float32 tiles."""
        self._rows, self._columns, self._leading = rows, columns, leading
        self._tile = (rows.tile, columns.tile)
        scalar, floats = jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct(self._tile, np.float32)
        indices = [jax.ShapeDtypeStruct((side.tile,), np.int32) for side in (rows, columns)]
        closed = jax.make_jaxpr(function)(scalar, scalar, *indices, *[floats] * tiles)
        self._tape = tape = _Tape()
        self._inputs = [tape.number(var) for var in closed.jaxpr.invars]
        names = (BATCH, HEAD, ROW, COLUMN, *(TILE,) * tiles)
        self._depends = {at: frozenset([name]) for at, name in zip(self._inputs, names, strict=True)}
        (self._result,) = tape.write(closed, self._inputs)
        for step in tape.steps:
            union = frozenset[str]().union(*(self._depends_of(atom) for atom in step.inputs))
            self._depends |= dict.fromkeys(step.outputs, union)
        self._reads: dict[int, str] = {}  # what the kernel is given, and of what there is one each
        self._steps: list[_Step] = []  # what it does
        self.unproven: list[str] = []  # of these, what no device has run yet
        self._want(self._result, set())

    def _depends_of(self, atom: Any) -> frozenset[str]:
        return frozenset() if isinstance(atom, _Known) else self._depends[atom]

    def _shape_of(self, atom: Any) -> tuple[int, ...]:
        return np.shape(atom.value) if isinstance(atom, _Known) else self._tape.types[atom].shape

    def _outside(self, atom: Any) -> str | None:
        """Return of what there is one each of a value that is known before the kernel; None, of pairs."""
        depends, size = self._depends_of(atom), math.prod(self._shape_of(atom))
        if TILE in depends or {ROW, COLUMN} <= depends:
            return None
        kind, own = HEAD, 1
        if ROW in depends:
            kind, own = ROW, self._tile[0]
        elif COLUMN in depends:
            kind, own = COLUMN, self._tile[1]
        return kind if size == own else HEAD if size == 1 else None

    def _want(self, atom: Any, seen: set[int]) -> None:
        """Gather the steps that lead to a value over pairs, in order."""
        if isinstance(atom, _Known):
            if math.prod(self._shape_of(atom)) > 1:
                raise UnpairedError("an array that holds a number for every pair")
            return
        if atom in seen or atom in self._inputs[4:]:
            return
        seen.add(atom)
        kind = self._outside(atom)
        if kind is not None:
            dtype = self._tape.types[atom].dtype
            if dtype.itemsize != 4 and not jnp.issubdtype(dtype, bool):
                raise UnpairedError(f"numbers of {8 * dtype.itemsize} bits")
            self._reads[atom] = kind
            return
        step = self._tape.maker.get(atom)
        name = "an array" if step is None else step.primitive.name
        if step is not None and name in ("div", "rem", "integer_pow"):
            name = self._name_with_kind(step)
        if step is None or name not in _SHAPES | _PROVEN | _LOWERED:
            raise UnpairedError(f"{name!r} over pairs")
        lead, last = self._shape_of(atom)[:-2], self._shape_of(atom)[-2:]
        if last != self._tile or math.prod(lead) != 1 or not self._lies_as_its_inputs(step):
            raise UnpairedError(f"{name!r} over more than pairs")
        for operand in step.inputs:
            self._want(operand, seen)
        self._steps.append(step)
        if name not in _SHAPES | _PROVEN:
            self.unproven.append(name)

    def _name_with_kind(self, step: _Step) -> str:
        """Return what a step is called where the compiler for the device knows one kind alone."""
        name, dtype = step.primitive.name, self._tape.types[step.outputs[0]].dtype
        floats = jnp.issubdtype(dtype, jnp.floating)
        if name == "integer_pow" and step.params["y"] < 0:
            return "a negative power"
        return {("div", False): "div of integers", ("rem", True): "rem of floats"}.get((name, floats), name)

    def _lies_as_its_inputs(self, step: _Step) -> bool:
        """Tell whether what there is one each of per row is laid along rows, and so on."""
        if step.primitive.name != "broadcast_in_dim":
            return True
        shape, axes = self._shape_of(step.inputs[0]), step.params["broadcast_dimensions"]
        long = [axis - len(step.params["shape"]) for axis, size in zip(axes, shape, strict=True) if size > 1]
        expected = {ROW: [-2], COLUMN: [-1], HEAD: []}.get(self._outside(step.inputs[0]) or "")
        return expected is None or long in (expected, [])

    def operands(self) -> list[Array]:
        """Compute what the kernel reads: (batch | 1, heads | 1, rows or columns, or 1), 32 bits each."""
        return [self._everywhere(atom, kind) for atom, kind in self._reads.items()]

    @property
    def kinds(self) -> list[str]:
        """Return whether an operand has an entry per row, column or head, for each."""
        return list(self._reads.values())

    def _everywhere(self, atom: int, kind: str) -> Array:
        def at(batch: Array, head: Array, index: Array) -> Array:
            return self._evaluate(atom, (batch, head, index, index)).reshape(-1)

        depends, side = self._depends[atom], self._columns if kind == COLUMN else self._rows
        places: list[Any] = [
            jnp.arange(size if name in depends else 1, dtype=jnp.int32)
            for name, size in zip((BATCH, HEAD), self._leading, strict=True)
        ]
        places.append(side.indices() if kind != HEAD else side.indices()[:1])
        function = at
        for axis in reversed(range(3)):
            function = jax.vmap(function, [0 if index == axis else None for index in range(3)])
        numbers = function(*places)
        numbers = numbers.reshape((*numbers.shape[:2], -1))[..., : side.whole if kind != HEAD else 1]
        return numbers.astype(jnp.int32) if numbers.dtype == bool else numbers

    def _evaluate(self, wanted: int, arguments: Sequence[Array]) -> Array:
        values: dict[int, Any] = dict(zip(self._inputs, arguments, strict=False))

        def find(atom: Any) -> Any:
            if isinstance(atom, _Known):
                return atom.value
            if atom not in values:
                step = self._tape.maker[atom]
                results = step.primitive.bind(*map(find, step.inputs), **step.params)
                results = results if step.primitive.multiple_results else [results]
                values.update(zip(step.outputs, results, strict=True))
            return values[atom]

        return find(wanted)

    def run(self, read: Read, shape: tuple[int, int], *tiles: Array, across: bool = False) -> Array:
        """Compute the function of a kernel's tile; `across`, where it lies columns by rows."""
        reads = list(self._reads.items())
        values: dict[int, Any] = dict(zip(self._inputs[4:], tiles, strict=True))

        @functools.cache
        def spread(atom: int) -> Array:
            """Read an operand, and lay it over the tile."""
            number = [wanted for wanted, _ in reads].index(atom)
            kind = reads[number][1]
            operand = read(number, kind)
            axes = {ROW: (1,) if across else (0,), COLUMN: (0,) if across else (1,), HEAD: ()}[kind]
            operand = jax.lax.broadcast_in_dim(operand, shape, axes)
            return operand != 0 if self._tape.types[atom].dtype == bool else operand

        def find(atom: Any) -> Any:
            if isinstance(atom, _Known):
                value = np.asarray(atom.value)
                return jax.lax.broadcast_in_dim(value.reshape(()), shape, ())
            return spread(atom) if atom in self._reads else values[atom]

        for step in self._steps:
            inputs = list(map(find, step.inputs))
            if step.primitive.name in _SHAPES:
                values[step.outputs[0]] = inputs[0]
            elif step.primitive.name == "add_any":  # of two cotangents
                values[step.outputs[0]] = jax.lax.add(*inputs)
            elif step.primitive.name == "not" and inputs[0].dtype == bool:  # Mosaic has none of one bit
                values[step.outputs[0]] = inputs[0] != np.bool_(True)
            else:
                values[step.outputs[0]] = step.primitive.bind(*inputs, **step.params)
        return find(self._result)


class Lists(NamedTuple):
    """The tiles of each block: where they start, how many are FULL, and how many there are."""

    starts: Array  # (batch | 1, heads | any divisor, blocks, tiles)
    counts: Array  # (batch | 1, heads | any divisor, blocks, 2)


@dataclass(frozen=True)
class Pairs:
    """Functions of pairs: which are kept, their scores, and the derivatives of these."""

    keep: PairProgram | None
    apply: PairProgram | None
    vjp: PairProgram | None

    @property
    def programs(self) -> list[PairProgram]:
        return [program for program in (self.keep, self.apply, self.vjp) if program is not None]

    def operands(self) -> list[list[Array]]:
        """Compute what the functions read."""
        return [
            [] if program is None else program.operands() for program in (self.keep, self.apply, self.vjp)
        ]
