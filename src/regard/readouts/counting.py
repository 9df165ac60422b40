"""The sweep over the weights of a call: row blocks are normalised, then each tile is counted and dropped."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.flash.loops import TileLoop
from regard.engine.flash.tiles import TileView
from regard.engine.softmax.exponential import exp, finite_base, nan_where_total_is
from regard.engine.softmax.products import product
from regard.masks.offsets import offset_column
from regard.readouts.accumulators import (
    Norm,
    PerKey,
    PerQuery,
    SweepConfig,
    SweepResults,
    Tokens,
    bin_of,
    sum_bins,
    sum_diagonals,
)
from regard.readouts.tiling import TilePositions, Tiling, block_of, merge
from regard.readouts.top_k import CHUNK, RunningTopK

_EXACT = jax.lax.Precision.HIGHEST


def sweep(
    problem: Problem, lse: Array | None, tokens: Tokens | None, sweep_config: SweepConfig
) -> SweepResults:
    """Visit every tile that is not EMPTY: once, if lse is given, else twice."""
    tiling = Tiling.prepare(problem, sweep_config)
    rows = tiling.config.rows
    sinks = None if problem.sinks is None else sink_logits(problem).reshape(rows)
    certain = problem.bias is None and problem.score is None
    lse = None if lse is None else lse.reshape(rows)
    return _Counting(tiling, lse, sinks, tokens, certain).run(problem)


def sink_logits(problem: Problem) -> Array:
    """Spread the logits of the sinks to every query, (*B, T)."""
    return problem.spread(problem.sink_column().astype(problem.accumulation), problem.T, 1)[..., 0]


class _Floats(NamedTuple):
    """The floating-point numbers of a query, which are written at once, stacked in this order."""

    norm: Norm
    sums: PerQuery
    top_scores: tuple[Array, ...]


class _Tile(NamedTuple):
    """A tile of weights (C, G * R), and where it lies."""

    view: TileView
    positions: TilePositions
    weights: Array


class _RowBlock(NamedTuple):
    """The values that all tiles of a row block share."""

    view: TileView
    query: Array
    norm: Norm  # (1, R)
    is_own: Array | None  # which rows belong to this row block; None, all
    own_norm: Norm  # -inf where they do not, so that weights are 0
    position: Array  # int32
    membership: Array  # (R, G * blocks) which block of the grid a row counts for
    tokens: Array | None


@dataclass(frozen=True)
class _Counting:
    tiling: Tiling
    lse: Array | None  # (*batch, H, T)
    sinks: Array | None  # (*batch, H, T)
    tokens: Tokens | None
    certain: bool  # all keys of a FULL tile count

    def run(self, problem: Problem) -> SweepResults:
        """Run the loops, and give the arrays that they filled the axes of the call."""
        tiling, config, sweep_config = self.tiling, self.tiling.config, self.tiling.sweep_config
        top_k, dtype = sweep_config.top_k, config.dtype
        zero = jnp.zeros((), dtype)
        row = _Floats(Norm(zero, zero), PerQuery.like(zero, self.tokens), (zero,) * top_k)
        layout = jax.tree.structure(row)
        floats = jnp.zeros((*config.rows, layout.num_leaves), dtype)
        integers = jnp.zeros((*config.rows, 1 + top_k), jnp.int32)
        start = floats, integers, self._start_columns()
        floats, integers, columns = tiling.loop.blocks(tiling.row_blocks, self._row_block, start)

        batch, axes = problem.leading, len(problem.leading)
        shift = offset_column(problem.query_offset, axes) - offset_column(problem.key_offset, axes)
        shift = shift.reshape((shift.shape[0], *(1,) * len(config.leading)))
        distance_mass = sum_bins(columns.diagonals, shift - np.int32(tiling.width))
        floats, integers = floats.reshape((*batch, problem.T, -1)), integers.reshape((*batch, problem.T, -1))
        row = jax.tree.unflatten(layout, [floats[..., number] for number in range(layout.num_leaves)])
        height = -(-problem.T // sweep_config.query_block)
        width = -(-problem.S // sweep_config.key_block)

        def of_keys(array: Array) -> Array:
            return jnp.swapaxes(array, -1, -2).reshape((*batch, -1))[..., : problem.S]

        def of_blocks(array: Array) -> Array:
            array = jnp.moveaxis(array, -3, -1)
            return array.reshape((*batch, *array.shape[-2:]))[..., :height, :width]

        return SweepResults(
            norm=row.norm,
            rows=row.sums,
            keys=integers[..., 0],
            top_scores=jnp.stack(row.top_scores, -1),
            top_keys=integers[..., 1:],
            key_mass=of_keys(columns.mass),
            key_max=of_keys(columns.largest),
            block_mass=of_blocks(columns.block_mass),
            block_max=of_blocks(columns.block_max),
            distance_mass=distance_mass.reshape((*batch, distance_mass.shape[-1])),
        )

    def _start_columns(self) -> PerKey:
        tiling, config = self.tiling, self.tiling.config
        lead, group, (height, width) = config.leading, config.group, tiling.pyramid
        keys = jnp.zeros((*lead, tiling.width, group), config.dtype)
        blocks = jnp.zeros((*lead, width, group, height), config.dtype)
        diagonals = jnp.zeros((*lead, group, config.num_queries + tiling.width + 1), config.dtype)
        return PerKey(keys, keys, blocks, blocks, diagonals)

    def _row_block(self, loop: TileLoop, leading: Sequence[Any], number: Any, results: Any) -> Any:
        tiling, sweep_config = self.tiling, self.tiling.sweep_config
        view = tiling.view(leading, number * np.int32(tiling.blocking.queries))
        row_block = self._start(view, number)
        floats, integers, columns = results
        size = row_block.norm.peak.size
        zeros = jnp.zeros((size,), tiling.config.dtype)
        top = RunningTopK.none(sweep_config.top_k, size, tiling.config.dtype)
        start = PerQuery.like(zeros, self.tokens), zeros.astype(jnp.int32), top, columns
        body = partial(self._count, row_block)
        sums, count, top, columns = loop.tiles(tiling.context.by_query, leading, number, body, start)
        row = _Floats(Norm(*(part[0] for part in row_block.norm)), sums, tuple(top.scores))
        floats = view.put_rows(floats, jnp.stack(jax.tree.leaves(row), -1))
        return floats, view.put_rows(integers, jnp.stack([count, *top.keys], -1)), columns

    def _start(self, view: TileView, number: Any) -> _RowBlock:
        tiling, config, sweep_config = self.tiling, self.tiling.config, self.tiling.sweep_config
        query = tiling.inputs.read_query(view)
        norm = own_norm = self._normalise(view, number, query)
        is_own: Any = view.own_rows()
        is_own = None if isinstance(is_own, bool) else is_own
        if is_own is not None:
            own_norm = norm._replace(peak=jnp.where(is_own[None], norm.peak, -jnp.inf))

        def spread(row: Array) -> Array:
            return jnp.broadcast_to(row, (config.group, row.size)).reshape(-1)

        block = block_of(view.row_span.members, sweep_config.query_block)
        block = spread(block - block_of(view.first_query, sweep_config.query_block))
        head = jnp.repeat(np.arange(config.group, dtype=np.int32), tiling.blocking.queries)
        column = np.arange(config.group * tiling.query_blocks, dtype=np.int32)
        membership = (head * np.int32(tiling.query_blocks) + block)[:, None] == column[None]
        membership = membership if is_own is None else membership & is_own[:, None]
        position = spread(view.grid(tiling.context.offsets).query_position.reshape(-1))
        tokens = None
        if self.tokens is not None:
            tokens = view.rows(self.tokens.query[..., None]).reshape(-1)
            tokens = tokens if tokens.size == norm.peak.size else spread(tokens)
        membership = membership.astype(config.dtype)
        return _RowBlock(view, query, norm, is_own, own_norm, position, membership, tokens)

    def _normalise(self, row_view: TileView, number: Any, query: Array) -> Norm:
        """Return what the scores of a row block are lessened by."""
        if self.lse is not None:
            lse = row_view.row_vector(self.lse)[None]
            return Norm(lse, jnp.zeros_like(lse))

        # Tiles have the shape of those that are counted: their scores have the same roundings.
        def body(start: Any, partly: Any, running: tuple[Array, Array]) -> tuple[Array, Array]:
            view = self.tiling.view(row_view.leading, row_view.first_query, start)
            scores = self.tiling.scores(query, view, partly)
            peak = jnp.maximum(running[0], scores.max(0, keepdims=True))
            base = finite_base(peak)
            return peak, running[1] * exp(running[0] - base) + exp(scores - base).sum(0, keepdims=True)

        empty = jnp.zeros((1, query.shape[0]), self.tiling.config.dtype)
        running = jnp.full_like(empty, -jnp.inf), empty
        if self.sinks is not None:
            sinks = row_view.row_vector(self.sinks)[None]
            running = sinks, jnp.where(sinks == -jnp.inf, 0, jnp.ones_like(sinks))
        by_query = self.tiling.context.by_query
        peak, total = self.tiling.loop.tiles(by_query, row_view.leading, number, body, running)
        return Norm(nan_where_total_is(total, peak), jnp.log(jnp.where(total == 0, 1, total)))

    def _count(self, row_block: _RowBlock, start: Any, partly: Any, carry: Any) -> Any:
        rows, count, running_top, columns = carry
        tiling = self.tiling
        view = tiling.view(row_block.view.leading, row_block.view.first_query, start)
        scores = tiling.align(tiling.scores(row_block.query, view, partly), view, -jnp.inf)
        # Held, where XLA keeps barriers; where it does not, top keys are found among what is stored.
        scores = jax.lax.optimization_barrier(scores)
        # A row that holds NaN counts for nothing: times 0, it would still reach what others count for.
        is_nan = row_block.norm.is_nan()
        logs = jnp.where(is_nan, -jnp.inf, row_block.norm.logs(scores))
        tile = _Tile(view, tiling.positions(view), self._exp(logs))
        tops = jnp.where(is_nan, -jnp.inf, scores.reshape((-1, CHUNK, scores.shape[-1])).max(1))
        running_top = running_top.meet(scores, tops, start)
        if self.certain and tiling.config.masked:
            full = jnp.full_like(count, tiling.blocking.keys)
            count = count + jax.lax.cond(partly, _count_keys, lambda _: full, scores)
        else:
            count = count + (np.int32(tiling.blocking.keys) if self.certain else _count_keys(scores))
        more = self._count_rows(row_block, tile, logs, scores != -jnp.inf)
        rows = jax.tree.map(jnp.add, rows, more)
        columns = self._count_columns(row_block, tile, tops, columns)
        return rows, count, running_top, columns

    def _exp(self, logs: Array) -> Array:
        """Return weights, large ones by an lse that is not the call's: `exp` takes what a softmax has."""
        return exp(logs if self.lse is None else jnp.where(logs > 80, jnp.asarray(80, logs.dtype), logs))

    def _count_rows(self, row_block: _RowBlock, tile: _Tile, logs: Array, visible: Array) -> PerQuery:
        """Sum over the keys of a tile: weights, and how many keys each pattern has."""
        view, positions, weights = tile
        dtype, sweep_config, keys = weights.dtype, self.tiling.sweep_config, self.tiling.keys
        index = jnp.arange(keys, dtype=jnp.int32)
        key_position = positions.first_key + index
        first = (key_position < sweep_config.first).astype(dtype)
        ahead = (row_block.position - positions.first_key).astype(dtype)  # of the tile's first key
        distance = row_block.position[None] - key_position[:, None]
        counts = visible.astype(dtype)

        def column(ids: Array) -> Array:
            return self.tiling.align(view.columns(ids[..., None]).reshape(-1), view, -1)

        kinds = [jnp.ones((keys,), dtype), index.astype(dtype), first]
        if self.tokens is not None:
            kinds.append((column(self.tokens.delimits) > 0).astype(dtype))
        stack = jnp.stack(kinds)
        total, offset, *by_key = product(stack, weights, _EXACT)
        by_key = list(zip(by_key, product(stack[2:], counts, _EXACT), strict=True))

        def total_over(cells: Array) -> tuple[Array, Array]:
            return jnp.where(cells, weights, 0).sum(0), jnp.where(cells, counts, 0).sum(0)

        def near() -> list[tuple[Array, Array]]:
            neighbours = [distance == n for n in (0, 1, -1)]
            return [total_over(cells) for cells in (*neighbours, jnp.abs(distance) < sweep_config.local)]

        reach = max(sweep_config.local, 2)
        sums = [by_key[0]]
        is_near = (positions.least_distance < reach) & (positions.most_distance > -reach)
        sums += jax.lax.cond(is_near, near, lambda: [(jnp.zeros_like(total),) * 2] * 4)
        if self.tokens is not None and row_block.tokens is not None:
            query_token = row_block.tokens[None]
            sums.append(total_over((column(self.tokens.key)[:, None] == query_token) & (distance != 0)))
            # The query's own token comes before the next key, which says nothing of a repetition.
            earlier = (index + view.first_key > 0)[:, None] & (distance != -1)
            sums.append(total_over((column(self.tokens.before_key)[:, None] == query_token) & earlier))
            sums.append(by_key[1])
        # Underflow: 0 times the log of 0 is 0.
        entropy_sum = -(weights * jnp.maximum(logs, -1e30)).sum(0)
        return PerQuery(total, total * ahead - offset, entropy_sum, *zip(*sums, strict=True))

    def _count_columns(self, row_block: _RowBlock, tile: _Tile, tops: Array, columns: PerKey) -> PerKey:
        """Add the sums and maxima over the queries of a tile."""
        view, positions, weights = tile
        tiling, sweep_config, group = self.tiling, self.tiling.sweep_config, self.tiling.config.group
        keys, queries, across = tiling.keys, tiling.blocking.queries, tiling.query_blocks
        height = min(sweep_config.key_block, keys)
        by_block = product(weights, row_block.membership, _EXACT).reshape((keys, group, across))
        if row_block.is_own is not None:
            weights = jnp.where(row_block.is_own[None], weights, 0)
        # Lanes: reducing the last axis at once is slower.
        lanes = weights.reshape((keys, group, -1, math.gcd(queries, 16)))
        if height % CHUNK:
            peaks = weights.reshape((tiling.key_blocks, height, -1)).max(1)
        else:  # the largest weights are those of the largest scores, which are known
            logs = jnp.where(row_block.norm.is_nan(), -jnp.inf, row_block.own_norm.logs(tops))
            peaks = self._exp(logs.reshape((tiling.key_blocks, -1, logs.shape[-1])).max(1))
        peaks = tiling.align_rows(peaks.reshape((tiling.key_blocks, group, queries)), view)
        peaks = peaks.reshape((tiling.key_blocks, group, across, -1)).max(-1)

        def one_bin(tile: Array) -> Array:
            return jnp.pad(by_block.sum((0, 2))[:, None], ((0, 0), (keys, queries)))

        def diagonals(tile: Array) -> Array:
            return sum_diagonals(tile.reshape((keys, group, queries)))

        alike = bin_of(positions.least_distance) == bin_of(positions.most_distance)
        diagonal = jax.lax.cond(alike, one_bin, diagonals, weights)
        lead, start = view.leading, view.first_key
        key_block = block_of(start, sweep_config.key_block)
        corner = (*lead, key_block, 0, block_of(view.first_query, sweep_config.query_block))
        along = view.row_span.first - start + np.int32(tiling.width - keys)
        block_mass = by_block.reshape((tiling.key_blocks, height, group, across)).sum(1)
        return PerKey(
            merge(columns.mass, by_block.sum(-1), (*lead, start, 0), jnp.add),
            merge(columns.largest, lanes.max(2).max(-1), (*lead, start, 0), jnp.maximum),
            merge(columns.block_mass, block_mass, corner, jnp.add),
            merge(columns.block_max, peaks, corner, jnp.maximum),
            merge(columns.diagonals, diagonal, (*lead, 0, along), jnp.add),
        )


def _count_keys(scores: Array) -> Array:
    return (scores != -jnp.inf).sum(0, dtype=jnp.int32)
