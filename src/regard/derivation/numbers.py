"""The numbers of a call's course, in one program: made one by one, each would be compiled alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.softmax import dropout
from regard.engine.softmax.exponential import finite_base
from regard.engine.softmax.products import product
from regard.engine.softmax.score_rows import chosen_indices, score_stages
from regard.engine.softmax.sinks import sink
from regard.masks.grid import Grid


class CourseNumbers(NamedTuple):
    """Hold the values of each step, of the chosen rows and heads; None where the call lacks the step."""

    query_position: Array
    key_position: Array
    key_head: Array
    """The key head of each head."""
    stages: list[Array]
    """Products, scaled, after each score, with bias, kept by the mask."""
    keep: Array | None
    """The pairs that the mask keeps; of all heads."""
    lse: Array
    weights: Array
    sink_weight: Array | None
    entropy: Array
    dropout_factor: Array | None
    """The factor of each weight: 0, or 1 / (1 - rate)."""
    dropped_weights: Array | None
    output: Array
    empty_rows: Array
    """The number of rows that may attend to nothing."""
    hides_nonfinite_values: Array
    """True where a value that nobody may read is not finite."""


@jax.jit
def compute_numbers(problem: Problem) -> CourseNumbers:
    """Compute every step's numbers, as the definition of `attend` does."""
    rows, heads = chosen_indices(problem)
    members = jnp.arange(problem.S, dtype=jnp.int32)
    grid = Grid.at(rows, members, problem.query_offset, len(problem.leading), problem.key_offset)
    stages = score_stages(problem, rows, heads)
    scores = stages[-1]
    # The largest score is subtracted first, so that nothing overflows.
    base = finite_base(scores.max(-1, initial=-jnp.inf))
    exponentials = jnp.exp(scores - base[..., None])
    sums = exponentials.sum(-1)
    alive = sums != 0
    sums = jnp.where(alive, sums, 1)
    lse = jnp.where(alive, base + jnp.log(sums), -jnp.inf)
    weights = exponentials / sums[..., None]
    entropy = (-weights * jnp.log(jnp.where(weights > 0, weights, 1))).sum(-1)
    key_share = sink_weight = dropout_factor = dropped_weights = None
    if problem.sinks is not None:
        sinks = _pick_heads(problem.sinks[..., None], -2, problem).astype(scores.dtype)
        sinks = sinks.reshape((*(1,) * (scores.ndim - 1 - sinks.ndim), *sinks.shape))
        key_share, lse, entropy = sink(sinks, lse, entropy)
        weights = weights * key_share[..., None]
        sink_weight = jnp.exp(jnp.where(lse == -jnp.inf, lse, sinks - lse))
    if problem.dropout_rate:
        assert problem.rng is not None
        seeds = _pick_heads(dropout.head_seeds(problem.rng, problem.leading), -1, problem)
        survivors = dropout.survivors(*dropout.pair_words(seeds, grid), problem.dropout_rate)
        grown = np.asarray(1 / (1 - problem.dropout_rate), weights.dtype)
        dropout_factor = jnp.broadcast_to(jnp.where(survivors, grown, 0), weights.shape)
        dropped_weights = weights * dropout_factor
        exponentials, sums = jnp.where(survivors, exponentials, 0), sums * (1 - problem.dropout_rate)
    output, hides_nonfinite_values = _average(problem, heads, scores, exponentials, sums, key_share)
    keep = None
    if problem.mask is not None:
        keep = problem.mask.keep(grid)
        keep = jnp.broadcast_to(keep, (*keep.shape[:-2], rows.size, problem.S))
    return CourseNumbers(
        query_position=grid.query_position[..., 0],
        key_position=grid.key_position[..., 0, :],
        key_head=heads // np.int32(problem.group),
        stages=stages,
        keep=keep,
        lse=lse,
        weights=weights,
        sink_weight=sink_weight,
        entropy=entropy,
        dropout_factor=dropout_factor,
        dropped_weights=dropped_weights,
        output=output,
        empty_rows=(~alive).sum(),
        hides_nonfinite_values=hides_nonfinite_values,
    )


def _pick_heads(array: Array, axis: int, problem: Problem) -> Array:
    """Take the derived heads of an axis of heads; the one entry of an axis of size 1 serves all."""
    if problem.heads is None or array.ndim < -axis or array.shape[axis] == 1:
        return array
    return jnp.take(array, problem.heads, axis)


def _average(
    problem: Problem, heads: Array, scores: Array, exponentials: Array, sums: Array, key_share: Array | None
) -> tuple[Array, Array]:
    """Return the output, and whether a value that nobody may read is hidden from it."""
    exponentials, scores = problem.with_heads(exponentials), problem.with_heads(scores)
    values = problem.with_heads(problem.value)
    value_heads = values.shape[-3]
    if value_heads > 1:
        values = jnp.take(values, heads // np.int32(problem.leading[-1] // value_heads), -3)
    values = jnp.broadcast_to(values, (*exponentials.shape[:-2], *values.shape[-2:]))
    readable = scores != -jnp.inf
    read = readable.any(-2)[..., None]
    hides_nonfinite_values = ~jnp.isfinite(values).all() & ~read.all()
    values = jnp.where(read, values, 0)
    sums = problem.with_heads(sums[..., None])
    if problem.low_precision:
        exponentials, sums = exponentials / sums, jnp.ones_like(sums)
    exponentials, values = exponentials.astype(problem.matmul_dtype), values.astype(problem.matmul_dtype)
    output = product(exponentials, values, problem.precision) / sums
    output = output if key_share is None else output * problem.with_heads(key_share[..., None])
    output = jnp.where(readable.any(-1, keepdims=True), output, 0)
    return (output if problem.leading else output[0]).astype(problem.query.dtype), hides_nonfinite_values
