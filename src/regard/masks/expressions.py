"""Masks that have a name of their own, and are expressions of others."""

from __future__ import annotations

from regard.arguments import guided, whole_number
from regard.axes import ArrayLike
from regard.masks.documents import segments
from regard.masks.keys import prefix
from regard.masks.mask import Mask
from regard.masks.positional import causal, sliding_window


def shared_prefix(length: ArrayLike, ids: ArrayLike) -> Mask:
    """Let every query attend to a prefix, and beyond it to its own segment: answers to one prompt in one row.

    keep(b, q, k) = (k < length_b or ids[b, q] == ids[b, k]), which is `prefix(length) | segments(ids)`

    Args:
        length: tokens of the prefix, an integer or an integer array `(batch, ...)`; may be traced.
        ids: integer array `(batch, ..., S)`, one per key, as in `segments`: the answer that each token
            belongs to. The prefix has an id that no answer has.

    Returns:
        A mask. It is not causal by itself: a language model joins it as `shared_prefix(length, ids) &
        causal()`. Positions that are to begin anew in each answer, as if it were alone, are given to
        `positions.rotary`.

    Raises:
        TypeError: arguments that are not integers, or scalar ids.

    Example:
        >>> from regard import masks
        >>> mask = masks.shared_prefix(2, [0, 0, 1, 1, 2, 2]) & masks.causal()
        >>> print(mask.picture(6))
        6 queries x 6 keys   ■ may attend  · may not
        0 ■ · · · · ·
        1 ■ ■ · · · ·
        2 ■ ■ ■ · · ·
        3 ■ ■ ■ ■ · ·
        4 ■ ■ · · ■ ·
        5 ■ ■ · · ■ ■

    Reference: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021, for the segments.
    For a prefix in a batch of rows instead, `merge` reads it once: Juravsky et al., "Hydragen", 2024.
    """
    return prefix(length) | segments(ids)


@guided
def streaming(before: int, first: int = 4) -> Mask:
    """Let each query attend to a window that ends at its own position, and to the first keys of all.

    keep(q, k) = (k <= q and (q - before <= k or k < first)), which is
    `causal() & (sliding_window(before) | prefix(first))`

    Args:
        before: keys before the query's own, not counting it, as in `sliding_window`.
        first: keys at the start that stay in sight, at least 0. Models lean on them as attention sinks; the
            `sinks` of `attend` are learned numbers in their place.

    Returns:
        A mask on positions.

    Raises:
        TypeError, ValueError: an argument that is no integer, or negative.

    Example:
        >>> from regard import masks
        >>> print(masks.streaming(1, first=1).picture(5))
        5 queries x 5 keys   ■ may attend  · may not
        0 ■ · · · ·
        1 ■ ■ · · ·
        2 ■ ■ ■ · ·
        3 ■ · ■ ■ ·
        4 ■ · · ■ ■

    Reference: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024, section 3.2.
    There, rotary positions count the keys that are kept; here, positions are those of the text.
    """
    window = sliding_window(whole_number("before", before, 0))
    return causal() & (window | prefix(whole_number("first", first, 0)))
