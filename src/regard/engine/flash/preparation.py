"""From a problem to what the passes over its tiles take: operands, context and config."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.flash.blocking import Blocking, TileConfig
from regard.engine.flash.measurements import load_tuning
from regard.engine.flash.operands import Context, Operands
from regard.engine.flash.sparsity import TileLists, list_both_ways
from regard.engine.flash.tiles import TileView
from regard.engine.softmax import dropout
from regard.engine.softmax.scoring import Scoring
from regard.masks import Mask
from regard.masks.grid import Grid
from regard.masks.spans import Span


def prepare(
    problem: Problem,
    forward: Blocking | None = None,
    backward: Blocking | None = None,
    lists: tuple[TileLists, TileLists] | None = None,
) -> tuple[Operands, Context, TileConfig]:
    """Return what a loop over the tiles of a call needs, which may be listed; no axis may have length 0."""
    config = _configure(problem, forward, backward)
    arrays = (problem.query, problem.key, problem.value, jnp.asarray(problem.scale))
    query, key, value, scale = map(problem.with_heads, arrays)
    bias = None if problem.bias is None else problem.with_heads(problem.bias)
    inputs, context = Operands(query, key, value, scale, bias), _context(problem, config, lists)
    if problem.score is not None:
        scoring, parameters = Scoring.split(problem.score, config.dtype)
        inputs = inputs._replace(parameters=parameters)
        context = dataclasses.replace(context, scoring=scoring, numbers=_numbers(problem.leading))
        config = dataclasses.replace(config, head_axes=scoring.head_axes)
    return inputs, context, config


def _numbers(leading: tuple[int, ...]) -> tuple[Array, Array]:
    """Enumerate the rows on the first of several leading axes, and the query heads."""
    *rows, heads = leading or (1,)
    row = jnp.arange(rows[0] if rows else 1, dtype=jnp.int32)
    head = jnp.arange(heads, dtype=jnp.int32)
    rank = len(rows) + 3
    return row.reshape((-1, *(1,) * (rank - 1))), head.reshape((*(1,) * (rank - 3), -1, 1, 1))


def _configure(problem: Problem, forward: Blocking | None, backward: Blocking | None) -> TileConfig:
    chosen = load_tuning().blocking(problem)
    heads = problem.key_heads if _heads_alike(problem) else 1
    forward = (forward or chosen[0]).fit(problem.T, problem.S, heads)
    backward = (backward or chosen[1]).fit(problem.T, problem.S, heads)
    return TileConfig(
        leading=(*problem.leading[:-1], problem.key_heads),
        added=0,
        call_axes=len(problem.leading),
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
        stats=statistics(problem),
        batch_invariant=problem.batch_invariant,
    )


def statistics(problem: Problem) -> frozenset[str]:
    """Return what a loop over tiles must keep besides output and lse."""
    return frozenset({"argmax", "entropy"} & {*problem.aux})


def _heads_alike(problem: Problem) -> bool:
    """Tell whether one tile of the mask serves all heads."""
    if problem.mask is None:
        return True
    mask, run = problem.mask, Span(0, 1)
    cell = jax.eval_shape(
        lambda: mask.keep(Grid.tile(run, run, problem.query_offset, len(problem.leading), problem.key_offset))
    )
    return not problem.leading or cell.shape[-3] == 1


def _context(problem: Problem, config: TileConfig, lists: tuple[TileLists, TileLists] | None) -> Context:
    # A function that closes over arrays hands them over as leaves, once per shape of tile.
    mask, offsets = problem.mask, (problem.query_offset, problem.key_offset)

    def convert(blocking: Blocking, row: Any, column: Any) -> Mask | None:
        if mask is None:
            return None
        grid = TileView(config, blocking, (0,) * len(config.leading), row, column).grid(offsets)
        # Data of which nothing is taken are now those of all leading axes.
        return mask.closure_convert(grid).slice_batch(lambda data, _: data, config.call_axes)

    forward_mask = convert(config.forward, 0, _first(config.forward))
    backward_mask = convert(config.backward, _first(config.backward), 0)
    query_words = key_words = None
    if problem.dropout_rate:
        assert problem.rng is not None  # canonicalize asks for it
        grid = problem.grid()
        words = dropout.pair_words(dropout.head_seeds(problem.rng, problem.leading), grid)
        pairs = [(problem.with_heads(first), problem.with_heads(second)) for first, second in words]
        query_words, key_words = pairs
    by_query, by_key = lists or list_both_ways(
        mask,
        problem.sizes,
        offsets,
        config.forward,
        config.backward,
        in_order=config.batch_invariant and mask is not None,
    )
    return Context(forward_mask, backward_mask, offsets, query_words, key_words, by_query, by_key)


def _first(blocking: Blocking) -> Any:
    """Return where some tile, or some pieces, might start."""
    return np.zeros(blocking.pieces, np.int32) if blocking.pieces else 0
