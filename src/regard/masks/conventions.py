"""Masks as other libraries write them. Each function is named after where its argument comes from."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

from regard.arguments import evaluate, whole_number
from regard.axes import ArrayLike
from regard.masks.data import check_boolean
from regard.masks.keys import valid_keys
from regard.masks.mask import Mask
from regard.masks.positional import causal, sliding_window
from regard.masks.stored_masks import from_array


def from_drop(array: ArrayLike) -> Mask:
    """Read a mask in which True (or nonzero) means *masked out*.

    keep = not array

    Args:
        array: boolean or integer array that broadcasts to `(*B, T, S)`.

    Returns:
        A mask.

    Raises:
        TypeError: a float array.

    Example:
        >>> from regard import masks
        >>> masks.from_drop([[False, True], [False, False]])
        from_array([[True, False], [True, True]])
    """
    return from_array(_read_dropped("array", array))


def from_torch_mha(
    attn_mask: ArrayLike | None = None,
    key_padding_mask: ArrayLike | None = None,
    *,
    num_heads: int | None = None,
    is_causal: bool = False,
) -> Mask:
    """Read the masks of `torch.nn.MultiheadAttention`, where True means *masked out*.

    Args:
        attn_mask: boolean `(T, S)`, or `(batch * num_heads, T, S)` together with `num_heads`.
        key_padding_mask: boolean `(batch, S)` or `(S,)`, True = padding.
        num_heads: H, needed to read a rank-3 `attn_mask`, whose first axis torch flattens batch first.
        is_causal: add the causal mask; in torch it is a hint beside an explicit `attn_mask`.

    Returns:
        The mask for query of shape `(batch, H, T, D)`.

    Raises:
        TypeError: a float mask; those are additive and belong in `bias=`.
        ValueError: no mask at all, or a rank-3 `attn_mask` that `num_heads` does not divide.

    Example:
        >>> from regard import masks
        >>> masks.from_torch_mha(key_padding_mask=[[False, True]])
        valid_keys([[True, False]])

    Reference: PyTorch 2.13, `torch.nn.MultiheadAttention.forward`.
    """
    parts: list[Mask] = []
    if attn_mask is not None:
        may_attend = _read_dropped("attn_mask", attn_mask)
        if may_attend.ndim == 3:
            if num_heads is None or may_attend.shape[0] % whole_number("num_heads", num_heads, 1):
                raise ValueError(
                    "num_heads: expected a divisor of attn_mask's first axis"
                    f" ({may_attend.shape[0]} = batch * heads), got {num_heads}"
                )
            shape = (may_attend.shape[0] // num_heads, num_heads, *may_attend.shape[1:])
            may_attend = evaluate(lambda array: array.reshape(shape), may_attend)
        parts.append(from_array(may_attend))
    if key_padding_mask is not None:
        parts.append(valid_keys(_read_dropped("key_padding_mask", key_padding_mask)))
    if is_causal:
        parts.append(causal())
    if not parts:
        raise ValueError("from_torch_mha: expected attn_mask, key_padding_mask or is_causal=True, got none")
    return reduce(operator.and_, parts)


def from_flash_window(left: int, right: int) -> Mask:
    """Read flash-attention's `window_size=(left, right)`; -1 means unlimited.

    The counts do not include the query's own key, as in `sliding_window`. flash-attention aligns the last
    query with the last key when T != S: pass `query_offset=S - T`.

    Args:
        left: keys before the query's own, or -1.
        right: keys after the query's own, or -1.

    Returns:
        A sliding window, open where an argument is -1.

    Raises:
        TypeError, ValueError: an argument that is no integer, or below -1.

    Example:
        >>> from regard import masks
        >>> masks.from_flash_window(128, 0)
        sliding_window(128)

    Reference: flash-attention 2.1, `flash_attn_func`; jax.nn's `local_window_size` counts the same way.
    """
    sides = {"left": left, "right": right}
    counts = (None if side == -1 else whole_number(name, side, -1) for name, side in sides.items())
    return sliding_window(*counts)


def from_hf_window(sliding_window_size: int | None) -> Mask:
    """Read Hugging Face's `sliding_window`: that many keys up to and *including* the query's own.

    keep(q, k) = (q - sliding_window_size < k <= q)

    Args:
        sliding_window_size: keys per query, at least 1; None means all keys up to the query's own.

    Returns:
        A causal sliding window.

    Raises:
        TypeError, ValueError: not an integer, or below 1.

    Example:
        >>> from regard import masks
        >>> masks.from_hf_window(128), masks.from_hf_window(None)
        (sliding_window(127), causal())

    Reference: transformers 5, `masking_utils.sliding_window_overlay`.
    """
    if sliding_window_size is None:
        return causal()
    return sliding_window(whole_number("sliding_window_size", sliding_window_size, 1) - 1)


def from_hf_attention_mask(attention_mask: ArrayLike) -> Mask:
    """Read Hugging Face's 2-D `attention_mask`: 1 for a token, 0 for padding.

    Args:
        attention_mask: integer or boolean array `(batch, S)`.

    Returns:
        A mask on keys.

    Raises:
        TypeError: a float array, which is additive and belongs in `bias=`.
        ValueError: an array that is not `(batch, S)`.

    Example:
        >>> from regard import masks
        >>> masks.from_hf_attention_mask([[1, 1, 0]])
        valid_keys([[True, True, False]])
    """
    valid = check_boolean("attention_mask", attention_mask)
    if valid.ndim != 2:
        raise ValueError(f"attention_mask: expected shape (batch, S), got {tuple(valid.shape)}")
    return valid_keys(valid)


def from_jax_window(local_window_size: int | tuple[int, int]) -> Mask:
    """Read jax.nn's `local_window_size`: keys before and after, besides the query's own.

    Args:
        local_window_size: (left, right), or one integer for both sides.

    Returns:
        A sliding window.

    Raises:
        TypeError, ValueError: not an integer or a pair of integers, or a negative count.

    Example:
        >>> from regard import masks
        >>> masks.from_jax_window(2)
        sliding_window(2, 2)

    Reference: jax 0.10, `jax.nn.dot_product_attention`.
    """
    sides = local_window_size if isinstance(local_window_size, list | tuple) else (local_window_size,) * 2
    if len(sides) != 2:
        raise ValueError(
            f"local_window_size: expected (left, right) or one integer for both, got {local_window_size!r}"
        )
    if None in sides:
        raise TypeError(
            f"local_window_size: expected two integers, got {local_window_size!r}; a side without an end is"
            f" sliding_window{sides!r}"
        )
    return sliding_window(*(whole_number("local_window_size", side, 0) for side in sides))


def _read_dropped(name: str, array: ArrayLike) -> Any:
    """Return True where an array that is nonzero for what is masked out says that a query may attend."""
    return evaluate(operator.invert, check_boolean(name, array, "may not attend"))
