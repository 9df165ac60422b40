"""Shard: one device's share of a call, in pieces that are ordinary calls at their own positions."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.call.problem import Problem
from regard.engine.flash.blocking import TileConfig
from regard.engine.flash.operands import Context, Operands
from regard.engine.flash.preparation import prepare, statistics
from regard.engine.softmax import dropout
from regard.engine.softmax.scoring import Scoring
from regard.masks import Mask, from_array, lengths, valid_keys
from regard.masks.grid import Grid
from regard.masks.offsets import positions_of
from regard.masks.spans import Span
from regard.parallel.division import Division
from regard.records import record, static


@record
class Replicated:
    """The part of a call that it is not differentiated by; whole on every device."""

    problem: Problem  # without the arrays that are divided or differentiated by
    seeds: Array | None  # of dropout, (2, *leading)
    scoring: Scoring | None
    leading: tuple[int, ...] = static()  # of the whole call, heads last
    output_dtype: Any = static()  # in which the output travels

    @classmethod
    def of(cls, problem: Problem, output_dtype: Any, scoring: Scoring | None = None) -> Replicated:
        leading = problem.leading or (1,)
        seeds = None
        if problem.dropout_rate:
            assert problem.rng is not None  # canonicalize asks for it
            seeds = dropout.head_seeds(problem.rng, leading)
        divided = dict.fromkeys(("query", "key", "value", "bias", "scale", "sinks", "score", "rng"))
        offsets = {
            name: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.int32), getattr(problem, name))
            for name in ("query_offset", "key_offset")
        }
        whole = dataclasses.replace(problem, **divided, **offsets)
        return cls(whole, seeds, scoring, leading, output_dtype)

    @property
    def stats(self) -> frozenset[str]:
        """Statistics that the ring must keep besides output and lse."""
        return statistics(self.problem)


@dataclass(frozen=True)
class Shard:
    """This device's share, inside shard_map."""

    division: Division
    call: Replicated
    member: Any  # of the ring
    first_batch: Any  # index of its first row on the first leading axis
    first_head: Any

    @classmethod
    def here(cls, division: Division, call: Replicated) -> Shard:
        """Return the share of the device that runs this."""
        heads = division.heads if division.exchange is None else (*division.heads, division.exchange)

        def first(axes: tuple[str, ...], count: int) -> Any:
            size = division.size(*axes)
            return 0 if size == 1 or count == 1 else jax.lax.axis_index(axes) * (count // size)

        member = 0 if division.size(division.ring) == 1 else jax.lax.axis_index(division.ring)
        *rows, head_count = call.leading
        batch = first(division.batch, rows[0]) if rows else 0
        return cls(division, call, member, batch, first(heads, head_count))

    def take(self, data: Any, trailing: int) -> Array:
        """Take this device's part of data whose leading axes are the first of the call's."""
        data, division, leading = jnp.asarray(data), self.division, self.call.leading
        for axis in range(data.ndim - trailing):
            heads = axis == len(leading) - 1
            first = self.first_head if heads else self.first_batch if axis == 0 else 0
            if data.shape[axis] > 1 and not isinstance(first, int):
                names = (*division.heads, division.exchange) if heads else division.batch
                size = leading[axis] // division.size(*names)
                data = jax.lax.dynamic_slice_in_dim(data, first, size, axis, allow_negative_indices=False)
        return data

    def owner(self, number: Any) -> Any:
        """Find the member whose keys are here in a round."""
        ring = self.division.size(self.division.ring)
        return 0 if ring == 1 else jax.lax.rem(self.member - number + ring, jnp.int32(ring))

    def first_key(self, pair: tuple[Any, Any], owner: Any) -> Any:
        return self.division.chunk_of(pair[1], owner) * self.division.keys.chunk

    def prepare_pair(
        self, arrays: Operands, pair: tuple[Any, Any], owner: Any
    ) -> tuple[Operands, Context, TileConfig]:
        """Prepare a chunk of queries against a chunk of keys, as a call in tiles."""
        division, call = self.division, self.call
        first_query = division.chunk_of(pair[0], self.member) * division.queries.chunk
        first_key = self.first_key(pair, owner)
        score = None if call.scoring is None else call.scoring.join(arrays.parameters)
        query_offset = positions_of(call.problem.query_offset).slice_batch(self.take)
        key_offset = positions_of(call.problem.key_offset).slice_batch(self.take)
        rows, columns = self._members(first_query, first_key)
        problem = dataclasses.replace(
            call.problem,
            query=arrays.query,
            key=arrays.key,
            value=arrays.value,
            mask=self._mask(first_query, first_key, query_offset, key_offset),
            score=score,
            scale=arrays.scale,
            query_offset=positions_of(query_offset).slice_rows(first_query, rows),
            key_offset=positions_of(key_offset).slice_rows(first_key, columns),
            bias=arrays.bias,
            dropout_rate=0.0,
        )
        inputs, context, config = prepare(problem)
        if context.numbers is not None:  # of rows and heads
            row, head = context.numbers
            context = dataclasses.replace(context, numbers=(row + self.first_batch, head + self.first_head))
        if call.seeds is None:
            return inputs, context, config
        seeds = jnp.stack([self.take(word, 0) for word in call.seeds])
        query_words, key_words = map(tuple, dropout.pair_words(seeds, problem.grid()))
        context = dataclasses.replace(context, query_words=query_words, key_words=key_words)
        return inputs, context, dataclasses.replace(config, dropout_rate=call.problem.dropout_rate)

    def _members(self, first_query: Any, first_key: Any) -> tuple[Array, Array]:
        """Return the rows and columns of a piece; padding repeats the last one."""
        queries, keys = self.division.queries, self.division.keys
        rows = jnp.minimum(Span(first_query, queries.chunk).members, queries.length - 1)
        return rows, jnp.minimum(Span(first_key, keys.chunk).members, keys.length - 1)

    def _mask(self, first_query: Any, first_key: Any, query_offset: Any, key_offset: Any) -> Mask | None:
        """Build the mask of a piece; padding sees nothing and is seen by nobody."""
        queries, keys, axes = self.division.queries, self.division.keys, len(self.call.leading)
        rows, columns = Span(first_query, queries.chunk), Span(first_key, keys.chunk)
        mask = self.call.problem.mask
        if mask is not None:
            if self.division.is_even:
                grid = Grid.tile(rows, columns, query_offset, axes, key_offset)
            else:
                row, column = self._members(first_query, first_key)
                grid = Grid.at(row, column, query_offset, axes, key_offset)
            mask = mask.slice_batch(self.take, axes).slice_grid(grid)
        if keys.padded > keys.length:
            if positions_of(key_offset).is_consecutive:
                real = lengths(jnp.asarray(positions_of(key_offset).slice_rows(keys.length, None)))
            else:
                real = valid_keys(columns.members < keys.length)
            mask = real if mask is None else mask & real
        if mask is not None and queries.padded > queries.length:
            mask = mask & from_array((rows.members < queries.length)[:, None])
        return mask
