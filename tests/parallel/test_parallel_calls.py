"""What else goes over a mesh: scores, sinks, dropout, statistics, bfloat16, divided batches and heads."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from economy import mostly_slow
from mesh_cases import (
    AUTO,
    check_against_definition,
    check_against_one_device,
    draw,
    evaluate,
    make_mesh,
    on_eight_devices,
    run,
)
from regard import attend, masks, parallel, scores

SHAPES = ((2, 4, 19, 7), (2, 4, 19, 7), (2, 4, 19, 5))


def call_with_scores(way):
    """Parameters per head, a table by distance, a function of head and row that closes over an array."""
    (table,), (shifts,) = draw((8, 4), seed=2), draw((2, 4), seed=3)
    slopes = jnp.asarray([0.5, 0.25, 0.125, 0.0625])

    def options(slopes, table, shifts):
        def shift(score, batch, head, query, key):
            return score + shifts[batch, head] * (query % 3 + key % 5).astype(jnp.float32)

        chain = [
            scores.softcap(3.0),
            scores.alibi(slopes=slopes),
            scores.relative_bias(table, max_distance=9),
            scores.modifier(shift),
        ]
        return {"score": chain, "mask": masks.causal()}

    found = check_against_one_device(way, [*draw(*SHAPES), slopes, table, shifts], options, 5e-5, 2e-5)
    assert all(jnp.abs(grad).max() > 1e-3 for grad in found[4:])


def call_with_sinks_and_dropout(way):
    """A traced scale; lengths, one of them 0; dropout as on one device; a metric in front of the product."""
    (sinks,), (metric,) = draw((4,), seed=2), draw((7, 7), seed=4)

    def options(sinks, scale, metric):
        return {
            "sinks": sinks,
            "scale": scale,
            "score": scores.bilinear(metric),
            "mask": masks.causal() & masks.lengths(jnp.array([17, 0])),
            "dropout_rate": 0.4,
            "rng": jax.random.key(3),
        }

    check_against_one_device(way, [*draw(*SHAPES), sinks, jnp.float32(0.3), metric], options, 5e-5, 1e-5)


def call_with_sinks_and_offsets(way):
    """A traced scale, sinks, and rows at places and of lengths of their own; a mask per head."""
    (sinks,), keep = draw((4,), seed=2), np.random.default_rng(6).random((2, 4, 19, 19)) < 0.8

    def options(sinks, scale):
        mask = masks.causal() & masks.lengths(jnp.array([17, 0])) & masks.from_array(keep)
        return {"sinks": sinks, "scale": scale, "mask": mask, "query_offset": jnp.array([0, 2])}

    check_against_one_device(way, [*draw(*SHAPES), sinks, jnp.float32(0.3)], options)
    placed = lambda *_: {"mask": masks.causal(), "query_offset": jnp.array([3, 7]), "key_offset": 4}
    check_against_one_device(way, draw(*SHAPES), placed)


def statistics(way):
    """All that is one number per row, with sinks and gradients."""
    arrays, mask = draw(*SHAPES), masks.causal() & masks.valid_keys(np.arange(19) % 7 != 0)
    sinks = jnp.asarray([0.3, -1.0, 2.0, 0.1])

    def outcome(function):
        def loss(*arrays):
            output, aux = function(*arrays, mask=mask, sinks=sinks, aux=("lse", "entropy", "argmax"))
            return jnp.sum(jnp.sin(aux["lse"] + aux["entropy"])) + jnp.sum(output**2), aux

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)

    found = outcome(lambda *arrays, **options: run(way, *arrays, **options))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(outcome(attend)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=5e-6)


def repeated(way):
    """The same bits, from the same program and from one compiled again; dropout and shared keys included."""
    arrays = draw((2, 4, 19, 7), (2, 1, 19, 7), (19, 5))
    (cotangent,) = draw((2, 4, 19, 5))
    options = {"mask": masks.causal(), "dropout_rate": 0.2, "rng": jax.random.key(1)}
    loss = lambda *arrays: jnp.vdot(run(way, *arrays, **options), cotangent)
    programs = [jax.jit(jax.value_and_grad(loss, (0, 1, 2))) for _ in range(2)]
    first = programs[0](*arrays)
    for found in (programs[0](*arrays), programs[1](*arrays)):
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(first), strict=True):
            np.testing.assert_array_equal(one, other)


def shared_keys(way):
    """Arrays that batch rows or heads share get the sum of everyone's gradients."""
    for shapes in (((2, 4, 19, 7), (2, 1, 19, 7), (19, 5)), ((1, 1, 19, 7), (2, 4, 19, 7), (2, 4, 19, 5))):
        arrays = draw(*shapes)
        (cotangent,) = draw((2, 4, 19, 5))
        call = lambda *arrays, way=way: run(way, *arrays, mask=masks.causal())
        plain = lambda *arrays: attend(*arrays, mask=masks.causal(), backend="dense")
        found, expected = evaluate(call, arrays, cotangent), evaluate(plain, arrays, cotangent)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=5e-6)


def spoiled(way):
    """NaN in keys that nobody may attend to, some of them beside padding, reaches nothing."""
    arrays = query, key, value = draw(*SHAPES)
    (cotangent,) = draw((2, 4, 19, 5))
    unseen = jnp.arange(19)[:, None] % 6 == 4
    mask = masks.causal() & masks.valid_keys(~np.asarray(unseen)[:, 0])
    call = lambda *arrays: run(way, *arrays, mask=mask, query_offset=0)
    bad = query, jnp.where(unseen, jnp.nan, key), jnp.where(unseen, jnp.inf, value)
    for one, other in zip(evaluate(call, bad, cotangent), evaluate(call, arrays, cotangent), strict=True):
        np.testing.assert_array_equal(one, other)
    # The last key is after the last query.
    late = lambda *arrays: run(way, *arrays, mask=masks.causal(), query_offset=-1)
    bad = query, key.at[:, :, -1].set(jnp.nan), value.at[:, :, -1].set(jnp.nan)
    for one, other in zip(evaluate(late, bad, cotangent), evaluate(late, arrays, cotangent), strict=True):
        np.testing.assert_array_equal(one, other)


def narrow(way):
    shapes = ((2, 4, 19, 7), (2, 2, 19, 7), (2, 2, 19, 5))
    check_against_definition(way, shapes, masks.causal(), jnp.bfloat16)


def layers(way):
    """A layer in the context: compiled anew, over the mesh, with the same numbers; rows of a decoder, too."""
    from flax import nnx

    from regard.layers import MultiHeadAttention
    from regard.positions import Rotary

    del way
    layer = MultiHeadAttention(
        12, num_heads=4, num_key_heads=2, rotary=Rotary(3 + 1), head_dim=4, rngs=nnx.Rngs(0)
    )
    (hidden,) = draw((2, 21, 12))

    @nnx.jit
    def step(layer, hidden):
        return nnx.value_and_grad(lambda layer: jnp.sum(layer(hidden, mask=masks.causal()) ** 2))(layer)

    graph, state = nnx.split(layer)
    forward = jax.jit(lambda state, hidden: nnx.merge(graph, state)(hidden, mask=masks.causal()))
    expected = step(layer, hidden)
    assert "collective-permute" not in forward.lower(state, hidden).compile().as_text()
    for mesh, axis in ((make_mesh(seq=8), "seq"), (make_mesh(seq=4, heads=2), ("seq", "heads"))):
        with parallel.use(mesh, axis):
            assert "collective-permute" in forward.lower(state, hidden).compile().as_text()
            found = step(layer, hidden)
            assert parallel.explain(*draw(*SHAPES)).devices == 8
            one = draw((2, 4, 1, 7), (2, 4, 1, 7), (2, 4, 1, 5))
            np.testing.assert_array_equal(attend(*one), attend(*one, backend="dense"))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=5e-5, atol=1e-5)
    assert "collective-permute" not in forward.lower(state, hidden).compile().as_text()


def divided_arrays(way):
    """Arrays that are divided already stay so, whether their types say it or not: nothing is gathered."""
    del way
    arrays = draw((2, 4, 16, 7), (2, 2, 16, 7), (2, 2, 16, 5))
    ids = jnp.arange(32).reshape((2, 16)) // 7
    by_place = scores.modifier(lambda score, *place: score + jnp.sin(sum(place).astype(score.dtype)))

    def loss(function, ids, *arrays):
        options = {"sinks": jnp.ones(4), "dropout_rate": 0.3, "rng": jax.random.key(5), "aux": ("lse",)}
        options["score"] = by_place  # made a program beside the shards, and run within them
        output, aux = function(*arrays, mask=masks.segments(ids) & masks.causal(), **options)
        return jnp.sum(output**2) + jnp.sum(aux["lse"]), output

    def step(function):
        return jax.jit(jax.grad(functools.partial(loss, function), (1, 2, 3), has_aux=True))

    expected = step(functools.partial(attend, backend="dense"))(ids, *arrays)
    for kind in (AUTO, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(kind,) * 2)
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "seq"))
        divided = [jax.device_put(array, spec) for array in arrays]
        options = {"mesh": mesh, "axis": "seq", "batch_axis": "data", "layout": "balanced"}
        program = step(functools.partial(parallel.ring_attend, **options))
        with jax.set_mesh(mesh):
            program = program.lower(ids, *divided).compile()
            found = program(ids, *divided)
            assert "all-gather" not in program.as_text()
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=5e-6)
            assert one.sharding.is_equivalent_to(spec, 4)
    # Rows that four devices do not divide are whole on each of them, and only the batch is divided.
    arrays = draw(*SHAPES)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    options = {"mesh": mesh, "axis": "seq", "batch_axis": "data", "mask": masks.causal()}
    with jax.set_mesh(mesh):
        found = jax.jit(functools.partial(parallel.ring_attend, **options))(
            *(jax.device_put(array, spec) for array in arrays)
        )
    assert found.sharding.is_equivalent_to(spec, 4)
    np.testing.assert_allclose(found, attend(*arrays, mask=masks.causal()), rtol=2e-5, atol=5e-6)


def biased(way):
    """A bias of every shape it may have, -inf in it, and its gradient; a query left with no key."""
    whole = np.random.default_rng(7).normal(size=(2, 4, 19, 19)).astype(np.float32)
    whole[..., 11:14] = -np.inf
    whole[:, :, 5] = -np.inf
    for shape in BIASES[way]:
        bias = jnp.asarray(whole[tuple(slice(size) for size in shape)])
        options = lambda bias: {"bias": bias, "mask": masks.causal()}
        *_, gradient = check_against_one_device(way, [*draw(*SHAPES), bias], options)
        assert gradient.shape == shape


BIASES = {
    "ring": [(2, 4, 19, 19), (1, 1, 1, 19)],
    "both balanced": [(2, 4, 19, 19), (1, 4, 1, 19), (2, 1, 19, 1)],
    "both zigzag": [(1, 1, 19, 19)],
    "heads of shards": [(1, 1, 19, 19), (2, 4, 1, 19)],
}


def transforms(way):
    """Forward mode, Hessian products and gradients of gradients, in float64."""
    with jax.enable_x64(True):
        shapes = ((2, 4, 11, 3), (2, 2, 11, 3), (2, 2, 11, 5))
        arrays, moves = (draw(*shapes, dtype=jnp.float64, seed=seed) for seed in (3, 4))

        def derive(function):
            def loss(*arrays):
                output, aux = function(*arrays, mask=masks.causal(), aux=("lse",))
                return jnp.sum(jnp.sin(output)) + jnp.sum(aux["lse"] ** 2)

            grad = jax.grad(loss, (0, 1, 2))
            along = lambda *arrays: sum(map(jnp.vdot, grad(*arrays), moves))
            kinds = {
                "forward": lambda *arrays: jax.jvp(loss, arrays, tuple(moves)),
                "forward over reverse": lambda *arrays: jax.jvp(grad, arrays, tuple(moves)),
                "reverse over reverse": jax.grad(along, (0, 1, 2)),
                "vmap": jax.vmap(grad),
            }
            stack = [jnp.stack(pair) for pair in zip(arrays, moves, strict=True)]
            return jax.jit(kinds[TRANSFORMS[way]])(*(stack if TRANSFORMS[way] == "vmap" else arrays))

        found = derive(lambda *arrays, **options: run(way, *arrays, **options))
        expected = derive(functools.partial(attend, backend="dense"))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


TRANSFORMS = {
    "ring of shards": "forward",
    "both balanced": "forward over reverse",
    "ring": "reverse over reverse",
    "all to all": "vmap",
}


# The ways of the quick run first, then those of the slow one.
CHECKS = {
    "divided_arrays": ("any", ""),
    "call_with_scores": ("", "both, ring of shards"),
    "call_with_sinks_and_dropout": ("heads of shards", "balanced"),
    "call_with_sinks_and_offsets": ("", "apart"),
    "statistics": ("ring", "both balanced, apart"),
    "biased": ("both balanced", "heads of shards, ring, both zigzag"),
    "transforms": ("ring of shards", "all to all, both balanced, ring"),
    "repeated": ("", "ring of shards"),
    "shared_keys": ("", "apart, ring of shards"),
    "spoiled": ("", "apart, ring"),
    "narrow": ("ring", "both"),
    "layers": ("", "any"),
}


def cases_of(ways):
    return [(check, way) for check, named in CHECKS.items() for way in named[ways].split(", ") if way]


@pytest.mark.parametrize(("check", "way"), mostly_slow([*cases_of(0), *cases_of(1)], *cases_of(0)[::2]))
def test_calls_on_eight_devices_agree_with_one(check, way):
    on_eight_devices(f"import test_parallel_calls\ntest_parallel_calls.{check}({way!r})")


# A mesh of one device is a mesh: these need no other process.


def on_one_device(function=parallel.ring_attend, **options):
    return functools.partial(function, mesh=make_mesh(seq=1), axis="seq", **options)


def test_dropout_falls_where_the_sequence_is_whole_on_every_device():
    arrays = draw(*SHAPES)
    options = {"mask": masks.causal(), "dropout_rate": 0.4, "rng": jax.random.key(3)}
    found = on_one_device(**options)(*arrays)
    np.testing.assert_allclose(found, attend(*arrays, backend="dense", **options), rtol=2e-5, atol=5e-6)
    assert not np.allclose(found, on_one_device(mask=masks.causal())(*arrays), atol=0.1)


@pytest.mark.parametrize("name", ["ring_attend", "all_to_all_attend", "attend"])
def test_precision_is_that_of_every_product(name):
    def precisions(call, *arrays):
        return set(re.findall(r"dot_general.*precision = \[(\w+)", jax.jit(call).lower(*arrays).as_text()))

    function, arrays = getattr(parallel, name), draw(*SHAPES)
    for score in (None, scores.softcap(3.0)):  # as an ordinary call on each device, and as a ring
        call = on_one_device(function, score=score)
        assert precisions(functools.partial(call, precision="highest"), *arrays) == {"HIGHEST"}
        assert precisions(call, *arrays) == {"DEFAULT"}


def test_bfloat16_is_rounded_once_where_sinks_take_a_share():
    arrays = draw(*SHAPES, dtype=jnp.bfloat16)
    options = {"sinks": jnp.asarray([0.3, -1.0, 2.0, 0.1]), "mask": masks.causal(), "precision": "highest"}
    # In this order the output is sent before it gets its share.
    call = jax.jit(on_one_device(score=scores.softcap(3.0), layout="balanced", **options))
    exact = call(*(array.astype(jnp.float32) for array in arrays))
    np.testing.assert_array_equal(call(*arrays), exact.astype(jnp.bfloat16))


def test_a_program_of_shards_is_made_without_a_transfer():
    call = jax.jit(on_one_device(mask=masks.causal(), scale=0.3))
    arrays = [jax.device_put(array) for array in draw(*SHAPES)]
    with jax.transfer_guard("disallow"):
        call.lower(*arrays)


def test_float64_is_summed_in_float64(x64):
    arrays = draw(*SHAPES, dtype=jnp.float64)
    (cotangent,) = draw((2, 4, 19, 5), dtype=jnp.float64, seed=5)
    options = {"mask": masks.causal(), "score": scores.softcap(3.0)}

    def differentiate(function):
        call = lambda *arrays: function(*arrays, **options)
        return jax.jit(lambda *arrays: (lambda out, pull: (out, *pull(cotangent)))(*jax.vjp(call, *arrays)))

    found = differentiate(on_one_device())(*arrays)
    expected = differentiate(functools.partial(attend, backend="dense"))(*arrays)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == jnp.float64
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


OF_QUERY_ALONE = """
query, key, value = draw(*SHAPES)
options = {"mask": masks.causal()}
loss = lambda call: lambda query: jnp.sum(jnp.sin(call(query, key, value, **options)))
found = jax.jit(jax.grad(loss(lambda *arrays, **options: run("ring", *arrays, **options))))(query)
np.testing.assert_allclose(found, jax.grad(loss(attend))(query), rtol=2e-5, atol=5e-6)
"""


@pytest.mark.slow
def test_a_ring_has_the_gradient_of_queries_alone():
    on_eight_devices(OF_QUERY_ALONE.replace("SHAPES", repr(SHAPES)))


def test_nothing_that_is_not_a_number_leaves_a_row_without_keys():
    """As in `attend`; a NaN among the scores is the largest of them."""
    ring = functools.partial(
        parallel.ring_attend, mesh=make_mesh(sequence=1), axis="sequence", score=scores.softcap(5.0)
    )
    query, key, value = draw((2, 5, 7), (2, 5, 7), (2, 5, 3))
    options = {"mask": masks.causal(), "query_offset": -1, "aux": ("lse", "entropy")}

    def total(key, value, call):
        output, aux = call(query, key, value, **options)
        length = jnp.sqrt(jnp.sum(output**2, -1))
        parts = (
            jnp.where(length > 0, output[..., 0] / length, 0),
            jnp.sin(aux["lse"]),
            jnp.sqrt(aux["entropy"]),
        )
        return sum(jnp.sum(jnp.where(jnp.arange(5) > 1, part, 0)) for part in parts)

    alone = functools.partial(attend, score=scores.softcap(5.0), backend="tiled")
    one, other = (jax.grad(total, (0, 1))(key, value, call) for call in (ring, alone))
    for found, expected in zip(one, other, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    spoiled = ring(query.at[0, 0, 0].set(jnp.nan), key, value, aux=("argmax",))[1]["argmax"]
    assert spoiled[0, 0] == 0
