"""attend over several devices: the compiler's partitioning and shard_map. Another process has them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_cases import AUTO, draw, make_mesh, on_eight_devices
from regard import attend, masks, parallel

SCRIPT = """
from jax.sharding import NamedSharding, PartitionSpec as P

axes = {"axis_types": (AUTO,) * 2, "devices": jax.devices()[:4]}
mesh = jax.make_mesh((2, 2), ("data", "model"), **axes)
rng = np.random.default_rng(0)
shapes = ((2, 4, 5, 7), (2, 2, 11, 7), (2, 2, 11, 3))
query, key, value = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
lengths = jnp.array([4, 11])


def loss(query, key, value, lengths):
    out = attend(query, key, value, mask=masks.causal() & masks.lengths(lengths), query_offset=6)
    return (out**2).sum(), out


step = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
expected = step(query, key, value, lengths)
heads = NamedSharding(mesh, P("data", "model"))
split = [jax.device_put(x, heads) for x in (query, key, value)]
for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(step(*split, lengths)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

local = jax.shard_map(
    lambda *arrays: loss(*arrays)[1], mesh=mesh,
    in_specs=(P("data", "model"),) * 3 + (P("data"),), out_specs=P("data", "model"),
)
np.testing.assert_allclose(local(query, key, value, lengths), expected[0][1], rtol=1e-6, atol=1e-7)
"""


def test_shards_agree_with_one_device():
    on_eight_devices(SCRIPT)


# Calls over the axis of a shard_map around them.


def agree(plan, kind, products):
    """Value, gradients of every argument, from without and within; if asked for, Hessian products."""
    kind = {"automatic": AUTO, "explicit": jax.sharding.AxisType.Explicit}[kind]
    mesh = jax.make_mesh((2, 2), ("seq", "heads"), axis_types=(kind,) * 2)
    axis, more = {
        "ring": ("seq", {"head_axis": "heads", "plan": "ring"}),
        "both": (("seq", "heads"), {"plan": "both"}),
    }[plan]
    leading = (None, "heads") if plan == "ring" else (None, None)
    spec, pairs = (jax.sharding.PartitionSpec(*axes, axis) for axes in (leading, leading[1:]))
    arrays = draw((2, 4, 12, 7), (2, 4, 12, 7), (2, 4, 12, 5), (4, 12, 12))
    ids = np.repeat([0, 1, 2], [5, 4, 3]).astype(np.int32)
    options = {
        "mask": masks.causal() & masks.segments(ids),
        "sinks": jnp.asarray([0.3, -1.0, 2.0, 0.1]),
        "dropout_rate": 0.3,
        "rng": jax.random.key(5),
    }

    def part(query, key, value, bias):
        return parallel.attend(query, key, value, axis=axis, bias=bias, **more, **options)

    def grads_within(query, key, value, bias):
        loss = lambda query, key, value: jnp.sum(jnp.sin(part(query, key, value, bias)))
        return jax.grad(loss, (0, 1, 2))(query, key, value)

    specs = {"mesh": mesh, "in_specs": (spec, spec, spec, pairs)}
    divided = jax.shard_map(part, out_specs=spec, **specs)
    whole = lambda query, key, value, bias: attend(query, key, value, bias=bias, **options)

    def derive(function):
        grad = jax.grad(lambda *arrays: jnp.sum(jnp.sin(function(*arrays))), (0, 1, 2, 3))
        twice = lambda *arrays: jax.jvp(grad, arrays, arrays) if products else (grad(*arrays),)
        return jax.jit(lambda *arrays: (function(*arrays), twice(*arrays)))

    with jax.set_mesh(mesh):
        places = [jax.sharding.NamedSharding(mesh, own) for own in specs["in_specs"]]
        placed = [jax.device_put(array, place) for array, place in zip(arrays, places, strict=True)]
        found = derive(divided)(*placed)
        within = jax.jit(jax.shard_map(grads_within, out_specs=(spec,) * 3, **specs))(*placed)
    expected = derive(whole)(*arrays)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=2e-5)
    for one, other in zip(within, expected[1][0][:3], strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=2e-5)


def divide_in_context():
    """Layers that divide their calls do so in the caller's shard_map, too; what cannot be is refused."""
    mesh, spec = make_mesh(seq=4), jax.sharding.PartitionSpec(None, None, "seq")
    arrays = draw((2, 4, 12, 7), (2, 4, 12, 7), (2, 4, 12, 5))

    def call(**options):
        part = jax.shard_map(
            lambda *arrays: attend(*arrays, **options), mesh=mesh, in_specs=(spec,) * 3, out_specs=spec
        )
        return jax.jit(part)(*arrays)

    with parallel.use(mesh, "seq"):
        found = call(mask=masks.causal())
        np.testing.assert_allclose(found, attend(*arrays, mask=masks.causal(), backend="dense"), 2e-5, 5e-6)
        for mask in (masks.segments(np.arange(3)), masks.from_array(np.ones((3, 3), bool))):
            with pytest.raises(ValueError, match=r"expected .*12"):  # it is that of all
                call(mask=mask)
    with (
        parallel.use(mesh, "seq", layout="balanced", plan="ring"),
        pytest.raises(ValueError, match=r"layout: .* even"),
    ):
        call()
    with parallel.use(mesh, "seq", plan="whole"), pytest.raises(NotImplementedError, match="plan: inside"):
        call()
    with parallel.use(mesh, "seq"), pytest.raises(NotImplementedError, match=r"query_positions: .*all rows"):
        call(mask=masks.causal(), query_positions=np.arange(3), key_positions=np.arange(3))
    two = make_mesh(seq=2, heads=2)
    # A device has one head, whose number is that of all heads.
    later = {"mask": masks.predicate(lambda head, query, key: key <= query - head)}
    pair, places = draw(*[(1, 2, 6, 3)] * 3), jax.sharding.PartitionSpec(None, "heads", "seq")
    part = functools.partial(attend, **later)
    with parallel.use(two, "seq", head_axis="heads"):
        found = jax.jit(jax.shard_map(part, mesh=two, in_specs=(places,) * 3, out_specs=places))(*pair)
    np.testing.assert_allclose(found, attend(*pair, **later, backend="dense"), 2e-5, 5e-6)
    some = {"mesh": two, "in_specs": (spec,) * 3, "out_specs": spec, "axis_names": {"seq"}}
    with parallel.use(two, "seq", head_axis="heads"), pytest.raises(ValueError, match="leaves 'heads' to"):
        jax.jit(jax.shard_map(lambda *arrays: attend(*arrays), **some))(*arrays)
    with pytest.raises(ValueError, match="as there is no"):
        parallel.ring_attend(*arrays, axis="seq")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("ring", "automatic", False),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (("ring", "automatic", True), ("both", "explicit", True))
        ),
    ],
)
def test_a_part_of_a_sequence_attends_with_the_others(arguments):
    on_eight_devices(f"import test_sharding\ntest_sharding.agree{arguments}")


@pytest.mark.slow
def test_the_context_divides_calls_within_a_shard_map():
    on_eight_devices("import test_sharding\ntest_sharding.divide_in_context()")
