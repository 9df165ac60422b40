"""ONNX's attention operators on JAX arrays. Start from `attention`, or from `run_node` for a node of a model.

Each function has its operator's inputs, in their order, and its attributes by name; `run_node` takes them
from a node of a model. Only graphs and nodes need the package `onnx` itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from regard.axes import Array, ArrayLike
from regard.interop.onnx_linear import LinearAttentionOutputs as LinearAttentionOutputs
from regard.interop.onnx_linear import linear_attention
from regard.interop.onnx_rotary import rotary_embedding
from regard.interop.onnx_softmax import AttentionOutputs as AttentionOutputs
from regard.interop.onnx_softmax import attention, flex_attention

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
        TypeError: as the operator's function.
        ValueError: as the operator's function.

    Example:
        >>> import jax.numpy as jnp
        >>> from onnx import helper
        >>> from regard.interop import onnx_ops
        >>> node = helper.make_node("Attention", ["q", "k", "v"], ["y"], is_causal=1)
        >>> x = jnp.eye(2)[None, None]
        >>> [f"{weight:.2f}" for weight in onnx_ops.run_node(node, {"q": x, "k": x, "v": x})["y"].ravel()]
        ['1.00', '0.00', '0.33', '0.67']
    """
    from onnx.helper import get_attribute_value

    name = ("" if node.domain == "ai.onnx" else node.domain, node.op_type)
    if name not in _OPERATORS:
        known = ", ".join(operator for _, operator in _OPERATORS)
        raise NotImplementedError(
            f"node: expected one of {known}; got {node.op_type} of domain {node.domain!r}"
        )
    function = _OPERATORS[name]
    parameters = inspect.signature(function).parameters
    attributes = {one.name: get_attribute_value(one) for one in node.attribute}
    unknown = [one for one in attributes if one not in parameters]
    if unknown:
        raise NotImplementedError(f"{node.op_type}: the attribute {unknown[0]!r} is not known here")
    attributes = {
        key: value.decode() if isinstance(value, bytes) else value for key, value in attributes.items()
    }
    if "backend" in parameters:
        attributes["backend"] = backend
    if node.op_type == "Attention":
        asked = len(node.output) > 3 and node.output[3]
        attributes["qk_matmul_output_mode"] = attributes.get("qk_matmul_output_mode", 0) if asked else None
    results = function(*(tensors[one] if one else None for one in node.input), **attributes)
    if not isinstance(results, tuple):
        results = (results,)
    return {one: result for one, result in zip(node.output, results, strict=False) if one}
