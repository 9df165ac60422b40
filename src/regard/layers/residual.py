"""Residual connections: where a branch leaves the stream, and how it comes back."""

from __future__ import annotations

from typing import Any, get_args

import jax.numpy as jnp
from flax import nnx

from regard.axes import Array
from regard.layers.dropout import build_dropout
from regard.layers.normalisation import EPSILON, NormPlace, build_norm


class Residual(nnx.Module):
    """The way around a branch, by where it normalises.

    "pre":   x + dropout(branch(norm(x)))
    "post":  norm(x + dropout(branch(x)))
    "both":  x + dropout(branch_norm(branch(norm(x))))
    """

    def __init__(
        self,
        d_model: int,
        *,
        place: str = "pre",
        kind: str = "layer",
        epsilon: float = EPSILON,
        dropout_rate: float = 0.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if place not in get_args(NormPlace):
            raise ValueError(f"norm: expected 'pre', 'post' or 'both', got {place!r}")
        options = {"epsilon": epsilon, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.place = place
        self.norm = build_norm(d_model, kind, **options)
        self.branch_norm = build_norm(d_model, kind, **options) if place == "both" else None
        self.dropout = build_dropout(dropout_rate, rngs)

    def enter(self, x: Array) -> Array:
        """What the branch reads."""
        return x if self.place == "post" else self.norm(x)

    def leave(self, x: Array, branch: Array) -> Array:
        """The residual stream with the branch's result added."""
        x = x + self.dropout(branch if self.branch_norm is None else self.branch_norm(branch))
        return self.norm(x) if self.place == "post" else x
