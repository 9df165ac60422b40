"""Several heads compared: similarity, focus, rank, and what a stack of them passes on."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from functools import reduce
from typing import Any

import jax.numpy as jnp

from regard.arguments import read_number
from regard.axes import Array, ArrayLike
from regard.theory import operands
from regard.theory.gibbs import entropy_nats as _entropy
from regard.theory.notation import contract as _contract


def cosine_similarity(weights: ArrayLike) -> Array:
    """Compare the weights of every two heads as vectors.

    c_gh = sum_ts A_gts A_hts / (|A_g| |A_h|)

    Args:
        weights: A, `(..., H, T, S)`.

    Returns:
        `(..., H, H)`, between 0 and 1 for weights; 0 beside a head without any weight.

    Example:
        >>> from regard.theory import heads
        >>> heads.cosine_similarity([[[1.0, 0.0]], [[0.0, 1.0]]]).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    weights = _weights(weights)
    length = jnp.sqrt(jnp.sum(weights**2, (-1, -2), keepdims=True))
    unit = weights / jnp.where(length > 0, length, 1)
    return _contract("...gts,...hts->...gh", unit, unit)


def jensen_shannon(weights: ArrayLike) -> Array:
    """Measure how differently every two heads distribute their attention, in nats.

    JS_gh = mean_t (H((A_gt + A_ht) / 2) - (H(A_gt) + H(A_ht)) / 2),  over rows where both heads attend

    Args:
        weights: A, `(..., H, T, S)`, rows that sum to 1 or are 0.

    Returns:
        `(..., H, H)`, between 0, alike, and log 2, nothing in common; 0 where there is no such row.

    Example:
        >>> from regard.theory import heads
        >>> divergence = heads.jensen_shannon([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> (divergence / divergence.max()).tolist()
        [[0.0, 1.0], [1.0, 0.0]]

    Reference: Lin, "Divergence measures based on the Shannon entropy", 1991, section 4.
    """
    weights = _weights(weights)
    alive = weights.sum(-1) != 0  # what is no number stays none
    both = alive[..., :, None, :] & alive[..., None, :, :]
    entropies = _entropy(weights)
    mixed = _entropy((weights[..., :, None, :, :] + weights[..., None, :, :, :]) / 2)
    divergence = mixed - (entropies[..., :, None, :] + entropies[..., None, :, :]) / 2
    # Rounding could make the divergence of a head from itself negative.
    return _mean(jnp.maximum(divergence, 0), both)


def diversity(weights: ArrayLike) -> Array:
    """Say in one number how much heads differ.

    diversity = 1 - mean_(g != h) c_gh,  c as in `cosine_similarity`

    Args:
        weights: A, `(..., H, T, S)`.

    Returns:
        `(...)`, between 0, all alike, and 1; 0 for one head.

    Example:
        >>> from regard.theory import heads
        >>> float(heads.diversity([[[1.0, 0.0]], [[0.0, 1.0]]]))
        1.0
    """
    alike = cosine_similarity(weights)
    count = alike.shape[-1]
    apart = jnp.where(operands.diagonal(alike.shape), 0, 1 - alike)
    return apart.sum((-1, -2)) / max(count * (count - 1), 1)


def head_entropy(weights: ArrayLike) -> Array:
    """Average the entropy of each head's rows, in nats.

    entropy_h = mean_t H(A_ht),  over rows that attend to anything

    Args:
        weights: A, `(..., H, T, S)`.

    Returns:
        `(..., H)`; 0 for a head whose every row is empty.

    Example:
        >>> from regard.theory import heads
        >>> heads.head_entropy([[[1.0, 0.0], [0.0, 0.0]]]).tolist()
        [0.0]

    Reference: Clark et al., "What Does BERT Look At?", 2019.
    """
    weights = _weights(weights)
    return _mean(_entropy(weights), weights.sum(-1) != 0)


def effective_rank(matrix: ArrayLike) -> Array:
    """Count the directions that a matrix uses, weak ones in part.

    exp(H(p)),  p_i = sigma_i / sum_k sigma_k,  sigma the singular values

    Args:
        matrix: `(..., T, S)`: weights, scores, or what a head writes.

    Returns:
        `(...)`, between 1 and the smaller side; 0 for a matrix of zeros.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.theory import heads
        >>> [round(float(heads.effective_rank(matrix)), 4) for matrix in (jnp.eye(3), jnp.ones((3, 3)))]
        [3.0, 1.0]

    Reference: Roy and Vetterli, "The effective rank: a measure of effective dimensionality", 2007.
    """
    (matrix,) = operands.floating("(..., T, S)", matrix=matrix)
    values = jnp.linalg.svd(matrix, compute_uv=False)
    total = values.sum(-1, keepdims=True)
    share = values / jnp.where(total > 0, total, 1)
    return jnp.where(total[..., 0] != 0, jnp.exp(_entropy(share)), 0)


def rollout(layers: Sequence[Any], residual: float = 0.5) -> Array:
    """Follow attention through a stack of layers down to the first one's keys.

    R = M_L ... M_1,  M_l = residual + (1 - residual) mean_h A_lh

    Args:
        layers: weights of each layer, first layer first, `(..., H, T, T)`.
        residual: share in [0, 1] that each position keeps for itself, by way of the residual path.

    Returns:
        `(..., T, T)`; rows sum to 1. A row that attends to nothing keeps all for itself.

    Raises:
        ValueError: no layers, weights that are not square or differ in shape, a share out of range.

    Example:
        >>> from regard.theory import heads
        >>> layer = [[[1.0, 0.0], [0.5, 0.5]]]
        >>> heads.rollout([layer, layer]).tolist()
        [[1.0, 0.0], [0.4375, 0.5625]]

    Reference: Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3.
    """
    if not 0 <= read_number("residual", residual) <= 1:
        raise ValueError(f"residual: expected a share in [0, 1], got {residual}")
    if not isinstance(layers, Sized):
        raise TypeError(f"layers: expected the weights of each layer, got {type(layers).__name__}")
    if not len(layers):
        raise ValueError("layers: expected the weights of one layer at least, got none")
    mixed = []
    for number, layer in enumerate(layers):
        weights = _weights(layer)
        if weights.shape[-1] != weights.shape[-2]:
            raise ValueError(
                f"layers: expected square weights (..., H, T, T), layer {number} has {weights.shape}"
            )
        mean = weights.mean(-3)
        # What the heads leave of a row, all of it in an empty row, stays at its own position.
        own_share = residual + (1 - residual) * (1 - mean.sum(-1, keepdims=True))
        mixed.append((1 - residual) * mean + jnp.where(operands.diagonal(mean.shape), own_share, 0))
        if mixed[0].shape != mean.shape:
            raise ValueError(f"layers: expected one shape, layer {number} has {weights.shape}")
    return reduce(lambda below, layer: _contract("...ts,...su->...tu", layer, below), mixed)


def _weights(weights: Any) -> Array:
    (weights,) = operands.floating("(..., H, T, S)", weights=weights)
    return weights


def _mean(values: Array, rows: Array) -> Array:
    """Average over the last axis those rows; 0 where there are none."""
    count = rows.sum(-1).astype(values.dtype)
    return jnp.where(rows, values, 0).sum(-1) / jnp.maximum(count, 1)
