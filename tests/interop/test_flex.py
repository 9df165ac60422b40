"""Block masks for FlexAttention: lists and stored pairs against the masks; torch itself is not needed."""

import numpy as np
import pytest

from regard import masks
from regard.interop.flex import _list_blocks, _stored_blocks
from regard.masks import TileKind

SIZE = 4
CASES = {
    "causal": (masks.causal() & masks.sliding_window(6), 19, 19, {}),
    "placed": (masks.causal(), 8, 13, {"query_offset": 5}),
    "documents": (masks.segments(np.repeat([[0, 1, 2], [3, 3, 4]], [5, 3, 3], axis=-1)), 11, 11, {}),
    "heads": (masks.from_array(np.random.default_rng(0).random((2, 3, 12, 8)) < 0.5), 12, 8, {}),
    "nothing": (~masks.prefix(99), 9, 9, {}),
    "everything": (masks.prefix(99), 9, 9, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_lists_and_stored_pairs_are_those_of_the_mask(case):
    mask, num_queries, num_keys, offsets = CASES[case]
    asked = {"query_offset": None, "key_offset": None, **offsets}
    kinds, slots, cells = _stored_blocks(mask, num_queries, num_keys, SIZE, **asked)
    rows, columns = kinds.shape[-2:]
    dense = np.zeros((*kinds.shape[:2], rows * SIZE, columns * SIZE), bool)
    dense[..., :num_queries, :num_keys] = mask.dense(num_queries, num_keys, leading_axes=2, **offsets)
    blocks = np.moveaxis(dense.reshape((*kinds.shape[:2], rows, SIZE, columns, SIZE)), -2, -3)
    np.testing.assert_array_equal(cells[slots], blocks)
    np.testing.assert_array_equal(kinds == TileKind.FULL, blocks.all((-1, -2)))
    assert not blocks[kinds == TileKind.EMPTY].any()
    assert len(cells) == 2 + (kinds == TileKind.PARTIAL).sum()  # and none is stored twice


def test_chosen_blocks_come_first_in_order():
    counts, indices = _list_blocks(np.array([[False, True, False, True], [True, False, True, True]]))
    np.testing.assert_array_equal(counts, [2, 3])
    np.testing.assert_array_equal(indices, [[1, 3, 0, 2], [0, 2, 3, 1]])
    assert counts.dtype == indices.dtype == np.int32
