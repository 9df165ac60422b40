"""Linear attention over devices: each runs rows, heads and a part of the sequence of its own."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from regard.axes import Array
from regard.engine.dispatch.explicit_axes import divided_rows, run_with_specs
from regard.engine.dispatch.placement import active, divided_here
from regard.explicit_meshes import explicit_mesh
from regard.linear.chunks import Carried, run
from regard.linear.problem import LinearConfig, LinearProblem
from regard.manual_meshes import vary, varying_axes


def run_over_devices(problem: LinearProblem) -> tuple[Array, Carried]:
    """Run a call as `chunks.run` does; where an enclosing placement divides it, each device its own part."""
    if explicit_mesh(problem) is not None:
        rows = divided_rows(problem)
        lines = rows[:-1] if len(problem.config.batch) < len(rows) else (None,)
        fits = problem.config.batch[-1] == problem.query.shape[-3]
        state: Any = PartitionSpec(*lines[:-1], lines[-1] if fits else None)
        specs = PartitionSpec(*rows, None), Carried(state, None if problem.key_sum is None else state)
        return run_with_specs(run_over_devices, (problem,), specs)
    if axes := divided_here():
        return _run_part(problem, axes)
    placement, config = active(), problem.config
    length = config.num_queries if config.causal else 1
    if placement is None:
        return run(problem)
    mesh, along = placement.divide_lines(config.batch, length)
    if mesh is None:
        return run(problem)
    *lines, sequence = along

    def place(array: Array) -> PartitionSpec:
        shared = zip(along, jnp.shape(array), strict=False)
        return PartitionSpec(*(names if size > 1 else None for names, size in shared))

    def run_own(own: LinearProblem) -> tuple[Array, Carried]:
        counts = [math.prod(mesh.shape[name] for name in names) for names in along]
        own = dataclasses.replace(own, config=_divide(config, counts))
        return _run_part(own, sequence) if sequence else run(own)

    state = PartitionSpec(*lines)
    key_sum = None if problem.key_sum is None else state
    specs = dataclasses.replace(jax.tree.map(place, problem), memory=state, key_sum=key_sum)
    places = (PartitionSpec(*(along if config.leading else along[1:])), state)
    return jax.shard_map(run_own, mesh=mesh, in_specs=(specs,), out_specs=places)(problem)


def _divide(config: LinearConfig, counts: list[int]) -> LinearConfig:
    """Return the config of one of so many parts of each axis `(*B, K, T)`."""
    *lines, parts = counts

    def divide(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size // count for size, count in zip(sizes, lines, strict=False))

    part = dataclasses.replace(config, leading=divide(config.leading), batch=divide(config.batch))
    if parts == 1:
        return part
    length = config.num_queries // parts
    chunk = min(config.chunk, 1 << max(length - 1, 0).bit_length())
    return dataclasses.replace(part, num_queries=length, chunk=chunk)


def _run_part(problem: LinearProblem, sequence: tuple[str, ...]) -> tuple[Array, Carried]:
    """Run a device's part of the sequence, from the state that all parts before it leave; all do so together.

    A part makes A S + U of a state S. Devices send one another A and U, whose size does not depend on the
    length, and each joins those before its own.
    """
    parts = jax.lax.all_gather(_summarise(problem), sequence)
    number, index = jax.lax.axis_size(sequence), jax.lax.axis_index(sequence)
    end = index if problem.config.causal else number
    first = Carried(problem.memory, problem.key_sum)
    first = vary(first, varying_axes(first, parts))

    def join(state: Carried, part: Any) -> tuple[Carried, None]:
        part_number, transition, added = part
        if problem.rate is None:
            memory, key_sum = state.memory * transition[..., None], state.key_sum
        else:
            memory, key_sum = jnp.matmul(transition, state.memory, precision=problem.config.precision), None
        if key_sum is not None:
            key_sum = key_sum * transition + added.key_sum
        later = Carried(memory + added.memory, key_sum)
        return jax.tree.map(lambda new, old: jnp.where(part_number < end, new, old), later, state), None

    before, _ = jax.lax.scan(join, first, (jnp.arange(number, dtype=jnp.int32), *parts))
    if not problem.config.causal:  # All is read, and nothing is added.
        arrays = {name: getattr(problem, name) for name in ("key", "value", "decay", "rate", "valid")}
        arrays = jax.tree.map(lambda array: array[..., :0, :], arrays)
        problem = dataclasses.replace(problem, **arrays)
    output, carried = run(dataclasses.replace(problem, memory=before.memory, key_sum=before.key_sum))
    last = jax.tree.map(lambda array: jnp.where(index == number - 1, array, 0), carried)
    return output, jax.lax.psum(last, sequence)


def _summarise(problem: LinearProblem) -> tuple[Array, Carried]:
    """Return what a part keeps of a state, `(*B, K, 1 or D)` or the delta rule's matrix, and what it adds."""
    config = dataclasses.replace(problem.config, causal=False)
    nothing = jax.tree.map(jnp.zeros_like, (problem.memory, problem.key_sum))
    if problem.rate is None:
        _, added = run(dataclasses.replace(problem, memory=nothing[0], key_sum=nothing[1], config=config))
        decay = jnp.zeros((1,) * problem.key.ndim, config.dtype) if problem.decay is None else problem.decay
        decay = decay.astype(config.dtype)
        if problem.valid is not None:
            decay = jnp.where(problem.valid, decay, 0)
        if decay.shape[-2] == 1:  # one for all tokens
            decay = jnp.broadcast_to(decay, (*decay.shape[:-2], problem.key.shape[-2], decay.shape[-1]))
        transition = jnp.exp(decay.sum(-2))
        return jnp.broadcast_to(transition, (*config.batch, transition.shape[-1])), added
    # What it makes of 1 beside it, with no values of its own, is what it keeps.
    width, value = problem.key.shape[-1], problem.value
    value = jnp.concatenate([value, jnp.zeros((*value.shape[:-1], width), value.dtype)], -1)
    identity = jnp.broadcast_to(jnp.eye(width, dtype=config.dtype), (*config.batch, width, width))
    memory = jnp.concatenate([nothing[0], identity], -1)
    _, made = run(dataclasses.replace(problem, value=value, memory=memory, config=config))
    added, transition = jnp.split(made.memory, [problem.value.shape[-1]], -1)
    return transition, Carried(added, None)
