"""Backend `tiled`: flash attention in plain JAX, linear in memory, that visits only tiles the mask keeps."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.backends import dense, symbolic
from regard.engine.backends.dense import Way, batch_first, score_matrix
from regard.engine.call.problem import Problem
from regard.engine.flash import primitives
from regard.engine.flash.blocking import Blocking, TileConfig
from regard.engine.flash.measurements import is_one_kernel
from regard.engine.flash.operands import Context, Operands
from regard.engine.flash.sparsity import TileLists
from regard.engine.flash.tile_calls import TileSpec
from regard.engine.flash.tile_choice import choose_tiles
from regard.engine.flash.whole_tiles import cut, fill_tiles
from regard.engine.softmax.exponential import exp
from regard.engine.softmax.score_rows import score_chosen_rows, take_chosen_rows
from regard.engine.softmax.scoring import finish_scores
from regard.engine.softmax.sinks import sink
from regard.masks.closures import freeze
from regard.masks.offsets import positions_of
from regard.scores.cells import HeadPicks


def refuses(problem: Problem) -> str | None:
    """Refuse nothing: every call can be tiled."""
    del problem
    return None


def run(
    problem: Problem,
    forward: Blocking | None = None,
    backward: Blocking | None = None,
    spec: type[TileSpec] = TileSpec,
) -> tuple[Array, dict[str, Array]]:
    """Compute the output and what `problem.aux` names, in tiles of these sizes, by the passes of `spec`."""
    if 0 in (*problem.leading, problem.T, problem.S, problem.E):
        return dense.run(problem)
    if problem.is_symbolic:
        return symbolic.run(problem)
    lists = None
    if forward is None or backward is None:
        choice = choose_tiles(problem)
        lists = choice.lists if forward is None and backward is None else None
        forward, backward = forward or choice.forward, backward or choice.backward
    if not problem.batch_invariant:
        return _run(problem, forward, backward, spec, lists)
    output, aux = _run(fill_tiles(problem), forward, backward, spec)
    return cut(output, problem, "output"), {name: cut(array, problem, name) for name, array in aux.items()}


@jax.jit
def run_at_once(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the same by the definition, and its derivatives in tiles, which keep no matrix of scores."""
    if is_one_kernel(problem):
        return dense.read_once(problem, run)
    return _define(freeze(run, problem.with_arrays()), problem)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _define(in_tiles: Way, problem: Problem) -> tuple[Array, dict[str, Array]]:
    del in_tiles
    return batch_first(dense.run(problem))


@_define.defjvp
def _define_jvp(in_tiles: Way, primals: Any, tangents: Any) -> Any:
    return jax.jvp(lambda problem: batch_first(in_tiles(problem.with_arrays())), primals, tangents)


@partial(jax.jit, static_argnames=("forward", "backward", "spec"))
def _run(
    problem: Problem,
    forward: Blocking,
    backward: Blocking,
    spec: type[TileSpec],
    lists: tuple[TileLists, TileLists] | None = None,
) -> tuple[Array, dict[str, Array]]:
    inputs, context, config = spec.prepare(problem, forward, backward, lists)
    results = primitives.run(inputs, context, partial(spec, config=config))

    peak = jax.lax.stop_gradient(results.peak)
    bare = dataclasses.replace(problem, mask=None, score=None)  # nothing that closes over arrays
    rows = {
        # A gradient that is NaN where there is no key ends here, as with the definition.
        "lse": lambda: jnp.where(peak == -jnp.inf, -jnp.inf, peak + results.log_total),
        "max_score": lambda: _largest(inputs, context, peak, bare, config, spec),
        "argmax": lambda: jnp.where(jnp.isnan(peak), 0, results.argmax),
        "entropy": lambda: results.entropy,
    }
    matrices = {
        "scores": lambda: _scores(problem),
        "weights": lambda: _weights(problem, peak, results.log_total),
    }
    output = results.output
    if problem.sinks is not None:
        lse = peak + results.log_total
        entropy = jnp.zeros_like(lse) if results.entropy is None else results.entropy
        sunk = sink(problem.sink_column()[..., 0], lse, entropy)
        output = output.astype(lse.dtype) * sunk.share[..., None]
        rows |= {"lse": lambda: sunk.lse, "entropy": lambda: sunk.entropy}
        share = take_chosen_rows(problem, sunk.share.reshape((*problem.leading, problem.T, 1)))
        matrices |= {"weights": lambda: _weights(problem, peak, results.log_total) * share}
    aux = {}
    for name in problem.aux:
        if name in rows:
            aux[name] = rows[name]().reshape((*problem.leading, problem.T))
        else:
            aux[name] = matrices[name]()
    output = output.reshape((*problem.leading, problem.T, problem.E))
    return output.astype(problem.query.dtype), aux


def _scores(problem: Problem) -> Array:
    """Compute the T x S scores, or the rows and heads of them that are asked for."""
    whole = problem.rows is None and problem.heads is None
    return score_matrix(problem) if whole else score_chosen_rows(problem)


def _weights(problem: Problem, peak: Array, log_total: Array) -> Array:
    """Compute the T x S weights, or the rows and heads of them that are asked for."""
    per_row = (*problem.leading, problem.T, 1)
    peak = take_chosen_rows(problem, peak.reshape(per_row))
    log_total = take_chosen_rows(problem, log_total.reshape(per_row))
    alive = peak != -jnp.inf
    return jnp.where(alive, exp(_scores(problem) - jnp.where(alive, peak, 0) - log_total), 0)


@partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _largest(
    inputs: Operands, context: Context, peak: Array, bare: Problem, config: TileConfig, spec: type[TileSpec]
) -> Array:
    """Return the largest score, differentiable through its first occurrence."""
    return peak


@_largest.defjvp
def _largest_jvp(
    config: TileConfig, spec: type[TileSpec], primals: Any, tangents: Any
) -> tuple[Array, Array]:
    """Visit the keys once more for the first of the largest, which the value alone does without."""
    inputs, context, peak, bare = primals
    config = dataclasses.replace(config, stats=frozenset({"argmax"}))
    argmax = primitives.run(inputs, context, partial(spec, config=config)).argmax
    alive = peak != -jnp.inf
    score_at = partial(_score_at, bare, context, config, argmax, alive)
    score, change = jax.jvp(score_at, (inputs,), (tangents[0],))
    change = jnp.where(alive & jnp.isfinite(score), change, 0)
    return _largest(inputs, context, peak, bare, config, spec), change


def _score_at(
    problem: Problem, context: Context, config: TileConfig, argmax: Any, alive: Array, inputs: Operands
) -> Array:
    """Compute the score of each query with one key."""
    index = list(jnp.indices(argmax.shape, jnp.int32, sparse=True))
    best = jnp.maximum(argmax, 0)
    # Along axes that arrays share, so that what is divided over devices stays so.
    grouped = problem.fold(best[..., None])
    if inputs.key.shape[-3] == 1 < grouped.shape[-3]:
        grouped = best.reshape((*best.shape[:-2], 1, -1, 1))
    key = jnp.take_along_axis(inputs.key, grouped, -2).reshape((*best.shape, -1))
    query = jnp.where(alive[..., None], inputs.query.astype(config.dtype), 0)
    key = jnp.where(alive[..., None], key.astype(config.dtype), 0)
    score = jnp.sum(query * key, -1) * inputs.scale[..., 0]
    axes = len(problem.leading)
    query_position = problem.with_heads(problem.grid().query_position)[..., 0]
    first = index[0] if axes > 1 else jnp.zeros_like(index[0])
    key_position = positions_of(problem.key_offset).pick(best, axes)
    cells = HeadPicks(query_position, key_position, index[-2], first)
    bias = inputs.bias
    if bias is not None:
        bias = jnp.take_along_axis(bias, best[..., None] if bias.shape[-1] > 1 else best[..., None] * 0, -1)
        bias = bias[..., 0].astype(config.dtype)
    joined = None if context.scoring is None else context.scoring.join(inputs.parameters)
    return finish_scores(score, None, score=joined, cells=cells, bias=bias).scores
