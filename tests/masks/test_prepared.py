"""Prepared masks: the same answers, looked at once."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from mesh_cases import draw
from refusals import assert_refused
from regard import attend, explain, masks
from regard.inspection.traces.codec import NotDataError, Reader, Writer
from regard.masks import TileKind
from test_masks import assert_tiles_are_safe

T, S = 61, 47
SIDE = 16


def checkered(query, key):
    return (query // 11 + key // 7) % 3 == 0


def by_head(head, query, key):
    return (query - key) % (head + 2) != 0


def arrays_of(*leading, queries=T, keys=S):
    return draw((*leading, queries, 3), (*leading, keys, 3), (*leading, keys, 5))


def test_a_prepared_mask_says_nothing_of_tiles_that_are_full_in_part_or_sit_elsewhere():
    mask = masks.predicate(checkered)
    prepared = mask.prepare(23, 19, query_offset=0, block=4)
    found = prepared.tiles(23, 19, query_block=8, key_block=8, query_offset=0)
    assert_tiles_are_safe(mask.dense(23, 19, query_offset=0), found, (8, 8))
    assert (found != TileKind.PARTIAL).any()
    found = prepared.tiles(23, 19, query_block=4, key_block=4, query_offset=0, key_offset=1)
    assert (found == TileKind.PARTIAL).all()


@pytest.mark.slow
def test_calls_are_those_of_the_mask_at_the_offsets_and_positions_of_its_tiles_and_at_others():
    arrays, places = arrays_of(2, 3), np.random.default_rng(2).integers(0, S, (2, T))
    mask = masks.predicate(checkered) & masks.causal() | masks.blocks(np.eye(4, dtype=int), (16, 12))
    prepared = mask.prepare(T, S, query_offset=-2, block=SIDE)
    by_row = mask.prepare(T, S, query_positions=places, block=SIDE)
    assert by_row.leading_axes == 1
    call = functools.partial(attend, *arrays, backend="tiled")
    moved = jax.jit(jax.vmap(lambda at: call(mask=prepared, query_offset=at)))
    placed = jax.jit(jax.vmap(lambda at: call(mask=by_row, query_positions=at)))
    by_place = placed, "query_positions", np.stack([places, places + 1])
    for run, name, each in ((moved, "query_offset", np.int32([-2, 5])), by_place):
        for output, at in zip(run(each), each, strict=True):
            keep = np.asarray(mask.dense(T, S, leading_axes=2, **{name: at}))
            oracle.assert_close(output, oracle.batched(*arrays, keep=keep).output)


def test_a_prepared_predicate_knows_the_heads_that_it_was_prepared_for():
    arrays, mask = arrays_of(2, 3), masks.predicate(by_head)
    prepared = mask.prepare(T, S, query_offset=0, leading=(2, 3), block=SIDE)
    keep = np.asarray(mask.number_leading((2, 3)).dense(T, S, query_offset=0))
    found = jax.jit(lambda mask: attend(*arrays, mask=mask, query_offset=0, backend="tiled"))(prepared)
    oracle.assert_close(found, oracle.batched(*arrays, keep=keep).output)
    with pytest.raises(ValueError, match=r"prepare: expected leading=\(2, 3\), because the mask reads"):
        attend(*arrays, mask=mask.prepare(T, S, query_offset=0), query_offset=0)
    with pytest.raises(ValueError, match="expected leading axes that match"):
        attend(*arrays_of(2, 5), mask=prepared, query_offset=0)


def test_mistakes_are_explained():
    prepared = masks.predicate(checkered).prepare(T, S, query_offset=0)
    query, *others = arrays_of(2)
    call = functools.partial(attend, mask=prepared, query_offset=0)
    rows = masks.causal().prepare(S, query_offset=[0, 1, 2])
    wrong = [
        (f"a call with T = {T} and S = {S}.* got T = 60, S = {S}", lambda: call(query[:, 1:], *others)),
        (f"got T = {T}, S = 46", lambda: call(query, *(x[:, 1:] for x in others))),
        ("query_offset: expected where the queries sit", lambda: masks.causal().prepare(T, S)),
        ("block: expected an integer of at least 1, got 0", lambda: masks.causal().prepare(T, block=0)),
        (r"prepared mask: expected leading axes that match .*got \(3,\)",
         lambda: attend(*arrays_of(2, queries=S), mask=rows)),
    ]  # fmt: skip
    assert_refused(*((make, message) for message, make in wrong))


def test_a_predicate_is_looked_at_once_in_a_model_of_several_layers():
    calls = []

    def counted(query, key):
        calls.append(np.broadcast_shapes(query.shape, key.shape))
        return checkered(query, key)

    (x,) = draw((2, 640, 4))

    def model(x):
        mask = masks.predicate(counted).prepare(640)
        for _ in range(3):
            x = x + attend(x, x, x, mask=mask, backend="tiled")
        return jnp.sum(jnp.sin(x))

    jax.make_jaxpr(jax.grad(model))(x)
    # One row of tiles at a time: 128 queries by all keys.
    assert sum(np.prod(shape) == 128 * 640 for shape in calls) == 1


def test_what_a_mask_costs_is_explained():
    x = jax.ShapeDtypeStruct((1, 2, 1024, 8), jnp.float32)

    def line(mask, label):
        text = str(explain(x, x, x, mask=mask, backend="tiled"))
        return next(line[10:].strip() for line in text.splitlines() if line.startswith(label))

    mask = masks.predicate(checkered)
    twice = "1.05 Mcells looked at twice in every call; mask.prepare(1024, 1024) does it once"
    assert line(mask, "mask work") == twice
    assert "read cell by cell; under jit, or prepared, it is known" in line(mask, "computes")
    assert line(mask.prepare(1024), "mask work") == "prepared: 64 B of tile kinds, read by every call"
    assert line(masks.causal(), "mask work") == "by interval arithmetic, in every call"
    lines = []
    jax.jit(lambda x: lines.append(line(mask.prepare(1024), "mask work")))(jnp.zeros((1024, 8)))
    assert lines == ["prepared: 64 B of tile kinds, read by every call"]
    assert line(jax.eval_shape(lambda: mask.prepare(1024)), "mask work") == lines[0]


def test_a_prepared_mask_is_printed_and_saved_without_its_kinds():
    mask = masks.causal() & masks.lengths([40, 0])
    prepared = mask.prepare(T, S, query_offset=-2, block=SIDE)
    assert repr(prepared) == f"(causal() & lengths([40, 0])).prepare({T}, {S}, query_offset=-2, block=16)"
    assert repr(masks.causal().prepare(5)) == "causal().prepare(5, 5)"
    assert repr(masks.parse(repr(prepared))) == repr(prepared)
    writer = Writer()
    data = json.loads(json.dumps(writer.write("mask", prepared)))
    assert not any(np.shape(array)[-2:] == np.shape(prepared.kinds)[-2:] for array in writer.arrays.values())
    back = Reader(writer.arrays).read("mask", data, masks.Mask)
    assert back == prepared
    np.testing.assert_array_equal(back.kinds, prepared.kinds)
    with pytest.raises(NotDataError, match="query_offset"):
        Writer().write("mask", masks.causal().prepare(5, query_positions=np.arange(5)))
    assert prepared.picture(T, S, query_offset=-2) == mask.picture(T, S, query_offset=-2)


def test_what_a_mask_says_of_itself_is_not_lost():
    ids = np.arange(S) // 9
    mask = masks.causal() & masks.segments(ids, ids) & masks.blocks(np.ones((2, 2), int), 40)
    prepared = mask.prepare(S)
    for name in ("local", "bounds", "block_side", "reads_positions", "leading_axes"):
        assert repr(getattr(prepared, name)) == repr(getattr(mask, name)), name
    assert not masks.lengths([3]).prepare(5).reads_positions
    np.testing.assert_array_equal(prepared.prepare(S, block=SIDE).dense(S), mask.dense(S))
