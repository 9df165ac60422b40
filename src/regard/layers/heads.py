"""The axis of heads: widths are split into it and joined again, masks and biases are given one."""

from typing import Any

import jax
import jax.numpy as jnp

import regard.masks as masks
from regard.arguments import as_array, whole_number
from regard.axes import Array, Float, Size, broadcast_named
from regard.engine.call.canonicalization import float_array
from regard.masks.data import check_boolean
from regard.masks.stored_masks import FromArray


def split_heads(x: Float[Array, "*B T W"], num_heads: int) -> Float[Array, "*B H T D"]:
    """Cut the last axis into heads and move them in front of the sequence."""
    return jnp.moveaxis(x.reshape((*x.shape[:-1], num_heads, x.shape[-1] // num_heads)), -2, -3)


def merge_heads(x: Float[Array, "*B H T E"]) -> Float[Array, "*B T W"]:
    """Lay the heads side by side on the last axis: Concat(head_1, ..., head_H)."""
    x = jnp.moveaxis(x, -3, -2)
    return x.reshape((*x.shape[:-2], x.shape[-2] * x.shape[-1]))


def match_leading(*shapes: tuple[Size, ...]) -> tuple[Size, ...]:
    """Return the leading axes of query, key and value together."""
    return broadcast_named(**dict(zip(("query", "key", "value"), shapes, strict=False)))


def check_heads(d_model: int, num_heads: int, num_key_heads: int, head_dim: int | None) -> int:
    """Check for numbers of heads that divide what they share, and return the width of a head."""
    for name, size in (("d_model", d_model), ("num_heads", num_heads), ("num_key_heads", num_key_heads)):
        whole_number(name, size, 1)
    if head_dim is None and d_model % num_heads:
        raise ValueError(
            f"num_heads: expected a divisor of d_model = {d_model}, got {num_heads}; choose one, or give"
            " head_dim, the width of a head"
        )
    if num_heads % num_key_heads:
        raise ValueError(
            f"num_key_heads: expected a divisor of num_heads = {num_heads}, got {num_key_heads};"
            f" {num_heads} gives every head its own keys, 1 shares them among all"
        )
    return d_model // num_heads if head_dim is None else head_dim


def as_mask(mask: Any, leading: tuple[Size, ...], T: Size, S: Size) -> masks.Mask | None:
    """Return a raw array as a mask, unless its shape has two readings."""
    if mask is None or isinstance(mask, masks.Mask):
        return mask
    stored = masks.from_array(check_boolean("mask", mask))
    if jnp.shape(mask) == (T, S) and leading and leading[0] == T and T not in (0, 1):
        raise ValueError(
            f"mask: shape {(T, S)} may mean (T, S) or, as the batch is {T} too, padding of shape (batch, S);"
            " say which: masks.from_array(mask) is (T, S), masks.valid_keys(mask) is (batch, S)"
        )
    return stored


def place_mask(mask: Any, leading: tuple[Size, ...], T: Size, S: Size) -> masks.Mask | None:
    """Return the mask with a heads axis in every stored array (*B, T, S), which then serves every head."""

    def place(node: Any) -> Any:
        if not isinstance(node, FromArray):
            return node
        array, extra = node.array, node.array.ndim - 2
        if extra not in (0, len(leading), len(leading) + 1):
            raise ValueError(
                f"mask: expected shape (T, S), (*B, T, S) or (*B, H, T, S) with *B = {leading}, got"
                f" {tuple(array.shape)}; write out the leading axes, 1 where the mask does not depend on them"
            )
        if extra == len(leading) > 0:
            array = array.reshape((*array.shape[:-2], 1, *array.shape[-2:]))
        return masks.from_array(array)

    mask = as_mask(mask, leading, T, S)
    return jax.tree.map(place, mask, is_leaf=lambda node: isinstance(node, FromArray))


def place_bias(bias: Any, leading: tuple[Size, ...]) -> Array | None:
    """Return the bias, which must say its heads axis: between batch and heads there is no natural reading."""
    if bias is None:
        return None
    bias = as_array("bias", "a floating-point array", jnp.asarray, float_array("bias", bias, 0))
    if bias.ndim > 2 and bias.ndim != len(leading) + 3:
        raise ValueError(
            f"bias: expected shape (T, S) or (*B, H, T, S) with *B = {leading}, got {tuple(bias.shape)};"
            " write out batch and heads, 1 for the one it does not depend on"
        )
    # At full rank (T, S) cannot be taken for (batch, S) further down.
    return jax.lax.broadcast_to_rank(bias, max(len(leading), 1) + 3)
