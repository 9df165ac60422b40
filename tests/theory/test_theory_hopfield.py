"""Memories: the modern one is attention, both lower their energy and find what was stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import attend
from regard.theory import hebbian, hopfield


def close(actual, expected, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


def stored(seed=0, count=7, width=31):
    rng = np.random.default_rng(seed)
    patterns = jnp.asarray(np.sign(rng.normal(size=(count, width))))
    return patterns, rng


def test_the_update_is_attention(x64):
    patterns, rng = stored()
    state = rng.normal(size=(2, 5, 31))
    keep = rng.random((2, 5, 7)) < 0.5
    keep[0, 1] = False
    found = hopfield.update(state, patterns, 0.37, keep)
    close(found, attend(state, patterns, patterns, mask=keep, scale=0.37))
    assert not np.asarray(found)[0, 1].any()
    assert hopfield.energy(state, patterns, 0.37, keep)[0, 1] == np.inf


@pytest.mark.slow
@settings(max_examples=4)
@given(st.integers(1, 7), st.integers(1, 11), st.sampled_from([0.1, 1.0, 8.0]), st.integers(0, 99))
def test_the_energy_falls_and_its_slope_is_the_step(count, width, beta, seed):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        patterns, state = (
            jnp.asarray(rng.normal(size=(count, width))),
            jnp.asarray(rng.normal(size=(3, width))),
        )
        fit = np.asarray(state @ patterns.T) * beta
        largest = (np.asarray(patterns) ** 2).sum(-1).max()
        expected = -np.log(np.exp(fit).mean(-1)) / beta + (np.asarray(state) ** 2).sum(-1) / 2 + largest / 2
        measure, move = jax.jit(hopfield.energy), jax.jit(hopfield.update)
        energy = measure(state, patterns, beta)
        close(energy, expected)
        assert (np.asarray(energy) >= 0).all()
        moved = move(state, patterns, beta)
        assert (measure(moved, patterns, beta) <= energy + 1e-12).all()
        slope = jax.grad(lambda state: measure(state, patterns, beta).sum())(state)
        close(slope, state - moved)


def test_retrieval_finds_the_pattern_from_noise(x64):
    patterns, rng = stored()
    noisy = patterns + 0.5 * rng.normal(size=patterns.shape)
    found = jax.jit(hopfield.retrieve)(noisy, patterns)
    close(found.state, patterns, 1e-3)
    assert np.asarray(found.converged).all()
    assert (np.asarray(found.steps) < 10).all()
    close(hopfield.update(found.state, patterns), found.state, 1e-13)
    close(found.energy, hopfield.energy(found.state, patterns))
    # Hot, all patterns melt into one state.
    melted = hopfield.retrieve(noisy, patterns, 1e-6).state
    close(melted, np.broadcast_to(np.mean(patterns, 0), (7, 31)), 1e-3)


def test_a_state_rests_whatever_else_is_in_the_batch(x64):
    patterns, rng = stored()
    states = rng.normal(size=(2, 5, 31))
    retrieve = jax.jit(lambda state: hopfield.retrieve(state, patterns, 0.4, tolerance=1e-6))
    together = retrieve(states)
    assert len(set(np.asarray(together.steps).ravel().tolist())) > 1
    for index in np.ndindex(2, 5):
        alone = retrieve(states[index][None])
        assert alone.steps[0] == together.steps[index]
        close(together.state[index], alone.state[0], 1e-12)
    early = hopfield.retrieve(states, patterns, 0.4, max_steps=1)
    close(early.state, hopfield.update(states, patterns, 0.4))
    assert not np.asarray(early.converged).all()
    assert (np.asarray(hopfield.retrieve(states, patterns, max_steps=0).steps) == 0).all()


def test_retrieval_has_derivatives_in_forward_mode(x64):
    patterns, rng = stored()
    state, move = jnp.asarray(patterns[:2] + 0.1), jnp.asarray(rng.normal(size=patterns.shape))
    rest = jax.jit(lambda patterns: hopfield.retrieve(state, patterns, 0.3).state)
    _, slope = jax.jvp(rest, (patterns,), (move,))
    step = 1e-5
    close(slope, (rest(patterns + step * move) - rest(patterns - step * move)) / (2 * step), 1e-7)
    assert np.abs(slope).max() > 0.1


@pytest.mark.slow
def test_masked_patterns_are_not_remembered(x64):
    patterns, _ = stored()
    keep = np.arange(7) != 2
    found = hopfield.retrieve(patterns[2:3], patterns, keep=keep[None])
    assert np.abs(found.state[0] - patterns[2]).max() > 1
    close(found.state, hopfield.retrieve(patterns[2:3], patterns[keep]).state, 1e-12)
    nothing = hopfield.retrieve(patterns[:1], patterns, keep=np.zeros((1, 7), bool))
    assert not np.asarray(nothing.state).any()
    assert np.asarray(nothing.converged).all()


def test_extreme_patterns_do_not_overflow():
    patterns = 1e4 * stored()[0].astype(jnp.float32)
    found = hopfield.retrieve(patterns * 0.9, patterns)
    np.testing.assert_array_equal(found.state, patterns)
    assert np.isfinite(found.energy).all()


def test_separation_is_that_computed_by_hand(x64):
    patterns = np.random.default_rng(3).normal(size=(2, 5, 3))
    for batch in range(2):
        fit = patterns[batch] @ patterns[batch].T
        expected = [fit[i, i] - max(fit[i, j] for j in range(5) if j != i) for i in range(5)]
        close(hopfield.separation(patterns)[batch], expected)
    assert hopfield.separation(patterns[0, :1])[0] == np.inf


def test_capacity_is_the_papers():
    # Ramsauer et al., theorem 3: "c >= 3.1546" and "c >= 1.3718".
    assert abs(hopfield.growth(20, 1.0, 3.0, 0.001) - 3.1546) < 1e-4
    assert abs(hopfield.growth(75, 1.0, 1.0, 0.001) - 1.3718) < 1e-4
    for width, beta, radius in ((20, 1.0, 3.0), (75, 0.01, 1.0), (1000, 50.0, 9.0)):
        c = hopfield.growth(width, beta, radius)
        a = 2 / (width - 1) * (1 + np.log(2 * beta * radius**2 * 0.001 * (width - 1)))
        b = 2 * radius**2 * beta / 5
        w = b / c
        np.testing.assert_allclose(w * np.exp(w), np.exp(a) * b, rtol=1e-9)
        np.testing.assert_allclose(
            np.log(hopfield.capacity(width, beta=beta, radius=radius))
            if width < 1000
            else np.log(np.sqrt(0.001)) + 999 / 4 * np.log(c),
            np.log(np.sqrt(0.001)) + (width - 1) / 4 * np.log(c),
        )
    assert hopfield.capacity(10_000, radius=3.0) == np.inf
    # W(x) is x for small x, and c then e^-a, though e^a is below all numbers.
    small = hopfield.capacity(3, beta=1e-8, radius=1e-3, failure=1e-300)
    np.testing.assert_allclose(small, 1 / np.sqrt(4 * np.e * 1e-14), rtol=1e-9)


def test_hebbian_weights_store_patterns(x64):
    patterns, rng = stored(count=3, width=53)
    weights = hebbian.hebbian_weights(patterns)
    expected = np.asarray(patterns.T @ patterns) / 53
    np.fill_diagonal(expected, 0)
    close(weights, expected)
    flipped = patterns * np.where(rng.random(patterns.shape) < 0.1, -1.0, 1.0)
    assert (np.asarray(flipped) != np.asarray(patterns)).any()
    found = jax.jit(hebbian.recall)(flipped, weights)
    np.testing.assert_array_equal(found.state, patterns)
    assert np.asarray(found.converged).all()
    np.testing.assert_array_equal(hebbian.sign_update(found.state, weights), found.state)


def test_the_sweep_is_one_feature_at_a_time_and_lowers_the_energy(x64):
    patterns, rng = stored(count=5, width=13)
    weights = np.asarray(hebbian.hebbian_weights(patterns))
    states = np.sign(rng.normal(size=(2, 3, 13)))
    swept = hebbian.sign_update(states, weights)
    for index in np.ndindex(2, 3):
        state = states[index].copy()
        for feature in range(13):
            before = -state @ weights @ state / 2
            field = weights[feature] @ state
            state[feature] = np.sign(field) if field else state[feature]
            assert -state @ weights @ state / 2 <= before + 1e-12
        np.testing.assert_array_equal(swept[index], state)
        close(hebbian.ising_energy(swept, weights)[index], -state @ weights @ state / 2)
    assert set(np.unique(hebbian.sign_update(np.ones(4), np.zeros((4, 4))))) == {1.0}


def test_all_at_once_would_swap_for_ever(x64):
    weights = jnp.asarray([[0.0, -1.0], [-1.0, 0.0]])
    state = jnp.asarray([1.0, 1.0])
    np.testing.assert_array_equal(jnp.sign(weights @ jnp.sign(weights @ state)), state)
    found = hebbian.recall(state, weights)
    assert found.converged
    assert found.state.tolist() == [-1.0, 1.0]
    assert hebbian.recall(state, weights, max_sweeps=0).sweeps == 0


def test_errors_are_explained():
    with pytest.raises(ValueError, match=r"weights: expected \(..., 3, 3\), got shape \(2, 2\)"):
        hebbian.sign_update(jnp.ones(3), jnp.ones((2, 2)))
    with pytest.raises(ValueError, match="max_steps: expected at least 0"):
        hopfield.retrieve(jnp.ones((1, 2)), jnp.ones((1, 2)), max_steps=-1)
    for estimate in (hopfield.capacity, hopfield.growth):
        with pytest.raises(ValueError, match="capacity: expected width of at least 2"):
            estimate(1)
    with pytest.raises(
        ValueError, match=r"state: expected \(..., count, width\), got an array of shape \(2,\)"
    ):
        hopfield.update(jnp.ones(2), jnp.ones((1, 2)))
    with pytest.raises(ValueError, match="max_sweeps"):
        hebbian.recall(jnp.ones(2), jnp.ones((2, 2)), max_sweeps=-1)
