"""Flash attention in tiles: forward, its tangent, and the tangent's transpose.

All three take arrays as `tiles` describes. s = scale q k^T + bias, p = e^(s - lse), o = p v:

    tangent:   ds = (scale q k^T + bias)',  dlse = sum_s p ds,  do = sum_s p (ds v + dv) - dlse o
               dH = -sum_s p (log p + H) ds
    backward:  ds = p (do . v - do . o + dlse - dH (log p + H)),  from it dq, dk, dbias, dscale; dv = p^T do

With dropout the weights in o are p' = keep p / (1 - rate); lse and H are those of p. lse is kept as two
numbers, peak + log_total: rounded to one, scores in the hundreds would cost p three digits.

Reference: Dao et al., "FlashAttention", 2022, algorithms 1 and 4; entropy and lse gradients are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine import dropout
from regard.engine.exponential import exp
from regard.engine.online_softmax import Running, product
from regard.engine.sparsity import TileLists
from regard.engine.tiles import Layout, Offsets, Walk, Window
from regard.masks import Mask


class Inputs(NamedTuple):
    """What attention is differentiated by."""

    query: Array  # (*batch, H, T, D)
    key: Array  # (*batch, K, S, D)
    value: Array  # (*batch, K, S, E)
    scale: Array  # (*1, 1, 1)
    bias: Array | None = None  # (*batch, H, T, S)

    def read_query(self, window: Window) -> Array:
        """A tile of queries, to be multiplied; scaled unless `_scale_late` does it."""
        query = window.rows(self.query).astype(window.layout.factor)
        return _scale_early(query, window.cells(self.scale), window.layout)

    def read_keys(self, window: Window) -> tuple[Array, Array]:
        """A tile of keys and one of values, to be multiplied."""
        key, value = (window.columns(array).astype(window.layout.factor) for array in (self.key, self.value))
        return key, value

    def spoiled(self, layout: Layout) -> Array | None:
        """Whether some key or value is NaN or inf; None where every query attends to all of them anyway."""
        if not layout.masked and self.bias is None:
            return None
        # Extremes show it, and finding them needs no array of the inputs' size.
        arrays = [jax.lax.stop_gradient(array) for array in (self.key, self.value)]
        spans = [array.max() - array.min() for array in arrays]
        return ~(jnp.isfinite(spans[0]) & jnp.isfinite(spans[1]))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Context:
    """What it is not differentiated by."""

    forward_mask: Mask | None
    backward_mask: Mask | None
    offsets: Offsets
    query_words: tuple[Array, Array] | None  # dropout's words, (*batch, H, T, 1)
    key_words: tuple[Array, Array] | None  # (*batch, H, 1, S)
    by_query: TileLists
    by_key: TileLists


class Results(NamedTuple):
    """What the forward pass found; the first three have tangents, for which the peak counts as constant."""

    output: Array  # (*batch, H, T, E)
    log_total: Array  # (*batch, H, T)
    entropy: Any = None  # None where nobody asks
    peak: Any = None
    argmax: Any = None


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
            scores = _scale_late(product(query, key, layout.precision, (-1, -1)), scale, layout)
            scores = _mask(_add_bias(scores, inputs, window), inputs, context, window, partial)
            (value,) = _clean(spoiled, scores, -2, value)
            return running.block(
                scores, value, _survivors(context, window), window.column_run.start, layout.precision
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
            row_moves.append((_scale_early(move, scale, layout), scale))
        if "scale" in moves:
            row, move = here.rows(inputs.query).astype(layout.factor), here.cells(moves["scale"])
            row_moves.append((_scale_early(row, move, layout), move))
        output, log_total = here.rows(results.output), here.row_vector(results.log_total)
        base = _unreached(here.row_vector(results.peak))
        entropy = None if results.entropy is None else here.row_vector(results.entropy)

        def visit(start: Any, partial: Any, sums: Any) -> Any:
            window = Window(layout, layout.forward, leading, first, start)
            key, value = inputs.read_keys(window)
            scores = _scale_late(product(query, key, layout.precision, (-1, -1)), scale, layout)
            scores = _mask(_add_bias(scores, inputs, window), inputs, context, window, partial)
            (value,) = _clean(spoiled, scores, -2, value)
            logs = scores - base[..., None] - log_total[..., None]
            weights = exp(logs)
            change = jnp.zeros_like(scores)
            for row_move, late in row_moves:
                part = product(row_move, key, layout.precision, (-1, -1))
                change = change + _scale_late(part, late, layout)
            if "key" in moves:
                key_move = window.columns(moves["key"]).astype(layout.factor)
                part = product(query, key_move, layout.precision, (-1, -1))
                change = change + _scale_late(part, scale, layout)
            if "bias" in moves:
                change = change + window.cells(moves["bias"]).astype(layout.dtype)
            change = jnp.where(weights == 0, 0, weights * change)
            survivors = _survivors(context, window)
            through_scores, lse_move, entropy_move, through_values = sums
            through_scores = through_scores + product(_drop(change, survivors), value, layout.precision)
            if "value" in moves:
                value_move = window.columns(moves["value"]).astype(layout.factor)
                through_values = through_values + product(
                    _drop(weights, survivors), value_move, layout.precision
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
    want_scores = any(name in shapes for name in ("query", "key", "scale", "bias"))
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
            scores = _scale_late(product(key, query, layout.precision, (-1, -1)), scale, layout)
            scores = _mask(
                _add_bias(scores, inputs, window, across=True), inputs, context, window, partial, across=True
            )
            key, value = _clean(spoiled, scores, -1, key, value)
            logs = scores - base[..., None, :] - window.row_vector(results.log_total)[..., None, :]
            weights = exp(logs)
            survivors = _survivors(context, window, across=True)
            if value_grad is not None:
                value_grad = value_grad + product(_drop(weights, survivors), pull, layout.precision)
            if want_scores:
                change = (
                    _drop(product(value, pull, layout.precision, (-1, -1)), survivors)
                    - row_pull[..., None, :]
                )
                if pulls.entropy is not None:
                    surprise = (
                        jnp.where(weights > 0, logs, 0) + window.row_vector(results.entropy)[..., None, :]
                    )
                    change = change - window.row_vector(pulls.entropy)[..., None, :] * surprise
                change = weights * change
                if key_grad is not None:
                    key_grad = key_grad + product(change, query, layout.precision)
                if want_rows:
                    rows = window.add_rows_across(
                        grads["query"], product(key, change, layout.precision, (-2, -2))
                    )
                    grads = grads | {"query": rows}
                if "bias" in shapes:
                    change = jnp.where(weights == 0, 0, change)  # also beside a value of NaN
                    cells = window.add_cells(grads["bias"], jnp.swapaxes(change, -1, -2))
                    grads = grads | {"bias": cells}
            return grads, key_grad, value_grad

        sums = (
            grads,
            None if "key" not in shapes else jnp.zeros(tiles[0].shape, layout.dtype),
            None if "value" not in shapes else jnp.zeros(tiles[1].shape, layout.dtype),
        )
        grads, key_grad, value_grad = walk.tiles(context.by_key, leading, number, visit, sums)
        if key_grad is not None:
            key_grad = _scale_late(key_grad, scale, layout)
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


def _scale_early(rows: Array, scale: Array, layout: Layout) -> Array:
    """Scale a factor, T x D numbers instead of T x S; not one that would lose digits by it."""
    return rows if layout.narrow else rows * scale


def _scale_late(scores: Array, scale: Array, layout: Layout) -> Array:
    """Scale a product whose factors could not be."""
    return scores * scale if layout.narrow else scores


def _drop(tile: Array, survivors: Array | None) -> Array:
    return tile if survivors is None else jnp.where(survivors, tile, 0)


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
    scores: Array, inputs: Inputs, context: Context, window: Window, partial: Any, *, across: bool = False
) -> Array:
    """-inf where the mask, or a bias of -inf, removes a pair; FULL tiles evaluate no mask."""
    mask = context.backward_mask if across else context.forward_mask

    def remove(scores: Array) -> Array:
        keep = _keep(inputs, mask, context, window)
        return jnp.where(jnp.swapaxes(keep, -1, -2) if across else keep, scores, -jnp.inf)

    if inputs.bias is not None:
        return remove(scores)
    return jax.lax.cond(partial, remove, lambda scores: scores, scores) if window.layout.masked else scores


def _keep(inputs: Inputs, mask: Mask | None, context: Context, window: Window) -> Array:
    """Which pairs of a tile count."""
    keep = window.keep(mask, context.offsets)
    return keep if inputs.bias is None else keep & (window.cells(inputs.bias) != -jnp.inf)


def _clean(spoiled: Array | None, scores: Array, queries: int, *tiles: Array) -> tuple[Array, ...]:
    """Keys or values of a tile, 0 where none of its queries, on that axis of the scores, may attend to them.

    What sits there may be NaN or inf; multiplied by a zero weight or a zero gradient it would still reach
    outputs and gradients.
    """
    if spoiled is None:
        return tiles

    def clean(*tiles: Array) -> tuple[Array, ...]:
        asked = (scores.max(queries) != -jnp.inf)[..., None]
        return tuple(jnp.where(asked, tile, 0) for tile in tiles)

    return jax.lax.cond(spoiled, clean, lambda *tiles: tiles, *tiles)


def _survivors(context: Context, window: Window, *, across: bool = False) -> Array | None:
    if context.query_words is None or context.key_words is None:
        return None
    rate = window.layout.dropout_rate
    query, key = (
        (window.slice_cells(words[0]), window.slice_cells(words[1]))
        for words in (context.query_words, context.key_words)
    )
    survivors = window.over_scores(dropout.survivors(query, key, rate))
    return jnp.swapaxes(survivors, -1, -2) if across else survivors
