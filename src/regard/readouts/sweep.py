"""The sweep over the weights of a call: every tile is formed once from scores and lse, counted, and dropped.

Scores lie keys by queries, (C, G * R): what is summed over keys is then summed over whole vectors of queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array
from regard.engine.exponential import exp
from regard.engine.online_softmax import product
from regard.engine.operands import Context, Inputs, scale_late
from regard.engine.problem import Problem
from regard.engine.tile_scores import finish
from regard.engine.tiled import prepare
from regard.engine.tiles import Blocking, Layout, Walk, Window
from regard.masks.grid import offset_column
from regard.readouts.leaders import CHUNK, Leaders
from regard.readouts.profiles import bin_of, put_on_diagonal, sum_bins, sum_diagonals
from regard.readouts.tallies import Found, PerKey, PerQuery, Plan, Tokens

_EXACT = jax.lax.Precision.HIGHEST


def sweep(problem: Problem, lse: Array, tokens: Tokens | None, plan: Plan) -> Found:
    """Visit every tile that is not EMPTY."""
    queries = max(plan.side // problem.group, 1)
    blocking = Blocking(1 << (queries.bit_length() - 1), plan.side)
    counting = _Counting.prepare(problem, blocking, lse, tokens, plan)
    return counting.found(counting.walk(), problem)


@dataclass(frozen=True)
class _Counting:
    inputs: Inputs
    context: Context
    layout: Layout
    lse: Array  # (*batch, H, T)
    tokens: Tokens | None
    plan: Plan
    certain: bool  # all keys of a FULL tile count

    @classmethod
    def prepare(
        cls, problem: Problem, blocking: Blocking, lse: Array, tokens: Tokens | None, plan: Plan
    ) -> _Counting:
        inputs, context, layout = prepare(problem, blocking, blocking)
        rows = lse.astype(layout.dtype).reshape(layout.rows)
        certain = problem.bias is None and problem.score is None
        return cls(inputs, context, layout, rows, tokens, plan, certain)

    # Sizes: tiles are padded to whole chunks and blocks of keys.

    @property
    def blocking(self) -> Blocking:
        return self.layout.forward

    @property
    def keys(self) -> int:
        """Keys of a tile, those that pad it included."""
        unit = max(CHUNK, min(self.plan.key_block, self.plan.side))
        return -(-self.blocking.keys // unit) * unit

    @property
    def key_tiles(self) -> int:
        return -(-self.layout.num_keys // self.blocking.keys)

    @property
    def lines(self) -> int:
        return -(-self.layout.num_queries // self.blocking.queries)

    @property
    def query_blocks(self) -> int:
        """Blocks that a tile touches."""
        return -(-self.blocking.queries // self.plan.query_block)

    @property
    def key_blocks(self) -> int:
        return -(-self.keys // self.plan.key_block)

    def walk(self) -> tuple[Any, ...]:
        """The loops."""
        layout, dtype = self.layout, self.layout.dtype
        lead, group = layout.leading, layout.group
        rows, width = jnp.zeros(layout.rows, dtype), self.key_tiles * self.keys
        blocks = (
            (self.key_tiles - 1) * self.keys // self.plan.key_block + self.key_blocks,
            group,
            (self.lines - 1) * self.blocking.queries // self.plan.query_block + self.query_blocks,
        )
        columns = PerKey(
            jnp.zeros((*lead, width, group), dtype),
            jnp.zeros((*lead, width, group), dtype),
            jnp.zeros((*lead, *blocks), dtype),
            jnp.zeros((*lead, *blocks), dtype),
            jnp.zeros((*lead, group, layout.num_queries + width + 1), dtype),
        )
        leaders = Leaders(
            jnp.zeros((*layout.rows, self.plan.top_k), dtype),
            jnp.zeros((*layout.rows, self.plan.top_k), jnp.int32),
        )
        start = PerQuery.like(rows), jnp.zeros(layout.rows, jnp.int32), leaders, columns
        return Walk(layout, self.blocking).lines(self.lines, self._line, start)

    def _line(self, leading: Sequence[Any], number: Any, results: Any) -> Any:
        first = number * self.blocking.queries
        here = Window(self.layout, self.blocking, leading, first)
        line = _Line.start(self, here)
        size = line.base.shape[0]
        zeros = jnp.zeros((size,), self.layout.dtype)
        empty = (
            PerQuery.like(zeros),
            jnp.zeros((size,), jnp.int32),
            Leaders.none(self.plan.top_k, size, self.layout.dtype),
            results[3],
        )
        visit = partial(self._visit, line)
        walk = Walk(self.layout, self.blocking)
        rows, count, leaders, columns = walk.tiles(self.context.by_query, leading, number, visit, empty)
        put = here.put_row_vector
        return (
            PerQuery(*(put(array, tile) for array, tile in zip(results[0], rows, strict=True))),
            put(results[1], count),
            Leaders(*(here.put_rows(a, tile.T) for a, tile in zip(results[2], leaders, strict=True))),
            columns,
        )

    def _visit(self, line: _Line, start: Any, partly: Any, carry: Any) -> Any:
        rows, count, leaders, columns = carry
        layout, blocking = self.layout, self.blocking
        window = Window(layout, blocking, line.here.leading, line.here.first_query, start)
        key = window.columns(self.inputs.key).astype(layout.factor)
        scores = scale_late(product(key, line.query, layout.precision, (-1, -1)), line.scale, layout)
        scores = finish(scores, self.inputs, self.context, window, partly, across=True).scores
        scores = self._align(scores, window, -jnp.inf)
        logs = scores - line.base[None]
        weights = exp(logs)
        place = _Place.of(self, window)

        tops = scores.reshape((-1, CHUNK, scores.shape[-1])).max(1)
        leaders = leaders.meet(scores, tops, start)
        if not self.certain:
            count = count + _count(scores)
        elif layout.masked:
            full = jnp.full(count.shape, blocking.keys, jnp.int32)
            count = count + jax.lax.cond(partly, _count, lambda _: full, scores)
        else:
            count = count + np.int32(blocking.keys)
        rows = self._count_rows(line, place, window, weights, logs, rows)
        columns = self._count_columns(line, place, window, weights, tops, columns)
        return rows, count, leaders, columns

    def _count_rows(
        self, line: _Line, place: _Place, window: Window, weights: Array, logs: Array, rows: PerQuery
    ) -> PerQuery:
        """Sums over the keys of a tile."""
        dtype, plan = weights.dtype, self.plan
        index = jnp.arange(self.keys, dtype=jnp.int32)
        kinds = [
            jnp.ones((self.keys,), dtype),
            (place.key + index < plan.first).astype(dtype),
            index.astype(dtype),
        ]
        total, first, offset = product(jnp.stack(kinds), weights, _EXACT)
        ahead = (line.position - place.key).astype(dtype)  # of the tile's first key
        distance = line.position[None] - (place.key + index)[:, None]

        def near(weights: Array) -> tuple[Array, ...]:
            kept = (distance == 0, distance == 1, jnp.abs(distance) < plan.local)
            return tuple(jnp.where(keep, weights, 0).sum(0) for keep in kept)

        def far(weights: Array) -> tuple[Array, ...]:
            return (jnp.zeros_like(weights[0]),) * 3

        reach = max(plan.local, 2)
        itself, previous, local = jax.lax.cond(
            (place.least < reach) & (place.most > -reach), near, far, weights
        )
        same = induction = jnp.zeros_like(total)
        if self.tokens is not None and line.tokens is not None:
            keys, before = (
                self._align(_flat(window.columns(array[..., None])), window, -1)
                for array in (self.tokens.key, self.tokens.before_key)
            )
            asked = line.tokens[None]
            same = jnp.where((keys[:, None] == asked) & (distance != 0), weights, 0).sum(0)
            known = (index + window.first_key > 0)[:, None]
            induction = jnp.where((before[:, None] == asked) & known, weights, 0).sum(0)
        # Underflow: 0 times the log of 0 is 0.
        surprise = -(weights * jnp.maximum(logs, -1e30)).sum(0)
        more = (total, first, total * ahead - offset, surprise, itself, previous, local, same, induction)
        return PerQuery(*(a + b for a, b in zip(rows, more, strict=True)))

    def _count_columns(
        self, line: _Line, place: _Place, window: Window, weights: Array, tops: Array, columns: PerKey
    ) -> PerKey:
        """Sums and maxima over the queries of a tile."""
        group, queries, blocks = self.layout.group, self.blocking.queries, self.query_blocks
        by_block = product(weights, line.membership, _EXACT).reshape((self.keys, group, blocks))
        own = weights if line.own is None else jnp.where(line.own[None], weights, 0)
        parts = own.reshape((self.keys, group, -1, _stage(queries)))
        height = min(self.plan.key_block, self.keys)

        if height % CHUNK:
            peaks = own.reshape((self.key_blocks, height, -1)).max(1)
        else:  # the largest weights are those of the largest scores, which are known
            peaks = exp((tops - line.own_base[None]).reshape((self.key_blocks, -1, own.shape[-1])).max(1))
        peaks = self._align_rows(peaks.reshape((self.key_blocks, group, queries)), window)
        peaks = peaks.reshape((self.key_blocks, group, blocks, -1)).max(-1)

        def diagonals(tile: Array) -> Array:
            return sum_diagonals(tile.reshape((self.keys, group, queries)))

        def one_bin(tile: Array) -> Array:
            del tile
            return put_on_diagonal(by_block.sum((0, 2)), self.keys, queries)

        alike = bin_of(place.least) == bin_of(place.most)
        diagonal = jax.lax.cond(alike, one_bin, diagonals, own)
        start = window.first_key
        lead = [jnp.asarray(index, jnp.int32) for index in window.leading]
        corner = (_shift(start, self.plan.key_block), 0, _shift(window.first_query, self.plan.query_block))
        along = window.row_run.start - start + np.int32((self.key_tiles - 1) * self.keys)
        block_mass = by_block.reshape((self.key_blocks, height, group, blocks)).sum(1)
        return PerKey(
            _merge(columns.mass, by_block.sum(-1), (*lead, start, 0), jnp.add),
            _merge(columns.largest, parts.max(2).max(-1), (*lead, start, 0), jnp.maximum),
            _merge(columns.block_mass, block_mass, (*lead, *corner), jnp.add),
            _merge(columns.block_max, peaks, (*lead, *corner), jnp.maximum),
            _merge(columns.diagonals, diagonal, (*lead, 0, along), jnp.add),
        )

    def _align(self, tile: Array, window: Window, fill: Any) -> Array:
        """A tile whose first row is the first key that belongs to it, padded; those not its own go last."""
        if self.layout.num_keys % self.blocking.keys:
            shift = window.first_key - window.column_run.start
            tile = jax.lax.cond(shift > 0, lambda tile: _roll(tile, shift, 0), lambda tile: tile, tile)
        rest = [(0, 0)] * (tile.ndim - 1)
        return jnp.pad(tile, [(0, self.keys - self.blocking.keys), *rest], constant_values=fill)

    def _align_rows(self, tile: Array, window: Window) -> Array:
        """The same for queries, on the last axis, padded to whole blocks."""
        if self.layout.num_queries % self.blocking.queries:
            tile = _roll(tile, window.first_query - window.row_run.start, tile.ndim - 1)
        block = min(self.plan.query_block, self.blocking.queries)
        rest = [(0, 0)] * (tile.ndim - 1)
        more = self.query_blocks * block - self.blocking.queries
        return jnp.pad(tile, [*rest, (0, more)])

    def found(self, results: tuple[Any, ...], problem: Problem) -> Found:
        """The arrays that the loops filled, as the call's."""
        rows, count, leaders, columns = results
        batch = problem.leading
        per_query = (*batch, problem.T)
        moved = offset_column(problem.query_offset, len(batch)) - offset_column(
            problem.key_offset, len(batch)
        )
        moved = moved.reshape((moved.shape[0], *(1,) * len(self.layout.leading)))
        width = self.key_tiles * self.keys
        diagonals = sum_bins(columns.diagonals, moved - np.int32(width))
        blocks = [-(-problem.T // self.plan.query_block), -(-problem.S // self.plan.key_block)]

        def per_key(array: Array) -> Array:
            return jnp.swapaxes(array, -1, -2).reshape((*batch, width))[..., : problem.S]

        def pyramid(array: Array) -> Array:
            array = jnp.moveaxis(array, -3, -1)
            array = array.reshape((*batch, *array.shape[-2:]))
            return array[..., : blocks[0], : blocks[1]]

        return Found(
            PerQuery(*(array.reshape(per_query) for array in rows)),
            count.reshape(per_query),
            *(array.reshape((*per_query, self.plan.top_k)) for array in leaders),
            per_key(columns.mass),
            per_key(columns.largest),
            pyramid(columns.block_mass),
            pyramid(columns.block_max),
            diagonals.reshape((*batch, diagonals.shape[-1])),
        )


class _Line(NamedTuple):
    """What all tiles of a line share."""

    here: Window
    query: Array
    scale: Array
    base: Array  # lse, +inf where there are no keys, so that weights are 0
    own: Array | None  # which rows belong to this line; None, all
    own_base: Array  # +inf where they do not
    position: Array  # int32
    membership: Array  # (R, G * blocks) which block a row of this line counts for
    tokens: Array | None

    @classmethod
    def start(cls, counting: _Counting, here: Window) -> _Line:
        layout, blocking, plan = counting.layout, counting.blocking, counting.plan
        base = here.row_vector(counting.lse)
        base = jnp.where(base == -jnp.inf, jnp.inf, base)
        rows = here.own_rows()
        own = None if isinstance(rows, bool) else rows

        def spread(row: Array) -> Array:
            return jnp.broadcast_to(row, (layout.group, row.size)).reshape(-1)

        position = spread(here.grid(counting.context.offsets).query_position.reshape(-1))
        row = here.row_run.members
        block = spread(_shift(row, plan.query_block) - _shift(here.first_query, plan.query_block))
        head = jnp.repeat(np.arange(layout.group, dtype=np.int32), blocking.queries)
        column = np.arange(layout.group * counting.query_blocks, dtype=np.int32)
        membership = (head * np.int32(counting.query_blocks) + block)[:, None] == column[None]
        if own is not None:
            membership = membership & own[:, None]
        asked = None
        if counting.tokens is not None:
            asked = _flat(here.rows(counting.tokens.query[..., None]))
            asked = asked if asked.size == base.size else spread(asked)
        query, scale = counting.inputs.read_query(here), here.cells(counting.inputs.scale)
        own_base = base if own is None else jnp.where(own, base, jnp.inf)
        return cls(here, query, scale, base, own, own_base, position, membership.astype(layout.dtype), asked)


class _Place(NamedTuple):
    """Where a tile lies."""

    key: Array  # position of its first key
    least: Array  # distance, query position - key position
    most: Array

    @classmethod
    def of(cls, counting: _Counting, window: Window) -> _Place:
        grid = window.grid(counting.context.offsets)
        key = grid.key_position.reshape(-1)[0] + window.first_key - window.column_run.start
        query = grid.query_position.reshape(-1)[0]
        return cls(
            key,
            query - key - np.int32(counting.keys - 1),
            query - key + np.int32(counting.blocking.queries - 1),
        )


def _count(scores: Array) -> Array:
    return (scores != -jnp.inf).sum(0, dtype=jnp.int32)


def _flat(array: Array) -> Array:
    return array.reshape(-1)


def _shift(index: Any, block: int) -> Array:
    """index // block for a power of two."""
    return jax.lax.shift_right_logical(jnp.asarray(index, jnp.int32), np.int32(block.bit_length() - 1))


def _stage(size: int) -> int:
    """Lanes that a maximum over many is first taken in: reducing the last axis at once is slower."""
    return next(lanes for lanes in (16, 8, 4, 2, 1) if size % lanes == 0)


def _roll(tile: Array, shift: Any, axis: int) -> Array:
    twice = jnp.concatenate([tile, tile], axis)
    return jax.lax.dynamic_slice_in_dim(twice, shift, tile.shape[axis], axis, allow_negative_indices=False)


def _merge(array: Array, tile: Array, starts: Sequence[Any], join: Any) -> Array:
    """Join a tile into an array whose leading axes are those of the tile's place."""
    tile = tile.reshape((*(1,) * (array.ndim - tile.ndim), *tile.shape))
    starts = [jnp.asarray(start, jnp.int32) for start in starts]
    there = jax.lax.dynamic_slice(array, starts, tile.shape, allow_negative_indices=False)
    return jax.lax.dynamic_update_slice(array, join(there, tile), starts, allow_negative_indices=False)
