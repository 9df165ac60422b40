"""Flash attention as JAX primitives, so that every transform works and stays linear in memory.

    forward   results(inputs);                                               its jvp binds tangent
    tangent   tangents of the results, linear in those of the inputs;        transposes to backward
    backward  cotangents of the inputs, linear in those of the results;      transposes to tangent
    second    jvp of tangent or backward by the inputs, rather than by
              what they are linear in;                                       transposes to adjoint
    adjoint   cotangents of these inputs, from those of what second returns

A custom_vjp would forbid forward mode, and differentiating the loops themselves would store every tile.
`second` differentiates the loops forward, which stores nothing; only `adjoint` (reverse over reverse)
runs the loops as checkpointed scans. vmap adds a leading axis, or, where masks differ along it, loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch  # has no public name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from regard.axes import Array
from regard.engine.call.checkpoint_names import name_results
from regard.engine.flash import partitioning, passes
from regard.engine.flash.device_types import lower_for_one_device, result_types, vary_alike
from regard.engine.flash.operands import Context, Operands, Results
from regard.engine.flash.partitioning import Axes, Leading
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
    of: str = ""  # for second and adjoint: the primitive that is differentiated
    wrt: tuple[int, ...] = ()  # for second and adjoint: by which of its operands

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

    def laid_out(self, name: str) -> tuple[str, ...]:
        """Return what the operands are that lead with the config's axes."""
        residuals = () if (self.of or name) == "forward" else self.residuals
        return (*self.present, *residuals, *self.linear)

    def result_names(self, name: str) -> tuple[str, ...]:
        """Return what the results are."""
        if name == "adjoint":
            return tuple(self.laid_out(name)[place] for place in self.wrt)
        if (self.of or name) == "backward":
            return tuple(wanted for wanted, _ in self.shapes)
        return self.found if name == "forward" else self.results

    def tail(self, name: str) -> tuple[str, ...]:
        """Return what the operands after the context are: tangents for second, cotangents for adjoint."""
        return {"second": self.result_names("adjoint"), "adjoint": self.result_names("second")}.get(name, ())

    def axes(self, name: str, operands: Leaves) -> list[Axes]:
        """Return the leading axes of operands."""
        names, tail = self.laid_out(name), self.tail(name)
        end = len(operands) - len(tail)
        context = jax.tree.unflatten(self.context, operands[len(names) : end])
        return [
            *self._axes_of(names, operands[: len(names)]),
            *partitioning.context_axes(context, self.config),
            *self._axes_of(tail, operands[end:]),
        ]

    def result_axes(self, name: str, operands: Leaves) -> list[Axes]:
        """Return the leading axes of results."""
        return self._axes_of(self.result_names(name), _shapes(name, operands, self))

    def _axes_of(self, names: Sequence[str], arrays: Sequence[Any]) -> list[Axes]:
        return [
            partitioning.axes_of(name, array.shape, self.config)
            for name, array in zip(names, arrays, strict=True)
        ]

    def divide(self, part: Leading) -> Spec:
        """Return the parameters of the same on a part of the leading axes."""
        shapes = tuple(
            (name, part.shape(shape, partitioning.axes_of(name, shape, self.config)))
            for name, shape in self.shapes
        )
        return dataclasses.replace(self, config=partitioning.divide_config(self.config, part), shapes=shapes)


def run(inputs: Operands, context: Context, config: TileConfig) -> Results:
    """Attend, differentiably in the inputs."""
    named = inputs.named()
    leaves, structure = jax.tree.flatten(context)
    spec = Spec(config, tuple(named), structure)
    found = bind(forward_p, *named.values(), *leaves, spec=spec)
    return Results(**dict(zip(spec.found, found, strict=True)))


def bind(primitive: Primitive, *operands: Array, spec: Spec) -> list[Array]:
    """Bind a primitive to operands that are made to vary alike over manual mesh axes."""
    return primitive.bind(*vary_alike(operands), spec=spec)


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


def _evaluate_adjoint(spec: Spec, operands: Leaves) -> list[Array]:
    count = len(operands) - len(spec.tail("adjoint"))
    function = _as_function_of(spec, operands[:count], reversible=True)
    _, vjp = jax.vjp(function, *_take(operands, spec.wrt))
    return list(vjp(list(operands[count:])))


def _shapes(name: str, operands: Leaves, spec: Spec) -> list[ShapedArray]:
    """Return the shapes of a primitive's results."""
    if name == "adjoint":
        return [ShapedArray(operand.shape, operand.dtype) for operand in _take(operands, spec.wrt)]
    config = spec.config
    shapes = {"output": (*config.rows, config.value_width), **dict(spec.shapes)}
    return [
        ShapedArray(shapes.get(result, config.rows), np.int32 if result == "argmax" else config.dtype)
        for result in spec.result_names(name)
    ]


# Derivatives.


def _forward_jvp(operands: Leaves, tangents: Leaves, *, spec: Spec) -> tuple[list[Array], list[Any]]:
    found = name_results(spec.found, bind(forward_p, *operands, spec=spec))
    count = len(spec.present)
    linear = [place for place in range(count) if not isinstance(tangents[place], ad.Zero)]
    by_name = dict.fromkeys(spec.found)
    if linear:
        residuals = found[: len(spec.residuals)]
        of = dataclasses.replace(spec, linear=tuple(spec.present[place] for place in linear))
        found_tangents = bind(
            tangent_p, *operands[:count], *residuals, *_take(tangents, linear), *operands[count:], spec=of
        )
        by_name |= dict(zip(spec.results, found_tangents, strict=True))
    return found, [
        ad.Zero(jax.typeof(value).to_tangent_aval()) if by_name[name] is None else by_name[name]
        for name, value in zip(spec.found, found, strict=True)
    ]


def _linear_jvp(name: str, operands: Leaves, tangents: Leaves, spec: Spec) -> tuple[list[Array], list[Any]]:
    """Compute the JVP: the primitive itself where it is linear, `second` for the other operands."""
    primitive = {"tangent": tangent_p, "backward": backward_p}[name]
    found = bind(primitive, *operands, spec=spec)
    end = len(spec.laid_out(name))
    first = end - len(spec.linear)
    parts = []
    varies = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    if any(varies[first:end]):
        linear = [ad.instantiate_zeros(tangent) for tangent in tangents[first:end]]
        parts.append(bind(primitive, *operands[:first], *linear, *operands[end:], spec=spec))
    wrt = tuple(place for place in range(first) if varies[place])
    if wrt:
        of = dataclasses.replace(spec, of=name, wrt=wrt)
        parts.append(bind(second_p, *operands, *_take(tangents, wrt), spec=of))
    if not parts:
        return found, [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in found]
    return found, [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]


def _third_jvp(
    evaluate: Any, operands: Leaves, tangents: Leaves, *, spec: Spec
) -> tuple[list[Array], list[Any]]:
    """Compute third derivatives through scans, which JAX can differentiate in every direction."""
    varies = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def function(*varying: Array) -> list[Array]:
        everything = list(operands)
        for place, value in zip(varies, varying, strict=True):
            everything[place] = value
        return evaluate(spec, everything)

    return jax.jvp(function, _take(operands, varies), _take(tangents, varies))


def _instantiate(cotangents: Leaves) -> list[Array]:
    return [ad.instantiate_zeros(cotangent) for cotangent in cotangents]


def _tangent_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    end = len(spec.laid_out("tangent"))
    first = end - len(spec.linear)
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(operands)
    wanted = [
        (name, operand.aval.shape)
        for name, operand in zip(spec.linear, operands[first:end], strict=True)
        if ad.is_undefined_primal(operand)
    ]
    of = dataclasses.replace(spec, linear=spec.results, shapes=tuple(wanted))
    grads = bind(backward_p, *operands[:first], *_instantiate(cotangents), *operands[end:], spec=of)
    grads = dict(zip((name for name, _ in wanted), grads, strict=True))
    linear = [
        None if (grad := grads.get(name)) is None else grad.astype(operand.aval.dtype)
        for name, operand in zip(spec.linear, operands[first:end], strict=True)
    ]
    return [None] * first + linear + [None] * (len(operands) - end)


def _backward_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    end = len(spec.laid_out("backward"))
    first = end - len(spec.linear)
    given = [place for place, cotangent in enumerate(cotangents) if not isinstance(cotangent, ad.Zero)]
    if not given:
        return [None] * len(operands)
    of = dataclasses.replace(spec, linear=tuple(spec.shapes[place][0] for place in given), shapes=())
    tangents = bind(tangent_p, *operands[:first], *_take(cotangents, given), *operands[end:], spec=of)
    linear = [
        tangent if ad.is_undefined_primal(operand) else None
        for tangent, operand in zip(tangents, operands[first:end], strict=True)
    ]
    return [None] * first + linear + [None] * (len(operands) - end)


def _second_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    count = len(operands) - len(spec.wrt)
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(operands)
    return [None] * count + bind(adjoint_p, *operands[:count], *_instantiate(cotangents), spec=spec)


# Batching.


def _batch(name: str, primitive: Primitive, operands: Leaves, axes: Leaves, *, spec: Spec) -> Any:
    """Put one more leading axis in front; where the context differs along it, loop."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    end = len(spec.laid_out(name))
    tail = len(operands) - len(spec.tail(name))
    if any(axis is not None for axis in axes[end:tail]):
        return _loop(primitive, operands, axes, spec)
    alike = {*spec.wrt, *range(tail, len(operands))}  # each with its tangent, or its own gradient per index
    operands = [
        operand if end <= place < tail else _lead(operand, axis, size if place in alike else 1)
        for place, (operand, axis) in enumerate(zip(operands, axes, strict=True))
    ]
    config = dataclasses.replace(
        spec.config, leading=(size, *spec.config.leading), added=spec.config.added + 1
    )
    shapes = tuple((wanted, (size, *shape)) for wanted, shape in spec.shapes)
    found = bind(primitive, *operands, spec=dataclasses.replace(spec, config=config, shapes=shapes))
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
        return bind(primitive, *everything, spec=spec)

    found = jax.lax.map(one, [jnp.moveaxis(operands[place], axes[place], 0) for place in varying])
    return found, [0] * len(found)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(f"regard_{name}")
    primitive.multiple_results = True

    def evaluate(*operands: Any, spec: Spec) -> list[Array]:
        by_name = {"second": _evaluate_second, "adjoint": _evaluate_adjoint}
        return by_name[name](spec, operands) if name in by_name else _evaluate(name, spec, operands)

    def evaluate_divided(*operands: Any, spec: Spec) -> list[Array]:
        return partitioning.divide(
            lambda part: partial(evaluate, spec=spec.divide(part)),
            Leading.of(spec.config),
            operands,
            spec.axes(name, operands),
            _shapes(name, operands, spec),
            spec.result_axes(name, operands),
            sums=name == "adjoint" or (spec.of or name) == "backward",
        )

    def lower(context: Any, *operands: Any, spec: Spec) -> Any:
        divided = partitioning.find_mesh(context)
        if divided is not None:
            return lower_for_one_device(divided, partial(evaluate_divided, spec=spec), *operands)
        return lower_for_one_device(context, partial(evaluate, spec=spec), *operands)

    primitive.def_impl(evaluate)
    primitive.def_abstract_eval(lambda *operands, spec: result_types(operands, _shapes(name, operands, spec)))
    mlir.register_lowering(primitive, lower)
    dispatch.prim_requires_devices_during_lowering.add(primitive)
    batching.primitive_batchers[primitive] = lambda operands, axes, *, spec: _batch(
        name, primitive, operands, axes, spec=spec
    )
    return primitive


forward_p, tangent_p, backward_p = map(_primitive, ("forward", "tangent", "backward"))
second_p, adjoint_p = map(_primitive, ("second", "adjoint"))
ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[tangent_p] = lambda operands, tangents, *, spec: _linear_jvp(
    "tangent", operands, tangents, spec
)
ad.primitive_jvps[backward_p] = lambda operands, tangents, *, spec: _linear_jvp(
    "backward", operands, tangents, spec
)
ad.primitive_jvps[second_p] = partial(_third_jvp, partial(_evaluate_second, reversible=True))
ad.primitive_jvps[adjoint_p] = partial(_third_jvp, _evaluate_adjoint)
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[backward_p] = _backward_transpose
ad.primitive_transposes[second_p] = _second_transpose
