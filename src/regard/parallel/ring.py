"""Ring attention on one device: keys and values travel the ring; backward, dK and dV travel with them."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.call.problem import accumulation_dtype
from regard.engine.flash import passes
from regard.engine.flash.operands import Operands, Results
from regard.engine.softmax.online_softmax import Running
from regard.manual_meshes import vary, varying_axes
from regard.parallel.division import Division, Round
from regard.parallel.exchange import move
from regard.parallel.shard import Shard

Body = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


def forward(shard: Shard, arrays: Operands, *, reversible: bool) -> Results:
    """Attend from this device's queries to all keys; rows come as this device's sequence lies."""
    parts, stats = shard.division.parts, shard.call.stats
    cut = _cut(arrays.named(), parts)
    *rows, length = row_axes(arrays.query.shape, arrays.key.shape, arrays.value.shape)
    shape, width = (parts, *rows, length // parts), arrays.value.shape[-1]
    dtype = accumulation_dtype(arrays.query, arrays.key, arrays.value)
    empty = Running.empty(shape, width, dtype, moment="entropy" in stats, argmax="argmax" in stats)

    def meet(state: Running, pair: Any, owner: Any, *call: Any) -> Running:
        results = passes.forward(*call, reversible=reversible)
        merged = _take(state, pair[0]).merge(_as_running(results, shard.first_key(pair, owner)))
        return jax.tree.map(lambda whole, part: _put(whole, pair[0], part), state, merged)

    def body(state: Running, keys: Any, number: Any, pairs: Any) -> tuple[Running, None]:
        return _fold_pairs(meet, state, shard, cut | keys, number, pairs), None

    state, _ = ring_loop(shard.division, _keys_of(cut), body, vary(empty, varying_axes(arrays)))
    vectors = {
        "log_total": state.log_total(),
        "entropy": state.entropy() if "entropy" in stats else None,
        "peak": state.row_max(),
        "argmax": state.argmax,
    }
    joined = {name: _join(array, -1) for name, array in vectors.items() if array is not None}
    return Results(_join(state.output(), -2), **joined)


def tangent(
    shard: Shard, arrays: Operands, results: Results, tangents: Mapping[str, Array], *, reversible: bool
) -> Results:
    """Compute the JVP in the named arrays, whose tangents travel along with the keys."""
    parts, arrays = shard.division.parts, _as_new(arrays)
    cut, cut_tangents = _cut(arrays.named(), parts), _cut(tangents, parts)
    outputs = _cut_rows(results, parts)
    state = {name: jnp.zeros_like(rows) for name, rows in outputs.items() if name != "peak"}

    def body(state: Any, keys: Any, number: Any, pairs: Any) -> tuple[Any, None]:
        def meet(state: Any, pair: Any, owner: Any, inputs: Operands, context: Any, config: Any) -> Any:
            named = cut_tangents | keys[1]
            read = {name: _read(shard, name, array, pair, owner) for name, array in named.items()}
            rows = Results(**_take(outputs, pair[0]))
            # Each chunk of keys adds to the sums that a tangent is.
            terms = passes.tangent(inputs, context, rows, read, config, reversible=reversible)._asdict()
            return {
                name: _put(total, pair[0], _take(total, pair[0]) + terms[name])
                for name, total in state.items()
            }

        return _fold_pairs(meet, state, shard, cut | keys[0], number, pairs), None

    keys = _keys_of(cut), _keys_of(cut_tangents)
    state, _ = ring_loop(shard.division, keys, body, vary(state, varying_axes(arrays)))
    return Results(**{name: _join(total, _ROW_AXES[name]) for name, total in state.items()})


def backward(
    shard: Shard,
    arrays: Operands,
    results: Results,
    cotangents: Results,
    wanted: Iterable[str],
    *,
    reversible: bool,
) -> dict[str, Array]:
    """Compute the VJP in this device's arrays; of scale and parameters, this device's share of it."""
    parts, varying, arrays = shard.division.parts, varying_axes(arrays), _as_new(arrays)
    dtype = accumulation_dtype(arrays.query, arrays.key, arrays.value)
    cut = _cut(arrays.named(), parts)
    outputs, cut_cotangents = _cut_rows(results, parts), _cut_rows(cotangents, parts)
    zeros = {name: jnp.zeros(cut[name].shape, dtype) for name in wanted}

    def meet(totals: Any, pair: Any, owner: Any, inputs: Operands, context: Any, config: Any) -> Any:
        rows, cotangents = Results(**_take(outputs, pair[0])), Results(**_take(cut_cotangents, pair[0]))
        named = inputs.named()
        shapes = {name: named[name].shape for name in totals}
        grads = passes.backward(inputs, context, rows, cotangents, shapes, config, reversible=reversible)
        return {name: _add(shard, name, total, pair, owner, grads[name]) for name, total in totals.items()}

    def body(state: Any, keys: Any, number: Any, pairs: Any) -> tuple[Any, Any]:
        state = state | vary(_keys_of(zeros), varying)
        totals = _fold_pairs(meet, state, shard, cut | keys, number, pairs)
        dkv = _keys_of(totals)
        return {name: total for name, total in totals.items() if name not in dkv}, dkv or None

    keys, dkv = _keys_of(cut), _keys_of(zeros)
    state = vary({name: array for name, array in zeros.items() if name not in dkv}, varying)
    state, grads = ring_loop(shard.division, keys, body, state, with_dkv=bool(dkv))
    totals = state | (grads or dkv)
    return {
        name: _join(total, -2) if name in _LONG else total.reshape(arrays.named()[name].shape)
        for name, total in totals.items()
    }


class _Group(NamedTuple):
    """Rounds that are one loop: keys leave each by `hops_out` members, gradients come by `hops_in`."""

    rounds: list[Round]
    hops_in: int
    hops_out: int


def _group_rounds(rounds: Sequence[Round], *, with_dkv: bool) -> list[_Group]:
    """Group rounds that hop alike; where gradients travel, the first round of all has none yet."""
    numbers = [0, *(step.number for step in rounds)]
    hops = [after - before for before, after in itertools.pairwise(numbers)]
    groups: list[_Group] = []
    for step, hops_in, hops_out in zip(rounds, hops, [*hops[1:], 0], strict=True):
        joins = bool(groups) and hops_in == hops_out
        if joins and with_dkv:
            joins = len(groups) > 1 and groups[-1].hops_in == hops_in
        if joins:
            groups[-1].rounds.append(step)
        else:
            groups.append(_Group([step], hops_in, hops_out))
    return groups


def ring_loop(
    division: Division, keys: Any, body: Body, state: Any, *, with_dkv: bool = False
) -> tuple[Any, Any]:
    """Run `state, dkv = body(state, keys, round, pairs)` every round; dK and dV travel along, and home."""
    rounds = division.rounds
    if not rounds:
        return state, None

    def run_round(carry: Any, number: Any, pairs: Any, hops_in: int, hops_out: int) -> Any:
        # What is sent before the computation, and added after it, overlaps with it.
        state, keys, dkv = carry
        keys_ahead = move(keys, division, hops_out)
        arrived = None if dkv is None else move(dkv, division, hops_in)
        state, added = body(state, keys, number, pairs)
        return state, keys_ahead, added if arrived is None else jax.tree.map(jnp.add, arrived, added)

    keys = move(keys, division, rounds[0].number)
    carry = (state, keys, None)
    for group, hops_in, hops_out in _group_rounds(rounds, with_dkv=with_dkv):
        pairs = tuple(sorted({pair for step in group for pair in step.pairs}))
        step = partial(run_round, pairs=pairs, hops_in=hops_in, hops_out=hops_out)
        if len(group) == 1:
            carry = step(carry, group[0].number)
        else:
            numbers = jnp.asarray([step.number for step in group], jnp.int32)
            carry, _ = jax.lax.scan(lambda carry, n, step=step: (step(carry, n), None), carry, numbers)
    state, _, dkv = carry
    return state, None if dkv is None else move(dkv, division, -rounds[-1].number)


def _fold_pairs(
    meet: Callable[..., Any], carry: Any, shard: Shard, cut: dict[str, Array], number: Any, pairs: Any
) -> Any:
    """Fold `meet(carry, pair, owner, inputs, context, config)` over the pairs of a round, compiled once."""
    owner = shard.owner(number)

    def step(carry: Any, pair: Any) -> tuple[Any, None]:
        read = {name: _read(shard, name, array, pair, owner) for name, array in cut.items()}
        return meet(carry, pair, owner, *shard.prepare_pair(Operands.from_named(read), pair, owner)), None

    if len(pairs) == 1:
        return step(carry, pairs[0])[0]
    return jax.lax.scan(step, carry, jnp.asarray(pairs, jnp.int32))[0]


def _as_running(results: Results, first_key: Any) -> Running:
    """Turn a finished softmax into sums that merge with others."""
    alive = results.peak != -jnp.inf
    total = jnp.where(alive, jnp.exp(results.log_total), 0)
    moment = None if results.entropy is None else total * (results.log_total - results.entropy)
    argmax = None if results.argmax is None else jnp.where(alive, results.argmax + first_key, -1)
    return Running(results.peak, total, results.output * total[..., None], moment, argmax)


def row_axes(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> tuple[int, ...]:
    """Return the axes of what there is per query of this device, from shapes."""
    batch = jnp.broadcast_shapes(tuple(query[:-3]), tuple(key[:-3]), tuple(value[:-3]))
    return (*batch, max(query[-3], key[-3], value[-3]), query[-2])


def _as_new(arrays: Operands) -> Operands:
    """Hide that a first trip had the same keys, or the compiler keeps those of all devices for the second."""
    return jax.lax.optimization_barrier(arrays)


# Parts of a device's sequence lie side by side on a first axis.
_LONG = ("query", "key", "value", "bias")
_ROW_AXES = {"output": -2, "log_total": -1, "entropy": -1, "peak": -1}


def _cut(named: Mapping[str, Array], parts: int) -> dict[str, Array]:
    """Cut what is as long as the sequence; one row of a bias that serves all stays."""
    return {
        name: _split(array, parts if array.shape[-2] > 1 else 1) if name in _LONG else array
        for name, array in named.items()
    }


def _cut_rows(rows: Results, parts: int) -> dict[str, Array]:
    arrays = {name: getattr(rows, name) for name in _ROW_AXES}
    some = {name: array for name, array in arrays.items() if array is not None}
    return {name: _split(array, parts, _ROW_AXES[name]) for name, array in some.items()}


def _keys_of(cut: dict[str, Array]) -> dict[str, Array]:
    return {name: array for name, array in cut.items() if name in ("key", "value")}


def _read(shard: Shard, name: str, array: Array, pair: Any, owner: Any) -> Array:
    if name not in _LONG:
        return array
    array = _take(array, _part(name, array, pair))
    if name != "bias" or array.shape[-1] == 1:
        return array
    return jax.lax.dynamic_slice_in_dim(array, shard.first_key(pair, owner), shard.division.keys.chunk, -1)


def _add(shard: Shard, name: str, total: Array, pair: Any, owner: Any, grad: Array) -> Array:
    """Add to what `_read` reads."""
    if name not in _LONG:
        return total + grad
    part = _part(name, total, pair)
    if name == "bias" and total.shape[-1] > 1:
        mine, first = _take(total, part), shard.first_key(pair, owner)
        grad = grad + _read(shard, name, total, pair, owner)
        return _put(total, part, jax.lax.dynamic_update_slice_in_dim(mine, grad, first, -1))
    return _put(total, part, _take(total, part) + grad)


def _part(name: str, array: Array, pair: Any) -> Any:
    if name in ("key", "value"):
        return pair[1]
    return 0 if len(array) == 1 else pair[0]


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
