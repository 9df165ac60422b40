"""Ring, all-to-all and both on eight devices are attention by its definition, for every mask."""

import numpy as np
import pytest

from mesh_cases import check_against_definition, on_eight_devices
from regard import masks

LENGTH = 37  # eight devices do not divide it, nor do four

IDS = np.repeat([3, 0, 7, 3], [9, 5, 15, 8]).astype(np.int32)
PACKED = np.concatenate([np.arange(length) for length in (9, 5, 15, 8)]).astype(np.int32)
HOLES = np.random.default_rng(3).random((LENGTH, LENGTH)) < 0.4
HEADS = np.stack([HOLES, HOLES.T, ~HOLES, ~HOLES.T])
TABLE = np.random.default_rng(4).random((2, 1, 5, 5)) < 0.7


def by_row_and_head(batch, head, query, key):
    return (query * (batch + 2) + key * (head + 1)) % 5 < 2


SELF = ((2, 4, LENGTH, 7), (2, 2, LENGTH, 7), (2, 2, LENGTH, 5))
CROSS = ((2, 4, 23, 7), (2, 2, LENGTH, 7), (2, 2, LENGTH, 5))
CAUSAL = masks.causal()
# Shapes, mask, offsets, way.
CASES = {
    "prefix": (SELF, (CAUSAL | masks.prefix([11, 0])) & masks.blocks(TABLE, 8), {}, "balanced"),
    "offsets": (CROSS, masks.segments(IDS) & CAUSAL, {"query_offset": 115, "key_offset": 99}, "both"),
    "packed positions": (
        SELF, masks.segments(IDS, IDS) & CAUSAL, {"query_positions": PACKED, "key_positions": PACKED}, "ring",
    ),
    "rows and heads": (SELF, masks.from_array(HEADS) | masks.predicate(by_row_and_head), {}, "all to all"),
    "fewer rows than devices": (((3, 5, 7), (3, 11, 7), (3, 11, 5)), CAUSAL, {"query_offset": 6}, "ring"),
}  # fmt: skip


def check(name):
    """In the process with eight devices."""
    shapes, mask, options, way = CASES[name]
    check_against_definition(way, shapes, mask, **options)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_follow_the_definition(name):
    on_eight_devices(f"import test_parallel_masks\ntest_parallel_masks.check({name!r})")
