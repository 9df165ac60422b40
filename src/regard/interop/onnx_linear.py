"""The ONNX operator LinearAttention."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from regard import linear
from regard.axes import Array, ArrayLike
from regard.interop.onnx_tensors import join_heads, read_heads, split_heads, tensor

# What each rule reads beside query, key and value.
_READS = {"linear": (), "gated": ("decay",), "delta": ("beta",), "gated_delta": ("decay", "beta")}


class LinearAttentionOutputs(NamedTuple):
    """The outputs of an ONNX LinearAttention node, in its order."""

    output: Array  # (batch, T, q_num_heads * E)
    present_state: Array  # (batch, kv_num_heads, D, E)


def linear_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    past_state: ArrayLike | None = None,
    decay: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str = "gated_delta",
    scale: float = 0.0,
    chunk_size: int = 64,
) -> LinearAttentionOutputs:
    """Compute the ONNX operator LinearAttention (opset 27) with `regard.linear.attend`.

    S_t = e^decay_t S_(t-1) + key_t u_t^T,  output_t = scale * query_t^T S_t
    u_t = value_t, or under a delta rule beta_t * (value_t - key_t^T e^decay_t S_(t-1))

    Inputs and attributes have ONNX's names. Heads are packed into the last axis, and grouped as in `attend`.
    States and sums are float32, float64 for float64 inputs.

    Args:
        query: floating-point, `(batch, T, q_num_heads * D)`.
        key: floating-point, `(batch, T, kv_num_heads * D)`; of length 1 for a delta rule to be stable.
        value: floating-point, `(batch, T, kv_num_heads * E)`.
        past_state: floating-point, `(batch, kv_num_heads, D, E)`, S_0. None means zeros.
        decay: log of what is kept, at most 0: `(batch, T, kv_num_heads)`, or with one per channel of key
            `(batch, T, kv_num_heads * D)`; for the gated rules, and None for the others.
        beta: how much of what is stored under a key is replaced: `(batch, T, kv_num_heads)`, or
            `(batch, T, 1)` for all heads; for the delta rules, and None for the others.
        q_num_heads: heads of query, a multiple of kv_num_heads.
        kv_num_heads: heads of key and value.
        update_rule: "linear", "gated", "delta" or "gated_delta".
        scale: factor on the output; 0 means 1/sqrt(D).
        chunk_size: tokens evaluated together, rounded down to a power of two; for speed alone.

    Returns:
        The output `(batch, T, q_num_heads * E)` in query's dtype, and the state after the last token, in the
        dtype of past_state, else of query.

    Raises:
        TypeError: inputs that are not of floating point.
        ValueError: shapes or head counts that do not fit, an unknown rule, a rule without what it reads or
            with what it does not, a chunk below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.interop import onnx_ops
        >>> x, value = jnp.ones((1, 2, 1)), jnp.asarray([[[2.0], [5.0]]])
        >>> outputs = onnx_ops.linear_attention(
        ...     x, x, value, beta=x, q_num_heads=1, kv_num_heads=1, update_rule="delta"
        ... )
        >>> outputs.output.tolist(), outputs.present_state.tolist()
        ([[[2.0], [5.0]]], [[[[5.0]]]])

    Reference: ONNX operators, LinearAttention, version 27, as of ONNX 1.23.
    """
    if update_rule not in _READS:
        raise ValueError(f"update_rule: expected one of {', '.join(_READS)}; got {update_rule!r}")
    for name, given in (("decay", decay), ("beta", beta)):
        if (given is not None) != (name in _READS[update_rule]):
            expected = "an array" if given is None else "None"
            raise ValueError(
                f"{name}: expected {expected} under the rule {update_rule!r}, which reads"
                f" {' and '.join(_READS[update_rule]) or 'neither decay nor beta'}; got"
                f" {'None' if given is None else 'one'}"
            )
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1 token, got {chunk_size}")
    query, key, value = read_heads(query, key, value, q_num_heads, kv_num_heads, (3,))
    state = None if past_state is None else tensor("past_state", past_state, (4,))
    output, after = linear.attend(
        query,
        key,
        value,
        decay=None if decay is None else _per_head("decay", decay, kv_num_heads, key.shape),
        rate=None if beta is None else _per_head("beta", beta, kv_num_heads, key.shape),
        scale=scale or None,
        initial=None if state is None else linear.State(state),
        return_state=True,
        chunk=1 << (chunk_size.bit_length() - 1),
    )
    return LinearAttentionOutputs(
        join_heads(output), after.memory.astype(query.dtype if state is None else state.dtype)
    )


def _per_head(name: str, packed: ArrayLike, heads: int, keys: tuple[int, ...]) -> Array:
    """Turn (batch, T, n) into (batch, n, T) for n = 1 or heads, into (batch, heads, T, D) for heads * D."""
    array = tensor(name, packed, (3,))
    batch, _, length, width = keys
    sizes = {"decay": (heads, heads * width), "beta": (heads, 1)}[name]
    if array.shape[:2] != (batch, length) or array.shape[2] not in sizes:
        raise ValueError(
            f"{name}: expected shape ({batch}, {length}, {sizes[0]} or {sizes[1]}), got {tuple(array.shape)}"
        )
    if name == "decay" and array.shape[2] != heads:
        return split_heads(name, array, "kv_num_heads", heads)
    return jnp.swapaxes(array, 1, 2)
