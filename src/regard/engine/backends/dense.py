"""Backend `dense`: the definition of attention, with the whole T x S matrix. The others agree with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from regard.axes import Array
from regard.engine.call.checkpoint_names import OUTPUT
from regard.engine.call.problem import Problem
from regard.engine.call.stores import FEW_QUERIES, LengthFirst, Store, Whole
from regard.engine.flash.measurements import is_one_kernel, looks_at_output
from regard.engine.softmax import dropout
from regard.engine.softmax.exponential import finite_base, nan_where_total_is, subtract_peak
from regard.engine.softmax.score_rows import take_chosen_rows
from regard.engine.softmax.scoring import finish_scores, scale_early, scale_late
from regard.engine.softmax.sinks import Sunk, sink
from regard.manual_meshes import vary, varying_axes
from regard.masks.closures import freeze, reads_arrays
from regard.masks.grid import Grid
from regard.masks.spans import Span
from regard.scores.cells import Block

Way = Callable[[Problem], tuple[Array, dict[str, Array]]]


def refuses(problem: Problem) -> str | None:
    """Refuse nothing: the definition serves every call."""
    del problem
    return None


@jax.jit
def run(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the output and what `problem.aux` names."""
    masked = problem.mask is not None or problem.bias is not None
    few = (
        not problem.is_symbolic and 0 < problem.T * problem.group <= FEW_QUERIES and 0 not in problem.leading
    )
    # Elsewhere a branch would wait for the device, and the pass over values that it saves is part of another.
    reads_once = masked and few and not problem.dropout_rate and looks_at_output()
    if not (reads_once or is_one_kernel(problem)):
        return _define(problem.with_arrays())
    return read_once(problem, _define)


def read_once(problem: Problem, otherwise: Way) -> tuple[Array, dict[str, Array]]:
    """Compute the same, zeroing nothing; `otherwise` where the output is not finite, and its derivatives."""
    # Whether the output is finite would tell scores what they do not depend on.
    if varying_axes(problem.query, problem.key) != varying_axes(problem):
        return otherwise(problem.with_arrays())
    hoisted = _hoist_closures(problem)
    if hoisted is None:
        return otherwise(problem.with_arrays())
    frozen = otherwise if otherwise is _define else freeze(otherwise, hoisted.with_arrays())
    return _read_once(frozen, hoisted)


def _hoist_closures(problem: Problem) -> Problem | None:
    """Return the call whose mask and score hold as leaves what their functions close over.

    It may be differentiated by that. None where arrays vary over manual mesh axes: a function that is called
    knows it, loops and custom derivatives of a program that is made of it do not.
    """
    mask = None if problem.mask is None else problem.mask.closure_convert(problem.grid())
    score = None if problem.score is None else problem.score.closure_convert(problem.accumulation)
    hoisted = dataclasses.replace(problem, mask=mask, score=score)
    has_closures = len(jax.tree.leaves(hoisted)) > len(jax.tree.leaves(problem)) or reads_arrays(problem)
    return None if has_closures and varying_axes(hoisted) else hoisted


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _read_once(otherwise: Way, problem: Problem) -> tuple[Array, dict[str, Array]]:
    # Under `vmap`, a branch's operands are selected by what may vary over mesh axes: JAX then takes none that
    # does not.
    problem = vary(problem, varying_axes(problem))
    swapped = _swap_lengths(problem)
    if is_one_kernel(problem):
        output, aux = _attend_at_once(swapped), {}
        # Statistics are of scores of their own: one more reader would end the kernel, which rounds otherwise.
        if problem.aux:
            query, key = jax.lax.optimization_barrier((swapped.query, swapped.key))
            aux = otherwise(dataclasses.replace(swapped, query=query, key=key))[1]
        if problem.mask is not None or problem.bias is not None:
            mended = partial(_mend_rows, otherwise, problem, output)
            output = jax.lax.cond(_is_finite(output), lambda: output, mended)
        return batch_first((output, aux))
    results = attend_cells(swapped, swapped.keep(), *_inputs(swapped))
    # The branch swaps for itself: what it is given swapped is copied.
    answer = jax.lax.cond(_is_finite(results[0]), lambda: results, lambda: otherwise(_swap_lengths(problem)))
    return batch_first(answer)


def batch_first(results: Any) -> Any:
    """Make the axis over which `vmap` runs the first of all results, if they have it.

    Under `jit`, JAX takes that axis of a function for that of its derivative rule (jax-ml/jax#16374), which
    is another program here: values and gradients would change places where sizes allow it.
    """
    return jax.tree.map(lambda array: jnp.squeeze(array[None], 0), results)


def _mend_rows(otherwise: Way, problem: Problem, output: Array) -> Array:
    """Compute rows that are not finite by `otherwise`; the others keep their bits."""
    is_sound = jnp.isfinite(output).all(-1, keepdims=True)
    return jnp.where(is_sound, output, otherwise(_swap_lengths(problem))[0])


@jax.custom_batching.custom_vmap
def _is_finite(array: Array) -> Array:
    return jnp.isfinite(array).all()


@_is_finite.def_vmap
def _is_finite_of_all(axis_size: int, in_batched: Any, array: Array) -> tuple[Array, bool]:
    del axis_size, in_batched
    return _is_finite(array), False  # one answer for the batch: for several, `cond` would take both branches


def _swap_lengths(problem: Problem) -> Problem:
    key = problem.key.array() if isinstance(problem.key, LengthFirst) else problem.key
    value = problem.value.array() if isinstance(problem.value, LengthFirst) else problem.value
    return dataclasses.replace(problem, key=key, value=value)


@_read_once.defjvp
def _read_once_jvp(otherwise: Way, primals: Any, tangents: Any) -> Any:
    return jax.jvp(lambda problem: batch_first(otherwise(problem.with_arrays())), primals, tangents)


def _define(problem: Problem) -> tuple[Array, dict[str, Array]]:
    keep = problem.keep()
    return attend_cells(problem, keep, *_zero_unattended(problem, keep))


def attend_cells(
    problem: Problem, keep: Array | None, query: Array, key: Store, value: Store, grid: Grid | None = None
) -> tuple[Array, dict[str, Array]]:
    """Compute the same; the cells are all pairs of queries and keys, or those of a grid in their place."""
    grid = problem.grid() if grid is None else grid
    weighed = _weigh(problem, keep, query, key, grid)
    weights, total = weighed.weights, weighed.total
    if problem.dropout_rate:
        weights, total = jnp.where(_survivors(problem, grid), weights, 0), total * (1 - problem.dropout_rate)
    if problem.low_precision:
        # The product rounds the gradient of its weights: what cancels in it, where one weight is nearly all,
        # cancels with nothing else.
        weights, total = weights / total, 1
    # Divided after the product: T x E numbers instead of T x S.
    weights = problem.fold(weights).astype(problem.matmul_dtype)
    output = problem.unfold(value.mix(weights, problem.precision)) / total
    if weighed.alive is not None:
        output = jnp.where(weighed.alive, output, 0)  # 0 * NaN would reach an empty row
    if problem.sinks is not None:
        output = output * weighed.sunk(problem).share
    output = problem.spread(output, problem.T, problem.E).astype(problem.query.dtype)
    if problem.aux and keep is None:
        # XLA's CPU makes one kernel of a call without a mask, but not where scores are read elsewhere, which
        # rounds otherwise: who asks gets scores of their own.
        query, key = jax.lax.optimization_barrier((query, key))
        weighed = _weigh(problem, keep, query, key, grid)
    aux = {}
    for name in problem.aux:
        array = weighed.statistic(name, problem)
        if name in ("weights", "scores"):
            aux[name] = take_chosen_rows(problem, problem.spread(array, problem.T, problem.S))
        else:
            aux[name] = problem.spread(array, problem.T, 1)[..., 0]
    return checkpoint_name(output, OUTPUT), aux


def _attend_at_once(problem: Problem) -> Array:
    """Compute the output in one kernel where it is finite, and what is not finite elsewhere.

    What would end the kernel: a comparison or a selection among scores, and work on fewer than 4096 numbers.
    So -inf is added to what is masked, and rows are not divided by their sums: XLA would invert those first.
    """
    keep, dtype = problem.keep(), problem.accumulation
    query, key, value = _inputs(problem)
    size = jnp.where(problem.scale < 0, -1, 1) if problem.low_precision else problem.scale
    scores = key.score(problem.fold(query * jnp.asarray(size, query.dtype)), problem.precision)
    peak_of = scores
    if keep is not None:
        added = 0 if problem.bias is None else problem.with_heads(problem.bias)
        removed = jnp.where(keep, added, -jnp.inf).astype(dtype)
        if problem.group > 1:
            every_head = (*removed.shape[:-3], problem.leading[-1], problem.T, problem.S)
            removed = jnp.broadcast_to(removed, every_head)
        scores = scores + problem.fold(removed)
        peak_of = jnp.maximum(scores, jnp.finfo(dtype).min)  # of an empty row
    peak = peak_of.max(-1, keepdims=True)
    shifted = (scores - peak) * jnp.abs(problem.scale) if problem.low_precision else scores - peak
    weights = jnp.exp(shifted)
    mixed = value.mix(weights.astype(problem.matmul_dtype), problem.precision)
    total = jnp.broadcast_to(weights.sum(-1, keepdims=True), mixed.shape)
    output = problem.unfold(mixed / (jax.lax.optimization_barrier(total) + jnp.finfo(dtype).tiny))
    output = problem.spread(output, problem.T, problem.E).astype(problem.query.dtype)
    return checkpoint_name(output, OUTPUT)


class _Weighed(NamedTuple):
    """Scores and their exponentials, shifted by each row's peak."""

    scores: Array
    peak: Array
    shifted: Array
    weights: Array
    total: Array
    alive: Array | None  # None where every row has a key

    def statistic(self, name: str, problem: Problem) -> Array:
        """Return what `aux` calls so, a column or a matrix."""
        alive = jnp.full_like(self.peak, True, dtype=bool) if self.alive is None else self.alive
        if name == "max_score":
            return nan_where_total_is(self.total, _largest_score(self.scores, alive))
        if name == "argmax":
            return jnp.where(alive, jnp.where(jnp.isnan(self.total), 0, _argmax(self.scores)), -1)
        if name == "scores":
            return self.scores
        if name == "weights":
            weights = self.weights / self.total
            return weights if problem.sinks is None else weights * self.sunk(problem).share
        entropy = self.entropy() if name == "entropy" else None
        if problem.sinks is not None:
            sunk = self.sunk(problem, entropy)
            return sunk.lse if entropy is None else sunk.entropy
        return self.lse() if entropy is None else entropy

    def lse(self) -> Array:
        lse = self.peak + jnp.log(self.total)
        return lse if self.alive is None else jnp.where(self.alive, lse, -jnp.inf)

    def entropy(self) -> Array:
        return jnp.log(self.total) - _expectation(self.weights, self.shifted) / self.total

    def sunk(self, problem: Problem, entropy: Array | None = None) -> Sunk:
        """Return what sinks make of it."""
        entropy = jnp.zeros_like(self.peak) if entropy is None else entropy
        return sink(problem.sink_column(), self.lse(), entropy)


def _weigh(problem: Problem, keep: Array | None, query: Array, key: Store, grid: Grid) -> _Weighed:
    # A row with nothing to attend to stays zero. Where there cannot be one, asking would cost a pass.
    # A score function may remove keys, too.
    certain = keep is None and problem.score is None and problem.S
    if certain and problem.bias is None and problem.low_precision:
        # Scaled after the peak is taken off, which is then exactly 0. XLA's CPU makes one kernel of the whole
        # call, but not of a comparison, as in `subtract_peak`.
        sign = jnp.where(problem.scale < 0, -1, 1)
        products = _products(problem, query * sign.astype(query.dtype), key)
        size = problem.scale * sign.astype(problem.accumulation)
        top, alive = _largest(products), None
        scores, peak, shifted = products * size, top * size, (products - top) * size
    else:
        scores = _scores(problem, query, key, keep, grid)
        peak = _largest(scores)
        alive, base = None, peak if certain else finite_base(peak)
        ends_in_sum = not problem.low_precision if problem.score is None else problem.score.adds
        shifted = scores - base if ends_in_sum else subtract_peak(scores, base)
    weights = jnp.exp(shifted)
    total = weights.sum(-1, keepdims=True)
    if not certain:  # a peak of -inf may be that of NaN, which XLA's CPU loses in a maximum
        alive = total != 0
        total = jnp.where(alive, total, 1)
    return _Weighed(scores, peak, shifted, weights, total, alive)


def score_matrix(problem: Problem) -> Array:
    """Compute the T x S scores, -inf where a query may not attend."""
    keep = problem.keep()
    query, key, _ = _zero_unattended(problem, keep)
    return problem.spread(_scores(problem, query, key, keep, problem.grid()), problem.T, problem.S)


def _scores(problem: Problem, query: Array, key: Store, keep: Array | None, grid: Grid) -> Array:
    query = scale_early(query, problem.scale, problem.low_precision)
    scores = scale_late(_products(problem, query, key), problem.scale, problem.low_precision)
    cells = bias = None
    if problem.score is not None:
        scores = jnp.broadcast_to(scores, (*(problem.leading or (1,)), problem.T, problem.S))
        cells = _cells(problem, grid)
    if problem.bias is not None:
        bias = problem.with_heads(problem.bias)
    return finish_scores(scores, keep, score=problem.score, cells=cells, bias=bias).scores


def _products(problem: Problem, query: Array, key: Store) -> Array:
    return problem.unfold(key.score(problem.fold(query), problem.precision))


def _largest(scores: Array) -> Array:
    return jax.lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))


def _cells(problem: Problem, grid: Grid) -> Block:
    axes = len(problem.leading)
    first = jnp.arange(problem.leading[0] if axes > 1 else 1, dtype=jnp.int32)
    heads = Span(None, problem.leading[-1] if axes else 1)
    return Block(grid, heads, first.reshape((-1, *(1,) * (max(axes, 1) + 1))), problem.with_heads)


def _inputs(problem: Problem) -> tuple[Array, Store, Store]:
    """Return query, key and value in the dtype of products."""
    rows = problem.T * problem.group

    def store(stored: Any) -> Store:
        if isinstance(stored, Store):
            return stored
        return Whole.divide(problem.with_heads(stored).astype(problem.matmul_dtype), rows)

    query = problem.query
    if isinstance(problem.key, Store):  # which knows no query that several key heads share
        query = problem.spread(query, problem.T, problem.D)
    query = problem.with_heads(query).astype(problem.matmul_dtype)
    return query, store(problem.key), store(problem.value)


def _zero_unattended(problem: Problem, keep: Array | None) -> tuple[Array, Store, Store]:
    """Return query, key and value in the dtype of products, zero where no pair uses them.

    What sits in a masked slot may be NaN or inf; multiplied by a zero weight or a zero cotangent it would
    still reach outputs and gradients.
    """
    query, key, value = _inputs(problem)
    if keep is None:
        return query, key, value
    asks = keep.any(-1)[..., None]
    answers = keep.any(-2)[..., None]
    if answers.shape[-3] != 1:  # a key answers when any head of its group asks
        *batch, heads, length, _ = answers.shape
        answers = answers.reshape((*batch, heads // problem.group, problem.group, length, 1)).any(-3)
    return (
        Whole(query, problem.T).zero_unless(asks).values,
        key.zero_unless(answers),
        value.zero_unless(answers),
    )


def _survivors(problem: Problem, grid: Grid) -> Array:
    assert problem.rng is not None  # canonicalize asks for it
    words = dropout.pair_words(dropout.head_seeds(problem.rng, problem.leading), grid)
    return problem.with_heads(dropout.survivors(*words, problem.dropout_rate))


def _argmax(scores: Array) -> Array:
    if scores.shape[-1] == 0:
        return jnp.zeros((*scores.shape[:-1], 1), jnp.int32)
    # Pairs, as in `first_largest`: what XLA computes anew beside a maximum may be rounded otherwise.
    return jax.lax.argmax(jax.lax.stop_gradient(scores), scores.ndim - 1, jnp.int32)[..., None]


def _largest_score(scores: Array, alive: Array) -> Array:
    """Return the largest score, differentiable through its first occurrence."""
    if scores.shape[-1] == 0:
        return jnp.full((*scores.shape[:-1], 1), -jnp.inf, scores.dtype)
    return jnp.where(alive, jnp.take_along_axis(scores, _argmax(scores), axis=-1), -jnp.inf)


def _expectation(weights: Array, shifted: Array) -> Array:
    """Sum the shifted scores times their weights; a weight of 0 contributes 0."""
    # A product with ones: a sum would form weights and scores anew on the CPU.
    ones = jnp.ones((weights.shape[-1], 1), weights.dtype)
    return jnp.matmul(weights * jnp.where(weights > 0, shifted, 0), ones, precision="highest")
