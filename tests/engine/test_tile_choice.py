"""The choice of tiles by what a mask keeps, and attention in pieces at the sizes where it is chosen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import on_eight_devices
from oracle import assert_close
from regard import attend, explain, masks
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import canonicalize
from regard.engine.flash import tile_choice
from regard.engine.flash.blocking import Blocking
from regard.engine.flash.measurements import Tuning
from regard.engine.flash.piece_costs import HALF_LINES, ONE_LINE, Lines
from regard.engine.flash.sparsity import classify_tiles, list_both_ways, list_known
from regard.engine.flash.tile_choice import choose_tiles
from test_tiled import draw

T, S, SIDE = 653, 659, 128
TABLE = np.random.default_rng(4).random((6, 6)) < 0.4
TABLE[3], TABLE[:, 2] = False, False  # rows that attend to nothing, keys that nobody sees
STORED = np.kron(TABLE, np.ones((SIDE, SIDE), bool))[:T, :S] & (np.random.default_rng(5).random((T, S)) < 0.9)
ROWS = np.stack([np.arange(S) // 60, np.arange(S) // 85])
BAND = masks.sliding_window(60) & masks.causal()


def choice_of(query, key, mask, **options):
    """The choice that is chosen while a program is made."""
    found = []

    def call(query, key):
        found.append(choose_tiles(canonicalize(query, key, key, mask=mask, **options)))
        return query

    jax.eval_shape(call, query, key)
    return found[0]


def shapes(queries, keys, key_heads=2):
    key = jax.ShapeDtypeStruct((2, key_heads, keys, 8), jnp.float32)
    return jax.ShapeDtypeStruct((2, 4, queries, 8), jnp.float32), key


def test_lists_made_beforehand_are_those_that_a_program_makes():
    rng, cells = np.random.default_rng(6), np.ones((64, 64), bool)
    blocks = Blocking(128, 64, pieces=4, blocks=3), Blocking(64, 192, blocks=2, pieces=3, in_order=True)
    blocks = *blocks, Blocking(128, 384), Blocking(1024, 1024)
    for size in ((300, 700), (513, 385)):
        least = np.kron(rng.integers(0, 3, (2, 9, 11)), cells)[:, None, : size[0], : size[1]]
        mask = masks.from_array(rng.integers(1, 3, least.shape) <= least)  # EMPTY, PARTIAL and FULL
        sizes = canonicalize(*shapes(*size), shapes(*size)[1], mask=mask).sizes
        pairs = [(one.fit(*size, 1), other.turn().fit(*size, 1)) for one in blocks for other in blocks]
        call = mask, sizes, (0, None)
        program = jax.jit(lambda: [list_both_ways(*call, *pair) for pair in pairs])  # noqa: B023
        kinds = np.asarray(jax.jit(lambda: classify_tiles(*call, 64, 64))())  # noqa: B023
        joined = jax.jit(lambda: classify_tiles(*call, 128, 128))()  # noqa: B023
        np.testing.assert_array_equal(tile_choice.join_halves(kinds), joined)
        for pair, expected in zip(pairs, program(), strict=True):
            jax.tree.map(np.testing.assert_array_equal, list_known(kinds, 64, sizes, *pair), expected)
        assert list_known(kinds, 64, sizes, Blocking(96, 64), blocks[0]) is None
    choose = lambda offset: choice_of(*shapes(2048, 2048), BAND, query_offset=offset).lists is None
    found = []
    jax.eval_shape(lambda offset: found.append(choose(offset)), jnp.int32(0))
    assert (choose(0), found) == (False, [True])


@pytest.mark.parametrize("length", [2560, 2550])
def test_blocks_that_lie_in_order_are_written_at_once(length):
    """In whole steps, whose last block is none that was moved back."""
    arrays = draw((2, 4, length, 5), (2, 2, length, 5), (2, 2, length, 3))
    block = choice_of(*arrays[:2], BAND).forward
    assert block.in_order == (length == 2560)
    assert block.queries * block.blocks == 1280  # in two steps

    def derivatives(backend):
        call = lambda *arrays: attend(*arrays, mask=BAND, backend=backend, aux=("lse", "entropy"))
        return jax.jit(lambda *arrays: jax.jvp(call, arrays, tuple(map(jnp.cos, arrays))))(*arrays)

    assert_close(derivatives("tiled"), derivatives("dense"), rtol=1e-4, atol=1e-4)


def test_among_equal_scores_the_first_key_is_the_largest():
    """Pieces of a list come in no order of their keys."""
    query, key, value = draw((2, 4, T, 5), (2, 2, S, 5), (2, 2, S, 3))
    problem = canonicalize(0 * query, key, value, mask=masks.from_array(STORED), aux=("argmax",))
    blocking = Blocking(SIDE, SIDE, blocks=3, pieces=2)
    found = jax.jit(lambda: tiled.run(problem, forward=blocking, backward=blocking)[1]["argmax"])()
    first = np.where(STORED.any(-1), STORED.argmax(-1), -1)
    np.testing.assert_array_equal(found, np.broadcast_to(first, (2, 4, T)))


# Small calls in pieces: of sizes that divide the call, and where there are fewer blocks than go together.
SMALL = {
    "divided": (12, 20, (Blocking(2, 4, blocks=3, pieces=4), Blocking(2, 4, blocks=5, pieces=4))),
    "few": (3, 7, (Blocking(2, 2, blocks=7, pieces=8), Blocking(2, 2, blocks=9, pieces=5))),
}


@pytest.mark.parametrize("name", SMALL)
def test_second_derivatives_in_pieces_are_those_of_the_definition(name, x64):
    queries, keys, (forward, backward) = SMALL[name]
    arrays = draw((2, 4, queries, 3), (2, 2, keys, 3), (2, 2, keys, 5), dtype="float64")
    kept = np.random.default_rng(8).random((2, 1, -(-queries // 2), -(-keys // 4))) < 0.4
    kept[..., 1, :] = False
    mask = masks.blocks(kept, (2, 4)) & masks.lengths([keys - 2, 2])

    def products(run):
        def loss(*arrays):
            output, aux = run(canonicalize(*arrays, mask=mask, aux=("entropy",)))
            return jnp.sum(jnp.sin(output)) + jnp.sum(aux["entropy"])

        grad = jax.checkpoint(jax.grad(loss, (0, 1, 2)))
        return jax.jit(lambda *arrays: jax.jvp(grad, arrays, tuple(map(jnp.cos, arrays))))(*arrays)

    in_pieces = functools.partial(tiled.run, forward=forward, backward=backward)
    assert_close(products(in_pieces), products(dense.run), rtol=1e-10, atol=1e-10)


# The choice.


def test_two_cores_compute_equally_many_blocks():
    """An odd one would keep one core waiting; fewer pairs do not make up for it."""
    kept = np.random.default_rng(0).random((32, 32)) < 0.25
    choice = choice_of(*shapes(32 * SIDE, 32 * SIDE, 4), masks.blocks(kept, SIDE))
    for blocking in (choice.forward, choice.backward):
        assert blocking.pieces >= 4
        assert blocking.blocks % 2 == 0
    # As many steps as of the most blocks that a step holds, none of them with few.
    assert [ONE_LINE.blocking(Tuning(), 1, 3, count).blocks for count in (1, 5, 26, 32)] == [1, 4, 8, 8]
    assert [ONE_LINE.blocking(Tuning(), 1, number, 32).blocks for number in (5, 7, 8)] == [8, 4, 4]
    assert [HALF_LINES.blocking(Tuning(), 1, 3, count).blocks for count in (33, 64, 65)] == [18, 32, 22]
    # Of more than 1024 rows, a multiple of these.
    assert [HALF_LINES.blocking(Tuning(), 1, number, 64).blocks for number in (5, 6, 7)] == [32, 16, 16]


def test_blocks_of_unequal_lists_go_together_by_their_lengths(monkeypatch):
    monkeypatch.setattr(tile_choice, "ONE_LINE", Lines(2, 8, (4,), (1e-9,), (1e-9,)))
    band = np.abs(np.subtract.outer(np.arange(32), np.arange(32))) < 2
    uneven = band.copy()
    uneven[::8] = True  # together with others, in whose steps they would have no part
    for table, in_order in ((band, True), (uneven, False)):
        block = choice_of(*shapes(32 * SIDE, 32 * SIDE, 4), masks.blocks(table, SIDE)).forward
        assert (block.pieces, block.in_order) == (4, in_order)


def test_tiles_are_looked_at_in_halves_only_where_few_are_kept():
    window = masks.sliding_window(127) & masks.causal()
    for mask, length, side in ((window, 4096, 64), (masks.causal(), 4096, 512), (window, 65_536, 128)):
        assert choice_of(*shapes(length, length), mask).forward.keys == side


def test_the_share_that_is_computed_is_that_of_the_tiles_of_the_loop(monkeypatch):
    query, key = shapes(1280, 1280)
    for table, side in ((np.eye(10, dtype=bool), 64), (np.random.default_rng(0).random((10, 10)) < 0.5, 128)):
        choice = choice_of(query, key, masks.blocks(table, SIDE))
        block, halves = choice.forward, SIDE // side
        assert block.pieces
        assert block.queries == block.keys == side
        count = 10 * halves
        assert block.blocks <= count
        counts = np.sort(np.repeat(table.sum(1) * halves, halves))[::-1]
        most = [counts[i : i + block.blocks].max() for i in range(0, count, block.blocks)]
        steps = sum(-(-kept // block.pieces) for kept in most)
        assert choice.computed == pytest.approx(min(steps * block.pieces * block.blocks / count**2, 1))
        said = f"{block.blocks} blocks at once, each against {block.pieces} tiles of {side} x {side}"
        assert said in str(choice)
    causal = choice_of(query, key, masks.causal())
    assert causal.forward.pieces == causal.backward.pieces == 0
    assert choice_of(query, key, None).computed == 1
    assert choice_of(query, key, masks.blocks(np.zeros((10, 10), bool), SIDE)).computed == 0
    monkeypatch.setattr(tile_choice, "TWO_LINES", Lines(4, 4, (4,), (1e-9,), (1e-9,)))
    halves = np.arange(20)[:, None] % 2 == np.arange(20) // 3  # lines of 3 tiles each, 6 in two together
    computed = choice_of(*shapes(2560, 2560, 4), masks.blocks(halves, SIDE)).computed
    assert computed == pytest.approx(3 * 2 * 4 * 8 / 400)  # three groups of four, two steps each


def test_the_choice_says_why():
    query, key = shapes(1280, 1280)
    ids, reasons = jnp.arange(1280) // 70, []

    def within(query, key, ids):
        """Masks of arrays that are traced, and predicates that close over them."""
        same = masks.predicate(lambda query, key: ids[query] == ids[key])
        for mask in (masks.segments(ids, ids), same, masks.blocks(ids[:100].reshape(10, 10) % 3 == 0, SIDE)):
            reasons.append(explain(query, key, key, mask=mask, backend="tiled").computes.reason)
        return query

    jax.eval_shape(within, query, key, ids)
    unknown = "the mask's arrays are not known here"
    assert reasons == [unknown, unknown, "the mask keeps blocks of 128"]
    assert choice_of(query, key, masks.predicate(lambda query, key: ids[query] == ids[key])).computed < 0.5
    assert choice_of(*shapes(1280, 100), masks.causal(), query_offset=0).reason == "it is short"
    assert choice_of(query, key, None).reason == "there is no mask"
    stored = masks.from_array(np.ones((1280, 1280), bool))
    assert "read cell by cell" in explain(query, key, key, mask=stored, backend="tiled").computes.reason
    assert explain(query, key, key, mask=masks.causal(), backend="dense").computes is None


@pytest.mark.parametrize("side", [128, 64])
def test_a_prepared_mask_that_is_passed_on_keeps_what_its_tiles_said(side):
    """A program does not know the kinds that it is given, but about how many tiles they keep."""
    query, key = shapes(1280, 1280)
    blocks = np.random.default_rng(1).permuted(np.arange(100).reshape(10, 10) % 5 == 0, axis=1)
    stored, shuffled = (
        masks.from_array(np.kron(table, np.ones((SIDE, SIDE), bool))) for table in (blocks, blocks[::-1])
    )
    seen = []

    @jax.jit
    def call(query, mask):
        seen.append(explain(query, key, key, mask=mask, backend="tiled").computes)
        return query

    for mask in (stored, shuffled, masks.causal(), stored & masks.causal()):
        jax.eval_shape(call, query, mask.prepare(1280, block=side))
    assert jax.tree.structure(stored.prepare(1280)) == jax.tree.structure(shuffled.prepare(1280))
    pieces, whole, both = seen  # the second is the program of the first
    if side == SIDE:
        assert min(pieces.forward.pieces, pieces.backward.pieces, both.forward.pieces) >= 2
        assert "keep up to 20% of pairs in tiles of 128, 100%" in pieces.reason
    else:
        assert pieces.reason == "the mask's arrays are not known here"
    assert whole.forward.pieces == whole.backward.pieces == 0


def test_an_eager_call_sends_nothing_between_host_and_device():
    arrays = draw((2, 4, T, 3), (2, 4, S, 3), (2, 4, S, 5))
    mask = jax.device_put(masks.segments(ROWS[0, :T], ROWS[0]))
    attend(*arrays, mask=mask, backend="tiled")
    with jax.transfer_guard("disallow"):
        found = attend(*arrays, mask=mask, backend="tiled")
    assert_close(found, attend(*arrays, mask=mask, backend="dense"))


DIVIDED = """
import jax, jax.numpy as jnp, numpy as np
from collectives import count_kinds
from regard import explain, masks
from regard.engine.flash import tile_choice
tile_choice._GAIN, tile_choice._FEWEST_PAIRS = 1e9, 0
place = jax.sharding.NamedSharding(make_mesh(b=2, h=4), jax.sharding.PartitionSpec("b", "h"))
rows = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec("b"))
arrays = draw((2, 8, 2560, 3), (2, 4, 2560, 3), (2, 4, 2560, 5))
stored = np.random.default_rng(3).random((2, 1, 20, 20)) < 0.2
in_order = []

def call(table, *arrays):
    found = []
    for mask in (masks.blocks(table, 128), masks.sliding_window(60) & masks.causal()):
        def loss(*arrays):
            forward = explain(*arrays, mask=mask, backend="tiled").computes.forward
            assert forward.pieces
            in_order.append(forward.in_order)
            return jnp.sum(jnp.sin(attend(*arrays, mask=mask, backend="tiled")))
        found.append(jax.grad(loss, (0, 1, 2))(*arrays))
    return found

given = (jnp.asarray(stored), *arrays)
placed = [jax.device_put(given[0], rows), *(jax.device_put(array, place) for array in arrays)]
program = jax.jit(call).lower(*placed).compile()
assert in_order == [False, True], in_order
for one, other in zip(jax.tree.leaves(program(*placed)), jax.tree.leaves(jax.jit(call)(*given)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
print(count_kinds(program.as_text()))
"""


def test_pieces_are_divided_over_devices_and_nothing_is_sent():
    """Of blocks that a table says, and of blocks in order."""
    assert on_eight_devices(DIVIDED).strip() == "{}"
