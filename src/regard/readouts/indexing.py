"""Indexers: scores that choose keys for each query, and the keys that they choose, in linear memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jax.sharding import PartitionSpec

from regard.arguments import guided, integers, read_number, whole_number
from regard.axes import Array, ArrayLike, Float, Int, Size, broadcast, broadcast_named
from regard.engine.call.canonicalization import canonicalize, float_array
from regard.engine.call.problem import Problem, accumulation_dtype
from regard.engine.dispatch.explicit_axes import run_with_specs
from regard.engine.dispatch.placement import demand_whole, run_on_rows
from regard.masks import Mask
from regard.masks.grid import Grid
from regard.masks.spans import Span
from regard.wide_sums import add_up_wide, gather, widen

MOST_SCORES = 1 << 22  # of a step
_SYMBOLIC_ROWS = 128  # of a step, where other sizes are known only when an exported program is called


@guided
def choose_keys(
    query: ArrayLike,
    key: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    count: int,
    mask: Mask | ArrayLike | None = None,
    scale: float | None = None,
    query_offset: int | ArrayLike | None = None,
    key_offset: int | ArrayLike | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
) -> Int[Array, "*B T C"]:
    """Choose for each query the keys with the largest index scores, some queries at a time.

    chosen_t = the `count` keys s with the largest score_ts among those that the mask lets t attend to
    score_ts = sum_h weights_ht relu(scale sum_d query_htd key_sd)

    The scores of a step are formed and dropped: memory is linear in T and S. A choice has no gradient; an
    indexer is trained on `index_scores` of what it chose.

    Args:
        query: floating-point array `(*B, H, T, D)` of the indexer's heads.
        key: floating-point array `(*B, S, D)`, shared by them.
        weights: floating-point array `(*B, H, T)`; None sums products without relu, a plain dot product.
        count: how many keys are chosen, at least 1.
        mask: as in `attend`, of leading axes `(*B, 1)`; documents and windows are kept to.
        scale: factor on the products; None means 1/sqrt(D).
        query_offset, key_offset, query_positions, key_positions: as in `attend`.

    Returns:
        int32 rows of key, ascending, `count` of them or S (`count` where S is a symbol of `jax.export`); -1
        stands at the end where the mask keeps fewer, or scores are NaN or -inf. Of equal scores the smaller
        row is chosen.

    Raises:
        TypeError, ValueError: as `attend`; a count below 1, weights that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, masks, readouts
        >>> x = jnp.eye(4)
        >>> chosen = readouts.choose_keys(x[None], x, jnp.ones((1, 4)), count=2, mask=masks.causal())
        >>> chosen.tolist()
        [[0, -1], [0, 1], [0, 2], [0, 3]]
        >>> attend(x, x, x, mask=masks.chosen_keys(chosen, ascending=True) & masks.causal()).shape
        (4, 4)

    Reference: DeepSeek-AI, "DeepSeek-V3.2", 2025, equation 1 (the lightning indexer).
    """
    inputs = _check(query, key, weights, scale)
    offsets = {"query_offset": query_offset, "key_offset": key_offset}
    positions = {"query_positions": query_positions, "key_positions": key_positions}
    problem = _pair_tokens(inputs, mask, **offsets, **positions)
    count = whole_number("count", count, 1)
    choose = partial(_choose, count=count if is_symbolic_dim(problem.S) else min(count, problem.S))
    return run_with_specs(choose, (*inputs, problem), _divide_rows(inputs[0]))


def index_scores(
    query: ArrayLike,
    key: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    indices: ArrayLike | None = None,
    scale: float | None = None,
) -> Float[Array, "*B T S"]:
    """Compute the scores that `choose_keys` ranks, of all pairs or of chosen keys alone.

    score_ts = sum_h weights_ht relu(scale sum_d query_htd key_sd)

    Args:
        query, key, weights, scale: as in `choose_keys`.
        indices: integer array `(*B, T, C)`, as `choose_keys` returns it; None means all keys.

    Returns:
        Scores in the accumulation dtype, differentiable: `(*B, T, S)`, or `(*B, T, C)` of `indices`,
        -inf where one names no key; their memory is linear in T C.

    Raises:
        TypeError, ValueError: arrays that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import readouts
        >>> x = jnp.eye(3)
        >>> readouts.index_scores(x[None], x, jnp.ones((1, 3)), indices=[[0], [0], [-1]], scale=2.0).tolist()
        [[2.0], [0.0], [-inf]]
    """
    query, key, weights, scale = _check(query, key, weights, scale)
    if indices is None:
        run, spec = partial(_score, "...td,...sd->...ts"), PartitionSpec(*_divide_rows(query), None)
        return run_with_specs(run, (query, key, weights, scale), spec)
    chosen = _check_indices(indices, (*query.shape[:-3], query.shape[-2]))
    return run_with_specs(_score_chosen, (query, key, weights, scale, chosen), _divide_rows(query))


@guided
def index_divergence(
    query: ArrayLike,
    key: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    attention: tuple[ArrayLike, ArrayLike],
    indices: ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    scale: float | None = None,
    attention_scale: float | None = None,
    query_offset: int | ArrayLike | None = None,
    key_offset: int | ArrayLike | None = None,
    query_positions: ArrayLike | None = None,
    key_positions: ArrayLike | None = None,
) -> Float[Array, "*B T"]:
    """Compute the KL divergence of an indexer from the attention it chooses keys for: what it is trained on.

    divergence_t = sum_s target_ts (log target_ts - log softmax_s(score_ts))
    target_ts = (1/N) sum_n softmax_s(attention_scale sum_a q_nta k_nsa)

    Both softmaxes, and the sum, run over the same keys: all that the mask keeps, or the chosen ones alone
    with `indices`. Dense training of an indexer takes the first, training beside sparse attention the second.
    Scores of some queries are formed at a time and again for the gradient, so memory is linear in T and S.

    Args:
        query, key, weights, scale: of the indexer, as in `choose_keys`.
        attention: query `(*B, N, T, A)` and key `(*B, K, S, A)` of attention, N a multiple of K. They get no
            gradient.
        indices: integer array `(*B, T, C)`, as `choose_keys` returns it, each key once; None means all.
        mask: as in `choose_keys`; None with `indices`, which a mask was kept to before.
        attention_scale: None means 1/sqrt(A).
        query_offset, key_offset, query_positions, key_positions: as in `attend`.

    Returns:
        Nats, at least 0 but for rounding, in the accumulation dtype; 0 where a query has no key.

    Raises:
        TypeError, ValueError: as `choose_keys`; arrays that do not fit, a mask beside indices.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import masks, readouts
        >>> x = jnp.eye(3)
        >>> pair = 4 * x[None], x[None]
        >>> apart = readouts.index_divergence(x[None], x, attention=pair, mask=masks.causal())
        >>> [f"{nats:.3f}" for nats in apart]
        ['0.000', '0.194', '0.284']

    Reference: DeepSeek-AI, "DeepSeek-V3.2", 2025, equations 3 and 4.
    """
    inputs = _check(query, key, weights, scale)
    (*leading, _, length, _), (num_keys, _) = inputs[0].shape, inputs[1].shape[-2:]
    heads = _check_attention(attention, tuple(leading), length, num_keys)
    attention_scale = heads[0].shape[-1] ** -0.5 if attention_scale is None else attention_scale
    offsets = {"query_offset": query_offset, "key_offset": key_offset}
    positions = {"query_positions": query_positions, "key_positions": key_positions}
    if indices is not None:
        if mask is not None:
            raise ValueError("mask: expected None with indices, which choose_keys keeps to a mask; got both")
        indices = _check_indices(indices, (*leading, length))
    problem = _pair_tokens(inputs, mask, **offsets, **positions)
    arguments = inputs, heads, read_number("attention_scale", attention_scale), indices, problem
    return run_with_specs(_diverge, arguments, _divide_rows(inputs[0]))


def _divide_rows(query: Array) -> PartitionSpec:
    """Return how (*B, T) are divided on explicit axes, as query (*B, H, T, D) is."""
    *leading, _, length, _ = jax.typeof(query).sharding.spec or (None,) * query.ndim
    return PartitionSpec(*leading, length)


def _pair_tokens(inputs: Any, mask: Any, **offsets: Any) -> Problem:
    """Return the call, of one head, whose mask and positions say which keys a query may choose."""
    shape, key = inputs[0].shape, inputs[1][..., None, :, :]
    query = jnp.zeros((*shape[:-3], 1, *shape[-2:]), key.dtype)  # no slice of heads, which may be divided
    return canonicalize(query, key, key, mask=mask, **offsets)


def _check_attention(pair: Any, leading: tuple[int, ...], length: int, num_keys: int) -> tuple[Array, Array]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"attention: expected a pair of arrays, query and key, got {pair!r}")
    query = float_array("attention[0]", pair[0], 3)
    key = float_array("attention[1]", pair[1], 3)
    heads, key_heads = query.shape[-3], key.shape[-3]
    fits = (query.shape[-2], key.shape[-2], query.shape[-1]) == (length, num_keys, key.shape[-1])
    if not fits or not key_heads or heads % key_heads or not heads:
        raise ValueError(
            f"attention: expected query (*B, N, {length}, A) and key (*B, K, {num_keys}, A), N a multiple of"
            f" K; got {query.shape} and {key.shape}"
        )
    query = broadcast("attention[0]", query, (*leading, *query.shape[-3:]))
    return query, broadcast("attention[1]", key, (*leading, *key.shape[-3:]))


def _check_indices(indices: Any, shape: tuple[int, ...]) -> Array:
    chosen = integers("indices", indices)
    sizes = zip(chosen.shape, shape, strict=False)
    if chosen.ndim != len(shape) + 1 or any(rows not in (1, size) for rows, size in sizes):
        raise ValueError(f"indices: expected shape (*B, T, C) with (*B, T) = {shape}, got {chosen.shape}")
    return jnp.asarray(chosen)


def _check(query: Any, key: Any, weights: Any, scale: Any) -> tuple[Array, Array, Any, Any]:
    """Return query (*B, H, T, D), key (*B, S, D), weights (*B, H, T) or None, and the scale, as arrays."""
    demand_whole("readouts")
    query, key = float_array("query", query, 3), float_array("key", key, 2)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"key: expected rows of {query.shape[-1]} numbers, as query; got {key.shape[-1]}")
    leading = broadcast_named(query=query.shape[:-3], key=key.shape[:-2])
    query = jnp.broadcast_to(query, (*leading, *query.shape[-3:]))
    key = jnp.broadcast_to(key, (*leading, *key.shape[-2:]))
    if weights is not None:
        weights = float_array("weights", weights, 2)
        if weights.shape not in (query.shape[:-1], query.shape[-3:-1]):
            raise ValueError(
                f"weights: expected one number per head and query, {query.shape[:-1]}; got {weights.shape}"
            )
        weights = jnp.broadcast_to(weights, query.shape[:-1])
    if not query.shape[-3]:
        raise ValueError(f"query: expected at least one head on axis -3, got shape {query.shape}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return query, key, weights, read_number("scale", scale)


def _score(subscripts: str, query: Array, key: Array, weights: Any, scale: Any) -> Array:
    """Sum the heads' scores one after the other: a third of the time of all at once, and of the memory."""
    sums, give = accumulation_dtype(query, key), add_up_wide(key)

    @partial(jax.checkpoint, prevent_cse=False)
    def score_head(query: Array, weight: Any) -> Array:
        products = jnp.einsum(subscripts, query, give(), preferred_element_type=sums)
        products = products * jnp.asarray(scale, sums)
        return products if weight is None else jax.nn.relu(products) * weight[..., None].astype(sums)

    heads = jnp.moveaxis(query, -3, 0), None if weights is None else jnp.moveaxis(weights, -2, 0)
    first, rest = jax.tree.map(lambda x: x[0], heads), jax.tree.map(lambda x: x[1:], heads)
    return jax.lax.scan(lambda total, head: (total + score_head(*head), None), score_head(*first), rest)[0]


@partial(jnp.vectorize, signature="(s,d),(t,c)->(t,c,d)")
def _take_keys(key: Array, chosen: Array) -> Array:
    """Take the keys that are listed for each query; some row where a list names none."""
    return key.at[chosen].get(mode="clip")


@partial(jax.jit, static_argnames="count")
def _choose(query: Array, key: Array, weights: Any, scale: Any, problem: Problem, count: int) -> Array:
    *leading, _, length, _ = query.shape
    if 0 in (*query.shape[:-1], problem.S):
        return jnp.zeros((*leading, length, count), jnp.int32)
    spare = count if is_symbolic_dim(problem.S) else 0  # there may be fewer keys than are chosen

    def step(rows: dict[str, Array]) -> Array:
        # Read where they lie: without a gradient, no copy is needed.
        span = {"start_index": rows["number"][0], "slice_size": rows["number"].size}
        cut = partial(jax.lax.dynamic_slice_in_dim, **span)
        queries, row_weights = cut(query, axis=-2), None if weights is None else cut(weights, axis=-1)
        scores = _score("...td,...sd->...ts", queries, key, row_weights, scale)
        keep = _keep(problem, rows)
        scores = scores if keep is None else jnp.where(keep, scores, -jnp.inf)
        scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
        scores = jnp.pad(scores, [*[(0, 0)] * (scores.ndim - 1), (0, spare)], constant_values=-jnp.inf)
        best, chosen = run_on_rows(partial(jax.lax.top_k, k=count), scores)
        chosen = jnp.sort(jnp.where(best == -jnp.inf, problem.S, chosen.astype(jnp.int32)), -1)
        return jnp.where(chosen == problem.S, -1, chosen)

    return _map_rows(step, length, MOST_SCORES // (math.prod(leading) * problem.S))


def _map_rows(
    step: Callable[..., Array], length: Size, size: Size, least: int = 1, **arrays: Array | None
) -> Array:
    """Join what `step` makes of `size` rows, at least `least`, of the arrays at a time.

    Arrays are (..., T, x), weights (..., T); `step` gets rows' numbers too, as "number". The last rows take
    up some of those before. Backward, each step is computed once more.
    """
    columns = {name: array for name, array in arrays.items() if array is not None}
    size = _SYMBOLIC_ROWS if is_symbolic_dim(size) else max(size, least)
    size = 1 if is_symbolic_dim(length) else min(size, length)
    if "weights" in columns:
        columns["weights"] = columns["weights"][..., None]
    first = jnp.minimum(jnp.arange(0, length, size, dtype=jnp.int32), length - size)
    numbers = first[:, None] + jnp.arange(size, dtype=jnp.int32)[None]

    def split(array: Array) -> Array:
        rows = jnp.take(array, numbers.reshape(-1), axis=-2)
        return jnp.moveaxis(rows.reshape((*array.shape[:-2], *numbers.shape, array.shape[-1])), -3, 0)

    @partial(jax.checkpoint, prevent_cse=False)
    def run(rows: dict[str, Array]) -> Array:
        return step(rows | ({"weights": rows["weights"][..., 0]} if "weights" in rows else {}))

    steps = jax.lax.map(run, {name: split(array) for name, array in columns.items()} | {"number": numbers})
    joined = jnp.moveaxis(steps[:-1], 0, -3).reshape((*steps.shape[1:-2], -1, steps.shape[-1]))
    return jnp.concatenate([joined, steps[-1][..., size + joined.shape[-2] - length :, :]], -2)


def _keep(problem: Problem, rows: dict[str, Array]) -> Array | None:
    """Return which keys some rows of queries may be paired with, without an axis of heads; None means all."""
    if "chosen" in rows:
        return (rows["chosen"] >= 0) & (rows["chosen"] < problem.S)
    if problem.mask is None:
        return None
    queries, keys = Span(rows["number"][0], rows["number"].size), Span(None, problem.S)
    grid = Grid.tile(queries, keys, problem.query_offset, len(problem.leading), problem.key_offset)
    keep = problem.mask.keep(grid)
    return keep.reshape((*keep.shape[:-3], *keep.shape[-2:]))


@jax.jit
def _score_chosen(query: Array, key: Array, weights: Any, scale: Any, chosen: Array) -> Array:
    length, (num_keys, _), choices, wide = query.shape[-2], key.shape[-2:], chosen.shape[-1], widen(key)
    if 0 in (*query.shape[:-1], num_keys, choices):
        return jnp.full((*query.shape[:-3], length, choices), -jnp.inf, accumulation_dtype(query, key))

    def step(rows: dict[str, Array]) -> Array:
        keys = gather(_take_keys, key, rows["chosen"], wide)
        scores = _score("...td,...tcd->...tc", rows["query"], keys, rows.get("weights"), scale)
        return jnp.where((rows["chosen"] >= 0) & (rows["chosen"] < num_keys), scores, -jnp.inf)

    chosen = jnp.broadcast_to(chosen, (*query.shape[:-3], length, choices))
    return _map_rows(step, length, num_keys // choices, 8, query=query, weights=weights, chosen=chosen)


@jax.jit
def _diverge(inputs: Any, attention: Any, attention_scale: Any, chosen: Any, problem: Problem) -> Array:
    query, key, weights, scale = inputs
    attention_query, attention_key = attention
    *leading, _, length, _ = query.shape
    sums, give, wide = accumulation_dtype(query, key), add_up_wide(key), widen(key)
    choices = problem.S if chosen is None else chosen.shape[-1]
    if 0 in (*leading, length, choices):
        return jnp.zeros((*leading, length), sums)
    size = MOST_SCORES // (math.prod(leading) * choices) if chosen is None else problem.S // choices
    subscripts = "...td,...sd->...ts" if chosen is None else "...td,...tcd->...tc"
    chosen = None if chosen is None else jnp.broadcast_to(chosen, (*leading, length, choices))

    def step(rows: dict[str, Array]) -> Array:
        keys = give() if chosen is None else gather(_take_keys, key, rows["chosen"], wide)
        keep = _keep(problem, rows)
        scores = _score(subscripts, rows["query"], keys, rows.get("weights"), scale)
        target = _average_weights(subscripts, rows, attention_key, attention_scale, keep)
        keep = jnp.ones(scores.shape, bool) if keep is None else jnp.broadcast_to(keep, scores.shape)
        logs = jax.nn.log_softmax(jnp.where(keep, scores, jnp.finfo(sums).min), axis=-1)
        # Of nothing, nothing: a row without keys has no target.
        terms = jnp.where(keep & (target > 0), target * (jnp.log(jnp.where(target > 0, target, 1)) - logs), 0)
        return terms.sum(-1, keepdims=True)

    columns = {"query": query, "weights": weights, "chosen": chosen, "attention_query": attention_query}
    return _map_rows(step, length, size, 1 if chosen is None else 8, **columns)[..., 0]


def _average_weights(subscripts: str, rows: Any, key: Array, scale: Any, keep: Any) -> Array:
    """Average the weights of attention's heads over the keys kept, one head after the other."""
    query = jnp.moveaxis(rows["attention_query"], -3, 0)
    query, keys = jax.lax.stop_gradient((query, jnp.moveaxis(key, -3, 0)))
    sums, group = accumulation_dtype(query, key), query.shape[0] // keys.shape[0]

    def weigh(number: Array) -> Array:
        head_key = jax.lax.dynamic_index_in_dim(keys, number // group, keepdims=False)
        head_key = head_key if "chosen" not in rows else _take_keys(head_key, rows["chosen"])
        head_query = jax.lax.dynamic_index_in_dim(query, number, keepdims=False)
        products = jnp.einsum(subscripts, head_query, head_key, preferred_element_type=sums)
        scores = products * jnp.asarray(scale, sums)
        scores = scores if keep is None else jnp.where(keep, scores, jnp.finfo(sums).min)
        weights = jax.nn.softmax(scores, axis=-1)
        return weights if keep is None else jnp.where(keep, weights, 0)

    numbers = jnp.arange(query.shape[0], dtype=jnp.int32)
    total, _ = jax.lax.scan(lambda total, n: (total + weigh(n), None), weigh(numbers[0]), numbers[1:])
    return total / query.shape[0]
