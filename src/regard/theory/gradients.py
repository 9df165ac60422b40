"""The backward pass of attention, derived by hand: every step, and all of them in a row."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from regard.axes import Array, ArrayLike
from regard.theory import operands
from regard.theory.gibbs import softmax_product as _softmax_product
from regard.theory.notation import contract as _contract
from regard.theory.steps import Steps as _Steps


class Gradients(NamedTuple):
    """Gradients of a loss by each argument, and by each step between; None where there was no argument.

    Those of arguments have the arguments' shapes; a query that may attend to nothing, and a key that nobody
    may attend to, have 0.
    """

    query: Array
    key: Array
    value: Array
    scale: Array
    metric: Array | None
    softcap: Array | None
    slopes: Array | None
    bias: Array | None
    sinks: Array | None
    weights: Array  # dL/dA, (*B, T, S), 0 where masked
    scores: Array  # dL/dS
    products: Array  # dL/d(Q g K)


def output_gradients(d_output: ArrayLike, weights: ArrayLike, value: ArrayLike) -> tuple[Array, Array]:
    """Go back through the weighted sum O = A V.

    dL/dA^{ij} = sum_b (dL/dO^{ib}) V^{jb}
    dL/dV^{jb} = sum_i A^{ij} (dL/dO^{ib})

    Args:
        d_output: dL/dO, `(..., T, E)`.
        weights: A, `(..., T, S)`.
        value: V, `(..., S, E)`.

    Returns:
        dL/dA and dL/dV.

    Example:
        >>> from regard.theory import gradients
        >>> d_weights, d_value = gradients.output_gradients([[1.0]], [[1.0]], [[3.0]])
        >>> d_weights.item(), d_value.item()
        (3.0, 1.0)

    Reference: Dao et al., "FlashAttention", 2022, appendix B.2.
    """
    d_weights = _contract("...ib,...jb->...ij", d_output, value)
    return d_weights, _contract("...ij,...ib->...jb", weights, d_output)


def score_gradients(
    d_products: ArrayLike, query: ArrayLike, key: ArrayLike, metric: ArrayLike | None = None
) -> tuple[Array, Array, Array | None]:
    """Go back through the products P = Q g K; the scale is part of what came before.

    dL/dQ^{ia} = sum_jb (dL/dP^{ij}) g_ab K^{jb}
    dL/dK^{jb} = sum_ia (dL/dP^{ij}) Q^{ia} g_ab
    dL/dg_ab = sum_ij (dL/dP^{ij}) Q^{ia} K^{jb}

    Args:
        d_products: dL/dP, `(..., T, S)`; for S = scale P, it is scale times dL/dS.
        query: Q, `(..., T, D)`.
        key: K, `(..., S, D)`.
        metric: g, `(..., D, D)`; None means Euclidean.

    Returns:
        dL/dQ, dL/dK, and dL/dg, None without a metric. Leading axes are those of `d_products`.

    Example:
        >>> from regard.theory import gradients
        >>> d_query, d_key, _ = gradients.score_gradients([[1.0]], [[1.0]], [[3.0]])
        >>> d_query.item(), d_key.item()
        (3.0, 1.0)

    Reference: Dao et al., "FlashAttention", 2022, appendix B.2.
    """
    if metric is None:
        d_query = _contract("...ij,...ja->...ia", d_products, key)
        return d_query, _contract("...ij,...ia->...ja", d_products, query), None
    d_query = _contract("...ij,...ab,...jb->...ia", d_products, metric, key)
    d_key = _contract("...ij,...ia,...ab->...jb", d_products, query, metric)
    return d_query, d_key, _contract("...ij,...ia,...jb->...ab", d_products, query, key)


def softcap_derivative(capped: ArrayLike, cap: ArrayLike) -> Array:
    """Differentiate the softcap at its result.

    y = cap tanh(x / cap):  dy/dx = 1 - (y / cap)^2,  dy/dcap = y / cap - (x / cap) (1 - (y / cap)^2)

    Args:
        capped: y.
        cap: a number above 0.

    Returns:
        dy/dx, of y's shape; 0 where the cap is reached.

    Example:
        >>> from regard.theory import gradients
        >>> gradients.softcap_derivative([0.0, 1.0, 2.0], 2.0).tolist()
        [1.0, 0.75, 0.0]
    """
    (capped,) = operands.floating(capped=capped)
    return 1 - (capped / jnp.asarray(cap).astype(capped.dtype)) ** 2


def attention_gradients(
    steps: _Steps, d_output: ArrayLike, d_log_partition: ArrayLike | None = None
) -> Gradients:
    """Go back through all of attention.

    dV^{jb} = sum_i A'^{ij} dO^{ib},  A' = A times the dropout's factors
    dA^{ij} = sum_b dO^{ib} V^{jb}, times the same factors
    dS^{ij} = A^{ij} (dA^{ij} - D^i + dlogZ^i),  D^i = sum_j A^{ij} dA^{ij} = sum_b dO^{ib} O^{ib}
    dsink = sum_i A^{i sink} (dlogZ^i - D^i):  the sink is one more key, with a value of 0
    dbias = dS;  dslope = -sum_ij dS^{ij} |i - j|
    dx = dS (1 - tanh(x / cap)^2), of the scaled products x;  dscale = sum_ij dx^{ij} P^{ij};  dP = scale dx
    dQ, dK and dg as in `score_gradients`

    Args:
        steps: the forward pass, from `attention_steps`.
        d_output: dL/dO, `(*B, T, E)`.
        d_log_partition: dL/dlogZ, `(*B, T)`; None means 0. It is not read where log Z is -inf.

    Returns:
        `Gradients`. No number is divided by a weight or a sum: nothing overflows that the forward pass did
        not.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.theory import gradients, steps
        >>> x = jnp.eye(2)
        >>> grads = gradients.attention_gradients(steps.attention_steps(x, x, x), jnp.ones((2, 2)))
        >>> grads.query.tolist()  # the weights of a row sum to 1: the sum of this output cannot change
        [[0.0, 0.0], [0.0, 0.0]]

    Reference: Dao et al., "FlashAttention", 2022, appendix B.2, which has neither sinks nor metrics.
    """
    dtype, shapes = steps.output.dtype, steps.shapes
    d_output = operands.broadcast("d_output", jnp.asarray(d_output).astype(dtype), steps.output.shape)
    used = steps.weights if steps.dropout is None else steps.weights * steps.dropout
    # A row without keys multiplies nothing, not even NaN.
    d_output = jnp.where(steps.keep.any(-1)[..., None], d_output, 0)
    d_weights, d_value = output_gradients(d_output, used, steps.value)
    if steps.dropout is not None:
        d_weights = d_weights * steps.dropout
    d_weights = jnp.where(steps.keep, d_weights, 0)

    d_scores = _softmax_product(steps.weights, d_weights)
    d_sink = -steps.sink_weight * jnp.sum(steps.weights * d_weights, -1)
    if d_log_partition is not None:
        d_log = jnp.asarray(d_log_partition).astype(dtype)
        d_log = operands.broadcast("d_log_partition", d_log, steps.log_partition.shape)
        d_log = jnp.where(steps.log_partition != -jnp.inf, d_log, 0)
        d_scores = d_scores + steps.weights * d_log[..., None]
        d_sink = d_sink + steps.sink_weight * d_log

    d_scaled, d_cap = d_scores, None
    scaled = steps.scale * steps.products
    if steps.softcap is not None:
        slope = softcap_derivative(steps.capped, steps.softcap)
        d_scaled = d_scores * slope
        d_cap = jnp.sum(d_scores * (steps.capped - scaled * slope)) / steps.softcap
    d_products = steps.scale * d_scaled
    d_query, d_key, d_metric = score_gradients(d_products, steps.query, steps.key, steps.metric)
    d_slopes = -jnp.sum(d_scores * jnp.broadcast_to(steps.distance, d_scores.shape), (-1, -2))

    def shaped(name: str, gradient: Array | None) -> Array | None:
        shape = shapes[name]
        return None if shape is None or gradient is None else operands.reduce_to(gradient, shape)

    return Gradients(
        query=gather(d_query, shapes["query"] or ()),
        key=gather(d_key, shapes["key"] or ()),
        value=gather(d_value, shapes["value"] or ()),
        scale=jnp.sum(d_scaled * steps.products),
        metric=shaped("metric", d_metric),
        softcap=d_cap,
        slopes=shaped("slopes", d_slopes),
        bias=shaped("bias", d_scores),
        sinks=shaped("sinks", d_sink.sum(-1)),
        weights=d_weights,
        scores=d_scores,
        products=d_products,
    )


def gather(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Add up what the heads of a group, and all that an array was broadcast to, say about it.

    Args:
        gradient: `(*B, length, width)`.
        shape: of the array it belongs to.

    Returns:
        The gradient in that shape: the transpose of `steps.spread`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.theory import gradients
        >>> gradients.gather(jnp.ones((7, 4, 5, 3)), (2, 5, 3))[0, 0].tolist()
        [14.0, 14.0, 14.0]
    """
    if len(shape) > 2 and 1 < shape[-3] < gradient.shape[-3]:
        *batch, heads, length, width = gradient.shape
        gradient = gradient.reshape((*batch, shape[-3], heads // shape[-3], length, width)).sum(-3)
    return operands.reduce_to(gradient, shape)
