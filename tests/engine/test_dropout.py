"""The dropout pattern: what it depends on, its rate, and its gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import attend, masks

RNG = jax.random.key(3)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _pattern(query_shape, key_length, rate, rng, offset):
    query = jnp.zeros(query_shape)
    key = jnp.zeros((*query_shape[:-2], key_length, query_shape[-1]))
    value = jnp.broadcast_to(jnp.eye(key_length), (*query_shape[:-2], key_length, key_length))
    return attend(query, key, value, dropout_rate=rate, rng=rng, query_offset=offset) != 0


def pattern(query_shape, key_length, rate=0.5, rng=RNG, offset=0):
    """Which weights survive, read off the output through an identity value."""
    return np.asarray(_pattern(query_shape, key_length, rate, rng, offset))


def test_a_smaller_pattern_is_a_corner_of_a_larger_one():
    whole = pattern((3, 5, 7, 2), 11)
    np.testing.assert_array_equal(pattern((2, 3, 5, 2), 7), whole[:2, :3, :5, :7])
    np.testing.assert_array_equal(pattern((6, 2), 10), whole[0, 0, :6, :10])
    np.testing.assert_array_equal(pattern((3, 5, 2, 2), 11, offset=5), whole[:, :, 5:])


def test_heads_rows_and_keys_differ():
    whole = pattern((3, 5, 31, 2), 37)
    for axis in range(4):
        first, second = np.take(whole, 0, axis), np.take(whole, 1, axis)
        assert 0.4 < (first == second).mean() < 0.6
    square = whole[..., :31]  # a query and a key at one place are two things
    assert 0.45 < (square == np.swapaxes(square, -1, -2)).mean() < 0.56
    assert 0.45 < (whole == pattern((3, 5, 31, 2), 37, rng=jax.random.key(4))).mean() < 0.55


def test_pairs_quadruples_and_neighbours_are_independent():
    """No product of signs at the corners of a rectangle leans either way, near or far."""
    signs = np.where(pattern((1, 3, 256, 1), 256), 1, -1).reshape(3, 256, 256)
    for rows in (1, 2, 16, 100):
        for columns in (1, 2, 16, 100):
            shifted = np.roll(signs, rows, 1)
            for product in (
                signs * shifted,
                signs * np.roll(signs, columns, 2),
                signs * shifted * np.roll(signs, columns, 2) * np.roll(shifted, columns, 2),
            ):
                # A sum of n fair signs, 48 sums looked at: five standard deviations.
                assert abs(product.sum()) < 5 * product.size**0.5


def test_the_expectation_is_kept_and_weights_are_those_before():
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((5, 3), (7, 3), (7, 2)))

    @jax.jit
    def run(keys):
        call = lambda **options: attend(query, key, value, aux=("weights", "lse"), **options)
        return call(), jax.vmap(lambda rng: call(dropout_rate=0.3, rng=rng))(keys)

    (plain, aux), (outputs, dropped) = run(jax.random.split(RNG, 4001))
    assert (np.abs(outputs.mean(0) - plain) < 5 * np.asarray(outputs).std(0) / 4001**0.5).all()
    assert not np.array_equal(outputs[0], plain)
    np.testing.assert_allclose(dropped["weights"][0], aux["weights"], rtol=1e-6)
    np.testing.assert_allclose(dropped["lse"][0], aux["lse"], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_a_single_key_has_no_gradient_whatever_the_dtype(backend):
    """Its weight is 1: the product with its value and the output must be rounded alike."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 131, 7)), "bfloat16") for _ in range(4)]
    own = masks.from_array(np.eye(131, dtype=bool))
    run = functools.partial(attend, mask=own, dropout_rate=0.3, rng=jax.random.key(5), backend=backend)
    d_query, d_key, d_value = jax.jit(lambda *a: jax.vjp(run, *a[:3])[1](a[3]))(*arrays)
    assert jnp.abs(d_value).max() > 1
    for grad in (d_query, d_key):
        assert jnp.abs(grad).max() < 1e-5  # 0.02, where one of them was rounded


@pytest.mark.slow
def test_any_kind_of_key_serves_and_empty_rows_stay_empty():
    x = jnp.ones((2, 3, 5, 7))
    drop = lambda rng, rate: attend(x, x, x, mask=masks.lengths([0, 5]), dropout_rate=rate, rng=rng)
    call = jax.jit(drop, static_argnums=1)
    for rng in (jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        out = np.asarray(call(rng, 0.4))
        assert not out[0].any()
        assert out[1].any()
