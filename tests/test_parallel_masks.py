"""Ring, all-to-all and both on eight devices are attention by its definition, for every mask."""

import numpy as np
import pytest

from mesh_cases import check_against_definition, spawn
from regard import masks

LENGTH = 37  # eight devices do not divide it, nor do four

IDS = np.repeat([3, 0, 7, 3], [9, 5, 15, 8]).astype(np.int32)
HOLES = np.random.default_rng(3).random((LENGTH, LENGTH)) < 0.4


def neighbours(query, key):
    return (query + 2 * key) % 5 < 2


SELF = ((2, 4, LENGTH, 7), (2, 2, LENGTH, 7), (2, 2, LENGTH, 5))
CROSS = ((2, 4, 23, 7), (2, 2, LENGTH, 7), (2, 2, LENGTH, 5))
CASES = {
    "no mask": (SELF, None, {}, "ring both"),
    "causal": (SELF, masks.causal(), {}, "ring zigzag"),
    "causal, exchanged": (SELF, masks.causal(), {}, "balanced both_zigzag"),
    "window": (SELF, masks.causal() & masks.sliding_window(6), {}, "ring both_balanced"),
    "window on both sides": (SELF, masks.sliding_window(4, 3), {}, "zigzag all_to_all"),
    "documents": (SELF, masks.segments(IDS) & masks.causal(), {}, "ring both"),
    "documents by row": (SELF, masks.segments(np.stack([IDS, IDS[::-1]])), {}, "zigzag all_to_all"),
    "two id lists": (CROSS, masks.segments(IDS[:23], IDS), {}, "ring both_zigzag"),
    "prefix": (SELF, masks.causal() | masks.prefix([11, 0]), {}, "ring balanced"),
    "lengths": (SELF, masks.lengths([29, 0]), {}, "zigzag both"),
    "valid keys": (SELF, masks.valid_keys(HOLES[:2]), {}, "ring all_to_all"),
    "chunks or globals": (SELF, masks.chunked(8) | masks.global_tokens(2) & masks.dilated(3), {}, "zigzag both"),
    "stored": (SELF, masks.from_array(HOLES), {}, "ring both_zigzag"),
    "stored by head": (SELF, masks.from_array(np.stack([HOLES, HOLES.T, ~HOLES, ~HOLES.T])), {}, "both all_to_all"),
    "predicate": (SELF, masks.predicate(neighbours) & ~masks.causal(), {}, "ring both"),
    "offset": (CROSS, masks.causal(), {"query_offset": 14}, "ring zigzag"),
    "offsets by row": (CROSS, masks.causal(), {"query_offset": np.array([14, -3])}, "ring both"),
    "documents at offsets": (
        CROSS, masks.segments(IDS) & masks.causal(), {"query_offset": 115, "key_offset": 99}, "ring both"
    ),
    "lengths that divide": (
        ((2, 4, 48, 7), (2, 2, 48, 7), (2, 2, 48, 5)), masks.causal() & masks.lengths([48, 21]), {}, "ring both"
    ),
    "nothing": (SELF, masks.causal() & ~masks.causal(), {}, "ring both_zigzag"),
}  # fmt: skip


def check(*names):
    """In the process with eight devices."""
    for name in names:
        shapes, mask, options, ways = CASES[name]
        for way in ways.split():
            check_against_definition(way.replace("_", " "), shapes, mask, **options)
            print(name, way, flush=True)


# A process takes seconds to begin: several cases share one.
GROUPS = [list(CASES)[start : start + 5] for start in range(0, len(CASES), 5)]


@pytest.mark.parametrize("names", GROUPS, ids=lambda names: ", ".join(names))
def test_values_and_gradients_follow_the_definition(names):
    done = spawn(f"import test_parallel_masks\ntest_parallel_masks.check(*{names})")
    assert len(done.splitlines()) == 2 * len(names)
