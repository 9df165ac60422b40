"""Norms, and the residual connections that hold them around the branches of a block."""

from __future__ import annotations

from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.arguments import check_flag, read_number
from regard.axes import Array
from regard.engine.platforms import find_platform
from regard.layers.choices import NormKind, NormPlace, check_choice
from regard.layers.dropout import build_dropout

EPSILON = 1e-6


def build_norm(
    width: int, kind: str = "layer", *, epsilon: float = EPSILON, **options: Any
) -> nnx.LayerNorm | nnx.RMSNorm | ZeroCenteredRMSNorm:
    """Build a LayerNorm, with a bias or without, or an RMSNorm, which does not subtract the mean either."""
    check_choice("norm_kind", kind, get_args(NormKind))
    check_epsilon(epsilon)
    options["epsilon"] = epsilon
    if kind == "rms":
        return nnx.RMSNorm(width, **options)
    if kind == "zero_centered_rms":
        return ZeroCenteredRMSNorm(width, **options)
    # flax's default, E[x^2] - E[x]^2, cancels when a residual stream has drifted far from 0.
    return nnx.LayerNorm(width, use_bias=kind == "layer", use_fast_variance=False, **options)


class ZeroCenteredRMSNorm(nnx.Module):
    """An RMSNorm whose scale is held less 1, to which 1 is added in float32 or wider, as in Gemma's files.

    1 + w has more digits than w: a sum that was rounded would not give the stored number back.

    Reference: Gemma3RMSNorm of transformers 5.24.
    """

    def __init__(
        self, width: int, *, epsilon: float, rngs: nnx.Rngs, dtype: Any = None, param_dtype: Any = jnp.float32
    ):
        self.epsilon, self.dtype = epsilon, dtype
        self.scale_less_one = nnx.Param(jnp.zeros(width, param_dtype))

    @property
    def scale(self) -> Array:
        """The factor of every feature."""
        return _widen(self.scale_less_one[...]) + 1

    def __call__(self, x: Array) -> Array:
        wide = _widen(x)
        size = jnp.mean(wide * wide, axis=-1, keepdims=True)
        scale = jnp.expand_dims(self.scale.astype(wide.dtype), range(x.ndim - 1))
        return (wide * jax.lax.rsqrt(size + self.epsilon) * scale).astype(self.dtype or x.dtype)


def _widen(x: Array) -> Array:
    """Return the array in float32, or float64 where it is."""
    return x.astype(np.promote_types(x.dtype, jnp.float32))


def check_epsilon(epsilon: float) -> None:
    """Raise for what no norm can add to a variance."""
    if not read_number("norm_epsilon", epsilon) >= 0:
        raise ValueError(f"norm_epsilon: expected a number of at least 0, got {epsilon}")


class Residual(nnx.Module):
    """Residual connection around a branch, with its norms and dropout.

    "pre":   x + dropout(branch(norm(x)))
    "post":  norm(x + dropout(branch(x)))
    "both":  x + dropout(branch_norm(branch(norm(x))))

    Without `norm_input`, the first norm of "pre" and "both" is left out. `norms` are their options.
    """

    def __init__(
        self, width: int, *, place: str, kind: str, dropout_rate: float, norm_input: bool = True, **norms: Any
    ):
        check_choice("norm", place, get_args(NormPlace))
        check_flag("norm_input", norm_input)
        self.place = place
        self.norm = build_norm(width, kind, **norms) if norm_input or place == "post" else None
        self.branch_norm = build_norm(width, kind, **norms) if place == "both" else None
        self.dropout = build_dropout(dropout_rate, norms["rngs"])

    def enter(self, x: Array) -> Array:
        """Return what the branch reads."""
        return x if self.place == "post" or self.norm is None else self.norm(_materialise(x))

    def leave(self, x: Array, branch: Array) -> Array:
        """Return the residual stream with the branch's result added."""
        x = x + self.dropout(branch if self.branch_norm is None else self.branch_norm(branch))
        return self.norm(_materialise(x)) if self.place == "post" and self.norm is not None else x


def _materialise(x: Array) -> Array:
    """Keep XLA's CPU from adding up the whole residual stream anew in each norm, in ever larger programs."""
    return jax.lax.optimization_barrier(x) if find_platform(x).name == "cpu" else x
