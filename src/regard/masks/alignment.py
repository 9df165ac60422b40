"""Causal alignment: where queries sit among the keys, which is told, never guessed."""

from __future__ import annotations

from regard.masks.grid import Offset


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
            "query_offset: expected where the queries sit, because key_offset moves the keys and the mask or"
            " score reads positions; got None. Query t sits at position query_offset + t, key s at"
            " key_offset + s"
        )
    raise ValueError(
        f"query_offset: expected where the queries sit, because T = {num_queries} queries differ from"
        f" S = {num_keys} keys and the mask or score reads positions; got None.\n"
        f"Query t sits at position query_offset + t, keys at 0..S-1. Causal attention would be either\n\n"
        f"{_both_alignments(num_queries, num_keys)}\n\n"
        f"Pass query_offset={num_keys - num_queries} when the queries are the last rows of the sequence (a"
        " cache), query_offset=0 when both start together."
    )


def _both_alignments(num_queries: int, num_keys: int) -> str:
    """Draw the two customary causal alignments side by side, shrunk to a few cells."""
    shrink = max(1.0, num_queries / 5, num_keys / 8)
    height, width = max(1, round(num_queries / shrink)), max(1, round(num_keys / shrink))
    if height == width:
        height, width = (height, width + 1) if num_queries < num_keys else (height + 1, width)

    def picture(offset: int) -> list[str]:
        return [
            " ".join("■" if k <= q + offset else "·" for k in range(width)).ljust(2 * width - 1)
            for q in range(height)
        ]

    left_title = "query_offset=0".ljust(2 * width - 1)
    pad = " " * (len(left_title) - (2 * width - 1))
    rows = [
        f"  {left}{pad}     {right}" for left, right in zip(picture(0), picture(width - height), strict=True)
    ]
    return "\n".join([f"  {left_title}     query_offset={num_keys - num_queries}", *rows])
