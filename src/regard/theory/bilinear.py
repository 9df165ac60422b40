"""Bilinear forms: the fit of a query and a key under a metric, and tests of a metric."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from regard.arguments import read_number, whole_number
from regard.axes import Array, ArrayLike, broadcast_named
from regard.theory import operands
from regard.theory.notation import contract as _contract


def euclidean_metric(width: int, dtype: DTypeLike | None = None) -> Array:
    """Measure all features alike: the scalar product.

    g_ab = 1 where a = b, else 0

    Args:
        width, dtype: as for `scaled_metric`.

    Returns:
        The metric, `(D, D)`.

    Example:
        >>> from regard.theory import bilinear
        >>> bilinear.euclidean_metric(2).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    return scaled_metric(width, 1.0, dtype)


def scaled_metric(width: int, scale: ArrayLike | None = None, dtype: DTypeLike | None = None) -> Array:
    """Measure all features alike, at a scale: what attention does.

    g_ab = scale where a = b, else 0

    Args:
        width: number of features, D, at least 1.
        scale: a number, maybe traced; None means 1/sqrt(D), which keeps scores of independent features of
            variance 1 at variance 1.
        dtype: floating-point; None means float32, or float64 where that is jax's default.

    Returns:
        The metric, `(D, D)`.

    Raises:
        TypeError: a width that is no integer, a dtype that is not floating-point.
        ValueError: a width below 1.

    Example:
        >>> from regard.theory import bilinear
        >>> bilinear.scaled_metric(4)[0].tolist()
        [0.5, 0.0, 0.0, 0.0]

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1.
    """
    identity = jnp.eye(whole_number("width", width, 1), dtype=dtype)
    if not jnp.issubdtype(identity.dtype, jnp.floating):
        raise TypeError(f"dtype: expected a floating-point dtype, such as jnp.float32; got {identity.dtype}")
    factor = jnp.asarray(1 / np.sqrt(width) if scale is None else scale, identity.dtype)
    if factor.ndim:
        raise ValueError(f"scale: expected one number, got shape {factor.shape}; see diagonal_metric")
    return identity * factor


def diagonal_metric(diagonal: ArrayLike) -> Array:
    """Weigh every feature by a number of its own.

    g_ab = diagonal_a where a = b, else 0

    Args:
        diagonal: weights `(..., D)`; above 0 for a metric that is positive definite.

    Returns:
        The metric, `(..., D, D)`.

    Example:
        >>> from regard.theory import bilinear
        >>> bilinear.diagonal_metric([1.0, 3.0]).tolist()
        [[1.0, 0.0], [0.0, 3.0]]
    """
    (diagonal,) = operands.floating("weights (..., D)", diagonal=diagonal)
    return jnp.where(operands.diagonal((*diagonal.shape, diagonal.shape[-1])), diagonal[..., None], 0)


def learned_metric(weight: ArrayLike) -> Array:
    """Measure after a linear map; never negative, and positive definite where the map loses nothing.

    g_ab = sum_r W_ra W_rb

    Args:
        weight: the map W, `(..., R, D)`; the metric has rank R at most.

    Returns:
        The metric, `(..., D, D)`.

    Example:
        >>> from regard.theory import bilinear
        >>> bilinear.learned_metric([[1.0, 2.0]]).tolist()
        [[1.0, 2.0], [2.0, 4.0]]
    """
    return _contract("...ra,...rb->...ab", weight, weight)


def bilinear_form(first: ArrayLike, second: ArrayLike, metric: ArrayLike) -> Array:
    """Measure how well two vectors fit.

    B(u, v) = sum_ab u^a g_ab v^b

    Args:
        first: vectors u, `(..., D)`.
        second: vectors v, `(..., D')`; leading axes broadcast, so `u[:, None]` and `v[None]` give all pairs.
        metric: g, `(..., D, D')`; symmetric for a metric, any matrix for a bilinear form.

    Returns:
        One number per pair, `(...)`. With `second` the same as `first`: squared lengths.

    Example:
        >>> from regard.theory import bilinear
        >>> float(bilinear.bilinear_form([1.0] * 4, [1.0] * 4, bilinear.scaled_metric(4)))
        2.0
    """
    return _contract("...a,...ab,...b->...", first, metric, second)


def lower_index(vector: ArrayLike, metric: ArrayLike) -> Array:
    """Turn a vector into the form that measures against it.

    v_a = sum_b g_ab v^b

    Args:
        vector: v with its index above, `(..., D)`.
        metric: g, `(..., D, D)`.

    Returns:
        v with its index below, `(..., D)`; u . v_lowered is `bilinear_form(u, v, g)`.

    Example:
        >>> from regard.theory import bilinear
        >>> g = bilinear.diagonal_metric([1.0, 4.0])
        >>> bilinear.lower_index([1.0, 1.0], g).tolist()
        [1.0, 4.0]
    """
    return _contract("...ab,...b->...a", metric, vector)


def raise_index(vector: ArrayLike, metric: ArrayLike) -> Array:
    """Turn a form back into the vector it measures against: the inverse of `lower_index`.

    v^a = sum_b g^{ab} v_b,  solved for rather than multiplied by an inverse

    Args:
        vector: v with its index below, `(..., D)`.
        metric: g with its indices below, `(..., D, D)`, the same that lowered; not its inverse.

    Returns:
        v with its index above, `(..., D)`. A singular metric gives NaN or inf.

    Example:
        >>> from regard.theory import bilinear
        >>> g = bilinear.diagonal_metric([1.0, 4.0])
        >>> bilinear.raise_index([1.0, 1.0], g).tolist()
        [1.0, 0.25]
    """
    vector, metric = operands.floating("vectors (..., D)", vector=vector, metric=metric)
    if _square(metric).shape[-1] != vector.shape[-1]:
        raise ValueError(
            f"metric: expected ({vector.shape[-1]}, {vector.shape[-1]}) for vectors of that width,"
            f" got shape {metric.shape}"
        )
    leading = broadcast_named(vector=vector.shape[:-1], metric=metric.shape[:-2])
    metric = jnp.broadcast_to(metric, (*leading, *metric.shape[-2:]))
    vector = jnp.broadcast_to(vector, (*leading, vector.shape[-1]))
    return jnp.linalg.solve(metric, vector[..., None])[..., 0]


def inverse_metric(metric: ArrayLike) -> Array:
    """Find the metric with its indices above.

    sum_c g^{ac} g_cb = 1 where a = b, else 0

    Args:
        metric: g, `(..., D, D)`.

    Returns:
        The inverse, `(..., D, D)`. A singular metric gives NaN or inf.

    Example:
        >>> from regard.theory import bilinear
        >>> bilinear.inverse_metric(bilinear.scaled_metric(4))[0].tolist()
        [2.0, 0.0, 0.0, 0.0]
    """
    (metric,) = operands.floating(metric=metric)
    return jnp.linalg.inv(_square(metric))


class MetricReport(NamedTuple):
    """The reasons why a matrix is a metric, or is not; every field is one number per matrix."""

    symmetric: Array
    positive_definite: Array
    asymmetry: Array  # largest |g_ab - g_ba|, relative to the largest |g_ab|
    smallest_eigenvalue: Array  # of the symmetric part
    largest_eigenvalue: Array

    @property
    def is_metric(self) -> Array:
        """True where the matrix is symmetric and positive definite."""
        return self.symmetric & self.positive_definite

    def __str__(self) -> str:
        """Print the verdict with its reasons, for concrete numbers of one matrix."""
        if self.is_metric.ndim:
            return f"{int(self.is_metric.sum())} of {self.is_metric.size} are metrics"
        reasons = []
        if not self.symmetric:
            asymmetry = float(self.asymmetry)
            reasons.append(f"not symmetric: g_ab and g_ba differ by {asymmetry:.3g} of the largest")
        if not self.positive_definite:
            smallest = float(self.smallest_eigenvalue)
            kind = "a vector other than 0 has length 0" if smallest >= 0 else "a squared length is negative"
            reasons.append(
                f"not positive definite: eigenvalue {smallest:.3g} beside"
                f" {float(self.largest_eigenvalue):.3g}, so {kind}, up to rounding"
            )
        return "no metric; " + "; ".join(reasons) if reasons else "a metric"


def check_metric(metric: ArrayLike, tolerance: float | None = None) -> MetricReport:
    """Ask whether a matrix is a metric: symmetric, and positive for every vector but 0.

    Args:
        metric: g, `(..., D, D)`.
        tolerance: asymmetry, relative to the largest entry, and smallest eigenvalue, relative to the largest,
            that rounding is held accountable for; None means D times the dtype's epsilon. A smallest
            eigenvalue below it is not positive: a matrix of lower rank is no metric.

    Returns:
        A `MetricReport` of arrays, fit for jit; `print` it for the reasons.

    Example:
        >>> from regard.theory import bilinear
        >>> print(bilinear.check_metric([[2.0, 1.0], [0.0, 2.0]]))
        no metric; not symmetric: g_ab and g_ba differ by 0.5 of the largest
    """
    (metric,) = operands.floating(metric=metric)
    flipped = jnp.swapaxes(_square(metric), -1, -2)
    rounding = metric.shape[-1] * float(jnp.finfo(metric.dtype).eps)
    allowed = rounding if tolerance is None else read_number("tolerance", tolerance)
    largest = jnp.abs(metric).max((-1, -2))
    asymmetry = jnp.abs(metric - flipped).max((-1, -2)) / jnp.where(largest > 0, largest, 1)
    values = jnp.linalg.eigvalsh((metric + flipped) / 2)
    smallest, greatest = values[..., 0], values[..., -1]
    is_positive = smallest > allowed * jnp.abs(greatest)
    return MetricReport(asymmetry <= allowed, is_positive, asymmetry, smallest, greatest)


def _square(metric: Array) -> Array:
    if metric.ndim < 2 or metric.shape[-1] != metric.shape[-2] or not metric.shape[-1]:
        raise ValueError(f"metric: expected a square matrix (..., D, D), got shape {metric.shape}")
    return metric
