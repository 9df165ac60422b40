"""The learning-rate schedule and the optimizer."""

from typing import Any

import jax
import optax

from regard.layers import balance_experts
from regard.training.settings import Optimization


def make_schedule(optimization: Optimization) -> optax.Schedule:
    """Return the learning rate by updates done: a linear rise, then the schedule that is named."""
    peak, rise = optimization.learning_rate, optimization.warmup_steps
    rest = max(optimization.steps - rise, 1)
    stable = rest - max(rest // 5, 1)
    constant = optax.constant_schedule(peak)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "exponential": optax.exponential_decay(peak, rest, 0.01),
        "stable": optax.join_schedules([constant, optax.linear_schedule(peak, 0.0, rest - stable)], [stable]),
        "constant": constant,
    }[optimization.schedule]
    return optax.join_schedules([optax.linear_schedule(0.0, peak, rise), after], [rise]) if rise else after


def make_optimizer(optimization: Optimization) -> optax.GradientTransformation:
    """Return an optimizer: clipping by global norm, then AdamW with the schedule; experts are balanced."""
    clip = optax.clip_by_global_norm(optimization.clip_norm) if optimization.clip_norm else optax.identity()

    def select_matrices(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    schedule, decay = make_schedule(optimization), optimization.weight_decay
    optimizer = optax.chain(clip, optax.adamw(schedule, weight_decay=decay, mask=select_matrices))
    return balance_experts(optimizer, optimization.balance_rate)
