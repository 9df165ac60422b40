"""Backend `tiled`: flash attention in plain JAX, linear in memory, that visits only tiles the mask keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine import dropout, flash, primitives
from regard.engine.blocking import choose_blocking
from regard.engine.dense import score_matrix
from regard.engine.exponential import exp
from regard.engine.flash import Context, Inputs
from regard.engine.problem import Problem
from regard.engine.sparsity import classify, list_tiles
from regard.engine.tiles import Blocking, Layout, Window
from regard.masks.grid import Grid, Run


def refuses(problem: Problem) -> str | None:
    """Every call can be tiled."""
    del problem
    return None


@partial(jax.jit, static_argnames=("forward", "backward"))
def run(
    problem: Problem, forward: Blocking | None = None, backward: Blocking | None = None
) -> tuple[Array, dict[str, Array]]:
    """Compute the output and what `problem.aux` names, in tiles of the given sizes."""
    if 0 in (*problem.leading, problem.T, problem.S):
        return _nothing(problem)
    layout = _lay_out(problem, forward, backward)
    inputs = Inputs(
        problem.fold(problem.query),
        problem.fold_key(problem.key),
        problem.fold_key(problem.value),
        jnp.reshape(jnp.asarray(problem.scale), (1,) * (len(layout.leading) + 3)),
        None if problem.bias is None else problem.fold(problem.bias),
    )
    context = _context(problem, layout)
    inputs = _reachable(inputs, context, layout)
    results = primitives.run(inputs, context, layout)

    peak = jax.lax.stop_gradient(results.peak)
    rows = {
        "lse": lambda: peak + results.log_total,
        "max_score": lambda: _largest(inputs, layout, peak, results.argmax),
        "argmax": lambda: results.argmax,
        "entropy": lambda: results.entropy,
    }
    matrices = {
        "scores": lambda: score_matrix(problem),
        "weights": lambda: _weights(score_matrix(problem), peak, results.log_total),
    }
    aux = {}
    for name in problem.aux:
        if name in rows:
            aux[name] = problem.unfold(rows[name]()[..., None], problem.T, 1)[..., 0]
        else:
            aux[name] = problem.unfold(matrices[name](), problem.T, problem.S)
    output = problem.unfold(results.output, problem.T, problem.E)
    return output.astype(problem.query.dtype), aux


def _lay_out(problem: Problem, forward: Blocking | None, backward: Blocking | None) -> Layout:
    leading = problem.leading or (1,)
    folded = (*leading[:-1], problem.key_heads)
    chosen = choose_blocking(problem)
    forward, backward = forward or chosen[0], backward or chosen[1]
    heads = problem.key_heads if _heads_alike(problem) else 1
    forward, backward = (block.fit(problem.T, problem.S, heads) for block in (forward, backward))
    looks = {"max_score": "argmax", "argmax": "argmax", "entropy": "entropy"}
    return Layout(
        leading=folded,
        added=0,
        mask_leading=problem.leading,
        group=leading[-1] // problem.key_heads,
        num_queries=problem.T,
        num_keys=problem.S,
        query_width=problem.D,
        value_width=problem.E,
        dtype=problem.accumulation,
        precision=problem.precision,
        dropout_rate=problem.dropout_rate,
        forward=forward,
        backward=backward,
        masked=problem.mask is not None or bool(problem.S % forward.keys or problem.S % backward.keys),
        looks=frozenset(looks[name] for name in problem.aux if name in looks),
    )


def _heads_alike(problem: Problem) -> bool:
    """Whether one tile of the mask serves all heads."""
    if problem.mask is None:
        return True
    run = Run(0, 1)
    cell = jax.eval_shape(
        lambda: problem.mask.keep(Grid.tile(run, run, problem.query_offset, len(problem.leading)))  # pyright: ignore
    )
    return not problem.leading or cell.shape[-3] == 1


def _context(problem: Problem, layout: Layout) -> Context:
    # A function that closes over arrays hands them over as leaves, once per shape of tile.
    mask, offset = problem.mask, problem.query_offset
    masks = [
        None if mask is None else mask.hoist(Window(layout, blocking, 0, 0, 0).grid(offset))
        for blocking in (layout.forward, layout.backward)
    ]
    query_words = key_words = None
    if problem.dropout_rate:
        assert problem.rng is not None  # pose asks for it
        grid = Grid.cover(problem.T, problem.S, problem.query_offset, len(problem.leading))
        seeds = dropout.head_seeds(problem.rng, problem.leading)
        query_words = _pair(problem, dropout.query_words(seeds, grid.query_position))
        key_words = _pair(problem, dropout.key_words(seeds, grid.key_index))
    by_query = classify(problem, layout.forward.queries, layout.forward.keys)
    by_key = classify(problem, layout.backward.queries, layout.backward.keys)
    return Context(
        *masks,
        offset,
        query_words,
        key_words,
        list_tiles(by_query),
        list_tiles(jnp.swapaxes(by_key, -1, -2)),
    )


def _pair(problem: Problem, words: Array) -> tuple[Array, Array]:
    return problem.fold(words[0]), problem.fold(words[1])


def _reachable(inputs: Inputs, context: Context, layout: Layout) -> Inputs:
    """Zero the rows of query, key and value that no pair uses.

    What sits in a masked slot may be NaN or inf; multiplied by a zero weight or a zero cotangent it would
    still reach outputs and gradients. Looking for such rows costs a walk, so it happens only when there is
    something to find.
    """
    if not layout.masked and inputs.bias is None:
        return inputs
    arrays = (inputs.query, inputs.key, inputs.value)
    finite = jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()
    *lead, T, S = (*layout.leading, layout.num_queries, layout.num_keys)
    everything = jnp.ones((*lead, layout.group, T, 1), bool), jnp.ones((*lead, 1, S, 1), bool)
    asks, answers = jax.lax.cond(
        finite, lambda: everything, lambda: flash.reach(inputs, context, layout)
    )
    return inputs._replace(
        query=_zero_unless(asks, inputs.query),
        key=_zero_unless(answers, inputs.key),
        value=_zero_unless(answers, inputs.value),
    )


def _zero_unless(used: Array, array: Array) -> Array:
    """Zero the rows that no user of this array, over all axes it is broadcast along, has."""
    shared = tuple(axis for axis, size in enumerate(array.shape[:-1]) if size == 1 < used.shape[axis])
    return jnp.where(used.any(shared, keepdims=True), array, 0)


def _weights(scores: Array, peak: Array, log_total: Array) -> Array:
    """The T x S weights, which nobody gets without asking."""
    alive = (peak != -jnp.inf)[..., None]
    return jnp.where(alive, exp(scores - jnp.where(alive, peak[..., None], 0) - log_total[..., None]), 0)


def _largest(inputs: Inputs, layout: Layout, peak: Array, argmax: Any) -> Array:
    """The largest score, differentiable through its first occurrence: that one score is computed again."""
    alive = argmax >= 0
    index = list(jnp.indices(argmax.shape, jnp.int32, sparse=True))
    place = jnp.maximum(argmax, 0)

    def pick(array: Array, indices: list[Array]) -> Array:
        sizes = array.shape[: len(indices)]
        indices = [jnp.zeros_like(i) if n == 1 else i for i, n in zip(indices, sizes, strict=True)]
        return array[tuple(indices)].astype(layout.dtype)

    key = pick(inputs.key, [*index[:-1], place])
    score = jnp.sum(inputs.query.astype(layout.dtype) * key, -1) * inputs.scale.reshape(())
    if inputs.bias is not None:
        score = score + pick(inputs.bias, [*index, place])
    moves = score - jax.lax.stop_gradient(score)  # 0, with the gradient of the score
    return jnp.where(alive, peak + jnp.where(jnp.isfinite(score), moves, 0), -jnp.inf)


def _nothing(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """No batch, no queries or no keys."""
    rows = (*problem.leading, problem.T)
    fills = {"lse": -np.inf, "max_score": -np.inf, "argmax": -1, "entropy": 0, "weights": 0, "scores": 0}
    aux = {}
    for name in problem.aux:
        shape = (*rows, problem.S) if name in ("weights", "scores") else rows
        dtype = np.int32 if name == "argmax" else problem.accumulation
        aux[name] = jnp.full(shape, fills[name], dtype)
    return jnp.zeros((*rows, problem.E), problem.query.dtype), aux
