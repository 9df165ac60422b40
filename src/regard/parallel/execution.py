"""Execution over a mesh: shard_map around the ring, forward, and around its second trip, backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.flash.operands import Operands, Results
from regard.engine.softmax.scoring import Scoring
from regard.engine.softmax.sinks import sink
from regard.parallel import ring, unsharded_sequence
from regard.parallel.division import Division
from regard.parallel.exchange import bring_in, bring_out
from regard.parallel.shard import Replicated, Shard


@partial(jax.jit, static_argnames="division")
def run(problem: Problem, division: Division) -> tuple[Array, dict[str, Array]]:
    """Compute the output and the lse, if it is asked for."""
    if unsharded_sequence.serves(problem, division):
        return unsharded_sequence.run_unsharded(problem, division)
    scoring, parameters = None, ()
    if problem.score is not None:
        scoring, parameters = Scoring.split(problem.score, problem.accumulation)
    output_dtype = problem.query.dtype if problem.sinks is None else problem.accumulation
    call = Replicated.of(problem, output_dtype, scoring)
    query, key, value = map(problem.with_heads, (problem.query, problem.key, problem.value))
    arrays = Operands(
        division.pad(query, division.queries),
        division.pad(key, division.keys),
        division.pad(value, division.keys),
        problem.with_heads(jnp.asarray(problem.scale)),
        None,
        parameters,
    )
    found: tuple[Array, Array, Array] = _attend(division, arrays, call)
    output, log_total, peak = (division.unpad(rows, division.queries) for rows in found)
    lse = jax.lax.stop_gradient(peak) + log_total
    if problem.sinks is not None:
        sunk = sink(problem.sink_column(), lse, jnp.zeros_like(lse))
        output, lse = output * sunk.share, sunk.lse
    output = output.reshape((*problem.leading, problem.T, problem.E)).astype(problem.query.dtype)
    return output, {"lse": lse.reshape((*problem.leading, problem.T))} if "lse" in problem.aux else {}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(division: Division, arrays: Operands, call: Replicated) -> tuple[Array, Array, Array]:
    """Compute output, log of the total and peak, (..., T, x) each; the peak counts as constant."""
    return _forward(division, arrays, call)[0]


def _forward(
    division: Division, arrays: Operands, call: Replicated
) -> tuple[tuple[Array, Array, Array], Any]:
    exchanged = division.size(division.exchange) > 1 or division.layout == "balanced"

    def local(arrays: Operands, call: Replicated) -> Any:
        arrays = _long(lambda array: bring_in(array, division), arrays)
        rows = _as_columns(ring.forward(Shard.here(division, call), arrays))
        if not exchanged:
            return rows, ()
        leaving = rows._replace(output=rows.output.astype(call.output_dtype))
        return jax.tree.map(lambda array: bring_out(array, division), leaving), (arrays, rows)

    shapes = _row_shapes(arrays, call)
    inside = _specs(division.inside, arrays), jax.tree.map(division.inside, shapes)
    rows, kept = jax.shard_map(
        local,
        mesh=division.mesh,
        in_specs=(_specs(division.outside, arrays), PartitionSpec()),
        out_specs=(jax.tree.map(division.outside, shapes), inside if exchanged else ()),
        check_vma=False,
    )(arrays, call)
    return (rows.output, rows.log_total, rows.peak), (kept or (arrays, rows), call)


def _backward(division: Division, residuals: Any, cotangents: Any) -> tuple[Operands, None]:
    (arrays, rows), call = residuals
    specs = _specs(division.inside, arrays)
    output_cotangent, log_cotangent, _ = cotangents

    def local(arrays: Operands, rows: Results, cotangents: Results, call: Replicated) -> Operands:
        # Without it the compiler keeps all devices' keys from the first trip for the second.
        arrays = jax.lax.optimization_barrier(arrays)
        cotangents = jax.tree.map(lambda array: bring_in(array, division), cotangents)
        cotangents = _as_rows(cotangents._replace(output=cotangents.output.astype(rows.output.dtype)))
        grads = ring.backward(Shard.here(division, call), arrays, _as_rows(rows), cotangents)
        named, placed = arrays.named(), specs.named()
        for name, grad in grads.items():
            # Where an array is whole and the work is not, each device has a part of the gradient.
            summed = tuple(axis for axis in division.along(placed[name]) if division.size(axis) > 1)
            grad = jax.lax.psum(grad, summed) if summed else grad
            grads[name] = grad.astype(named[name].dtype)
        return _long(lambda grad: bring_out(grad, division), Operands.from_named(grads))

    cotangents = Results(output_cotangent, log_cotangent)
    grads = jax.shard_map(
        local,
        mesh=division.mesh,
        in_specs=(
            specs,
            jax.tree.map(division.inside, rows),
            jax.tree.map(division.outside, cotangents),
            PartitionSpec(),
        ),
        out_specs=_specs(division.outside, arrays),
        check_vma=False,
    )(arrays, rows, cotangents, call)
    return grads, None


_attend.defvjp(_forward, _backward)


def _long(function: Callable[[Any], Any], arrays: Operands) -> Operands:
    """Apply a function to what is as long as the sequence."""
    return arrays._replace(**{name: function(getattr(arrays, name)) for name in ("query", "key", "value")})


def _specs(place: Callable[[Any], PartitionSpec], arrays: Operands) -> Any:
    """Return the specs of the arrays: what is not long is whole on every device."""
    rest = jax.tree.map(lambda _: PartitionSpec(), arrays)
    return rest._replace(**{name: place(getattr(arrays, name)) for name in ("query", "key", "value")})


def _row_shapes(arrays: Operands, call: Replicated) -> Results:
    """Return the shapes of the results per query, with a last axis."""
    rows = (*call.leading, arrays.query.shape[-2])

    def column(width: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((*rows, width), dtype)

    narrow = column(1, jnp.float32)
    return Results(column(arrays.value.shape[-1], call.output_dtype), narrow, peak=narrow)


def _as_columns(rows: Results) -> Results:
    """Give numbers per query a last axis, so that they move as arrays do."""
    return rows._replace(log_total=rows.log_total[..., None], peak=rows.peak[..., None])


def _as_rows(columns: Results) -> Results:
    """Undo `_as_columns`."""
    peak = None if columns.peak is None else columns.peak[..., 0]
    return columns._replace(log_total=columns.log_total[..., 0], peak=peak)
