"""Masks of whole blocks: tables and listed numbers, traced, per row and head, and in every shape."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from mesh_cases import draw, evaluate
from refusals import assert_refused
from regard import attend, explain, masks
from regard.engine.backends import tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from regard.inspection.traces.codec import Reader, Writer
from regard.masks.grid import Grid
from regard.masks.spans import Span
from test_masks import assert_tiles_are_safe

T, S, SIZE = 47, 61, (7, 11)
ROWS, COLUMNS = 7, 6
PIECES = (Blocking(5, 7, blocks=3, pieces=2), Blocking(7, 5, blocks=2, pieces=3))
# Where the sizes divide the call, no row is moved back, and pieces that do not exist lie beyond the end; so
# do blocks, of which there are 6, forward.
EVEN = (Blocking(2, 2, blocks=4, pieces=4), Blocking(2, 2, blocks=2, pieces=4))


def spell_out(table, size, queries, keys):
    """The pairs of a table, one by one."""
    rows, columns = np.arange(queries) // size[0], np.arange(keys) // size[1]
    return np.asarray(table)[..., rows[:, None], columns[None]]


def table_of(*leading, rows=ROWS, columns=COLUMNS, seed=3):
    table = np.random.default_rng(seed).random((*leading, rows, columns)) < 0.4
    table[..., 2:3, :] = False  # rows that attend to nothing
    return table


def check(arrays, mask, keep, sizes):
    """Hold output and gradients, in tiles of these sizes, to those of the pairs; return the output."""
    (cotangent,) = draw((*arrays[0].shape[:-1], 5), seed=5)
    call = lambda *arrays: tiled.run(canonicalize(*arrays, mask=mask), *sizes)[0]
    found = evaluate(call, arrays, cotangent)
    oracle.assert_close(found, oracle.batched(*arrays, keep=keep, cotangent=cotangent).parts)
    return np.asarray(found[0])


def test_values_and_gradients_are_those_of_the_pairs_spelled_out():
    """Of tables by row and query head, and by row alone."""
    by_head, by_row = table_of(2, 6), table_of(2, 1, seed=4)
    keep = spell_out(by_head, SIZE, T, S) | spell_out(by_row, SIZE, T, S)
    mask = masks.blocks(by_head, SIZE) | masks.blocks(by_row, SIZE)
    output = check(draw((2, 6, T, 3), (2, 3, S, 3), (2, 3, S, 5)), mask, keep, PIECES)
    assert not output[..., 14:21, :].any()


def test_pieces_beyond_the_end_count_nothing_where_sizes_divide_the_call():
    """Gradients once counted the last rows for each piece that a list lacked; such blocks overwrote them."""
    table = table_of(rows=6, columns=6, seed=1)
    keep = spell_out(table, (2, 2), 12, 12)
    check(draw((2, 12, 3), (2, 12, 3), (2, 12, 5)), masks.blocks(table, 2), keep, EVEN)


TILES = (1, 2), (6, 5)


@pytest.mark.parametrize("sizes", [(1, 5), (7, 2)])
def test_kinds_of_tiles_are_exact_whatever_their_sides(sizes):
    """Of a table, and of pieces of it, which keep the table."""
    table = table_of(2, rows=-(-13 // sizes[0]), columns=-(-17 // sizes[1]))
    keep = spell_out(table, sizes, 13, 17)

    def look(mask, *lengths, sides=TILES):
        return mask.dense(*lengths), [mask.tiles(*lengths, query_block=q, key_block=k) for q, k in sides]

    @jax.jit
    def look_at_all(mask):
        piece = mask.slice_grid(Grid.tile(Span(4, 9), Span(3, 11), 0, 1))
        again = piece.slice_grid(Grid.tile(Span(1, 5), Span(3, 7), 0, 1))
        assert max(leaf.size for leaf in jax.tree.leaves(piece)) <= max(table.size, 11)
        return look(mask, 13, 17), look(piece, 9, 11), look(again, 5, 7, sides=())

    parts = keep, keep[:, 4:, 3:14], keep[:, 5:10, 6:13]
    for (found, codes), expected in zip(look_at_all(masks.blocks(table, sizes)), parts, strict=True):
        np.testing.assert_array_equal(found, expected)
        for side, kinds in zip(TILES, codes, strict=False):
            assert_tiles_are_safe(expected, kinds, side, exact=True)


def test_listed_numbers_are_a_table_and_strangers_among_them_keep_nothing():
    rng = np.random.default_rng(2)
    numbers, counts = rng.integers(-3, 9, (2, 5, 4)), rng.integers(0, 5, (2, 5))
    numbers[0, 0] = 3  # over and over
    expected = np.zeros((2, 5, 6), bool)
    for b, row in np.ndindex(2, 5):
        for number in numbers[b, row, : counts[b, row]]:
            if 0 <= number < 6:
                expected[b, row, number] = True
    np.testing.assert_array_equal(masks.chosen_blocks(numbers, 1, 6, counts=counts).dense(5, 6), expected)
    traced = jax.jit(lambda n, c: masks.chosen_blocks(n, 1, 6, counts=c).dense(5, 6))
    np.testing.assert_array_equal(traced(numbers, counts), expected)
    everyone = masks.chosen_blocks(numbers, 1, 6).dense(5, 6)
    for b, row in np.ndindex(2, 5):
        assert set(np.flatnonzero(everyone[b, row])) == set(numbers[b, row]) & set(range(6))
    assert not masks.chosen_blocks(np.zeros((3, 0), int), 2, 4).dense(6, 8).any()
    # Numbers that int32 does not hold do not come round to another block's.
    for huge in ([[2**32, -(2**32)]], np.array([[2**32 + 1, 2**63]], np.uint64)):
        assert not masks.chosen_blocks(huge, 1, 3).dense(1, 3).any()
    small = masks.chosen_blocks(np.array([[255, 1]], np.uint8), 1, 300).dense(1, 300)
    assert np.flatnonzero(small).tolist() == [1, 255]


def test_every_kind_of_table_says_the_same():
    table = table_of()
    spelled = masks.blocks(table, SIZE).dense(T, S)
    for other in (-table.astype(np.int8), jnp.asarray(table), table.tolist()):
        np.testing.assert_array_equal(masks.blocks(other, SIZE).dense(T, S), spelled)
    positions = {"query_positions": np.arange(T)[::-1], "key_positions": np.arange(S) * 3}
    np.testing.assert_array_equal(masks.blocks(table, SIZE).dense(T, S, **positions), spelled)
    np.testing.assert_array_equal(masks.blocks(table, SIZE).dense(T, S, query_offset=5), spelled)
    assert (masks.blocks(table, SIZE) & masks.causal()).block_side == 7


def test_mistakes_are_explained():
    x = jnp.zeros((2, 5, 3))
    wrong = [
        (TypeError, r"table: .*got float32", lambda: masks.blocks(jnp.ones((2, 2)), 3)),
        (TypeError, r"table: expected at least the axes \(rows, columns\), got shape \(2,\)",
         lambda: masks.blocks([1, 0], 3)),
        (ValueError, "size: expected an integer of at least 1, got 0", lambda: masks.blocks([[1]], (3, 0))),
        (ValueError, r"size: expected one number, or one for queries and one for keys; got \(1, 2, 3\)",
         lambda: masks.blocks([[1]], (1, 2, 3))),
        (TypeError, "indices: expected integers, got float32",
         lambda: masks.chosen_blocks(jnp.ones((2, 2)), 3, 2)),
        (TypeError, r"indices: expected at least the axes \(rows, k\)",
         lambda: masks.chosen_blocks([1], 3, 2)),
        (ValueError, "num_columns: expected an integer of at least 1",
         lambda: masks.chosen_blocks([[1]], 3, 0)),
        (ValueError, r"counts: expected one number for each row of indices, \(2,\); got \(1,\)",
         lambda: masks.chosen_blocks([[1], [0]], 3, 2, counts=[1])),
        (ValueError, "blocks table: expected 3 rows, one for each 2 of 5; got 2",
         lambda: attend(x, x, x, mask=masks.blocks(np.ones((2, 3), int), 2))),
        (ValueError, "blocks table: expected 3 columns, one for each 2 of 5; got 4",
         lambda: attend(x, x, x, mask=masks.blocks(np.ones((3, 4), int), 2))),
        (ValueError, r"blocks table: expected leading axes that match .*\(2,\)",
         lambda: attend(x, x, x, mask=masks.blocks(np.ones((3, 3, 3), int), 2))),
    ]  # fmt: skip
    assert_refused(*((call, message, error) for error, message, call in wrong))


def test_a_table_is_printed_read_back_drawn_and_saved():
    mask = masks.blocks([[1, 0], [0, 1]], (2, 3)) & masks.causal()
    assert repr(mask) == "blocks([[True, False], [False, True]], (2, 3)) & causal()"
    assert masks.parse(repr(mask)) == mask
    assert masks.parse("chosen_blocks([[0], [1]], 2, 2)") == masks.blocks([[1, 0], [0, 1]], 2)
    assert mask.left.picture(4, 6).splitlines()[1:] == [
        "0 ■ ■ ■ · · ·", "1 ■ ■ ■ · · ·", "2 · · · ■ ■ ■", "3 · · · ■ ■ ■",
    ]  # fmt: skip
    large = masks.blocks(table_of(2), SIZE)
    assert repr(large) == "blocks(<bool[2, 7, 6]>, (7, 11))"
    writer = Writer()
    data = json.loads(json.dumps(writer.write("mask", large)))
    assert Reader(writer.arrays).read("mask", data, masks.Mask) == large


def test_a_table_costs_what_it_keeps_where_it_is_not_known_yet():
    lines = []

    @jax.jit
    def call(x, table):
        lines.append(explain(x, x, x, mask=masks.blocks(table, 64), backend="tiled").computes)
        return x

    call(jnp.zeros((2, 8, 640, 3)), jnp.ones((10, 10), bool))
    assert lines[0].forward.pieces
    assert str(lines[0]).endswith("the mask keeps blocks of 64")
