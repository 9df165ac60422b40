"""Modern Hopfield networks: a memory of continuous patterns whose update is attention."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from regard.arguments import read_number
from regard.axes import Array, ArrayLike, broadcast_named
from regard.theory import operands
from regard.theory.gibbs import gibbs_weights as _weights
from regard.theory.gibbs import log_partition as _log_partition
from regard.theory.notation import contract as _contract


def energy(
    state: ArrayLike, patterns: ArrayLike, beta: ArrayLike = 1.0, keep: ArrayLike | None = None
) -> Array:
    """Measure how far a state is from remembering something; every update lowers it.

    E(x) = -(1/beta) log sum_j e^(beta x . p_j) + x . x / 2 + (1/beta) log N + M^2 / 2,  M = max_j |p_j|

    Args:
        state: x, `(..., T, D)`.
        patterns: p, `(..., S, D)`; leading axes broadcast.
        beta: inverse temperature, above 0, maybe traced.
        keep: booleans that broadcast to `(..., T, S)`: which patterns exist; None keeps all.

    Returns:
        One number per state, `(..., T)`, at least 0; +inf where no pattern is kept.

    Example:
        >>> from regard.theory import hopfield
        >>> patterns = [[5.0, 0.0], [0.0, 5.0]]
        >>> hopfield.energy([[5.0, 0.0], [2.5, 2.5]], patterns).round(2).tolist()
        [0.6899999976158142, 6.25]

    Reference: Ramsauer et al., "Hopfield Networks is All You Need", 2021, equation 2.
    """
    state, patterns, keep = _match(state, patterns, keep)
    beta = operands.one_above_zero("beta", beta, state.dtype)
    fit = _contract("...id,...jd->...ij", state, patterns)
    lengths = _contract("...jd,...jd->...j", patterns, patterns)[..., None, :]
    largest = jnp.where(keep, jnp.broadcast_to(lengths, fit.shape), 0).max(-1, initial=0)
    count = jnp.maximum(keep.sum(-1), 1).astype(fit.dtype)
    squares = jnp.broadcast_to(_contract("...id,...id->...i", state, state), largest.shape)
    return -_log_partition(fit * beta, keep=keep) / beta + jnp.log(count) / beta + (squares + largest) / 2


def update(
    state: ArrayLike, patterns: ArrayLike, beta: ArrayLike = 1.0, keep: ArrayLike | None = None
) -> Array:
    """Move each state to the mean of the patterns, weighted by how well it fits them.

    x' = sum_j softmax_j(beta x . p_j) p_j

    It is attention: queries are states, keys and values are patterns, the scale is beta.

    Args:
        state, patterns, beta, keep: as for `energy`.

    Returns:
        `(..., T, D)`; 0 where no pattern is kept.

    Example:
        >>> from regard.theory import hopfield
        >>> hopfield.update([[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], beta=100.0).tolist()
        [[1.0, 0.0]]

    Reference: Ramsauer et al., 2021, equation 3.
    """
    state, patterns, keep = _match(state, patterns, keep)
    beta = operands.one_above_zero("beta", beta, state.dtype)
    fit = _contract("...id,...jd->...ij", state, patterns)
    return _contract("...ij,...jd->...id", _weights(fit * beta, keep=keep), patterns)


class Retrieval(NamedTuple):
    """States at rest, with one entry per state of everything else."""

    state: Array  # (..., T, D)
    steps: Array  # updates made, integers
    converged: Array  # whether the last update moved the state by the tolerance at most
    energy: Array  # of the state


def retrieve(
    state: ArrayLike,
    patterns: ArrayLike,
    beta: ArrayLike = 1.0,
    keep: ArrayLike | None = None,
    *,
    tolerance: float | None = None,
    max_steps: int = 100,
) -> Retrieval:
    """Update states until they rest.

    Each state stops by itself: what else is in the batch changes nothing. Differentiable in forward mode.

    Args:
        state, patterns, beta, keep: as for `energy`.
        tolerance: the largest change of a feature that counts as rest; None means 8 epsilons of the dtype
            times the largest feature of a pattern.
        max_steps: updates after which a state that has not come to rest is returned as it is.

    Returns:
        A `Retrieval`.

    Raises:
        ValueError: fewer than 0 steps.

    Example:
        >>> from regard.theory import hopfield
        >>> retrieval = hopfield.retrieve([[0.8, 0.3]], [[1.0, 0.0], [0.0, 1.0]], beta=50.0)
        >>> retrieval.state.round(6).tolist(), retrieval.converged.tolist()
        ([[1.0, 0.0]], [True])

    Reference: Ramsauer et al., 2021, theorems 1 and 2: the energy falls and the states converge.
    """
    if max_steps < 0:
        raise ValueError(f"max_steps: expected at least 0 updates, got {max_steps}")
    (state,) = operands.floating("(..., count, width)", state=state)
    _, patterns, keep = _match(state, patterns, keep)
    state = jnp.broadcast_to(state, (*keep.shape[:-1], state.shape[-1])).astype(patterns.dtype)
    if tolerance is None:
        size = jax.lax.stop_gradient(jnp.abs(patterns).max(initial=0))
        allowed = 8 * float(jnp.finfo(state.dtype).eps) * size
    else:
        allowed = jnp.asarray(tolerance, state.dtype)

    def restless(carry: Any) -> Array:
        _, steps, converged = carry
        return (~converged & (steps < max_steps)).any()

    def step(carry: Any) -> Any:
        state, steps, converged = carry
        moved = update(state, patterns, beta, keep)
        still = jnp.abs(moved - state).max(-1, initial=0) <= allowed
        state = jnp.where(converged[..., None], state, moved)
        return state, steps + (~converged).astype(steps.dtype), converged | still

    rows = state.shape[:-1]
    start = (state, jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool))
    final, steps, converged = jax.lax.while_loop(restless, step, start)
    return Retrieval(final, steps, converged, energy(final, patterns, beta, keep))


def _match(state: Any, patterns: Any, keep: Any) -> tuple[Array, Array, Array]:
    """Return states and patterns of one dtype, and which of them meet; those that meet none are 0."""
    state, patterns = operands.floating("(..., count, width)", state=state, patterns=patterns)
    leading = broadcast_named(state=state.shape[:-2], patterns=patterns.shape[:-2])
    keep = operands.kept(keep, (*leading, state.shape[-2], patterns.shape[-2]))
    state = jnp.where(keep.any(-1)[..., None], state, 0)
    return state, jnp.where(keep.any(-2)[..., None], patterns, 0), keep


def separation(patterns: ArrayLike) -> Array:
    """Measure how well each pattern stands apart from the others.

    Delta_i = p_i . p_i - max_(j != i) p_i . p_j

    Args:
        patterns: p, `(..., S, D)`.

    Returns:
        `(..., S)`; below 0 where another pattern fits better than the pattern itself, +inf for one alone. The
        theorem wants beta Delta to exceed `log(2 (S - 1) S beta M^2) + 2 / S` of a pattern to be stored.

    Example:
        >>> from regard.theory import hopfield
        >>> hopfield.separation([[2.0, 0.0], [1.0, 1.0]]).tolist()
        [2.0, 0.0]

    Reference: Ramsauer et al., 2021, definition 2 and theorem 4.
    """
    (patterns,) = operands.floating("(..., S, D)", patterns=patterns)
    fit = _contract("...id,...jd->...ij", patterns, patterns)
    is_itself = operands.diagonal(fit.shape)
    others = jnp.where(is_itself, -jnp.inf, fit).max(-1, initial=-jnp.inf)
    return jnp.where(is_itself, fit, 0).sum(-1) - others


def capacity(width: int, *, beta: float = 1.0, radius: float = 1.0, failure: float = 0.001) -> float:
    """Estimate how many random patterns can be stored: a number that grows exponentially with the width.

    N = sqrt(failure) c^((D - 1) / 4),  c = b / W(e^(a + log b)),  W Lambert's function
    a = (2 / (D - 1)) (1 + log(2 beta radius^2 failure (D - 1))),  b = 2 radius^2 beta / 5

    A bound from below for patterns drawn at random from a sphere of radius sqrt(D - 1) times `radius`; many
    more may fit.

    Args:
        width: D, at least 2.
        beta: inverse temperature, above 0.
        radius: of the sphere, in units of sqrt(D - 1), above 0.
        failure: chance in (0, 1] that the set of patterns is not stored.

    Returns:
        N; +inf where it exceeds what a float holds. Below 2 the theorem promises nothing.

    Raises:
        ValueError: arguments out of range.

    Example:
        >>> from regard.theory import hopfield
        >>> round(hopfield.capacity(75, radius=1.0))
        11
        >>> hopfield.capacity(64, radius=3.0) > 1e6
        True

    Reference: Ramsauer et al., 2021, theorem 3.
    """
    log_count = _log_growth(width, beta, radius, failure) * (width - 1) / 4 + math.log(failure) / 2
    return math.exp(log_count) if log_count < 700 else math.inf


def growth(width: int, beta: float = 1.0, radius: float = 1.0, failure: float = 0.001) -> float:
    """Find the base c of the capacity's exponential.

    c = b / W(e^(a + log b)), with a and b as in `capacity`

    Args:
        width, beta, radius, failure: as for `capacity`.

    Returns:
        c. The theorem holds where c is at least `(2 / sqrt(failure))^(4 / (D - 1))`.

    Raises:
        ValueError: as `capacity`.

    Example:
        >>> from regard.theory import hopfield
        >>> f"{hopfield.growth(20, radius=3.0):.3f} {hopfield.growth(75):.3f}"
        '3.155 1.372'

    Reference: Ramsauer et al., 2021, theorem 3, whose two examples these are.
    """
    log_growth = _log_growth(width, beta, radius, failure)
    return math.exp(log_growth) if log_growth < 700 else math.inf


def _log_growth(width: int, beta: float, radius: float, failure: float) -> float:
    """Find the logarithm of c, from those of its factors, which may be tiny."""
    numbers = {"width": width, "beta": beta, "radius": radius, "failure": failure}
    for name, number in numbers.items():
        read_number(name, number)
    if not (width >= 2 and 0 < beta < math.inf and 0 < radius < math.inf and 0 < failure <= 1):
        raise ValueError(
            "capacity: expected width of at least 2, finite beta and radius above 0, failure in (0, 1];"
            f" got width={width}, beta={beta}, radius={radius}, failure={failure}"
        )
    log_scale = math.log(beta) + 2 * math.log(radius)
    a = 2 / (width - 1) * (1 + math.log(2 * (width - 1)) + log_scale + math.log(failure))
    log_b = math.log(2 / 5) + log_scale
    return log_b - _log_lambert(a + log_b)


def _log_lambert(exponent: float) -> float:
    """Find log W(e^exponent), w with w + log w = exponent, by Newton's method on log w."""
    log_w = min(exponent, math.log(max(exponent, 1.0)))
    for _ in range(50):
        w = math.exp(log_w)
        log_w -= (w + log_w - exponent) / (w + 1)
    return log_w
