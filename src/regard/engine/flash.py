"""Flash attention in tiles: forward, its tangent, and the tangent's transpose.

All three take arrays as `tiles` describes. r = scale q k^T, s = f(r) + bias, p = e^(s - lse), o = p v:

    tangent:   ds = f'(r) dr + dbias,  dlse = sum_s p ds,  do = sum_s p (ds v + dv) - dlse o
               dH = -sum_s p (log p + H) ds
    backward:  ds = p (do . v - do . o + dlse - dH (log p + H)),  dr = f'(r) ds,
               from these dbias, dq, dk, dscale and those of f's parameters;  dv = p^T do

With dropout the weights in o are p' = keep p / (1 - rate); lse and H are those of p. lse is kept as two
numbers, peak + log_total: rounded to one, scores in the hundreds would cost p three digits.

Reference: Dao et al., "FlashAttention", 2022, algorithms 1 and 4; entropy and lse gradients are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from regard.axes import Array
from regard.engine.exponential import exp
from regard.engine.online_softmax import Running, product
from regard.engine.operands import Context, Inputs, Results, scale_early, scale_late
from regard.engine.tile_scores import clean, drop, finish, surviving
from regard.engine.tiles import Layout, Walk, Window


def forward(inputs: Inputs, context: Context, layout: Layout, *, reversible: bool = False) -> Results:
    """Attend, one query tile at a time."""
    walk, spoiled = Walk(layout, layout.forward, reversible), inputs.spoiled(layout)

    def line(leading: Any, number: Any, results: Results) -> Results:
        first = number * layout.forward.queries
        here = Window(layout, layout.forward, leading, first)
        query, scale = inputs.read_query(here), here.cells(inputs.scale)

        def visit(start: Any, partial: Any, running: Running) -> Running:
            window = Window(layout, layout.forward, leading, first, start)
            key, value = inputs.read_keys(window)
            scores = scale_late(product(query, key, layout.precision, (-1, -1)), scale, layout)
            finished = finish(scores, inputs, context, window, partial)
            (value,) = clean(spoiled, finished, -2, value)
            return running.block(
                finished.scores, value, surviving(context, window), window.column_run.start, layout.precision
            )

        empty = Running.empty(
            query.shape[:-1],
            layout.value_width,
            layout.dtype,
            moment="entropy" in layout.looks,
            argmax="argmax" in layout.looks,
        )
        end = walk.tiles(context.by_query, leading, number, visit, empty)
        found: dict[str, Any] = {"log_total": end.log_total(), "peak": end.peak}
        if "entropy" in layout.looks:
            found["entropy"] = end.entropy()
        if "argmax" in layout.looks:
            found["argmax"] = end.argmax
        found = {name: here.put_row_vector(getattr(results, name), tile) for name, tile in found.items()}
        output = here.put_rows(results.output, end.output() / (1 - layout.dropout_rate))
        return results._replace(output=output, **found)

    zeros = jnp.zeros(layout.rows, layout.dtype)
    empty = Results(
        jnp.zeros((*layout.rows, layout.value_width), layout.dtype),
        zeros,
        zeros if "entropy" in layout.looks else None,
        zeros,
        jnp.zeros(layout.rows, jnp.int32) if "argmax" in layout.looks else None,
    )
    return walk.lines(-(-layout.num_queries // layout.forward.queries), line, empty)


def tangent(
    inputs: Inputs,
    context: Context,
    results: Results,
    moves: Mapping[str, Array],
    layout: Layout,
    *,
    reversible: bool = False,
) -> Results:
    """How output, lse and entropy move when the inputs of the names given move by `moves`."""
    walk, spoiled = Walk(layout, layout.forward, reversible), inputs.spoiled(layout)

    def line(leading: Any, number: Any, moved: Results) -> Results:
        first = number * layout.forward.queries
        here = Window(layout, layout.forward, leading, first)
        query, scale = inputs.read_query(here), here.cells(inputs.scale)
        row_moves = []  # of the scaled query, to meet keys, and what then is left to scale by
        if "query" in moves:
            move = here.rows(moves["query"]).astype(layout.factor)
            row_moves.append((scale_early(move, scale, layout), scale))
        if "scale" in moves:
            row, move = here.rows(inputs.query).astype(layout.factor), here.cells(moves["scale"])
            row_moves.append((scale_early(row, move, layout), move))
        output, log_total = here.rows(results.output), here.row_vector(results.log_total)
        base = _unreached(here.row_vector(results.peak))
        entropy = None if results.entropy is None else here.row_vector(results.entropy)

        def visit(start: Any, partial: Any, sums: Any) -> Any:
            window = Window(layout, layout.forward, leading, first, start)
            key, value = inputs.read_keys(window)
            scores = scale_late(product(query, key, layout.precision, (-1, -1)), scale, layout)
            finished = finish(scores, inputs, context, window, partial)
            (value,) = clean(spoiled, finished, -2, value)
            logs = finished.scores - base[..., None] - log_total[..., None]
            weights = exp(logs)
            change = jnp.zeros_like(scores)
            for row_move, late in row_moves:
                part = product(row_move, key, layout.precision, (-1, -1))
                change = change + scale_late(part, late, layout)
            if "key" in moves:
                key_move = window.columns(moves["key"]).astype(layout.factor)
                part = product(query, key_move, layout.precision, (-1, -1))
                change = change + scale_late(part, scale, layout)
            change = finished.push(change, moves)
            if "bias" in moves:
                change = change + window.cells(moves["bias"]).astype(layout.dtype)
            change = jnp.where(weights == 0, 0, weights * change)
            survivors = surviving(context, window)
            through_scores, lse_move, entropy_move, through_values = sums
            through_scores = through_scores + product(drop(change, survivors), value, layout.precision)
            if "value" in moves:
                value_move = window.columns(moves["value"]).astype(layout.factor)
                through_values = through_values + product(
                    drop(weights, survivors), value_move, layout.precision
                )
            lse_move = lse_move + change.sum(-1)
            if entropy is not None:
                surprise = jnp.where(weights > 0, logs, 0) + entropy[..., None]
                entropy_move = entropy_move - jnp.sum(change * surprise, -1)
            return through_scores, lse_move, entropy_move, through_values

        zeros = jnp.zeros_like(log_total)
        sums = (jnp.zeros_like(output), zeros, None if entropy is None else zeros, jnp.zeros_like(output))
        through_scores, lse_move, entropy_move, through_values = walk.tiles(
            context.by_query, leading, number, visit, sums
        )
        grown = (through_scores + through_values) / (1 - layout.dropout_rate)
        moved = moved._replace(
            output=here.put_rows(moved.output, grown - lse_move[..., None] * output),
            log_total=here.put_row_vector(moved.log_total, lse_move),
        )
        if entropy_move is not None:
            moved = moved._replace(entropy=here.put_row_vector(moved.entropy, entropy_move))
        return moved

    zeros = jnp.zeros(layout.rows, layout.dtype)
    outputs = jnp.zeros((*layout.rows, layout.value_width), layout.dtype)
    start = Results(outputs, zeros, None if results.entropy is None else zeros)
    return walk.lines(-(-layout.num_queries // layout.forward.queries), line, start)


def backward(
    inputs: Inputs,
    context: Context,
    results: Results,
    pulls: Results,
    shapes: Mapping[str, tuple[int, ...]],
    layout: Layout,
    *,
    reversible: bool = False,
) -> dict[str, Array]:
    """Gradients, by the names and in the shapes given, of what pulls on output, lse and entropy."""
    walk, spoiled = Walk(layout, layout.backward, reversible), inputs.spoiled(layout)
    grow = 1 / (1 - layout.dropout_rate)
    want_scores = any(name != "value" for name in shapes)
    want_rows = "query" in shapes or "scale" in shapes

    def line(leading: Any, number: Any, grads: dict[str, Array]) -> dict[str, Array]:
        first = number * layout.backward.keys
        here = Window(layout, layout.backward, leading, 0, first)
        tiles = inputs.read_keys(here)
        scale = here.cells(inputs.scale)

        def visit(start: Any, partial: Any, carry: Any) -> Any:
            grads, key_grad, value_grad = carry
            window = Window(layout, layout.backward, leading, start, first)
            key, value = tiles
            peak = window.row_vector(results.peak)
            # An empty row may hold NaN, which a gradient of 0 would pass on to the keys.
            query = jnp.where((peak != -jnp.inf)[..., None], inputs.read_query(window), 0)
            pull = window.rows(pulls.output)
            # All that is the same along a row of scores.
            row_pull = jnp.sum(pull * window.rows(results.output), -1) - window.row_vector(pulls.log_total)
            pull = (pull * grow).astype(layout.factor)
            base = jnp.where(window.own_rows(), _unreached(peak), jnp.inf)
            # Scores lie keys by queries here: three of the five products run faster that way round.
            scores = scale_late(product(key, query, layout.precision, (-1, -1)), scale, layout)
            finished = finish(scores, inputs, context, window, partial, across=True)
            key, value = clean(spoiled, finished, -1, key, value)
            logs = finished.scores - base[..., None, :] - window.row_vector(results.log_total)[..., None, :]
            weights = exp(logs)
            survivors = surviving(context, window, across=True)
            if value_grad is not None:
                value_grad = value_grad + product(drop(weights, survivors), pull, layout.precision)
            if want_scores:
                change = (
                    drop(product(value, pull, layout.precision, (-1, -1)), survivors) - row_pull[..., None, :]
                )
                if pulls.entropy is not None:
                    surprise = (
                        jnp.where(weights > 0, logs, 0) + window.row_vector(results.entropy)[..., None, :]
                    )
                    change = change - window.row_vector(pulls.entropy)[..., None, :] * surprise
                change = weights * change
                if "bias" in shapes:
                    change = jnp.where(weights == 0, 0, change)  # also beside a value of NaN
                    cells = window.add_cells(grads["bias"], jnp.swapaxes(change, -1, -2))
                    grads = grads | {"bias": cells}
                change, parameter_grads = finished.pull(change)
                for name, grad in parameter_grads.items():
                    if name in shapes:
                        grads = grads | {name: window.add_parameter(grads[name], grad)}
                if key_grad is not None:
                    key_grad = key_grad + product(change, query, layout.precision)
                if want_rows:
                    rows = window.add_rows_across(
                        grads["query"], product(key, change, layout.precision, (-2, -2))
                    )
                    grads = grads | {"query": rows}
            return grads, key_grad, value_grad

        sums = (
            grads,
            None if "key" not in shapes else jnp.zeros(tiles[0].shape, layout.dtype),
            None if "value" not in shapes else jnp.zeros(tiles[1].shape, layout.dtype),
        )
        grads, key_grad, value_grad = walk.tiles(context.by_key, leading, number, visit, sums)
        if key_grad is not None:
            key_grad = scale_late(key_grad, scale, layout)
            grads = grads | {"key": here.add_columns(grads["key"], key_grad)}
        if value_grad is not None:
            grads = grads | {"value": here.add_columns(grads["value"], value_grad)}
        return grads

    totals = {
        name: jnp.zeros(shape, layout.dtype)
        for name, shape in shapes.items()
        if name not in ("query", "scale")
    }
    if want_rows:
        *heads, length = layout.rows
        totals["query"] = jnp.zeros((*heads, layout.query_width, length), layout.dtype)
    totals = walk.lines(-(-layout.num_keys // layout.backward.keys), line, totals)
    rows = totals.pop("query", None)
    if rows is not None:
        rows = jnp.swapaxes(rows, -1, -2)  # sum_s ds k
        alive = (results.peak != -jnp.inf)[..., None]
        rows = jnp.where(alive, rows, 0)
        if "scale" in shapes:
            query = jnp.where(alive, inputs.query.astype(layout.dtype), 0)
            totals["scale"] = _sum_to(rows * query, shapes["scale"])
        if "query" in shapes:
            totals["query"] = _sum_to(rows * inputs.scale, shapes["query"])
    return totals


def _sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    alike = tuple(axis for axis, size in enumerate(shape) if size == 1 < array.shape[axis])
    return array.sum(alike, keepdims=True)


def _unreached(peak: Array) -> Array:
    """+inf where a query attends to nothing, so that e^(s - peak) is 0 there."""
    return jnp.where(peak == -jnp.inf, jnp.inf, peak)
