"""The mask algebra: meaning, tiles against cells, notation, conventions."""

import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mask_expressions import expressions
from refusals import assert_refused
from regard import attend, masks
from regard.masks import TileKind
from regard.masks.grid import Grid
from regard.masks.spans import Span


def square_parity(query, key):
    return (query * key) % 3 != 1


def cells(mask, T, S=None, **kwargs):
    return np.asarray(mask.dense(T, S, **kwargs))


def by_hand(rule, T, S, offset=0):
    return np.array([[bool(rule(t + offset, s)) for s in range(S)] for t in range(T)]).reshape(T, S)


PARENTS = [-1, 0, 0, 1, -1]


def tree(start):
    """The rule of a tree whose first node sits at `start`, after a text."""

    def keep(query, key):
        end = start + len(PARENTS)
        if key < start:
            return key <= query < end
        nodes = [query - start] if start <= query < end else []
        while nodes and nodes[-1] >= 0:
            nodes.append(PARENTS[nodes[-1]])
        return key - start in nodes

    return keep


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
    "tree([-1, 0, 0, 1, -1], 2)": tree(2),
    "block_diffusion(4, 3)": denoised,
    "neighbourhood((2, 4), (0, 2), start=1)": near_patches,
    "~causal()": lambda q, k: k > q,
    "causal() & ~sliding_window(1) | global_tokens(1)": lambda q, k: (
        (k <= q and not q - 1 <= k <= q) or 0 <= q < 1 or k < 1
    ),
}
SHAPES = [(7, 7, None), (3, 11, 8), (5, 2, -3)]


def test_a_built_in_mask_means_its_formula():
    made = {text: masks.parse(text) for text in BUILT_IN}
    evaluate = lambda mask: [mask.dense(T, S, query_offset=offset) for T, S, offset in SHAPES]
    found = jax.jit(lambda made: {text: evaluate(mask) for text, mask in made.items()})(made)
    for text, rule in BUILT_IN.items():
        for shape, keep in zip(SHAPES, found[text], strict=True):
            np.testing.assert_array_equal(keep, by_hand(rule, *shape[:2], shape[2] or 0), f"{text} {shape}")


def assert_tiles_are_safe(keep, codes, blocks, exact=False, name=""):
    """Hold codes of tiles of these sides to the pairs in them."""
    keep, codes = np.asarray(keep), np.asarray(codes)
    assert codes.dtype == np.int8
    assert codes.shape[-2:] == tuple(-(-n // side) for n, side in zip(keep.shape[-2:], blocks, strict=True))
    leading = np.broadcast_shapes(keep.shape[:-2], codes.shape[:-2])
    keep, codes = (np.broadcast_to(array, (*leading, *array.shape[-2:])) for array in (keep, codes))
    for *index, i, j in np.ndindex(*codes.shape):
        rows, columns = (slice(n * side, (n + 1) * side) for n, side in zip((i, j), blocks, strict=True))
        tile, code = keep[(*index, rows, columns)], codes[(*index, i, j)]
        assert code != TileKind.EMPTY or not tile.any(), (name, i, j)
        assert code != TileKind.FULL or tile.all(), (name, i, j)
        assert not exact or code != TileKind.PARTIAL or 0 < tile.sum() < tile.size, (name, i, j)


def check_tiles(some, blocks, *offsets, exact=()):
    """Hold what each mask says of its tiles to its cells, in one program."""
    sides = dict(zip(("query_block", "key_block"), blocks, strict=True))
    look = lambda mask, at: (mask.dense(5, query_offset=at), mask.tiles(5, **sides, query_offset=at))
    found = jax.jit(lambda some: [[look(mask, offset) for offset in offsets] for mask in some])(some)
    for mask, pairs in zip(some, found, strict=True):
        for offset, (keep, codes) in zip(offsets, pairs, strict=True):
            assert_tiles_are_safe(keep, codes, blocks, mask in exact, f"{mask} at {offset}")


LEAVES = [
    masks.causal(), masks.sliding_window(2), masks.sliding_window(1, 2), masks.sliding_window(None, 1),
    masks.chunked(3), masks.global_tokens(2), masks.prefix(3), masks.lengths(np.array([0, 4])),
    masks.valid_keys(np.arange(5)[None] % np.array([[2], [3]]) != 0),
    masks.segments(np.array([1, 1, 2, 2, 2]), np.array([1, 2, 2, 2, 3])),
    masks.segments(np.array([[0, 0, 1, 1, 1], [0, 1, 2, 3, 4]])),
    masks.from_array(np.arange(25).reshape(5, 5) % 4 != 1), masks.predicate(square_parity),
    masks.tree([-1, -1, 0, 0]), masks.tree([[-1, 0, 0], [-1, 0, 1]], start=[2, 1]),
    masks.block_diffusion(3, 2), masks.neighbourhood((2, 3), 1),
    masks.neighbourhood((2, 1, 2), (0, 1, 1), start=1), masks.streaming(1, 1),
    masks.shared_prefix([2, 1], [0, 0, 1, 1, 2]) & masks.causal(),
]  # fmt: skip
# Sorted ids have intervals that say all; a stride inside a large tile is always partial.
EXACT = LEAVES[:9] + LEAVES[11:13]


def test_tiles_agree_with_cells():
    check_tiles(LEAVES, (2, 3), 1, exact=EXACT)


def test_tiles_on_both_sides_of_the_first_and_last_position_agree_with_cells():
    check_tiles([masks.global_tokens(2), LEAVES[10]], (2, 3), -3, 2)


def test_tiles_of_joined_masks_agree_with_cells():
    check_tiles([LEAVES[0] | LEAVES[6], LEAVES[5] | LEAVES[10], LEAVES[1] & ~LEAVES[7]], (2, 3), 1)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    mask=expressions(batch=2, length=5),
    offset=st.sampled_from([0, 2, -3]),
    blocks=st.tuples(*[st.sampled_from([1, 2, 3, 5])] * 2),
)
def test_tiles_pieces_and_bounds_of_random_expressions_are_those_of_their_cells(mask, offset, blocks):
    sides = {"query_block": blocks[0], "key_block": blocks[1], "query_offset": offset, "leading_axes": 2}

    @jax.jit
    def look(mask):
        prepared = mask.prepare(5, query_offset=offset, block=2)
        piece = mask.slice_grid(Grid.tile(Span(1, 3), Span(2, 2), offset, 2))
        return (
            mask.dense(5, query_offset=offset, leading_axes=2),
            piece.dense(3, 2, query_offset=offset + 1, key_offset=2, leading_axes=2),
            [(one.tiles(5, **sides), one.dense(5, query_offset=offset)) for one in (mask, prepared)],
        )

    whole, part, told = look(mask)
    np.testing.assert_array_equal(*np.broadcast_arrays(part, whole[..., 1:4, 2:4]))
    for codes, keep in told:
        assert_tiles_are_safe(whole, codes, blocks)
        np.testing.assert_array_equal(*np.broadcast_arrays(keep, np.squeeze(whole, 1)))
    check_bounds(mask)


def test_a_mask_without_data_has_a_row_for_every_offset():
    offsets = np.array([1, -2])
    expected = np.stack([by_hand(lambda q, k: k <= q, 3, 7, offset) for offset in offsets])
    np.testing.assert_array_equal(cells(masks.causal(), 3, 7, query_offset=offsets), expected)
    codes = masks.causal().tiles(3, 7, query_block=1, key_block=1, query_offset=offsets)
    np.testing.assert_array_equal(codes, np.where(expected, TileKind.FULL, TileKind.EMPTY))


def test_zero_queries_and_zero_keys_have_empty_tables():
    @jax.jit
    def shapes(mask):
        dense = mask.dense(0), mask.dense(3, 0, query_offset=0)
        return *dense, mask.tiles(0, 3, query_offset=0), mask.tiles(3, 0, query_offset=0)

    for mask in (masks.causal(), masks.prefix(1), masks.predicate(square_parity), masks.dilated(2)):
        assert [array.shape for array in jax.eval_shape(shapes, mask)] == [(0, 0), (3, 0), (0, 1), (1, 0)]
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
    assert_refused((lambda: mask.dense(3, leading_axes=0), "leading_axes: expected at least 1"))


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
    placed = cells(masks.segments(ids), 3, 5, query_positions=[4, 0, 9])
    np.testing.assert_array_equal(placed, [[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0] * 5])


# Notation


@settings(max_examples=40)
@given(mask=expressions(batch=2, length=5, opaque=False))
def test_repr_reads_back(mask):
    again = masks.parse(repr(mask))
    assert repr(again) == repr(mask)
    assert again == mask
    assert hash(again) == hash(mask)


def test_what_is_empty_or_prepared_reads_back():
    prepared = "~(causal() | chunked(2)).prepare(4, 4, query_offset=1, block=2)"
    for text in ("segments([])", "lengths([])", "valid_keys([[], []])", "tree([])", prepared):
        assert repr(masks.parse(text)) == text


def test_repr_reads_as_the_expression():
    text = "causal() & (sliding_window(2, 1) | ~prefix(3)) & ~(chunked(2) | dilated(3))"
    c, w, p = masks.causal(), masks.sliding_window(2, 1), masks.prefix(3)
    assert repr(c & (w | ~p) & ~(masks.chunked(2) | masks.dilated(3))) == text
    assert repr(c & (w & p)) == "causal() & (sliding_window(2, 1) & prefix(3))"
    assert repr(masks.lengths(np.arange(100))) == "lengths(<int32[100]>)"
    assert "square_parity" in repr(masks.predicate(square_parity))
    assert jax.jit(lambda m: jnp.array(len(repr(m))))(masks.lengths([1, 2])) == len("lengths(<int32[2]>)")


def test_parse_refuses_what_is_not_a_mask():
    for text in (
        "", "causal(", "causal", "import os", "__import__('os')", "causal() + prefix(1)", "prefix(x)",
        "causal() & open('f')", "sliding_window(-1)", "prefix(1.5)", "lambda: 1", "(" * 500,
        "~" * 9999 + "causal()", "prefix(__builtins__)", "masks.causal()", "causal(**{'a': 1})",
        "causal(a={[1]: 2})",
    ):  # fmt: skip
        with pytest.raises(ValueError, match="mask: expected an expression"):
            masks.parse(text)
    words = "causal() and prefix(1)", "causal() or prefix(1)", "causal() && prefix(1)"
    for text in (*words, "not causal()", "!causal()"):
        with pytest.raises(ValueError, match=r"joined by & and \| and turned by ~: write these for `and`"):
            masks.parse(text)
    with pytest.raises(ValueError, match="predicate takes what text cannot hold"):
        masks.parse("predicate(lambda q, k: q > k)")
    with pytest.raises(ValueError, match=r"sliding_window: window: .*; write before="):
        masks.parse("sliding_window(window=2)")
    for text in ("sliding_window(before=1, before=2)", "sliding_window(**{'before': 1})"):
        with pytest.raises(ValueError, match="sliding_window takes each option once, by its name"):
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
    causal, cells_of_two = masks.causal(), np.ones((2, 2), bool)
    wrong = [
        (ValueError, r"query_offset=0 +query_offset=3\n  ■ · · · · +■ ■ ■ ■ ·", lambda: causal.dense(2, 5)),
        (TypeError, r"combine masks with & \| ~", lambda: bool(causal)),
        (TypeError, "wrap a boolean array as masks.from_array", lambda: causal & cells_of_two),
        (TypeError, "wrap a boolean array as masks.from_array", lambda: cells_of_two & causal),
        (TypeError, "wrap a boolean array as masks.from_array", lambda: jnp.asarray(cells_of_two) | causal),
        (ValueError, "before: expected an integer of at least 0, got -1", lambda: masks.sliding_window(-1)),
        (TypeError, r"an end is sliding_window\(2, None\)", lambda: masks.from_jax_window((2, None))),
        (TypeError, r"stride: expected an integer known before .*, got 1\.5", lambda: masks.dilated(1.5)),
        (TypeError, "key_lengths: expected integers, got float", lambda: masks.lengths([1.0, 2.0])),
        (TypeError, "pass additive masks as `bias=`", lambda: masks.from_array(np.zeros((2, 2), np.float32))),
        (TypeError, "use masks.valid_keys", lambda: masks.from_array([True, False])),
        (TypeError, r"valid: expected an array \(..., S\) with one entry per key",
         lambda: masks.valid_keys(True)),
        (TypeError, "fn: expected a function", lambda: masks.predicate(3)),
        (TypeError, "expected fn to return booleans", lambda: masks.predicate(lambda q, k: q - k).dense(3)),
        (ValueError, "query_block: expected an integer of at", lambda: causal.tiles(3, query_block=0)),
        (TypeError, "inside a trace", lambda: jax.jit(lambda m: m.picture(3))(masks.lengths([1]))),
    ]  # fmt: skip
    assert_refused(*((call, message, error) for error, message, call in wrong))


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


@pytest.mark.parametrize("wide", [False, True], ids=["int32", "int64"])
def test_numbers_beyond_int32_mean_what_they_say(wide):
    with jax.enable_x64(wide):
        made = {name: make() for name, (make, _) in BEYOND.items()}
        found = jax.jit(lambda made: {name: look_at(name, mask) for name, mask in made.items()})(made)
    for name, (_, rule) in BEYOND.items():
        keep, codes = found[name]
        for row in np.asarray(keep).reshape((-1, *keep.shape[-2:])):
            np.testing.assert_array_equal(row, by_hand(rule, *row.shape), name)
        assert_tiles_are_safe(keep, codes, (2, 3), name=name)


def look_at(name, mask):
    sizes = 5, 7 if name == "chosen blocks" else 5
    return mask.dense(*sizes, query_offset=0), mask.tiles(*sizes, query_block=2, key_block=3, query_offset=0)


IDS, AT = np.array([1, MORE - 1, 2, MORE, 1]), np.arange(5)
TRACED = {
    "segments": (lambda n: {"mask": masks.segments(n, n)}, IDS, IDS[:, None] == IDS),
    "two dtypes": (lambda n: {"mask": masks.segments(n, n.astype(jnp.int32))}, IDS,
                   IDS[:, None] == IDS.astype(np.int32)),
    "documents": (lambda n: {"mask": masks.segments(n)}, IDS, IDS[:, None] == IDS),
    "offset": (lambda n: {"mask": masks.causal(), "query_offset": n}, MORE, AT[:, None] >= 0),
    "offset below": (lambda n: {"mask": masks.causal(), "query_offset": n}, -MORE, AT[:, None] < 0),
    "offsets": (lambda n: {"mask": masks.causal(), "query_offset": n, "key_offset": n}, MORE,
                AT[:, None] >= AT),
    "positions": (lambda n: {"mask": masks.causal(), "query_positions": n}, IDS,
                  np.minimum(IDS, 4)[:, None] >= AT),
}  # fmt: skip


def test_traced_64_bits_do_not_wrap(x64):
    kept = jax.jit(lambda n: masks.lengths(n).dense(3))(jnp.asarray([MORE, 2, -(2**40)]))
    assert np.asarray(kept)[:, 0].sum(-1).tolist() == [3, 2, 0]
    with pytest.raises(ValueError, match=f"query_ids: expected integers that int32 holds, got {MORE}"):
        masks.segments(jnp.asarray([MORE, 1]))
    x = np.random.default_rng(5).normal(size=(2, 5, 3)).astype("float32")
    weigh = lambda **options: attend(x, x, x, aux=("weights",), backend="dense", **options)[1]["weights"]
    numbers = {name: jnp.asarray(number) for name, (_, number, _) in TRACED.items()}
    found = jax.jit(lambda given: {name: weigh(**TRACED[name][0](n)) for name, n in given.items()})(numbers)
    for name, weights in found.items():
        np.testing.assert_array_equal(weights > 0, np.broadcast_to(TRACED[name][2], weights.shape), name)


def test_tiles_of_multiples_hold_what_their_cells_hold():
    """Exact, and at distances that int32 does not hold."""
    places = (0, 5), (4, -(2**31)), (2**31 - 12, -(2**31)), (-(2**31), 2**31 - 12)
    cases = list(itertools.product([1, 3, 2**31 - 1], places, [1, 2, 5]))

    def look(stride, place, size):
        where = {"query_offset": place[0], "key_offset": place[1]}
        mask = masks.dilated(stride)
        return mask.dense(11, **where), mask.tiles(11, query_block=size, key_block=size, **where)

    found = jax.jit(lambda: [look(*case) for case in cases])()
    for (stride, place, size), (keep, codes) in zip(cases, found, strict=True):
        rows, columns = place[0] + np.arange(11)[:, None], place[1] + np.arange(11)
        np.testing.assert_array_equal(keep, (columns - rows) % stride == 0)
        assert_tiles_are_safe(keep, codes, (size, size), exact=True, name=(stride, place, size))


# Pictures


def test_pictures_mark_each_pair_or_each_block_of_pairs():
    lines = masks.causal().picture(2, 3, query_offset=9).splitlines()
    assert lines == ["2 queries x 3 keys   ■ may attend  · may not", " 9 ■ ■ ■", "10 ■ ■ ■"]
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
    many = masks.from_array(np.ones((3, 1, 65, 65), bool)).picture(65)
    assert many.splitlines()[0].endswith("· none   leading index 0 of 3, 1")
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
    assert_refused((lambda: masks.from_torch_mha(per_head, num_heads=3), "num_heads: expected a divisor"))
    told = "nonzero = may not attend, .*pass additive masks as `bias=`"
    for make in (masks.from_torch_mha, lambda mask: masks.from_torch_mha(None, mask), masks.from_drop):
        with pytest.raises(TypeError, match=told):
            make(np.zeros((3, 3), np.float32))
    assert_refused((masks.from_torch_mha, "got none"))
    assert masks.from_torch_mha(is_causal=True) == masks.causal()
    all_three = masks.from_torch_mha(drop.T) & masks.valid_keys(~padding) & masks.causal()
    assert masks.from_torch_mha(drop.T, padding, is_causal=True) == all_three


def test_windows_count_as_their_libraries_do():
    assert masks.from_flash_window(-1, 0) == masks.sliding_window(None, 0)
    assert masks.from_flash_window(2, -1) == masks.sliding_window(2, None)
    np.testing.assert_array_equal(cells(masks.from_flash_window(2, 1), 5).sum(1), [2, 3, 4, 4, 3])
    np.testing.assert_array_equal(cells(masks.from_hf_window(2), 5).sum(1), [1, 2, 2, 2, 2])
    assert masks.from_jax_window((3, 1)) == masks.sliding_window(3, 1)
    assert masks.from_jax_window(2) == masks.sliding_window(2, 2)
    assert_refused((lambda: masks.from_hf_window(0), "at least 1"))
    assert_refused((lambda: masks.from_flash_window(-2, 0), "left: expected"))


def test_zero_one_masks_and_padding_are_read():
    keep = np.array([[1, 0, 2], [0, 0, 1]])
    np.testing.assert_array_equal(cells(masks.from_array(keep), 2, 3), keep != 0)
    np.testing.assert_array_equal(cells(masks.from_array(-keep), 2, 3), keep != 0)
    np.testing.assert_array_equal(cells(masks.from_drop(keep), 2, 3), keep == 0)
    np.testing.assert_array_equal(cells(masks.from_hf_attention_mask(keep), 1, 3)[:, 0], keep != 0)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(batch, S\)"):
        masks.from_hf_attention_mask(keep[None])
    # The tutorial from scratch had lengths of shape (batch,) and no way to broadcast them to heads.
    kept = cells(masks.lengths([2, 3]), 1, 3, leading_axes=2)[:, 0, 0]
    np.testing.assert_array_equal(kept, [[True, True, False], [True] * 3])


def test_the_bounds_of_two_windows_are_those_of_both():
    check_bounds(masks.sliding_window(3, 1) & masks.segments([0, 0, 0, 1, 1]) & masks.sliding_window(1, 2))


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
