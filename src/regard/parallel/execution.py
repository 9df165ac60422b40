"""Run a call over a mesh: shard_map around the ring, forward, and around its second trip, backward."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine import dropout
from regard.engine.operands import Inputs, Results
from regard.engine.problem import Problem
from regard.engine.scoring import Scoring
from regard.engine.sinks import sink
from regard.parallel import ring
from regard.parallel.division import Division
from regard.parallel.exchange import bring_in, bring_out
from regard.parallel.shard import Call, Shard

_LONG = ("query", "key", "value")


@partial(jax.jit, static_argnames="division")
def run(problem: Problem, division: Division) -> tuple[Array, dict[str, Array]]:
    """Compute the output and the lse, if it is asked for."""
    leading = problem.leading or (1,)
    scoring, parameters = None, ()
    if problem.score is not None:
        scoring, parameters = Scoring.split(problem.score, problem.accumulation)
    seeds = None if not problem.dropout_rate else dropout.head_seeds(_rng(problem), leading)
    call = Call(
        problem.mask,
        jnp.asarray(problem.query_offset, jnp.int32),
        None if problem.key_offset is None else jnp.asarray(problem.key_offset, jnp.int32),
        seeds,
        scoring,
        leading,
        problem.dropout_rate,
        problem.precision,
    )
    query, key, value = map(problem.with_heads, (problem.query, problem.key, problem.value))
    arrays = Inputs(
        division.pad(query, division.queries),
        division.pad(key, division.keys),
        division.pad(value, division.keys),
        problem.with_heads(jnp.asarray(problem.scale)),
        None,
        parameters,
    )
    output, log_total, peak = (division.cut(rows, division.queries) for rows in _attend(division, arrays, call))
    lse = jax.lax.stop_gradient(peak) + log_total
    if problem.sinks is not None:
        sunk = sink(problem.sink_column(), lse, jnp.zeros_like(lse))
        output, lse = output * sunk.share, sunk.lse
    output = output.reshape((*problem.leading, problem.T, problem.E)).astype(problem.query.dtype)
    return output, {"lse": lse.reshape((*problem.leading, problem.T))} if "lse" in problem.aux else {}


def _rng(problem: Problem) -> Array:
    assert problem.rng is not None  # pose asks for it
    return problem.rng


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(division: Division, arrays: Inputs, call: Call) -> tuple[Array, Array, Array]:
    """Output, log of the total and peak, (..., T, x) each; the peak counts as constant."""
    return _forward(division, arrays, call)[0]


def _forward(division: Division, arrays: Inputs, call: Call) -> tuple[tuple[Array, ...], Any]:
    moved = division.size(division.exchange) > 1 or division.layout == "balanced"
    specs = {name: division.outside(getattr(arrays, name)) for name in _LONG}
    rest = arrays._replace(query=None, key=None, value=None)
    shapes = _row_shapes(arrays, call)
    outside = {name: division.outside(shape) for name, shape in shapes.items()}
    inside = {name: division.inside(shape) for name, shape in shapes.items()}

    def local(long: Mapping[str, Array], rest: Inputs, call: Call) -> Any:
        long = {name: bring_in(array, division) for name, array in long.items()}
        found = ring.forward(Shard.here(division, call), rest._replace(**long))
        rows = _columns(found)
        return {name: bring_out(array, division) for name, array in rows.items()}, (long, rows) if moved else ()

    long_inside = {name: division.inside(getattr(arrays, name)) for name in _LONG}
    whole = PartitionSpec()
    rows, kept = jax.shard_map(
        local,
        mesh=division.mesh,
        in_specs=(specs, whole, whole),
        out_specs=(outside, (long_inside, inside) if moved else ()),
        check_vma=False,
    )({name: getattr(arrays, name) for name in _LONG}, rest, call)
    kept = kept or ({name: getattr(arrays, name) for name in _LONG}, rows)
    return (rows["output"], rows["log_total"], rows["peak"]), (kept, rest, call)


def _backward(division: Division, residuals: Any, pulls: tuple[Array, ...]) -> tuple[Inputs, None]:
    (long, rows), rest, call = residuals
    specs = {name: division.inside(array) for name, array in long.items()}
    row_specs = {name: division.inside(array) for name, array in rows.items()}
    pulls_by_name = dict(zip(("output", "log_total"), pulls, strict=False))
    pull_specs = {name: division.outside(array) for name, array in pulls_by_name.items()}
    whole = PartitionSpec()

    def local(long: Any, rows: Any, pulls: Any, rest: Inputs, call: Call) -> Any:
        arrays = rest._replace(**long)
        pulls = _results({name: bring_in(pull, division) for name, pull in pulls.items()})
        grads = ring.backward(Shard.here(division, call), arrays, _results(rows), pulls)
        named, made = arrays.named(), {}
        for name, grad in grads.items():
            spec = specs.get(name, whole)
            apart = tuple(axis for axis in division.along(spec) if division.size(axis) > 1)
            grad = jax.lax.psum(grad, apart) if apart else grad
            grad = grad.astype(named[name].dtype)
            made[name] = bring_out(grad, division) if name in _LONG else grad
        return Inputs.from_named(made)

    out_specs = rest.named().keys()
    grads = jax.shard_map(
        local,
        mesh=division.mesh,
        in_specs=(specs, row_specs, pull_specs, whole, whole),
        out_specs=Inputs.from_named({name: division.outside(array) for name, array in long.items()} | dict.fromkeys(out_specs, whole)),
        check_vma=False,
    )(long, rows, pulls_by_name, rest, call)
    return grads, None


_attend.defvjp(_forward, _backward)


def _row_shapes(arrays: Inputs, call: Call) -> dict[str, jax.ShapeDtypeStruct]:
    """What there is per query, with a last axis."""
    length = arrays.query.shape[-2]
    widths = {"output": arrays.value.shape[-1], "log_total": 1, "peak": 1}
    return {
        name: jax.ShapeDtypeStruct((*call.leading, length, width), np.float32) for name, width in widths.items()
    }


def _columns(found: Results) -> dict[str, Array]:
    return {"output": found.output, "log_total": found.log_total[..., None], "peak": found.peak[..., None]}


def _results(rows: Mapping[str, Array]) -> Results:
    return Results(
        **{"log_total": None} | {name: array if name == "output" else array[..., 0] for name, array in rows.items()}
    )
