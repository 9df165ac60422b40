"""Linear attention and its gradients by the definition: one head, one token at a time, in a given dtype."""

import numpy as np

# Their order in calls and in gradients.
NAMES = ("query", "key", "value", "decay", "rate", "memory")


@np.errstate(invalid="ignore")  # products of a few numbers may raise the flag for lanes they do not use
def recurrence(
    query, key, value, decay=None, rate=None, memory=None, scale=None, normalise=False, dtype=np.float64
):
    """query (T, D), key (T, D), value (T, E), decay (T, D), rate (T,), memory (D, E): output, all states."""
    (T, D), E = query.shape, value.shape[-1]
    scale = dtype(1 / np.sqrt(D) if scale is None else scale)
    factors = np.ones((T, D), dtype) if decay is None else np.exp(decay)
    states = np.zeros((T + 1, D, E), dtype)
    sums = np.zeros((T + 1, D), dtype)
    if memory is not None:
        states[0] = memory
    output = np.zeros((T, E), dtype)
    for t in range(T):
        kept = factors[t][:, None] * states[t]
        written = value[t] if rate is None else rate[t] * (value[t] - key[t] @ kept)
        states[t + 1] = kept + np.outer(key[t], written)
        sums[t + 1] = factors[t] * sums[t] + key[t]
        output[t] = query[t] @ states[t + 1]
        total = query[t] @ sums[t + 1]
        if normalise:
            output[t] = output[t] / total if total else 0
        else:
            output[t] = scale * output[t]
    return output, states, sums


@np.errstate(invalid="ignore")  # products of a few numbers may raise the flag for lanes they do not use
def pullback(
    cotangent, query, key, value, decay=None, rate=None, memory=None, normalise=False, dtype=np.float64
):
    """Gradients of sum(output * cotangent), derived by hand, from the last token to the first."""
    (T, D), E = query.shape, value.shape[-1]
    scale = dtype(1 if normalise else 1 / np.sqrt(D))
    factors = np.ones((T, D), dtype) if decay is None else np.exp(decay)
    _, states, sums = recurrence(
        query, key, value, decay, rate, memory, scale=1, normalise=normalise, dtype=dtype
    )
    grads = {name: np.zeros(shape, dtype) for name, shape in zip(
        NAMES, ((T, D), (T, D), (T, E), (T, D), (T,), (D, E)), strict=True
    )}  # fmt: skip
    d_state, d_sum = np.zeros((D, E), dtype), np.zeros(D, dtype)
    for t in reversed(range(T)):
        d_read, d_total = scale * cotangent[t], dtype(0)
        if normalise:
            total = query[t] @ sums[t + 1]
            d_read = cotangent[t] / total
            d_total = -(query[t] @ states[t + 1]) @ cotangent[t] / total**2
        grads["query"][t] = states[t + 1] @ d_read + d_total * sums[t + 1]
        d_state = d_state + np.outer(query[t], d_read)
        d_sum = d_sum + d_total * query[t]
        kept = factors[t][:, None] * states[t]
        missing = value[t] if rate is None else value[t] - key[t] @ kept
        strength = dtype(1) if rate is None else rate[t]
        d_missing = strength * (key[t] @ d_state)
        grads["key"][t] = strength * d_state @ missing + d_sum
        grads["value"][t] = d_missing
        if rate is not None:
            grads["rate"][t] = (key[t] @ d_state) @ missing
            grads["key"][t] -= kept @ d_missing
            d_state = d_state - np.outer(key[t], d_missing)
        grads["decay"][t] = (d_state * kept).sum(-1) + d_sum * factors[t] * sums[t]
        d_state, d_sum = factors[t][:, None] * d_state, factors[t] * d_sum
    grads["memory"] = d_state
    return grads


def batched(arrays, cotangent=None, normalise=False, dtype=np.float64):
    """(B, H, T, D) queries on (B, K, ...) heads: output, last state, gradients summed to the arrays' shapes.

    `arrays` goes by name; axes of decay (B, K, T[, D]), rate (B, K, T) and memory (B, K, D, E) may be 1.
    """
    given = {name: np.asarray(array).astype(dtype) for name, array in arrays.items() if array is not None}
    (B, H, T, D), (K, E) = given["query"].shape, (given["key"].shape[1], given["value"].shape[-1])
    per_token = "decay" in given and given["decay"].ndim == 3
    shapes = {"query": (B, H, T, D), "key": (B, K, T, D), "value": (B, K, T, E), "decay": (B, K, T, D)}
    shapes |= {"rate": (B, K, T), "memory": (B, K, D, E)}
    full = dict(given)
    if per_token:
        full["decay"] = given["decay"][..., None]
    own = {name: array.shape for name, array in full.items()}
    full = {name: np.broadcast_to(array, shapes[name]) for name, array in full.items()}
    grads = {name: np.zeros(shapes[name], dtype) for name in full}
    output, memory = np.zeros((B, H, T, E), dtype), np.zeros((B, K, D, E), dtype)
    for b, h in np.ndindex(B, H):
        k = h * K // H
        one = {name: array[b, h if name == "query" else k] for name, array in full.items()}
        output[b, h], states, _ = recurrence(**one, normalise=normalise, dtype=dtype)
        memory[b, k] = states[-1]
        if cotangent is not None:
            cot = np.asarray(cotangent[b, h]).astype(dtype)
            found = pullback(cot, **one, normalise=normalise, dtype=dtype)
            for name in full:
                grads[name][b, h if name == "query" else k] += found[name]
    for name, shape in own.items():
        axes = tuple(a for a, n in enumerate(shape) if n == 1 < shapes[name][a])
        grads[name] = grads[name].sum(axes, keepdims=True)
    if per_token:
        grads["decay"] = grads["decay"][..., 0]
    return output, memory, grads
