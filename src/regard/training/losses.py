"""Losses and accuracies that tasks share: `accuracy` of whole answers, labels or sequences, and of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.training.lazy_modules import jax, jnp, optax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

    from regard.training.task import Metrics


def measure_losses(logits: Float[Array, "*B C"], labels: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Return the cross-entropy of every label in nats, summed in float32 at least."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def measure_labels(logits: Float[Array, "B C"], labels: Int[Array, " B"]) -> tuple[jax.Array, Metrics]:
    """Return the cross-entropy in nats and the accuracy of one label per example."""
    return measure_losses(logits, labels).mean(), {"accuracy": _measure_share(logits.argmax(-1) == labels)}


def measure_tokens(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], real: Bool[Array, "B T"]
) -> tuple[jax.Array, Metrics]:
    """Return the cross-entropy in nats per real token, and both accuracies; padding counts nowhere."""
    losses = measure_losses(logits, targets)
    return jnp.mean(losses, where=real), count_right(logits.argmax(-1) == targets, real)


def count_right(right: Bool[Array, "B T"], real: Bool[Array, "B T"]) -> Metrics:
    """Return the accuracy by sequence and by token."""
    token_accuracy = jnp.mean(right, where=real, dtype=jnp.float32)
    return {"accuracy": _measure_share((right | ~real).all(-1)), "token_accuracy": token_accuracy}


def _measure_share(right: Bool[Array, " B"]) -> jax.Array:
    """Return the share of right answers; exactly 1 when all are, where a mean times 1/n may round below."""
    return jnp.where(right.all(), 1.0, jnp.mean(right, dtype=jnp.float32))
