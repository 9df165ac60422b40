"""Trees, answers to one prompt, patches, block diffusion, streaming: their definitions, and calls."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from economy import mostly_slow
from regard import attend, masks
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from regard.inspection import capture, load
from test_masks import assert_tiles_are_safe

B, H, K, D, E = 2, 6, 3, 5, 7
in_small_tiles = functools.partial(tiled.run, forward=Blocking(3, 2), backward=Blocking(2, 3))


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


def draw(T, S, batch=B):
    rng = np.random.default_rng(3)
    shapes = ((batch, H, T, D), (batch, K, S, D), (batch, K, S, E))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def by_hand(query, key, value, keep):
    q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))
    k, v = (np.repeat(array, H // K, axis=-3) for array in (k, v))
    scores = np.where(keep, q @ np.swapaxes(k, -1, -2) / np.sqrt(D), -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e9))
    return weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300) @ v


@pytest.mark.parametrize("name", CASES)
def test_the_mask_is_its_definition(name):
    mask, T, S, offset, keep = CASES[name]
    np.testing.assert_array_equal(mask.dense(T, S, query_offset=offset), keep)
    # Every tile of one cell is known but for those that need a look.
    codes = np.asarray(mask.tiles(T, S, query_block=1, key_block=1, query_offset=offset))
    np.testing.assert_array_equal(codes == masks.TileKind.FULL, keep)
    np.testing.assert_array_equal(codes == masks.TileKind.EMPTY, ~keep)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("query_block", "key_block"), mostly_slow([(3, 1), (2, 5), (5, 4)], (5, 4)))
def test_tiles_promise_what_cells_hold(name, query_block, key_block):
    mask, T, S, offset, _ = CASES[name]
    assert_tiles_are_safe(mask, T, S, (query_block, key_block), offset)


USUAL = ("trees by row", "shared prefix")


@pytest.mark.parametrize("name", mostly_slow(CASES, *USUAL))
def test_tiles_and_definition_give_one_answer_and_one_gradient(name):
    mask, T, S, offset, keep = CASES[name]
    arrays = draw(T, S)
    keep = keep if keep.ndim == 2 else keep[:, None]
    expected = by_hand(*arrays, keep)

    def run(query, key, value, mask):
        problem = canonicalize(query, key, value, mask=mask, query_offset=offset)
        return in_small_tiles(problem)[0]

    def define(query, key, value, mask):
        return attend(query, key, value, mask=masks.from_array(keep), backend="dense")

    slopes = []
    for compute in (run, define):

        def loss(query, key, value, mask, compute=compute):
            out = compute(query, key, value, mask)
            return jnp.sin(out).sum(), out

        (_, out), slope = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays, mask)
        np.testing.assert_allclose(out, expected, atol=1e-5)
        slopes.append(slope)
    for got, wanted in zip(*slopes, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5)


def test_a_batch_of_trees_can_be_mapped_over():
    mask, T, S, offset, keep = CASES["trees by row"]
    mapped = jax.vmap(
        lambda query, key, value, parents, start: attend(
            query, key, value, mask=masks.tree(parents, start), query_offset=start, backend="tiled"
        )
    )(*draw(T, S), mask.parents, jnp.asarray(offset))
    np.testing.assert_allclose(mapped, by_hand(*draw(T, S), keep[:, None]), atol=1e-5)


# Trees


@pytest.mark.parametrize("count", mostly_slow([0, 1, 2, 3, 5, 23], 0, 23))
def test_any_tree_is_walked_traced_or_not(count):
    rng = np.random.default_rng(count)
    drawn = np.array([rng.integers(-1, node) if node else -1 for node in range(count)], np.int32)
    traced = jax.jit(lambda parents: masks.tree(parents).dense(count))
    for parents in (drawn, np.arange(count, dtype=np.int32) - 1, np.full(count, -1, np.int32)):
        np.testing.assert_array_equal(masks.tree(parents).dense(count), ancestors(parents))
        np.testing.assert_array_equal(traced(parents), ancestors(parents))


def test_a_new_tree_does_not_retrace_and_a_known_one_stays_known():
    traces = []

    @jax.jit
    def dense(parents, start):
        traces.append(repr(masks.tree([-1, 0], 3)))
        return masks.tree(parents, start).dense(3, 5, query_offset=start)

    for parents, start in (([-1, 0, 0], 2), ([-1, -1, 1], 1)):
        np.testing.assert_array_equal(dense(np.array(parents), start), after_cache(parents, start, 5))
    assert traces == ["tree([-1, 0], 3)"]


def test_a_long_tree_holds_a_few_numbers_per_node():
    mask = masks.tree(np.arange(4096) // 2 - 1)
    assert sum(leaf.size for leaf in jax.tree.leaves(mask)) == 3 * 4096 + 1
    compiled = jax.jit(lambda mask: mask.tiles(4096, query_block=128, key_block=128)).lower(mask).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**20


def test_a_chain_is_causal_and_its_tiles_are_known():
    chain = masks.tree(np.arange(12) - 1)
    np.testing.assert_array_equal(
        chain.tiles(12, query_block=3, key_block=2), masks.causal().tiles(12, query_block=3, key_block=2)
    )


# Others


def test_answers_to_one_prompt_are_what_each_would_be_alone():
    arrays = draw(11, 11)
    together = attend(*arrays, mask=masks.shared_prefix(3, ANSWERS) & masks.causal())
    for answer in (0, 1, 2):
        rows = np.flatnonzero((np.arange(11) < 3) | (np.array(ANSWERS) == answer))
        alone = attend(*(array[..., rows, :] for array in arrays), mask=masks.causal())
        np.testing.assert_allclose(together[..., rows, :][..., 3:, :], alone[..., 3:, :], atol=1e-6)


def test_far_patches_are_not_visited():
    codes = np.asarray(masks.neighbourhood((64, 64), 3).tiles(4096, query_block=128, key_block=128))
    # Two lines of patches a tile, those within three lines of them, and nothing else.
    assert (codes != masks.TileKind.EMPTY).sum() == 32 * 5 - 2 * (2 + 1)
    assert masks.neighbourhood((64, 64), 3).local
    assert not masks.neighbourhood((64, 64), 40).local


def test_a_class_token_is_joined():
    keep = np.ones((7, 7), bool)
    keep[1:, 1:] = windows((2, 3), 1)
    mask = masks.neighbourhood((2, 3), 1, start=1) | masks.global_tokens(1)
    np.testing.assert_array_equal(mask.dense(7), keep)


def test_blocks_of_one_token_are_sampled_as_a_causal_model_is():
    np.testing.assert_array_equal(masks.block_diffusion(5, 1).dense(10)[5:, 5:], masks.causal().dense(5))
    clean = (masks.causal() | masks.chunked(3)).dense(7)
    np.testing.assert_array_equal(masks.block_diffusion(7, 3).dense(14)[7:, 7:], clean)


@pytest.mark.parametrize("name", mostly_slow(CASES, "trees by row", "streaming"))
def test_they_are_saved_and_loaded(name, tmp_path):
    mask, T, S, offset, _ = CASES[name]
    with capture(example=1) as trace:
        attend(*draw(T, S), mask=mask, query_offset=offset)
    back = load(trace.save(tmp_path / "mask.regard")).calls[0]
    assert back.mask == trace.calls[0].mask


def test_mistakes_are_explained():
    with pytest.raises(ValueError, match=r"got 1 for node 1; number the nodes so that parents come first"):
        masks.tree([-1, 1])
    with pytest.raises(ValueError, match=r"got -2 for node 0 of row 1"):
        masks.tree([[-1, 0], [-2, 0]])
    with pytest.raises(TypeError, match="parents: expected an integer array with one parent per node"):
        masks.tree(-1)
    with pytest.raises(TypeError, match="start: expected integers"):
        masks.tree([-1], 0.5)
    with pytest.raises(ValueError, match=r"tree parents: expected leading axes that match"):
        attend(*draw(3, 3), mask=masks.tree(np.full((3, 3), -1)))
    with pytest.raises(ValueError, match=r"Pass query_offset=9 when"):
        attend(*draw(2, 11), mask=masks.tree([-1, 0], 9))
    with pytest.raises(TypeError, match="shape: expected integers, one per axis of the grid, got 4"):
        masks.neighbourhood(4, 1)
    with pytest.raises(ValueError, match=r"shape\[1\]: expected an integer of at least 1, got 0"):
        masks.neighbourhood((4, 0), 1)
    with pytest.raises(ValueError, match="radius: expected an integer or 2 of them"):
        masks.neighbourhood((4, 4), (1, 1, 1))
    with pytest.raises(ValueError, match="shape: expected at least one axis"):
        masks.neighbourhood((), 1)
    with pytest.raises(ValueError, match="size: expected an integer of at least 1, got 0"):
        masks.block_diffusion(4, 0)
    with pytest.raises(ValueError, match="first: expected an integer of at least 0, got -1"):
        masks.streaming(4, -1)
