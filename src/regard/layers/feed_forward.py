"""The feed-forward branch of a block."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from regard.arguments import guided, read_number
from regard.axes import Array, ArrayLike, Hidden
from regard.layers.choices import check_choice, check_initializers, check_options
from regard.layers.dropout import build_dropout
from regard.layers.multi_head import check_features

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_quick": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "silu": jax.nn.silu,
}


@guided
class FeedForward(nnx.Module):
    """Feed-forward branch: widens every position, applies the activation, and narrows it again.

    output = activation(x W1 + b1) W2 + b2
    gated:   output = (activation(x Wg + bg) * (x W1 + b1)) W2 + b2

    Args:
        d_model, d_ff: width M of input and output, and F in between.
        activation: "relu", "gelu_tanh" (the tanh approximation of GELU, within 4.8e-4 of it), "gelu_erf"
            (GELU itself), "gelu_quick" (x sigmoid(1.702 x), within 0.021 of it), or "silu".
        gated: whether a second map, `gate`, goes through the activation and multiplies the first: GLU (silu
            makes it SwiGLU, gelu_tanh GeGLU).
        gate_limit: L, with `gated`: activation(min(g, L)) * (clip(w, -L, L) + 1), as in gpt-oss, of what the
            two maps give. None means activation(g) * w.
        dropout_rate: in [0, 1), on the hidden layer, after the activation.
        use_bias: whether the maps have biases.
        dtype, param_dtype, kernel_init, bias_init, precision, rngs: as in `MultiHeadAttention`.

    Raises:
        ValueError: an unknown activation, sizes below 1, a dropout rate outside [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard.layers import FeedForward
        >>> FeedForward(3, 7, activation="silu", rngs=nnx.Rngs(0))(jnp.ones((2, 5, 3))).shape
        (2, 5, 3)

    Reference: Vaswani et al., "Attention Is All You Need", 2017, section 3.3; Shazeer, "GLU Variants Improve
    Transformer", 2020, equation 6; Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str = "gelu_tanh",
        gated: bool = False,
        gate_limit: float | None = None,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = nnx.initializers.glorot_uniform(),  # noqa: B008 (a pure function)
        bias_init: Any = nnx.initializers.zeros_init(),  # noqa: B008
        precision: Any = None,
        rngs: nnx.Rngs,
    ):
        shared = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype, "precision": precision}
        shared |= {"rngs": rngs}
        check_options({"d_model": d_model, "d_ff": d_ff}, gated=gated, **shared)
        check_initializers(kernel_init=kernel_init, bias_init=bias_init)
        check_activation(activation, gated, gate_limit)
        self.d_model, self.d_ff, self.activation, self.gate_limit = d_model, d_ff, activation, gate_limit
        linear = functools.partial(nnx.Linear, kernel_init=kernel_init, bias_init=bias_init, **shared)
        self.gate = linear(d_model, d_ff) if gated else None
        self.widen = linear(d_model, d_ff)
        self.narrow = linear(d_ff, d_model)
        self.dropout = build_dropout(dropout_rate, rngs)

    def __call__(self, x: ArrayLike) -> Hidden:
        """Apply the branch to every position of x, `(*B, T, M)`; ValueError for another rank or width."""
        x = check_features("x", x, self.d_model)
        gate = None if self.gate is None else self.gate(x)
        hidden = activate(self.activation, gate, self.widen(x), self.gate_limit)
        return self.narrow(self.dropout(hidden))


def check_activation(activation: str, gated: bool, gate_limit: float | None) -> None:
    """Raise for an unknown activation, and for a limit of a gate that is not there."""
    check_choice("activation", activation, ACTIVATIONS)
    if gate_limit is not None and not (gated and read_number("gate_limit", gate_limit) > 0):
        raise ValueError(
            f"gate_limit: expected None, or a number above 0 with gated=True; got {gate_limit} with"
            f" gated={gated}"
        )


def activate(activation: str, gate: Array | None, widened: Array, limit: float | None) -> Array:
    """Compute the hidden layer from what the maps of a feed-forward branch give."""
    if gate is None:
        return ACTIVATIONS[activation](widened)
    if limit is None:
        return ACTIVATIONS[activation](gate) * widened
    # A minimum loses NaN where XLA's CPU makes it part of a product's kernel.
    bound = jnp.asarray(limit, gate.dtype)
    gate = jax.lax.clamp(jnp.asarray(-jnp.inf, gate.dtype), gate, bound)
    return ACTIVATIONS[activation](gate) * (jax.lax.clamp(-bound, widened, bound) + 1)
