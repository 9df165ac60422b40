"""Truth: attention and its gradients in float64 NumPy, row by row, from the definition."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Truth:
    """Everything `attend` can return, and the gradients of `sum(output * cotangent)`."""

    output: np.ndarray
    weights: np.ndarray
    scores: np.ndarray
    lse: np.ndarray
    max_score: np.ndarray
    argmax: np.ndarray
    entropy: np.ndarray
    d_query: np.ndarray
    d_key: np.ndarray
    d_value: np.ndarray
    d_bias: np.ndarray


def attention(query, key, value, keep=None, bias=None, scale=None, cotangent=None) -> Truth:
    """One head at a time, one query at a time, only over the keys it may attend to."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    (T, D), (S, E) = query.shape, value.shape
    scale = 1 / np.sqrt(D) if scale is None else float(scale)
    keep = np.ones((T, S), bool) if keep is None else np.array(np.broadcast_to(keep, (T, S)))
    bias = np.zeros((T, S)) if bias is None else np.array(np.broadcast_to(bias, (T, S)), np.float64)
    keep &= bias != -np.inf
    cotangent = np.ones((T, E)) if cotangent is None else np.asarray(cotangent, np.float64)

    truth = Truth(
        np.zeros((T, E)),
        np.zeros((T, S)),
        np.full((T, S), -np.inf),
        np.full(T, -np.inf),
        np.full(T, -np.inf),
        np.full(T, -1),
        np.zeros(T),
        np.zeros((T, D)),
        np.zeros((S, D)),
        np.zeros((S, E)),
        np.zeros((T, S)),
    )
    for t in range(T):
        kept = np.flatnonzero(keep[t])
        if not kept.size:
            continue
        s = scale * (key[kept] @ query[t]) + bias[t, kept]
        p = np.exp(s - s.max())
        p /= p.sum()
        truth.scores[t, kept], truth.weights[t, kept] = s, p
        truth.output[t] = p @ value[kept]
        truth.lse[t] = s.max() + np.log(np.exp(s - s.max()).sum())
        truth.max_score[t], truth.argmax[t] = s.max(), kept[np.argmax(s)]
        truth.entropy[t] = -(p[p > 0] * np.log(p[p > 0])).sum()
        d_p = value[kept] @ cotangent[t]
        d_s = p * (d_p - p @ d_p)
        truth.d_value[kept] += np.outer(p, cotangent[t])
        truth.d_bias[t, kept] = d_s
        truth.d_query[t] = scale * (d_s @ key[kept])
        truth.d_key[kept] += scale * np.outer(d_s, query[t])
    return truth


def batched(query, key, value, keep=None, bias=None, scale=None, cotangent=None) -> Truth:
    """Any leading axes, heads last and possibly grouped; gradients are summed back to the inputs' shapes."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    rank = max(x.ndim for x in (query, key, value))
    inputs = [x.reshape((1,) * (max(rank, 3) - x.ndim) + x.shape) for x in (query, key, value)]
    key_heads = max(inputs[1].shape[-3], inputs[2].shape[-3])
    heads = max(inputs[0].shape[-3], key_heads)
    full = (*np.broadcast_shapes(*(x.shape[:-3] for x in inputs)), heads)
    T, S, E = query.shape[-2], key.shape[-2], value.shape[-1]
    out_shape = (*full, T, E)
    cotangent = np.ones(out_shape) if cotangent is None else np.asarray(cotangent).reshape(out_shape)
    keep = np.broadcast_to(True if keep is None else keep, (*full, T, S))
    bias_full = np.broadcast_to(0.0 if bias is None else np.asarray(bias, np.float64), (*full, T, S))

    def source(array, index):
        """Where the array's entry for this leading index is; grouped heads share a key head."""
        *batch, head = index
        own = array.shape[-3]
        head = head if own == heads else head * own // heads
        return (*(0 if n == 1 else i for n, i in zip(array.shape[:-3], batch, strict=True)), head)

    grads = [np.zeros(x.shape) for x in inputs]
    parts, d_bias = {}, np.zeros(bias_full.shape)
    for index in np.ndindex(*full):
        places = [source(x, index) for x in inputs]
        one = attention(
            *(x[place] for x, place in zip(inputs, places, strict=True)),
            keep[index],
            bias_full[index],
            scale,
            cotangent[index],
        )
        parts[index] = one
        for grad, place, own in zip(grads, places, (one.d_query, one.d_key, one.d_value), strict=True):
            grad[place] += own
        d_bias[index] = one.d_bias
    leading = full if rank > 2 else ()

    def gather(name):
        first = getattr(next(iter(parts.values())), name)
        stacked = np.array([getattr(parts[i], name) for i in np.ndindex(*full)])
        return stacked.reshape(*leading, *first.shape)

    names = ("output", "weights", "scores", "lse", "max_score", "argmax", "entropy")
    shaped = [g.reshape(x.shape) for g, x in zip(grads, (query, key, value), strict=True)]
    return Truth(*(gather(name) for name in names), *shaped, reduce_to(d_bias, np.shape(bias)))


def reduce_to(array, shape):
    """Sum the axes along which `shape` was broadcast."""
    array = array.sum(tuple(range(array.ndim - len(shape))))
    axes = tuple(a for a, n in enumerate(shape) if n == 1 < array.shape[a])
    return array.sum(axes, keepdims=True)
