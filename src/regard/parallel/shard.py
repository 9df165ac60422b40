"""Shard: one device's share of a call, in pieces that are ordinary calls at their own positions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.backends import tiled
from regard.engine.call.problem import Problem
from regard.engine.flash.operands import Context, Inputs
from regard.engine.flash.tiles import Layout
from regard.engine.softmax import dropout
from regard.engine.softmax.scoring import Scoring
from regard.masks import Mask, from_array, lengths
from regard.masks.grid import Grid, Span
from regard.parallel.division import Division
from regard.records import record, static
from regard.scores.cells import Bucket, Cells
from regard.scores.score import Score


@record
class Call:
    """What the call holds that it is not differentiated by; whole on every device."""

    mask: Mask | None
    query_offset: Any
    key_offset: Any
    seeds: Array | None  # of dropout, (2, *leading)
    scoring: Scoring | None
    leading: tuple[int, ...] = static()  # of the whole call, heads last
    dropout_rate: float = static()
    precision: Any = static()
    output_dtype: Any = static()  # in which the output travels


@dataclass(frozen=True)
class Shard:
    """This device's share, inside shard_map."""

    division: Division
    call: Call
    member: Any  # of the ring
    first_batch: Any  # index of its first row on the first leading axis
    first_head: Any

    @classmethod
    def here(cls, division: Division, call: Call) -> Shard:
        """The share of the device that runs this."""
        heads = division.heads if division.exchange is None else (*division.heads, division.exchange)

        def first(axes: tuple[str, ...], count: int) -> Any:
            size = division.size(*axes)
            return 0 if size == 1 or count == 1 else jax.lax.axis_index(axes) * (count // size)

        member = 0 if division.size(division.ring) == 1 else jax.lax.axis_index(division.ring)
        *rows, head_count = call.leading
        batch = first(division.batch, rows[0]) if rows else 0
        return cls(division, call, member, batch, first(heads, head_count))

    @property
    def num_heads(self) -> int:
        """Query heads on this device."""
        return self.call.leading[-1] // self.division.size(*self.division.heads, self.division.exchange)

    def take(self, data: Any, trailing: int) -> Array:
        """This device's part of data whose leading axes are the first of the call's."""
        data = jnp.asarray(data)
        rank = len(self.call.leading)
        for axis in range(data.ndim - trailing):
            heads = axis == rank - 1
            first = self.first_head if heads else self.first_batch if axis == 0 else 0
            if data.shape[axis] > 1 and not isinstance(first, int):
                size = (
                    self.num_heads
                    if heads
                    else self.call.leading[0] // self.division.size(*self.division.batch)
                )
                data = jax.lax.dynamic_slice_in_dim(data, first, size, axis, allow_negative_indices=False)
        return data

    def owner(self, number: Any) -> Any:
        """Whose keys are here in a round."""
        ring = self.division.size(self.division.ring)
        return 0 if ring == 1 else jax.lax.rem(self.member - number + ring, jnp.int32(ring))

    def prepare(self, arrays: Inputs, pair: tuple[Any, Any], owner: Any) -> tuple[Inputs, Context, Layout]:
        """A chunk of queries against a chunk of keys, as a call in tiles."""
        division, call = self.division, self.call
        first_query = division.chunk_of(pair[0], self.member) * division.queries.chunk
        first_key = division.chunk_of(pair[1], owner) * division.keys.chunk
        score = None
        if call.scoring is not None:
            head, batch = (jnp.asarray(index, jnp.int32) for index in (self.first_head, self.first_batch))
            score = Sharded(call.scoring.join(arrays.parameters), head, batch, self.num_heads)
        query_offset, key_offset = (
            offset if offset is None or jnp.ndim(offset) == 0 else self.take(offset, 0)
            for offset in (call.query_offset, call.key_offset)
        )
        problem = Problem(
            query=arrays.query,
            key=arrays.key,
            value=arrays.value,
            mask=self._mask(first_query, first_key, query_offset, key_offset),
            bias=None,
            scale=arrays.scale,
            query_offset=query_offset + first_query,
            key_offset=first_key if key_offset is None else key_offset + first_key,
            rng=None,
            sinks=None,
            score=score,
            rows=None,
            heads=None,
            dropout_rate=0.0,
            aux=(),
            precision=call.precision,
        )
        inputs, context, layout = tiled.prepare(problem)
        if call.seeds is None:
            return inputs, context, layout
        seeds = jnp.stack([self.take(word, 0) for word in call.seeds])
        grid = problem.grid()
        words = dropout.query_words(seeds, grid.query_position), dropout.key_words(seeds, grid.key_position)
        query_words, key_words = ((one, other) for one, other in words)
        context = dataclasses.replace(context, query_words=query_words, key_words=key_words)
        return inputs, context, dataclasses.replace(layout, dropout_rate=call.dropout_rate)

    def _mask(self, first_query: Any, first_key: Any, query_offset: Any, key_offset: Any) -> Mask | None:
        """The mask of a piece; padding sees nothing and is seen by nobody."""
        queries, keys, axes = self.division.queries, self.division.keys, len(self.call.leading)
        rows, columns = Span(first_query, queries.chunk), Span(first_key, keys.chunk)
        mask = self.call.mask
        if mask is not None:
            if queries.padded == queries.length and keys.padded == keys.length:
                grid = Grid.tile(rows, columns, query_offset, axes, key_offset)
            else:
                row = jnp.minimum(rows.members, queries.length - 1)
                column = jnp.minimum(columns.members, keys.length - 1)
                grid = Grid.at(row, column, query_offset, axes, key_offset)
            mask = mask.slice_batch(self.take, axes).slice_grid(grid)
        if keys.padded > keys.length:
            real = lengths(jnp.asarray(keys.length if key_offset is None else keys.length + key_offset))
            mask = real if mask is None else mask & real
        if mask is not None and queries.padded > queries.length:
            mask = mask & from_array((rows.members < queries.length)[:, None])
        return mask


@record
class Sharded(Score):
    """A score for some of the heads and rows it was made for."""

    score: Score
    first_head: Any
    first_batch: Any
    num_heads: int = static()

    @property
    def reads_positions(self) -> bool:
        return self.score.reads_positions

    @property
    def adds(self) -> bool:
        return self.score.adds

    def apply(self, scores: Array, cells: Cells) -> Array:
        return self.score.apply(scores, _Moved(cells, self))

    def expression(self) -> str:
        return self.score.expression()


@dataclass(frozen=True)
class _Moved:
    """Cells whose heads and batch rows do not start at 0."""

    cells: Cells
    shard: Sharded

    @property
    def query_position(self) -> Array:
        return self.cells.query_position

    @property
    def key_position(self) -> Array:
        return self.cells.key_position

    @property
    def head(self) -> Array:
        return self.cells.head + self.shard.first_head

    @property
    def batch(self) -> Array:
        return self.cells.batch + self.shard.first_batch

    def per_head(self, array: Array) -> Array:
        return self.cells.per_head(array if array.size == 1 else self._own(array, 0))

    def add_looked_up(self, scores: Array, table: Array, bucket: Bucket, reach: int) -> Array:
        table = self._own(table, 1) if table.shape[1] > 1 else table
        return self.cells.add_looked_up(scores, table, bucket, reach)

    def _own(self, array: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(array, self.shard.first_head, self.shard.num_heads, axis)
