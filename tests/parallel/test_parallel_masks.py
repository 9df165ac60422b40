"""Ring, all-to-all and both on eight devices are attention by its definition, for every mask."""

import numpy as np
import pytest

from economy import mostly_slow
from mesh_cases import check_against_definition, on_eight_devices
from regard import masks

LENGTH = 37  # eight devices do not divide it, nor do four

IDS = np.repeat([3, 0, 7, 3], [9, 5, 15, 8]).astype(np.int32)
PACKED = np.concatenate([np.arange(length) for length in (9, 5, 15, 8)]).astype(np.int32)
SCATTERED = np.random.default_rng(4).integers(-3, 40, (2, LENGTH)).astype(np.int32)
HOLES = np.random.default_rng(3).random((LENGTH, LENGTH)) < 0.4


def by_row_and_head(batch, head, query, key):
    return (query * (batch + 2) + key * (head + 1)) % 5 < 2


def neighbours(query, key):
    return (query + 2 * key) % 5 < 2


SELF = ((2, 4, LENGTH, 7), (2, 2, LENGTH, 7), (2, 2, LENGTH, 5))
CROSS = ((2, 4, 23, 7), (2, 2, LENGTH, 7), (2, 2, LENGTH, 5))
EVEN = ((2, 4, 16, 7), (2, 2, 16, 7), (2, 2, 16, 5))
HEADS = np.stack([HOLES, HOLES.T, ~HOLES, ~HOLES.T])
CAUSAL = masks.causal()
# Shapes, mask, offsets, ways.
CASES = {
    "no mask": (SELF, None, {}, "both"),
    "causal": (SELF, CAUSAL, {}, "ring, zigzag"),
    "window": (SELF, CAUSAL & masks.sliding_window(6), {}, "ring"),
    "window on both sides": (SELF, masks.sliding_window(4, 3), {}, "both balanced"),
    "documents": (SELF, masks.segments(IDS) & CAUSAL, {}, "ring"),
    "documents by row": (SELF, masks.segments(np.stack([IDS, IDS[::-1]])), {}, "zigzag"),
    "two id lists": (CROSS, masks.segments(IDS[:23], IDS), {}, "both zigzag"),
    "prefix": (SELF, CAUSAL | masks.prefix([11, 0]), {}, "balanced"),
    "lengths": (SELF, masks.lengths([29, 0]), {}, "both"),
    "valid keys": (EVEN, masks.valid_keys(HOLES[:2, :16]), {}, "ring"),
    "chunks or globals": (EVEN, masks.chunked(8) | masks.global_tokens(2) & masks.dilated(3), {}, "both"),
    "stored": (SELF, masks.from_array(HOLES), {}, "ring"),
    "stored by head": (SELF, masks.from_array(HEADS), {}, "all to all"),
    "predicate": (EVEN, masks.predicate(neighbours) & ~CAUSAL, {}, "ring"),
    "predicate of rows and heads": (EVEN, masks.predicate(by_row_and_head), {}, "ring, both"),
    "offset": (CROSS, CAUSAL, {"query_offset": 14}, "ring"),
    "offsets by row": (CROSS, CAUSAL, {"query_offset": np.array([14, -3])}, "ring of shards"),
    "documents at offsets": (
        CROSS,
        masks.segments(IDS) & CAUSAL,
        {"query_offset": 115, "key_offset": 99},
        "both",
    ),
    "trees by row": (
        CROSS,
        masks.tree([np.arange(23) // 2 - 1, np.arange(23) - 1], [14, 9]),
        {"query_offset": np.array([14, 9])},
        "ring, zigzag",
    ),
    "patches": (SELF, masks.neighbourhood((5, 7), (1, 2), start=1), {}, "both"),
    "lengths that divide": (EVEN, CAUSAL & masks.lengths([16, 5]), {}, "ring"),
    "packed positions": (
        SELF,
        masks.segments(IDS, IDS) & CAUSAL,
        {"query_positions": PACKED, "key_positions": PACKED},
        "ring",
    ),
    "positions by row": (
        SELF,
        CAUSAL & masks.sliding_window(9),
        {"query_positions": SCATTERED, "key_positions": SCATTERED[:, ::-1]},
        "zigzag",
    ),
    "positions of drafts": (CROSS, CAUSAL, {"query_positions": SCATTERED[:, :23], "key_offset": 3}, "both"),
    "positions that divide": (
        EVEN,
        masks.chunked(5),
        {"query_offset": 3, "key_positions": SCATTERED[:, :16]},
        "ring of shards",
    ),
    "nothing": (SELF, CAUSAL & ~CAUSAL, {}, "both"),
    "fewer rows than devices": (
        ((3, 5, 7), (3, 11, 7), (3, 11, 5)),
        CAUSAL,
        {"query_offset": 6},
        "ring",
    ),
}


def check(name):
    """In the process with eight devices."""
    shapes, mask, options, ways = CASES[name]
    for way in ways.split(", "):
        check_against_definition(way, shapes, mask, **options)


# Every way once, and what differs most between the devices.
QUICK = ("prefix", "documents at offsets")


@pytest.mark.parametrize("name", mostly_slow(CASES, *QUICK))
def test_values_and_gradients_follow_the_definition(name):
    on_eight_devices(f"import test_parallel_masks\ntest_parallel_masks.check({name!r})")
