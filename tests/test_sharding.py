"""attend over several devices: the compiler's partitioning and shard_map. A fresh process makes them."""

import subprocess
import sys

from mesh_cases import pretend

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from regard import attend, masks

assert len(jax.devices()) == 4
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
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
print("shards agree")
"""


def test_shards_agree_with_one_device():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=pretend(4), capture_output=True, text=True, check=False
    )
    assert done.stdout == "shards agree\n", done.stderr
