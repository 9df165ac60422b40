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

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.flash.blocking import TileConfig
from regard.engine.flash.loops import TileLoop
from regard.engine.flash.operands import Context, Operands, Results
from regard.engine.flash.tile_scores import drop, score_tile, surviving, zero_before_scoring, zero_unattended
from regard.engine.flash.tiles import TileView
from regard.engine.softmax.exponential import exp
from regard.engine.softmax.online_softmax import Running
from regard.engine.softmax.products import product
from regard.engine.softmax.scoring import scale_early, scale_late
from regard.manual_meshes import varying_axes


def forward(inputs: Operands, context: Context, config: TileConfig, *, reversible: bool = False) -> Results:
    """Attend, one query tile at a time."""
    loop = TileLoop(config, config.forward, reversible, varying_axes(inputs))
    has_nonfinite = inputs.has_nonfinite(config, inputs.value)  # a key's scores are removed

    def row_block(loop: TileLoop, leading: Any, number: Any, results: Results) -> Results:
        first = number * config.forward.queries
        query = loop.map_blocks(
            lambda first: inputs.read_query(TileView(config, config.forward, leading, first)), first
        )

        def body(start: Any, partial: Any, running: Running) -> Running:
            def add(first: Any, query: Array, start: Any, running: Running) -> Running:
                view = TileView(config, config.forward, leading, first, start)
                key, value = inputs.read_keys(view)
                finished = score_tile(query, key, inputs, context, view, partial)
                (value,) = zero_unattended(has_nonfinite, finished, view, -2, value)
                return running.block(
                    finished.scores,
                    value,
                    surviving(context, view),
                    view.column_span.members if "argmax" in config.stats else None,
                    config.precision,
                    config.subtract,
                )

            return loop.map_blocks(add, first, query, start, running)

        empty = Running.empty(
            query.shape[:-1],
            config.value_width,
            config.dtype,
            moment="entropy" in config.stats,
            argmax="argmax" in config.stats,
        )
        end = loop.tiles(context.by_query, leading, number, body, empty)
        stats: dict[str, Any] = {"log_total": end.log_total(), "peak": end.row_max()}
        if "entropy" in config.stats:
            stats["entropy"] = end.entropy()
        if "argmax" in config.stats:
            stats["argmax"] = end.argmax
        output = end.output() / (1 - config.dropout_rate)

        def put(results: Results, first: Any, output: Array, stats: dict[str, Array]) -> Results:
            view = TileView(config, config.forward, leading, first)
            rows = {name: view.put_row_vector(getattr(results, name), tile) for name, tile in stats.items()}
            return results._replace(output=view.put_rows(results.output, output), **rows)

        return loop.put_blocks(put, results, first, output, stats)

    zeros = jnp.zeros(config.rows, config.dtype)
    empty = Results(
        jnp.zeros((*config.rows, config.value_width), config.dtype),
        zeros,
        zeros if "entropy" in config.stats else None,
        zeros,
        jnp.zeros(config.rows, jnp.int32) if "argmax" in config.stats else None,
    )
    count = -(-config.num_queries // config.forward.queries)
    return loop.blocks(count, row_block, empty, context.by_query.order)


def tangent(
    inputs: Operands,
    context: Context,
    results: Results,
    tangents: Mapping[str, Array],
    config: TileConfig,
    *,
    reversible: bool = False,
) -> Results:
    """Compute the JVP: tangents of output, lse and entropy from those of the named inputs."""
    loop = TileLoop(config, config.forward, reversible, varying_axes(inputs))
    low_precision = config.low_precision
    key_side = [tangents.get(name) for name in ("key", "value")]
    zeroed = (inputs.key, inputs.value, *key_side) if reversible else (inputs.value, key_side[1])
    has_nonfinite = inputs.has_nonfinite(config, *zeroed)

    def read(view: TileView) -> _Rows:
        peak = view.row_vector(results.peak)
        row, scale = _read_alive(view, peak, inputs.query), view.cells(inputs.scale)
        row_tangents = []
        if "query" in tangents:
            row_tangent = _read_alive(view, peak, tangents["query"])
            row_tangents.append((scale_early(row_tangent, scale, low_precision), scale))
        if "scale" in tangents:
            scale_tangent = view.cells(tangents["scale"])
            row_tangents.append((scale_early(row, scale_tangent, low_precision), scale_tangent))
        return _Rows(
            scale_early(row, scale, low_precision),
            scale,
            tuple(row_tangents),
            view.rows(results.output),
            view.row_vector(results.log_total),
            _unreached(peak),
            None if results.entropy is None else view.row_vector(results.entropy),
        )

    def read_tangent(view: TileView, name: str) -> Array | None:
        return view.columns(tangents[name]).astype(config.matmul_dtype) if name in tangents else None

    def row_block(loop: TileLoop, leading: Any, number: Any, out_tangents: Results) -> Results:
        first = number * config.forward.queries
        rows = loop.map_blocks(lambda first: read(TileView(config, config.forward, leading, first)), first)

        def body(start: Any, partial: Any, sums: Any) -> Any:
            return loop.map_blocks(functools.partial(add, partial), first, rows, start, sums)

        def add(partial: Any, first: Any, row: _Rows, start: Any, sums: Any) -> Any:
            query, scale, entropy = row.query, row.scale, row.entropy
            view = TileView(config, config.forward, leading, first, start)
            key, value = inputs.read_keys(view)
            key_tangent, value_tangent = read_tangent(view, "key"), read_tangent(view, "value")
            if reversible:
                key, key_tangent = zero_before_scoring(has_nonfinite, inputs, context, view, key, key_tangent)
            finished = score_tile(query, key, inputs, context, view, partial)
            value, value_tangent = zero_unattended(has_nonfinite, finished, view, -2, value, value_tangent)
            logs = config.subtract(finished.scores, row.base[..., None]) - row.log_total[..., None]
            weights = exp(logs)
            change = jnp.zeros_like(finished.scores)
            for row_tangent, late in row.tangents:
                part = product(row_tangent, key, config.precision, (-1, -1))
                change = change + scale_late(part, late, low_precision)
            if key_tangent is not None:
                part = product(query, key_tangent, config.precision, (-1, -1))
                change = change + scale_late(part, scale, low_precision)
            change = finished.jvp(change, tangents)
            if "bias" in tangents:
                change = change + view.cells(tangents["bias"]).astype(config.dtype)
            change = jnp.where(weights == 0, 0, weights * change)
            survivors = surviving(context, view)
            through_scores, lse_tangent, entropy_tangent, through_values, centre, mean = sums
            multiplied = change
            if mean is not None:
                # Rounded less what the first keys change alike, which changes nothing, and as what is taken
                # off again: where one key has all of a row's weight, nothing is left.
                total = weights.sum(-1)
                first_mean = change.sum(-1) / jnp.where(total > 0, total, 1)
                centre = jnp.where(jnp.isnan(centre) & (total > 0), jax.lax.stop_gradient(first_mean), centre)
                multiplied = jnp.where(weights == 0, 0, change - weights * centre[..., None])
                multiplied = multiplied.astype(config.matmul_dtype)
                mean = mean + multiplied.sum(-1, dtype=config.dtype)
            through_scores = through_scores + product(drop(multiplied, survivors), value, config.precision)
            if value_tangent is not None:
                part = product(drop(weights, survivors), value_tangent, config.precision)
                through_values = through_values + part
            lse_tangent = lse_tangent + change.sum(-1)
            if entropy is not None:
                log_plus_entropy = jnp.where(weights > 0, logs, 0) + entropy[..., None]
                entropy_tangent = entropy_tangent - jnp.sum(change * log_plus_entropy, -1)
            return through_scores, lse_tangent, entropy_tangent, through_values, centre, mean

        zeros, outputs = jnp.zeros_like(rows.log_total), jnp.zeros_like(rows.output)
        entropies = None if rows.entropy is None else zeros
        centres = (zeros + jnp.nan, zeros) if low_precision else (None, None)
        sums = (outputs, zeros, entropies, outputs, *centres)
        through_scores, lse_tangent, entropy_tangent, through_values, _, mean = loop.tiles(
            context.by_query, leading, number, body, sums
        )
        grown = (through_scores + through_values) / (1 - config.dropout_rate)
        grown = grown - (lse_tangent if mean is None else mean)[..., None] * rows.output

        def put(out_tangents: Results, first: Any, output: Array, log_total: Array, entropy: Any) -> Results:
            view = TileView(config, config.forward, leading, first)
            out_tangents = out_tangents._replace(
                output=view.put_rows(out_tangents.output, output),
                log_total=view.put_row_vector(out_tangents.log_total, log_total),
            )
            if entropy is not None:
                entropy = view.put_row_vector(out_tangents.entropy, entropy)
                out_tangents = out_tangents._replace(entropy=entropy)
            return out_tangents

        return loop.put_blocks(put, out_tangents, first, grown, lse_tangent, entropy_tangent)

    zeros = jnp.zeros(config.rows, config.dtype)
    outputs = jnp.zeros((*config.rows, config.value_width), config.dtype)
    start = Results(outputs, zeros, None if results.entropy is None else zeros)
    count = -(-config.num_queries // config.forward.queries)
    return loop.blocks(count, row_block, start, context.by_query.order)


class _Rows(NamedTuple):
    """A tile of queries with what the forward pass found of them."""

    query: Array  # scaled early
    scale: Array
    tangents: tuple[tuple[Array, Array], ...]  # of the scaled query, and what is left to scale by
    output: Array
    log_total: Array
    base: Array
    entropy: Array | None


def backward(
    inputs: Operands,
    context: Context,
    results: Results,
    cotangents: Results,
    shapes: Mapping[str, tuple[int, ...]],
    config: TileConfig,
    *,
    reversible: bool = False,
) -> dict[str, Array]:
    """Compute the VJP: cotangents of the inputs named in `shapes` from those of output, lse and entropy."""
    loop = TileLoop(config, config.backward, reversible, varying_axes(inputs))
    has_nonfinite = inputs.has_nonfinite(config, inputs.key, inputs.value)
    low_precision = config.low_precision
    grow = 1 / (1 - config.dropout_rate)
    want_scores = any(name != "value" for name in shapes)
    want_rows = "query" in shapes or "scale" in shapes
    along_rows = None
    if config.backward.pieces:  # which would read the output anew for every block
        # A sum of products over whole arrays takes XLA's CPU up to fifty times as long.
        along_rows = jnp.vecdot(
            cotangents.output.astype(config.dtype), results.output, precision=jax.lax.Precision.HIGHEST
        )
        along_rows = _alive_rows(results.peak, along_rows - cotangents.log_total)

    def column_block(loop: TileLoop, leading: Any, number: Any, grads: dict[str, Array]) -> dict[str, Array]:
        first = number * config.backward.keys

        def view_of(first: Any, start: Any = 0) -> TileView:
            return TileView(config, config.backward, leading, start, first)

        def read(first: Any) -> tuple[Array, Array, Array]:
            key, value = inputs.read_keys(view_of(first))
            # XLA's CPU multiplies bfloat16 as such only along the last axis of the left factor.
            return key, value, jax.lax.optimization_barrier(jnp.swapaxes(key, -1, -2))

        tiles = loop.map_blocks(read, first)

        def body(start: Any, partial: Any, carry: Any) -> Any:
            grads, key_grad, value_grad = carry
            find = functools.partial(change_of, partial)
            key_grad, value_grad, added = loop.map_blocks(find, first, tiles, start, key_grad, value_grad)
            return loop.each_block(add_tile, grads, first, start, added), key_grad, value_grad

        def change_of(
            partial: Any, first: Any, tiles: Any, start: Any, key_grad: Any, value_grad: Any
        ) -> tuple[Any, Any, dict[str, Array]]:
            view = view_of(first, start)
            key, value, key_across = tiles
            if reversible:
                (key,) = zero_before_scoring(has_nonfinite, inputs, context, view, key, across=True)
            peak = view.row_vector(results.peak)
            alive = peak != -jnp.inf
            row = _read_alive(view, peak, inputs.query)
            query = scale_early(row, view.cells(inputs.scale), low_precision)
            cotangent = _read_alive(view, peak, cotangents.output)
            # All that is the same along a row of scores.
            if along_rows is None:
                products = view.rows(cotangents.output).astype(config.dtype) * view.rows(results.output)
                along_row = products.sum(-1) - view.row_vector(cotangents.log_total)
                along_row = _alive_rows(peak, along_row)
            else:
                along_row = view.row_vector(along_rows)
            base = jnp.where(view.own_rows(), _unreached(peak), jnp.inf)
            # Scores lie keys by queries here: three of the five products run faster that way round.
            finished = score_tile(query, key, inputs, context, view, partial, across=True)
            (value,) = zero_unattended(has_nonfinite, finished, view, -1, value)
            logs = config.subtract(finished.scores, base[..., None, :])
            logs = logs - view.row_vector(results.log_total)[..., None, :]
            weights = exp(logs)
            survivors = surviving(context, view, across=True)
            if value_grad is not None:
                value_grad = value_grad + product(drop(weights, survivors), cotangent, config.precision)
            added = {}
            if want_scores:
                # Grown after the product: its factors are rounded, the row's own part is not.
                change = (
                    drop(product(value, cotangent, config.precision, (-1, -1)) * grow, survivors)
                    - along_row[..., None, :]
                )
                if cotangents.entropy is not None:
                    log_plus_entropy = (
                        jnp.where(weights > 0, logs, 0) + view.row_vector(results.entropy)[..., None, :]
                    )
                    entropy_cotangent = jnp.where(alive, view.row_vector(cotangents.entropy), 0)
                    change = change - entropy_cotangent[..., None, :] * log_plus_entropy
                change = weights * change
                if "bias" in shapes:
                    change = jnp.where(weights == 0, 0, change)  # also beside a value of NaN
                    added["bias"] = jnp.swapaxes(change, -1, -2)
                change, parameter_grads = finished.vjp(change, shapes)
                added |= parameter_grads
                if key_grad is not None:
                    key_grad = key_grad + product(change, query, config.precision)
                if want_rows:
                    (key_across,) = zero_unattended(
                        has_nonfinite, finished, view, -1, key_across, key_axis=-1
                    )
                    added["query"] = product(key_across, change, config.precision)
            return key_grad, value_grad, added

        def add_tile(
            grads: dict[str, Array], first: Any, start: Any, added: dict[str, Array]
        ) -> dict[str, Array]:
            view = view_of(first, start)
            ways = {"bias": view.add_cells, "query": view.add_rows_across}
            return grads | {
                name: ways.get(name, view.add_parameter)(grads[name], tile) for name, tile in added.items()
            }

        def add_columns(
            grads: dict[str, Array], first: Any, key_grad: Any, value_grad: Any
        ) -> dict[str, Array]:
            view = view_of(first)
            if key_grad is not None:
                key_grad = scale_late(key_grad, view.cells(inputs.scale), low_precision)
                grads = grads | {"key": view.add_columns(grads["key"], key_grad)}
            if value_grad is not None:
                grads = grads | {"value": view.add_columns(grads["value"], value_grad * grow)}
            return grads

        sums = (
            grads,
            None if "key" not in shapes else jnp.zeros(tiles[0].shape, config.dtype),
            None if "value" not in shapes else jnp.zeros(tiles[1].shape, config.dtype),
        )
        grads, key_grad, value_grad = loop.tiles(context.by_key, leading, number, body, sums)
        return loop.each_block(add_columns, grads, first, key_grad, value_grad)

    totals = {
        name: jnp.zeros(shape, config.dtype)
        for name, shape in shapes.items()
        if name not in ("query", "scale")
    }
    if want_rows:
        *heads, length = config.rows
        totals["query"] = jnp.zeros((*heads, config.query_width, length), config.dtype)
    count = -(-config.num_keys // config.backward.keys)
    totals = loop.blocks(count, column_block, totals, context.by_key.order)
    rows = totals.pop("query", None)
    if rows is not None:
        rows = jnp.swapaxes(rows, -1, -2)  # sum_s ds k
        alive = (results.peak != -jnp.inf)[..., None]
        rows = jnp.where(alive, rows, 0)
        if "scale" in shapes:
            query = jnp.where(alive, inputs.query.astype(config.dtype), 0)
            totals["scale"] = sum_to(rows * query, shapes["scale"])
        if "query" in shapes:
            totals["query"] = sum_to(rows * inputs.scale, shapes["query"])
    return totals


def sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    alike = tuple(axis for axis, size in enumerate(shape) if size == 1 < array.shape[axis])
    return array.sum(alike, keepdims=True)


def _alive_rows(peak: Array, numbers: Array) -> Array:
    """Keep one number a row, and 0 of rows that attend to nothing, which may hold NaN."""
    return jnp.where(peak == -jnp.inf, 0, numbers)


def _read_alive(view: TileView, peak: Array, array: Array) -> Array:
    """Read a tile of rows without what empty ones hold: NaN, which a gradient of 0 would pass on."""
    rows = view.rows(array).astype(view.config.matmul_dtype)
    return jnp.where((peak != -jnp.inf)[..., None], rows, 0)


def _unreached(peak: Array) -> Array:
    """Put +inf where a query attends to nothing, so that e^(s - peak) is 0 there."""
    return jnp.where(peak == -jnp.inf, jnp.inf, peak)
