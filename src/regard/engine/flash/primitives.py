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

import abc
import dataclasses
from collections.abc import Callable, Sequence
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
from regard.engine.flash.device_types import most_varying, result_types, sum_as
from regard.engine.flash.operands import Operands, Results
from regard.manual_meshes import vary_alike

Leaves = Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class Spec(abc.ABC):
    """The static parameters of a bind, and how it is computed, which subclasses say.

    Operands come in this order: inputs, results (not for forward), what the call is linear in, context.
    """

    present: tuple[str, ...]  # of Operands
    context: Any  # tree structure
    linear: tuple[str, ...] = ()  # of Operands for tangent, of Results for backward
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of the gradients backward returns
    of: str = ""  # for second and adjoint: the primitive that is differentiated
    wrt: tuple[int, ...] = ()  # for second and adjoint: by which of its operands

    @property
    @abc.abstractmethod
    def stats(self) -> frozenset[str]:
        """Statistics asked for."""

    @abc.abstractmethod
    def row_shape(self, operands: Leaves) -> tuple[tuple[int, ...], int, Any]:
        """Return the axes of what there is per query, the output's width, and the dtype of sums."""

    def dtype_of(self, result: str, dtype: Any) -> Any:
        """Return the dtype of a result, given that of sums."""
        return np.int32 if result == "argmax" else dtype

    @abc.abstractmethod
    def compute(self, name: str, inputs: Operands, context: Any, *args: Any, reversible: bool) -> Any:
        """Compute forward, the results that `found` names; or, given the results, a derivative.

        tangent: given tangents of inputs by name, those of the results.
        backward: given cotangents as `Results`, and shapes of inputs by name, the cotangents of these.
        """

    @abc.abstractmethod
    def lower(self, name: str, context: Any, *operands: Any) -> Any:
        """Lower a primitive."""

    @abc.abstractmethod
    def batch(self, name: str, operands: Leaves, axes: Leaves) -> tuple[list[Array], Spec] | None:
        """Put one more leading axis in front of the operands; None where only a loop will do."""

    def batched(
        self, name: str, function: Callable[[Spec, Leaves], list[Array]]
    ) -> Callable[..., list[Array]]:
        """Return the function of the operands, whatever axes `batch` put in front of them."""
        return lambda *operands: function(self, operands)

    @property
    def results(self) -> tuple[str, ...]:
        """Results that have tangents."""
        return ("output", "log_total", "entropy")[: 3 if "entropy" in self.stats else 2]

    @property
    def residuals(self) -> tuple[str, ...]:
        """Results that tangent and backward need."""
        return (*self.results, "peak")

    @property
    def found(self) -> tuple[str, ...]:
        """Results that forward returns."""
        return (*self.residuals, "argmax") if "argmax" in self.stats else self.residuals

    def laid_out(self, name: str) -> tuple[str, ...]:
        """Return what the operands before the context are."""
        residuals = () if (self.of or name) == "forward" else self.residuals
        return (*self.present, *residuals, *self.linear)

    def result_names(self, name: str) -> tuple[str, ...]:
        """Return what the results are."""
        if name == "adjoint":
            return tuple(self.laid_out(name)[index] for index in self.wrt)
        if (self.of or name) == "backward":
            return tuple(wanted for wanted, _ in self.shapes)
        return self.found if name == "forward" else self.results

    def tail(self, name: str) -> tuple[str, ...]:
        """Return what the operands after the context are: tangents for second, cotangents for adjoint."""
        return {"second": self.result_names("adjoint"), "adjoint": self.result_names("second")}.get(name, ())


def run(inputs: Operands, context: Any, make_spec: Callable[..., Spec]) -> Results:
    """Attend, differentiably in the inputs."""
    named = inputs.named()
    leaves, structure = jax.tree.flatten(context)
    spec = make_spec(present=tuple(named), context=structure)
    results = bind("forward", *named.values(), *leaves, spec=spec)
    return Results(**dict(zip(spec.found, results, strict=True)))


def bind(name: str, *operands: Array, spec: Spec) -> list[Array]:
    """Bind a primitive to operands, some of which may be the same along manual mesh axes of others."""
    manual = most_varying([jax.typeof(operand) for operand in operands]).sharding.mesh.manual_axes
    return (INSIDE if manual else OUTSIDE)[name].bind(*operands, spec=spec)


def _evaluate(name: str, spec: Spec, operands: Leaves, reversible: bool = False) -> list[Array]:
    """Compute forward, tangent or backward."""
    rest = iter(operands)
    inputs = Operands.from_named({name: next(rest) for name in spec.present})
    residuals = None
    if name != "forward":
        residuals = Results(**{result: next(rest) for result in spec.residuals})
    linear = {field: next(rest) for field in spec.linear}
    context = jax.tree.unflatten(spec.context, list(rest))
    if name == "forward":
        results = spec.compute("forward", inputs, context, reversible=reversible)
        return [getattr(results, result) for result in spec.found]
    assert residuals is not None
    if name == "tangent":
        results = spec.compute("tangent", inputs, context, residuals, linear, reversible=reversible)
        return [getattr(results, result) for result in spec.results]
    shapes, cotangents = dict(spec.shapes), Results(**linear)
    grads = spec.compute("backward", inputs, context, residuals, cotangents, shapes, reversible=reversible)
    return [grads[wanted] for wanted in shapes]


def _evaluate_second(spec: Spec, operands: Leaves, reversible: bool = False) -> list[Array]:
    count = len(operands) - len(spec.wrt)
    operands, tangents = list(operands[:count]), list(operands[count:])
    evaluate = partial(_evaluate, spec.of, spec, reversible=reversible)
    return jax.jvp(_of_those(spec.wrt, evaluate, operands), _take(operands, spec.wrt), tangents)[1]


def _of_those(
    places: Sequence[int], function: Callable[[Leaves], list[Array]], operands: Leaves
) -> Callable[..., list[Array]]:
    """Return a function of all operands as one of those at some places, the others being what they are."""

    def of_those(*values: Array) -> list[Array]:
        everything = list(operands)
        for index, value in zip(places, values, strict=True):
            everything[index] = value
        return function(everything)

    return of_those


def _take(operands: Leaves, places: Sequence[int]) -> list[Any]:
    return [operands[index] for index in places]


def _evaluate_adjoint(spec: Spec, operands: Leaves) -> list[Array]:
    count = len(operands) - len(spec.tail("adjoint"))
    evaluate = partial(_evaluate, spec.of, spec, reversible=True)
    _, vjp = jax.vjp(_of_those(spec.wrt, evaluate, operands[:count]), *_take(operands, spec.wrt))
    return list(vjp(list(operands[count:])))


def result_shapes(name: str, operands: Leaves, spec: Spec) -> list[ShapedArray]:
    """Return the shapes of a primitive's results."""
    if name == "adjoint":
        return [ShapedArray(operand.shape, operand.dtype) for operand in _take(operands, spec.wrt)]
    rows, width, dtype = spec.row_shape(operands)
    shapes = {"output": (*rows, width), **dict(spec.shapes)}
    return [
        ShapedArray(shapes.get(result, rows), spec.dtype_of(result, dtype))
        for result in spec.result_names(name)
    ]


def evaluate(name: str, spec: Spec, *operands: Any) -> list[Array]:
    """Compute a primitive in ordinary JAX code."""
    by_name = {"second": _evaluate_second, "adjoint": _evaluate_adjoint}
    return spec.batched(name, by_name.get(name, partial(_evaluate, name)))(*operands)


# Derivatives.


def _forward_jvp(operands: Leaves, tangents: Leaves, *, spec: Spec) -> tuple[list[Array], list[Any]]:
    results = name_results(spec.found, bind("forward", *operands, spec=spec))
    count = len(spec.present)
    linear = [index for index in range(count) if not isinstance(tangents[index], ad.Zero)]
    by_name = dict.fromkeys(spec.found)
    if linear:
        residuals = results[: len(spec.residuals)]
        of = dataclasses.replace(spec, linear=tuple(spec.present[index] for index in linear))
        result_tangents = bind(
            "tangent", *operands[:count], *residuals, *_take(tangents, linear), *operands[count:], spec=of
        )
        by_name |= dict(zip(spec.results, result_tangents, strict=True))
    return results, [
        ad.Zero(jax.typeof(value).to_tangent_aval()) if by_name[name] is None else by_name[name]
        for name, value in zip(spec.found, results, strict=True)
    ]


def _linear_jvp(
    name: str, operands: Leaves, tangents: Leaves, *, spec: Spec
) -> tuple[list[Array], list[Any]]:
    """Compute the JVP: the primitive itself where it is linear, `second` for the other operands."""
    results = bind(name, *operands, spec=spec)
    end = len(spec.laid_out(name))
    first = end - len(spec.linear)
    parts = []
    varies = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    if any(varies[first:end]):
        linear = [ad.instantiate_zeros(tangent) for tangent in tangents[first:end]]
        parts.append(bind(name, *operands[:first], *linear, *operands[end:], spec=spec))
    wrt = tuple(index for index in range(first) if varies[index])
    if wrt:
        of = dataclasses.replace(spec, of=name, wrt=wrt)
        parts.append(bind("second", *operands, *_take(tangents, wrt), spec=of))
    if not parts:
        return results, [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in results]
    return results, [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]


def _third_jvp(
    name: str, evaluate: Any, operands: Leaves, tangents: Leaves, *, spec: Spec
) -> tuple[list[Array], list[Any]]:
    """Compute third derivatives through scans, which JAX can differentiate in every direction."""
    batched = spec.batched(name, evaluate)
    return jvp_of_varying(lambda leaves: batched(*vary_alike(leaves)), operands, tangents)


def jvp_of_varying(
    function: Callable[[Leaves], list[Array]], operands: Leaves, tangents: Leaves
) -> tuple[list[Array], list[Any]]:
    """Compute the JVP by those operands that have tangents."""
    varies = [index for index, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]
    return jax.jvp(_of_those(varies, function, operands), _take(operands, varies), _take(tangents, varies))


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
    # Of an entropy that only was asked for nothing is computed: other programs may have other bits.
    linear = {
        name: ad.instantiate_zeros(cotangent)
        for name, cotangent in zip(spec.results, cotangents, strict=True)
        if name != "entropy" or not isinstance(cotangent, ad.Zero)
    }
    of = dataclasses.replace(spec, linear=tuple(linear), shapes=tuple(wanted))
    grads = bind("backward", *operands[:first], *linear.values(), *operands[end:], spec=of)
    grads = dict(zip((name for name, _ in wanted), grads, strict=True))
    summed = [
        None if (grad := grads.get(name)) is None else sum_as(grad, operand.aval)
        for name, operand in zip(spec.linear, operands[first:end], strict=True)
    ]
    return [None] * first + summed + [None] * (len(operands) - end)


def _backward_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    end = len(spec.laid_out("backward"))
    first = end - len(spec.linear)
    nonzero = [index for index, cotangent in enumerate(cotangents) if not isinstance(cotangent, ad.Zero)]
    if not nonzero:
        return [None] * len(operands)
    of = dataclasses.replace(spec, linear=tuple(spec.shapes[index][0] for index in nonzero), shapes=())
    tangents = bind("tangent", *operands[:first], *_take(cotangents, nonzero), *operands[end:], spec=of)
    by_name = dict(zip(spec.results, tangents, strict=True))
    linear = [
        sum_as(by_name[name], operand.aval) if ad.is_undefined_primal(operand) else None
        for name, operand in zip(spec.linear, operands[first:end], strict=True)
    ]
    return [None] * first + linear + [None] * (len(operands) - end)


def _second_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    count = len(operands) - len(spec.wrt)
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(operands)
    pulled = bind("adjoint", *operands[:count], *map(ad.instantiate_zeros, cotangents), spec=spec)
    pairs = zip(pulled, operands[count:], strict=True)
    return [None] * count + [sum_as(cotangent, operand.aval) for cotangent, operand in pairs]


# Batching.


def _batch(name: str, operands: Leaves, axes: Leaves, *, spec: Spec) -> Any:
    batched = spec.batch(name, operands, axes)
    if batched is None:
        return _loop(name, operands, axes, spec)
    results = bind(name, *batched[0], spec=batched[1])
    return results, [0] * len(results)


def lead(operand: Array, axis: int | None, size: int) -> Array:
    """Return the operand with the batch in front, or with `size` copies of it."""
    if axis is None:
        return jnp.broadcast_to(operand, (size, *operand.shape))
    return jnp.moveaxis(operand, axis, 0)


def batch_size(operands: Leaves, axes: Leaves) -> int:
    """Return the length of the axis that vmap adds."""
    return next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)


def _loop(name: str, operands: Leaves, axes: Leaves, spec: Spec) -> Any:
    varying = [index for index, axis in enumerate(axes) if axis is not None]
    apply = _of_those(varying, lambda leaves: bind(name, *leaves, spec=spec), operands)
    arrays = [jnp.moveaxis(operands[index], axes[index], 0) for index in varying]
    results = jax.lax.map(lambda values: apply(*values), arrays)
    return results, [0] * len(results)


_JVPS: dict[str, Callable[..., Any]] = {
    "forward": _forward_jvp,
    "tangent": partial(_linear_jvp, "tangent"),
    "backward": partial(_linear_jvp, "backward"),
    "second": partial(_third_jvp, "second", partial(_evaluate_second, reversible=True)),
    "adjoint": partial(_third_jvp, "adjoint", _evaluate_adjoint),
}
_TRANSPOSES = {"tangent": _tangent_transpose, "backward": _backward_transpose, "second": _second_transpose}


def _primitive(name: str, *, inside: bool) -> Primitive:
    primitive = Primitive(f"regard_{name}_of_shard" if inside else f"regard_{name}")
    primitive.multiple_results = True
    primitive.def_impl(lambda *operands, spec: evaluate(name, spec, *vary_alike(operands)))
    primitive.def_abstract_eval(
        lambda *operands, spec: result_types(operands, result_shapes(name, operands, spec))
    )
    mlir.register_lowering(primitive, lambda context, *operands, spec: spec.lower(name, context, *operands))
    if not inside:  # what may be divided must know its devices, and then there is one mesh per program
        dispatch.prim_requires_devices_during_lowering.add(primitive)
    batching.primitive_batchers[primitive] = partial(_batch, name)
    ad.primitive_jvps[primitive] = _JVPS[name]
    if name in _TRANSPOSES:
        ad.primitive_transposes[primitive] = _TRANSPOSES[name]
    return primitive


INSIDE = {name: _primitive(name, inside=True) for name in _JVPS}
OUTSIDE = {name: _primitive(name, inside=False) for name in _JVPS}
