"""Kernels to be checked: right ones of other conventions, and ones with a mistake each, in NumPy and JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def attention(
    query, key, value, *, mask=None, bias=None, causal=False, window=None, lengths=None, segments=None,
    indices=None, softcap=None, scale=None, sinks=None, offset=None, lse=False, fault="",
):  # fmt: skip
    """Compute attention of (B, H, T, D) in NumPy, with a fault."""
    given, (B, H, T, D), S, K = query, query.shape, key.shape[2], key.shape[1]
    kind = query.dtype
    dtype = np.float64 if kind == np.float64 and fault != "float64 in float32" else np.float32
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    if fault == "writes to its inputs":
        given *= 2
    if fault == "bfloat16 products":
        query, key, value = (np.asarray(jnp.asarray(x, jnp.bfloat16), dtype) for x in (query, key, value))
    block = 32
    if fault == "a last block of zeros" and S % block:
        key, value = (np.pad(x, [(0, 0), (0, 0), (0, -S % block), (0, 0)]) for x in (key, value))
    if fault == "key heads in turn":
        key, value = (np.tile(x, (1, H // K, 1, 1)) for x in (key, value))
    elif fault == "the first key head":
        key, value = (np.repeat(x[:, :1], H, 1) for x in (key, value))
    else:
        key, value = (np.repeat(x, H // K, 1) for x in (key, value))
    scale = D**-0.5 if scale is None or fault == "scale ignored" else scale
    scale = scale**2 if fault == "scale twice" else scale
    scores = query @ key.swapaxes(-1, -2) * dtype(scale)
    if bias is not None and fault == "softcap after bias":
        scores = scores + bias
    if softcap is not None and fault != "softcap ignored":
        inner = scores / dtype(scale) if fault == "softcap before scale" else scores
        scores = dtype(softcap) * np.tanh(inner / dtype(softcap))
        scores = scores * dtype(scale) if fault == "softcap before scale" else scores
        scores = np.clip(inner, -softcap, softcap) if fault == "softcap clips" else scores
    if bias is not None and fault != "softcap after bias":
        scores = scores - bias if fault == "bias subtracted" else scores + bias
    row, column = np.arange(T)[:, None] + (offset or 0), np.arange(key.shape[2])[None]
    row = row + (S - T if fault == "bottom-right" and offset is None else 0)
    if fault == "offset subtracted" and offset:
        row = row - 2 * offset
    keep = np.ones((B, H, T, key.shape[2]), bool)
    if causal:
        keep &= column < row + {"causal hides itself": 0, "causal sees ahead": 2}.get(fault, 1)
    if window is not None:
        left, right = window
        left += {"window wide": 1, "window counts itself": -1}.get(fault, 0)
        right = 10**9 if fault == "window sees the future" else right
        keep &= (column >= row - left) & (column <= row + right)
    if lengths is not None:
        keep &= column < lengths[:, None, None, None] + (fault == "lengths one more")
    if segments is not None and fault != "segments ignored":
        ids = segments[:1] if fault == "segments of the first row" else segments
        keep &= ids[:, None, :, None] == ids[:, None, None, :]
    if indices is not None and fault != "indices ignored":
        indices = indices % S if fault == "-1 is the last key" else indices
        times = (indices[..., None] == np.arange(key.shape[2])).sum(-2)[:, None]
        keep &= times > 0
        scores = scores + np.log(np.maximum(times, 1)).astype(dtype) * (fault == "each listing counts")
    if mask is not None and mask.dtype != bool:
        raise TypeError("mask: expected booleans")
    if mask is not None and fault != "mask ignored":
        mask = mask[:, :1] if fault == "mask of the first head" else mask
        wide = np.ones((*mask.shape[:-1], key.shape[2]), bool)
        wide[..., : mask.shape[-1]] = ~mask if fault == "True hides" else mask
        keep &= wide
    if fault == "last block dropped" and block < S:
        keep &= column < S // block * block
    if bias is not None:
        keep[..., :S] &= np.broadcast_to(bias, (B, H, T, S)) != -np.inf
    scores = np.where(keep, scores, -np.inf)
    sink = np.full((H, 1, 1), -np.inf) if sinks is None or fault == "sinks ignored" else sinks[:, None, None]
    if fault == "a sink per block":
        sink = sink + np.log(-(-S // block))
    peak = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink.astype(dtype))
    peak = np.where(np.isfinite(peak) if fault == "NaN lost" else peak != -np.inf, peak, 0)
    shift = 0 if fault == "no maximum" else peak
    weights = np.exp(scores - shift)
    if fault == "exponentials of five digits":
        weights = weights * (1 + 1e-5 * np.sin(column)).astype(dtype)
    if fault == "NaN lost":
        weights = np.where(np.isnan(weights), 0, weights)
    total = weights.sum(-1, keepdims=True) + np.exp(sink.astype(dtype) - shift)
    if fault == "empty rows are means":
        weights = np.where(total == 0, 1, weights)
        total = np.where(total == 0, S, total)
    safe = total if fault == "empty rows are NaN" else np.where(total == 0, 1, total)
    weights = weights / (1 if fault == "not normalised" else safe)
    if fault != "masked NaN leaks":
        value = np.where(keep.any(-2)[..., None], value, 0)
    output = weights @ value
    if fault == "empty rows hold garbage":
        output = np.where(keep.any(-1)[..., None], output, 0.25)
    if fault == "last queries unwritten" and block < T:
        output = np.where(np.arange(T)[:, None] < T // block * block, output, 0)
    output = output.astype(kind if fault != "float32 for all" else np.float32)
    if fault == "integers":
        output = output.astype(np.int32)
    if fault == "another shape":
        output = output.swapaxes(1, 2)
    if fault == "NaN everywhere":
        output = np.full_like(output, np.nan)
    if fault == "random":
        output = output + np.random.default_rng().normal(size=output.shape).astype(kind) * 1e-9
    if not lse:
        return output
    logarithm = np.where(total > 0, np.log(np.where(total > 0, total, 1)) + peak, -np.inf)[..., 0]
    logarithm = {"lse in base 2": logarithm / np.log(2), "lse without maximum": logarithm - peak[..., 0]}.get(
        fault, logarithm
    )
    return output, logarithm.astype(kind if fault == "lse in the arrays' dtype" else dtype)


@functools.partial(jax.jit, static_argnames=("fault", "causal", "lse", "dropout", "softcap", "scale"))
def differentiable(
    query, key, value, *, mask=None, bias=None, causal=False, softcap=None, scale=None, sinks=None, lse=False,
    dropout=0.0, rng=None, fault="",
):  # fmt: skip
    """Compute attention of (B, H, T, D) in JAX, whose derivatives have a fault."""
    (B, H, T, D), S, K, kind = query.shape, key.shape[2], key.shape[1], query.dtype
    wide = jnp.float64 if kind == jnp.float64 else jnp.float32
    query, key, value = (x.astype(wide) for x in (query, key, value))
    stop = jax.lax.stop_gradient
    key, value = (jnp.repeat(x, H // K, 1) for x in (key, value))
    if fault == "shared heads averaged":
        key, value = (x * K / H + stop(x * (1 - K / H)) for x in (key, value))
    if fault in ("no query gradient", "no key gradient", "no value gradient"):
        part = lambda name, x: stop(x) if fault == f"no {name} gradient" else x
        query, key, value = part("query", query), part("key", key), part("value", value)
    factor = D**-0.5 if scale is None else scale
    products = jnp.einsum("bhtd,bhsd->bhts", query, key)
    scores = products * factor
    if fault == "gradient without scale":
        scores = products + stop(scores - products)
    if softcap is not None:
        capped = softcap * jnp.tanh(scores / softcap)
        scores = scores + stop(capped - scores) if fault == "gradient without softcap" else capped
    if bias is not None:
        scores = scores + (stop(bias) if fault == "no bias gradient" else bias).astype(wide)
    keep = jnp.ones((B, H, T, S), bool) if mask is None else jnp.broadcast_to(mask, (B, H, T, S))
    keep = keep & (jnp.arange(S) <= jnp.arange(T)[:, None]) if causal else keep
    keep = keep & (scores != -jnp.inf)
    if fault == "NaN in gradients of empty rows":
        scores = scores + jnp.where(keep, 0, -jnp.inf).astype(wide)
    scores = jnp.where(keep, scores, scores if fault == "NaN in gradients of empty rows" else -jnp.inf)
    sink = jnp.full((H, 1, 1), -jnp.inf, wide) if sinks is None else sinks.astype(wide)[:, None, None]
    sink = stop(sink) if fault == "no sink gradient" else sink
    peak = stop(jnp.maximum(scores.max(-1, keepdims=True), sink))
    base = jnp.where(peak == -jnp.inf, 0, peak)
    weights = jnp.where(keep, jnp.exp(jnp.where(keep, scores - base, 0)), 0)
    total = weights.sum(-1, keepdims=True) + jnp.exp(sink - base)
    total = jnp.where(total == 0, 1, total)
    log_total = jnp.where(peak == -jnp.inf, -jnp.inf, jnp.log(total) + base)
    weights = weights / total
    if fault == "NaN in gradients of empty rows":
        weights = jnp.where(keep.any(-1, keepdims=True), jax.nn.softmax(scores, -1), 0)
    if dropout:
        rate = dropout if fault == "the rate survives" else 1 - dropout
        survives = jax.random.bernoulli(rng, rate, weights.shape)
        grown = survives / rate
        dropped = weights * (survives if fault == "dropout does not grow" else grown)
        if fault == "dropout renormalised":
            dropped = dropped / dropped.sum(-1, keepdims=True)
        weights = weights + stop(dropped - weights) if fault == "gradient without dropout" else dropped
    output = jnp.einsum("bhts,bhse->bhte", weights, value).astype(kind)
    if not lse:
        return output
    return output, (stop(log_total) if fault == "lse stopped" else log_total)[..., 0]
