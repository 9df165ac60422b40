"""Attention on one page: every line of its definition, in NumPy, in whatever precision the arrays have.

`regard.conformance` holds functions to it in float64, or in longdouble where they compute in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
LineHook = Callable[[str, Array], Array]

LINES = {
    "products": "P = Q K^T: query head h meets key head h // (H / K)",
    "scaled": "X = scale P: 1 / sqrt(D) unless a scale is given",
    "capped": "C = cap tanh(X / cap)",
    "biased": "S = C + bias",
    "masked": "S = -inf where the query may not attend to the key, or the bias is -inf",
    "weights": "A = e^(S - m) / (sum_j e^(S - m) + e^(sink - m)), m the largest; 0 in an empty row",
    "lse": "L = m + log(sum_j e^(S - m) + e^(sink - m)); -inf in an empty row",
    "dropped": "A' = A survives / (1 - rate)",
    "output": "O = A' V",
    "d_value": "dV = A'^T dO, summed over the heads of a group",
    "d_weights": "dA = dO V^T survives / (1 - rate)",
    "d_scores": "dS = A (dA - sum_j A dA + dL)",
    "d_sinks": "dsink = sum_i A_sink (dL - sum_j A dA)",
    "d_bias": "dbias = dS, summed over what broadcasts",
    "d_scaled": "dX = dS (1 - (C / cap)^2)",
    "d_products": "dQ = scale dX K and dK = scale dX^T Q, summed over the heads of a group",
}
"""The lines of the definition by name: forward, then back from dO and dL."""


@dataclass(frozen=True)
class Forward:
    """The results of the lines of the forward pass; made by `attention`."""

    query: Array
    key: Array
    value: Array
    scale: float
    softcap: float | None
    survivors: Array
    capped: Array
    keep: Array
    weights: Array
    sink_weight: Array
    lse: Array
    dropped: Array
    output: Array


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Array | None = None,
    keep: Array | None = None,
    sinks: Array | None = None,
    survivors: Array | None = None,
    step: LineHook = lambda line, array: array,
) -> Forward:
    """Compute attention line by line, as `LINES` has it.

    Args:
        query: Q, `(B, H, T, D)`.
        key: K, `(B, K, S, D)`; K divides H.
        value: V, `(B, K, S, E)`.
        scale: a number; None means 1 / sqrt(D).
        softcap: the cap; None caps nothing.
        bias: added to the scores, broadcasts to `(B, H, T, S)`; -inf removes a pair. None means 0.
        keep: True where a query may attend to a key, broadcasts to `(B, H, T, S)`. None keeps all.
        sinks: one logit per head, `(H,)`. None means none.
        survivors: the factor of dropout on each weight: 0, or 1 / (1 - rate). None means 1.
        step: given a line's name and its result, returns what goes on: a place to round, or to look.

    Returns:
        `Forward`; arrays in the dtype of query.

    Example:
        >>> import numpy as np
        >>> from regard.theory import definition
        >>> x = np.eye(2)[None, None]
        >>> definition.attention(x, x, x, keep=np.tri(2, dtype=bool)).weights[0, 0].round(2).tolist()
        [[1.0, 0.0], [0.33, 0.67]]
    """
    dtype, heads = query.dtype, query.shape[-3]
    shared = heads // max(key.shape[-3], 1)
    key, value = np.repeat(key, shared, -3), np.repeat(value, heads // max(value.shape[-3], 1), -3)
    pairs = (*query.shape[:-1], key.shape[-2])
    allowed = np.broadcast_to(True if keep is None else keep, pairs)
    added = np.zeros((), dtype) if bias is None else bias.astype(dtype)
    allowed = allowed & (added != -np.inf)
    factor = 1 / np.sqrt(dtype.type(query.shape[-1])) if scale is None else dtype.type(scale)

    products = step("products", query @ np.swapaxes(key, -1, -2))
    scaled = step("scaled", factor * products)
    capped = scaled if softcap is None else dtype.type(softcap) * np.tanh(scaled / dtype.type(softcap))
    capped = step("capped", capped)
    biased = step("biased", capped + np.where(allowed, added, 0))
    masked = step("masked", np.where(allowed, biased, -np.inf).astype(dtype))

    sink = np.full((heads, 1, 1), -np.inf, dtype) if sinks is None else sinks.astype(dtype)[:, None, None]
    largest = np.maximum(masked.max(-1, keepdims=True, initial=-np.inf), sink)
    alive = largest > -np.inf
    peak = np.where(alive, largest, 0)
    exponentials, exponential = np.exp(masked - peak), np.exp(sink - peak)
    total = np.where(alive, exponentials.sum(-1, keepdims=True) + exponential, 1)
    weights = step("weights", exponentials / total)
    lse = step("lse", np.where(alive, peak + np.log(total), -np.inf))
    factors = np.ones((), dtype) if survivors is None else survivors.astype(dtype)
    dropped = step("dropped", weights * factors)
    output = step("output", dropped @ value)
    return Forward(
        query, key, value, factor, softcap, factors, capped, allowed, weights, exponential / total,
        lse[..., 0], dropped, output,
    )  # fmt: skip


def gradients(
    forward: Forward, d_output: Array, d_lse: Array | None = None, step: LineHook = lambda line, array: array
) -> dict[str, Array]:
    """Go back line by line, from gradients of output and lse to those of the arguments.

    Args:
        forward: what `attention` returned.
        d_output: dO, `(B, H, T, E)`.
        d_lse: dL, `(B, H, T)`, not read in empty rows. None means 0.
        step: as in `attention`.

    Returns:
        Gradients of query, key and value with all H heads, of bias `(B, H, T, S)` and of sinks
        `(B, H, T)`: a caller sums what was shared.

    Example:
        >>> import numpy as np
        >>> from regard.theory import definition
        >>> x = np.eye(2)[None, None]
        >>> back = definition.gradients(definition.attention(x, x, x), np.ones_like(x))
        >>> back["query"].tolist()  # the weights of a row sum to 1: the sum of this output cannot change
        [[[[0.0, 0.0], [0.0, 0.0]]]]
    """
    d_log = np.zeros((), d_output.dtype) if d_lse is None else np.where(np.isneginf(forward.lse), 0, d_lse)
    d_log = d_log[..., None] if d_log.ndim else d_log
    d_value = step("d_value", np.swapaxes(forward.dropped, -1, -2) @ d_output)
    d_weights = step("d_weights", forward.survivors * (d_output @ np.swapaxes(forward.value, -1, -2)))
    mean = (forward.weights * d_weights).sum(-1, keepdims=True)
    d_scores = step("d_scores", forward.weights * (d_weights - mean + d_log))
    d_sinks = step("d_sinks", forward.sink_weight * (d_log - mean))
    slope = 1 if forward.softcap is None else 1 - (forward.capped / forward.softcap) ** 2
    d_scaled = step("d_scaled", d_scores * slope)
    return {
        "query": step("d_products", forward.scale * (d_scaled @ forward.key)),
        "key": step("d_products", forward.scale * (np.swapaxes(d_scaled, -1, -2) @ forward.query)),
        "value": d_value,
        "bias": step("d_bias", d_scores),
        "sinks": d_sinks[..., 0],
    }
