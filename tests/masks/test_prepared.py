"""Prepared masks: the same answers, looked at once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from economy import mostly_slow
from mask_expressions import expressions
from mesh_cases import on_eight_devices
from regard import attend, explain, masks
from regard.engine.call.canonicalization import canonicalize
from regard.inspection.traces.codec import NotDataError, Reader, Writer
from regard.masks import TileKind
from test_tiled import assert_close, compiled, draw

T, S = 61, 47
SIDE = 16


def checkered(query, key):
    return (query // 11 + key // 7) % 3 == 0


def by_head(head, query, key):
    return (query - key) % (head + 2) != 0


def arrays_of(*leading, queries=T, keys=S):
    return draw((*leading, queries, 3), (*leading, keys, 3), (*leading, keys, 5))


def assert_tiles_hold(mask, keep, query_block, key_block, **where):
    codes = np.asarray(mask.tiles(*keep.shape[-2:], query_block=query_block, key_block=key_block, **where))
    keep = np.broadcast_to(keep, (*codes.shape[:-2], *keep.shape[-2:]))
    for *b, i, j in np.ndindex(*codes.shape):
        rows, columns = i * query_block, j * key_block
        tile = keep[*b, rows : rows + query_block, columns : columns + key_block]
        assert codes[*b, i, j] != TileKind.EMPTY or not tile.any()
        assert codes[*b, i, j] != TileKind.FULL or tile.all()
    return codes


@pytest.mark.slow
@settings(max_examples=30)
@given(
    mask=expressions(2, 7, 5),
    offsets=st.tuples(*[st.sampled_from([-3, 0, 2])] * 2),
    block=st.integers(1, 8),
    sides=st.tuples(*[st.integers(1, 8)] * 2),
)
def test_any_prepared_mask_is_the_mask(mask, offsets, block, sides):
    check_prepared(mask, offsets, block, sides)


@pytest.mark.slow
@settings(max_examples=8, phases=[Phase.generate])
@given(
    mask=expressions(2, 7, 5),
    offsets=st.tuples(*[st.sampled_from([0, 2])] * 2),
    block=st.sampled_from([2, 3]),
    sides=st.sampled_from([(2, 3), (5, 7), (3, 1)]),
)
def test_a_few_prepared_masks_are_the_mask(mask, offsets, block, sides):
    check_prepared(mask, offsets, block, sides)


def check_prepared(mask, offsets, block, sides):
    prepared = mask.prepare(5, 7, query_offset=offsets[0], block=block)
    assert not prepared.reads_cells
    keep = np.asarray(mask.dense(5, 7, query_offset=offsets[1], leading_axes=1))
    found = prepared.dense(5, 7, query_offset=offsets[1], leading_axes=1)
    np.testing.assert_array_equal(*np.broadcast_arrays(found, keep))
    assert_tiles_hold(prepared, keep, *sides, query_offset=offsets[1], leading_axes=1)


def test_a_prepared_mask_says_nothing_of_tiles_that_are_full_in_part_or_sit_elsewhere():
    mask = masks.predicate(checkered)
    prepared = mask.prepare(23, 19, query_offset=0, block=4)
    keep = np.asarray(mask.dense(23, 19, query_offset=0))
    assert (assert_tiles_hold(prepared, keep, 8, 8, query_offset=0) != TileKind.PARTIAL).any()
    found = prepared.tiles(23, 19, query_block=4, key_block=4, query_offset=0, key_offset=1)
    assert (found == TileKind.PARTIAL).all()


@pytest.mark.slow
def test_tiles_of_the_sides_that_were_looked_at_are_known_exactly():
    mask = masks.predicate(checkered)
    prepared = mask.prepare(T, S, query_offset=3, block=4)
    keep = np.asarray(mask.dense(T, S, query_offset=3))
    whole = assert_tiles_hold(mask, keep, 4, 4, query_offset=3)
    np.testing.assert_array_equal(assert_tiles_hold(prepared, keep, 4, 4, query_offset=3), whole)
    coarse = assert_tiles_hold(prepared, keep, 8, 12, query_offset=3)
    np.testing.assert_array_equal(coarse, mask.tiles(T, S, query_block=8, key_block=12, query_offset=3))
    assert_tiles_hold(prepared, keep, 3, 5, query_offset=3)
    # Elsewhere nothing is promised, nor beyond the sizes that it was prepared for.
    others = [{"query_offset": 4}, {"query_offset": 3, "key_offset": 1}]
    others += [{"query_offset": [3, 4]}, {"query_positions": np.arange(T) + 3}]
    for other in others:
        assert (prepared.tiles(T, S, query_block=4, key_block=4, **other) == TileKind.PARTIAL).all()
    assert (prepared.tiles(T + 1, S, query_offset=3) == TileKind.PARTIAL).all()
    assert (prepared.tiles(T, S + 1, query_offset=3) == TileKind.PARTIAL).all()
    same = [{"query_offset": np.array([3, 3])}, {"query_offset": jnp.asarray(3), "key_offset": 0}]
    for where in same:
        found = prepared.tiles(T, S, query_block=4, key_block=4, **where)
        np.testing.assert_array_equal(*np.broadcast_arrays(found, whole))


def test_rows_that_a_mask_does_not_read_may_sit_anywhere():
    array = np.random.default_rng(0).random((T, S)) < 0.1
    prepared = masks.from_array(array).prepare(T, S, block=4)
    for where in ({"query_offset": 9}, {"query_positions": np.arange(T) * 2}):
        codes = np.asarray(prepared.tiles(T, S, query_block=4, key_block=4, **where))
        np.testing.assert_array_equal(codes, masks.from_array(array).tiles(T, S, query_block=4, key_block=4))


MASKS = {
    "predicate": masks.predicate(checkered),
    "stored": masks.from_array(np.random.default_rng(5).random((2, 1, T, S)) < 0.2),
    "of rows": masks.causal() & masks.lengths([40, 0]),
    "joined": masks.predicate(checkered) & masks.causal() | masks.blocks(np.eye(4, dtype=int), (16, 12)),
}


@pytest.mark.parametrize("name", mostly_slow(MASKS, "joined"))
def test_calls_are_those_of_the_mask_wherever_it_was_prepared(name):
    arrays, mask = arrays_of(2, 3), MASKS[name]
    prepared = mask.prepare(T, S, query_offset=-2, block=SIDE)

    def outcome(mask, offset=-2):
        def loss(*arrays):
            output = attend(*arrays, mask=mask, query_offset=offset, backend="tiled")
            return jnp.sum(jnp.sin(output)), output

        return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)

    within = lambda: mask.prepare(T, S, query_offset=-2, block=SIDE)
    expected, elsewhere = (compiled(lambda o: outcome(mask, o))(np.int32(o)) for o in (-2, 5))

    @compiled
    def everywhere(given, offset):
        inside = within()
        scanned = jax.lax.scan(lambda _, o: (None, outcome(inside, o)), None, jnp.stack([offset, offset]))[1]
        return outcome(given), jax.tree.map(lambda x: x[1], scanned), outcome(inside & given, offset)

    for found in everywhere(prepared, np.int32(-2)):
        assert_close(found, expected)
    for found in everywhere(prepared, np.int32(5))[1:]:
        assert_close(found, elsewhere)


@pytest.mark.slow
def test_a_batch_of_prepared_masks_is_mapped_over():
    arrays = arrays_of(3)
    stored = jnp.asarray(np.random.default_rng(5).random((4, T, S)) < 0.2)

    def one(array):
        mask = masks.from_array(array).prepare(T, S, block=SIDE)
        return attend(*arrays, mask=mask, backend="tiled")

    expected = jnp.stack([attend(*arrays, mask=masks.from_array(array)) for array in stored])
    assert_close(compiled(jax.vmap(one))(stored), expected)
    kept = jax.vmap(lambda array: masks.from_array(array).prepare(T, S, block=SIDE))(stored)
    mapped = jax.vmap(lambda mask: attend(*arrays, mask=mask, backend="tiled"))(kept)
    assert_close(mapped, expected)


@pytest.mark.slow
def test_positions_of_rows_are_compared_with_those_of_the_call():
    arrays, mask = arrays_of(2, 3), masks.causal() & masks.predicate(checkered)
    places = np.random.default_rng(2).integers(0, S, (2, T))
    prepared = mask.prepare(T, S, query_positions=places, block=SIDE)
    assert prepared.leading_axes == 1
    for positions in (places, places + 1, places[:1], places[0]):
        call = lambda mask, p=positions: attend(*arrays, mask=mask, query_positions=p, backend="tiled")
        assert_close(call(prepared), call(mask))
    assert_close(
        attend(*arrays, mask=prepared, query_offset=1, backend="tiled"),
        attend(*arrays, mask=mask, query_offset=1, backend="dense"),
    )
    ids = np.arange(S)
    mask = masks.segments(ids).prepare(S)
    with pytest.raises(ValueError, match=r"segments\(query_ids, key_ids\)"):
        attend(*arrays_of(2, queries=S), mask=mask, query_positions=ids, key_positions=ids)


def test_a_prepared_predicate_knows_the_heads_that_it_was_prepared_for():
    arrays, mask = arrays_of(2, 3), masks.predicate(by_head)
    prepared = mask.prepare(T, S, query_offset=0, leading=(2, 3), block=SIDE)
    found, expected = (
        attend(*arrays, mask=one, query_offset=0, backend=backend)
        for one, backend in ((prepared, "tiled"), (mask, "dense"))
    )
    assert_close(found, expected)
    unaware = mask.prepare(T, S, query_offset=0)
    with pytest.raises(ValueError, match=r"prepare: expected leading=\(2, 3\), because the mask reads"):
        attend(*arrays, mask=unaware, query_offset=0)
    with pytest.raises(ValueError, match="expected leading axes that match"):
        attend(*arrays_of(2, 5), mask=prepared, query_offset=0)


def test_mistakes_are_explained():
    prepared = masks.predicate(checkered).prepare(T, S, query_offset=0)
    x = arrays_of(2)
    with pytest.raises(ValueError, match=f"expected a call with T = {T} and S = {S}.* got T = 60, S = {S}"):
        attend(x[0][:, 1:], *x[1:], mask=prepared, query_offset=0)
    with pytest.raises(ValueError, match=f"got T = {T}, S = 46"):
        attend(x[0], x[1][:, 1:], x[2][:, 1:], mask=prepared, query_offset=0)
    with pytest.raises(ValueError, match="query_offset: expected where the queries sit"):
        masks.causal().prepare(T, S)
    with pytest.raises(ValueError, match="block: expected an integer of at least 1, got 0"):
        masks.causal().prepare(T, block=0)
    rows = masks.causal().prepare(S, query_offset=[0, 1, 2])
    with pytest.raises(ValueError, match=r"prepared mask: expected leading axes that match .*got \(3,\)"):
        attend(*arrays_of(2, queries=S), mask=rows)


def count_square(jaxpr, size, found=None):
    """How many equations, in all programs within, make a boolean array of a number of entries."""
    found = [] if found is None else found
    for equation in jaxpr.eqns:
        for one in equation.outvars:
            shape = getattr(one.aval, "shape", ())
            if one.aval.dtype == bool and np.prod(shape, dtype=int) >= size:
                found.append(equation)
        for inner in jax.core.jaxprs_in_params(equation.params):
            count_square(inner, size, found)
    return len(found)


def test_a_predicate_is_looked_at_once_in_a_model_of_several_layers():
    calls = []

    def counted(query, key):
        calls.append(np.broadcast_shapes(query.shape, key.shape))
        return checkered(query, key)

    length, layers = 640, 3
    (x,) = draw((2, length, 4))

    def model(x, prepare):
        mask = masks.predicate(counted)
        mask = mask.prepare(length) if prepare else mask
        for _ in range(layers):
            x = x + attend(x, x, x, mask=mask, backend="tiled")
        return jnp.sum(jnp.sin(x))

    looks = {}
    for prepare in (False, True):
        calls.clear()
        jax.make_jaxpr(jax.grad(lambda x, prepare=prepare: model(x, prepare)))(x)
        # One row of tiles at a time: 128 queries by all keys.
        looks[prepare] = sum(np.prod(shape) == 128 * length for shape in calls)
    assert looks[True] == 1
    values = [jax.jit(model, static_argnums=1)(x, prepare) for prepare in (True, False)]
    assert_close(*values)


def test_what_a_mask_costs_is_explained():
    x = jax.ShapeDtypeStruct((1, 2, 1024, 8), jnp.float32)

    def line(mask, label):
        text = str(explain(x, x, x, mask=mask, backend="tiled"))
        return next(line[10:].strip() for line in text.splitlines() if line.startswith(label))

    mask = masks.predicate(checkered)
    assert line(mask, "mask work") == (
        "1.05 Mcells looked at twice in every call; mask.prepare(1024, 1024) does it once"
    )
    assert "read cell by cell; under jit, or prepared, it is known" in line(mask, "computes")
    assert line(mask.prepare(1024), "mask work") == "prepared: 64 B of tile kinds, read by every call"
    assert line(masks.causal(), "mask work") == "by interval arithmetic, in every call"
    lines = []
    jax.jit(lambda x: lines.append(line(mask.prepare(1024), "mask work")))(jnp.zeros((1024, 8)))
    assert lines == ["prepared: 64 B of tile kinds, read by every call"]
    made = jax.eval_shape(lambda: mask.prepare(1024))
    assert line(made, "mask work") == lines[0]


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
    again = prepared.prepare(S, block=SIDE)
    np.testing.assert_array_equal(again.dense(S), mask.dense(S))


def test_sixty_four_bit_offsets_are_offsets():
    with jax.enable_x64(True):
        prepared = masks.predicate(checkered).prepare(T, S, query_offset=jnp.asarray(3), block=4)
        expected = masks.predicate(checkered).tiles(T, S, query_block=4, key_block=4, query_offset=3)
        for offset in (3, np.int64(3), jnp.asarray(3, jnp.int32)):
            found = prepared.tiles(T, S, query_block=4, key_block=4, query_offset=offset)
            np.testing.assert_array_equal(found, expected)


DIVIDED = """
from jax.sharding import AxisType, NamedSharding
import jax, jax.numpy as jnp, numpy as np
from collectives import count_kinds
from regard import masks
P = jax.sharding.PartitionSpec
arrays = draw((2, 4, 61, 5), (2, 4, 61, 5), (2, 4, 61, 7))
stored = np.random.default_rng(3).random((2, 1, 61, 61)) < 0.3
mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(AXES,) * 2, devices=jax.devices()[:4])

def call(stored, *arrays):
    def loss(*arrays):
        mask = masks.from_array(stored).prepare(61, block=16) & masks.causal()
        output = attend(*arrays, mask=mask, backend="tiled")
        return jnp.sum(jnp.sin(output)), output
    return jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)

specs = (P("b"), *[P("b", "h")] * 3)
program = call
if MANUAL:
    program = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("b", "h"), check_vma=True)
placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((stored, *arrays), specs)]
found = jax.jit(program).lower(*placed).compile()
for one, other in zip(jax.tree.leaves(found(*placed)), jax.tree.leaves(jax.jit(call)(stored, *arrays)), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
print(count_kinds(found.as_text()))
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "manual"), [("Auto", False), ("Explicit", False), ("Auto", True)])
def test_rows_and_heads_are_divided_and_nothing_is_sent(axes, manual):
    code = f"from jax.sharding import AxisType\nAXES, MANUAL = AxisType.{axes}, {manual}\n{DIVIDED}"
    assert on_eight_devices(code).strip() == "{}"


@pytest.mark.slow
def test_a_ring_takes_a_prepared_mask():
    on_eight_devices("""
from regard import masks
import numpy as np
stored = np.random.default_rng(3).random((48, 48)) < 0.3
arrays = draw((2, 4, 48, 5), (2, 4, 48, 5), (2, 4, 48, 7))
mask = masks.from_array(stored).prepare(48, block=8) & masks.causal()
check_against_one_device("ring", arrays, lambda: {"mask": mask})
""")


@pytest.mark.slow
def test_the_walk_is_chosen_by_kinds_that_are_known():
    x = jax.ShapeDtypeStruct((2, 4, 1280, 8), jnp.float32)
    table = np.eye(10, dtype=bool)
    stored = masks.from_array(np.kron(table, np.ones((128, 128), bool)))
    choice = explain(x, x, x, mask=stored.prepare(1280), backend="tiled").computes
    assert choice.forward.pieces
    assert choice.computed < 0.3
    assert canonicalize(x, x, x, mask=stored.prepare(1280)).mask.kinds.shape == (10, 10)
