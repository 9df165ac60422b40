"""The choice of tiles by what a mask keeps, and attention in pieces at the sizes where it is chosen."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import plain
from economy import mostly_slow
from mesh_cases import on_eight_devices
from regard import attend, explain, masks, scores
from regard.engine.backends import dense, tiled
from regard.engine.call.canonicalization import AUX, canonicalize
from regard.engine.flash import tile_choice
from regard.engine.flash.blocking import Blocking
from regard.engine.flash.piece_costs import HALF_LINES, ONE_LINE, Lines
from regard.engine.flash.tile_choice import choose_tiles
from regard.engine.flash.tuning import Tuning
from test_tiled import assert_close, assert_same_bits, draw

T, S, SIDE = 653, 659, 128
TABLE = np.random.default_rng(4).random((6, 6)) < 0.4
TABLE[3], TABLE[:, 2] = False, False  # rows that attend to nothing, keys that nobody sees
STORED = np.kron(TABLE, np.ones((SIDE, SIDE), bool))[:T, :S] & (np.random.default_rng(5).random((T, S)) < 0.9)
ROWS = np.stack([np.arange(S) // 60, np.arange(S) // 85])
MASKS = {
    "stored": masks.from_array(STORED),
    "blocks": masks.blocks(TABLE, SIDE),
    "segments of rows": masks.segments(ROWS[:, :T], ROWS),
    "band": masks.sliding_window(40) & masks.causal(),
    "by head": masks.blocks(np.random.default_rng(6).random((1, 4, 6, 6)) < 0.3, SIDE),
}


def choice_of(query, key, mask, **options):
    """The choice that is chosen while a program is made."""
    found = []

    def call(query, key):
        found.append(choose_tiles(canonicalize(query, key, key, mask=mask, **options)))
        return query

    jax.eval_shape(call, query, key)
    return found[0]


def grouped(dtype=jnp.float32):
    """Two query heads for each key head, for which pieces are cheap."""
    return draw((2, 4, T, 5), (2, 2, S, 5), (2, 2, S, 3), dtype=dtype)


def prefer_pieces(monkeypatch):
    """Let pieces be chosen whatever they promise."""
    tile_choice._choose_once.cache_clear()
    monkeypatch.setattr(tile_choice, "_GAIN", 1e9)


def keep_of(mask):
    return np.broadcast_to(mask.dense(T, S, query_offset=S - T, leading_axes=2), (2, 4, T, S))


def outcome(backend, arrays, cotangent, aux=(), **options):
    @functools.partial(jax.grad, argnums=tuple(range(len(arrays))), has_aux=True)
    def evaluate(*arrays):
        given = dict(zip(("bias", "sinks"), arrays[3:], strict=False))
        outcome = attend(*arrays[:3], aux=aux, backend=backend, query_offset=S - T, **given, **options)
        output, found = outcome if aux else (outcome, {})
        looks = sum(jnp.sum(jnp.where(found[name] > -jnp.inf, found[name], 0)) for name in found
                    if name in ("lse", "entropy", "max_score"))  # fmt: skip
        return jnp.sum(output * cotangent) + 0.1 * looks, (output, found)

    return jax.jit(evaluate)(*arrays)


@pytest.mark.parametrize(
    "name", [name if name == "stored" else pytest.param(name, marks=pytest.mark.slow) for name in MASKS]
)
def test_calls_in_pieces_are_those_of_the_definition(name, monkeypatch):
    arrays, (cotangent,), mask = grouped(), draw((2, 4, T, 3)), MASKS[name]
    prefer_pieces(monkeypatch)
    assert choice_of(*arrays[:2], mask, query_offset=S - T).forward.pieces, name
    keep = keep_of(mask)
    inputs = [np.asarray(array, np.float64) for array in arrays]
    spelled = {"keep": keep, "cotangent": np.asarray(cotangent, np.float64)}
    truth, same = vars(oracle.batched(*inputs, **spelled)), plain.evaluate(*inputs, **spelled)
    plain_call = functools.partial(outcome, "tiled", arrays, cotangent, ("argmax",), mask=mask)
    grads, (output, aux) = plain_call()
    np.testing.assert_array_equal(aux["argmax"], truth["argmax"])
    plain.assert_as_exact(output, truth["output"], same["output"], "output", magnitude=1.0)
    for grad, part in zip(grads, ("d_query", "d_key", "d_value"), strict=True):
        magnitude = 0.0 if part == "d_value" else np.max(same[f"{part}_terms"])
        plain.assert_as_exact(grad, truth[part], same[part], part, magnitude)


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


@pytest.mark.parametrize("name", mostly_slow(["band", "segments of rows", "stored"], "band"))
def test_calls_in_blocks_of_half_a_line_are_those_of_the_definition(name, monkeypatch):
    """Where masks keep few tiles, these are looked at in halves."""
    arrays, (cotangent,) = grouped(), draw((2, 4, T, 3))
    tile_choice._choose_once.cache_clear()
    monkeypatch.setattr(tile_choice, "HALF_LINES", Lines(1, 6, (3,), (1e-9,), (1e-9,)))
    choice = choice_of(*arrays[:2], MASKS[name], query_offset=S - T)
    for blocking in (choice.forward, choice.backward):
        assert blocking == Blocking(SIDE // 2, SIDE // 2, blocks=6, pieces=3)
    assert "of pairs in tiles of 64 x 64" in choice.reason
    found, expected = (
        outcome(backend, arrays, cotangent, mask=MASKS[name]) for backend in ("tiled", "dense")
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-4)
    tile_choice._choose_once.cache_clear()


@pytest.mark.parametrize("length", [2560, 2550])
def test_blocks_that_lie_in_order_are_written_at_once(length):
    """In whole steps, whose last block is none that was moved back."""
    arrays = draw((2, 4, length, 5), (2, 2, length, 5), (2, 2, length, 3))
    mask = masks.sliding_window(60) & masks.causal()
    block = choice_of(*arrays[:2], mask).forward
    assert block.in_order == (length == 2560)
    assert block.queries * block.blocks == 1280  # in two steps

    def derivatives(backend):
        call = lambda *arrays: attend(*arrays, mask=mask, backend=backend, aux=("lse", "entropy"))
        return jax.jit(lambda *arrays: jax.jvp(call, arrays, tuple(jnp.cos(array) for array in arrays)))(
            *arrays
        )

    assert_close(derivatives("tiled"), derivatives("dense"), rtol=1e-4, atol=1e-4)


def test_blocks_of_unequal_lists_go_together_by_their_lengths(monkeypatch):
    monkeypatch.setattr(tile_choice, "ONE_LINE", Lines(2, 8, (4,), (1e-9,), (1e-9,)))
    band = np.abs(np.subtract.outer(np.arange(32), np.arange(32))) < 2
    uneven = band.copy()
    uneven[::8] = True  # together with others, in whose steps they would have no part
    alike, sorted_ones = (
        choice_of(*shapes(32 * SIDE, 32 * SIDE, 4), masks.blocks(table, SIDE)).forward
        for table in (band, uneven)
    )
    assert alike.pieces == sorted_ones.pieces == 4
    assert alike.in_order
    assert not sorted_ones.in_order


def test_tiles_are_looked_at_in_halves_only_where_few_are_kept():
    window = masks.sliding_window(127) & masks.causal()
    for mask, length, side in ((window, 4096, 64), (masks.causal(), 4096, 512), (window, 65_536, 128)):
        assert choice_of(*shapes(length, length), mask).forward.keys == side


@pytest.mark.parametrize("name", mostly_slow(["segments of rows", "stored", "band"], "segments of rows"))
def test_calls_in_blocks_of_two_lines_are_those_of_the_definition(name, monkeypatch):
    """Heads with keys of their own may go in blocks of twice the side."""
    arrays, (cotangent,) = draw((2, 2, T, 5), (2, 2, S, 5), (2, 2, S, 3)), draw((2, 2, T, 3))
    tile_choice._choose_once.cache_clear()
    monkeypatch.setattr(tile_choice, "TWO_LINES", Lines(4, 4, (4,), (1e-9,), (1e-9,)))
    monkeypatch.setattr(tile_choice, "_FEWEST_PAIRS", 0)
    halves = np.arange(20)[:, None] % 2 == np.arange(20) // 3  # lines of 3 tiles each, 6 in two together
    computed = choice_of(*shapes(2560, 2560, 4), masks.blocks(halves, SIDE)).computed
    assert computed == pytest.approx(3 * 2 * 4 * 8 / 400)  # three groups of four, two steps each
    choice = choice_of(*arrays[:2], MASKS[name], query_offset=S - T)
    assert (choice.forward.queries, choice.forward.keys) == (2 * SIDE, SIDE)
    assert (choice.backward.queries, choice.backward.keys) == (SIDE, 2 * SIDE)
    found, expected = (
        outcome(backend, arrays, cotangent, mask=MASKS[name]) for backend in ("tiled", "dense")
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-4)
    tile_choice._choose_once.cache_clear()


OPTIONS = {
    "dropout": {"dropout_rate": 0.3, "rng": jax.random.key(3)},
    "alibi": {"score": scores.alibi(slopes=jnp.array([0.1, 0.2, 0.3, 0.4]))},
    "relative": {"score": scores.relative_bias(draw((32, 4))[0], max_distance=64)},
    "softcap": {"score": scores.softcap(2.0)},
    "statistics": {"aux": tuple(name for name in AUX if name not in ("weights", "scores"))},
    "bias and sinks": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_options_in_pieces_are_those_of_the_definition(name):
    arrays, (cotangent,), mask = grouped(), draw((2, 4, T, 3)), MASKS["stored"]
    if name == "bias and sinks":
        arrays += draw((1, 4, T, S), (4,))
    found, expected = (
        outcome(backend, arrays, cotangent, mask=mask, **OPTIONS[name]) for backend in ("tiled", "dense")
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_keys_that_nobody_sees_may_hold_anything(poison):
    arrays, (cotangent,), mask = grouped(), draw((2, 4, T, 3)), MASKS["stored"]
    answers = jnp.asarray(STORED.any(0))[:, None]
    spoiled = [arrays[0], *(jnp.where(answers, array, jnp.float32(poison)) for array in arrays[1:])]
    assert not answers.all()
    clean, found = (outcome("tiled", given, cotangent, mask=mask) for given in (arrays, spoiled))
    assert_same_bits(found, clean)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_among_equal_scores_the_first_key_is_the_largest():
    """Pieces of a list come in no order of their keys."""
    query, key, value = grouped()
    mask = masks.from_array(STORED)
    problem = canonicalize(jnp.zeros_like(query), key, value, mask=mask, aux=("argmax",))
    blocking = Blocking(SIDE, SIDE, blocks=3, pieces=2)
    found = tiled.run(problem, forward=blocking, backward=blocking)[1]["argmax"]
    first = np.where(STORED.any(-1), STORED.argmax(-1), -1)
    np.testing.assert_array_equal(found, np.broadcast_to(first, (2, 4, T)))


# Small calls in pieces that sizes divide, and in pieces that they do not.

SMALL = {
    "divided": (12, 20, (Blocking(2, 4, blocks=3, pieces=4), Blocking(2, 4, blocks=5, pieces=4))),
    "with rests": (13, 19, (Blocking(2, 4, blocks=3, pieces=2), Blocking(3, 5, blocks=3, pieces=2))),
    "few": (3, 7, (Blocking(2, 2, blocks=7, pieces=8), Blocking(2, 2, blocks=9, pieces=5))),
}


def small_mask(queries, keys):
    kept = np.random.default_rng(8).random((2, 1, -(-queries // 2), -(-keys // 4))) < 0.4
    kept[..., 1, :] = False
    return masks.blocks(kept, (2, 4)) & masks.lengths([keys - 2, 2])


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_slow(
        itertools.product(SMALL, ["float32", "bfloat16", "float64"]),
        ("divided", "float64"),
        ("few", "bfloat16"),
    ),
)
def test_second_derivatives_in_pieces_are_those_of_the_definition(name, kind):
    queries, keys, blockings = SMALL[name]
    if kind == "bfloat16" and name != "with rests":
        pytest.skip("rounded as the others are")
    with jax.enable_x64(kind == "float64"):
        arrays = draw((2, 4, queries, 3), (2, 2, keys, 3), (2, 2, keys, 5), dtype=kind)
        tangents = [jnp.cos(array) for array in arrays]
        in_pieces = functools.partial(tiled.run, forward=blockings[0], backward=blockings[1])

        def products(run):
            def loss(*arrays):
                output, aux = run(canonicalize(*arrays, mask=small_mask(queries, keys), aux=("entropy",)))
                return jnp.sum(jnp.sin(output.astype(jnp.float32))) + jnp.sum(aux["entropy"]).astype(
                    "float32"
                )

            grad = jax.checkpoint(jax.grad(loss, (0, 1, 2)))
            return jax.jit(lambda *a: jax.jvp(grad, a, tuple(tangents)))(*arrays)

        rough = {"rtol": 0.1, "atol": 0.1} if kind == "bfloat16" else {"rtol": 1e-4, "atol": 1e-4}
        found, expected = (
            jax.tree.map(lambda x: x.astype(jnp.float32), products(run)) for run in (in_pieces, dense.run)
        )
        assert_close(found, expected, **rough)


@pytest.mark.slow
def test_calls_in_pieces_are_mapped_and_scanned():
    queries, keys, blockings = SMALL["with rests"]
    query, key, value = draw((3, 2, 4, queries, 3), (2, 2, keys, 3), (2, 2, keys, 5))
    lengths = jnp.array([[19, 2], [0, 7], [12, 19]])

    def call(run):
        def one(query, lengths):
            mask = small_mask(queries, keys) & masks.lengths(lengths)
            loss = lambda q, k: jnp.sum(jnp.sin(run(canonicalize(q, k, value, mask=mask))[0]))
            return jax.grad(loss, (0, 1))(query, key)

        return one

    in_pieces = call(functools.partial(tiled.run, forward=blockings[0], backward=blockings[1]))
    expected = jax.lax.map(lambda given: call(dense.run)(*given), (query, lengths))
    assert_close(jax.jit(jax.vmap(in_pieces))(query, lengths), expected)
    scanned = jax.jit(lambda *given: jax.lax.scan(lambda _, one: (None, in_pieces(*one)), None, given)[1])
    assert_close(scanned(query, lengths), expected)


@pytest.mark.slow
def test_nothing_is_computed_where_nothing_is_kept():
    arrays = draw((2, 4, T, 3), (2, 4, S, 3), (2, 4, S, 5))
    for mask in (masks.blocks(np.zeros((6, 6), int), SIDE), masks.lengths([0, 0])):
        value, grads = jax.jit(jax.value_and_grad(
            lambda *a, m=mask: jnp.sum(attend(*a, mask=m, backend="tiled")), (0, 1, 2)))(*arrays)  # fmt: skip
        assert value == 0
        assert not any(np.asarray(grad).any() for grad in grads)
        assert choice_of(*arrays[:2], mask).computed == 0


# The choice.


def shapes(queries, keys, key_heads=2):
    return (jax.ShapeDtypeStruct((2, 4, queries, 8), jnp.float32),
            jax.ShapeDtypeStruct((2, key_heads, keys, 8), jnp.float32))  # fmt: skip


def test_the_share_that_is_computed_is_that_of_the_tiles_of_the_loop():
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


def test_the_choice_says_why():
    query, key = shapes(1280, 1280)
    small = shapes(1280, 100)
    ids = jnp.arange(1280) // 70

    def within(*closed):
        """Masks of arrays that are traced, and predicates that close over them."""
        found = []

        def call(query, key, ids):
            made = (masks.segments(ids, ids), masks.predicate(lambda query, key: ids[query] == ids[key]),
                    masks.blocks(ids[:100].reshape((10, 10)) % 3 == 0, SIDE))  # fmt: skip
            for mask in made:
                found.append(explain(query, key, key, mask=mask, backend="tiled").computes.reason)
            return query

        jax.eval_shape(call, *closed)
        return found

    unknown = "the mask's arrays are not known here"
    assert within(query, key, ids) == [unknown, unknown, "the mask keeps blocks of 128"]
    assert choice_of(query, key, masks.predicate(lambda query, key: ids[query] == ids[key])).computed < 0.5
    assert choice_of(*small, masks.causal(), query_offset=0).reason == "it is short"
    assert choice_of(query, key, None).reason == "there is no mask"
    eager = explain(
        query, key, key, mask=masks.from_array(np.ones((1280, 1280), bool)), backend="tiled"
    ).computes
    assert "read cell by cell" in eager.reason
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


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
def test_calls_of_prepared_masks_that_are_passed_on_are_those_of_the_definition(name):
    arrays, (cotangent,) = grouped(), draw((2, 4, T, 3))
    mask = MASKS[name].prepare(T, S, query_offset=S - T, leading=(2, 4))
    found, expected = (
        jax.jit(lambda mask: outcome(backend, arrays, cotangent, mask=mask))(mask)  # noqa: B023
        for backend in ("tiled", "dense")
    )
    assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_choice_in_a_trace_reads_what_is_known_there():
    """Offsets that are traced are guessed for the estimate alone; the answer is that of where rows sit."""
    arrays, mask = draw((4, T, 5), (2, S, 5), (2, S, 3)), MASKS["band"]

    @jax.jit
    def call(offset, *arrays):
        return attend(*arrays, mask=mask, query_offset=offset, backend="tiled")

    for offset in (0, 6, 300):
        expected = attend(*arrays, mask=mask, query_offset=offset, backend="dense")
        assert_close(call(offset, *arrays), expected)
    mapped = jax.vmap(
        lambda query: attend(query, *arrays[1:], mask=masks.from_array(STORED), backend="tiled")
    )
    expected = attend(*arrays, mask=masks.from_array(STORED), backend="dense")
    assert_close(mapped(arrays[0][None])[0], expected)


def test_an_eager_call_sends_nothing_between_host_and_device():
    arrays = draw((2, 4, T, 3), (2, 4, S, 3), (2, 4, S, 5))
    mask = jax.device_put(masks.segments(ROWS[0, :T], ROWS[0]))
    attend(*arrays, mask=mask, backend="tiled")
    with jax.transfer_guard("disallow"):
        found = attend(*arrays, mask=mask, backend="tiled")
    assert_close(found, attend(*arrays, mask=mask, backend="dense"))


DIVIDED = """
from jax.sharding import AxisType, NamedSharding
import jax, jax.numpy as jnp, numpy as np
from collectives import count_kinds
from regard import explain, masks
from regard.engine.flash import tile_choice
tile_choice._GAIN, tile_choice._FEWEST_PAIRS = 1e9, 0
P = jax.sharding.PartitionSpec
arrays = draw((2, 8, 653, 3), (2, 4, 653, 3), (2, 4, 653, 5))
stored = np.kron(np.random.default_rng(3).random((2, 1, 6, 6)) < 0.3, np.ones((128, 128), bool))[..., :653, :653]
mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AXES,) * 2, devices=jax.devices()[:4])
pieces = []

def call(mask, *arrays):
    def loss(*arrays):
        pieces.append(explain(*arrays, mask=mask, backend="tiled").computes.forward.pieces)
        output = attend(*arrays, mask=mask, backend="tiled")
        return jnp.sum(jnp.sin(output)), output
    return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)

table = masks.blocks(stored[..., ::128, ::128], 128)
known = masks.from_array(stored[0, 0])
specs = (P("b"), *[P("b", "h")] * 3)

def program(mask, *arrays):
    return call(mask, *arrays), call(known, *arrays)

divided = program
if MANUAL:
    divided = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P("b", "h"), check_vma=True)
given = (table, *arrays)
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given, specs)]
found = jax.jit(divided).lower(*placed).compile()
for one, other in zip(jax.tree.leaves(found(*placed)), jax.tree.leaves(jax.jit(program)(*given)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
assert all(pieces), pieces
print(count_kinds(found.as_text()))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "manual"), [("Auto", False), ("Explicit", False), ("Auto", True)])
def test_pieces_are_divided_over_devices_and_nothing_is_sent(axes, manual):
    code = f"from jax.sharding import AxisType\nAXES, MANUAL = AxisType.{axes}, {manual}\n{DIVIDED}"
    assert on_eight_devices(code).strip() == "{}"


@pytest.mark.slow
def test_tiles_are_chosen_in_a_shard_map_that_is_not_jitted():
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("b")
    arrays = draw((2, 1367, 3), (2, 1367, 3), (2, 1367, 5))

    def call(*arrays):
        assert explain(*arrays, mask=masks.causal()).tiles.empty
        return attend(*arrays, mask=masks.causal())

    tile_choice._choose_once.cache_clear()
    found = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)(*arrays)
    np.testing.assert_array_equal(found, call(*arrays))


IN_ORDER = """
from jax.sharding import AxisType, NamedSharding
from regard import explain, masks
P = jax.sharding.PartitionSpec
arrays = draw((2, 4, 2560, 5), (2, 2, 2560, 5), (2, 2, 2560, 3))
mask = masks.sliding_window(60) & masks.causal()
mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AXES,) * 2, devices=jax.devices()[:4])

def call(*arrays):
    assert explain(*arrays, mask=mask, backend="tiled").computes.forward.in_order
    def loss(*arrays):
        output = attend(*arrays, mask=mask, backend="tiled")
        return jnp.sum(jnp.sin(output)), output
    return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)

spec = P("b", "h")
divided = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True) if MANUAL else call
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
for one, other in zip(jax.tree.leaves(jax.jit(divided)(*placed)), jax.tree.leaves(jax.jit(call)(*arrays)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
whole = attend(*arrays, mask=mask, backend="dense")
np.testing.assert_allclose(jax.jit(divided)(*placed)[1], whole, rtol=1e-4, atol=1e-4)
print("same")
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "manual"), [("Auto", False), ("Explicit", False), ("Auto", True)])
def test_blocks_in_order_are_divided_over_devices(axes, manual):
    code = "import jax, jax.numpy as jnp, numpy as np\nfrom jax.sharding import AxisType\n"
    assert on_eight_devices(f"{code}AXES, MANUAL = AxisType.{axes}, {manual}\n{IN_ORDER}").strip() == "same"
