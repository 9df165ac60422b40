"""Flash attention in tiles: forward, its tangent, and the tangent's transpose.

All three take folded arrays (see `tiles`). s = scale q k^T + bias, p = e^(s - lse), o = p v:

    tangent:   ds = (scale q k^T + bias)',  dlse = sum_s p ds,  do = sum_s p (ds v + dv) - dlse o
               dH = -sum_s p (log p + H) ds
    backward:  ds = p (do . v - do . o + dlse - dH (log p + H)),  and from it dq, dk, dbias, dscale; dv = p^T do

With dropout the weights in o are p' = keep p / (1 - rate); lse and H are those of p. lse is kept as two numbers,
peak + log_total: rounded to one, scores in the hundreds would cost p three digits.

Reference: Dao et al., "FlashAttention", 2022, algorithms 1 and 4; entropy and lse gradients are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine import dropout
from regard.engine.exponential import exp
from regard.engine.online_softmax import Running, product
from regard.engine.sparsity import TileLists
from regard.engine.tiles import Layout, Walk, Window
from regard.masks import Mask


class Inputs(NamedTuple):
    """What attention is differentiated by."""

    query: Array  # (*leading, G, T, D)
    key: Array  # (*leading, 1, S, D)
    value: Array  # (*leading, 1, S, E)
    scale: Array  # (*1, 1, 1, 1)
    bias: Array | None = None  # (*leading, G | 1, T | 1, S | 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What it is not differentiated by."""

    forward_mask: Mask | None
    backward_mask: Mask | None
    offset: Any
    query_words: tuple[Array, Array] | None  # dropout's words, (*leading, G, T, 1)
    key_words: tuple[Array, Array] | None  # (*leading, G, 1, S)
    by_query: TileLists
    by_key: TileLists


class Results(NamedTuple):
    """What the forward pass found; the first three have tangents, for which the peak counts as constant."""

    output: Array  # (*leading, G, T, E)
    log_total: Array  # (*leading, G, T)
    entropy: Array | None = None
    peak: Array | None = None
    argmax: Array | None = None


def forward(inputs: Inputs, context: Context, layout: Layout, *, reversible: bool = False) -> Results:
    """Attend, one query tile at a time."""
    walk = Walk(layout, layout.forward, reversible)
    shape = (*layout.leading, layout.group, layout.num_queries)

    def line(index: Any, query_tile: Any, results: Results) -> Results:
        here = Window(layout, layout.forward, index, query_tile, 0)
        query = here.rows(inputs.query).astype(layout.dtype) * inputs.scale.reshape(())

        def visit(key_tile: Any, partial: bool, running: Running) -> Running:
            window = Window(layout, layout.forward, index, query_tile, key_tile)
            key, value = (window.columns(x).astype(layout.dtype) for x in (inputs.key, inputs.value))
            scores = product(query, key, layout.precision, (-1, -1))
            scores = _mask(_add_bias(scores, inputs, window), inputs, context, window, partial)
            return running.block(
                scores, value, _survivors(context, window), window.column_run.start, layout.precision
            )

        start = Running.empty(
            query.shape[:-1],
            layout.value_width,
            layout.dtype,
            moment="entropy" in layout.looks,
            argmax="argmax" in layout.looks,
        )
        end = walk.tiles(context.by_query, index, query_tile, visit, start)
        found = {"log_total": end.log_total(), "peak": end.peak}
        if "entropy" in layout.looks:
            found["entropy"] = end.entropy()
        if "argmax" in layout.looks:
            found["argmax"] = end.argmax
        found = {name: here.put_row_vector(getattr(results, name), tile) for name, tile in found.items()}
        output = here.put_rows(results.output, end.output() / (1 - layout.dropout_rate))
        return results._replace(output=output, **found)

    zeros = jnp.zeros(shape, layout.dtype)
    empty = Results(
        jnp.zeros((*shape, layout.value_width), layout.dtype),
        zeros,
        zeros if "entropy" in layout.looks else None,
        zeros,
        jnp.zeros(shape, jnp.int32) if "argmax" in layout.looks else None,
    )
    return walk.lines(-(-layout.num_queries // layout.forward.queries), line, empty)


def tangent(
    inputs: Inputs,
    context: Context,
    results: Results,
    moves: Inputs,
    layout: Layout,
    *,
    reversible: bool = False,
) -> Results:
    """How output, lse and entropy move when the inputs move by `moves`, whose absent parts are None."""
    walk = Walk(layout, layout.forward, reversible)
    shape = (*layout.leading, layout.group, layout.num_queries)
    scale = inputs.scale.reshape(())

    def line(index: Any, query_tile: Any, moved: Results) -> Results:
        here = Window(layout, layout.forward, index, query_tile, 0)
        rows = lambda array: here.rows(array).astype(layout.dtype)
        query = rows(inputs.query)
        row_moves = []  # d(scale q), to meet k
        if moves.query is not None:
            row_moves.append(rows(moves.query) * scale)
        if moves.scale is not None:
            row_moves.append(query * moves.scale.reshape(()))
        query = query * scale
        output, log_total = here.rows(results.output), here.row_vector(results.log_total)
        base = _unreached(here.row_vector(results.peak))
        entropy = None if results.entropy is None else here.row_vector(results.entropy)

        def visit(key_tile: Any, partial: bool, sums: Any) -> Any:
            window = Window(layout, layout.forward, index, query_tile, key_tile)
            columns = lambda array: window.columns(array).astype(layout.dtype)
            key, value = columns(inputs.key), columns(inputs.value)
            scores = product(query, key, layout.precision, (-1, -1))
            scores = _mask(_add_bias(scores, inputs, window), inputs, context, window, partial)
            logs = scores - base[..., None] - log_total[..., None]
            weights = exp(logs)
            change = jnp.zeros_like(scores)
            for row_move in row_moves:
                change = change + product(row_move, key, layout.precision, (-1, -1))
            if moves.key is not None:
                change = change + product(query, columns(moves.key), layout.precision, (-1, -1))
            if moves.bias is not None:
                change = change + window.cells(moves.bias).astype(layout.dtype)
            change = jnp.where(weights == 0, 0, weights * change)
            survivors = _survivors(context, window)
            drop = lambda array: array if survivors is None else jnp.where(survivors, array, 0)
            through_scores, lse_move, entropy_move, through_values = sums
            through_scores = through_scores + product(drop(change), value, layout.precision)
            if moves.value is not None:
                through_values = through_values + product(
                    drop(weights), columns(moves.value), layout.precision
                )
            lse_move = lse_move + change.sum(-1)
            if entropy is not None:
                surprise = jnp.where(weights > 0, logs, 0) + entropy[..., None]
                entropy_move = entropy_move - jnp.sum(change * surprise, -1)
            return through_scores, lse_move, entropy_move, through_values

        zeros = jnp.zeros_like(log_total)
        sums = (jnp.zeros_like(output), zeros, None if entropy is None else zeros, jnp.zeros_like(output))
        through_scores, lse_move, entropy_move, through_values = walk.tiles(
            context.by_query, index, query_tile, visit, sums
        )
        grown = (through_scores + through_values) / (1 - layout.dropout_rate)
        moved = moved._replace(
            output=here.put_rows(moved.output, grown - lse_move[..., None] * output),
            log_total=here.put_row_vector(moved.log_total, lse_move),
        )
        if entropy_move is not None:
            moved = moved._replace(entropy=here.put_row_vector(moved.entropy, entropy_move))
        return moved

    zeros = jnp.zeros(shape, layout.dtype)
    start = Results(jnp.zeros_like(results.output), zeros, None if results.entropy is None else zeros)
    return walk.lines(-(-layout.num_queries // layout.forward.queries), line, start)


def backward(
    inputs: Inputs,
    context: Context,
    results: Results,
    pulls: Results,
    shapes: Inputs,
    layout: Layout,
    *,
    reversible: bool = False,
) -> Inputs:
    """Gradients, of the given `shapes` (None: not wanted), of what pulls on output, lse and entropy."""
    walk = Walk(layout, layout.backward, reversible)
    scale = inputs.scale.reshape(())
    grow = 1 / (1 - layout.dropout_rate)
    # Everything that is the same along a row of scores.
    row_pull = jnp.sum(pulls.output * results.output, -1) - pulls.log_total
    want_scores = any(x is not None for x in (shapes.query, shapes.key, shapes.scale, shapes.bias))
    want_rows = shapes.query is not None or shapes.scale is not None

    def line(index: Any, key_tile: Any, grads: dict[str, Array]) -> dict[str, Array]:
        here = Window(layout, layout.backward, index, 0, key_tile)
        key, value = (here.columns(x).astype(layout.dtype) for x in (inputs.key, inputs.value))

        def visit(query_tile: Any, partial: bool, carry: Any) -> Any:
            grads, key_grad, value_grad = carry
            window = Window(layout, layout.backward, index, query_tile, key_tile)
            query = window.rows(inputs.query).astype(layout.dtype) * scale
            pull = window.rows(pulls.output) * grow
            vector = lambda array: window.row_vector(array)[..., None, :]
            base = jnp.where(window.fresh_rows(), _unreached(window.row_vector(results.peak)), jnp.inf)
            # Scores lie keys by queries here: three of the five products run faster that way round.
            scores = product(key, query, layout.precision, (-1, -1))
            scores = _mask(
                _add_bias(scores, inputs, window, across=True), inputs, context, window, partial, across=True
            )
            logs = scores - base[..., None, :] - vector(results.log_total)
            weights = exp(logs)
            survivors = _survivors(context, window, across=True)
            drop = lambda array: array if survivors is None else jnp.where(survivors, array, 0)
            if value_grad is not None:
                value_grad = value_grad + product(drop(weights), pull, layout.precision)
            if want_scores:
                change = drop(product(value, pull, layout.precision, (-1, -1))) - vector(row_pull)
                if pulls.entropy is not None:
                    surprise = jnp.where(weights > 0, logs, 0) + vector(results.entropy)
                    change = change - vector(pulls.entropy) * surprise
                change = weights * change
                if key_grad is not None:
                    key_grad = key_grad + product(change, query, layout.precision)
                if want_rows:
                    rows = window.add_rows_across(
                        grads["query"], product(key, change, layout.precision, (-2, -2))
                    )
                    grads = grads | {"query": rows}
                if shapes.bias is not None:
                    change = jnp.where(weights == 0, 0, change)  # also beside a value of NaN
                    cells = window.add_cells(grads["bias"], jnp.swapaxes(change, -1, -2))
                    grads = grads | {"bias": cells}
            return grads, key_grad, value_grad

        start = (
            grads,
            None if shapes.key is None else jnp.zeros_like(key),
            None if shapes.value is None else jnp.zeros_like(value),
        )
        grads, key_grad, value_grad = walk.tiles(context.by_key, index, key_tile, visit, start)
        for name, tile in (("key", key_grad), ("value", value_grad)):
            if tile is not None:
                grads = grads | {name: here.add_columns(grads[name], tile)}
        return grads

    totals = {
        name: jnp.zeros(shape, layout.dtype)
        for name, shape in shapes._asdict().items()
        if shape is not None and name not in ("query", "scale")
    }
    if want_rows:
        full = (*layout.leading, layout.query_width, layout.group, layout.num_queries)
        totals["query"] = jnp.zeros(full, layout.dtype)
    totals = walk.lines(-(-layout.num_keys // layout.backward.keys), line, totals)
    rows = totals.pop("query", None)
    if rows is not None:
        rows = jnp.moveaxis(rows, -3, -1)  # sum_s ds k
        rows = jnp.where((results.peak == -jnp.inf)[..., None], 0, rows)
        if shapes.scale is not None:
            totals["scale"] = _sum_to(rows * inputs.query.astype(layout.dtype), shapes.scale)
        if shapes.query is not None:
            totals["query"] = _sum_to(rows * scale, shapes.query)
    return Inputs(**{name: totals.get(name) for name in Inputs._fields})


def reach(inputs: Inputs, context: Context, layout: Layout) -> tuple[Array, Array]:
    """Which queries (*leading, G, T, 1) attend to some key, and which keys (*leading, 1, S, 1) are attended to."""
    walk = Walk(layout, layout.forward)

    def line(index: Any, query_tile: Any, counts: tuple[Array, Array]) -> tuple[Array, Array]:
        here = Window(layout, layout.forward, index, query_tile, 0)

        def visit(key_tile: Any, partial: bool, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            asking, answers = carry
            window = Window(layout, layout.forward, index, query_tile, key_tile)
            keep = _keep(inputs, context.forward_mask, context, window, partial)
            shape = (*asking.shape[:-1], layout.forward.keys)
            keep = jnp.ones(shape, bool) if keep is None else jnp.broadcast_to(keep, shape)
            answering = keep.any(-2)[..., None].astype(jnp.int32)
            return asking | keep.any(-1, keepdims=True), window.add_columns(answers, answering)

        asks, answers = counts
        nobody = jnp.zeros_like(here.rows(asks), dtype=bool)
        asking, answers = walk.tiles(context.by_query, index, query_tile, visit, (nobody, answers))
        return here.put_rows(asks, asking.astype(jnp.int32)), answers

    asks = jnp.zeros((*layout.leading, layout.group, layout.num_queries, 1), jnp.int32)
    answers = jnp.zeros((*layout.leading, 1, layout.num_keys, 1), jnp.int32)
    lines = -(-layout.num_queries // layout.forward.queries)
    asks, answers = walk.lines(lines, line, (asks, answers))
    return asks > 0, answers > 0


def _sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    alike = tuple(axis for axis, size in enumerate(shape) if size == 1 < array.shape[axis])
    return array.sum(alike, keepdims=True)


def _unreached(peak: Array) -> Array:
    """+inf where a query attends to nothing, so that e^(s - peak) is 0 there."""
    return jnp.where(peak == -jnp.inf, jnp.inf, peak)


def _add_bias(scores: Array, inputs: Inputs, window: Window, *, across: bool = False) -> Array:
    if inputs.bias is None:
        return scores
    bias = window.cells(inputs.bias).astype(scores.dtype)
    return scores + (jnp.swapaxes(bias, -1, -2) if across else bias)


def _mask(
    scores: Array, inputs: Inputs, context: Context, window: Window, partial: bool, *, across: bool = False
) -> Array:
    """-inf where the mask, or a bias of -inf, removes a pair; FULL tiles evaluate no mask."""
    keep = _keep(inputs, context.backward_mask if across else context.forward_mask, context, window, partial)
    if keep is None:
        return scores
    return jnp.where(jnp.swapaxes(keep, -1, -2) if across else keep, scores, -jnp.inf)


def _keep(inputs: Inputs, mask: Mask | None, context: Context, window: Window, partial: bool) -> Array | None:
    """Which pairs of a tile count; None means all."""
    keep = window.keep(mask, context.offset) if partial else None
    if inputs.bias is None:
        return keep
    present = window.cells(inputs.bias) != -jnp.inf
    return present if keep is None else keep & present


def _survivors(context: Context, window: Window, *, across: bool = False) -> Array | None:
    if context.query_words is None or context.key_words is None:
        return None
    rate = window.layout.dropout_rate
    query = tuple(window.slice_cells(words) for words in context.query_words)
    key = tuple(window.slice_cells(words) for words in context.key_words)
    survivors = window.over_scores(dropout.survivors(query, key, rate))
    return jnp.swapaxes(survivors, -1, -2) if across else survivors


