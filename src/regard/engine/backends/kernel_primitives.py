"""A library's kernel as JAX primitives: values and first gradients are the kernel's, all else is Regard's.

    plain     output(query, key, value, sinks if any, data);       its jvp binds saving and tangent
    saving    the same, and lse;                                   its jvp binds tangent
    tangent   tangents of both, by `Kernel.reference`;             transposes to backward
    backward  cotangents of query, key, value, sinks, by the kernel;  its jvp is that of `Kernel.reference`

Libraries give their kernels a gradient and nothing else: under a bare `custom_vjp`, forward mode and second
derivatives would be errors that come or go with the device.

Their gradient knows a cotangent of the output, none of lse. What it computes is

    dS = P * (dP - delta),    dP = dO V^T,    delta = sum_e O dO

where lse would add its cotangent to dP - delta. So O, dO and V get columns of their own, -dlse, 1 and 0,
which change delta by -dlse and nothing else; one number of few digits does not hold dlse, three do.

Sinks need none of it: given output and lse of keys and sink together, the same formula is the gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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
from regard.engine.call.problem import Problem
from regard.engine.flash.device_types import lower_for_one_device, result_types, shapes_of_one_device
from regard.engine.flash.partitioning import HEADS, KEY_HEADS, Axes, Leading, divide, find_mesh, is_divided
from regard.engine.flash.primitives import Leaves, batch_size, jvp_of_varying, lead
from regard.engine.softmax.sinks import sink
from regard.manual_meshes import vary_alike

_ADDED = 8  # columns: widths of kernels are multiples of it
_SCALES = 1.0, 2.0**-11, 2.0**-14  # of the three numbers: what float16 rounds away it would not hold unscaled
_NOTHING = 1e30  # the lse of rows without keys, as a kernel's gradient reads it: all weights are 0


class Kernel(Protocol):
    """One kind of call of a library, hashable. Arrays are (batch, heads, length, width), lse has no width.

    `data` are arrays (batch, ...) that nothing is differentiated by; without them, every row has a key.
    """

    @property
    def widest(self) -> int:
        """Up to how many columns its gradient takes; beyond, that of `reference` is taken."""
        ...

    def forward(self, lse: bool, query: Array, key: Array, value: Array, *data: Array) -> list[Array]:
        """Compute the output, and lse if asked: 0 and -inf where there is no key."""
        ...

    def backward(
        self, arrays: Leaves, data: Leaves, output: Array, lse: Array, cotangent: Array
    ) -> list[Array]:
        """Compute the gradients of query, key and value from what `forward` found."""
        ...

    def reference(self, query: Array, key: Array, value: Array, *data: Array) -> list[Array]:
        """Compute output and lse by code that knows every derivative."""
        ...


@dataclass(frozen=True)
class Spec:
    """The static parameters of a bind."""

    kernel: Kernel
    sunk: bool = False  # whether there are sinks, (batch, heads), after query, key and value
    of_lse: bool = False  # whether backward is given a cotangent of lse

    @property
    def wrt(self) -> int:
        """The number of operands, the first, that it is differentiated by."""
        return 3 + self.sunk

    def laid_out(self, name: str) -> int:
        """Count the operands after data."""
        return {"plain": 0, "saving": 0, "tangent": 2 + self.wrt, "backward": 3 + self.of_lse}[name]


def run_kernel(
    problem: Problem, kernel: Kernel, arrays: Leaves, data: Leaves
) -> tuple[Array, dict[str, Array]]:
    """Run a call by a kernel: its output, with sinks if there are some, and lse if it is asked for.

    It is differentiable in its arrays, in every way and to any order.
    """
    leading, spec = problem.leading, Spec(kernel, problem.sinks is not None)
    if problem.sinks is not None:
        sinks = problem.spread(problem.sinks.astype(jnp.float32))
        arrays = [*arrays, sinks.reshape((-1, leading[-1] if leading else 1))]
    output, *lse = _bind(saving_p if problem.aux else plain_p, *arrays, *data, spec=spec)
    output = output.reshape((*leading, problem.T, problem.E))
    return output, {name: lse[0].reshape((*leading, problem.T)) for name in problem.aux}


def _bind(primitive: Primitive, *operands: Array, spec: Spec) -> list[Array]:
    return primitive.bind(*vary_alike(operands), spec=spec)


# What the primitives compute, as ordinary JAX code. Operands: query, key, value, sinks, data; output and lse;
# what the primitive is linear in.


def _plain(spec: Spec, *operands: Array) -> list[Array]:
    return _saving(spec, *operands)[:1] if spec.sunk else spec.kernel.forward(False, *operands)


def _saving(spec: Spec, *operands: Array) -> list[Array]:
    output, lse = spec.kernel.forward(True, *operands[:3], *operands[spec.wrt :])
    return _add_sinks(spec, operands, output, lse)


def _add_sinks(spec: Spec, operands: Leaves, output: Array, lse: Array) -> list[Array]:
    if not spec.sunk:
        return [output, lse]
    sunk = sink(operands[3][..., None], lse, jnp.zeros_like(lse))
    return [(output.astype(lse.dtype) * sunk.share[..., None]).astype(output.dtype), sunk.lse]


def _tangent(spec: Spec, *operands: Array) -> list[Array]:
    primals, tangents = operands[: -spec.laid_out("tangent")], operands[-spec.wrt :]
    return jax.jvp(_reference(spec, primals), primals[: spec.wrt], tangents)[1]


def _backward(spec: Spec, *operands: Array) -> list[Array]:
    end = len(operands) - spec.laid_out("backward")
    primals, (output, lse, *cotangents) = operands[:end], operands[end:]
    query, _, value = arrays = primals[:3]
    if len(primals) > spec.wrt:
        alive = lse != -jnp.inf
        lse = jnp.where(alive, lse, _NOTHING)
        cotangents = [
            jnp.where(alive.reshape((*alive.shape, *(1,) * (array.ndim - 3))), array, 0)
            for array in cotangents
        ]
    cotangent, *of_lse = cotangents
    if max(query.shape[-1], value.shape[-1]) + _ADDED * spec.of_lse > spec.kernel.widest:
        return _reference_backward(spec, *operands)
    of_sinks = []
    if spec.sunk:
        delta = (output.astype(lse.dtype) * cotangent.astype(lse.dtype)).sum(-1)
        change = of_lse[0] - delta if spec.of_lse else -delta
        of_sinks = [(jnp.exp(primals[3][..., None] - lse) * change).sum(-1)]
    if spec.of_lse:
        output = _widen(output, _pieces(-of_lse[0], output.dtype))
        scales = jnp.broadcast_to(jnp.asarray(_SCALES, cotangent.dtype), (*lse.shape, len(_SCALES)))
        cotangent = _widen(cotangent, scales)
    widened = list(map(_widen, arrays)) if spec.of_lse else arrays
    grads = spec.kernel.backward(widened, primals[spec.wrt :], output, lse, cotangent)
    return [*(grad[..., : array.shape[-1]] for grad, array in zip(grads, arrays, strict=True)), *of_sinks]


def _widen(array: Array, *columns: Array) -> Array:
    """Add `_ADDED` columns, zeros where none are given."""
    array = jnp.concatenate([array, *columns], -1) if columns else array
    rest = _ADDED - sum(column.shape[-1] for column in columns)
    return jnp.pad(array, (*((0, 0),) * (array.ndim - 1), (0, rest)))


def _pieces(array: Array, dtype: Any) -> Array:
    """Split numbers into three of a narrower dtype whose sum by `_SCALES` they are, along a new last axis."""
    digits, pieces = jnp.finfo(dtype), []
    for scale in _SCALES:
        # Not by `astype` and back, which XLA leaves out.
        pieces.append(jax.lax.reduce_precision(array / scale, digits.nexp, digits.nmant))
        array = array - pieces[-1] * scale
    return jnp.stack(pieces, -1).astype(dtype)


def _reference_backward(spec: Spec, *operands: Array) -> list[Array]:
    end = len(operands) - spec.laid_out("backward")
    primals, (_, lse, cotangent, *rest) = operands[:end], operands[end:]
    pull = jax.vjp(_reference(spec, primals), *primals[: spec.wrt])[1]
    return list(pull([cotangent, *(rest or [jnp.zeros_like(lse)])]))


def _reference(spec: Spec, operands: Leaves) -> Callable[..., list[Array]]:
    def function(*arrays: Array) -> list[Array]:
        output, lse = spec.kernel.reference(*arrays[:3], *operands[spec.wrt :])
        return _add_sinks(spec, arrays, output, lse)

    return function


_RULES: dict[str, Callable[..., list[Array]]] = {
    "plain": _plain,
    "saving": _saving,
    "tangent": _tangent,
    "backward": _backward,
}
# The same without the kernel.
_UNDIVIDED: dict[str, Callable[..., list[Array]]] = {
    "plain": lambda spec, *operands: _reference(spec, operands)(*operands[: spec.wrt])[:1],
    "saving": lambda spec, *operands: _reference(spec, operands)(*operands[: spec.wrt]),
    "tangent": _tangent,
    "backward": _reference_backward,
}


def _evaluate(rule: Callable[..., list[Array]], spec: Spec, *operands: Array) -> list[Array]:
    # Libraries are written for JAX's own settings, whatever those around the call are.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return rule(spec, *operands)


# Derivatives.


def _jvp(operands: Leaves, tangents: Leaves, *, spec: Spec) -> tuple[list[Array], list[Any]]:
    outputs = name_results(("output", "lse"), _bind(saving_p, *operands, spec=spec))
    if all(isinstance(tangent, ad.Zero) for tangent in tangents[: spec.wrt]):
        return outputs, [ad.Zero(jax.typeof(value).to_tangent_aval()) for value in outputs]
    linear = [ad.instantiate_zeros(tangent) for tangent in tangents[: spec.wrt]]
    return outputs, _bind(tangent_p, *operands, *outputs, *linear, spec=spec)


def _plain_jvp(operands: Leaves, tangents: Leaves, *, spec: Spec) -> tuple[list[Array], list[Any]]:
    outputs, output_tangents = _jvp(operands, tangents, spec=spec)
    return outputs[:1], output_tangents[:1]


def _reference_jvp(
    rule: Callable[..., list[Array]], operands: Leaves, tangents: Leaves, *, spec: Spec
) -> tuple[list[Array], list[Any]]:
    """Compute the JVP of tangent or backward through `Kernel.reference`, which has every derivative.

    It computes output and lse anew: what was saved is no variable of it, whatever its tangents.
    """
    return jvp_of_varying(lambda leaves: _evaluate(rule, spec, *leaves), operands, tangents)


def _tangent_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    saved, linear = operands[: -spec.wrt], operands[-spec.wrt :]
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(operands)
    filled = [ad.instantiate_zeros(cotangents[0])]
    if not isinstance(cotangents[1], ad.Zero):
        filled.append(cotangents[1])
    grads = _bind(backward_p, *saved, *filled, spec=dataclasses.replace(spec, of_lse=len(filled) > 1))
    wanted = map(ad.is_undefined_primal, linear)
    return [None] * len(saved) + [grad if want else None for grad, want in zip(grads, wanted, strict=True)]


def _backward_transpose(cotangents: Leaves, *operands: Any, spec: Spec) -> list[Any]:
    end = len(operands) - 1 - spec.of_lse
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(operands)
    tangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    pushed = _bind(tangent_p, *operands[:end], *tangents, spec=dataclasses.replace(spec, of_lse=False))
    linear = zip(operands[end:], pushed, strict=False)
    return [None] * end + [tangent if ad.is_undefined_primal(arg) else None for arg, tangent in linear]


def _batch(primitive: Primitive, operands: Leaves, axes: Leaves, *, spec: Spec) -> Any:
    """Batch a primitive: the axis joins that of the batch, which all operands have in front."""
    size = batch_size(operands, axes)
    leading = [lead(operand, axis, size) for operand, axis in zip(operands, axes, strict=True)]
    batched = _bind(primitive, *(array.reshape((-1, *array.shape[2:])) for array in leading), spec=spec)
    return [array.reshape((size, -1, *array.shape[1:])) for array in batched], [0] * len(batched)


# Over devices: batch rows and heads are divided as queries are, as those of the tiled backend.


def _evaluate_divided(name: str, spec: Spec, results: Leaves, *operands: Array) -> list[Array]:
    (batch, heads), key_heads = operands[0].shape[:2], operands[1].shape[1]
    leading = Leading((batch,), key_heads, heads // key_heads)
    rest = spec.laid_out(name)

    def axes_of(array: Any, head: str | None) -> Axes:
        named = (0, head, *(None,) * (array.ndim - 2))[: array.ndim]
        pairs = zip(named, array.shape, strict=True)
        return tuple(axis if axis is not None and size > 1 else None for axis, size in pairs)

    sides = (HEADS, KEY_HEADS, KEY_HEADS, HEADS)[: spec.wrt]
    own = [*sides, *(None,) * (len(operands) - spec.wrt - rest), *(HEADS,) * rest]
    if name == "tangent":
        own[-spec.wrt :] = sides
    return divide(
        lambda _: functools.partial(_evaluate, _RULES[name], spec),
        leading,
        operands,
        [axes_of(array, head) for array, head in zip(operands, own, strict=True)],
        results,
        [
            axes_of(array, head)
            for array, head in zip(results, sides if name == "backward" else (HEADS, HEADS), strict=False)
        ],
        sums=name == "backward",
    )


def _primitive(name: str) -> Primitive:
    primitive = Primitive(f"regard_{name}_kernel")
    primitive.multiple_results = True

    def evaluate(*operands: Array, spec: Spec) -> list[Array]:
        return _evaluate(_RULES[name], spec, *operands)

    def shapes(*operands: Any, spec: Spec) -> list[ShapedArray]:
        like = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
        return result_types(operands, shapes_of_one_device(functools.partial(evaluate, spec=spec), *like))

    primitive.def_impl(jax.jit(evaluate, static_argnames="spec"))
    primitive.def_abstract_eval(shapes)

    def lower(context: Any, *operands: Any, spec: Spec) -> Any:
        divided = find_mesh(context)
        if divided is not None:
            function = functools.partial(_evaluate_divided, name, spec, context.avals_out)
            return lower_for_one_device(divided, function, *operands)
        # Where it divides nothing by `divide`, it could not divide a kernel either.
        rules = _UNDIVIDED if is_divided(context) else _RULES
        return lower_for_one_device(context, functools.partial(_evaluate, rules[name], spec), *operands)

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
