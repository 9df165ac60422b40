"""Backend `tiled`: flash attention in plain JAX, linear in memory, that visits only tiles the mask keeps."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.backends import dense
from regard.engine.backends.dense import score_matrix
from regard.engine.call.problem import Problem
from regard.engine.flash import primitives
from regard.engine.flash.operands import Context, Inputs
from regard.engine.flash.sparsity import TileLists, classify_tiles, list_tiles
from regard.engine.flash.tiles import Blocking, Layout, TileView
from regard.engine.flash.tuning import load_tuning
from regard.engine.softmax import dropout
from regard.engine.softmax.exponential import exp
from regard.engine.softmax.score_rows import score_chosen_rows, take_chosen_rows
from regard.engine.softmax.scoring import Scoring
from regard.engine.softmax.sinks import sink
from regard.masks import TileKind
from regard.masks.grid import Grid, Span, offset_column
from regard.scores.cells import Picks


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
        return dense.run(problem)
    inputs, context, layout = prepare(problem, forward, backward)
    results = primitives.run(inputs, context, layout)

    peak = jax.lax.stop_gradient(results.peak)
    rows = {
        "lse": lambda: peak + results.log_total,
        "max_score": lambda: _largest(problem, inputs, layout, peak, results.argmax),
        "argmax": lambda: results.argmax,
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
        output = output * sunk.share[..., None]
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


def prepare(
    problem: Problem, forward: Blocking | None = None, backward: Blocking | None = None
) -> tuple[Inputs, Context, Layout]:
    """Return what a loop over the tiles of a call needs; no axis may have length 0."""
    layout = _lay_out(problem, forward, backward)
    arrays = (problem.query, problem.key, problem.value, jnp.asarray(problem.scale))
    query, key, value, scale = map(problem.with_heads, arrays)
    bias = None if problem.bias is None else problem.with_heads(problem.bias)
    scoring, parameters = None, ()
    if problem.score is not None:
        scoring, parameters = Scoring.split(problem.score, layout.dtype)
    inputs = Inputs(query, key, value, scale, bias, parameters)
    return inputs, dataclasses.replace(_context(problem, layout), scoring=scoring), layout


def _lay_out(problem: Problem, forward: Blocking | None, backward: Blocking | None) -> Layout:
    chosen = load_tuning().blocking(problem)
    forward, backward = forward or chosen[0], backward or chosen[1]
    heads = problem.key_heads if _heads_alike(problem) else 1
    forward, backward = (block.fit(problem.T, problem.S, heads) for block in (forward, backward))
    stats = {"max_score": "argmax", "argmax": "argmax", "entropy": "entropy"}
    return Layout(
        leading=(*problem.leading[:-1], problem.key_heads),
        added=0,
        mask_leading=problem.leading,
        group=problem.group,
        num_queries=problem.T,
        num_keys=problem.S,
        query_width=problem.D,
        value_width=problem.E,
        dtype=problem.accumulation,
        matmul_dtype=problem.matmul_dtype,
        precision=problem.precision,
        dropout_rate=problem.dropout_rate,
        forward=forward,
        backward=backward,
        masked=problem.mask is not None or bool(problem.S % forward.keys or problem.S % backward.keys),
        stats=frozenset(stats[name] for name in problem.aux if name in stats),
    )


def _heads_alike(problem: Problem) -> bool:
    """Whether one tile of the mask serves all heads."""
    if problem.mask is None:
        return True
    mask, run = problem.mask, Span(0, 1)
    cell = jax.eval_shape(
        lambda: mask.keep(Grid.tile(run, run, problem.query_offset, len(problem.leading), problem.key_offset))
    )
    return not problem.leading or cell.shape[-3] == 1


def _context(problem: Problem, layout: Layout) -> Context:
    # A function that closes over arrays hands them over as leaves, once per shape of tile.
    mask, offsets = problem.mask, (problem.query_offset, problem.key_offset)
    forward_mask, backward_mask = (
        None
        if mask is None
        else mask.closure_convert(TileView(layout, blocking, (0,) * len(layout.leading)).grid(offsets))
        for blocking in (layout.forward, layout.backward)
    )
    query_words = key_words = None
    if problem.dropout_rate:
        assert problem.rng is not None  # pose asks for it
        grid = problem.grid()
        seeds = dropout.head_seeds(problem.rng, problem.leading)
        words = dropout.query_words(seeds, grid.query_position), dropout.key_words(seeds, grid.key_position)
        query_words, key_words = (
            (problem.with_heads(one), problem.with_heads(other)) for one, other in words
        )
    by_query, by_key = _lists(problem, layout)
    return Context(
        forward_mask,
        backward_mask,
        offsets,
        query_words,
        key_words,
        by_query,
        by_key,
    )


def _lists(problem: Problem, layout: Layout) -> tuple[TileLists, TileLists]:
    """Tiles by query, for the forward loop, and by key, for the backward loop."""
    forward, backward = layout.forward, layout.backward
    by_query = classify_tiles(problem, forward.queries, forward.keys)
    by_key = jnp.swapaxes(classify_tiles(problem, backward.queries, backward.keys), -1, -2)
    if problem.S % backward.keys:  # the last block overlaps the one before it
        by_key = by_key.at[..., -1, :].min(jnp.int8(TileKind.PARTIAL))
    return (
        list_tiles(by_query, forward.keys, problem.S),
        list_tiles(by_key, backward.queries, problem.T),
    )


def _scores(problem: Problem) -> Array:
    """The T x S scores, or the rows and heads of them that are asked for."""
    whole = problem.rows is None and problem.heads is None
    return score_matrix(problem) if whole else score_chosen_rows(problem)


def _weights(problem: Problem, peak: Array, log_total: Array) -> Array:
    """The T x S weights, which nobody gets without asking, or the rows and heads that are asked for."""
    per_row = (*problem.leading, problem.T, 1)
    peak, log_total = (take_chosen_rows(problem, array.reshape(per_row)) for array in (peak, log_total))
    alive = peak != -jnp.inf
    return jnp.where(alive, exp(_scores(problem) - jnp.where(alive, peak, 0) - log_total), 0)


def _largest(problem: Problem, inputs: Inputs, layout: Layout, peak: Array, argmax: Any) -> Array:
    """The largest score, differentiable through its first occurrence: that one score is computed again."""
    alive = argmax >= 0
    index = list(jnp.indices(argmax.shape, jnp.int32, sparse=True))
    place = jnp.maximum(argmax, 0)
    key_head = index[-2] // layout.group

    def pick(array: Array, indices: list[Array]) -> Array:
        sizes = array.shape[: len(indices)]
        indices = [jnp.zeros_like(i) if n == 1 else i for i, n in zip(indices, sizes, strict=True)]
        return array[tuple(indices)].astype(layout.dtype)

    rows = inputs.query.astype(layout.dtype), pick(inputs.key, [*index[:-2], key_head, place])
    query, key = (jnp.where(alive[..., None], row, 0) for row in rows)
    score = jnp.sum(query * key, -1) * inputs.scale[..., 0]
    if problem.score is not None:
        axes = len(problem.leading)
        grid = problem.grid()
        batch = index[0] if axes > 1 else jnp.zeros_like(index[0])
        moved = offset_column(problem.key_offset, axes)[..., 0]
        position = grid.query_position[..., 0]
        score = problem.score.apply(score, Picks(position, place + moved, index[-2], batch))
    if inputs.bias is not None:
        score = score + pick(inputs.bias, [*index, place])
    derivative = score - jax.lax.stop_gradient(score)  # 0, with the gradient of the score
    return jnp.where(alive, peak + jnp.where(jnp.isfinite(score), derivative, 0), -jnp.inf)
