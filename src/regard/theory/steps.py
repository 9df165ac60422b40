"""Attention step by step, as textbooks write it: scores S, weights A, output O."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import as_array, integers
from regard.axes import Array, ArrayLike, broadcast_named
from regard.theory import operands
from regard.theory.notation import contract as _contract


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """One call of attention with everything that was computed on the way; made by `attention_steps`.

    Arrays have all leading axes in full; key and value are those of the query's heads, and 0 where no query
    may attend.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.theory import steps
        >>> attention = steps.attention_steps(jnp.eye(2), jnp.eye(2), jnp.eye(2))
        >>> attention.scores.shape, attention.weights.shape, attention.output.shape
        ((2, 2), (2, 2), (2, 2))
    """

    query: Array
    """Q, `(*B, T, D)`."""
    key: Array
    """K, `(*B, S, D)`."""
    value: Array
    """V, `(*B, S, E)`."""
    products: Array
    """Q g K, `(*B, T, S)`, before any scale."""
    capped: Array
    """The same scaled, and capped where a softcap is given; before what is added."""
    scores: Array
    """S, with everything added, -inf where a query may not attend."""
    keep: Array
    """True where a query may attend to a key."""
    weights: Array
    """A, before dropout."""
    sink_weight: Array
    """The share of each row that the sink takes, `(*B, T)`."""
    log_partition: Array
    """log Z, `(*B, T)`, sink included: `attend`'s lse."""
    output: Array
    """O, `(*B, T, E)`."""
    scale: Array
    """The factor on the products."""
    metric: Array | None
    """g, `(..., D, D)`."""
    softcap: Array | None
    """The cap, shape `()`."""
    distance: Array
    """|i - j|, `(T, S)`, what ALiBi's slopes multiply."""
    dropout: Array | None
    """The factor on each weight: 0, or 1 / (1 - rate)."""
    shapes: dict[str, tuple[int, ...] | None] = dataclasses.field(metadata={"static": True})
    """The shapes of the arguments, which gradients have."""


def attention_steps(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scale: ArrayLike | None = None,
    metric: ArrayLike | None = None,
    softcap: ArrayLike | None = None,
    slopes: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    bias: ArrayLike | None = None,
    keep: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    dropout: ArrayLike | None = None,
) -> Steps:
    """Compute attention as it is defined, and keep every step.

    S^{ij} = f(scale sum_ab Q^{ia} g_ab K^{jb}) - slope |i - j| + bias^{ij},  f(x) = cap tanh(x / cap)
    A^{ij} = e^{S^{ij}} / Z^i,  Z^i = e^{sink} + sum_j e^{S^{ij}} over the keys that are kept
    O^{ib} = sum_j A^{ij} V^{jb}

    The whole matrix is stored, T x S numbers per head and step: for understanding, and to test against.

    Args:
        query: Q, `(*B, T, D)`; heads are the axis before T, a multiple of those of key and value.
        key: K, `(*B, S, D)`; leading axes broadcast.
        value: V, `(*B, S, E)`.
        scale: a number; None means 1/sqrt(D), or 1 where a metric is given.
        metric: g, `(..., D, D)`; None means Euclidean.
        softcap: the cap, a number above 0; None caps nothing.
        slopes: ALiBi's slope of each head; an array that broadcasts to `*B`. None means 0.
        query_offset: position of the first query, an integer, maybe traced; keys begin at 0.
        bias: added to the scores; broadcasts to `(*B, T, S)`; -inf removes a key. None means 0.
        keep: booleans that broadcast to `(*B, T, S)`, True = may attend; None keeps all.
        sinks: one logit per head, an array that broadcasts to `*B`; None means none, as -inf does.
        dropout: the factor on each weight, broadcasts to `(*B, T, S)`; None means 1.

    Returns:
        `Steps`, in the common dtype of query, key and value, float32 at least. A query that may attend to
        nothing has weights 0, output 0, and log partition -inf, or the sink's logit.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.theory import steps
        >>> x = jnp.asarray([[1.0, 0.0], [0.0, 1.0]])
        >>> steps.attention_steps(x, x, x, keep=jnp.tri(2, dtype=bool)).weights.round(3).tolist()
        [[1.0, 0.0], [0.33000001311302185, 0.6700000166893005]]

    Reference: Vaswani et al., "Attention Is All You Need", 2017, equation 1.
    """
    query, key, value = operands.floating("(..., length, width)", query=query, key=key, value=value)
    if query.shape[-1] != key.shape[-1] and metric is None:
        raise ValueError(f"key: expected the query's width {query.shape[-1]}, got shape {key.shape}")
    if key.shape[-2] != value.shape[-2]:
        raise ValueError(f"value: expected one row per key, {key.shape[-2]}, got shape {value.shape}")
    dtype = query.dtype
    if scale is None:
        scale = 1 / np.sqrt(query.shape[-1]) if metric is None else 1.0
    scale = as_array("scale", "numbers", jnp.asarray, scale).astype(dtype)
    options = {"metric": metric, "slopes": slopes}
    options |= {"bias": bias, "sinks": sinks, "dropout": dropout}
    arrays = {name: None if x is None else jnp.asarray(x).astype(dtype) for name, x in options.items()}
    arrays["softcap"] = None if softcap is None else operands.one_above_zero("softcap", softcap, dtype)
    offset = integers("query_offset", query_offset)
    for name, number in (("scale", scale), ("query_offset", offset)):
        if number.ndim:
            raise ValueError(f"{name}: expected one number, got shape {number.shape}")
    shapes = {name: None if array is None else array.shape for name, array in arrays.items()}
    shapes |= {"query": query.shape, "key": key.shape, "value": value.shape}

    leading = _leading(query, key, value)
    pairs = (*leading, query.shape[-2], key.shape[-2])
    keep = operands.kept(keep, pairs)
    added = arrays["bias"]
    if added is not None:
        added = operands.broadcast("bias", added, pairs)
        keep &= added != -jnp.inf
    # Rows that take no part may hold NaN, so they are zeroed before any product.
    query = jnp.where(keep.any(-1)[..., None], spread("query", query, leading), 0)
    readable = keep.any(-2)[..., None]
    key = jnp.where(readable, spread("key", key, leading), 0)
    value = jnp.where(readable, spread("value", value, leading), 0)
    lowered = key if arrays["metric"] is None else _contract("...ab,...jb->...ja", arrays["metric"], key)
    products = _contract("...ia,...ja->...ij", query, lowered)
    capped = scale * products
    if arrays["softcap"] is not None:
        capped = arrays["softcap"] * jnp.tanh(capped / arrays["softcap"])
    position = jnp.asarray(offset) + jnp.arange(pairs[-2], dtype=jnp.int32)[:, None]
    columns = jnp.arange(pairs[-1], dtype=jnp.int32)[None]
    distance = jnp.maximum(position, columns) - jnp.minimum(position, columns)
    distance = distance.astype(jnp.uint32).astype(dtype)  # which int32 may not hold
    scores = capped
    if arrays["slopes"] is not None:
        slope = operands.broadcast("slopes", arrays["slopes"], leading)[..., None, None]
        scores = scores - slope * jnp.broadcast_to(distance, pairs)
    if added is not None:
        scores = scores + jnp.where(keep, added, 0)
    scores = jnp.where(keep, scores, -jnp.inf)

    sink = -jnp.inf if arrays["sinks"] is None else arrays["sinks"]
    sink = operands.broadcast("sinks", jnp.asarray(sink, dtype), leading)[..., None, None]
    peak = jnp.maximum(scores.max(-1, keepdims=True, initial=-jnp.inf), sink)
    alive = peak != -jnp.inf
    base = jax.lax.stop_gradient(jnp.where(alive, peak, 0))
    shares = jnp.where(keep, jnp.exp(jnp.where(keep, scores - base, 0)), 0)
    rest = jnp.exp(sink - base)
    total = jnp.where(alive, shares.sum(-1, keepdims=True) + rest, 1)
    weights = shares / total
    used = weights
    if arrays["dropout"] is not None:
        arrays["dropout"] = operands.broadcast("dropout", arrays["dropout"], pairs)
        used = weights * arrays["dropout"]
    log_partition = jnp.where(alive, base + jnp.log(total), -jnp.inf)[..., 0]
    output = _contract("...ij,...jb->...ib", used, value)
    return Steps(
        query=query, key=key, value=value, products=products, capped=capped, scores=scores, keep=keep,
        weights=weights, sink_weight=(rest / total)[..., 0], log_partition=log_partition, output=output,
        scale=scale, metric=arrays["metric"], softcap=arrays["softcap"], distance=distance,
        dropout=arrays["dropout"], shapes=shapes,
    )  # fmt: skip


class HeadSteps(NamedTuple):
    """Several heads in index form, made by `multi_head`."""

    query: Array  # Q^{hia}
    key: Array  # K^{hja}
    value: Array  # V^{hjb}
    scores: Array  # S^{hij}
    weights: Array  # A^{hij}
    heads: Array  # O^{hib}
    contributions: Array  # O^{hib} W_O^{hbc} of each head, (..., H, T, M); they sum to the output
    output: Array  # Output^{ic}


def multi_head(
    hidden: ArrayLike,
    query_weight: ArrayLike,
    key_weight: ArrayLike,
    value_weight: ArrayLike,
    output_weight: ArrayLike,
    *,
    source: ArrayLike | None = None,
    **options: ArrayLike,
) -> HeadSteps:
    """Let several heads attend, each with projections of its own, and add up what they say.

    Q^{hia} = sum_b X^{ib} W_Q^{hba},  K^{hja} = sum_b Y^{jb} W_K^{hba},  V^{hjb} = sum_c Y^{jc} W_V^{hcb}
    O^{hib} = sum_j A^{hij} V^{hjb},  Output^{ic} = sum_hb O^{hib} W_O^{hbc}

    Heads are never joined side by side: the sum over h and b is what joining and projecting computes.

    Args:
        hidden: X, `(..., T, M)`: what asks.
        query_weight: W_Q, `(H, M, D)`.
        key_weight: W_K, `(H, M, D)`.
        value_weight: W_V, `(H, M, E)`.
        output_weight: W_O, `(H, E, M)`.
        source: Y, `(..., S, M)`: what is asked; None means X itself.
        **options: what `attention_steps` takes beside query, key and value.

    Returns:
        `HeadSteps`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.theory import steps
        >>> weight = jnp.ones((2, 4, 3))
        >>> heads = steps.multi_head(jnp.ones((5, 4)), weight, weight, weight, jnp.ones((2, 3, 4)))
        >>> heads.weights.shape, heads.output.shape
        ((2, 5, 5), (5, 4))

    Reference: Vaswani et al., 2017, section 3.2.2; with one tensor per projection instead of one matrix per
    head.
    """
    source = hidden if source is None else source
    query = _contract("...ib,hba->...hia", hidden, query_weight)
    key = _contract("...jb,hba->...hja", source, key_weight)
    value = _contract("...jc,hcb->...hjb", source, value_weight)
    steps = attention_steps(query, key, value, **options)
    contributions = _contract("...hib,hbc->...hic", steps.output, output_weight)
    output = contributions.sum(-3)
    return HeadSteps(query, key, value, steps.scores, steps.weights, steps.output, contributions, output)


def spread(name: str, array: Array, leading: tuple[int, ...]) -> Array:
    """Give an array all leading axes; a head shared by a group is repeated for each of the group.

    Args:
        name: of the argument, for errors.
        array: `(..., length, width)`.
        leading: the axes to give it, heads last.

    Returns:
        `(*leading, length, width)`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.theory import steps
        >>> steps.spread("key", jnp.ones((2, 5, 3)), (7, 4)).shape
        (7, 4, 5, 3)
    """
    if array.ndim > 2 and leading and 1 < array.shape[-3] < leading[-1]:
        array = jnp.repeat(array, leading[-1] // array.shape[-3], axis=-3)
    return operands.broadcast(name, array, (*leading, *array.shape[-2:]))


def _leading(query: Array, key: Array, value: Array) -> tuple[int, ...]:
    heads = max([array.shape[-3] for array in (query, key, value) if array.ndim > 2], default=1)
    shapes = {}
    for name, array in (("query", query), ("key", key), ("value", value)):
        shape = array.shape[:-2]
        if shape and heads % max(shape[-1], 1):
            raise ValueError(f"{name}: expected heads that divide {heads}, got shape {array.shape}")
        shapes[name] = (*shape[:-1], 1 if shape[-1] == 1 else heads) if shape else ()
    return broadcast_named(**shapes)
