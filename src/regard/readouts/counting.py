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
from regard.readouts.accumulators import Found, Norm, PerKey, PerQuery, SweepConfig, Tokens
from regard.readouts.profiles import bin_of, sum_bins, sum_diagonals
from regard.readouts.tiling import Place, Tiling, block_of, merge
from regard.readouts.top_k import CHUNK, RunningTopK

_EXACT = jax.lax.Precision.HIGHEST


def sweep(problem: Problem, lse: Array | None, tokens: Tokens | None, sweep_config: SweepConfig) -> Found:
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


class _RowBlock(NamedTuple):
    """The values that all tiles of a row block share."""

    view: TileView
    query: Array
    norm: Norm  # (1, R)
    own: Array | None  # which rows belong to this row block; None, all
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

    def run(self, problem: Problem) -> Found:
        """Run the loops, and give the arrays that they filled the axes of the call."""
        tiling, config, sweep_config = self.tiling, self.tiling.config, self.tiling.sweep_config
        lead, group, dtype = config.leading, config.group, config.dtype
        height, width = tiling.pyramid
        blocks, keys = (*lead, width, group, height), (*lead, tiling.width, group)
        distances = (*lead, group, config.num_queries + tiling.width + 1)
        columns = PerKey(*(jnp.zeros(shape, dtype) for shape in (keys, keys, blocks, blocks, distances)))
        like = PerQuery.like(jnp.zeros((), dtype), self.tokens)
        real = len(Norm._fields) + len(jax.tree.leaves(like)) + sweep_config.top_k
        reals = jnp.zeros((*config.rows, real), dtype)
        whole = jnp.zeros((*config.rows, 1 + sweep_config.top_k), jnp.int32)
        start = reals, whole, columns
        reals, whole, columns = tiling.loop.blocks(tiling.row_blocks, self._row_block, start)
        batch, axes = problem.leading, len(problem.leading)
        moved = offset_column(problem.query_offset, axes) - offset_column(problem.key_offset, axes)
        moved = moved.reshape((moved.shape[0], *(1,) * len(lead)))
        binned = sum_bins(columns.diagonals, moved - np.int32(tiling.width))
        sizes = -(-problem.T // sweep_config.query_block), -(-problem.S // sweep_config.key_block)

        reals, whole = reals.reshape((*batch, problem.T, -1)), whole.reshape((*batch, problem.T, -1))
        sums = [reals[..., number] for number in range(real - sweep_config.top_k)]

        def of_keys(array: Array) -> Array:
            return jnp.swapaxes(array, -1, -2).reshape((*batch, -1))[..., : problem.S]

        def of_blocks(array: Array) -> Array:
            array = jnp.moveaxis(array, -3, -1)
            return array.reshape((*batch, *array.shape[-2:]))[..., : sizes[0], : sizes[1]]

        return Found(
            Norm(*sums[:2]),
            jax.tree.unflatten(jax.tree.structure(like), sums[2:]),
            whole[..., 0],
            reals[..., real - sweep_config.top_k :],
            whole[..., 1:],
            of_keys(columns.mass),
            of_keys(columns.largest),
            of_blocks(columns.block_mass),
            of_blocks(columns.block_max),
            binned.reshape((*batch, binned.shape[-1])),
        )

    def _row_block(self, loop: TileLoop, leading: Sequence[Any], number: Any, results: Any) -> Any:
        tiling, sweep_config = self.tiling, self.tiling.sweep_config
        view = tiling.view(leading, number * np.int32(tiling.blocking.queries))
        row_block = self._start(view, number)
        size = row_block.norm.peak.size
        zeros = jnp.zeros((size,), tiling.config.dtype)
        none = RunningTopK.none(sweep_config.top_k, size, tiling.config.dtype)
        empty = PerQuery.like(zeros, self.tokens), zeros.astype(jnp.int32), none, results[-1]
        body = partial(self._count, row_block)
        rows, count, running_top, columns = loop.tiles(tiling.context.by_query, leading, number, body, empty)

        def put(array: Array, tiles: Sequence[Array]) -> Array:
            return view.put_rows(array, jnp.stack(tiles, -1))

        norm = [part[0] for part in row_block.norm]
        reals = put(results[0], [*norm, *jax.tree.leaves(rows), *running_top.scores])
        return reals, put(results[1], [count, *running_top.keys]), columns

    def _start(self, view: TileView, number: Any) -> _RowBlock:
        tiling, config, sweep_config = self.tiling, self.tiling.config, self.tiling.sweep_config
        query = tiling.inputs.read_query(view)
        norm = self._normalise(view, number, query)
        rows = view.own_rows()
        own = None if isinstance(rows, bool) else rows
        own_norm = norm if own is None else norm._replace(peak=jnp.where(own[None], norm.peak, -jnp.inf))

        def spread(row: Array) -> Array:
            return jnp.broadcast_to(row, (config.group, row.size)).reshape(-1)

        row = view.row_span.members
        block = block_of(row, sweep_config.query_block)
        block = spread(block - block_of(view.first_query, sweep_config.query_block))
        head = jnp.repeat(np.arange(config.group, dtype=np.int32), tiling.blocking.queries)
        column = np.arange(config.group * tiling.query_blocks, dtype=np.int32)
        membership = (head * np.int32(tiling.query_blocks) + block)[:, None] == column[None]
        membership = membership if own is None else membership & own[:, None]
        position = spread(view.grid(tiling.context.offsets).query_position.reshape(-1))
        asked = None
        if self.tokens is not None:
            asked = view.rows(self.tokens.query[..., None]).reshape(-1)
            asked = asked if asked.size == norm.peak.size else spread(asked)
        return _RowBlock(view, query, norm, own, own_norm, position, membership.astype(config.dtype), asked)

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
        # Held: made anew by another kernel, none of a chunk's scores may be its largest.
        scores = jax.lax.optimization_barrier(scores)
        # A row that holds NaN counts for nothing: times 0, it would still reach what others count for.
        sound = row_block.norm.is_sound()
        logs = jnp.where(sound, row_block.norm.logs(scores), -jnp.inf)
        weights = exp(logs)
        span = tiling.place(view)

        tops = jnp.where(sound, scores.reshape((-1, CHUNK, scores.shape[-1])).max(1), -jnp.inf)
        running_top = running_top.meet(scores, tops, start)
        if self.certain and tiling.config.masked:
            full = jnp.full(count.shape, tiling.blocking.keys, jnp.int32)
            count = count + jax.lax.cond(partly, _count_keys, lambda _: full, scores)
        else:
            count = count + (np.int32(tiling.blocking.keys) if self.certain else _count_keys(scores))
        more = self._count_rows(row_block, span, view, weights, logs, scores != -jnp.inf)
        rows = jax.tree.map(jnp.add, rows, more)
        columns = self._count_columns(row_block, span, view, weights, tops, columns)
        return rows, count, running_top, columns

    def _count_rows(
        self, row_block: _RowBlock, span: Place, view: TileView, weights: Array, logs: Array, visible: Array
    ) -> PerQuery:
        """Sum over the keys of a tile: weights, and how many keys each pattern has."""
        dtype, sweep_config, keys = weights.dtype, self.tiling.sweep_config, self.tiling.keys
        index = jnp.arange(keys, dtype=jnp.int32)
        first = (span.key + index < sweep_config.first).astype(dtype)
        ahead = (row_block.position - span.key).astype(dtype)  # of the tile's first key
        distance = row_block.position[None] - (span.key + index)[:, None]
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
        is_near = (span.least < reach) & (span.most > -reach)
        sums += jax.lax.cond(is_near, near, lambda: [(jnp.zeros_like(total),) * 2] * 4)
        if self.tokens is not None and row_block.tokens is not None:
            asked = row_block.tokens[None]
            sums.append(total_over((column(self.tokens.key)[:, None] == asked) & (distance != 0)))
            # The query's own token comes before the next key, which says nothing of a repetition.
            earlier = (index + view.first_key > 0)[:, None] & (distance != -1)
            sums.append(total_over((column(self.tokens.before_key)[:, None] == asked) & earlier))
            sums.append(by_key[1])
        # Underflow: 0 times the log of 0 is 0.
        entropy_sum = -(weights * jnp.maximum(logs, -1e30)).sum(0)
        return PerQuery(total, total * ahead - offset, entropy_sum, *zip(*sums, strict=True))

    def _count_columns(
        self, row_block: _RowBlock, span: Place, view: TileView, weights: Array, tops: Array, columns: PerKey
    ) -> PerKey:
        """Add the sums and maxima over the queries of a tile."""
        tiling, sweep_config, group = self.tiling, self.tiling.sweep_config, self.tiling.config.group
        keys, queries, across = tiling.keys, tiling.blocking.queries, tiling.query_blocks
        height = min(sweep_config.key_block, keys)
        by_block = product(weights, row_block.membership, _EXACT).reshape((keys, group, across))
        own = weights if row_block.own is None else jnp.where(row_block.own[None], weights, 0)
        # Lanes: reducing the last axis at once is slower.
        lanes = own.reshape((keys, group, -1, math.gcd(queries, 16)))
        if height % CHUNK:
            peaks = own.reshape((tiling.key_blocks, height, -1)).max(1)
        else:  # the largest weights are those of the largest scores, which are known
            logs = jnp.where(row_block.norm.is_sound(), row_block.own_norm.logs(tops), -jnp.inf)
            peaks = exp(logs.reshape((tiling.key_blocks, -1, logs.shape[-1])).max(1))
        peaks = tiling.align_rows(peaks.reshape((tiling.key_blocks, group, queries)), view)
        peaks = peaks.reshape((tiling.key_blocks, group, across, -1)).max(-1)

        def one_bin(tile: Array) -> Array:
            return jnp.pad(by_block.sum((0, 2))[:, None], ((0, 0), (keys, queries)))

        def diagonals(tile: Array) -> Array:
            return sum_diagonals(tile.reshape((keys, group, queries)))

        alike = bin_of(span.least) == bin_of(span.most)
        diagonal = jax.lax.cond(alike, one_bin, diagonals, own)
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
