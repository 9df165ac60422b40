"""Causal alignment: where queries sit among the keys, which is told, never guessed."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from regard.arguments import LARGEST, check_reach, integers, whole_number
from regard.masks.data import check_rows, check_width
from regard.masks.grid import Offset
from regard.masks.offsets import TokenPositions, positions_of
from regard.masks.picture import CELLS, printable


def settle_positions(
    side: str, offset: Offset, positions: Any, length: int, leading: tuple[int, ...] | None = None
) -> Offset:
    """Return the one of offset and positions that is given, checked; `side` is query or key.

    `leading` are the call's leading axes; None where nobody knows them.
    """
    name, other = f"{side}_positions", f"{side}_offset"
    if positions is None:
        return None if offset is None else _check_offset(other, offset, length)
    if offset is not None:
        raise ValueError(
            f"{other}, {name}: expected one of the two, because each says where the rows of {side} sit; got"
            f" both. Add the offset to the positions and leave {other} out"
        )
    array = integers(name, positions)
    if array.ndim == 0:
        raise ValueError(
            f"{name}: expected one position per row of {side}, ({length},) or (batch..., {length}); got a"
            f" scalar. Pass the position of the first of consecutive rows as {other}="
        )
    check_width(name, f"row of {side}", array.shape[-1], length)
    if leading is not None:
        check_rows(name, array.shape[:-1], leading)
    return TokenPositions(array)


def _check_offset(name: str, offset: Offset, length: int) -> Offset:
    """Return an offset by which all of `length` rows sit where int32 reaches."""
    if not isinstance(offset, int | TokenPositions):
        offset = integers(name, offset, most=LARGEST - length)
    if isinstance(offset, int | np.ndarray | np.generic) and np.size(offset):
        check_reach(name, int(np.max(offset)) + length)
        integers(name, offset)
    return offset


def place_queries(
    num_queries: int, num_keys: int, offset: Offset, reads_positions: bool, key_offset: Offset = None
) -> Offset:
    """Return the offset in force, or raise and draw both alignments where one would have to be guessed."""
    if offset is not None:
        return offset
    if not reads_positions or (num_queries == num_keys and key_offset is None):
        return 0
    if key_offset is not None:
        raise ValueError(
            "query_offset: expected where the queries sit, because key_offset or key_positions moves the"
            " keys and the mask or score reads positions; got None. Query t sits at position query_offset +"
            " t, key s at key_offset + s; for the same tokens on both sides, pass the positions of the keys"
            " as query_positions, too"
        )
    raise ValueError(
        f"query_offset: expected where the queries sit, because T = {num_queries} queries differ from"
        f" S = {num_keys} keys and the mask or score reads positions; got None.\n"
        f"Query t sits at position query_offset + t, keys at 0..S-1. Causal attention would be either\n\n"
        f"{_both_alignments(num_queries, num_keys)}\n\n"
        f"Pass query_offset={num_keys - num_queries} when the queries are the last rows of the sequence (a"
        " cache), query_offset=0 when both start together."
    )


def align_mask(
    mask: Any,
    num_queries: int,
    num_keys: int,
    offsets: tuple[Offset, Offset],
    positions: tuple[Any, Any],
    leading_axes: int | None = None,
) -> tuple[Offset, Offset, int]:
    """Return where the rows that a mask is evaluated at sit, and how many leading axes it has."""
    whole_number("num_queries", num_queries, 0)
    whole_number("num_keys", num_keys, 0)
    query = settle_positions("query", offsets[0], positions[0], num_queries)
    key = settle_positions("key", offsets[1], positions[1], num_keys)
    key = None if isinstance(key, int) and key == 0 else key
    query = place_queries(num_queries, num_keys, query, mask.reads_positions, key)
    mask.check(None, num_queries, num_keys)
    mask.check_positions(query, key)
    places = (positions_of(query), positions_of(key))
    needed = max(mask.leading_axes, *(positions.leading_axes for positions in places))
    axes = needed if leading_axes is None else whole_number("leading_axes", leading_axes, 0)
    if axes < needed:
        raise ValueError(
            f"leading_axes: expected at least {needed}, the axes of the mask's data and of offsets or"
            f" positions; got {leading_axes}"
        )
    _check_leading(mask, places, axes)
    return query, key, axes


def _check_leading(mask: Any, places: Iterable[Any], axes: int) -> None:
    """Raise where the data of a mask, offsets and positions differ in their leading axes, or are no data."""
    shapes: list[tuple[int, ...]] = []

    def note(data: Any, trailing: int) -> Any:
        if isinstance(data, jax.ShapeDtypeStruct):
            raise TypeError(
                "mask: expected arrays to evaluate it with, got the shape of one; only explain takes shapes"
            )
        shapes.append(np.shape(data)[: np.ndim(data) - trailing])
        return data

    mask.slice_batch(note, axes)
    for positions in places:
        positions.slice_batch(note)
    for axis in range(axes):
        sizes = {shape[axis] for shape in shapes if len(shape) > axis} - {1}
        if len(sizes) > 1:
            raise ValueError(
                "mask: expected data, offsets and positions whose leading axes broadcast, as they are aligned"
                f" with the first of query; got sizes {sorted(sizes)} on axis {axis}"
            )


def _both_alignments(num_queries: int, num_keys: int) -> str:
    """Draw the two customary causal alignments side by side, shrunk to a few cells."""
    shrink = max(1.0, num_queries / 5, num_keys / 8)
    height, width = max(1, round(num_queries / shrink)), max(1, round(num_keys / shrink))
    if height == width:
        height, width = (height, width + 1) if num_queries < num_keys else (height + 1, width)

    def picture(title: int, offset: int) -> list[str]:
        rows = CELLS[np.tri(height, width, offset, int)]
        return [f"query_offset={title}", *map(" ".join, rows)]

    from_start, from_end = picture(0, 0), picture(num_keys - num_queries, width - height)
    side = max(map(len, from_start))
    lines = [f"  {line:<{side}}     {beside}" for line, beside in zip(from_start, from_end, strict=True)]
    return printable("\n".join(lines))
