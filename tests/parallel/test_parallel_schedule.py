"""What is decided before anything is sent: order of tokens, rounds, plans, accounts; and what is compiled."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import on_eight_devices
from regard import attend, masks, parallel
from regard.engine.call.canonicalization import canonicalize
from regard.parallel.placements import MeshPlacement
from regard.parallel.ring import ring_loop
from test_own_classes import MASK

CAUSAL = masks.causal()


def mesh(**axes):
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def account(mask=None, length=4096, heads=8, devices=8, **options):
    arrays = [shape(1, heads, length, 64)] * 3
    return parallel.explain(*arrays, mesh=mesh(seq=devices), axis="seq", mask=mask, **options)


# Order.


@pytest.mark.parametrize(("length", "devices"), [(0, 3), (1, 2), (12, 5), (23, 3), (30, 1)])
def test_zigzag_gives_each_device_a_chunk_from_either_end(length, devices):
    size = max(-(-length // (2 * devices)), 1)
    expected = []
    for device in range(devices):
        for chunk in (device, 2 * devices - 1 - device):
            expected += range(min(chunk * size, length), min((chunk + 1) * size, length))
    tokens = np.arange(length)
    found = parallel.to_zigzag(tokens, devices, axis=0)
    assert found.tolist() == expected
    assert parallel.from_zigzag(found, devices, axis=0).tolist() == tokens.tolist()
    rows = np.stack([tokens, -tokens], -1)[None]
    np.testing.assert_array_equal(parallel.to_zigzag(rows, devices)[0, :, 1], -found)


def test_zigzag_needs_a_device():
    with pytest.raises(ValueError, match="devices: expected an integer of at least 1, got 0"):
        parallel.to_zigzag(jnp.arange(3), 0)


# Rounds.


def rounds_of(mask, length=24, devices=4, layout="contiguous", offset=0):
    problem = canonicalize(*[shape(2, 2, length, 3)] * 3, mask=mask, query_offset=offset)
    placement = MeshPlacement.check(mesh(seq=devices), "seq", layout=layout, plan="ring")
    return placement.choose(problem).division


@pytest.mark.parametrize(
    ("mask", "numbers"),
    [
        (None, [0, 1, 2, 3]), (CAUSAL, [0, 1, 2, 3]), (CAUSAL & masks.sliding_window(6), [0, 1]),
        (CAUSAL & masks.sliding_window(7), [0, 1, 2]), (masks.sliding_window(1, 1), [0, 1, 3]),
        (masks.chunked(6), [0]), (masks.segments(np.repeat([0, 1, 2, 1], 6)), [0, 2]),
        (CAUSAL & ~masks.sliding_window(17, None), [3]), (masks.prefix(0), []),
    ],
    ids=repr,
)  # fmt: skip
def test_rounds_are_those_counted_by_hand(mask, numbers):
    assert [step.number for step in rounds_of(mask).rounds] == numbers


def test_a_pair_of_chunks_is_visited_when_one_row_or_one_head_keeps_it():
    ids = np.stack([np.zeros(24, np.int32), np.repeat(np.arange(4, dtype=np.int32), 6)])
    cells = ids[:, :, None] == ids[:, None, :]
    for mask in (masks.segments(ids), masks.segments(ids[::-1]), masks.from_array(cells[:, None])):
        assert [step.number for step in rounds_of(mask).rounds] == [0, 1, 2, 3], mask
    assert [step.number for step in rounds_of(masks.segments(ids[1])).rounds] == [0]


def test_rounds_of_what_is_traced_are_those_of_what_is_known():
    seen = []

    def look(ids, offset):
        seen.append(len(rounds_of(masks.segments(ids) & masks.sliding_window(6, 0)).rounds))
        seen.append(len(rounds_of(masks.segments(ids)).rounds))
        seen.append(len(rounds_of(masks.sliding_window(6, 0), offset=offset).rounds))
        return ids

    jax.eval_shape(look, jnp.zeros(24, int), jnp.int32(0))
    assert seen == [2, 4, 4]


def test_pairs_of_zigzag_causal_are_even():
    division = rounds_of(CAUSAL, 24, 3, "zigzag")
    assert [step.pairs for step in division.rounds] == [((0, 0), (1, 0), (1, 1))] * 3


@pytest.mark.parametrize("mask", [None, CAUSAL & ~masks.sliding_window(17, None)], ids=repr)
def test_keys_stop_where_a_round_needs_them_and_what_they_gain_comes_home(mask):
    division, marks = rounds_of(mask), np.array([1, 10, 100, 1000])

    def meet(met, keys, number, pairs):
        del pairs
        return met.at[number].set(keys[0]), (jnp.asarray(marks)[jax.lax.axis_index("seq")],)

    def device(key):
        return ring_loop(division, (key,), meet, jnp.full(4, -1), with_dkv=True)

    # One device each, as far as what is sent is concerned.
    met, (gains,) = jax.jit(jax.vmap(device, axis_name="seq"))(jnp.arange(4))
    stops = [step.number for step in division.rounds]
    for member in range(4):
        seen = [(member - number) % 4 if number in stops else -1 for number in range(4)]
        assert met[member].tolist() == seen
        assert gains[member] == sum(marks[(member + number) % 4] for number in stops)


# Accounts.


def test_an_order_that_evens_out_nothing_is_not_chosen():
    # All work is that of the first 256 queries, which are on the first device in either order.
    first = masks.segments((np.arange(1024) >= 256).astype(np.int32), np.zeros(1024, np.int32))
    for layout in (None, "contiguous", "balanced"):
        found = account(first, length=1024, devices=2, plan="ring", layout=layout)
        assert (found.layout, found.tiles) == (layout or "contiguous", (2 * 8, 0))


def test_an_order_is_balanced_where_that_is_worth_its_bytes():
    """Documents are known when a program runs; at most, each of them is as long as the sequence."""
    chosen = []

    def choose(ids):
        for length in (ids.size, ids.size // 8, ids.size - 4):  # the last of which no 8 chunks divide
            mask = CAUSAL & masks.segments(ids[:length])
            chosen.append(rounds_of(mask, length, layout=None).layout)
        near = CAUSAL & masks.segments(ids) & masks.sliding_window(999)
        chosen.append(rounds_of(near, ids.size, layout=None).layout)
        return ids

    jax.eval_shape(choose, jnp.zeros(8192, int))
    assert chosen == ["balanced", *["contiguous"] * 3]


def test_tiles_of_padding_are_no_work():
    # 8 chunks of 129 rows, two tiles each; the last has 128 rows of its own, and one to fill it.
    found = account(length=8 * 129 - 1, plan="ring", layout="contiguous")
    assert (found.padding, found.counted) == ((1, 1), "128 x 128")
    assert found.tiles == (*(2 * 9,) * 7, 9)


def test_bytes_are_those_counted_by_hand():
    piece = 8 * 512 * 64 * 4  # of one array on one device
    ring = account(plan="ring")
    assert (ring.rounds, ring.skipped_rounds) == (8, 0)
    assert ring.forward_bytes == 7 * 2 * piece
    assert ring.backward_bytes == 7 * 2 * piece + 8 * 2 * piece
    near = account(CAUSAL & masks.sliding_window(500), plan="ring", layout="contiguous")
    assert (near.rounds, near.skipped_rounds) == (2, 6)
    assert near.forward_bytes == 2 * piece
    assert near.backward_bytes == 2 * piece + 2 * 2 * piece
    # Nobody attends to what is at home: keys go seven devices on at once, and their gradients home.
    far = account(CAUSAL & ~masks.sliding_window(3583, None), plan="ring", layout="contiguous")
    assert (far.rounds, far.skipped_rounds) == (1, 7)
    assert far.forward_bytes == 2 * piece
    assert far.backward_bytes == 2 * piece + 2 * piece
    exchange = account(plan="all_to_all")
    statistic = 8 * 512 * 4
    assert exchange.forward_bytes == (4 * piece + 2 * statistic) * 7 // 8
    assert exchange.backward_bytes == (4 * piece + statistic) * 7 // 8


def test_the_plan_that_sends_least_is_chosen():
    assert account().plan == "all_to_all"
    assert account(CAUSAL & masks.sliding_window(100)).plan == "all_to_all"
    assert account(masks.chunked(512)).plan == "ring"
    assert account(masks.chunked(512)).forward_bytes == 0
    few = account(heads=6)
    assert few.plan == "ring"
    assert "6 of key" in few.refusals["all_to_all"]
    assert few.refusals["all_to_all"].endswith("sizes that divide them: 1, 2, 3, 6")
    assert account(length=5).plan == "whole"
    queries, keys = shape(1, 8, 5, 64), shape(1, 8, 4096, 64)
    for arrays in ((queries, keys, keys), (keys, queries, queries)):
        small = parallel.explain(*arrays, mesh=mesh(seq=8), axis="seq")
        assert (small.plan, small.reason) == ("whole", "there are fewer rows than devices")
    weighed = account(aux=("weights",))
    assert weighed.plan == "whole"
    assert "weights" in weighed.refusals["ring"]
    two = parallel.explain(
        *[shape(1, 8, 8000, 64)] * 3, mesh=mesh(seq=4, heads=2), axis=("seq", "heads"), mask=CAUSAL
    )
    assert (two.plan, two.devices, two.layout, two.rows_per_device) == ("both", 8, "balanced", 1000)
    text = str(account(CAUSAL & masks.sliding_window(1000), length=4095, plan="ring", layout="contiguous"))
    assert "1 queries and 1 keys" in text
    assert "3; 5 without work are skipped" in text


# Errors.

ARRAYS = [np.zeros((2, 6, 8, 4), np.float32)] * 3
ALL_TO_ALL = {"plan": "all_to_all"}
WRONG = [
    (ValueError, "axis: expected an axis of the mesh, 'seq'; got 'sequence'", {"axis": "sequence"}),
    (ValueError, "batch_axis: expected an axis of the mesh", {"batch_axis": "rows"}),
    (ValueError, "expected different axes", {"head_axis": "seq"}),
    (ValueError, "axis: expected the mesh axis of the sequence", {"axis": None}),
    (ValueError, "layout: expected one of contiguous", {"layout": "striped"}),
    (ValueError, "plan: expected one of ring", {"plan": "rings"}),
    (ValueError, "axis: expected two names for plan 'both'", {"plan": "both"}),
    (TypeError, "mesh: expected a jax.sharding.Mesh, got int", {"mesh": 4}),
    (ValueError, "mesh: expected a mesh, or `with parallel.use", {"mesh": None}),
    (NotImplementedError, r"heads \(6 of query.*sizes that divide them: 1, 2, 3, 6", ALL_TO_ALL),
    (NotImplementedError, "it knows lse, .*, not weights", {"plan": "ring", "aux": ("weights",)}),
    (NotImplementedError, "zig-zag order is that", {"layout": "zigzag", "mesh": mesh(seq=3), **ALL_TO_ALL}),
    (NotImplementedError, "no plan can serve this call in", {"layout": "zigzag", "aux": ("scores",)}),
    (NotImplementedError, "the batch, 2, is not a multiple of the 4 devices along data",
     {"batch_axis": "data", "mesh": mesh(seq=2, data=4), "plan": "ring"}),
    (NotImplementedError, "are not multiples of the 4 devices along data",
     {"head_axis": "data", "mesh": mesh(seq=2, data=4), "plan": "ring"}),
]  # fmt: skip


def test_a_wrong_call_says_what_was_expected():
    for kind, message, options in WRONG:
        with pytest.raises(kind, match=message):
            parallel.explain(*ARRAYS, **{"mesh": mesh(seq=4), "axis": "seq"} | options)


def test_heads_are_exchanged_only_as_far_as_they_are_not_divided():
    arrays, options = [shape(2, 8, 64, 3)] * 3, {"axis": "seq", "head_axis": "model"}
    fits = parallel.explain(*arrays, mesh=mesh(seq=4, model=2), plan="all_to_all", **options)
    assert fits.plan == "all_to_all"
    with pytest.raises(NotImplementedError, match=r"devices along 'seq'; sizes that divide them: 1, 2, 4$"):
        parallel.explain(*arrays, mesh=mesh(seq=8, model=2), plan="all_to_all", **options)
    assert parallel.explain(*arrays, mesh=mesh(seq=8, model=2), **options).plan == "ring"


def test_a_predicate_over_a_known_or_a_traced_array_serves():
    plans = []

    def explain(allowed):
        mask = masks.predicate(lambda query, key: allowed[key])
        plans.append(parallel.explain(*ARRAYS, mesh=mesh(seq=4), axis="seq", plan="ring", mask=mask).plan)

    explain(jnp.arange(8) % 3 > 0)
    jax.eval_shape(explain, jnp.ones(8, bool))
    assert plans == ["ring", "ring"]


def test_the_context_refuses_an_order_that_layers_do_not_know():
    with pytest.raises(ValueError, match="layers number positions in the order of the sequence"):
        parallel.use(mesh(seq=4), "seq", layout="zigzag")


# The context.


def test_the_innermost_context_holds_and_after_it_the_outer_one():
    plan = lambda: parallel.explain(*[shape(2, 4, 24, 3)] * 3).plan
    with parallel.use(mesh(seq=4), "seq", plan="ring"):
        assert plan() == "ring"
        with parallel.use(mesh(seq=2), "seq", plan="all_to_all"):
            assert plan() == "all_to_all"
        assert plan() == "ring"
    with pytest.raises(ValueError, match=r"mesh: expected a mesh, or `with parallel\.use"):
        plan()


def test_a_backend_that_is_named_is_used_in_the_context_too():
    array, bias = np.ones((2, 8, 4), np.float32), np.tri(8, dtype=np.float32)
    with parallel.use(mesh(seq=4), "seq", plan="ring"):
        with pytest.raises(NotImplementedError, match="of aux it knows"):
            attend(array, array, array, bias=bias, aux=("weights",))
        np.testing.assert_allclose(attend(array, array, array, bias=bias, backend="dense"), 1, rtol=1e-6)


def test_a_mask_that_cannot_be_sliced_says_so():
    with pytest.raises(NotImplementedError, match="Checkerboard holds arrays and does not say how to slice"):
        parallel.explain(*ARRAYS, mesh=mesh(seq=4), axis="seq", plan="ring", mask=MASK)


# What is compiled.

PERMUTES = """
def lower(mask, grad=False):
    options = {"mesh": make_mesh(seq=8), "axis": "seq", "mask": mask}
    call = lambda *arrays: parallel.ring_attend(*arrays, **options)
    function = jax.grad(lambda *arrays: call(*arrays).sum(), (0, 1, 2)) if grad else call
    return jax.jit(function).lower(*draw(*[(1, 2, 64, 4)] * 3))

near = masks.causal() & masks.sliding_window(5)
for mask in (masks.chunked(8), near):
    text = lower(mask).compile().as_text()
    print(text.count(" collective-permute(") + text.count(" collective-permute-start("))
print(lower(near, grad=True).as_text().count("stablehlo.collective_permute"))
"""


def test_skipped_rounds_are_not_in_the_program():
    # Keys and values, once per hop. In the backward pass again, and their gradients on and home.
    assert on_eight_devices(PERMUTES).split() == ["0", "2", "8"]


@pytest.mark.slow
def test_long_tables_are_counted_by_their_blocks_and_no_pair_is_read(monkeypatch):
    table = np.random.default_rng(5).random((37, 37)) < 0.3
    monkeypatch.setattr(type(masks.blocks(table, 9)), "keep", None)
    found = account(masks.blocks(table, 1000), length=36_992, plan="ring", layout="contiguous")
    assert found.counted == "128 x 128"
    columns = np.arange(0, 36_992, 128)
    for device, tiles in enumerate(found.tiles):
        rows = 4624 * device + np.arange(0, 4624, 128)  # the last of which are fewer than 128
        ends = (rows, np.minimum(rows + 127, 4624 * device + 4623)), (columns, columns + 127)
        corners = itertools.product(*((first // 1000, last // 1000) for first, last in ends))
        assert tiles == sum(table[np.ix_(*corner)].astype(int) for corner in corners).astype(bool).sum()


@pytest.mark.slow
def test_what_was_prepared_is_not_read_anew_where_that_takes_long():
    mask = masks.predicate(lambda query, key: key <= query).prepare(16_384)
    found = account(mask, length=16_384, plan="ring", layout="contiguous")
    assert (found.counted, found.tiles) == ("chunks of 2048 x 2048", tuple(range(1, 9)))
    mask = masks.predicate(lambda query, key: key <= query).prepare(2048)
    assert account(mask, length=2048, plan="ring", layout="zigzag").tiles == (17,) * 8
    # Documents and padding are looked at once per row or key, however long they are.
    ids = np.arange(16_384) // 2048
    for known in (masks.segments(ids), masks.from_array(ids[None] < 8)):
        found = account(known, length=16_384, plan="ring", layout="contiguous")
        assert (found.counted, len(set(found.tiles))) == ("128 x 128", 1)
