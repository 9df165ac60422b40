"""Position tables against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from regard import positions


def truth(position, d_model, base=10000.0):
    position = np.asarray(position, np.float64)[..., None]
    column = np.arange(d_model)
    angle = position * base ** -((column // 2 * 2) / d_model)
    return np.where(column % 2 == 0, np.sin(angle), np.cos(angle))


def test_the_table_is_correctly_rounded_at_any_width():
    for d_model in (1, 2, 5, 7, 64):
        table = positions.sinusoidal(53, d_model)
        assert table.dtype == jnp.float32
        np.testing.assert_array_equal(table, truth(np.arange(53), d_model).astype(np.float32))


def test_the_table_is_exact_a_million_positions_away():
    table = positions.sinusoidal(3, 63, start=1_000_000)
    np.testing.assert_array_equal(table, truth(1_000_000 + np.arange(3), 63).astype(np.float32))


@pytest.mark.parametrize(("d_model", "base"), [(1, 10000.0), (6, 500000.0), (63, 10000.0)])
def test_traced_positions_are_exact_everywhere(d_model, base):
    position = np.array([[0, 1, 31, 32, 1023, 1024], [-1, -77, 10**6, 10**6 + 1, 2**30 + 12345, 2**31 - 1]])
    values = jax.jit(lambda p: positions.sinusoidal_at(p, d_model, base=base))(position.astype(np.int32))
    assert values.shape == (2, 6, d_model)
    np.testing.assert_allclose(values, truth(position, d_model, base), atol=2e-6)


def test_traced_64_bits_count_as_the_nearest_of_32(x64):
    values = jax.jit(lambda p: positions.sinusoidal_at(p, 6))(jnp.asarray([2**40, -(2**40) + 1, 5]))
    np.testing.assert_allclose(values, truth(np.array([2**31 - 1, -(2**31), 5]), 6), atol=2e-6)
    wide = positions.sinusoidal_at(small := np.array([-77, 0, 31, 1024, 4095]), 7, dtype=jnp.float64)
    np.testing.assert_allclose(wide, truth(small, 7), rtol=0, atol=1e-12)
    x = np.ones((2, 3, 6), np.float32)
    last = jax.jit(lambda p: positions.rotary(x, p))(jnp.asarray(2**40))
    np.testing.assert_allclose(last, positions.rotary(x, 2**31 - 4), atol=2e-6)


def test_a_shift_is_a_rotation():
    """PE[p + k] is a fixed linear map of PE[p]: each (sin, cos) pair turns by k times its frequency."""
    d_model, shift = 6, 5
    table = np.asarray(positions.sinusoidal(17, d_model), np.float64)
    turn = np.zeros((d_model, d_model))
    for pair in range(d_model // 2):
        angle = shift * 10000.0 ** (-2 * pair / d_model)
        block = slice(2 * pair, 2 * pair + 2)
        turn[block, block] = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
    np.testing.assert_allclose(table[:-shift] @ turn.T, table[shift:], atol=2e-7)


def test_tables_of_no_positions_and_other_dtypes_are_made():
    assert positions.sinusoidal(0, 5).shape == (0, 5)
    assert positions.sinusoidal_at(np.zeros((2, 0), np.int32), 5).shape == (2, 0, 5)
    assert positions.sinusoidal(3, 4, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: positions.sinusoidal(3, 4)).shape == (3, 4)


def test_a_learned_table_starts_small_and_random():
    rng = jax.random.key(0)
    for deviation, options in ((0.1, {"stddev": 0.1}), (0.02, {})):
        table = np.asarray(positions.learned(rng, 211, 97, **options))
        assert abs(table.std() - deviation) < 0.02 * deviation
        assert abs(table.mean()) < 0.03 * deviation
    narrow = jax.eval_shape(lambda rng: positions.learned(rng, 3, 5, dtype=jnp.bfloat16), rng)
    assert (narrow.shape, narrow.dtype) == ((3, 5), jnp.bfloat16)


def test_mistakes_are_explained():
    several, rng = np.arange(3), jax.random.key(0)
    for message, call in {
        "d_model: expected an integer of at least 1": lambda: positions.sinusoidal(3, 0),
        "length: expected an integer of at least 0": lambda: positions.sinusoidal(-1, 4),
        "length: expected an integer .* got 2.5": lambda: positions.sinusoidal(2.5, 4),
        "d_model: expected an integer .* got 4.0": lambda: positions.sinusoidal_at(several, 4.0),
        "start: expected an integer .* got 0.5": lambda: positions.sinusoidal(3, 4, start=0.5),
        "base: expected a positive number": lambda: positions.sinusoidal(3, 4, base=0.0),
        "position: expected integers": lambda: positions.sinusoidal_at(np.zeros(3, np.float32), 4),
        "length: expected an integer of at least 0, got -1": lambda: positions.learned(rng, -1, 4),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            call()
