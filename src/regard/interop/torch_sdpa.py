"""PyTorch's `scaled_dot_product_attention` on JAX arrays, answered by Regard."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from regard import attend, masks
from regard.arguments import check_flag
from regard.axes import Array, ArrayLike
from regard.engine.call.canonicalization import check_rate, float_array
from regard.engine.call.problem import broadcast_leading
from regard.interop import layouts
from regard.masks import Mask


def scaled_dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: Mask | ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | Array | None = None,
    enable_gqa: bool = False,
    *,
    rng: Array | None = None,
    **options: Any,
) -> Array | Any:
    """Answer a call of `torch.nn.functional.scaled_dot_product_attention` on JAX arrays with `regard.attend`.

    score_ls = scale sum_e query_le key_se + attn_mask_ls, or over the keys that attn_mask keeps
    output_lv = sum_s softmax_s(score_ls) value_sv

    The arguments have torch's names, order, defaults and meaning, and its letters: queries L, keys S, query
    heads Hq, key heads H, widths E and Ev. What differs: random numbers need a key, `rng`; `attn_mask` may
    also be a `masks.Mask`, and may come together with `is_causal`, when both hold (torch documents an error,
    and some of its kernels combine them); dtypes may differ. A query that may attend to nothing has output
    0, as in torch 2.13.

    Args:
        query, key, value: floating-point, `(..., Hq, L, E)`, `(..., H, S, E)` and `(..., H, S, Ev)`.
        attn_mask: boolean (True = may attend) or floating-point (added to the scaled scores), broadcasts to
            `(..., Hq, L, S)`; or a `masks.Mask`. None means all may. `torch.nn.MultiheadAttention` has the
            opposite booleans: see `masks.from_torch_mha`.
        dropout_p: chance in [0, 1) that a weight is dropped; the others grow by 1 / (1 - dropout_p). As in
            torch there is no evaluation mode: pass 0.0 when not training.
        is_causal: keep key s <= l only, counted from the top left, also where L != S.
        scale: factor on the scores; None means 1/sqrt(E).
        enable_gqa: let Hq be a multiple of H. Off, heads must be as many, or one.
        rng: random key, needed when dropout_p > 0. The pattern is that of `attend`, not torch's.
        options: all others of `regard.attend`, such as score, sinks, query_offset and aux.

    Returns:
        The output `(..., Hq, L, Ev)`, in query's dtype; with `aux`, what `attend` returns.

    Raises:
        TypeError: inputs that are not of floating point; a mask that is neither that nor boolean.
        ValueError: shapes or heads that do not fit, grouped heads without `enable_gqa`, a mask with two
            readings, a dropout_p outside [0, 1) or without `rng`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.interop.torch_sdpa import scaled_dot_product_attention
        >>> x = jnp.eye(3)
        >>> [f"{weight:.2f}" for weight in scaled_dot_product_attention(x, x, x, is_causal=True)[1]]
        ['0.36', '0.64', '0.00']

    Reference: PyTorch 2.13, `torch.nn.functional.scaled_dot_product_attention`.
    """
    options = layouts.further_options(
        options,
        scaled_dot_product_attention,
        dropout_rate="write dropout_p=",
        **dict.fromkeys(("mask", "bias"), "write attn_mask="),
    )
    arrays = [float_array("query", query, 2), float_array("key", key, 2), float_array("value", value, 2)]
    full = _score_shape(arrays, check_flag("enable_gqa", enable_gqa))
    rate, remedy = check_rate("dropout_p", dropout_p), "dropout_p=0.0 when not training"
    layouts.demand_key("rng", rng, rate, f"dropout_p = {rate}", remedy)
    causal = masks.causal() if check_flag("is_causal", is_causal) else None
    mask, bias = _read(attn_mask, full)
    mask = layouts.all_of([mask, causal])
    options = layouts.from_the_first(options, attn_mask, full)
    return attend(*arrays, mask=mask, bias=bias, scale=scale, dropout_rate=dropout_p, rng=rng, **options)


def _score_shape(arrays: list[Array], enable_gqa: bool) -> tuple[int, ...]:
    """Return (..., Hq, L, S), and refuse grouped heads unless they are enabled."""
    query, key, value = arrays
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    try:
        leading = broadcast_leading(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    except ValueError as error:
        raise ValueError(
            f"query, key, value: {error}; got {shapes}. Arrays are (..., heads, length, width)"
        ) from None
    grouped = any(leading[-1] > array.shape[-3] > 1 for array in (key, value) if array.ndim > 2)
    if grouped and not enable_gqa:
        raise ValueError(
            f"enable_gqa: expected True where several query heads share a key head, got False with {shapes};"
            " pass enable_gqa=True, or swap axes -3 and -2 if they are (batch, length, heads, width)"
        )
    return (*leading, query.shape[-2], key.shape[-2])


def _read(attn_mask: Any, full: tuple[int, ...]) -> tuple[Mask | None, Array | None]:
    """Split attn_mask into a mask, if it is boolean, and a bias, if it is floating point."""
    if attn_mask is None or isinstance(attn_mask, Mask):
        return attn_mask, None
    array = attn_mask if hasattr(attn_mask, "dtype") else np.asarray(attn_mask)
    if array.dtype == bool:
        return layouts.read_mask("attn_mask", array, full), None
    if jnp.issubdtype(array.dtype, jnp.floating):
        return None, layouts.read_bias("attn_mask", array, full)
    raise TypeError(
        f"attn_mask: expected booleans (True = may attend) or floating-point numbers to add, got"
        f" {array.dtype}; write attn_mask != 0 if nonzero means may attend"
    )
