"""Attention over parts of the keys, merged: attention over all of them, with its derivatives."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mesh_cases import on_eight_devices
from regard import attend, masks, merge

B, H, T, D, E = 2, 3, 5, 7, 11
CUTS = (0, 4, 4, 17)  # the second part has no keys


def draw(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = ((B, H, T, D), (B, H, CUTS[-1], D), (B, H, CUTS[-1], E))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def mask_of(first, size):
    # Query 0 sees nothing, query 1 the first part alone, the others both.
    seen = np.arange(CUTS[-1])[None] < np.array([0, 3, 9, 17, 17])[:, None]
    return masks.from_array(seen[:, first : first + size])


def in_parts(query, key, value):
    parts = []
    for first, last in itertools.pairwise(CUTS):
        output, aux = attend(
            query,
            key[..., first:last, :],
            value[..., first:last, :],
            mask=mask_of(first, last - first),
            aux=("lse",),
        )
        parts.append((output, aux["lse"]))
    return merge(parts)


def whole(query, key, value):
    output, aux = attend(query, key, value, mask=mask_of(0, CUTS[-1]), aux=("lse",))
    return output, aux["lse"]


def finite(result):
    """One number that all results matter to; lse is -inf in empty rows."""
    output, lse = result
    return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)))


def test_parts_give_what_the_whole_gives():
    output, lse = jax.jit(in_parts)(*draw())
    expected, expected_lse = whole(*draw())
    np.testing.assert_allclose(output, expected, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)
    assert not output[:, :, 0].any()
    assert (lse[:, :, 0] == -jnp.inf).all()


def test_float64_numpy_is_the_truth():
    rng = np.random.default_rng(1)
    outputs, sums = rng.normal(size=(3, T, E)), rng.normal(size=(3, T)) * 50
    sums[1, 2] = sums[:, 4] = -np.inf
    weights = np.exp(sums - np.logaddexp.reduce(sums[:, :4], keepdims=True, axis=0).max())[..., None][:, :4]
    expected = (weights * outputs[:, :4]).sum(0) / weights.sum(0)
    with jax.enable_x64(True):
        output, lse = merge([*zip(outputs, sums, strict=True)])
    assert output.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(output[:4], expected, rtol=1e-12)
    np.testing.assert_allclose(lse[:4], np.logaddexp.reduce(sums[:, :4], axis=0), rtol=1e-14)
    assert not output[4].any()


@pytest.mark.slow
def test_gradients_of_first_and_second_order_are_those_of_the_whole():
    arrays = draw()
    first, second = (jax.grad(lambda *x, run=run: finite(run(*x)), (0, 1, 2)) for run in (in_parts, whole))
    tangents = jax.tree.map(jnp.cos, tuple(arrays))
    for got, expected in zip(first(*arrays), second(*arrays), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    pairs = (jax.jvp(run, tuple(arrays), tangents)[1] for run in (first, second))
    for got, expected in zip(*pairs, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)
    reverse = (jax.grad(lambda x, run=run: jnp.vdot(run(x, *arrays[1:])[1], arrays[1]))(arrays[0])
               for run in (first, second))  # fmt: skip
    np.testing.assert_allclose(*reverse, atol=1e-4)


def test_jvp_is_that_of_the_whole():
    arrays = tuple(draw())
    tangents = jax.tree.map(jnp.sin, arrays)
    got, expected = (
        jax.jvp(lambda *x, run=run: finite(run(*x)), arrays, tangents)[1] for run in (in_parts, whole)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_empty_rows_pass_no_nan_whatever_they_hold():
    total, held, empty, _ = part_without_keys()
    assert np.isfinite(total(held, empty))
    slopes = jax.grad(total, (0, 1))(held, empty)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
    assert not slopes[0][0].any()


@pytest.mark.slow
def test_second_derivatives_and_cotangents_of_empty_rows_pass_no_nan():
    total, held, empty, other = part_without_keys()
    curves = jax.jacfwd(jax.grad(total, (0, 1)), (0, 1))(held, empty)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(curves))
    # A cotangent of NaN at an empty row ends there.
    _, pull = jax.vjp(lambda empty: merge([(held, empty), other]), empty)
    (slope,) = pull((jnp.zeros((T, E)), jnp.zeros(T).at[0].set(jnp.nan)))
    assert np.isfinite(slope).all()


def part_without_keys():
    """The sum of two parts of which neither has keys in row 0, where the first holds NaN."""
    held = jnp.full((T, E), jnp.nan).at[1:].set(1.0)
    empty = jnp.zeros(T).at[0].set(-jnp.inf)
    other = jnp.ones((T, E)), jnp.zeros(T).at[0].set(-jnp.inf)

    def total(held, empty):
        output, lse = merge([(held, empty), other])
        return jnp.sum(output) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

    return total, held, empty, other


def test_bfloat16_is_summed_in_float32():
    parts = [(jnp.full((1, 1), 1 + index / 128, jnp.bfloat16), jnp.zeros(1)) for index in range(32)]
    output, lse = merge(parts)
    assert (output.dtype, lse.dtype) == (jnp.bfloat16, np.float32)
    exact = np.mean([float(part[0][0, 0]) for part in parts])
    assert output[0, 0] == jnp.asarray(exact, jnp.bfloat16)
    mixed, _ = merge([parts[0], (parts[1][0].astype(jnp.float16), jnp.zeros(1))])
    assert mixed.dtype == np.float32


def test_merging_is_associative_and_takes_a_batch():
    rng = np.random.default_rng(2)
    parts = [(jnp.asarray(rng.normal(size=(T, E)), jnp.float32), jnp.asarray(rng.normal(size=T), jnp.float32))
             for _ in range(3)]  # fmt: skip
    at_once = merge(parts)
    for got, expected in zip(merge([merge(parts[:2]), parts[2]]), at_once, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    stacked = [jax.tree.map(lambda x: jnp.stack([x, x + 1]), part) for part in parts]
    mapped = jax.vmap(lambda *parts: merge(parts))(*stacked)
    for got, expected in zip(mapped, merge(stacked), strict=True):
        np.testing.assert_array_equal(got, expected)


def check_on_eight_devices():
    mesh = jax.make_mesh((8,), ("keys",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = [jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 24, D)), jnp.float32) for _ in range(3)]

    def own(query, key, value):
        output, aux = attend(query, key, value, aux=("lse",))
        every = jax.lax.all_gather((output, aux["lse"]), "keys")
        return merge([jax.tree.map(lambda x, n=n: x[n], every) for n in range(8)])[0]

    keys = P(None, None, "keys")
    run = jax.shard_map(own, mesh=mesh, in_specs=(P(), keys, keys), out_specs=P("keys"), check_vma=True)
    output = jax.jit(run)(*arrays)
    np.testing.assert_allclose(output[:1], attend(*arrays), atol=1e-5)


def test_devices_with_keys_of_their_own_are_merged():
    on_eight_devices("from test_merging import check_on_eight_devices\ncheck_on_eight_devices()")


def test_mistakes_are_explained():
    output, lse = jnp.zeros((T, E)), jnp.zeros(T)
    with pytest.raises(TypeError, match=r"parts\[0\]: expected a pair of arrays \(output, lse\)"):
        merge([(output, {"lse": lse})])
    with pytest.raises(TypeError, match=r"parts\[1\]: expected a pair"):
        merge([(output, lse), (output, lse, lse)])
    with pytest.raises(TypeError, match="expected floating-point arrays, got float32 and int32"):
        merge([(output, jnp.zeros(T, jnp.int32))])
    with pytest.raises(ValueError, match=r"expected output \(\*B, T, E\) and lse \(\*B, T\), got shapes"):
        merge([(output, lse[:, None])])
    with pytest.raises(ValueError, match=r"parts\[1\]: expected an output of shape \(5, 11\)"):
        merge([(output, lse), (output[:3], lse[:3])])
    with pytest.raises(ValueError, match="expected at least one pair"):
        merge([])
