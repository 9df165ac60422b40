"""A library's kernel as JAX primitives: values and first gradients are the kernel's, all else is Regard's.

    plain     output(query, key, value, data);                     its jvp binds saving and tangent
    saving    the same, and the residuals of the kernel's vjp
    tangent   tangent of the output, by `Kernel.reference`;        transposes to backward
    backward  cotangents of query, key, value, by the kernel;      its jvp is that of `Kernel.reference`

Libraries give their kernels a gradient and nothing else: under a bare `custom_vjp`, forward mode and second
derivatives would be errors that come or go with the device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax._src import dispatch  # has no public name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from regard.axes import Array
from regard.engine.call.checkpoint_names import name_results
from regard.engine.flash.device_types import lower_for_one_device, result_types, vary_alike

Leaves = Sequence[Any]


class Kernel(Protocol):
    """One kind of call of a library, hashable; `data` are arrays that nothing is differentiated by."""

    def call(self, query: Array, key: Array, value: Array, *data: Array) -> Array:
        """Compute the output by the library, which knows its gradient in query, key and value."""
        ...

    def reference(self, query: Array, key: Array, value: Array, *data: Array) -> Array:
        """Compute the same by code that knows every derivative."""
        ...


@dataclass(frozen=True)
class Spec:
    """The static parameters of a bind."""

    kernel: Kernel
    saved: int = 0  # how many arrays the kernel's gradient needs
    added: int = 0  # axes in front of all operands, from vmap


def call_kernel(kernel: Kernel, query: Array, key: Array, value: Array, *data: Array) -> Array:
    """Call the kernel, differentiably in query, key and value, in every way and to any order."""
    return _bind(plain_p, query, key, value, *data, spec=Spec(kernel))[0]


def _bind(primitive: Primitive, *operands: Array, spec: Spec) -> list[Array]:
    return primitive.bind(*vary_alike(operands), spec=spec)


# What the primitives compute, as ordinary JAX code. Operands: query, key, value, data; what was saved; what
# the primitive is linear in.


def _vjp(kernel: Kernel, operands: Leaves) -> tuple[Array, Any]:
    """Return the output and, as a pytree, the kernel's gradient."""
    data = operands[3:]
    return jax.vjp(lambda *arrays: kernel.call(*arrays, *data), *operands[:3])


def _plain(spec: Spec, *operands: Array) -> list[Array]:
    return [spec.kernel.call(*operands)]


def _saving(spec: Spec, *operands: Array) -> list[Array]:
    output, vjp = _vjp(spec.kernel, operands)
    return [output, *jax.tree.leaves(vjp)]


def _tangent(spec: Spec, *operands: Array) -> list[Array]:
    given, tangents = operands[: len(operands) - 3 - spec.saved], operands[-3:]
    return [jax.jvp(_reference(spec, given), given[:3], tangents)[1]]


def _backward(spec: Spec, *operands: Array) -> list[Array]:
    split = len(operands) - 1 - spec.saved
    given, saved, cotangent = operands[:split], operands[split:-1], operands[-1]
    # The gradient is a function of what was saved; how it is put together is known from shapes alone.
    structure = jax.tree.structure(jax.eval_shape(lambda *arrays: _vjp(spec.kernel, arrays)[1], *given))
    return list(jax.tree.unflatten(structure, saved)(cotangent))


def _reference_backward(spec: Spec, *operands: Array) -> list[Array]:
    given, cotangent = operands[: len(operands) - 1 - spec.saved], operands[-1]
    return list(jax.vjp(_reference(spec, given), *given[:3])[1](cotangent))


def _reference(spec: Spec, operands: Leaves) -> Callable[..., Array]:
    return lambda *arrays: spec.kernel.reference(*arrays, *operands[3:])


_RULES: dict[str, Callable[..., list[Array]]] = {
    "plain": _plain,
    "saving": _saving,
    "tangent": _tangent,
    "backward": _backward,
}


def _evaluate(rule: Callable[..., list[Array]], spec: Spec, *operands: Array) -> list[Array]:
    function = functools.partial(rule, spec)
    for _ in range(spec.added):
        function = jax.vmap(function)
    # Libraries are written for JAX's own settings, whatever those around the call are.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return function(*operands)


# Derivatives.


def _jvp(operands: Leaves, tangents: Leaves, *, spec: Spec) -> tuple[list[Array], list[Any]]:
    """Compute the JVP of `saving_p`. Residuals get zero tangents; the JVP of `backward_p` ignores them."""
    output, *saved = _bind(saving_p, *operands, spec=spec)
    output, *saved = name_results(["output", *["saved"] * len(saved)], (output, *saved))
    if all(isinstance(tangent, ad.Zero) for tangent in tangents[:3]):
        return [output, *saved], [*map(_zero, (output, *saved))]
    linear = [ad.instantiate_zeros(tangent) for tangent in tangents[:3]]
    of = dataclasses.replace(spec, saved=len(saved))
    found_tangents = _bind(tangent_p, *operands, *saved, *linear, spec=of)
    return [output, *saved], [*found_tangents, *map(_zero, saved)]


def _plain_jvp(operands: Leaves, tangents: Leaves, *, spec: Spec) -> tuple[list[Array], list[Any]]:
    found, found_tangents = _jvp(operands, tangents, spec=spec)
    return found[:1], found_tangents[:1]


def _zero(value: Any) -> Any:
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def _reference_jvp(
    rule: Callable[..., list[Array]], operands: Leaves, tangents: Leaves, *, spec: Spec
) -> tuple[list[Array], list[Any]]:
    """Compute the JVP of tangent or backward through `Kernel.reference`, which has every derivative."""
    varies = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def function(*varying: Array) -> list[Array]:
        everything = list(operands)
        for place, value in zip(varies, varying, strict=True):
            everything[place] = value
        return _evaluate(rule, spec, *everything)

    primals, found_tangents = ([them[place] for place in varies] for them in (operands, tangents))
    return jax.jvp(function, primals, found_tangents)


def _tangent_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    known, linear = operands[:-3], operands[-3:]
    if isinstance(cotangents[0], ad.Zero):
        return [None] * len(operands)
    grads = _bind(backward_p, *known, cotangents[0], spec=spec)
    wanted = map(ad.is_undefined_primal, linear)
    return [None] * len(known) + [grad if want else None for grad, want in zip(grads, wanted, strict=True)]


def _backward_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    known = operands[:-1]
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(operands)
    tangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    return [None] * len(known) + _bind(tangent_p, *known, *tangents, spec=spec)


def _batch(primitive: Primitive, operands: Leaves, axes: Leaves, *, spec: Spec) -> Any:
    """Batch a primitive: one more axis in front of every operand."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    leading = [
        jnp.broadcast_to(operand, (size, *operand.shape)) if axis is None else jnp.moveaxis(operand, axis, 0)
        for operand, axis in zip(operands, axes, strict=True)
    ]
    found = _bind(primitive, *leading, spec=dataclasses.replace(spec, added=spec.added + 1))
    return found, [0] * len(found)


def _primitive(name: str) -> Primitive:
    primitive = Primitive(f"regard_{name}_kernel")
    primitive.multiple_results = True

    def evaluate(*operands: Array, spec: Spec) -> list[Array]:
        return _evaluate(_RULES[name], spec, *operands)

    def shapes(*operands: Any, spec: Spec) -> list[ShapedArray]:
        like = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
        found = jax.eval_shape(functools.partial(evaluate, spec=spec), *like)
        return result_types(operands, found)

    primitive.def_impl(jax.jit(evaluate, static_argnames="spec"))
    primitive.def_abstract_eval(shapes)

    def lower(context: Any, *operands: Any, spec: Spec) -> Any:
        return lower_for_one_device(context, functools.partial(evaluate, spec=spec), *operands)

    mlir.register_lowering(primitive, lower)
    dispatch.prim_requires_devices_during_lowering.add(primitive)  # as those of libraries, inside, do
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    return primitive


plain_p, saving_p, tangent_p, backward_p = map(_primitive, _RULES)
ad.primitive_jvps[plain_p] = _plain_jvp
ad.primitive_jvps[saving_p] = _jvp
ad.primitive_jvps[tangent_p] = functools.partial(_reference_jvp, _tangent)
ad.primitive_jvps[backward_p] = functools.partial(_reference_jvp, _reference_backward)
ad.primitive_transposes[tangent_p] = _tangent_transpose
ad.primitive_transposes[backward_p] = _backward_transpose
