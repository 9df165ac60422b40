"""The mask algebra: meaning, tiles against cells, notation, conventions."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from economy import mostly_slow
from mask_expressions import expressions
from regard import attend, masks
from regard.engine.dispatch.registry import COMPLETE
from regard.masks import TileKind


def square_parity(query, key):
    return (query * key) % 3 != 1


def cells(mask, T, S=None, **kwargs):
    return np.asarray(mask.dense(T, S, **kwargs))


def by_hand(rule, T, S, offset=0):
    return np.array([[bool(rule(t + offset, s)) for s in range(S)] for t in range(T)]).reshape(T, S)


PARENTS = [-1, 0, 0, 1, -1]


def below(query, key):
    """Two earlier tokens, then the nodes of PARENTS."""
    if key < 2:
        return key <= query < 7
    while 2 < query < 7 and query != key:
        query = PARENTS[query - 2] + 2 if PARENTS[query - 2] >= 0 else 0
    return query == key < 7


def denoised(query, key):
    """Four noisy tokens, then the same ones clean, in blocks of three."""
    if not (0 <= query < 8 and 0 <= key < 8):
        return False
    (q, query_block), (k, key_block) = ((p // 4, p % 4 // 3) for p in (query, key))
    return {(0, 0): key_block == query_block, (0, 1): key_block < query_block,
            (1, 0): False, (1, 1): key_block <= query_block}[q, k]  # fmt: skip


def near_patches(query, key):
    """Two rows of four patches after one token that is none."""
    if not (1 <= query <= 8 and 1 <= key <= 8):
        return False
    rows, columns = ([f(p - 1, 4) for p in (query, key)] for f in (int.__floordiv__, int.__mod__))
    return abs(rows[0] - rows[1]) <= 0 and abs(columns[0] - columns[1]) <= 2


BUILT_IN = {
    "causal()": lambda q, k: k <= q,
    "sliding_window(2)": lambda q, k: q - 2 <= k <= q,
    "sliding_window(1, 3)": lambda q, k: q - 1 <= k <= q + 3,
    "sliding_window(0)": lambda q, k: k == q,
    "sliding_window(None)": lambda q, k: k <= q,
    "sliding_window(None, None)": lambda q, k: True,
    "sliding_window(3, None)": lambda q, k: k >= q - 3,
    "chunked(3)": lambda q, k: q // 3 == k // 3,
    "dilated(1)": lambda q, k: True,
    "dilated(3)": lambda q, k: (q - k) % 3 == 0,
    "global_tokens(2)": lambda q, k: 0 <= q < 2 or k < 2,
    "global_tokens(0)": lambda q, k: False,
    "prefix(4)": lambda q, k: k < 4,
    "lengths(0)": lambda q, k: False,
    "streaming(1, 2)": lambda q, k: k <= q and (k >= q - 1 or k < 2),
    "tree([-1, 0, 0, 1, -1], 2)": below,
    "block_diffusion(4, 3)": denoised,
    "neighbourhood((2, 4), (0, 2), start=1)": near_patches,
    "~causal()": lambda q, k: k > q,
    "causal() & ~sliding_window(1) | global_tokens(1)": lambda q, k: (
        (k <= q and not q - 1 <= k <= q) or 0 <= q < 1 or k < 1
    ),
}


@pytest.mark.parametrize("text", BUILT_IN)
@pytest.mark.parametrize(
    ("T", "S", "offset"), [(7, 7, None), (3, 11, 8), (5, 2, -3), (7, 5, 13), (1, 1, None)]
)
def test_a_built_in_mask_means_its_formula(text, T, S, offset):
    mask = masks.parse(text)
    expected = by_hand(BUILT_IN[text], T, S, offset or 0)
    np.testing.assert_array_equal(cells(mask, T, S, query_offset=offset), expected)


def assert_tiles_are_safe(mask, T, S, blocks, offset, exact=False):
    keep = cells(mask, T, S, query_offset=offset)
    codes = np.asarray(mask.tiles(T, S, query_block=blocks[0], key_block=blocks[1], query_offset=offset))
    assert codes.dtype == np.int8
    assert codes.shape[-2:] == (-(-T // blocks[0]), -(-S // blocks[1]))
    assert codes.shape[:-2] == keep.shape[:-2]
    for *index, i, j in np.ndindex(*codes.shape):
        tile = keep[
            (*index, slice(i * blocks[0], (i + 1) * blocks[0]), slice(j * blocks[1], (j + 1) * blocks[1]))
        ]
        code = codes[(*index, i, j)]
        if code == TileKind.EMPTY:
            assert not tile.any(), (mask, T, S, blocks, offset, i, j)
        elif code == TileKind.FULL:
            assert tile.all(), (mask, T, S, blocks, offset, i, j)
        elif exact:
            assert tile.any(), f"{mask} calls an empty tile partial"
            assert not tile.all(), f"{mask} calls a full tile partial"


LEAVES = [
    masks.causal(),
    masks.sliding_window(2),
    masks.sliding_window(1, 2),
    masks.sliding_window(None, 1),
    masks.chunked(3),
    masks.global_tokens(2),
    masks.prefix(3),
    masks.lengths(np.array([0, 4])),
    masks.valid_keys(np.arange(5)[None] % np.array([[2], [3]]) != 0),
    masks.segments(np.array([1, 1, 2, 2, 2]), np.array([1, 2, 2, 2, 3])),
    masks.segments(np.array([[0, 0, 1, 1, 1], [0, 1, 2, 3, 4]])),
    masks.from_array(np.arange(25).reshape(5, 5) % 4 != 1),
    masks.predicate(square_parity),
    masks.tree([-1, -1, 0, 0]),
    masks.tree([[-1, 0, 0], [-1, 0, 1]], start=[2, 1]),
    masks.block_diffusion(3, 2),
    masks.neighbourhood((2, 3), 1),
    masks.neighbourhood((2, 1, 2), (0, 1, 1), start=1),
    masks.streaming(1, 1),
    masks.shared_prefix([2, 1], [0, 0, 1, 1, 2]) & masks.causal(),
]
# Sorted ids have intervals that say all; a stride inside a large tile is always partial.
EXACT = LEAVES[:9] + LEAVES[11:13]


@pytest.mark.slow
@pytest.mark.parametrize("mask", LEAVES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("offset", [0, 2, -3])
def test_tiles_agree_with_cells_on_every_small_blocking(mask, offset):
    for blocks in itertools.product((1, 2, 3, 5), repeat=2):
        assert_tiles_are_safe(mask, 5, 5, blocks, offset, exact=mask in EXACT)


@pytest.mark.parametrize("mask", LEAVES, ids=lambda m: type(m).__name__)
def test_tiles_agree_with_cells(mask):
    assert_tiles_are_safe(mask, 5, 5, (2, 3), 1, exact=mask in EXACT)


@pytest.mark.parametrize("mask", [masks.global_tokens(2), LEAVES[10]], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("offset", [-3, 2])
def test_tiles_on_both_sides_of_the_first_and_last_position_agree_with_cells(mask, offset):
    assert_tiles_are_safe(mask, 5, 5, (2, 3), offset, exact=mask in EXACT)


@pytest.mark.parametrize(
    "mask", [LEAVES[0] | LEAVES[6], LEAVES[5] | LEAVES[10], LEAVES[1] & ~LEAVES[7]], ids=repr
)
def test_tiles_of_joined_masks_agree_with_cells(mask):
    assert_tiles_are_safe(mask, 5, 5, (2, 3), 1)


@pytest.mark.parametrize("T", mostly_slow(range(1, 8), 5))
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_dilated_tile_is_empty_exactly_when_no_multiple_fits(T, stride):
    mask = masks.dilated(stride)
    for blocks in itertools.product((1, 2, 4), repeat=2):
        codes = np.asarray(mask.tiles(T, query_block=blocks[0], key_block=blocks[1]))
        keep = cells(mask, T)
        for i, j in np.ndindex(*codes.shape):
            tile = keep[i * blocks[0] : (i + 1) * blocks[0], j * blocks[1] : (j + 1) * blocks[1]]
            assert (codes[i, j] == TileKind.EMPTY) == (not tile.any())
            assert codes[i, j] != TileKind.FULL or tile.all()


@pytest.mark.slow
@given(mask=expressions(batch=2, length=5), blocks=st.tuples(*[st.sampled_from([1, 2, 3, 5])] * 2))
def test_tiles_of_random_expressions_are_safe(mask, blocks):
    assert_tiles_are_safe(mask, 5, 5, blocks, None)


def test_tiles_of_a_per_row_offset_and_a_traced_mask_are_safe():
    offsets = np.array([0, 3])
    mask = masks.causal() & masks.lengths(np.array([4, 2]))
    assert_tiles_are_safe(mask, 3, 7, (2, 2), offsets)
    traced = jax.jit(lambda mask, offset: mask.tiles(3, 7, query_block=2, key_block=2, query_offset=offset))
    np.testing.assert_array_equal(
        traced(mask, offsets), mask.tiles(3, 7, query_block=2, key_block=2, query_offset=offsets)
    )


def test_a_mask_without_data_has_a_row_for_every_offset():
    offsets = np.array([1, -2])
    expected = np.stack([by_hand(lambda q, k: k <= q, 3, 7, offset) for offset in offsets])
    np.testing.assert_array_equal(cells(masks.causal(), 3, 7, query_offset=offsets), expected)
    codes = masks.causal().tiles(3, 7, query_block=1, key_block=1, query_offset=offsets)
    np.testing.assert_array_equal(codes, np.where(expected, TileKind.FULL, TileKind.EMPTY))


def test_tiling_a_long_mask_builds_no_square_array():
    mask = masks.causal() & masks.sliding_window(1000) & masks.segments(np.arange(131_072) // 5000)
    compiled = (
        jax.jit(lambda mask: mask.tiles(131_072, query_block=1024, key_block=1024)).lower(mask).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 2**20


def test_zero_queries_and_zero_keys_have_empty_tables():
    for mask in (masks.causal(), masks.prefix(1), masks.predicate(square_parity), masks.dilated(2)):
        assert cells(mask, 0).shape == (0, 0)
        assert cells(mask, 3, 0, query_offset=0).shape == (3, 0)
        assert mask.tiles(0, 3, query_offset=0).shape == (0, 1)
        assert mask.tiles(3, 0, query_offset=0).shape == (1, 0)
    empty = masks.segments(np.zeros(0, int))
    assert not cells(empty & masks.causal(), 3, 0, query_offset=2).any()
    assert empty.tiles(3, 0, query_offset=2).shape == (1, 0)


def test_per_row_data_keeps_to_the_first_leading_axis():
    mask = masks.lengths([2, 0]) & masks.segments([[0, 1, 1], [0, 0, 0]])
    assert cells(mask, 3).shape == (2, 3, 3)
    assert cells(mask, 3, leading_axes=3).shape == (2, 1, 1, 3, 3)
    keys_alone = cells(masks.segments([1, 4], [[1, 1, 4], [4, 0, 1]]), 2, 3)
    np.testing.assert_array_equal(keys_alone, [[[1, 1, 0], [0, 0, 1]], [[0, 0, 1], [1, 0, 0]]])
    np.testing.assert_array_equal(cells(mask, 3, leading_axes=2)[:, 0], cells(mask, 3))
    with pytest.raises(ValueError, match="leading_axes: expected at least 1"):
        mask.dense(3, leading_axes=0)


def test_segments_by_position_are_read_where_the_query_sits():
    ids = np.array([5, 5, 2, 2, 2])
    tail = cells(masks.segments(ids), 2, 5, query_offset=3)
    np.testing.assert_array_equal(tail, cells(masks.segments(ids), 5)[3:])
    np.testing.assert_array_equal(tail, cells(masks.segments(ids[3:], ids), 2, 5))
    beyond = cells(masks.segments(ids), 3, 5, query_offset=4)
    assert beyond[0].any()
    assert not beyond[1:].any()
    before = cells(masks.segments(ids), 3, 5, query_offset=-2)
    np.testing.assert_array_equal(before, [[0] * 5, [0] * 5, [1, 1, 0, 0, 0]])


def test_new_data_does_not_retrace():
    traces = []

    @jax.jit
    def dense(mask):
        traces.append(1)
        return mask.dense(5)

    for ids in ([0, 0, 1, 1, 1], [0, 1, 2, 3, 4]):
        mask = masks.causal() & masks.segments(ids)
        np.testing.assert_array_equal(dense(mask), mask.dense(5))
    assert len(traces) == 1


def test_a_mask_can_be_mapped_over():
    stacked = masks.lengths(jnp.array([1, 3]))
    out = jax.vmap(lambda mask: mask.dense(1, 3))(stacked)
    np.testing.assert_array_equal(out[:, 0], [[True, False, False], [True, True, True]])


# Notation


@given(mask=expressions(batch=2, length=5, opaque=False))
def test_repr_reads_back(mask):
    again = masks.parse(repr(mask))
    assert repr(again) == repr(mask)
    assert again == mask
    assert hash(again) == hash(mask)


@pytest.mark.parametrize(
    "text",
    [
        *("segments([])", "lengths([])", "valid_keys([[], []])", "tree([])"),
        "~(causal() | chunked(2)).prepare(4, 4, query_offset=1, block=2)",
    ],
)
def test_what_is_empty_or_prepared_reads_back(text):
    assert repr(masks.parse(text)) == text


def test_repr_reads_as_the_expression():
    text = "causal() & (sliding_window(2, 1) | ~prefix(3)) & ~(chunked(2) | dilated(3))"
    c, w, p = masks.causal(), masks.sliding_window(2, 1), masks.prefix(3)
    assert repr(c & (w | ~p) & ~(masks.chunked(2) | masks.dilated(3))) == text
    assert repr(c & (w & p)) == "causal() & (sliding_window(2, 1) & prefix(3))"
    assert repr(masks.lengths(np.arange(100))) == "lengths(<int32[100]>)"
    assert "square_parity" in repr(masks.predicate(square_parity))
    assert jax.jit(lambda m: jnp.array(len(repr(m))))(masks.lengths([1, 2])) == len("lengths(<int32[2]>)")


def test_masks_compare_by_what_they_say():
    assert masks.causal() == masks.causal()
    assert masks.causal() != masks.sliding_window(None, 1)
    assert masks.lengths([1, 2]) == masks.lengths(jnp.array([1, 2]))
    assert masks.lengths([1, 2]) != masks.lengths([1, 3])
    assert masks.causal() != "causal()"
    assert len({masks.causal() & masks.chunked(2), masks.causal() & masks.chunked(2)}) == 1


@pytest.mark.parametrize(
    "text",
    ["", "causal(", "causal", "import os", "__import__('os')", "causal() + prefix(1)", "prefix(x)",
     "causal() & open('f')", "sliding_window(-1)", "prefix(1.5)", "lambda: 1", "(" * 500,
     "~" * 9999 + "causal()",     "prefix(__builtins__)", "masks.causal()", "causal(**{'a': 1})",
     "causal(a={[1]: 2})"],
)  # fmt: skip
def test_parse_refuses_what_is_not_a_mask(text):
    with pytest.raises(ValueError, match="mask: expected an expression"):
        masks.parse(text)


def test_parse_knows_the_windows_of_other_libraries():
    assert masks.parse("from_jax_window((3, 1))") == masks.sliding_window(3, 1)
    assert masks.parse("from_hf_window(3)") == masks.sliding_window(2)
    assert masks.parse("from_flash_window(-1, right=1)") == masks.sliding_window(None, 1)


# Words for mistakes


@pytest.mark.parametrize(
    "text", ["~causal()", "causal() & prefix(1)", "prefix(1) | causal()", "~(prefix(1) & ~causal())"]
)
def test_a_mask_on_positions_asks_where_the_queries_sit_however_it_is_joined(text):
    with pytest.raises(ValueError, match="Pass query_offset=3 when the queries are the last rows"):
        masks.parse(text).dense(2, 5)
    with pytest.raises(ValueError, match="Pass query_offset=-3 when the queries are the last rows"):
        masks.parse(text).tiles(5, 2)


def test_mistakes_are_explained():
    causal = masks.causal()
    with pytest.raises(ValueError, match=r"query_offset=0 +query_offset=3\n  ■ · · · · +■ ■ ■ ■ ·"):
        causal.dense(2, 5)
    with pytest.raises(TypeError, match=r"combine masks with & \| ~"):
        bool(causal)
    with pytest.raises(TypeError, match=r"wrap a boolean array as masks.from_array"):
        causal & np.ones((2, 2), bool)
    with pytest.raises(TypeError, match=r"wrap a boolean array as masks.from_array"):
        np.ones((2, 2), bool) & causal
    with pytest.raises(TypeError, match=r"wrap a boolean array as masks.from_array"):
        jnp.ones((2, 2), bool) | causal
    with pytest.raises(ValueError, match="before: expected an integer of at least 0, got -1"):
        masks.sliding_window(-1)
    with pytest.raises(TypeError, match=r"stride: expected an integer known before tracing, got 1\.5"):
        masks.dilated(1.5)
    with pytest.raises(TypeError, match="key_lengths: expected integers, got float"):
        masks.lengths([1.0, 2.0])
    with pytest.raises(TypeError, match="pass additive masks as `bias=`"):
        masks.from_array(np.zeros((2, 2), np.float32))
    with pytest.raises(TypeError, match=r"use masks.valid_keys"):
        masks.from_array([True, False])
    with pytest.raises(TypeError, match=r"valid: expected an array \(..., S\) with one entry per key"):
        masks.valid_keys(True)
    with pytest.raises(TypeError, match="fn: expected a function"):
        masks.predicate(3)
    with pytest.raises(TypeError, match="expected fn to return booleans"):
        masks.predicate(lambda q, k: q - k).dense(3)
    with pytest.raises(ValueError, match="query_block: expected an integer of at least 1"):
        causal.tiles(3, query_block=0)
    with pytest.raises(TypeError, match="inside a trace"):
        jax.jit(lambda m: m.picture(3))(masks.lengths([1]))


# Numbers that int32 does not hold

MORE = 2**32 + 2  # 2, where it wraps
BEYOND = {
    "lengths": (lambda: masks.lengths(sys.maxsize), lambda q, k: True),
    "lengths per row": (lambda: masks.lengths([MORE, 2**40]), lambda q, k: True),
    "lengths beyond int64": (lambda: masks.lengths(2**70), lambda q, k: True),
    "unsigned lengths": (lambda: masks.lengths(jnp.asarray([2**31 + 2, 5], np.uint32)), lambda q, k: True),
    "prefix": (lambda: masks.prefix(MORE), lambda q, k: True),
    "window": (lambda: masks.sliding_window(MORE), lambda q, k: k <= q),
    "window after": (lambda: masks.sliding_window(1, MORE), lambda q, k: k >= q - 1),
    "chunked": (lambda: masks.chunked(MORE), lambda q, k: True),
    "dilated": (lambda: masks.dilated(MORE), lambda q, k: q == k),
    "global tokens": (lambda: masks.global_tokens(MORE), lambda q, k: True),
    "streaming": (lambda: masks.streaming(1, MORE), lambda q, k: k <= q),
    "block diffusion": (lambda: masks.block_diffusion(5, MORE), lambda q, k: True),
    "neighbourhood": (lambda: masks.neighbourhood((5,), MORE), lambda q, k: True),
    "blocks": (lambda: masks.blocks([[1]], (MORE, 2**40)), lambda q, k: True),
    "chosen blocks": (lambda: masks.chosen_blocks([[MORE, 1]], 5, 2, counts=[MORE]), lambda q, k: k >= 5),
}


@pytest.mark.parametrize("wide", mostly_slow([False, True], True), ids=["int32", "int64"])
@pytest.mark.parametrize("name", BEYOND)
def test_numbers_beyond_int32_mean_what_they_say(name, wide):
    make, rule = BEYOND[name]
    query, key = (np.random.default_rng(5).normal(size=(2, length, 3)).astype("float32") for length in (5, 7))
    key = key if name == "chosen blocks" else key[:, :5]
    truth = by_hand(rule, 5, key.shape[1])
    with jax.enable_x64(wide):
        mask = make()
        for row in cells(mask, *truth.shape, query_offset=0).reshape((-1, *truth.shape)):
            np.testing.assert_array_equal(row, truth)
        options = {"mask": mask, "query_offset": 0, "aux": ("weights",)}
        for backend in COMPLETE:
            weights = attend(query, key, key, backend=backend, **options)[1]["weights"]
            np.testing.assert_array_equal(weights > 0, np.broadcast_to(truth, (2, *truth.shape)))


def test_traced_numbers_beyond_int32_mean_what_they_say(x64):
    kept = jax.jit(lambda n: masks.lengths(n).dense(3))(jnp.asarray([MORE, 2, -(2**40)]))
    np.testing.assert_array_equal(kept[:, 0].sum(-1), [3, 2, 0])
    with pytest.raises(ValueError, match=f"query_ids: expected integers that int32 holds, got {MORE}"):
        masks.segments(jnp.asarray([MORE, 1]))


IDS, AT = np.array([1, MORE - 1, 2, MORE, 1]), np.arange(5)
TRACED = {
    "segments": (lambda n: {"mask": masks.segments(n, n)}, IDS, IDS[:, None] == IDS),
    "two dtypes": (
        lambda n: {"mask": masks.segments(n, n.astype(jnp.int32))},
        IDS,
        IDS[:, None] == IDS.astype(np.int32),
    ),
    "documents": (lambda n: {"mask": masks.segments(n)}, IDS, IDS[:, None] == IDS),
    "offset": (lambda n: {"mask": masks.causal(), "query_offset": n}, MORE, AT[:, None] >= 0),
    "offset below": (lambda n: {"mask": masks.causal(), "query_offset": n}, -MORE, AT[:, None] < 0),
    "offsets": (
        lambda n: {"mask": masks.causal(), "query_offset": n, "key_offset": n},
        MORE,
        AT[:, None] >= AT,
    ),
    "positions": (
        lambda n: {"mask": masks.causal(), "query_positions": n},
        IDS,
        np.minimum(IDS, 4)[:, None] >= AT,
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_64_bits_do_not_wrap(name, x64):
    options, number, truth = TRACED[name]
    x = np.random.default_rng(5).normal(size=(2, 5, 3)).astype("float32")
    for backend in COMPLETE:
        run = jax.jit(
            lambda n, backend=backend: attend(x, x, x, aux=("weights",), backend=backend, **options(n))
        )
        kept = run(jnp.asarray(number))[1]["weights"] > 0
        np.testing.assert_array_equal(kept, np.broadcast_to(truth, kept.shape))


@pytest.mark.parametrize("backend", COMPLETE)
def test_the_last_positions_that_int32_holds_are_positions(backend):
    x = np.random.default_rng(5).normal(size=(2, 5, 3)).astype("float32")
    mask, last = masks.causal() & masks.sliding_window(2), 2**31 - 6
    moved = attend(x, x, x, mask=mask, query_offset=last, key_offset=last, backend=backend)
    np.testing.assert_array_equal(moved, attend(x, x, x, mask=mask, backend=backend))


def test_distances_that_int32_does_not_hold_are_distances():
    at = {"query_positions": np.array([-1, 0, 1, 2]), "key_positions": np.array([0, 1, 2, 2**31 - 1])}
    for mask in (masks.causal(), masks.sliding_window(None), masks.sliding_window(2**31 - 1, 1)):
        keep = at["key_positions"] <= at["query_positions"][:, None] + (mask.bounds.after or 0)
        np.testing.assert_array_equal(mask.dense(4, **at), keep)
        assert np.asarray(mask.tiles(4, **at)).tolist() == [[TileKind.PARTIAL]]
    assert not np.asarray(
        masks.sliding_window(5, None).dense(1, 1, query_offset=2**31 - 9, key_offset=-9)
    ).any()


@pytest.mark.parametrize("stride", [1, 3, 7, 2**31 - 1])
def test_tiles_of_multiples_hold_what_their_cells_hold(stride):
    """Exact, and at distances that int32 does not hold."""
    mask = masks.dilated(stride)
    for offset, key_offset in ((0, 5), (4, -(2**31)), (2**31 - 12, -(2**31)), (-(2**31), 2**31 - 12)):
        where = {"query_offset": offset, "key_offset": key_offset}
        rows, columns = offset + np.arange(11)[:, None], key_offset + np.arange(11)
        keep = (columns - rows) % stride == 0
        np.testing.assert_array_equal(mask.dense(11, **where), keep)
        for size in (1, 2, 5):
            kinds = np.asarray(mask.tiles(11, query_block=size, key_block=size, **where))
            for row, column in np.ndindex(kinds.shape):
                cells = keep[row * size : (row + 1) * size, column * size : (column + 1) * size]
                full = TileKind.FULL if cells.all() else TileKind.PARTIAL
                assert kinds[row, column] == (full if cells.any() else TileKind.EMPTY)


def test_a_key_offset_of_0_is_none():
    np.testing.assert_array_equal(masks.causal().dense(3, key_offset=0), np.tri(3, dtype=bool))


# Pictures


def test_pictures_mark_each_pair_or_each_block_of_pairs():
    assert masks.causal().picture(2, 3, query_offset=9).splitlines() == [
        "2 queries x 3 keys   ■ may attend  · may not",
        " 9 ■ ■ ■",
        "10 ■ ■ ■",
    ]
    large = masks.causal().picture(640)
    assert large.splitlines()[0].startswith("640 queries x 640 keys, one mark per 20 x 20")
    assert len(large.splitlines()) == 33
    assert large.splitlines()[2] == "█ ▒" + " ·" * 30
    # 64 are drawn one by one, 65 no more; the mark of a block names its queries first.
    assert masks.prefix(3).picture(2, 64).splitlines()[1:] == [f"{t} ■ ■ ■{' ·' * 61}" for t in range(2)]
    assert masks.prefix(3).picture(2, 65).splitlines() == [
        "2 queries x 65 keys, one mark per 1 x 3   █ all may attend  ▒ some  · none",
        *["█" + " ·" * 21] * 2,
    ]
    rows = masks.lengths([1, 0]).picture(2).splitlines()
    assert rows == ["2 queries x 2 keys   ■ may attend  · may not   leading index 0 of 2", "0 ■ ·", "1 ■ ·"]
    assert (
        masks.from_array(np.ones((3, 1, 65, 65), bool))
        .picture(65)
        .splitlines()[0]
        .endswith("· none   leading index 0 of 3, 1")
    )
    assert masks.causal().picture(0).splitlines() == ["0 queries x 0 keys   ■ may attend  · may not"]


# Conventions of others


def test_torch_multi_head_attention_drops_where_true():
    drop = np.triu(np.ones((3, 3), bool), 1)
    np.testing.assert_array_equal(cells(masks.from_torch_mha(drop), 3), cells(masks.causal(), 3))
    padding = np.array([[False, False, True], [False, True, True]])
    both = masks.from_torch_mha(drop, padding)
    assert both == masks.from_torch_mha(drop) & masks.valid_keys(~padding)
    np.testing.assert_array_equal(cells(both, 3), cells(masks.causal() & masks.lengths([2, 1]), 3))
    per_head = np.arange(2 * 5 * 3 * 3).reshape(10, 3, 3) % 2 == 0  # batch 2, heads 5
    assert masks.from_torch_mha(per_head[:, :0], num_heads=5).dense(0, 3, leading_axes=2).shape[-2:] == (0, 3)
    kept = cells(masks.from_torch_mha(per_head, num_heads=5), 3)
    np.testing.assert_array_equal(kept[1, 3], ~per_head[1 * 5 + 3])
    with pytest.raises(ValueError, match="num_heads: expected a divisor"):
        masks.from_torch_mha(per_head, num_heads=3)
    with pytest.raises(TypeError, match="pass additive masks as `bias=`"):
        masks.from_torch_mha(np.zeros((3, 3), np.float32))
    with pytest.raises(ValueError, match="got none"):
        masks.from_torch_mha()
    assert masks.from_torch_mha(is_causal=True) == masks.causal()
    assert masks.from_torch_mha(drop.T, padding, is_causal=True) == (
        masks.from_torch_mha(drop.T) & masks.valid_keys(~padding) & masks.causal()
    )


def test_windows_count_as_their_libraries_do():
    assert masks.from_flash_window(-1, 0) == masks.sliding_window(None, 0)
    assert masks.from_flash_window(2, -1) == masks.sliding_window(2, None)
    np.testing.assert_array_equal(cells(masks.from_flash_window(2, 1), 5).sum(1), [2, 3, 4, 4, 3])
    np.testing.assert_array_equal(cells(masks.from_hf_window(2), 5).sum(1), [1, 2, 2, 2, 2])
    assert masks.from_jax_window((3, 1)) == masks.sliding_window(3, 1)
    assert masks.from_jax_window(2) == masks.sliding_window(2, 2)
    with pytest.raises(ValueError, match="at least 1"):
        masks.from_hf_window(0)
    with pytest.raises(ValueError, match="left: expected"):
        masks.from_flash_window(-2, 0)


def test_zero_one_masks_and_padding_are_read():
    keep = np.array([[1, 0, 2], [0, 0, 1]])
    np.testing.assert_array_equal(cells(masks.from_array(keep), 2, 3), keep != 0)
    np.testing.assert_array_equal(cells(masks.from_array(-keep), 2, 3), keep != 0)
    np.testing.assert_array_equal(cells(masks.from_drop(keep), 2, 3), keep == 0)
    np.testing.assert_array_equal(cells(masks.from_hf_attention_mask(keep), 1, 3)[:, 0], keep != 0)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(batch, S\)"):
        masks.from_hf_attention_mask(keep[None])
    # The tutorial from scratch had lengths of shape (batch,) and no way to broadcast them to heads.
    np.testing.assert_array_equal(
        cells(masks.lengths([2, 3]), 1, 3, leading_axes=2)[:, 0, 0], [[True, True, False], [True] * 3]
    )


def test_the_bounds_of_two_windows_are_those_of_both():
    check_bounds(masks.sliding_window(3, 1) & masks.segments([0, 0, 0, 1, 1]) & masks.sliding_window(1, 2))


@pytest.mark.slow
@settings(max_examples=60)
@given(mask=expressions(batch=2, length=5))
def test_bounds_hold_for_every_pair(mask):
    check_bounds(mask)


def check_bounds(mask):
    bounds, (queries, keys) = mask.bounds, np.indices((5, 5))
    allowed = np.ones((2, 5, 5), bool)
    if bounds.before is not None:
        allowed &= keys >= queries - bounds.before
    if bounds.after is not None:
        allowed &= keys <= queries + bounds.after
    if bounds.keys_below is not None:
        allowed &= keys < np.asarray(bounds.keys_below).reshape((-1, 1, 1))
    if bounds.key_ids is not None:
        key_ids = np.asarray(bounds.key_ids)
        query_ids = key_ids if bounds.query_ids is None else np.asarray(bounds.query_ids)
        allowed &= query_ids[..., :, None] == key_ids[..., None, :]
    kept = np.broadcast_to(mask.dense(5, leading_axes=max(mask.leading_axes, 1)), (2, 5, 5))
    assert not (kept & ~allowed).any()
    assert not bounds.exact or (kept == allowed).all()
    assert all(part.parts == (part,) for part in mask.parts)
