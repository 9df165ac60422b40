"""Sinks: a logit per head that takes part in the softmax once, and takes its weight nowhere."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from regard.axes import Array
from regard.engine.softmax.exponential import finite_base


class Sunk(NamedTuple):
    """The part of the softmax that sinks leave to the keys."""

    share: Array  # of the weight; 1 - share is the sink's
    lse: Array  # of keys and sink together
    entropy: Array


def sink(sinks: Array, lse: Array, entropy: Array) -> Sunk:
    """Let a sink join a softmax that is done: its other weights shrink by one factor, the share they keep.

    share = e^(lse - lse'),  lse' = log(e^lse + e^sink)
    H' = -sum_s share p_s log(share p_s) - (1 - share) log(1 - share)
       = share H - share log share - (1 - share) log(1 - share)

    A logit of -inf is no sink; without keys lse is -inf, and the share 0.
    """
    sinks = sinks.astype(lse.dtype)
    base = finite_base(jax.lax.stop_gradient(jnp.maximum(lse, sinks)))
    keys, rest = jnp.exp(lse - base), jnp.exp(sinks - base)
    some = (lse != -jnp.inf) | (sinks != -jnp.inf)
    total = jnp.where(some, keys + rest, 1)
    share, rest = keys / total, rest / total
    entropy = share * entropy + _entropy_term(share) + _entropy_term(rest)
    return Sunk(share, jnp.where(some, base + jnp.log(total), -jnp.inf), entropy)


def _entropy_term(part: Array) -> Array:
    """Compute -p log p, 0 at 0."""
    return -part * jnp.log(jnp.where(part > 0, part, 1))
