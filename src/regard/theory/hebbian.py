"""Classical Hopfield networks: a memory of patterns of +1 and -1 in one matrix of weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.arguments import whole_number
from regard.axes import Array, ArrayLike
from regard.theory import operands
from regard.theory.notation import contract as _contract


def hebbian_weights(patterns: ArrayLike) -> Array:
    """Store patterns: what fires together is wired together.

    W_ab = (1/D) sum_j p_ja p_jb where a != b, else 0

    Args:
        patterns: p of +1 and -1, `(..., S, D)`, floating-point.

    Returns:
        `(..., D, D)`, symmetric, with a diagonal of 0: without it the energy could rise.

    Example:
        >>> from regard.theory import hebbian
        >>> hebbian.hebbian_weights([[1.0, -1.0]]).tolist()
        [[0.0, -0.5], [-0.5, 0.0]]

    Reference: Hopfield, "Neural networks and physical systems with emergent collective computational
    abilities", 1982; divided by D.
    """
    (patterns,) = operands.floating("(..., S, D)", patterns=patterns)
    weights = _contract("...ja,...jb->...ab", patterns, patterns) / max(patterns.shape[-1], 1)
    return jnp.where(operands.diagonal(weights.shape), 0, weights)


def ising_energy(state: ArrayLike, weights: ArrayLike) -> Array:
    """Measure how much of a state contradicts the weights.

    E(x) = -(1/2) sum_ab x_a W_ab x_b

    Args:
        state: x of +1 and -1, `(..., D)`, floating-point.
        weights: W, `(..., D, D)`; leading axes broadcast.

    Returns:
        `(...)`.

    Example:
        >>> from regard.theory import hebbian
        >>> pattern = [1.0, -1.0, 1.0, 1.0]
        >>> float(hebbian.ising_energy(pattern, hebbian.hebbian_weights([pattern])))
        -1.5

    Reference: Hopfield, 1982.
    """
    return -_contract("...a,...ab,...b->...", state, weights, state) / 2


def sign_update(state: ArrayLike, weights: ArrayLike) -> Array:
    """Turn each feature, one after another, to the side that its field points to.

    x_a <- sign(sum_b W_ab x_b), for a = 0 .. D-1 in order; a field of 0 turns nothing

    One at a time, the energy never rises if W is symmetric with a diagonal of at least 0; all at once, states
    may swap back and forth for ever.

    Args:
        state, weights: as for `ising_energy`; leading axes broadcast to the state's.

    Returns:
        The state after one sweep.

    Example:
        >>> from regard.theory import hebbian
        >>> weights = hebbian.hebbian_weights([[1.0, -1.0, 1.0, 1.0]])
        >>> hebbian.sign_update([1.0, 1.0, 1.0, 1.0], weights).tolist()
        [1.0, -1.0, 1.0, 1.0]

    Reference: Hopfield, 1982, whose features turn one at a time, too.
    """
    state, weights = _fit(state, weights)

    def turn(feature: Array, state: Array) -> Array:
        row = jax.lax.dynamic_index_in_dim(weights, feature, -2, keepdims=False)
        field = _contract("...b,...b->...", row, state)
        old = jax.lax.dynamic_index_in_dim(state, feature, -1, keepdims=False)
        new = jnp.where(field == 0, old, jnp.sign(field))
        return jax.lax.dynamic_update_index_in_dim(state, new, feature, -1)

    return jax.lax.fori_loop(0, state.shape[-1], turn, state)


class Recall(NamedTuple):
    """A state at rest."""

    state: Array  # (..., D)
    sweeps: Array  # made by the slowest state
    converged: Array  # (...), whether a sweep would turn nothing


def recall(state: ArrayLike, weights: ArrayLike, *, max_sweeps: int = 100) -> Recall:
    """Sweep until nothing turns.

    Args:
        state, weights: as for `sign_update`.
        max_sweeps: sweeps after which a state is returned as it is.

    Returns:
        A `Recall`. A state at rest stays while others move, so a batch gives what each alone would.

    Raises:
        ValueError: fewer than 0 sweeps.

    Example:
        >>> from regard.theory import hebbian
        >>> weights = hebbian.hebbian_weights([[1.0, -1.0, 1.0, 1.0]])
        >>> recall = hebbian.recall([1.0] * 4, weights)
        >>> recall.state.tolist(), bool(recall.converged)
        ([1.0, -1.0, 1.0, 1.0], True)

    Reference: Hopfield, 1982.
    """
    if max_sweeps < 0:
        raise ValueError(f"max_sweeps: expected at least 0, got {max_sweeps}")
    state, weights = _fit(state, weights)

    def restless(carry: Any) -> Array:
        return ~carry[2].all() & (carry[1] < max_sweeps)

    def step(carry: Any) -> Any:
        state, sweeps, _ = carry
        moved = sign_update(state, weights)
        return moved, sweeps + 1, (moved == state).all(-1)

    start = (state, jnp.int32(0), jnp.zeros(state.shape[:-1], bool))
    return Recall(*jax.lax.while_loop(restless, step, start))


def hebbian_capacity(width: int) -> float:
    """Estimate how many random patterns the weights can hold: a share of the width.

    N = 0.138 D

    Args:
        width: D, number of features.

    Returns:
        N, for large D and recall with about 1.5 % of the features wrong.

    Example:
        >>> from regard.theory import hebbian
        >>> round(hebbian.hebbian_capacity(1000))
        138

    Reference: Amit, Gutfreund and Sompolinsky, "Storing infinite numbers of patterns in a spin-glass model of
    neural networks", 1985.
    """
    return 0.138 * whole_number("width", width, 1)


def _fit(state: Any, weights: Any) -> tuple[Array, Array]:
    state, weights = operands.floating("(..., D)", state=state, weights=weights)
    width = state.shape[-1]
    if weights.shape[-2:] != (width, width):
        raise ValueError(f"weights: expected (..., {width}, {width}), got shape {weights.shape}")
    return state, operands.broadcast("weights", weights, (*state.shape, width))
