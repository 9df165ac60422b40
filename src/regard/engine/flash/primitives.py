"""Flash attention as JAX primitives, so that every transform works and stays linear in memory.

    forward   results(inputs);                                               its jvp binds tangent
    tangent   tangents of the results, linear in those of the inputs;        transposes to backward
    backward  cotangents of the inputs, linear in those of the results;      transposes to tangent
    second    jvp of tangent or backward by the inputs, rather than by what they are linear in

A custom_vjp would forbid forward mode, and differentiating the loops themselves would store every tile.
`second` differentiates the loops forward, which stores nothing; only its transpose (reverse over reverse)
runs the loops as checkpointed scans. vmap adds a leading axis, or, where masks differ along it, loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from regard.axes import Array
from regard.engine.flash import passes
from regard.engine.flash.operands import Context, Operands, Results
from regard.engine.flash.tiles import TileConfig

Leaves = Sequence[Any]


@dataclass(frozen=True)
class Spec:
    """The static parameters of a bind.

    Operands come in this order: inputs, results (not for forward), what the call is linear in, context. They
    have the config's leading axes; a score's parameters have those that vmap added, the context its own.
    """

    config: TileConfig
    present: tuple[str, ...]  # of Operands
    context: Any  # tree structure
    linear: tuple[str, ...] = ()  # of Operands for tangent, of Results for backward
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of the gradients backward returns
    of: str = ""  # for second: the primitive that is differentiated
    wrt: tuple[int, ...] = ()  # for second: by which of its operands

    @property
    def results(self) -> tuple[str, ...]:
        """Results that have tangents."""
        return ("output", "log_total", "entropy")[: 3 if "entropy" in self.config.stats else 2]

    @property
    def residuals(self) -> tuple[str, ...]:
        """Results that tangent and backward need."""
        return (*self.results, "peak")

    @property
    def found(self) -> tuple[str, ...]:
        """Results that forward returns."""
        return (*self.residuals, "argmax") if "argmax" in self.config.stats else self.residuals

    def laid_out(self, name: str) -> int:
        """Count the operands that lead with the config's axes."""
        if name == "second":
            return self.laid_out(self.of)
        residuals = 0 if name == "forward" else len(self.residuals)
        return len(self.present) + residuals + len(self.linear)


def run(inputs: Operands, context: Context, config: TileConfig) -> Results:
    """Attend, differentiably in the inputs."""
    named = inputs.named()
    leaves, structure = jax.tree.flatten(context)
    spec = Spec(config, tuple(named), structure)
    found = forward_p.bind(*named.values(), *leaves, spec=spec)
    return Results(**dict(zip(spec.found, found, strict=True)))


def _evaluate(name: str, spec: Spec, operands: Leaves, reversible: bool = False) -> list[Array]:
    """Compute a primitive in ordinary JAX code."""
    rest = iter(operands)
    inputs = Operands.from_named({name: next(rest) for name in spec.present})
    residuals = None
    if name != "forward":
        residuals = Results(**{result: next(rest) for result in spec.residuals})
    linear = {field: next(rest) for field in spec.linear}
    context = jax.tree.unflatten(spec.context, list(rest))
    if name == "forward":
        found = passes.forward(inputs, context, spec.config, reversible=reversible)
        return [getattr(found, result) for result in spec.found]
    assert residuals is not None
    if name == "tangent":
        found = passes.tangent(inputs, context, residuals, linear, spec.config, reversible=reversible)
        return [getattr(found, result) for result in spec.results]
    cotangents = Results(**linear)
    shapes = dict(spec.shapes)
    grads = passes.backward(
        inputs, context, residuals, cotangents, shapes, spec.config, reversible=reversible
    )
    return [grads[wanted] for wanted in shapes]


def _evaluate_second(spec: Spec, operands: Leaves, reversible: bool = False) -> list[Array]:
    count = len(operands) - len(spec.wrt)
    operands, tangents = list(operands[:count]), list(operands[count:])
    return jax.jvp(_as_function_of(spec, operands, reversible), _take(operands, spec.wrt), tangents)[1]


def _as_function_of(spec: Spec, operands: Leaves, reversible: bool) -> Any:
    def function(*wrt: Array) -> list[Array]:
        everything = list(operands)
        for place, value in zip(spec.wrt, wrt, strict=True):
            everything[place] = value
        return _evaluate(spec.of, spec, everything, reversible)

    return function


def _take(operands: Leaves, places: Sequence[int]) -> list[Any]:
    return [operands[place] for place in places]


def _shapes(name: str, spec: Spec) -> list[ShapedArray]:
    """Return the shapes of a primitive's results."""
    config = spec.config
    rows = config.rows
    kinds = {"output": (*rows, config.value_width)}
    if name == "second":
        name = spec.of
    if name == "backward":
        return [ShapedArray(shape, config.dtype) for _, shape in spec.shapes]
    names = spec.found if name == "forward" else spec.results
    return [
        ShapedArray(kinds.get(look, rows), np.int32 if look == "argmax" else config.dtype) for look in names
    ]


# Derivatives.


def _forward_jvp(operands: Leaves, tangents: Leaves, *, spec: Spec) -> tuple[list[Array], list[Any]]:
    found = forward_p.bind(*operands, spec=spec)
    count = len(spec.present)
    linear = [place for place in range(count) if not isinstance(tangents[place], ad.Zero)]
    by_name = dict.fromkeys(spec.found)
    if linear:
        residuals = found[: len(spec.residuals)]
        of = dataclasses.replace(spec, linear=tuple(spec.present[place] for place in linear))
        found_tangents = tangent_p.bind(
            *operands[:count], *residuals, *_take(tangents, linear), *operands[count:], spec=of
        )
        by_name |= dict(zip(spec.results, found_tangents, strict=True))
    return found, [
        ad.Zero(jax.typeof(value).to_tangent_aval()) if by_name[name] is None else by_name[name]
        for name, value in zip(spec.found, found, strict=True)
    ]


def _linear_jvp(name: str, operands: Leaves, tangents: Leaves, spec: Spec) -> tuple[list[Array], list[Any]]:
    """Compute the JVP: the primitive itself where it is linear, `second` for the other operands."""
    primitive = {"tangent": tangent_p, "backward": backward_p}[name]
    found = primitive.bind(*operands, spec=spec)
    end = spec.laid_out(name)
    first = end - len(spec.linear)
    parts = []
    varies = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    if any(varies[first:end]):
        linear = [ad.instantiate_zeros(tangent) for tangent in tangents[first:end]]
        parts.append(primitive.bind(*operands[:first], *linear, *operands[end:], spec=spec))
    wrt = tuple(place for place in range(first) if varies[place])
    if wrt:
        of = dataclasses.replace(spec, of=name, wrt=wrt)
        parts.append(second_p.bind(*operands, *_take(tangents, wrt), spec=of))
    if not parts:
        return found, [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in found]
    return found, [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]


def _second_jvp(operands: Leaves, tangents: Leaves, *, spec: Spec) -> tuple[list[Array], list[Any]]:
    """Compute third derivatives through scans, which JAX can differentiate in every direction."""
    varies = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def function(*varying: Array) -> list[Array]:
        everything = list(operands)
        for place, value in zip(varies, varying, strict=True):
            everything[place] = value
        return _evaluate_second(spec, everything, reversible=True)

    return jax.jvp(function, _take(operands, varies), _take(tangents, varies))


def _instantiate(cotangents: Leaves) -> list[Array]:
    return [ad.instantiate_zeros(cotangent) for cotangent in cotangents]


def _tangent_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    end = spec.laid_out("tangent")
    first = end - len(spec.linear)
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(operands)
    wanted = [
        (name, operand.aval.shape)
        for name, operand in zip(spec.linear, operands[first:end], strict=True)
        if ad.is_undefined_primal(operand)
    ]
    of = dataclasses.replace(spec, linear=spec.results, shapes=tuple(wanted))
    grads = backward_p.bind(*operands[:first], *_instantiate(cotangents), *operands[end:], spec=of)
    grads = dict(zip((name for name, _ in wanted), grads, strict=True))
    linear = [
        None if (grad := grads.get(name)) is None else grad.astype(operand.aval.dtype)
        for name, operand in zip(spec.linear, operands[first:end], strict=True)
    ]
    return [None] * first + linear + [None] * (len(operands) - end)


def _backward_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    end = spec.laid_out("backward")
    first = end - len(spec.linear)
    given = [place for place, cotangent in enumerate(cotangents) if not isinstance(cotangent, ad.Zero)]
    if not given:
        return [None] * len(operands)
    of = dataclasses.replace(spec, linear=tuple(spec.shapes[place][0] for place in given), shapes=())
    tangents = tangent_p.bind(*operands[:first], *_take(cotangents, given), *operands[end:], spec=of)
    linear = [
        tangent if ad.is_undefined_primal(operand) else None
        for tangent, operand in zip(tangents, operands[first:end], strict=True)
    ]
    return [None] * first + linear + [None] * (len(operands) - end)


def _second_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    count = len(operands) - len(spec.wrt)
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(operands)
    function = _as_function_of(spec, operands[:count], reversible=True)
    _, vjp = jax.vjp(function, *_take(operands, spec.wrt))
    return [None] * count + list(vjp(_instantiate(cotangents)))


# Batching.


def _batch(name: str, primitive: Primitive, operands: Leaves, axes: Leaves, *, spec: Spec) -> Any:
    """Put one more leading axis in front; where the context differs along it, loop."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    end = spec.laid_out(name)
    tail = len(operands) - len(spec.wrt)
    if any(axis is not None for axis in axes[end:tail]):
        return _loop(primitive, operands, axes, spec)
    # An operand and its tangent need one shape.
    pairs = [*zip(spec.wrt, range(tail, len(operands)), strict=True)]
    alike = {place for pair in pairs if any(axes[place] is not None for place in pair) for place in pair}
    operands = [
        operand if end <= place < tail else _lead(operand, axis, size if place in alike else 1)
        for place, (operand, axis) in enumerate(zip(operands, axes, strict=True))
    ]
    config = dataclasses.replace(
        spec.config, leading=(size, *spec.config.leading), added=spec.config.added + 1
    )
    shapes = tuple((wanted, (size, *shape)) for wanted, shape in spec.shapes)
    found = primitive.bind(*operands, spec=dataclasses.replace(spec, config=config, shapes=shapes))
    return found, [0] * len(found)


def _lead(operand: Array, axis: int | None, size: int) -> Array:
    """Return the operand with the batch in front, or with `size` copies of it."""
    if axis is None:
        return jnp.broadcast_to(operand, (size, *operand.shape))
    return jnp.moveaxis(operand, axis, 0)


def _loop(primitive: Primitive, operands: Leaves, axes: Leaves, spec: Spec) -> Any:
    varying = [place for place, axis in enumerate(axes) if axis is not None]

    def one(values: list[Array]) -> list[Array]:
        everything = list(operands)
        for place, value in zip(varying, values, strict=True):
            everything[place] = value
        return primitive.bind(*everything, spec=spec)

    found = jax.lax.map(one, [jnp.moveaxis(operands[place], axes[place], 0) for place in varying])
    return found, [0] * len(found)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(f"regard_{name}")
    primitive.multiple_results = True

    def evaluate(*operands: Any, spec: Spec) -> list[Array]:
        return _evaluate_second(spec, operands) if name == "second" else _evaluate(name, spec, operands)

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(lambda *operands, spec: _shapes(name, spec))
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=True))
    batching.primitive_batchers[primitive] = lambda operands, axes, *, spec: _batch(
        name, primitive, operands, axes, spec=spec
    )
    return primitive


forward_p, tangent_p, backward_p, second_p = map(_primitive, ("forward", "tangent", "backward", "second"))
ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[tangent_p] = lambda operands, tangents, *, spec: _linear_jvp(
    "tangent", operands, tangents, spec
)
ad.primitive_jvps[backward_p] = lambda operands, tangents, *, spec: _linear_jvp(
    "backward", operands, tangents, spec
)
ad.primitive_jvps[second_p] = _second_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[backward_p] = _backward_transpose
ad.primitive_transposes[second_p] = _second_transpose
