"""Norms over the model width, and the heads'."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx

EPSILON = 1e-6

NormKind = Literal["layer", "rms"]
NormPlace = Literal["pre", "post", "both"]


def build_norm(
    width: int,
    kind: str = "layer",
    *,
    epsilon: float = EPSILON,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> nnx.LayerNorm | nnx.RMSNorm:
    """LayerNorm ("layer"), or RMSNorm ("rms"), which neither subtracts the mean nor has a bias."""
    options = {"epsilon": epsilon, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    if kind == "rms":
        return nnx.RMSNorm(width, **options)
    if kind != "layer":
        raise ValueError(f"norm_kind: expected 'layer' or 'rms', got {kind!r}")
    # flax's default, E[x^2] - E[x]^2, cancels when a residual stream has drifted far from 0.
    return nnx.LayerNorm(width, use_fast_variance=False, **options)
