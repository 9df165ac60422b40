"""Backend `gathered`: each query's listed keys are gathered, some queries at a time.

Where a mask, or one that joins it by `&`, is `chosen_keys`, nothing else can be attended to. The gathered
keys are those of a call of its own, in which every query has C keys to itself; the definition computes it.
A step gathers about as much as all keys and values hold: what the backward pass adds up in each step, as
large as they are, then costs no more than gathering does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from regard.axes import Array, broadcast_shapes
from regard.engine.backends import dense
from regard.engine.backends.dense import attend_cells
from regard.engine.backends.symbolic import join_rows, split_rows
from regard.engine.call.problem import Problem
from regard.engine.call.stores import Store, product
from regard.masks import Mask
from regard.masks.grid import Grid, spread
from regard.masks.key_lists import ChosenKeys
from regard.masks.offsets import positions_of
from regard.records import delegate, record
from regard.wide_sums import add_up_wide, gather, widen

_MATRICES = ("weights", "scores")


def refuses(problem: Problem) -> str | None:
    """Return why it cannot serve this call, or None."""
    if _find_lists(problem.mask) is None:
        return "no chosen_keys are among the masks that all have to keep a pair"
    matrices = [name for name in problem.aux if name in _MATRICES]
    if matrices:
        return f"{matrices[0]} have an entry for every key, and it looks at those chosen alone"
    return None


def describe_work(problem: Problem) -> str:
    """Say what is gathered."""
    lists = _find_lists(problem.mask)
    assert lists is not None
    return f"{lists.indices.shape[-1]:,} of {problem.S:,} keys are gathered for each query"


def is_fewer(problem: Problem) -> bool:
    """Return whether keys are listed, and gathering them takes less time than tiles, which compute all pairs.

    As measured on two AVX-512 cores, benchmarks/NOTES.md, "Chosen keys": to gather a key and its value takes
    as long as 20 pairs of tiles, and tiles take longer the more keys are listed.
    """
    lists = _find_lists(problem.mask)
    if lists is None:
        return False
    choices, heads = lists.indices.shape[-1], math.prod(problem.leading[-1:])
    gathers = max(problem.key_heads, _list_heads(lists, problem))
    return choices * (20 * gathers + heads) < problem.S * (heads + choices / 320)


def _find_lists(mask: Mask | None) -> ChosenKeys | None:
    parts = () if mask is None else mask.parts
    return next((part for part in parts if isinstance(part, ChosenKeys) and part.columns is None), None)


def _list_heads(lists: ChosenKeys, problem: Problem) -> int:
    """Return how many heads have lists of their own."""
    *own, _, _ = lists.indices.shape
    return own[-1] if own and len(own) == len(problem.leading) else 1


@jax.jit
def run(problem: Problem) -> tuple[Array, dict[str, Array]]:
    """Compute the output and what `problem.aux` names."""
    if 0 in (problem.T, problem.S, *problem.leading):
        return dense.run(problem)
    if not problem.leading:
        arrays = {name: getattr(problem, name)[None] for name in ("query", "key", "value")}
        output, extra = run(dataclasses.replace(problem, **arrays))
        return output[0], {name: array[0] for name, array in extra.items()}
    lists = _find_lists(problem.mask)
    assert lists is not None
    assert problem.mask is not None
    others = [part for part in problem.mask.parts if part is not lists]
    mask = functools.reduce(operator.and_, others) if others else None
    bias = None if problem.bias is None else problem.with_heads(problem.bias)
    key = problem.with_heads(problem.key).astype(problem.matmul_dtype)
    value = problem.with_heads(problem.value).astype(problem.matmul_dtype)
    whole = dataclasses.replace(problem, key=key, value=value, mask=mask, bias=bias)
    # Of lists that a program knows, XLA would compute in seconds what it is to compute in milliseconds.
    lists = dataclasses.replace(lists, indices=jax.lax.optimization_barrier(lists.indices))
    listed = spread(lists.in_order(problem.S), len(problem.leading) + 2, trailing=2)
    size = min(_rows_of_step(problem, _list_heads(lists, problem), listed.shape[-1]), problem.T)
    count = -(-problem.T // size)
    rows = jnp.minimum(jnp.arange(count * size, dtype=jnp.int32), problem.T - 1)
    steps = {"row": rows.reshape(count, size)}
    steps |= {"query": split_rows(problem.query, count, size), "listed": split_rows(listed, count, size)}
    if bias is not None and bias.shape[-2] > 1:
        steps["bias"] = split_rows(bias, count, size)

    give, wide_key, wide_value = add_up_wide(whole), widen(key), widen(value)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(carry: None, rows: dict[str, Array]) -> tuple[None, Any]:
        whole = give()
        whole = dataclasses.replace(whole, bias=rows.pop("bias", whole.bias))
        key = Gathered.take(whole.key, wide_key, rows["listed"], whole)
        value = Gathered.take(whole.value, wide_value, rows["listed"], whole)
        return carry, _attend_rows(whole, key, value, **rows)

    _, (output, stacked) = jax.lax.scan(step, None, steps)
    extra = {name: join_rows(array, problem, -1) for name, array in stacked.items()}
    return join_rows(output, problem, -2), extra


def _rows_of_step(problem: Problem, list_heads: int, choices: int) -> int:
    """Return for how many queries as much is gathered as keys and values hold."""
    width = problem.D + problem.E
    gathered = choices * (max(list_heads, problem.key_heads) * width + problem.leading[-1])
    return max(problem.S * problem.key_heads * width // max(gathered, 1), 8)


def _attend_rows(
    problem: Problem, key: Gathered, value: Gathered, row: Array, query: Array, listed: Array
) -> tuple[Array, dict[str, Array]]:
    """Attend with these rows of the call, whose keys are listed (*b, R, C)."""
    if listed.shape[-3] not in (1, problem.leading[-1]):
        listed = jnp.repeat(listed, problem.group, -3)
    columns, keep = jnp.minimum(listed, problem.S - 1), listed < problem.S
    if problem.mask is not None:
        keep = keep & _keep_pairs(problem.mask, problem, row, columns)
    bias = problem.bias
    if bias is not None:
        bias = bias if bias.shape[-1] == 1 else _take_pairs(bias, columns)
        keep = keep & (bias != -jnp.inf)
    aux = tuple(dict.fromkeys([*problem.aux, *(["lse"] if "argmax" in problem.aux else [])]))
    own = dataclasses.replace(problem, query=query, key=key, value=value, mask=None, bias=bias, aux=aux)
    query = jnp.where(keep.any(-1)[..., None], problem.with_heads(query).astype(problem.matmul_dtype), 0)
    key, value = key.zero_unless(own.by_group(keep)), value.zero_unless(own.by_group(keep))
    cells = PairGrid.at_columns(row, columns, problem)
    output, extra = attend_cells(own, keep, query, key, value, cells)
    if "argmax" in extra:
        choice = extra["argmax"][..., None]
        column = jnp.where(choice < 0, -1, _take_pairs(columns, jnp.maximum(choice, 0)))[..., 0]
        extra["argmax"] = jnp.where(jnp.isnan(extra["lse"]), 0, column)
    return output, {name: extra[name] for name in problem.aux}


def _keep_pairs(mask: Mask, problem: Problem, row: Array, columns: Array) -> Array:
    """Return which pairs of a row and its columns (*b, R, C) a mask keeps, one row of one index at a time."""
    axes = len(problem.leading)

    def keep_row(columns: Array, row: Array, *index: Array) -> Array:
        def take(data: Any, trailing: int) -> Any:
            for axis, number in enumerate(index[: max(jnp.ndim(data) - trailing, 0)]):
                if data.shape[axis] > 1:
                    data = jax.lax.dynamic_index_in_dim(data, number, axis)
            return data

        offsets = (
            positions_of(offset).slice_batch(take) for offset in (problem.query_offset, problem.key_offset)
        )
        query_offset, key_offset = offsets
        grid = Grid.at(row[None], columns, query_offset, axes, key_offset)
        return jnp.broadcast_to(
            mask.slice_batch(take, axes).keep(grid), (*(1,) * (axes + 1), *columns.shape)
        ).ravel()

    cell = Grid.at(row[:1], row[:1], problem.query_offset, axes, problem.key_offset)
    leading = broadcast_shapes(jax.eval_shape(lambda: mask.keep(cell)).shape[:-2], columns.shape[:-2])
    index = jnp.indices((*leading, 1), jnp.int32, sparse=True)[:-1]
    signature = f"(c),(){',()' * axes}->(c)"
    return jnp.vectorize(keep_row, signature=signature)(columns, row.reshape((*(1,) * axes, -1)), *index)


def _take_pairs(array: Array, columns: Array) -> Array:
    """Take entries of (*b, R | 1, S) at columns (*b, R, C)."""
    return gather(_take_entries, array, columns)


@functools.partial(jnp.vectorize, signature="(s),(c)->(c)")
def _take_entries(entries: Array, index: Array) -> Array:
    return entries.at[index].get(mode="clip")


@functools.partial(jnp.vectorize, signature="(s,w),(r,c)->(r,c,w)")
def _take_rows(rows: Array, index: Array) -> Array:
    return rows.at[index].get(mode="promise_in_bounds")


class PairGrid(Grid):
    """Cells of queries with keys of their own: `key_index` is (*b, R, C)."""

    is_consecutive: ClassVar[bool] = False  # pyright: ignore

    @classmethod
    def at_columns(cls, row: Array, columns: Array, problem: Problem) -> PairGrid:
        """Return the cells of these rows of a call, each with its columns."""
        axes = len(problem.leading)
        index = row.reshape((*(1,) * axes, -1, 1))
        position = positions_of(problem.query_offset).at(index, None, -2, axes)
        return cls(index, position, problem.query_offset, columns, problem.key_offset, axes, None, None)

    @property
    def key_position(self) -> Array:
        flat = self.key_index.reshape((*self.key_index.shape[:-2], -1))
        picked = positions_of(self.key_offset).pick(flat, self.leading_axes)
        return picked.reshape((*picked.shape[:-1], *self.key_index.shape[-2:]))


@delegate("values", "dtype")
@record
class Gathered(Store):
    """Keys or values that each query has to itself, (*b, K, G | 1, R, C, width)."""

    values: Array

    @classmethod
    def take(cls, array: Array, wide: Array | None, listed: Array, problem: Problem) -> Gathered:
        """Take rows of (*b, K, S, width) at what is listed, (*b, H | K | 1, R, C); S stands for none."""
        columns = problem.by_group(jnp.minimum(listed, problem.S - 1))
        wide = None if wide is None else wide[..., None, :, :]
        return cls(gather(_take_rows, array[..., None, :, :], columns, wide))

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, _, _, choices, width = self.values.shape
        return *leading, choices, width

    def score(self, query: Array, precision: Any) -> Array:
        return self._multiply("...td,...sd->...ts", query, precision)

    def mix(self, weights: Array, precision: Any) -> Array:
        return self._multiply("...ts,...se->...te", weights, precision)

    def _multiply(self, subscripts: str, rows: Array, precision: Any) -> Array:
        """Multiply rows (*b, K, G R, x), each with what is its own."""
        *leading, length, width = rows.shape
        own = self.values.shape[-3]
        rows = rows.reshape((*leading, length // own, own, width))
        if self.values.shape[-4] > 1:
            products = product(subscripts, rows[..., None, :], self.values, precision)[..., 0, :]
        else:  # the rows of a group meet the same
            rows = product(subscripts, rows.swapaxes(-3, -2), self.values[..., 0, :, :, :], precision)
            products = rows.swapaxes(-3, -2)
        return products.reshape((*products.shape[:-3], length, products.shape[-1]))

    def zero_unless(self, used: Array) -> Gathered:
        shared = tuple(
            axis for axis, size in enumerate(self.values.shape[:-1]) if size == 1 != used.shape[axis]
        )
        return Gathered(jnp.where(used.any(shared, keepdims=True)[..., None], self.values, 0))
