"""The ONNX operator RotaryEmbedding."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from regard.axes import Array, ArrayLike
from regard.interop.onnx_tensors import join_heads, split_heads, tensor
from regard.positions.rotation import rotate


def rotary_embedding(
    features: ArrayLike,
    cos_cache: ArrayLike,
    sin_cache: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: bool | int = False,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """Compute the ONNX operator RotaryEmbedding (opset 23) with `regard.positions.rotate`.

    (a, b) -> (a cos - b sin, a sin + b cos) for each pair of features

    Args:
        features: floating-point, `(batch, num_heads, T, D)`, or packed `(batch, T, num_heads * D)`.
        cos_cache: floating-point cosines: with position_ids a table `(positions, F)`, else `(batch, T, F)`;
            F is half of what is turned.
        sin_cache: sines, of the same shape.
        position_ids: integers `(batch, T)`, rows of the tables; may be traced. A row beyond the table gives
            NaN. None means that the caches are per token.
        interleaved: nonzero pairs feature 2i with 2i + 1, zero i with i + F.
        num_heads: needed where the features are packed; None or their axis elsewhere.
        rotary_embedding_dim: how many features of a head, from the first, are turned; 0 means all.

    Returns:
        The turned features, in their shape and dtype; the turn is computed in float32 at least.

    Raises:
        TypeError: features or caches that are not of floating point, positions that are not integers.
        ValueError: shapes that do not fit, among them caches that do not hold half of what is turned.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.interop import onnx_ops
        >>> x, angle = jnp.ones((1, 1, 2, 2)), jnp.asarray([[0.0], [jnp.pi / 2]])
        >>> turned = onnx_ops.rotary_embedding(x, jnp.cos(angle), jnp.sin(angle), [[0, 1]])
        >>> [f"{feature:.2f}" for feature in turned.ravel()]
        ['1.00', '1.00', '-1.00', '1.00']

    Reference: ONNX operators, RotaryEmbedding, version 23; Su et al., "RoFormer", 2021, section 3.2.2.
    """
    features = tensor("features", features, (3, 4))
    packed = features.ndim == 3
    features = split_heads("features", features, "num_heads", num_heads or None)
    batch, _, length, width = features.shape
    turned = rotary_embedding_dim or width
    caches = []
    for name, cache in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
        caches.append(_per_token(name, cache, position_ids, (batch, length)))
        if 2 * caches[-1].shape[-1] != turned:
            raise ValueError(
                f"{name}: expected half of the {turned} features that are turned on the last axis, got"
                f" {caches[-1].shape[-1]}"
            )
    result = rotate(features, *caches, interleaved=bool(interleaved))
    return join_heads(result) if packed else result


def _per_token(name: str, cache: ArrayLike, position_ids: ArrayLike | None, rows: tuple[int, int]) -> Array:
    """Return the cosines or sines of each token, (batch, T, F)."""
    array = tensor(name, cache, (3,) if position_ids is None else (2,))
    array = array.astype(np.promote_types(array.dtype, np.float32))
    if position_ids is None:
        if array.shape[:2] != rows:
            raise ValueError(f"{name}: expected one row per token, {rows}; got shape {array.shape}")
        return array
    index = jnp.asarray(position_ids)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"position_ids: expected integers, got {index.dtype}")
    if index.shape != rows:
        raise ValueError(f"position_ids: expected one row of the table per token, {rows}; got {index.shape}")
    return jnp.take(array, index, axis=0, mode="fill")
