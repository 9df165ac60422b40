"""Attention as statistical physics: scores are energies with their sign turned, softmax is equilibrium."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array, ArrayLike
from regard.theory import operands


class Equilibrium(NamedTuple):
    """A query's keys in equilibrium: the weights, and one number per row of everything else.

    A row that keeps no key has weights 0, log partition -inf, free energy +inf, and 0 elsewhere; every
    gradient through it is 0.
    """

    weights: Array  # p, (..., S)
    log_partition: Array  # log Z
    free_energy: Array  # F = -T log Z
    mean_energy: Array  # U = <E>, E = -score
    energy_variance: Array  # <E^2> - <E>^2
    entropy_nats: Array  # H; F = U - T H
    heat_capacity: Array  # dU/dT = energy_variance / T^2
    effective_states: Array  # exp(H): how many keys of equal weight would have this entropy


def equilibrium(
    scores: ArrayLike, temperature: ArrayLike = 1.0, keep: ArrayLike | None = None
) -> Equilibrium:
    """Distribute a query's attention over keys as heat distributes a system over states.

    p_j = e^(s_j / T) / Z,  Z = sum_j e^(s_j / T),  over the keys that are kept
    F = -T log Z = U - T H,  U = -sum_j p_j s_j,  H = -sum_j p_j log p_j,  dU/dT = Var(s) / T^2

    The largest score is subtracted before anything is divided or exponentiated: no score and no temperature
    above 0 overflows, however large or small; Z itself, which would, is only given as its logarithm.

    Args:
        scores: `(..., S)`, finite or -inf, which removes a key as `keep` does.
        temperature: T above 0, maybe traced; a number, or an array that broadcasts to the rows, `(...)`.
        keep: booleans that broadcast to the scores, True = may attend; None keeps all. What `scores` holds
            elsewhere, NaN included, is not read.

    Returns:
        An `Equilibrium`, in the scores' dtype, float32 at least.

    Example:
        >>> from regard.theory import gibbs
        >>> state = gibbs.equilibrium([1e4, 1e4, 0.0])
        >>> state.weights.tolist(), round(float(state.effective_states), 3)
        ([0.5, 0.5, 0.0], 2.0)

    Reference: Gibbs, "Elementary Principles in Statistical Mechanics", 1902, chapter IV.
    """
    (scores,) = operands.floating("scores (..., S)", scores=scores)
    keep = operands.kept(keep, scores.shape) & (scores != -jnp.inf)
    alive = keep.any(-1, keepdims=True)
    scores, temperature = jnp.where(keep, scores, 0), operands.rows("temperature", temperature, scores)
    peak = jnp.where(keep, scores, -jnp.inf).max(-1, keepdims=True, initial=-jnp.inf)
    peak = jax.lax.stop_gradient(jnp.where(alive, peak, 0))
    gaps = jnp.where(keep, scores - peak, 0)
    # The factor of a key far below the peak is 0, while its exponent and that one's slopes may be infinite.
    near = keep & (jnp.exp(jnp.divide(*jax.lax.stop_gradient((gaps, temperature)))) > 0)
    shifted = _divide(jnp.where(near, gaps, 0), temperature)
    share = jnp.where(near, jnp.exp(shifted), 0)
    total = jnp.where(alive, share.sum(-1, keepdims=True), 1)
    weights = share / total
    mean = jnp.sum(weights * shifted, -1, keepdims=True)
    capacity = jnp.sum(weights * (shifted - mean) ** 2, -1)
    entropy = (jnp.log(total) - mean)[..., 0]
    alive, mean, peak, total = alive[..., 0], mean[..., 0], peak[..., 0], total[..., 0]
    temperature = temperature[..., 0]
    log_partition = jnp.where(alive, _divide(peak, temperature) + jnp.log(total), -jnp.inf)
    free_energy = jnp.where(alive, -(peak + temperature * jnp.log(total)), jnp.inf)
    # Of the scores as they are, which a temperature of 1e38, or infinity, would have divided away.
    gaps = jnp.where(near, gaps, 0)
    mean_gap = jnp.sum(weights * gaps, -1, keepdims=True)
    mean_energy = jnp.where(alive, -(peak + mean_gap[..., 0]), 0)
    variance = jnp.sum(weights * (gaps - mean_gap) ** 2, -1)
    states = jnp.where(alive, jnp.exp(entropy), 0)
    return Equilibrium(weights, log_partition, free_energy, mean_energy, variance, entropy, capacity, states)


def log_partition(scores: ArrayLike, temperature: ArrayLike = 1.0, keep: ArrayLike | None = None) -> Array:
    """Add up the Boltzmann factors of a query's keys, as a logarithm.

    log Z = log sum_j e^(s_j / T),  over the keys that are kept;  d log Z / d s_j = p_j / T

    Args:
        scores, temperature, keep: as for `equilibrium`.

    Returns:
        `(...)`; -inf where no key is kept, with gradient 0. With T = 1 what `attend` calls `lse`.

    Example:
        >>> from regard.theory import gibbs
        >>> float(gibbs.log_partition([1e4, -1e4]))
        10000.0

    Reference: Gibbs, "Elementary Principles in Statistical Mechanics", 1902, chapter IV.
    """
    return equilibrium(scores, temperature, keep).log_partition


def gibbs_weights(scores: ArrayLike, temperature: ArrayLike = 1.0, keep: ArrayLike | None = None) -> Array:
    """Weigh keys by the exponential of their score: softmax.

    p_j = e^(s_j / T) / Z

    Args:
        scores, keep: as for `equilibrium`.
        temperature: as for `equilibrium`; towards 0 the largest score takes all, towards infinity all share.

    Returns:
        `(..., S)`; rows sum to 1, or are 0 where no key is kept.

    Example:
        >>> from regard.theory import gibbs
        >>> gibbs.gibbs_weights([0.0] * 4, keep=[True, True, False, False]).tolist()
        [0.5, 0.5, 0.0, 0.0]

    Reference: Gibbs, "Elementary Principles in Statistical Mechanics", 1902, chapter IV.
    """
    return equilibrium(scores, temperature, keep).weights


def temperature_sweep(
    scores: ArrayLike, temperatures: ArrayLike, keep: ArrayLike | None = None
) -> Equilibrium:
    """Bring the same scores to equilibrium at several temperatures.

    Args:
        scores, keep: as for `equilibrium`.
        temperatures: `(N,)`, each above 0.

    Returns:
        An `Equilibrium` whose arrays have one more leading axis, N.

    Example:
        >>> from regard.theory import gibbs
        >>> sweep = gibbs.temperature_sweep([0.0, 1.0], [0.01, 100.0])
        >>> sweep.effective_states.round(2).tolist()
        [1.0, 2.0]
    """
    (scores,) = operands.floating("scores (..., S)", scores=scores)
    temperatures = operands.above_zero("temperatures", temperatures, scores.dtype)
    if temperatures.ndim != 1:
        raise ValueError(f"temperatures: expected one axis (N,), got shape {temperatures.shape}")
    return jax.vmap(lambda temperature: equilibrium(scores, temperature, keep))(temperatures)


def entropy_nats(weights: ArrayLike) -> Array:
    """Measure how spread weights are, in nats.

    H = -sum_j p_j log p_j,  0 log 0 = 0

    From scores, `equilibrium` finds it with fewer roundings.

    Args:
        weights: `(..., S)`, at least 0; rows that sum to less than 1 are taken as they are.

    Returns:
        `(...)`, between 0 and log S; 0 for a row of zeros.

    Example:
        >>> from regard.theory import gibbs
        >>> f"{gibbs.entropy_nats([0.125] * 8):.5f}"  # log 8
        '2.07944'

    Reference: Shannon, "A Mathematical Theory of Communication", 1948, section 6.
    """
    (weights,) = operands.floating(weights=weights)
    return -jnp.sum(weights * jnp.log(jnp.where(weights > 0, weights, 1)), -1)


def softmax_jacobian(weights: ArrayLike, temperature: ArrayLike = 1.0) -> Array:
    """Write out how every weight answers to every score.

    dp_j / ds_k = p_j (1[j = k] - p_k) / T

    Args:
        weights: p, `(..., S)`.
        temperature: at which they arose; a number, or an array that broadcasts to the rows.

    Returns:
        `(..., S, S)`, symmetric; rows and columns sum to 0.

    Example:
        >>> from regard.theory import gibbs
        >>> gibbs.softmax_jacobian([0.5, 0.5]).tolist()
        [[0.25, -0.25], [-0.25, 0.25]]
    """
    (weights,) = operands.floating(weights=weights)
    scaled = weights / operands.rows("temperature", temperature, weights)
    on_diagonal = operands.diagonal((*weights.shape, weights.shape[-1]))
    return jnp.where(on_diagonal, scaled[..., None], 0) - scaled[..., None] * weights[..., None, :]


def softmax_product(weights: ArrayLike, vector: ArrayLike, temperature: ArrayLike = 1.0) -> Array:
    """Multiply the softmax Jacobian by a vector without forming it.

    sum_k J_jk v_k = p_j (v_j - sum_k p_k v_k) / T

    The Jacobian is symmetric: this is the tangent of a tangent as well as the gradient of a gradient.

    Args:
        weights: p, `(..., S)`; rows that sum to less than 1, beside a sink, are served, too.
        vector: v, of the same shape.
        temperature: at which they arose; a number, or an array that broadcasts to the rows.

    Returns:
        `(..., S)`.

    Example:
        >>> from regard.theory import gibbs
        >>> gibbs.softmax_product([0.5, 0.5], [1.0, 0.0]).tolist()
        [0.25, -0.25]
    """
    weights, vector = operands.floating(weights=weights, vector=vector)
    vector = operands.broadcast("vector", vector, weights.shape)
    mean = jnp.sum(weights * vector, -1, keepdims=True)
    return _divide(weights * (vector - mean), operands.rows("temperature", temperature, weights))


@jax.custom_jvp
def _divide(energy: Array, temperature: Array) -> Array:
    """Divide by the temperature, whose square, in JAX's own rule, may be 0."""
    return energy / temperature


@_divide.defjvp
def _divide_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    quotient, temperature = _divide(*primals), primals[1]
    return quotient, tangents[0] / temperature - quotient / temperature * tangents[1]
