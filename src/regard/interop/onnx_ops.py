"""ONNX's attention operators on JAX arrays. Start from `attention`, or from `run_node` for a node of a model.

Each function has its operator's inputs, in their order, and its attributes by name; `run_node` takes them
from a node of a model. Only graphs and nodes need the package `onnx` itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from regard import linear
from regard.arguments import check_kind, integers, whole_number
from regard.axes import Array, ArrayLike
from regard.interop.onnx_attention import AttentionOutputs as AttentionOutputs
from regard.interop.onnx_attention import attention as attention
from regard.interop.onnx_attention import flex_attention as flex_attention
from regard.interop.onnx_tensors import join_heads, read_flag, read_heads, split_heads, tensor
from regard.positions.rotation import rotate


def rotary_embedding(
    features: ArrayLike,
    cos_cache: ArrayLike,
    sin_cache: ArrayLike,
    position_ids: ArrayLike | None = None,
    *,
    interleaved: bool | int = False,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Array:
    """Compute the ONNX operator RotaryEmbedding (opset 23) with `regard.positions.rotate`.

    (a, b) -> (a cos - b sin, a sin + b cos) for each pair of features

    Args:
        features: floating-point, `(batch, num_heads, T, D)`, or packed `(batch, T, num_heads * D)`.
        cos_cache: floats, cosines of F pairs: by position_ids a table `(positions, F)`, else `(batch, T, F)`.
        sin_cache: sines, of the same shape.
        position_ids: integers `(batch, T)`, rows of the tables, beyond which is NaN. None: caches per token.
        interleaved: nonzero pairs feature 2i with 2i + 1, zero i with i + F.
        num_heads: needed where the features are packed; None or their axis elsewhere.
        rotary_embedding_dim: how many features of a head, from the first, are turned; 0 means all.

    Returns:
        The turned features, in their shape and dtype; the turn is computed in float32 at least.

    Raises:
        TypeError: features or caches that are not of floating point, positions that are not integers.
        ValueError: shapes that do not fit, among them caches that do not hold half of what is turned.

    Example:
        >>> import jax.numpy as jnp
        >>> from regard.interop import onnx_ops
        >>> x, angle = jnp.ones((1, 1, 2, 2)), jnp.asarray([[0.0], [jnp.pi / 2]])
        >>> turned = onnx_ops.rotary_embedding(x, jnp.cos(angle), jnp.sin(angle), [[0, 1]])
        >>> [f"{feature:.2f}" for feature in turned.ravel()]
        ['1.00', '1.00', '-1.00', '1.00']

    Reference: ONNX operators, RotaryEmbedding, version 23; Su et al., "RoFormer", 2021, section 3.2.2.
    """
    features = tensor("features", features, (3, 4))
    packed = features.ndim == 3
    features = split_heads("features", features, "num_heads", num_heads or None)
    batch, _, length, width = features.shape
    turned = whole_number("rotary_embedding_dim", rotary_embedding_dim, 0) or width
    if turned > width or turned % 2:
        raise ValueError(
            f"rotary_embedding_dim: expected pairs of the {width} features of a head, or 0 for all; got"
            f" {rotary_embedding_dim}"
        )
    if np.shape(cos_cache) != np.shape(sin_cache):
        raise ValueError(
            f"sin_cache: expected the shape of cos_cache, {np.shape(cos_cache)}; got {np.shape(sin_cache)}"
        )
    caches = []
    for name, cache in (("cos_cache", cos_cache), ("sin_cache", sin_cache)):
        caches.append(_per_token(name, cache, position_ids, (batch, length)))
        if 2 * caches[-1].shape[-1] != turned:
            raise ValueError(
                f"{name}: expected half of the {turned} features that are turned on the last axis, got"
                f" {caches[-1].shape[-1]}"
            )
    result = rotate(features, *caches, interleaved=read_flag("interleaved", interleaved))
    return join_heads(result) if packed else result


def _per_token(name: str, cache: ArrayLike, position_ids: ArrayLike | None, rows: tuple[int, int]) -> Array:
    """Return the cosines or sines of each token, (batch, T, F)."""
    array = tensor(name, cache, (3,) if position_ids is None else (2,))
    array = array.astype(np.promote_types(array.dtype, np.float32))
    if position_ids is None:
        if array.shape[:2] != rows:
            raise ValueError(f"{name}: expected one row per token, {rows}; got shape {array.shape}")
        return array
    index = integers("position_ids", position_ids)
    if index.shape != rows:
        raise ValueError(f"position_ids: expected one row of the table per token, {rows}; got {index.shape}")
    return jnp.where((index < 0)[..., None], jnp.nan, jnp.take(array, index, axis=0, mode="fill"))


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

    S_t = e^{decay_t} S_(t-1) + key_t u_t^T,  output_t = scale query_t^T S_t
    u_t = value_t, or under the rule `delta` beta_t (value_t - key_t^T e^{decay_t} S_(t-1))

    Inputs and attributes have ONNX's names. Heads are packed into the last axis, and grouped as in `attend`.
    States and sums are float32, float64 for float64 inputs.

    Args:
        query, key, value: floating-point, `(batch, T, q_num_heads * D)`, `(batch, T, kv_num_heads * D)` and
            `(batch, T, kv_num_heads * E)`; for a delta rule to be stable, keys are of length 1.
        past_state: floating-point, `(batch, kv_num_heads, D, E)`, S_0. None means zeros.
        decay: log of what is kept, at most 0: `(batch, T, kv_num_heads)`, or with one per channel of key
            `(batch, T, kv_num_heads * D)`; for the gated rules, and None for the others.
        beta: how much of what is stored under a key is replaced: `(batch, T, kv_num_heads)`, or
            `(batch, T, 1)` for all heads; for the delta rules, and None for the others.
        q_num_heads, kv_num_heads: heads of query, and of key and value, which divide them.
        update_rule: "linear", "gated", "delta" or "gated_delta".
        scale: factor on the output; 0 means 1/sqrt(D).
        chunk_size: tokens evaluated together, rounded down to a power of two; for speed alone.

    Returns:
        The output `(batch, T, q_num_heads * E)` in query's dtype, and the state after the last token, in the
        dtype of past_state, else of query.

    Raises:
        TypeError: inputs that are not of floating point, a chunk that is not an integer.
        ValueError: shapes or head counts that do not fit, an unknown rule, a rule without what it reads or
            with what it does not, a decay above 0 outside jit, a chunk below 1.

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
    if update_rule not in tuple(_READS):
        raise ValueError(f"update_rule: expected one of {', '.join(_READS)}; got {update_rule!r}")
    for name, array in (("decay", decay), ("beta", beta)):
        if (array is not None) != (name in _READS[update_rule]):
            expected = "an array" if array is None else "None"
            raise ValueError(
                f"{name}: expected {expected} under the rule {update_rule!r}, which reads"
                f" {' and '.join(_READS[update_rule]) or 'neither decay nor beta'}; got"
                f" {'None' if array is None else 'one'}"
            )
    chunk_size = whole_number("chunk_size", chunk_size, 1)
    query, key, value = read_heads(query, key, value, q_num_heads, kv_num_heads, 3)
    state = None if past_state is None else tensor("past_state", past_state, (4,))
    shape = (*key.shape[:2], key.shape[-1], value.shape[-1])
    if state is not None and state.shape != shape:
        raise ValueError(f"past_state: expected shape {shape}, got {state.shape}")
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


_OPERATORS = {
    ("", "Attention"): attention,
    ("", "RotaryEmbedding"): rotary_embedding,
    ("", "LinearAttention"): linear_attention,
    ("ai.onnx.preview", "FlexAttention"): flex_attention,
}


def run_node(node: Any, tensors: Mapping[str, ArrayLike], *, backend: str | None = None) -> dict[str, Array]:
    """Evaluate a node of an ONNX model: Attention, RotaryEmbedding, LinearAttention or FlexAttention.

    Args:
        node: an `onnx.NodeProto`.
        tensors: an array for each input that the node names.
        backend: as in `attend`, for the operators with a softmax.

    Returns:
        An array for each output that the node names.

    Raises:
        KeyError: an input that is not among the tensors.
        NotImplementedError: another operator, or an attribute that is not known here.
        TypeError, ValueError: as the operator's function; another number of inputs, more outputs than it has.

    Example:
        >>> import jax.numpy as jnp
        >>> from onnx import helper
        >>> from regard.interop import onnx_ops
        >>> node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)
        >>> x = jnp.eye(2)[None, None]
        >>> [f"{weight:.2f}" for weight in onnx_ops.run_node(node, {"q": x, "k": x, "v": x})["y"].ravel()]
        ['1.00', '0.00', '0.33', '0.67']
    """
    from onnx import NodeProto
    from onnx.helper import get_attribute_value

    check_kind("node", node, NodeProto)
    function = _OPERATORS.get(("" if node.domain == "ai.onnx" else node.domain, node.op_type))
    if function is None:
        operators = ", ".join(operator for _, operator in _OPERATORS)
        raise NotImplementedError(
            f"node: expected one of {operators}; got {node.op_type} of domain {node.domain!r}"
        )
    parameters = inspect.signature(function).parameters
    attributes: dict[str, Any] = {item.name: get_attribute_value(item) for item in node.attribute}
    for key in attributes:
        if key not in parameters:
            raise NotImplementedError(f"{node.op_type}: the attribute {key!r} is not known here")
    for key, value in attributes.items():
        attributes[key] = value.decode() if isinstance(value, bytes) else value
    if "backend" in parameters:
        attributes["backend"] = backend
    if node.op_type == "Attention":
        asked = len(node.output) > 3 and node.output[3]
        attributes["qk_matmul_output_mode"] = attributes.get("qk_matmul_output_mode", 0) if asked else None
    check_kind("tensors", tensors, Mapping)
    for name in node.input:
        if name and name not in tensors:
            raise KeyError(f"tensors: expected an array for each input, and there is none named {name!r}")
    inputs = [tensors[name] if name else None for name in node.input]
    places = [param for param in parameters.values() if param.kind is param.POSITIONAL_OR_KEYWORD]
    least = sum(param.default is param.empty for param in places)
    if not least <= len(inputs) <= len(places):
        raise ValueError(
            f"node: expected {least} to {len(places)} inputs of {node.op_type}, got {len(inputs)}"
        )
    results = function(*inputs, **attributes)
    results = results if isinstance(results, tuple) else (results,)
    if len(node.output) > len(results):
        raise ValueError(
            f"node: expected at most {len(results)} outputs of {node.op_type}, got {len(node.output)}"
        )
    return {output: result for output, result in zip(node.output, results, strict=False) if output}
