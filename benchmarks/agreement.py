"""Comparison of a peer's results with the definition in float32, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Case, Inputs

CELLS = 1 << 25  # scores at a time
# The largest error of a row, relative to the row's size: a wrong mask gives errors near 1.
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1}
TOLERANCE_TF32 = 5e-2  # float32 products of accelerators round their factors
NAMES = ("output", "query's gradient", "key's gradient", "value's gradient")


def compute_reference(case: Case, inputs: Inputs) -> tuple[np.ndarray, ...]:
    """Compute the definition in float32 on the rounded inputs, a few queries at a time."""
    arrays = [inputs.query, inputs.key, inputs.value]
    query, key, value = (jnp.asarray(array, case.dtype).astype(jnp.float32) for array in arrays)
    cotangent = None
    if inputs.cotangent is not None:
        cotangent = jnp.asarray(inputs.cotangent, case.dtype).astype(jnp.float32)
    keep, sinks = case.make_dense_mask(), case.make_sinks()
    more = None if sinks is None else jnp.asarray(sinks), case.cap, case.aux
    num_queries, num_keys = case.lengths
    rows = max(CELLS // (case.query[0] * case.query[1] * num_keys), 1)
    outputs, query_grads = [], []
    key_grad, value_grad = jnp.zeros_like(key), jnp.zeros_like(value)
    for start in range(0, num_queries, rows):
        part = slice(start, start + rows)
        mask = None if keep is None else jnp.asarray(keep[part])
        if cotangent is None:
            outputs.append(np.asarray(_define(query[..., part, :], key, value, mask, *more)))
            continue
        arrays = query[..., part, :], key, value, mask, cotangent[..., part, :]
        output, grads = _define_both(*arrays, *more)
        outputs.append(np.asarray(output))
        query_grads.append(np.asarray(grads[0]))
        key_grad, value_grad = key_grad + grads[1], value_grad + grads[2]
    output = np.concatenate(outputs, -2)
    if cotangent is None:
        return (output,)
    return output, np.concatenate(query_grads, -2), np.asarray(key_grad), np.asarray(value_grad)


@partial(jax.jit, static_argnames=("cap", "aux"))
def _define(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keep: jax.Array | None,
    sinks: jax.Array | None,
    cap: float | None,
    aux: tuple[str, ...],
) -> jax.Array:
    """Compute softmax(query key^T / sqrt(D)) value, with the query heads of a key head side by side."""
    batch, heads, rows, width = query.shape
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], rows, width)
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bkgtd,bksd->bkgts", grouped, key) / np.float32(np.sqrt(width))
        if cap is not None:
            scores = cap * jnp.tanh(scores / cap)
        if keep is not None:
            scores = jnp.where(keep[None, None, None], scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        if sinks is not None:
            lse = jnp.logaddexp(lse, sinks.reshape((*grouped.shape[1:3], 1, 1)))
        weights = jnp.exp(scores - lse)
        output = jnp.einsum("bkgts,bkse->bkgte", weights, value)
        if aux:
            stats = {
                "lse": lse,
                "entropy": (weights * jnp.where(weights > 0, lse - scores, 0)).sum(-1, keepdims=True),
            }
            output = output + sum(stats[name] for name in aux)
    return output.reshape(batch, heads, rows, value.shape[-1])


@partial(jax.jit, static_argnames=("cap", "aux"))
def _define_both(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    keep: jax.Array | None,
    cotangent: jax.Array,
    sinks: jax.Array | None,
    cap: float | None,
    aux: tuple[str, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    output, vjp = jax.vjp(lambda *arrays: _define(*arrays, keep, sinks, cap, aux), query, key, value)
    return output, vjp(cotangent)


def largest_error(results: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> tuple[float, str]:
    """Return the largest error of a row relative to its size, or to a usual one, and the array with it."""
    worst, place = 0.0, NAMES[0]
    if len(results) != len(reference):
        return float("inf"), f"{len(results)} results instead of {len(reference)}"
    for name, result, expected in zip(NAMES, results, reference, strict=False):
        if result.shape != expected.shape:
            return float("inf"), f"{name} of shape {result.shape} instead of {expected.shape}"
        sizes = np.linalg.norm(expected, axis=-1)
        sizes = np.maximum(sizes, np.median(sizes))
        errors = np.linalg.norm(result - expected, axis=-1) / np.where(sizes > 0, sizes, 1)
        error = float(errors.max(initial=0)) if np.isfinite(errors).all() else float("inf")
        if error > worst:
            worst, place = error, name
    return worst, place


def describe_disagreement(
    case: Case, results: Sequence[np.ndarray], reference: Sequence[np.ndarray]
) -> str | None:
    """Return a sentence about results that are not what was asked for, or None."""
    tolerance = TOLERANCE[case.dtype]
    if case.dtype == "float32" and jax.default_backend() != "cpu":
        tolerance = TOLERANCE_TF32
    error, place = largest_error(results, reference)
    return None if error <= tolerance else f"{place} is off by {error:.2g} of a row's size"
