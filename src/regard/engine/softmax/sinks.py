"""Sinks: a logit per head that takes part in the softmax once, and takes its weight nowhere."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array


class Sunk(NamedTuple):
    """What sinks leave to the keys."""

    share: Array  # of the weight; 1 - share is the sink's
    lse: Array  # of keys and sink together
    entropy: Array


def sink(sinks: Array, lse: Array, entropy: Array) -> Sunk:
    """Let a sink join a softmax that is done: its other weights shrink by one factor, the share they keep.

    share = e^(lse - lse'),  lse' = log(e^lse + e^sink)
    H' = -sum_s share p_s log(share p_s) - (1 - share) log(1 - share)
       = share H - share log share - (1 - share) log(1 - share)

    Args:
        sinks: logits that broadcast against `lse`; -inf is no sink.
        lse: of the keys alone, -inf where there are none.
        entropy: of the keys alone.

    Returns:
        The share of the keys, 0 where there are none, and statistics of keys and sink together.
    """
    sinks = sinks.astype(lse.dtype)
    peak = jax.lax.stop_gradient(jnp.maximum(lse, sinks))
    base = jnp.where(peak == -jnp.inf, 0, peak)
    keys, rest = jnp.exp(lse - base), jnp.exp(sinks - base)
    some = peak != -jnp.inf
    total = jnp.where(some, keys + rest, 1)
    share, rest = keys / total, rest / total
    entropy = share * entropy + _surprise(share) + _surprise(rest)
    return Sunk(share, jnp.where(some, base + jnp.log(total), -jnp.inf), entropy)


def _surprise(part: Array) -> Array:
    """-p log p, 0 at 0."""
    return -part * jnp.log(jnp.where(part > 0, part, 1))
