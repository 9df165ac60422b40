"""Norms over the model width, and the heads'."""

from __future__ import annotations

from typing import Any, get_args

import jax.numpy as jnp
from flax import nnx

from regard.layers.choices import NormKind, check_choice

EPSILON = 1e-6


def build_norm(
    width: int,
    kind: str = "layer",
    *,
    epsilon: float = EPSILON,
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    rngs: nnx.Rngs,
) -> nnx.LayerNorm | nnx.RMSNorm:
    """Build a LayerNorm ("layer"), or an RMSNorm ("rms"), which neither subtracts the mean nor has a bias."""
    check_choice("norm_kind", kind, get_args(NormKind))
    options = {"epsilon": epsilon, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
    if kind == "rms":
        return nnx.RMSNorm(width, **options)
    # flax's default, E[x^2] - E[x]^2, cancels when a residual stream has drifted far from 0.
    return nnx.LayerNorm(width, use_fast_variance=False, **options)
