"""Calls over the axis of a shard_map around them; another process has the devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mesh_cases import draw, make_mesh, on_eight_devices
from regard import attend, layers, masks, parallel


def agree():
    """Value and gradients, of every argument from without, and from within."""
    mesh, axes = make_mesh(seq=2, heads=2), jax.sharding.PartitionSpec(None, "heads", "seq")
    pairs = jax.sharding.PartitionSpec("heads", "seq")
    arrays = draw((2, 4, 12, 7), (2, 4, 12, 7), (2, 4, 12, 5), (4, 12, 12))
    options = {"mask": masks.causal() & masks.segments(np.repeat([0, 1, 2], [5, 4, 3]))}
    options |= {"sinks": jnp.asarray([0.3, -1.0, 2.0, 0.1]), "dropout_rate": 0.3, "rng": jax.random.key(5)}

    def part(query, key, value, bias):
        more = {"axis": "seq", "head_axis": "heads", "plan": "ring"}
        return parallel.attend(query, key, value, bias=bias, **more, **options)

    def differentiate(function, by=(0, 1, 2, 3)):
        return jax.grad(lambda *arrays: jnp.sum(jnp.sin(function(*arrays))), by)

    specs = {"mesh": mesh, "in_specs": (axes, axes, axes, pairs)}
    divided = jax.shard_map(part, out_specs=axes, **specs)
    inside = jax.shard_map(differentiate(part, (0, 1, 2)), out_specs=(axes,) * 3, **specs)
    whole = lambda query, key, value, bias: attend(query, key, value, bias=bias, **options)
    with jax.set_mesh(mesh):
        shardings = [jax.sharding.NamedSharding(mesh, own) for own in specs["in_specs"]]
        placed = jax.device_put(list(arrays), shardings)
        run = jax.jit(lambda *arrays: (divided(*arrays), *differentiate(divided)(*arrays), *inside(*arrays)))
        found = run(*placed)
    output, *grads = jax.jit(lambda *arrays: (whole(*arrays), *differentiate(whole)(*arrays)))(*arrays)
    for one, other in zip(found, [output, *grads, *grads[:3]], strict=True):
        np.testing.assert_allclose(one, other, rtol=5e-5, atol=2e-5)


def divide_in_context():
    """Layers that divide their calls do so in the caller's shard_map, too; what cannot be is refused."""
    mesh, spec = make_mesh(seq=4), jax.sharding.PartitionSpec(None, None, "seq")
    arrays = draw((2, 4, 12, 7), (2, 4, 12, 7), (2, 4, 12, 5))

    def call(**options):
        part = jax.shard_map(functools.partial(attend, **options), mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(part)(*arrays)

    with parallel.use(mesh, "seq"):
        found = call(mask=masks.causal())
        np.testing.assert_allclose(found, attend(*arrays, mask=masks.causal(), backend="dense"), 2e-5, 5e-6)
        for mask in (masks.segments(np.arange(3)), masks.from_array(np.ones((3, 3), bool))):
            with pytest.raises(ValueError, match=r"expected .*12"):  # it is that of all
                call(mask=mask)
    uneven = pytest.raises(ValueError, match=r"layout: .* even")
    with parallel.use(mesh, "seq", layout="balanced", plan="ring"), uneven:
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


def read_parameters_of_the_mesh():
    """Of an array on a mesh that a shard_map makes manual, JAX refuses array[index], but no other reading."""
    mesh, parts, (x,) = make_mesh(data=4), jax.sharding.PartitionSpec("data"), draw((4, 9, 8))
    place, options = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), {"rngs": nnx.Rngs(0)}
    widths = {"head_dim": 4, "rotary_dim": 2, "compress_rate": 2, "window": 4, "query_latent_dim": 4}
    chosen = {"output_latent_dim": 4, "index_count": 2, "index_heads": 2, "index_dim": 4}
    for layer in (
        layers.GatedDeltaNet(8, 2, **options),
        layers.Experts(8, 16, num_experts=4, experts_per_token=2, use_bias=True, **options),
        layers.CompressedAttention(8, 2, **widths, **chosen, **options),
    ):
        graph, state = nnx.split(layer)
        placed = nnx.merge(graph, jax.device_put(state, place))
        divided = jax.jit(jax.shard_map(placed, mesh=mesh, in_specs=parts, out_specs=parts))
        np.testing.assert_allclose(divided(x), layer(x), 1e-5, 1e-6)


def test_a_part_of_a_sequence_attends_with_the_others():
    on_eight_devices("import test_sharding\ntest_sharding.agree()")


def test_the_context_divides_calls_within_a_shard_map():
    on_eight_devices("import test_sharding as t\nt.divide_in_context()\nt.read_parameters_of_the_mesh()")
