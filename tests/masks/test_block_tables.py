"""Masks of whole blocks: tables and listed numbers, traced, per row and head, and in every shape."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from economy import mostly_slow
from mesh_cases import on_eight_devices
from regard import attend, explain, inspection, masks
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash.blocking import Blocking
from regard.inspection.traces.codec import Reader, Writer
from regard.masks import TileKind
from regard.masks.grid import Grid
from regard.masks.runs import Span
from test_tiled import assert_close, compiled, draw

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


def assert_kinds(codes, keep, query, key):
    """Hold codes of tiles to the pairs in them."""
    for b, i, j in np.ndindex(*codes.shape):
        tile = keep[b, i * query : (i + 1) * query, j * key : (j + 1) * key]
        kind = TileKind.FULL if tile.all() else TileKind.PARTIAL if tile.any() else TileKind.EMPTY
        assert np.asarray(codes)[b, i, j] == kind


def value_and_gradients(run, arrays, mask, cotangent, **options):
    @compiled
    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def evaluate(*arrays):
        output, _ = run(canonicalize(*arrays, mask=mask, **options))
        return jnp.sum(output * cotangent), output

    grads, output = evaluate(*arrays)
    return (output, *grads)


TABLES = {
    "for all": ((), 6),
    "by row": ((2,), 6),
    "by query head": ((2, 6), 3),
    "by head, for all rows": ((1, 6), 6),
    "by row, of three axes": ((2, 1), 3),
}


@pytest.mark.parametrize("name", mostly_slow(TABLES, "by query head", "by row, of three axes"))
def test_values_and_gradients_are_those_of_the_pairs_spelled_out(name):
    leading, key_heads = TABLES[name]
    arrays = draw((2, 6, T, 3), (2, key_heads, S, 3), (2, key_heads, S, 5))
    (cotangent,) = draw((2, 6, T, 5))
    table = table_of(*leading)
    keep = spell_out(table, SIZE, T, S)
    keep = keep.reshape((*keep.shape[:-2], *(1,) * (2 - len(leading)), T, S)) if leading else keep
    truth = oracle.batched(*arrays, keep=np.broadcast_to(keep, (2, 6, T, S)), cotangent=cotangent)
    expected = (truth.output, truth.d_query, truth.d_key, truth.d_value)
    mask = masks.blocks(table, SIZE)
    in_pieces = functools.partial(tiled.run, forward=PIECES[0], backward=PIECES[1])
    found = value_and_gradients(in_pieces, arrays, mask, cotangent)
    assert_close(found, expected)
    assert not np.asarray(found[0])[..., 14:21, :].any()
    assert_close(attend(*arrays, mask=mask), truth.output)


def test_pieces_beyond_the_end_count_nothing_where_sizes_divide_the_call():
    """Gradients once counted the last rows for each piece that a list lacked; such blocks overwrote them."""
    arrays, (cotangent,) = draw((2, 12, 3), (2, 12, 3), (2, 12, 5)), draw((2, 12, 5))
    table = table_of(rows=6, columns=6, seed=1)
    truth = oracle.batched(*arrays, keep=spell_out(table, (2, 2), 12, 12), cotangent=cotangent)
    in_pieces = functools.partial(tiled.run, forward=EVEN[0], backward=EVEN[1])
    for mask in (masks.blocks(table, 2), masks.from_array(spell_out(table, (2, 2), 12, 12))):
        found = value_and_gradients(in_pieces, arrays, mask, cotangent)
        assert_close(found, (truth.output, truth.d_query, truth.d_key, truth.d_value))


@pytest.mark.parametrize("sizes", [(1, 5), (3, 2), (7, 5)])
def test_kinds_of_tiles_are_exact_whatever_their_sides(sizes):
    table = table_of(2, rows=-(-13 // sizes[0]), columns=-(-17 // sizes[1]))
    mask = masks.blocks(table, sizes)
    keep = np.asarray(mask.dense(13, 17))
    np.testing.assert_array_equal(keep, spell_out(table, sizes, 13, 17))
    for query, key in ((1, 2), (2, 5), (3, 1), (4, 7), (6, 10), (20, 20)):
        assert_kinds(mask.tiles(13, 17, query_block=query, key_block=key), keep, query, key)


def test_listed_numbers_are_a_table_and_strangers_among_them_keep_nothing():
    rng = np.random.default_rng(2)
    numbers, counts = rng.integers(-3, 9, (2, 5, 4)), rng.integers(0, 5, (2, 5))
    numbers[0, 0] = 3  # over and over
    expected = np.zeros((2, 5, 6), bool)
    for b, row in np.ndindex(2, 5):
        for number in numbers[b, row, : counts[b, row]]:
            if 0 <= number < 6:
                expected[b, row, number] = True
    found = masks.chosen_blocks(numbers, 1, 6, counts=counts)
    np.testing.assert_array_equal(found.dense(5, 6), expected)
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
    for other in (table.astype(np.int32), -table.astype(np.int8), jnp.asarray(table), table.tolist()):
        np.testing.assert_array_equal(masks.blocks(other, SIZE).dense(T, S), spelled)
    positions = {"query_positions": np.arange(T)[::-1], "key_positions": np.arange(S) * 3}
    np.testing.assert_array_equal(masks.blocks(table, SIZE).dense(T, S, **positions), spelled)
    np.testing.assert_array_equal(masks.blocks(table, SIZE).dense(T, S, query_offset=5), spelled)
    assert masks.blocks(table[:, :3], (7, 21)).dense(T, S).shape == (T, S)


@pytest.mark.parametrize("sizes", [(1, 5), (3, 2), (7, 5)])
def test_a_piece_keeps_its_table_and_kinds_of_its_tiles_are_exact(sizes):
    mask = masks.blocks(table_of(2, rows=-(-13 // sizes[0]), columns=-(-17 // sizes[1])), sizes)
    whole = np.asarray(mask.dense(13, 17))
    for first, second in ((0, 0), (2, 5), (4, 3)):
        piece = mask.slice_grid(Grid.tile(Span(first, 9), Span(second, 11), 0, 1))
        keep = np.asarray(piece.dense(9, 11))
        np.testing.assert_array_equal(keep, whole[:, first : first + 9, second : second + 11])
        again = piece.slice_grid(Grid.tile(Span(1, 5), Span(3, 7), 0, 1))
        np.testing.assert_array_equal(again.dense(5, 7), keep[:, 1:6, 3:10])
        assert max(leaf.size for leaf in jax.tree.leaves(piece)) <= max(mask.table.size, 11)
        for query, key in ((1, 2), (2, 5), (3, 1), (4, 7), (6, 10)):
            assert_kinds(piece.tiles(9, 11, query_block=query, key_block=key), keep, query, key)


def test_joined_with_others_it_is_what_both_say():
    table, other = table_of(), np.tri(T, S, 4, dtype=bool)
    mask, causal = masks.blocks(table, SIZE), masks.causal()
    keep = spell_out(table, SIZE, T, S)
    for joined, expected in ((mask & causal, keep & other), (mask | ~causal, keep | ~other), (~mask, ~keep)):
        np.testing.assert_array_equal(joined.dense(T, S, query_offset=4), expected)
        assert joined.block_side == 7


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
    for error, message, call in wrong:
        with pytest.raises(error, match=message):
            call()


def test_a_table_is_printed_read_back_drawn_and_saved(tmp_path):
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
    with inspection.capture(example=1) as trace:
        attend(*draw((2, 3, T, 4), (2, 3, S, 4), (2, 3, S, 4)), mask=large)
    back = inspection.load(trace.save(tmp_path / "one.regard", keep="qk")).calls[0]
    weights = np.asarray(back.window())
    assert not weights[..., ~spell_out(table_of(2)[1], SIZE, T, S)].any()


# Traced.


def route(query, key, size, count):
    """Numbers of the blocks of keys that blocks of queries score highest, by their means."""
    pooled = [x.reshape((*x.shape[:-2], -1, size, x.shape[-1])).mean(-2) for x in (query, key)]
    return jax.lax.top_k(jnp.einsum("...td,...sd->...ts", *pooled), count)[1]


def routed(backend):
    def loss(query, key, value):
        chosen = masks.chosen_blocks(route(query, key, 8, 3), 8, 5)
        return jnp.sum(jnp.sin(attend(query, key, value, mask=chosen | masks.causal(), backend=backend)))

    return loss


def test_a_router_decides_in_every_step_and_gradients_go_past_it():
    arrays = draw((2, 3, 40, 5), (2, 3, 40, 5), (2, 3, 40, 7))
    found = compiled(jax.value_and_grad(routed("tiled"), (0, 1, 2)))(*arrays)
    fixed = masks.chosen_blocks(route(*arrays[:2], 8, 3), 8, 5) | masks.causal()
    keep = np.asarray(fixed.dense(40, leading_axes=2))
    value, grads = jax.value_and_grad(
        lambda *a: jnp.sum(jnp.sin(attend(*a, mask=masks.from_array(keep), backend="dense"))), (0, 1, 2)
    )(*arrays)
    assert_close(found, (value, grads), atol=1e-4)


@pytest.mark.slow
def test_tables_are_scanned_and_mapped_over():
    query, key, value = draw((2, T, 3), (2, S, 3), (2, S, 5))
    tables = jnp.asarray(table_of(3))

    def call(table):
        return attend(query, key, value, mask=masks.blocks(table, SIZE), backend="tiled")

    expected = jnp.stack([attend(query, key, value, mask=masks.blocks(one, SIZE)) for one in tables])
    assert_close(compiled(jax.vmap(call))(tables), expected)
    assert_close(jax.lax.scan(lambda _, table: (None, call(table)), None, tables)[1], expected)
    stacked = masks.blocks(tables, SIZE)
    mapped = jax.vmap(lambda mask: attend(query, key, value, mask=mask, backend="tiled"))(stacked)
    assert_close(mapped, expected)


def test_one_query_reads_the_blocks_of_its_row():
    query, key, value = draw((2, 6, 1, 3), (2, 3, S, 3), (2, 3, S, 5))
    table = table_of(2, 6, rows=1, seed=8)
    table[:] |= np.arange(COLUMNS) == 1
    truth = oracle.batched(query, key, value, keep=spell_out(table, SIZE, 1, S))
    for backend in ("dense", "tiled"):
        mask = masks.blocks(table, SIZE)
        found = jax.jit(lambda mask, b=backend: attend(query, key, value, mask=mask, backend=b))(mask)
        assert_close(found, truth.output)


def test_half_precision_is_that_of_the_definition_but_for_rounding():
    arrays = draw((2, 3, T, 8), (2, 3, S, 8), (2, 3, S, 8), dtype=jnp.bfloat16)
    problem = canonicalize(*arrays, mask=masks.blocks(table_of(2, 3), SIZE))
    found = tiled.run(problem, forward=PIECES[0], backward=PIECES[1])[0]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        found.astype(jnp.float32), dense.run(problem)[0].astype(jnp.float32), rtol=0, atol=0.03
    )


def test_a_table_costs_what_it_keeps_where_it_is_not_known_yet():
    lines = []

    @jax.jit
    def call(x, table):
        lines.append(explain(x, x, x, mask=masks.blocks(table, 64), backend="tiled").computes)
        return x

    call(jnp.zeros((2, 8, 640, 3)), jnp.ones((10, 10), bool))
    assert lines[0].forward.pieces
    assert str(lines[0]).endswith("the mask keeps blocks of 64")


DIVIDED = """
from regard import masks
import jax, jax.numpy as jnp, numpy as np
P = jax.sharding.PartitionSpec
table = np.random.default_rng(3).random((2, 4, 6, 6)) < 0.4
table[..., 0] = True
numbers = np.random.default_rng(3).integers(-1, 7, (2, 4, 6, 3))
arrays = draw((2, 4, 48, 5), (2, 4, 48, 5), (2, 4, 48, 7))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", mostly_slow(["ring", "zigzag", "both"], "both"))
def test_a_divided_sequence_keeps_its_blocks(way):
    on_eight_devices(f"""{DIVIDED}
check_against_one_device({way!r}, arrays, lambda: {{"mask": masks.blocks(table, 8) & masks.causal()}})
""")


@pytest.mark.slow
def test_numbers_are_listed_on_each_device():
    on_eight_devices(f"""{DIVIDED}
mesh = make_mesh(b=2, h=4)

def call(numbers, *arrays):
    return attend(*arrays, mask=masks.chosen_blocks(numbers, 8, 6), backend="tiled")

spec = P("b", "h")
inside = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 4, out_specs=spec))(numbers, *arrays)
np.testing.assert_allclose(inside, jax.jit(call)(numbers, *arrays), rtol=1e-5, atol=1e-6)
""")
