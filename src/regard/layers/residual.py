"""Residual connections: where a branch leaves the stream, and how it comes back."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx

from regard.axes import Array
from regard.layers.dropout import build_dropout

EPSILON = 1e-6


def build_norm(
    d_model: int, *, dtype: Any = None, param_dtype: Any = jnp.float32, rngs: nnx.Rngs
) -> nnx.LayerNorm:
    """LayerNorm over the model width, with the variance computed from differences to the mean."""
    # flax's default, E[x^2] - E[x]^2, cancels when a residual stream has drifted far from 0.
    return nnx.LayerNorm(
        d_model, epsilon=EPSILON, dtype=dtype, param_dtype=param_dtype, use_fast_variance=False, rngs=rngs
    )


class Residual(nnx.Module):
    """The way around a branch: x + dropout(branch(norm(x))), or norm(x + dropout(branch(x)))."""

    def __init__(
        self, d_model: int, *, norm: str, dropout_rate: float, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
    ):
        if norm not in ("pre", "post"):
            raise ValueError(f"norm: expected 'pre' or 'post', got {norm!r}")
        self.norm = norm
        self.layer_norm = build_norm(d_model, dtype=dtype, param_dtype=param_dtype, rngs=rngs)
        self.dropout = build_dropout(dropout_rate, rngs)

    def enter(self, x: Array) -> Array:
        """What the branch reads."""
        return self.layer_norm(x) if self.norm == "pre" else x

    def leave(self, x: Array, branch: Array) -> Array:
        """The residual stream with the branch's result added."""
        x = x + self.dropout(branch)
        return x if self.norm == "pre" else self.layer_norm(x)
