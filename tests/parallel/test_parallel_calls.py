"""What else goes over a mesh: scores, sinks, dropout, statistics, bfloat16, divided batches and heads."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import AUTO, check_against_one_device, draw, evaluate, make_mesh, on_eight_devices, run
from oracle import assert_close
from regard import attend, masks, parallel, scores

SHAPES = ((2, 4, 19, 7), (2, 4, 19, 7), (2, 4, 19, 5))
SINKS = np.float32([0.3, -1.0, 2.0, 0.1])


def call_with_scores(way):
    """Everything a score may read, traced; dropout; keys that heads share, values that all rows share."""
    (table,), (shifts,), (sinks,), (metric,) = (
        draw(shape, seed=seed) for shape, seed in (((8, 4), 2), ((2, 4), 3), ((4,), 2), ((7, 7), 4))
    )
    slopes, lengths = jnp.asarray([0.5, 0.25, 0.125, 0.0625]), jnp.array([17, 0])

    def options(slopes, table, shifts, sinks, scale, metric):
        def shift(score, batch, head, query, key):
            return score + shifts[batch, head] * (query % 3 + key % 5).astype(jnp.float32)

        distances = scores.alibi(slopes=slopes), scores.relative_bias(table, max_distance=9)
        chain = [scores.bilinear(metric), scores.softcap(3.0), *distances, scores.modifier(shift)]
        options = {"score": chain, "mask": masks.causal() & masks.lengths(lengths), "sinks": sinks}
        return options | {"scale": scale, "dropout_rate": 0.4, "rng": jax.random.key(3)}

    arrays = draw((2, 4, 19, 7), (2, 1, 19, 7), (19, 5))
    given = [*arrays, slopes, table, shifts, sinks, jnp.float32(0.3), metric]
    found = check_against_one_device(way, given, options, 5e-5, 2e-5)
    assert all(jnp.abs(grad).max() > 1e-3 for grad in found[4:])


def call_with_sinks_and_offsets(way):
    """A traced scale, sinks, and rows at places and of lengths of their own; a mask per head."""
    (sinks,), keep = draw((4,), seed=2), np.random.default_rng(6).random((2, 4, 19, 19)) < 0.8

    def options(sinks, scale):
        mask = masks.causal() & masks.lengths(jnp.array([17, 0])) & masks.from_array(keep)
        return {"sinks": sinks, "scale": scale, "mask": mask, "query_offset": jnp.array([0, 2])}

    check_against_one_device(way, [*draw(*SHAPES), sinks, jnp.float32(0.3)], options)


def statistics(way):
    """All that is one number per row, with sinks and gradients; the same bits when it runs again."""
    arrays, mask = draw(*SHAPES), masks.causal() & masks.valid_keys(np.arange(19) % 7 != 0)
    options = {"mask": mask, "sinks": SINKS, "aux": ("lse", "entropy", "argmax", "max_score")}

    def outcome(function):
        def loss(*arrays):
            output, aux = function(*arrays, **options)
            return jnp.sum(jnp.sin(aux["lse"] + aux["entropy"])) + jnp.sum(output**2), aux

        program = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
        return program(*arrays), program(*arrays)

    found, again = outcome(functools.partial(run, way))
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert_close(found, outcome(attend)[0], atol=5e-6)


def layers(way):
    """A layer in the context: compiled anew, over the mesh, with the same numbers; rows of a decoder, too."""
    from flax import nnx

    from regard.layers import MultiHeadAttention
    from regard.positions import Rotary

    del way
    layer = MultiHeadAttention(12, 4, num_key_heads=2, rotary=Rotary(4), head_dim=4, rngs=nnx.Rngs(0))
    (hidden,) = draw((2, 21, 12))

    @nnx.jit
    def step(layer, hidden):
        return nnx.value_and_grad(lambda layer: jnp.sum(layer(hidden, mask=masks.causal()) ** 2))(layer)

    graph, state = nnx.split(layer)
    forward = jax.jit(lambda state, hidden: nnx.merge(graph, state)(hidden, mask=masks.causal()))
    expected = step(layer, hidden)
    assert "collective-permute" not in forward.lower(state, hidden).compile().as_text()
    with parallel.use(make_mesh(seq=4, heads=2), ("seq", "heads")):
        assert "collective-permute" in forward.lower(state, hidden).compile().as_text()
        found = step(layer, hidden)
        assert parallel.explain(*draw(*SHAPES)).devices == 8
        one = draw((2, 4, 1, 7), (2, 4, 1, 7), (2, 4, 1, 5))
        np.testing.assert_array_equal(attend(*one), attend(*one, backend="dense"))
    assert_close(found, expected, 5e-5, 1e-5)
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
        divided = jax.device_put(arrays, spec)
        options = {"mesh": mesh, "axis": "seq", "batch_axis": "data", "layout": "balanced"}
        program = step(functools.partial(parallel.ring_attend, **options))
        with jax.set_mesh(mesh):
            program = program.lower(ids, *divided).compile()
            found = program(ids, *divided)
            assert "all-gather" not in program.as_text()
        assert_close(found, expected, atol=5e-6)
        assert all(array.sharding.is_equivalent_to(spec, 4) for array in jax.tree.leaves(found))
    # Rows that four devices do not divide are whole on each of them, and only the batch is divided.
    arrays = draw(*SHAPES)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    options = {"mesh": mesh, "axis": "seq", "batch_axis": "data", "mask": masks.causal()}
    whole = jax.jit(functools.partial(parallel.ring_attend, **options))
    with jax.set_mesh(mesh):
        found = whole(*jax.device_put(arrays, spec))
    assert found.sharding.is_equivalent_to(spec, 4)
    np.testing.assert_allclose(found, attend(*arrays, mask=masks.causal()), rtol=2e-5, atol=5e-6)


def biased(way):
    """A bias of every shape it may have, -inf in it, and its gradient; a query left with no key."""
    whole = np.random.default_rng(7).normal(size=(2, 4, 19, 19)).astype(np.float32)
    whole[..., 11:14] = -np.inf
    whole[:, :, 5] = -np.inf
    for shape in ((2, 4, 19, 19), (1, 4, 1, 19)):
        bias = jnp.asarray(whole[tuple(slice(size) for size in shape)])
        options = lambda bias: {"bias": bias, "mask": masks.causal()}
        *_, gradient = check_against_one_device(way, [*draw(*SHAPES), bias], options)
        assert gradient.shape == shape


def transforms(way):
    """Forward mode and Hessian products, in float64."""
    with jax.enable_x64(True):
        shapes = ((2, 4, 11, 3), (1, 2, 11, 3), (2, 2, 11, 5))
        arrays, moves = (draw(*shapes, dtype=jnp.float64, seed=seed) for seed in (3, 4))

        def derive(function):
            def loss(*arrays):
                output, aux = function(*arrays, mask=masks.causal(), aux=("lse",))
                return jnp.sum(jnp.sin(output)) + jnp.sum(aux["lse"] ** 2)

            along = lambda *arrays: jax.jvp(jax.value_and_grad(loss, (0, 1, 2)), arrays, tuple(moves))
            return jax.jit(along)(*arrays)

        found = derive(functools.partial(run, way))
        assert_close(found, derive(functools.partial(attend, backend="dense")), 1e-11, 1e-12)


def summed(way):
    """Rows of a batch that nearly cancel in the gradient of what they share: it is rounded after the sum."""
    *arrays, cotangent = draw((1, 4, 19, 7), (1, 2, 19, 7), (1, 2, 19, 5), (1, 4, 19, 5))
    query, cotangent = jnp.tile(arrays[0], (2, 1, 1, 1)), jnp.concatenate([cotangent, -1.001 * cotangent])
    narrow = [query, *(array.astype(jnp.bfloat16) for array in arrays[1:])]
    found = evaluate(functools.partial(run, way), narrow, cotangent)[2:]
    exact = evaluate(attend, [array.astype(jnp.float32) for array in narrow], cotangent)[2:]
    assert_close(found, exact, 2**-8, 1e-5)


CHECKS = {
    "divided_arrays": "any", "call_with_scores": "ring of shards", "call_with_sinks_and_offsets": "apart",
    "statistics": "ring", "biased": "both balanced", "transforms": "ring of shards",
    "summed": "ring of shards", "layers": "any",
}  # fmt: skip


@pytest.mark.parametrize(("check", "way"), CHECKS.items())
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
    options = {"sinks": SINKS, "mask": masks.causal(), "precision": "highest"}
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
        loss = lambda *arrays: jnp.sum(function(*arrays, **options) * cotangent)
        # Of queries alone, too, whose keys do not bring their gradients home.
        return jax.jit(lambda *arrays: (*jax.grad(loss, (0, 1, 2))(*arrays), jax.grad(loss)(*arrays)))

    found = differentiate(on_one_device())(*arrays)
    assert {grad.dtype for grad in found} == {np.dtype("float64")}
    assert_close(found, differentiate(functools.partial(attend, backend="dense"))(*arrays), 1e-12, 1e-13)


@pytest.mark.slow
def test_nothing_that_is_not_a_number_leaves_a_row_without_keys():
    """As in `attend`; a NaN among the scores is the largest of them."""
    ring = on_one_device(score=scores.softcap(5.0))
    query, key, value = draw((2, 5, 7), (2, 5, 7), (2, 5, 3))
    options = {"mask": masks.causal(), "query_offset": -1, "aux": ("lse", "entropy")}

    def total(key, value, call):
        output, aux = call(query, key, value, **options)
        length = jnp.sqrt(jnp.sum(output**2, -1))
        share = jnp.where(length > 0, output[..., 0] / length, 0)
        parts = share, jnp.sin(aux["lse"]), jnp.sqrt(aux["entropy"])
        return sum(jnp.sum(jnp.where(jnp.arange(5) > 1, part, 0)) for part in parts)

    alone = functools.partial(attend, score=scores.softcap(5.0), backend="tiled")
    one, other = jax.jit(lambda *x: [jax.grad(total, (0, 1))(*x, call) for call in (ring, alone)])(key, value)
    assert_close(one, other, 1e-5, 1e-6)
    largest = lambda key: ring(query, key, value, aux=("max_score",))[1]["max_score"].sum()
    assert jnp.isnan(jax.grad(largest)(key)).all(), "a derivative that is not known is no number"
    assert ring(query.at[0, 0, 0].set(jnp.nan), key, value, aux=("argmax",))[1]["argmax"][0, 0] == 0
