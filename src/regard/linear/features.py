"""Feature maps of query and key, by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from regard.axes import Array


def elu1(x: Array) -> Array:
    """Compute elu(x) + 1; `jax.nn.elu(x) + 1` loses the digits of a small e^x."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


FEATURE_MAPS = {"identity": lambda x: x, "elu1": elu1, "relu": jax.nn.relu, "exp": jnp.exp}
