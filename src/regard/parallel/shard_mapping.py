"""Calls over a mesh: `shard_map` around each device's part."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.flash.operands import Operands
from regard.engine.softmax.scoring import Scoring
from regard.engine.softmax.sinks import sink
from regard.parallel import ring_calls, unsharded_sequence
from regard.parallel.division import Division
from regard.parallel.exchange import bring_in, bring_in_pairs, bring_out
from regard.parallel.shard import Replicated


@partial(jax.jit, static_argnames="division")
def run(problem: Problem, division: Division) -> tuple[Array, dict[str, Array]]:
    """Compute the output and what `problem.aux` names."""
    if unsharded_sequence.serves(problem, division):
        return unsharded_sequence.run_unsharded(problem, division)
    inputs = {name: getattr(problem, name) for name in ("query", "key", "value", "bias")}
    arrays, call = operands(problem, division, inputs, padded=True)
    whole = jax.tree.map(lambda _: PartitionSpec(), arrays)
    specs = whole._replace(
        **{name: division.outside(array) for name, array in _long(arrays).items()},
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


def operands(
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
    brought = {name: bring_in(array, division) for name, array in _long(arrays).items()}
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


def _long(arrays: Operands) -> dict[str, Array]:
    return {name: getattr(arrays, name) for name in ("query", "key", "value")}
