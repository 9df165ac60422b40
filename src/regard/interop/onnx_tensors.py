"""ONNX's tensors of attention: packed heads, and element types as numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.arguments import LARGEST, as_array, whole_number
from regard.axes import Array

# Element types of floating-point tensors, numbered as in onnx.proto.
FLOATS = {1: np.dtype(np.float32), 10: np.dtype(np.float16), 11: np.dtype(np.float64), 16: jnp.bfloat16.dtype}


def tensor(name: str, value: Any, ranks: tuple[int, ...]) -> Array:
    """Check for a floating-point input of one of these ranks, and return it as a JAX array."""
    array = as_array(name, "a floating-point tensor", jnp.asarray, value)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a floating-point tensor, got {array.dtype}")
    if array.ndim not in ranks:
        raise ValueError(
            f"{name}: expected {' or '.join(map(str, ranks))} axes, got shape {tuple(array.shape)}"
        )
    return array


def read_flag(name: str, flag: Any) -> bool:
    """Return a flag that is an integer, as ONNX has them: nonzero is True."""
    return bool(flag if isinstance(flag, bool | np.bool_) else whole_number(name, flag, -LARGEST))


def read_heads(
    query: Any, key: Any, value: Any, q_num_heads: int | None, kv_num_heads: int | None, *ranks: int
) -> tuple[Array, Array, Array]:
    """Check for floating-point inputs of these ranks, and return them as (batch, heads, length, width)."""
    query = tensor("query", query, ranks)
    key = tensor("key", key, ranks)
    value = tensor("value", value, ranks)
    query = split_heads("query", query, "q_num_heads", q_num_heads)
    key = split_heads("key", key, "kv_num_heads", kv_num_heads)
    return query, key, split_heads("value", value, "kv_num_heads", kv_num_heads)


def split_heads(name: str, array: Array, attribute: str, heads: int | None) -> Array:
    """Unpack (batch, length, heads * width) into (batch, heads, length, width); return 4 axes as they are."""
    heads = None if heads is None else whole_number(attribute, heads, 1)
    if array.ndim == 4:
        if heads is not None and heads != array.shape[1]:
            raise ValueError(
                f"{attribute}: expected None or the heads on axis 1 of {name}, {array.shape[1]}, because"
                f" {name} has 4 axes; got {heads}"
            )
        return array
    if heads is None or array.shape[-1] % heads:
        raise ValueError(
            f"{attribute}: expected a number of heads that divides the last axis of {name}"
            f" {tuple(array.shape)}, because its heads are packed; got {heads}"
        )
    return array.reshape((*array.shape[:2], heads, array.shape[-1] // heads)).swapaxes(1, 2)


def join_heads(array: Array) -> Array:
    """Pack (batch, heads, length, width) into (batch, length, heads * width)."""
    batch, heads, length, width = array.shape
    return array.swapaxes(1, 2).reshape((batch, length, heads * width))


def working_dtype(softmax_precision: int | None, dtype: Any) -> Any:
    """Return the dtype of inputs with which the softmax has at least the precision asked for."""
    if softmax_precision is None:
        return dtype
    if softmax_precision not in tuple(FLOATS):
        codes = ", ".join(f"{number} ({kind})" for number, kind in FLOATS.items())
        raise ValueError(f"softmax_precision: expected None or one of {codes}; got {softmax_precision}")
    if FLOATS[softmax_precision] != np.float64:
        return dtype  # sums are float32 at least
    if not jax.config.read("jax_enable_x64"):
        raise ValueError(
            "softmax_precision: expected at most float32 while JAX has 64-bit types disabled, got 11"
            " (float64); enable them with JAX_ENABLE_X64=1 in the environment, or leave it out"
        )
    return np.dtype(np.float64)
