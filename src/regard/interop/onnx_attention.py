"""ONNX operators with a softmax: Attention and the preview FlexAttention."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from regard import attend, masks, scores
from regard.arguments import as_array, read_number
from regard.axes import Array, ArrayLike
from regard.interop import layouts
from regard.interop.onnx_subgraphs import cell_function, spread_over
from regard.interop.onnx_tensors import join_heads, read_flag, read_heads, tensor, working_dtype
from regard.masks import Mask


class AttentionOutputs(NamedTuple):
    """The outputs of an ONNX Attention node, in its order."""

    output: Array  # as query, with the width of values
    present_key: Array  # (batch, kv_num_heads, past + new, D)
    present_value: Array  # (batch, kv_num_heads, past + new, E)
    qk_matmul_output: Array | None  # (batch, q_num_heads, T, S)


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    attn_mask: ArrayLike | None = None,
    past_key: ArrayLike | None = None,
    past_value: ArrayLike | None = None,
    nonpad_kv_seqlen: ArrayLike | None = None,
    *,
    is_causal: bool | int = False,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    qk_matmul_output_mode: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    backend: str | None = None,
) -> AttentionOutputs:
    """Compute the ONNX operator Attention (opsets 23, 24 and 25) with `regard.attend`.

    score_ts = softcap tanh(scale sum_d query_td key_sd / softcap) + attn_mask_ts
    output_te = sum_s softmax_s(score_ts) value_se, over past and new keys

    Query t sits at position p = offset + t, and key s at s. The offset is the length of `past_key`, or
    `nonpad_kv_seqlen` - T for each batch row, or 0. Inputs after the first three and attributes have ONNX's
    names. Softmax and sums are float32 at least, also where a node asks for less.

    Args:
        query: floating-point, `(batch, q_num_heads, T, D)`, or packed `(batch, T, q_num_heads * D)`.
        key, value: floating-point, `(batch, kv_num_heads, S, D or E)` or packed; grouped as in `attend`.
        attn_mask: boolean (True = may attend) or floating-point (added to scores), broadcast to
            `(batch, q_num_heads, T, past + S)`. A shorter last axis is filled up with keys that nobody may
            attend to. None means all may.
        past_key, past_value: `(batch, kv_num_heads, past, D or E)`, put before `key` and `value`.
        nonpad_kv_seqlen: how many keys of each batch row, from the first, are real; may be traced, and not be
            beside `past_key`. None means all.
        is_causal: nonzero for key s <= p only.
        q_num_heads, kv_num_heads: heads of query, and of key and value; needed where inputs are packed.
        scale: factor on the scores; None means 1/sqrt(D).
        softcap: bound of the scores; 0 means none.
        softmax_precision: ONNX's number of a float type. 11, float64, needs JAX's 64-bit types; for any
            other, as for None, the softmax is float32, or float64 for float64 inputs.
        qk_matmul_output_mode: which matrix to return as fourth output: 0 the scaled scores, 1 after the
            softcap, 2 with the mask added, too, 3 the weights. None, where no node asks for it, makes none.
        left_window_size, right_window_size: keys before and after p that may be attended to; -1 means all.
        backend: as in `attend`.

    Returns:
        The output, packed as the query is; keys and values with the past before them, heads unpacked; and the
        matrix asked for, or None. A query that may attend to nothing has output 0 and weights 0.

    Raises:
        TypeError: inputs that are not of floating point, a mask that is neither that nor boolean.
        ValueError: shapes or head counts that do not fit, half a past, a past with `nonpad_kv_seqlen`, a
            window below -1, a negative softcap, an unknown precision or mode.
        NotImplementedError: the backend asked for cannot serve the call.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.interop import onnx_ops
        >>> x = jnp.eye(4)[None]  # (batch, length, 2 heads of width 2)
        >>> out = onnx_ops.attention(x, x, x, is_causal=1, q_num_heads=2, kv_num_heads=2)
        >>> [f"{weight:.2f}" for weight in out.output[0, 1]]
        ['0.33', '0.67', '0.00', '0.00']

    Reference: ONNX operators, Attention, versions 23 to 25, as of ONNX 1.23. Mode 0 is what the text says,
    scores before the softcap; ONNX's own evaluator gives those after it.
    """
    packed = np.ndim(query) == 3
    query, key, value = read_heads(query, key, value, q_num_heads, kv_num_heads, 3, 4)
    key, value, past = _append(key, value, past_key, past_value)
    num_queries, num_keys = query.shape[2], key.shape[2]
    offset: Any = past
    parts: list[Mask | None] = []
    if nonpad_kv_seqlen is not None:
        if past_key is not None:
            raise ValueError(
                "nonpad_kv_seqlen: expected None together with past_key, whose keys are all real"
            )
        lengths = layouts.row_lengths("nonpad_kv_seqlen", nonpad_kv_seqlen, query.shape[0], num_keys)
        offset = lengths - num_queries
        parts.append(masks.lengths(lengths))
    if read_flag("is_causal", is_causal):
        parts.append(masks.causal())
    for name, size in (("left_window_size", left_window_size), ("right_window_size", right_window_size)):
        if isinstance(size, bool) or not isinstance(size, int) or size < -1:
            raise ValueError(f"{name}: expected a number of keys, or -1 for all; got {size!r}")
    if (left_window_size, right_window_size) != (-1, -1):
        parts.append(masks.from_flash_window(left_window_size, right_window_size))
    bias = None
    if attn_mask is not None:
        filled = _fill(as_array("attn_mask", "an array", jnp.asarray, attn_mask), num_keys)
        full = (*query.shape[:3], num_keys)
        # ONNX reads axes from the last one on, whatever sizes agree.
        filled = filled.reshape((*(1,) * (4 - filled.ndim), *filled.shape))
        if filled.dtype == bool:
            parts.append(layouts.read_mask("attn_mask", filled, full))
        else:
            bias = layouts.read_bias("attn_mask", filled, full)
    mode = qk_matmul_output_mode
    if mode not in (None, 0, 1, 2, 3):
        raise ValueError(f"qk_matmul_output_mode: expected None, 0, 1, 2 or 3; got {mode}")
    if not 0 <= read_number("softcap", softcap) < np.inf:
        raise ValueError(f"softcap: expected a number above 0, or 0 for none; got {softcap}")

    dtype = working_dtype(softmax_precision, query.dtype)
    present = key, value
    arrays = [array if dtype == query.dtype else array.astype(dtype) for array in (query, key, value)]
    plain = functools.partial(attend, *arrays, scale=scale, backend=backend)
    capped = functools.partial(plain, score=scores.softcap(softcap) if softcap else None)
    whole = functools.partial(capped, mask=layouts.all_of(parts), bias=bias, query_offset=offset)
    name = "weights" if mode == 3 else "scores"
    if mode in (2, 3):
        output, aux = whole(aux=(name,))
    else:
        # Scores that no mask has touched are those of a call without one.
        output, aux = whole(), {} if mode is None else (capped if mode else plain)(aux=(name,))[1]
    output = output.astype(query.dtype)
    matrix = aux[name].astype(query.dtype) if aux else None
    return AttentionOutputs(join_heads(output) if packed else output, *present, matrix)


def _append(key: Array, value: Array, past_key: Any, past_value: Any) -> tuple[Array, Array, int]:
    """Return keys and values with the past before them, and the length of the past."""
    if (past_key is None) != (past_value is None):
        raise ValueError("past_key, past_value: expected both or neither, got one")
    if past_key is None:
        return key, value, 0
    joined = []
    for name, past, new in (("past_key", past_key, key), ("past_value", past_value, value)):
        past = tensor(name, past, (4,))
        batch, heads, _, width = new.shape
        if past.dtype != new.dtype or (*past.shape[:2], past.shape[3]) != (batch, heads, width):
            raise ValueError(
                f"{name}: expected {new.dtype} of shape ({batch}, {heads}, past, {width}), to fit what is"
                f" appended; got {past.dtype} of shape {tuple(past.shape)}"
            )
        joined.append(jnp.concatenate((past, new), 2))
    if joined[0].shape[2] != joined[1].shape[2]:
        raise ValueError(
            f"past_value: expected as many rows as past_key, {joined[0].shape[2] - key.shape[2]}; got"
            f" {joined[1].shape[2] - value.shape[2]}"
        )
    return joined[0], joined[1], joined[0].shape[2] - key.shape[2]


def _fill(mask: Array, num_keys: int) -> Array:
    """Extend a mask of the first few keys to all keys; the rest may not be attended to."""
    floating = jnp.issubdtype(mask.dtype, jnp.floating)
    if mask.dtype != bool and not floating:
        raise TypeError(
            f"attn_mask: expected boolean (True = may attend) or floating point (added), got {mask.dtype}"
        )
    if mask.ndim == 0 or mask.shape[-1] > num_keys:
        raise ValueError(
            f"attn_mask: expected at most {num_keys} keys, past and new, on the last axis; got shape"
            f" {mask.shape}"
        )
    if mask.shape[-1] == num_keys:
        return mask
    missing = [(0, 0)] * (mask.ndim - 1) + [(0, num_keys - mask.shape[-1])]
    return jnp.pad(mask, missing, constant_values=-jnp.inf if floating else False)


def flex_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    scale: float | None = None,
    score_mod: Any = None,
    prob_mod: Any = None,
    softmax_precision: int | None = None,
    backend: str | None = None,
) -> Array:
    """Compute the ONNX preview operator FlexAttention with `regard.attend`.

    score_ts = score_mod(scale sum_d query_td key_sd)
    output_te = sum_s prob_mod(softmax_s(score_ts)) value_se

    A score_mod becomes a `scores.modifier`, evaluated tile by tile: what it makes of positions is never
    stored as a T x S matrix. A prob_mod needs the T x S weights.

    Args:
        query: floating-point, `(batch, q_num_heads, T, D)`.
        key, value: floating-point, `(batch, kv_num_heads, S, D or E)`; grouped as in `attend`.
        scale: factor on the scores; None means 1/sqrt(D).
        score_mod: an `onnx.GraphProto` from scores to scores `(batch, q_num_heads, T, S)`, of elementwise
            operators on scores, constants, and ranges made from the shape of the scores. None leaves them.
        prob_mod: such a graph from weights to weights. None leaves them.
        softmax_precision: as in `attention`. Graphs are evaluated in that of the softmax, float32 at least.
        backend: as in `attend`.

    Returns:
        The output `(batch, q_num_heads, T, E)`, in query's dtype; 0 for a query with all scores -inf.

    Raises:
        TypeError: inputs that are not of floating point.
        ValueError: shapes that do not fit, a graph with more than one input or output.
        NotImplementedError: an operator that is not elementwise; a backend that cannot serve the call.

    Example:
        >>> import jax.numpy as jnp
        >>> from onnx import parser
        >>> from regard.interop import onnx_ops
        >>> relu = parser.parse_graph("relu (float[B, H, T, S] s) => (float[B, H, T, S] r) {r = Relu(s)}")
        >>> x = jnp.asarray([[[[1.0], [-1.0]]]])
        >>> [f"{mean:.2f}" for mean in onnx_ops.flex_attention(x, x, x, score_mod=relu).ravel()]
        ['0.46', '-0.46']

    Reference: ONNX preview operators, FlexAttention, version 1, as of ONNX 1.23, whose own evaluator gives
    NaN where no key is left.
    """
    query, key, value = read_heads(query, key, value, None, None, 4)
    shape = (*query.shape[:3], key.shape[2])
    dtype = working_dtype(softmax_precision, query.dtype)
    arrays = [array if dtype == query.dtype else array.astype(dtype) for array in (query, key, value)]
    score = None if score_mod is None else scores.modifier(cell_function("score_mod", score_mod, shape))
    # The graph counts queries from 0, whatever the number of keys.
    call = functools.partial(attend, *arrays, scale=scale, score=score, query_offset=0, backend=backend)
    if prob_mod is None:
        return call().astype(query.dtype)
    weights = call(aux=("weights",))[1]["weights"]
    weights = spread_over(cell_function("prob_mod", prob_mod, shape), weights)
    batch, heads, num_queries, num_keys = shape
    groups = key.shape[1]  # query heads of a group are rows of one product
    weights = weights.reshape((batch, groups, heads // groups * num_queries, num_keys))
    output = jnp.einsum("bkrs,bkse->bkre", weights, value.astype(weights.dtype))
    return output.reshape((batch, heads, num_queries, value.shape[-1])).astype(query.dtype)
