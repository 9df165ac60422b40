"""Attention over parts of the keys, merged: attention over all of them, with its derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mesh_cases import draw, on_eight_devices
from regard import attend, merge

T, D, E = 5, 7, 11


def test_empty_rows_pass_no_nan_whatever_they_hold():
    """Two parts of which neither has keys in row 0, where the first holds NaN."""
    held = jnp.full((T, E), jnp.nan).at[1:].set(1.0)
    empty = jnp.zeros(T).at[0].set(-jnp.inf)

    def total(held, empty):
        output, lse = merge([(held, empty), (jnp.ones((T, E)), jnp.zeros(T).at[0].set(-jnp.inf))])
        return jnp.sum(output) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    def cotangents(held, empty):
        _, pull = jax.vjp(lambda empty: merge([(held, empty), (jnp.ones((T, E)), empty)]), empty)
        return pull((jnp.zeros((T, E)), jnp.zeros(T).at[0].set(jnp.nan)))  # which ends there

    @jax.jit
    def derive(*parts):
        grad = jax.value_and_grad(total, (0, 1))
        return grad(*parts), jax.jacfwd(jax.grad(total, (0, 1)), (0, 1))(*parts), cotangents(*parts)

    found = derive(held, empty)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert not found[0][1][0][0].any()


def test_bfloat16_is_summed_in_float32():
    parts = [(jnp.full((1, 1), 1 + index / 128, jnp.bfloat16), jnp.zeros(1)) for index in range(32)]
    output, lse = jax.jit(merge)(parts)
    assert (output.dtype, lse.dtype) == (jnp.bfloat16, np.float32)
    assert output[0, 0] == jnp.asarray(np.mean([float(part[0][0, 0]) for part in parts]), jnp.bfloat16)
    mixed, _ = jax.eval_shape(merge, [parts[0], (parts[1][0].astype(jnp.float16), jnp.zeros(1))])
    assert mixed.dtype == np.float32


def check_on_eight_devices():
    mesh = jax.make_mesh((8,), ("keys",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = draw(*[(1, 1, 24, D)] * 3)

    def own(query, key, value):
        output, aux = attend(query, key, value, aux=("lse",))
        every = jax.lax.all_gather((output, aux["lse"]), "keys")
        return merge([jax.tree.map(lambda x, n=n: x[n], every) for n in range(8)])[0]

    keys = P(None, None, "keys")
    run = jax.shard_map(own, mesh=mesh, in_specs=(P(), keys, keys), out_specs=P("keys"), check_vma=True)
    np.testing.assert_allclose(jax.jit(run)(*arrays)[:1], jax.jit(attend)(*arrays), atol=1e-5)


def test_devices_with_keys_of_their_own_are_merged():
    on_eight_devices("from test_merging import check_on_eight_devices\ncheck_on_eight_devices()")
