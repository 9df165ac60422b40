"""Feature maps: what query and key pass through before they meet, by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from regard.axes import Array


def elu1(x: Array) -> Array:
    """elu(x) + 1, positive: x + 1 above 0, e^x below. `jax.nn.elu(x) + 1` loses the digits of a small e^x."""
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


FEATURE_MAPS = {"identity": lambda x: x, "elu1": elu1, "relu": jax.nn.relu, "exp": jnp.exp}
