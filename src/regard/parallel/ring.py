"""Ring attention on one device: keys and values travel the ring; backward, dK and dV travel with them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.flash.operands import Inputs, Results
from regard.engine.softmax.online_softmax import Running
from regard.parallel.division import Division
from regard.parallel.exchange import move
from regard.parallel.shard import Shard

Body = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def forward(shard: Shard, arrays: Inputs) -> Results:
    """Attend from this device's queries to all keys; rows come as this device's sequence lies."""
    parts, dtype = shard.division.parts, _accumulation(arrays)
    query, keys = _split(arrays.query, parts), (_split(arrays.key, parts), _split(arrays.value, parts))
    rows = _rows(arrays)
    empty = Running.empty(
        (parts, *rows, query.shape[-2]), arrays.value.shape[-1], dtype, moment=False, argmax=False
    )

    def body(state: Running, keys: Any, number: Any, pairs: Any) -> tuple[Running, None]:
        def meet(state: Running, pair: Any) -> Running:
            pair_inputs = arrays._replace(
                query=_take(query, pair[0]), key=_take(keys[0], pair[1]), value=_take(keys[1], pair[1])
            )
            found = flash.forward(*shard.prepare(pair_inputs, pair, shard.owner(number)))
            merged = _take(state, pair[0]).merge(_as_running(found))
            return jax.tree.map(lambda all, one: _put(all, pair[0], one), state, merged)

        return _each(meet, state, pairs), None

    state, _ = ring_loop(shard.division, keys, body, empty)
    return Results(_join(state.output(), -2), _join(state.log_total(), -1), peak=_join(state.peak, -1))


def backward(shard: Shard, arrays: Inputs, results: Results, cotangents: Results) -> dict[str, Array]:
    """Compute the VJP in this device's arrays; of scale and parameters, this device's share of it."""
    parts, dtype = shard.division.parts, _accumulation(arrays)
    query, keys = _split(arrays.query, parts), (_split(arrays.key, parts), _split(arrays.value, parts))
    axes = {"output": -2, "log_total": -1, "peak": -1}
    found, cotangent = (
        {
            name: _split(getattr(rows, name), parts, axis)
            for name, axis in axes.items()
            if getattr(rows, name) is not None
        }
        for rows in (results, cotangents)
    )
    small = {name: array for name, array in arrays.named().items() if name not in ("query", "key", "value")}
    state = (
        jnp.zeros(query.shape, dtype),
        {name: jnp.zeros(array.shape, dtype) for name, array in small.items()},
    )

    def body(state: Any, keys: Any, number: Any, pairs: Any) -> tuple[Any, Any]:
        def meet(carry: Any, pair: Any) -> Any:
            query_grad, small_grads, key_grads = carry
            pair_inputs = arrays._replace(
                query=_take(query, pair[0]), key=_take(keys[0], pair[1]), value=_take(keys[1], pair[1])
            )
            inputs, context, layout = shard.prepare(pair_inputs, pair, shard.owner(number))
            shapes = {name: array.shape for name, array in inputs.named().items()}
            own, own_cotangent = (
                Results(**{name: _take(array, pair[0]) for name, array in rows.items()})
                for rows in (found, cotangent)
            )
            grads = flash.backward(inputs, context, own, own_cotangent, shapes, layout)
            query_grad = _put(query_grad, pair[0], _take(query_grad, pair[0]) + grads["query"])
            key_grads = tuple(
                _put(all, pair[1], _take(all, pair[1]) + grads[name])
                for all, name in zip(key_grads, ("key", "value"), strict=True)
            )
            small_grads = {name: grad + grads[name] for name, grad in small_grads.items()}
            return query_grad, small_grads, key_grads

        dkv = tuple(jnp.zeros(array.shape, dtype) for array in keys)
        *state, dkv = _each(meet, (*state, dkv), pairs)
        return tuple(state), dkv

    (query_grad, small_grads), key_grads = ring_loop(shard.division, keys, body, state, with_dkv=True)
    key_grads = key_grads or tuple(jnp.zeros(array.shape, dtype) for array in keys)
    named = dict(zip(("query", "key", "value"), (query_grad, *key_grads), strict=True))
    return {name: _join(grad, -2) for name, grad in named.items()} | small_grads


def ring_loop(
    division: Division, keys: Any, body: Body, state: Any, *, with_dkv: bool = False
) -> tuple[Any, Any]:
    """Run `state, dkv = body(state, keys, round, pairs)` for every round; dK and dV travel along, and home.

    Each step sends keys and values before it computes and adds incoming dK, dV afterwards, so that
    communication overlaps with compute.
    """
    rounds = division.rounds
    if not rounds:
        return state, None
    hops = [rounds[0].number, *(b.number - a.number for a, b in itertools.pairwise(rounds)), 0]
    keys = move(keys, division, hops[0])

    def ring_step(carry: Any, number: Any, pairs: Any, arrive: int, leave: int) -> Any:
        state, keys, dkv = carry
        ahead = move(keys, division, leave)
        arrived = None if dkv is None else move(dkv, division, arrive)
        state, own = body(state, keys, number, pairs)
        return state, ahead, own if arrived is None else jax.tree.map(jnp.add, arrived, own)

    carry, place = (state, keys, None), 0
    while place < len(rounds):
        arrive, leave = hops[place : place + 2]
        first = with_dkv and place == 0
        count = 1 if first or (with_dkv and arrive != leave) else _alike(hops[place + 1 :])
        some = rounds[place : place + count]
        pairs = tuple(sorted({pair for one in some for pair in one.pairs}))
        go = partial(ring_step, pairs=pairs, arrive=arrive, leave=leave)
        if count == 1:
            carry = go(carry, some[0].number)
        else:
            numbers = jnp.asarray([one.number for one in some], jnp.int32)
            carry, _ = jax.lax.scan(lambda carry, number, go=go: (go(carry, number), None), carry, numbers)
        place += count
    state, _, dkv = carry
    return state, None if dkv is None else move(dkv, division, -rounds[-1].number)


def _alike(hops: list[int]) -> int:
    """Count the rounds that leave by equal hops from the first on: they are one loop."""
    return max(len(list(itertools.takewhile(lambda hop: hop == hops[0] != 0, hops))), 1)


def _each(meet: Callable[[Any, Any], Any], carry: Any, pairs: tuple[tuple[int, int], ...]) -> Any:
    """carry = meet(carry, pair) for every pair, compiled once."""
    if len(pairs) == 1:
        return meet(carry, pairs[0])
    return jax.lax.scan(lambda carry, pair: (meet(carry, pair), None), carry, jnp.asarray(pairs, jnp.int32))[
        0
    ]


def _as_running(found: Results) -> Running:
    """A finished softmax as sums that merge with others."""
    total = jnp.where(found.peak == -jnp.inf, 0, jnp.exp(found.log_total))
    return Running(found.peak, total, found.output * total[..., None])


def _accumulation(arrays: Inputs) -> Any:
    wide = any(array.dtype == jnp.float64 for array in (arrays.query, arrays.key, arrays.value))
    return jnp.float64 if wide else jnp.float32


def _rows(arrays: Inputs) -> tuple[int, ...]:
    """Leading axes of this device's output."""
    query, key, value = arrays.query.shape, arrays.key.shape, arrays.value.shape
    batch = jnp.broadcast_shapes(query[:-3], key[:-3], value[:-3])
    return (*batch, max(query[-3], key[-3], value[-3]))


# Parts of a device's sequence lie side by side on a first axis.


def _split(array: Array, parts: int, axis: int = -2) -> Array:
    return jnp.stack(jnp.split(array, parts, axis))


def _join(array: Array, axis: int) -> Array:
    return jnp.concatenate(list(array), axis)


def _take(tree: Any, part: Any) -> Any:
    if isinstance(part, int):
        return jax.tree.map(lambda array: array[part], tree)
    return jax.tree.map(lambda array: jax.lax.dynamic_index_in_dim(array, part, 0, False), tree)


def _put(array: Array, part: Any, value: Array) -> Array:
    if isinstance(part, int) and array.shape[0] == 1:
        return value[None]
    return jax.lax.dynamic_update_index_in_dim(array, value, part, 0)
