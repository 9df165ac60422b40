"""`jax.nn.dot_product_attention`, answered by Regard."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from regard import masks
from regard.arguments import check_flag
from regard.axes import Array, ArrayLike
from regard.interop import layouts
from regard.masks import Mask


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: Mask | ArrayLike | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    **options: Any,
) -> Array | Any:
    """Answer a call of `jax.nn.dot_product_attention` with `regard.attend`.

    score_nts = scale sum_h query_tnh key_snh + bias_nts over the keys that query t may attend to
    output_tnh = sum_s softmax_s(score_nts) value_snh

    The arguments have jax.nn's names, order, defaults and meaning, and its letters: batch B, queries T, keys
    S, query heads N, key heads K, width H. Shapes are `(B, T, N, H)`, or `(T, N, H)` without a batch. Query
    t sits at position t and key s at s, also where T != S, unless offsets or positions among `options` say
    where they do: causal keeps keys up to the query's position. What differs:

    - `mask` may also be a `masks.Mask`, or an integer array. Where T != S, a mask or score of Regard's that
      reads positions asks for `query_offset`, as in `attend`.
    - A query that may attend to nothing gets output 0 and residual -inf. jax.nn gives it the mean of all
      values, or NaN where a bias of -inf removed the keys.
    - Rank 2 is refused; jax.nn returns `value` as it came.
    - The softmax of float64 inputs is float64, that of others float32; jax.nn's is always float32.
    - The residual is float32 (float64 for float64) and has a gradient; jax.nn rounds and stops it.
    - N may be a multiple of K, as in jax.nn, and the width of values may differ from H.
    - `options` of `attend` that jax.nn lacks, such as score, sinks, dropout_rate or query_offset, go with it.

    Args:
        query, key, value: floating-point, `(B, T, N, H)`, `(B, S, K, H)` and `(B, S, K, E)`, or without B.
        bias: floating-point, added to the scaled scores; broadcasts to `(B, N, T, S)`. -inf removes a key.
        mask: a `masks.Mask`, or a boolean array (True = may attend) that broadcasts to `(B, N, T, S)`. None
            means all may.
        scale: factor on the scores; None means 1/sqrt(H).
        is_causal: keep keys up to the query's position only.
        query_seq_lengths: one integer per batch row, in 0..T; queries from there on have output 0. None: T.
        key_value_seq_lengths: one integer per batch row, in 0..S; keys from there on are padding. None: S.
        local_window_size: (left, right), how many keys before and after its own a query sees, or one number.
        implementation: None, "xla" or "cudnn", a hint that is not taken: Regard picks its own backend.
        return_residual: also return the log of the sum of exponentials.
        options: all others of `regard.attend`, as they are there.

    Returns:
        The output, `(B, T, N, E)` or `(T, N, E)`, in query's dtype; with `return_residual`, a pair of it and
        the residual `(B, T, N)` or `(T, N)`; with names in `aux`, a pair of it and the dict of
        `attend`, whose arrays are `(B, N, ...)`.

    Raises:
        TypeError: inputs that are not of floating point, a float mask (pass it as `bias`), lengths or window
            sizes that are not integers.
        ValueError: shapes or heads that do not fit, a mask with two readings, lengths beyond the arrays, a
            negative window, an unknown implementation, `aux` beside `return_residual`.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.interop.jax_nn import dot_product_attention
        >>> x = jnp.eye(3)[:, None]  # (length, 1 head, width)
        >>> [f"{weight:.2f}" for weight in dot_product_attention(x, x, x, is_causal=True)[1, 0]]
        ['0.36', '0.64', '0.00']

    Reference: `jax.nn.dot_product_attention` of JAX 0.10 and 0.12.
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(
            f"implementation: expected None, 'xla' or 'cudnn', a hint; got {implementation!r}. To choose a"
            " backend of Regard's, pass backend="
        )
    options = layouts.further_options(options, dot_product_attention)
    if check_flag("return_residual", return_residual) and options.get("aux"):
        raise ValueError(
            f'aux: expected none beside return_residual=True, got {options["aux"]!r}; "lse" in aux is the'
            " residual, heads first"
        )
    call = layouts.HeadsLast(query, key, value, range(3, 5), options.get("score"))
    batch, _, num_queries, num_keys = call.shape
    options = layouts.from_the_first(options, mask, call.shape)
    parts = [layouts.read_mask("mask", mask, call.shape)]
    if check_flag("is_causal", is_causal):
        parts.append(masks.causal())
    if local_window_size is not None:
        parts.append(masks.from_jax_window(local_window_size))
    if key_value_seq_lengths is not None:
        lengths = layouts.row_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, num_keys)
        moved = options.keys() & {"key_offset", "key_positions"}  # `lengths` counts positions
        real = jnp.arange(num_keys)[None] < jnp.asarray(lengths)[:, None] if moved else lengths
        parts.append(masks.valid_keys(real) if moved else masks.lengths(real))
    if query_seq_lengths is not None:
        lengths = layouts.row_lengths("query_seq_lengths", query_seq_lengths, batch, num_queries)
        real = jnp.arange(num_queries)[None] < jnp.asarray(lengths)[:, None]
        parts.append(masks.from_array(real[:, None, :, None]))
    if return_residual:
        options = {**options, "aux": ("lse",)}
    bias = layouts.read_bias("bias", bias, call.shape)
    output, aux = call.attend(mask=layouts.all_of(parts), bias=bias, scale=scale, **options)
    if return_residual:
        return output, jnp.swapaxes(aux["lse"], -2, -1)
    return (output, aux) if aux else output
