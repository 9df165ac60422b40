"""The short convolution before the delta rule: each feature of a token with those of the tokens before it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.axes import Array, Float
from regard.engine.dispatch.placement import divided_here


def convolve(
    features: Float[Array, "*B T C"],
    taps: Float[Array, "W C"],
    before: Float[Array, "*B N C"] | None,
    segments: Any,
) -> Float[Array, "*B T C"]:
    """Weigh each feature of a token and of those before it in its document.

    output_tc = sum_n taps_nc features_(t - W + 1 + n)c; `before` holds the N = W - 1 rows before the first,
    which inside `jax.shard_map` that divides the sequence the device before this one has.
    """
    if before is not None:
        _demand_no_loss(before, features)
    T, reach = features.shape[-2], taps.shape[0] - 1
    axes = divided_here() if before is None else ()
    if axes:
        before = _fetch_last(features, reach, axes, axis=features.ndim - 2)
    padding = [(0, 0)] * (features.ndim - 2) + [(reach, 0), (0, 0)]
    rows = jnp.pad(features, padding) if before is None else jnp.concatenate([before, features], axis=-2)
    rows = rows.astype(features.dtype)
    document = None
    if segments is not None:
        # The first token is of the document that `before` ends with.
        if axes:
            earlier = _fetch_last(segments, reach, axes, axis=segments.ndim - 1)
            segments = jnp.concatenate([earlier, segments], axis=-1)
        document = _number_documents(segments, 0 if axes else reach)
    output = jnp.zeros_like(features)
    for tap in range(reach + 1):
        read = jax.lax.slice_in_dim(rows, tap, tap + T, axis=-2)
        if document is not None:
            is_same = jax.lax.slice_in_dim(document, tap, tap + T, axis=-1) == document[..., reach:]
            read = jnp.where(is_same[..., None], read, jnp.zeros_like(read))
        # Not taps[tap], which JAX refuses of an array on a mesh that `shard_map` makes manual.
        weight = jax.lax.index_in_dim(taps, tap, keepdims=False)
        output = output + read * jnp.expand_dims(weight, range(read.ndim - 1))
    return output


def _fetch_last(array: Any, count: int, axes: tuple[str, ...], *, axis: int) -> Array:
    """Return the last rows of the device before this one; zeros on the first."""
    length = array.shape[axis]
    if length < count:
        raise ValueError(
            f"x: expected at least {count} tokens on each device, as far as the convolution reaches back;"
            f" got {length}"
        )
    last = jax.lax.slice_in_dim(jnp.asarray(array), length - count, length, axis=axis)
    return jax.lax.ppermute(last, axes, [(i, i + 1) for i in range(jax.lax.axis_size(axes) - 1)])


def _number_documents(segments: Any, reach: int) -> Array:
    """Count documents from 0, in the first of which `reach` rows come before the first token."""
    changes = jnp.diff(segments, axis=-1, prepend=segments[..., :1]) != 0
    document = jnp.cumsum(changes, axis=-1, dtype=jnp.int32)
    return jnp.pad(document, [(0, 0)] * (document.ndim - 1) + [(reach, 0)])


def keep_newest(before: Array, features: Array, added: Array, segments: Any = None) -> Array:
    """Return the last rows of `before` with `added` rows of features behind them, as many as there were.

    Rows of documents that have ended are zeros, which the convolution reads before a document begins.
    """
    _demand_no_loss(before, features)
    rows = jnp.concatenate([before, features.astype(before.dtype)], axis=-2)
    reach = before.shape[-2]
    newest = added[:, None] + jnp.arange(reach, dtype=jnp.int32)[None]
    recent = jnp.take_along_axis(rows, newest[..., None], axis=-2)
    if segments is None:
        return recent
    document = jnp.broadcast_to(_number_documents(segments, reach), rows.shape[:-1])
    last = jnp.take_along_axis(document, added[:, None] + (reach - 1), axis=-1)
    is_same = jnp.take_along_axis(document, newest, axis=-1) == last
    return jnp.where(is_same[..., None], recent, jnp.zeros_like(recent))


def _demand_no_loss(before: Array, features: Array) -> None:
    """Raise where a cache would hold features in fewer digits than they have."""
    if not np.can_cast(features.dtype, before.dtype):
        raise TypeError(
            f"x: expected what {before.dtype}, the cache's dtype, holds without loss; the layer makes of it"
            f" {features.dtype}. Cast it, x.astype({str(before.dtype)!r}), or the layer's parameters"
        )
