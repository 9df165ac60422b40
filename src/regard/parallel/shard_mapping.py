"""Calls over a mesh: `shard_map` around each device's part, and parts inside the caller's own `shard_map`."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine.call.problem import Problem, broadcast_leading
from regard.engine.dispatch.registry import BACKENDS, PLATFORMS, choose
from regard.engine.flash.operands import Operands
from regard.engine.platforms import find_platform
from regard.engine.softmax.scoring import Scoring
from regard.engine.softmax.sinks import sink
from regard.manual_meshes import vary, varying_axes
from regard.masks.grid import is_concrete
from regard.masks.offsets import positions_of
from regard.parallel import ring_calls
from regard.parallel.division import Axes, Division
from regard.parallel.exchange import bring_in, bring_in_pairs, bring_out
from regard.parallel.shard import Replicated, Shard

Arrays = Mapping[str, Any]  # query, key, value, and bias or None


def run(problem: Problem, division: Division) -> tuple[Array, dict[str, Array]]:
    """Compute the output and what `problem.aux` names."""
    # Dropout and scores need global batch and head indices, which a local call lacks; a bias must be divided.
    undivided = division.size(division.ring, division.exchange) == 1
    if undivided and not problem.dropout_rate and problem.score is None and problem.bias is None:
        return _run_unsharded(problem, division, _list_numbers(problem))
    return _run_sharded(problem, division)


def _list_numbers(problem: Problem) -> tuple[tuple[str, Any], ...]:
    """Return the numbers that are part of a device's own kernels, by name; nothing where it has none."""
    has_kernels = find_platform(problem.query, problem.key).name in PLATFORMS.values()
    names = ("scale", "query_offset", "key_offset") if has_kernels else ()
    numbers = {name: getattr(problem, name) for name in names if is_concrete(getattr(problem, name))}
    for name, number in numbers.items():
        if isinstance(number, np.ndarray | jax.Array) and number.ndim == 0:
            numbers[name] = np.asarray(number)[()]  # `jax.jit` can know programs by it
    return tuple(item for item in numbers.items() if isinstance(item[1], int | float | np.number))


@partial(jax.jit, static_argnames="division")
def _run_sharded(problem: Problem, division: Division) -> tuple[Array, dict[str, Array]]:
    """Run a call whose sequence is divided, or that needs to know where its parts are."""
    inputs = {name: getattr(problem, name) for name in ("query", "key", "value", "bias")}
    arrays, call = collect_operands(problem, division, inputs, padded=True)
    whole = jax.tree.map(lambda _: PartitionSpec(), arrays)
    specs = whole._replace(
        **{name: division.outside(array) for name, array in _sequence_arrays(arrays).items()},
        bias=None if arrays.bias is None else division.pairs(arrays.bias),
    )
    shape = jax.ShapeDtypeStruct((*call.leading, arrays.query.shape[-2], 1), call.output_dtype)
    names = ("output", "log_total", "peak", *sorted(call.stats))
    rows = jax.shard_map(
        partial(attend_here, division),
        mesh=division.mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=dict.fromkeys(names, division.outside(shape)),
    )(arrays, call)
    rows = {name: division.unpad(array, division.queries) for name, array in rows.items()}
    sinks = None if problem.sinks is None else problem.sink_column()
    return finish(rows, problem.leading, problem.aux, problem.query.dtype, sinks)


@partial(jax.jit, static_argnames=("division", "numbers"))
def _run_unsharded(
    problem: Problem, division: Division, numbers: tuple[tuple[str, Any], ...]
) -> tuple[Array, dict[str, Array]]:
    """Run a call whose sequence is whole on every device: each attends for its rows and heads."""
    leading = problem.leading or (1,)
    call = Replicated.of(problem, problem.query.dtype)
    arrays = tuple(map(problem.with_heads, (problem.query, problem.key, problem.value)))
    sinks = problem.sinks
    if sinks is not None:  # aligned with the last leading axes, where the rest is with the first
        sinks = sinks.reshape((*(1,) * (len(leading) - sinks.ndim), *sinks.shape))

    def share(arrays: Any, call: Replicated, scale: Any, sinks: Any) -> Any:
        shard, (query, key, value), whole = Shard.here(division, call), arrays, call.problem
        part = dataclasses.replace(
            whole,
            query=query,
            key=key,
            value=value,
            mask=None if whole.mask is None else whole.mask.slice_batch(shard.take, len(leading)),
            scale=scale,
            sinks=None if sinks is None else shard.take(sinks, 0),
            query_offset=positions_of(whole.query_offset).slice_batch(shard.take),
            key_offset=positions_of(whole.key_offset).slice_batch(shard.take),
        )
        part = dataclasses.replace(part, **dict(numbers))
        return BACKENDS[choose(part).name].run(part)

    rows = division.outside(jax.ShapeDtypeStruct((*leading, 1, 1), problem.query.dtype))
    output, extra = jax.shard_map(
        share,
        mesh=division.mesh,
        in_specs=(tuple(map(division.outside, arrays)), PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=(rows, {name: PartitionSpec(*rows[:-1]) for name in problem.aux}),
    )(arrays, call, jnp.asarray(problem.scale), sinks)
    extra = {name: array.reshape((*problem.leading, problem.T)) for name, array in extra.items()}
    return output.reshape((*problem.leading, problem.T, problem.E)), extra


def collect_operands(
    problem: Problem, division: Division, arrays: Mapping[str, Any], *, padded: bool
) -> tuple[Operands, Replicated]:
    """Return what a call is differentiated by, `arrays` in place of the problem's own, and what is whole."""
    scoring, parameters = None, ()
    if problem.score is not None:
        scoring, parameters = Scoring.split(problem.score, problem.accumulation)
    output_dtype = problem.query.dtype if problem.sinks is None else problem.accumulation
    call = Replicated.of(problem, output_dtype, scoring)
    query, key, value = map(problem.with_heads, (arrays["query"], arrays["key"], arrays["value"]))
    bias = None if arrays["bias"] is None else problem.with_heads(arrays["bias"])
    if padded:
        query = division.pad(query, division.queries)
        key, value = division.pad(key, division.keys), division.pad(value, division.keys)
        bias = None if bias is None else division.pad_pairs(bias)
    scale = problem.with_heads(jnp.asarray(problem.scale))
    return Operands(query, key, value, scale, bias, parameters), call


def attend_here(division: Division, arrays: Operands, call: Replicated) -> dict[str, Array]:
    """Compute one device's rows, (..., T, x) each, from its part of the arrays; all do so together."""
    brought = {name: bring_in(array, division) for name, array in _sequence_arrays(arrays).items()}
    bias = None if arrays.bias is None else bring_in_pairs(arrays.bias, division)
    results = ring_calls.run(division, arrays._replace(**brought, bias=bias), call)
    rows = {name: array for name, array in results._asdict().items() if array is not None}
    output = rows.pop("output").astype(call.output_dtype)
    leaving = {"output": output} | {name: array[..., None] for name, array in rows.items()}
    return {name: bring_out(array, division) for name, array in leaving.items()}


def finish(
    rows: dict[str, Array], leading: tuple[int, ...], aux: tuple[str, ...], dtype: Any, sinks: Array | None
) -> tuple[Array, dict[str, Array]]:
    """Return output and statistics from rows (..., T, x); `sinks` are a column (..., H, 1, 1)."""
    output, entropy, peak = rows["output"], rows.get("entropy"), jax.lax.stop_gradient(rows["peak"])
    lse = jnp.where(peak == -jnp.inf, -jnp.inf, peak + rows["log_total"])
    if sinks is not None:
        sunk = sink(sinks, lse, jnp.zeros_like(lse) if entropy is None else entropy)
        output, lse, entropy = output * sunk.share, sunk.lse, sunk.entropy
    argmax = jnp.where(jnp.isnan(peak), 0, rows["argmax"]) if "argmax" in rows else None
    largest = _without_derivative(rows["peak"], rows["log_total"])
    statistics = {"lse": lse, "max_score": largest, "entropy": entropy, "argmax": argmax}
    *_, length, width = output.shape
    extra = {name: statistics[name].reshape((*leading, length)) for name in aux}
    return output.reshape((*leading, length, width)).astype(dtype), extra


@jax.custom_jvp
def _without_derivative(peak: Array, log_total: Array) -> Array:
    """Return the largest score, whose derivative is NaN: which key it has is not known to one device."""
    del log_total  # which has tangents, if anything has
    return peak


@_without_derivative.defjvp
def _give_nan(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[0], tangents[1] * jnp.nan


def _sequence_arrays(arrays: Operands) -> dict[str, Array]:
    return {name: getattr(arrays, name) for name in ("query", "key", "value")}


# Inside the caller's `jax.shard_map`, arrays are this device's part; all else is the whole.


def manual_axes() -> frozenset[str]:
    """Return the mesh axes over which the code around the call is one device's."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def describe_whole(arrays: Arrays, mesh: Any, sequence: Axes, batch: Axes, heads: Axes) -> dict[str, Any]:
    """Return shapes and dtypes of the arrays of all devices together."""
    rank = len(_leading(arrays))
    rows = arrays["query"].shape[-2]

    def grow(name: str, array: Any) -> Any:
        shape, varying = [1] * (2 - array.ndim) + list(array.shape), varying_axes(array)

        def multiply(axis: int, names: Sequence[str]) -> None:
            shape[axis] *= math.prod(mesh.shape[axis_name] for axis_name in names)

        if name != "bias" or shape[-2] > 1:
            multiply(-2, sequence)
        elif rows == 1 and set(sequence) & set(varying):
            raise NotImplementedError(
                "bias: expected more than one row per device, or one for all, inside jax.shard_map"
            )
        # Heads and rows of a batch that do not differ among devices are those of all.
        if heads and len(shape) > 2 and set(heads) <= set(varying):
            multiply(-3, heads)
        if batch and rank > 1 and len(shape) == rank + 2 and set(batch) <= set(varying):
            multiply(0, batch)
        return jax.ShapeDtypeStruct(tuple(shape), array.dtype)

    return {name: None if array is None else grow(name, array) for name, array in arrays.items()}


def run_part(
    whole: Problem, division: Division, arrays: Arrays, sequence: Axes
) -> tuple[Array, dict[str, Array]]:
    """Compute this device's part of the output and of what `whole.aux` names; all devices do so together."""
    varied = {name: vary(array, sequence) for name, array in arrays.items() if name != "bias"}
    parts, call = collect_operands(whole, division, {**varied, "bias": arrays["bias"]}, padded=False)
    rows = attend_here(division, parts, call)
    sinks = None
    if whole.sinks is not None:
        apart = dataclasses.replace(division, exchange=None)
        sinks = Shard.here(apart, call).take(whole.sink_column(), 2)
    return finish(rows, _leading(arrays), whole.aux, arrays["query"].dtype, sinks)


def _leading(arrays: Arrays) -> tuple[int, ...]:
    return broadcast_leading(*(jnp.shape(arrays[name])[:-2] for name in ("query", "key", "value")))
