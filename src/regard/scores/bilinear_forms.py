"""Scores as a bilinear form of query and key."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from regard.arguments import keep_array, read_array
from regard.axes import Array, ArrayLike
from regard.records import record
from regard.scores.score import Score


def bilinear(metric: ArrayLike) -> Score:
    """Measure how well a key answers a query with a metric of one's own instead of the plain product.

    s_ts = scale sum_de query_td metric_de key_se

    It stands where the product does: first among the scores of a call. It costs one product of the queries
    with the metric; query and key may then differ in width.

    Args:
        metric: floating-point array `(D, D')`, or one per query head `(H, D, D')`, for queries of width D and
            keys of width D'; may be traced, and has a gradient.

    Returns:
        A score.

    Raises:
        TypeError, ValueError: a metric that is not of floating point, or of another rank.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import attend, scores
        >>> x = jnp.eye(2)
        >>> output = attend(x, x, x, score=scores.bilinear(-jnp.eye(2)), scale=1.0)
        >>> [f"{entry:.2f}" for entry in output[0]]
        ['0.27', '0.73']

    Reference: Luong et al., "Effective Approaches to Attention-based Neural Machine Translation", 2015,
    section 3.1, where it is called general.
    """
    array = read_array("metric", metric, float)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"metric: expected a floating-point array, got {array.dtype}")
    if array.ndim not in (2, 3):
        raise ValueError(f"metric: expected shape (D, D') or (H, D, D'), got {tuple(array.shape)}")
    return Bilinear(keep_array(array))


@record
class Bilinear(Score):
    """A metric in place of the plain product."""

    metric: Any
    maker = staticmethod(bilinear)
    replaces_product = True
    reads_batch = False
    reads_positions = False

    def transform(self, query: Array) -> Array:
        """Multiply the queries by the metric: in the dtype of query, summed in float32 at least."""
        metric = jnp.asarray(self.metric)
        own, heads = metric.shape[:-2], query.shape[-3:-2]
        if query.shape[-1] != metric.shape[-2] or own not in ((), (1,), heads):
            raise ValueError(
                f"bilinear metric: expected (D, D') or (H, D, D') for query {tuple(query.shape)}, got"
                f" {tuple(metric.shape)}"
            )
        total = np.promote_types(*(np.promote_types(x.dtype, np.float32) for x in (query, metric)))
        metric = metric[0] if metric.ndim == 3 and query.ndim == 2 else metric
        transformed = jnp.einsum("...td,...de->...te", query.astype(total), metric.astype(total))
        return transformed.astype(query.dtype)
