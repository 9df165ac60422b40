"""Calls whose sequence is whole on every device: each attends for its rows and heads, and sends nothing."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.dispatch.registry import BACKENDS, choose
from regard.masks.offsets import positions_of
from regard.parallel.division import Division
from regard.parallel.shard import Replicated, Shard


def serves(problem: Problem, division: Division) -> bool:
    """Return whether a device's share is an ordinary call, for the backend that is best for it."""
    # Dropout and scores need global batch and head indices, which a local call lacks; a bias must be divided.
    undivided = division.size(division.ring, division.exchange) == 1
    return undivided and not problem.dropout_rate and problem.score is None and problem.bias is None


def run_unsharded(problem: Problem, division: Division) -> tuple[Array, dict[str, Array]]:
    """Compute the output and what `problem.aux` names."""
    leading = problem.leading or (1,)
    call = Replicated.of(problem, problem.query.dtype)
    arrays = tuple(map(problem.with_heads, (problem.query, problem.key, problem.value)))
    sinks = problem.sinks
    if sinks is not None:  # aligned with the last leading axes, where the rest is with the first
        sinks = sinks.reshape((*(1,) * (len(leading) - sinks.ndim), *sinks.shape))

    def share(arrays: Any, call: Replicated, scale: Any, sinks: Any) -> Any:
        shard, (query, key, value), whole = Shard.here(division, call), arrays, call.problem
        own = dataclasses.replace(
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
        return BACKENDS[choose(own).name].run(own)

    rows = division.outside(jax.ShapeDtypeStruct((*leading, 1, 1), problem.query.dtype))
    output, extra = jax.shard_map(
        share,
        mesh=division.mesh,
        in_specs=(tuple(map(division.outside, arrays)), PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=(rows, {name: PartitionSpec(*rows[:-1]) for name in problem.aux}),
    )(arrays, call, jnp.asarray(problem.scale), sinks)
    extra = {name: array.reshape((*problem.leading, problem.T)) for name, array in extra.items()}
    return output.reshape((*problem.leading, problem.T, problem.E)), extra
