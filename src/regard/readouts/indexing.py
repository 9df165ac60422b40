"""Indexers: scores that choose keys for each query, and the keys that they choose, in linear memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from regard.arguments import guided, integers, read_number, whole_number
from regard.axes import Array, ArrayLike, Float, Int
from regard.engine.backends.symbolic import split_rows
from regard.engine.call.canonicalization import canonicalize, float_array
from regard.engine.call.problem import Problem, accumulation_dtype
from regard.masks import Mask
from regard.masks.grid import Grid
from regard.masks.runs import Span

MOST_SCORES = 1 << 22  # of a step


@guided
def choose_keys(
    query: ArrayLike,
    key: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    count: int,
    mask: Mask | ArrayLike | None = None,
    scale: float | None = None,
    query_offset: Any = None,
    key_offset: Any = None,
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
        int32 rows of key, ascending, `count` of them or S; -1 stands at the end where the mask keeps fewer,
        or scores are NaN or -inf. Of equal scores the smaller row is chosen.

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
    query, key = inputs[0][..., :1, :, :], inputs[1][..., None, :, :]
    places = {"query_offset": query_offset, "key_offset": key_offset}
    places |= {"query_positions": query_positions, "key_positions": key_positions}
    problem = canonicalize(query, key, key, mask=mask, **places)
    return _choose(*inputs, problem, min(whole_number("count", count, 1), problem.S))


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
        return _score("...td,...sd->...ts", query, key, weights, scale)
    chosen = integers("indices", indices)
    shape = (*query.shape[:-3], query.shape[-2])
    if chosen.ndim != len(shape) + 1 or any(
        own not in (1, size) for own, size in zip(chosen.shape, shape, strict=False)
    ):
        raise ValueError(f"indices: expected shape (*B, T, C) with (*B, T) = {shape}, got {chosen.shape}")
    return _score_chosen(query, key, weights, scale, jnp.asarray(chosen))


def _check(query: Any, key: Any, weights: Any, scale: Any) -> tuple[Array, Array, Any, Any]:
    """Return query (*B, H, T, D), key (*B, S, D), weights (*B, H, T) or None, and the scale, as arrays."""
    query, key = float_array("query", query, 3), float_array("key", key, 2)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"key: expected rows of {query.shape[-1]} numbers, as query has; got {key.shape[-1]}"
        )
    leading = jnp.broadcast_shapes(query.shape[:-3], key.shape[:-2])
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
    sums = accumulation_dtype(query, key)

    def score_head(query: Array, weight: Any) -> Array:
        products = jnp.einsum(subscripts, query, key, preferred_element_type=sums) * jnp.asarray(scale, sums)
        return products if weight is None else jax.nn.relu(products) * weight[..., None].astype(sums)

    heads = jnp.moveaxis(query, -3, 0), None if weights is None else jnp.moveaxis(weights, -2, 0)
    first, rest = jax.tree.map(lambda x: x[0], heads), jax.tree.map(lambda x: x[1:], heads)
    return jax.lax.scan(lambda total, head: (total + score_head(*head), None), score_head(*first), rest)[0]


@partial(jax.jit, static_argnames="count")
def _choose(query: Array, key: Array, weights: Any, scale: Any, problem: Problem, count: int) -> Array:
    *leading, _, length, _ = query.shape
    if 0 in (*query.shape[:-1], problem.S):
        return jnp.zeros((*leading, length, count), jnp.int32)
    size = min(max(MOST_SCORES // (math.prod(leading) * problem.S), 1), length)
    axes = len(problem.leading)

    def step(start: Array) -> Array:
        rows = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        scores = _score(
            *("...td,...sd->...ts", rows(query, axis=-2), key),
            *(None if weights is None else rows(weights, axis=-1), scale),
        )
        if problem.mask is not None:
            grid = Grid.tile(
                *(Span(start, size), Span(None, problem.S), problem.query_offset, axes, problem.key_offset)
            )
            keep = problem.mask.keep(grid)
            scores = jnp.where(keep.reshape((*keep.shape[:-3], *keep.shape[-2:])), scores, -jnp.inf)
        best, chosen = jax.lax.top_k(jnp.where(jnp.isnan(scores), -jnp.inf, scores), count)
        chosen = jnp.sort(jnp.where(best == -jnp.inf, problem.S, chosen.astype(jnp.int32)), -1)
        return jnp.where(chosen == problem.S, -1, chosen)

    # The last step takes up rows of the one before it.
    starts = jnp.minimum(jnp.arange(0, length, size, dtype=jnp.int32), length - size)
    steps = jnp.moveaxis(jax.lax.map(step, starts), 0, -3)
    first = steps[..., :-1, :, :].reshape((*leading, -1, count))
    return jnp.concatenate([first, steps[..., -1, first.shape[-2] - length :, :]], -2)


@jax.jit
def _score_chosen(query: Array, key: Array, weights: Any, scale: Any, chosen: Array) -> Array:
    length, (num_keys, _), choices = query.shape[-2], key.shape[-2:], chosen.shape[-1]
    if 0 in (*query.shape[:-1], num_keys, choices):
        return jnp.full((*query.shape[:-3], length, choices), -jnp.inf, accumulation_dtype(query, key))
    size = min(max(num_keys // choices, 8), length)
    count = -(-length // size)
    chosen = jnp.broadcast_to(chosen, (*query.shape[:-3], length, choices))
    steps = {"query": split_rows(query, count, size), "chosen": split_rows(chosen, count, size)}
    if weights is not None:
        steps["weights"] = split_rows(weights[..., None], count, size)
    gather = jnp.vectorize(
        lambda rows, index: rows.at[index].get(mode="clip"), signature="(s,d),(t,c)->(t,c,d)"
    )

    @partial(jax.checkpoint, prevent_cse=False)
    def step(carry: None, rows: dict[str, Array]) -> tuple[None, Array]:
        own = rows["weights"][..., 0] if "weights" in rows else None
        scores = _score("...td,...tcd->...tc", rows["query"], gather(key, rows["chosen"]), own, scale)
        return carry, jnp.where((rows["chosen"] >= 0) & (rows["chosen"] < num_keys), scores, -jnp.inf)

    _, stacked = jax.lax.scan(step, None, steps)
    joined = jnp.moveaxis(stacked, 0, -3)
    return joined.reshape((*joined.shape[:-3], -1, choices))[..., :length, :]
