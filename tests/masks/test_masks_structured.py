"""Trees, answers to one prompt, patches, block diffusion, streaming: their definitions, and calls."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from refusals import assert_refused
from regard import attend, masks
from regard.inspection.traces.codec import Reader, Writer
from test_masks import assert_tiles_are_safe


def ancestors(parents):
    """Who may attend to whom, by climbing."""
    keep = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        while parent >= 0:
            keep[node, parent] = True
            parent = parents[parent]
    return keep


def after_cache(parents, start, keys):
    """The nodes after `start` cached tokens, in a cache of so many slots."""
    keep = np.zeros((len(parents), keys), bool)
    keep[:, :start] = True
    keep[:, start : start + len(parents)] = ancestors(parents)
    return keep


def windows(shape, radius):
    """Pairs of patches that are near along every axis."""
    places = np.array(list(itertools.product(*map(range, shape))))
    return (abs(places[:, None] - places[None]) <= np.array(radius)).all(-1)


def denoised(length, size):
    """The four parts of the paper's matrix."""
    block = np.arange(length) // size
    noisy = block[:, None] == block
    offset, clean = block[:, None] > block, block[:, None] >= block
    return np.block([[noisy, offset], [np.zeros_like(noisy), clean]])


PARENTS = [-1, 0, 0, 1, 2, 2, 4]
ANSWERS = [9, 9, 9, 0, 0, 1, 1, 1, 0, 2, 2]
# Mask, T, S, query_offset, and who may attend to whom, (T, S) or (B, T, S).
CASES = {
    "tree": (masks.tree(PARENTS), 7, 7, None, ancestors(PARENTS)),
    "tree after a cache": (masks.tree(PARENTS, 4), 7, 13, 4, after_cache(PARENTS, 4, 13)),
    "trees by row": (
        masks.tree([PARENTS, [-1, -1, 0, 1, 3, 3, 3]], [4, 2]), 7, 13, np.array([4, 2]),
        np.stack([after_cache(PARENTS, 4, 13), after_cache([-1, -1, 0, 1, 3, 3, 3], 2, 13)]),
    ),
    "shared prefix": (
        masks.shared_prefix(3, ANSWERS) & masks.causal(), 11, 11, None,
        ((np.arange(11) < 3) | np.equal.outer(ANSWERS, ANSWERS)) & np.tri(11, dtype=bool),
    ),
    "patches": (masks.neighbourhood((3, 4), 1), 12, 12, None, windows((3, 4), 1)),
    "some patches": (masks.neighbourhood((3, 5), (1, 2)), 7, 15, 6, windows((3, 5), (1, 2))[6:13]),
    "video": (masks.neighbourhood((2, 3, 2), (0, 1, 1)), 12, 12, None, windows((2, 3, 2), (0, 1, 1))),
    "columns": (masks.neighbourhood((3, 4), (2, 0)), 12, 12, None, windows((3, 4), (2, 0))),
    "block diffusion": (masks.block_diffusion(7, 3), 14, 14, None, denoised(7, 3)),
    "streaming": (
        masks.streaming(3, 2), 5, 13, 8,
        np.array([[k <= q and (k >= q - 3 or k < 2) for k in range(13)] for q in range(8, 13)]),
    ),
}  # fmt: skip


def draw(T, S):
    return jnp.ones((2, 6, T, 5)), *jnp.ones((2, 2, 3, S, 5))


def look(sides):
    """Cells and codes of tiles of each case, in one program."""

    def one(mask, T, S, offset, _):
        tiles = mask.tiles(T, S, query_block=sides[0], key_block=sides[1], query_offset=offset)
        return mask.dense(T, S, query_offset=offset), tiles

    look_at_all = lambda made: {name: one(made[name], *CASES[name][1:]) for name in CASES}
    return jax.jit(look_at_all)({name: case[0] for name, case in CASES.items()})


def test_the_mask_is_its_definition():
    for name, (keep, codes) in look((1, 1)).items():
        np.testing.assert_array_equal(keep, CASES[name][-1], name)
        # Every tile of one cell is known but for those that need a look.
        kinds = np.where(CASES[name][-1], masks.TileKind.FULL, masks.TileKind.EMPTY)
        np.testing.assert_array_equal(codes, kinds, name)


def test_tiles_promise_what_cells_hold():
    for name, (keep, codes) in look((5, 4)).items():
        assert_tiles_are_safe(keep, codes, (5, 4), name=name)


@pytest.mark.parametrize("count", [0, 23])
def test_any_tree_is_walked_traced_or_not(count):
    rng = np.random.default_rng(count)
    drawn = np.array([rng.integers(-1, node) if node else -1 for node in range(count)], np.int32)
    trees = drawn, np.arange(count, dtype=np.int32) - 1, np.full(count, -1, np.int32)
    traced = jax.jit(lambda trees: [masks.tree(parents).dense(count) for parents in trees])(trees)
    known = jax.jit(lambda: [masks.tree(parents).dense(count) for parents in trees])()
    expected = [ancestors(parents) for parents in trees]
    jax.tree.map(np.testing.assert_array_equal, [traced, known], [expected] * 2)


def test_a_long_tree_holds_a_few_numbers_per_node():
    mask = masks.tree(np.arange(4096) // 2 - 1)
    assert sum(leaf.size for leaf in jax.tree.leaves(mask)) == 3 * 4096 + 1
    compiled = jax.jit(lambda mask: mask.tiles(4096, query_block=128, key_block=128)).lower(mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_far_patches_are_not_visited():
    codes = np.asarray(masks.neighbourhood((64, 64), 3).tiles(4096, query_block=128, key_block=128))
    # Two lines of patches a tile, those within three lines of them, and nothing else.
    assert (codes != masks.TileKind.EMPTY).sum() == 32 * 5 - 2 * (2 + 1)
    assert masks.neighbourhood((64, 64), 3).local
    assert not masks.neighbourhood((64, 64), 40).local


def test_they_are_saved_and_loaded():
    for name, (mask, *_) in CASES.items():
        writer = Writer()
        data = json.loads(json.dumps(writer.write("mask", mask)))
        assert Reader(writer.arrays).read("mask", data, masks.Mask) == mask, name


def test_mistakes_are_explained():
    wrong = [
        (ValueError, "got 1 for node 1; number the nodes so that parents come", lambda: masks.tree([-1, 1])),
        (ValueError, "got -2 for node 0 of row 1", lambda: masks.tree([[-1, 0], [-2, 0]])),
        (TypeError, "parents: expected an integer array with one parent per node", lambda: masks.tree(-1)),
        (TypeError, "start: expected integers", lambda: masks.tree([-1], 0.5)),
        (ValueError, "tree parents: expected leading axes that match",
         lambda: attend(*draw(3, 3), mask=masks.tree(np.full((3, 3), -1)))),
        (ValueError, "Pass query_offset=9 when", lambda: attend(*draw(2, 11), mask=masks.tree([-1, 0], 9))),
        (TypeError, "shape: expected integers, one per axis of the grid, got 4",
         lambda: masks.neighbourhood(4, 1)),
        (ValueError, r"shape\[1\]: expected an integer of at least 1, got 0",
         lambda: masks.neighbourhood((4, 0), 1)),
        (ValueError, "radius: expected an integer or 2 of", lambda: masks.neighbourhood((4, 4), (1, 1, 1))),
        (ValueError, "shape: expected at least one axis", lambda: masks.neighbourhood((), 1)),
        (ValueError, "size: expected an integer of at least 1, got 0", lambda: masks.block_diffusion(4, 0)),
        (ValueError, "first: expected an integer of at least 0, got -1", lambda: masks.streaming(4, -1)),
    ]  # fmt: skip
    assert_refused(*((call, message, error) for error, message, call in wrong))
