"""Contributions: what attention passes on, in vectors and logits rather than in weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from regard.arguments import as_array
from regard.axes import Array, ArrayLike, broadcast_named

if TYPE_CHECKING:
    from regard.models import Decoder


def weigh_values(weights: ArrayLike, value: ArrayLike, projection: ArrayLike) -> Array:
    """Compute the length of what each key passes on to each query, which its weight alone does not say.

    n_hts = p_hts |v_gs Wo_h|,  g = h // (H / K)

    Args:
        weights: p, `(*B, H, T, S)`, as `attend(..., aux=("weights",))` and `readouts.window` give them.
        value: `(*B, K, S, E)`, as the call has them; `observe` gives them by `problem.value`.
        projection: Wo, `(H * E, M)`, the kernel of the layer's `output_projection`.

    Returns:
        `(*B, H, T, S)`, float32, or float64 of such arrays; 0 where a weight is 0, whatever the value.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import inspection
        >>> value = jnp.array([[[4.0], [-1.0]]])  # one head, two keys
        >>> inspection.weigh_values(jnp.array([[[0.25, 0.75]]]), value, jnp.eye(1)).tolist()
        [[[1.0, 0.75]]]

    Reference: Kobayashi et al., "Attention is Not Only a Weight", 2020, equation 2.
    """
    weights = as_array("weights", "numbers", jnp.asarray, weights)
    value = as_array("value", "numbers", jnp.asarray, value)
    heads = weights.shape[-3] if weights.ndim > 2 else 1
    kernel = _divide("value", value, projection, heads)
    if weights.shape[-1] != value.shape[-2]:
        raise ValueError(f"weights: expected {value.shape[-2]} keys, as value has, got shape {weights.shape}")
    # Squares leave float16 at 256.
    wide = jnp.float64 if jnp.float64 in (weights.dtype, value.dtype) else jnp.float32
    passed = jnp.repeat(value, heads // value.shape[-3], -3).astype(wide) @ kernel.astype(wide)
    lengths = jnp.linalg.norm(passed, axis=-1)[..., None, :]
    broadcast_named(weights=weights.shape[:-2], value=lengths.shape[:-2])
    hidden = (weights == 0) & ~jnp.isfinite(lengths)
    return weights.astype(wide) * jnp.where(hidden, 0, lengths)


def measure_values(value: np.ndarray, projection: Any, heads: int) -> np.ndarray:
    """Compute |v_gs Wo_h|, float32 `(H, S)`, on the host and in the memory of one head's values."""
    kernel = np.asarray(_divide("value", value, projection, heads), np.float64)
    # Wo^T = Q R, and Q keeps lengths.
    triangles = np.linalg.qr(np.swapaxes(kernel, -1, -2), mode="r")
    lengths = []
    for head, triangle in enumerate(triangles):
        own = value[head * len(value) // heads].astype(np.float64)
        lengths.append(np.linalg.norm(own @ triangle.T, axis=-1))
    return np.stack(lengths).astype(np.float32)


def contribute(output: ArrayLike, projection: ArrayLike, direction: ArrayLike | None = None) -> Array:
    """Compute what each head adds to the residual stream, or along a direction of it, such as a logit's.

    c_htm = sum_e output_hte Wo_hem,  with a direction sum_m c_htm u_m

    The heads' sum, with the projection's bias, is what the layer writes. Behind a final norm a logit is no
    sum of such numbers; multiply the direction by the norm's scale and divide by the stream's size for it.

    Args:
        output: of the heads, `(*B, H, T, E)`, as `attend` and `observe` give it.
        projection: Wo, `(H * E, M)`.
        direction: u, `(M,)`: a column of the matrix that makes logits, or a difference of two; None: all M.

    Returns:
        `(*B, H, T, M)`, or `(*B, H, T)`.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard import inspection
        >>> output = jnp.array([[[1.0]], [[2.0]]])  # two heads of width 1, one query
        >>> inspection.contribute(output, jnp.array([[1.0, 0.0], [0.0, 1.0]])).tolist()
        [[[1.0, 0.0]], [[0.0, 2.0]]]

    Reference: Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021.
    """
    output = as_array("output", "numbers", jnp.asarray, output)
    kernel = _divide("output", output, projection, output.shape[-3] if output.ndim > 2 else 1)
    added = output @ kernel
    if direction is None:
        return added
    direction = as_array("direction", "numbers", jnp.asarray, direction)
    if direction.shape != added.shape[-1:]:
        raise ValueError(f"direction: expected shape {added.shape[-1:]}, got {direction.shape}")
    return added @ direction


def read_layers(model: Decoder, tokens: ArrayLike, **options: Any) -> Array:
    """Predict tokens from the residual stream behind every layer, as if it were the last (logit lens).

    logits_l = head(final_norm(stream_l))

    Args:
        model: a `regard.models.Decoder`.
        tokens: `(batch, T)`.
        **options: of the model's call: lengths, mask, positions.

    Returns:
        Logits `(L, batch, T, V)`; those of the last layer are the model's.

    Raises:
        TypeError: a model of another kind.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from regard import inspection, models
        >>> config = models.TransformerConfig(d_model=6, num_heads=3, d_ff=11, num_layers=2, vocab_size=13)
        >>> inspection.read_layers(models.Decoder(config, rngs=nnx.Rngs(0)), jnp.array([[1, 2, 3]])).shape
        (2, 1, 3, 13)

    Reference: nostalgebraist, "Interpreting GPT: the Logit Lens", 2020.
    """
    check_decoder(model)
    _, seen = model.trunk(tokens, aux=("hidden",), **options)
    norm = model.trunk.stack.final_norm
    streams = [block["hidden"] for block in seen["blocks"]]
    return jnp.stack([model.predict(x if norm is None else norm(x)) for x in streams])


def _divide(name: str, array: Any, projection: Any, heads: int) -> Array:
    """Return Wo by heads, (H, E, M)."""
    weights = projection[...] if hasattr(projection, "shape") else projection
    kernel = as_array("projection", "numbers", jnp.asarray, weights)
    fits = array.ndim > 2 and heads % array.shape[-3] == 0 and kernel.ndim == 2
    if not fits or kernel.shape[0] != heads * array.shape[-1]:
        expected = f"shape (H * E, M) with H = {heads} and {name} (*B, heads, length, E)"
        got = f"{tuple(kernel.shape)} and {name} {tuple(array.shape)}"
        raise ValueError(f"projection: expected {expected}, got {got}")
    return kernel.reshape((heads, array.shape[-1], -1))


def check_decoder(model: Any) -> None:
    """Raise unless a model is a `Decoder`."""
    from regard.models import Decoder

    if not isinstance(model, Decoder):
        raise TypeError(f"model: expected a regard.models.Decoder, got {type(model).__name__}")
