"""Memories: the modern one is attention, both lower their energy and find what was stored."""

import jax
import numpy as np
import pytest

from oracle import close
from refusals import assert_refused
from regard import attend
from regard.theory import hebbian, hopfield

update, energy, retrieve = (jax.jit(call) for call in (hopfield.update, hopfield.energy, hopfield.retrieve))
recall, sweep = jax.jit(hebbian.recall), jax.jit(hebbian.sign_update)


def store(count=7, width=31):
    rng = np.random.default_rng(0)
    return np.sign(rng.normal(size=(count, width))), rng


def test_the_update_is_attention(x64):
    patterns, rng = store()
    state, keep = rng.normal(size=(2, 5, 31)), rng.random((2, 5, 7)) < 0.5
    keep[0, 1] = False
    found = update(state, patterns, 0.37, keep)
    close(found, attend(state, patterns, patterns, mask=keep, scale=0.37))
    assert not np.any(found[0, 1])
    assert energy(state, patterns, 0.37, keep)[0, 1] == np.inf


def test_the_energy_falls_and_its_slope_is_the_step(x64):
    rng = np.random.default_rng(1)
    patterns, state = rng.normal(size=(7, 11)), rng.normal(size=(3, 11))
    slope = jax.jit(jax.grad(lambda *arguments: hopfield.energy(*arguments).sum()))
    for beta in (0.1, 8.0):
        fit = state @ patterns.T * beta
        largest = (patterns**2).sum(-1).max()
        expected = -np.log(np.exp(fit).mean(-1)) / beta + (state**2).sum(-1) / 2 + largest / 2
        found, moved = energy(state, patterns, beta), update(state, patterns, beta)
        close(found, expected)
        assert np.all(np.asarray(found) >= 0)
        assert np.all(np.asarray(energy(moved, patterns, beta)) <= np.asarray(found) + 1e-12)
        close(slope(state, patterns, beta), state - np.asarray(moved))


def test_retrieval_finds_the_pattern_from_noise(x64):
    patterns, rng = store()
    noisy = patterns + 0.5 * rng.normal(size=patterns.shape)
    found = retrieve(noisy, patterns, 1.0)
    close(found.state, patterns, 1e-3)
    assert np.all(found.converged)
    assert np.all(np.asarray(found.steps) < 10)
    close(update(found.state, patterns, 1.0), found.state, 1e-13)
    close(found.energy, energy(found.state, patterns, 1.0))
    # Hot, all patterns melt into one state.
    close(retrieve(noisy, patterns, 1e-6).state, np.broadcast_to(np.mean(patterns, 0), (7, 31)), 1e-3)


def test_a_state_rests_whatever_else_is_in_the_batch(x64):
    patterns, rng = store()
    states = rng.normal(size=(2, 5, 31))
    settle = jax.jit(lambda state: hopfield.retrieve(state, patterns, 0.4, tolerance=1e-6))
    together = settle(states)
    assert len(set(np.asarray(together.steps).ravel().tolist())) > 1
    for index in np.ndindex(2, 5):
        alone = settle(states[index][None])
        assert alone.steps[0] == together.steps[index]
        close(together.state[index], alone.state[0], 1e-12)

    @jax.jit
    def stop(states):
        return [hopfield.retrieve(states, patterns, 0.4, max_steps=steps) for steps in (0, 1)]

    never, early = stop(states)
    close(never.state, states)
    assert not np.any(never.steps)
    close(early.state, update(states, patterns, 0.4))
    assert not np.all(early.converged)


def test_retrieval_has_derivatives_in_forward_mode(x64):
    patterns, rng = store()
    state, direction, step = patterns[:2] + 0.1, rng.normal(size=patterns.shape), 1e-5
    rest = jax.jit(lambda patterns: hopfield.retrieve(state, patterns, 0.3).state)
    _, slope = jax.jit(lambda *arguments: jax.jvp(rest, arguments[:1], arguments[1:]))(patterns, direction)
    ends = [np.asarray(rest(patterns + sign * step * direction)) for sign in (1, -1)]
    close(slope, (ends[0] - ends[1]) / (2 * step), 1e-7)
    assert np.abs(slope).max() > 0.1


def test_masked_patterns_are_not_remembered(x64):
    patterns, _ = store()
    keep = np.stack([np.arange(7) != 2, np.zeros(7, bool)])
    found = retrieve(patterns[2:4], np.where(keep.any(0)[:, None], patterns, np.nan), 1.0, keep)
    assert np.abs(found.state[0] - patterns[2]).max() > 1
    close(found.state[0], retrieve(patterns[2:3], patterns[keep[0]], 1.0).state[0], 1e-12)
    assert not np.any(found.state[1])
    assert np.all(found.converged)


def test_extreme_patterns_do_not_overflow():
    patterns = 1e4 * store()[0].astype(np.float32)
    found = retrieve(patterns * np.float32(0.9), patterns, np.float32(1))
    np.testing.assert_array_equal(found.state, patterns)
    assert np.isfinite(found.energy).all()


def test_separation_is_that_computed_by_hand(x64):
    patterns = np.random.default_rng(3).normal(size=(2, 5, 3))
    found, alone = jax.jit(lambda x: (hopfield.separation(x), hopfield.separation(x[:, :1])))(patterns)
    for batch in range(2):
        fit = patterns[batch] @ patterns[batch].T
        close(found[batch], [fit[i, i] - max(fit[i, j] for j in range(5) if j != i) for i in range(5)])
    assert np.all(alone == np.inf)


def test_capacity_is_the_papers():
    # Ramsauer et al., theorem 3: "c >= 3.1546" and "c >= 1.3718".
    assert abs(hopfield.growth(20, 1.0, 3.0, 0.001) - 3.1546) < 1e-4
    assert abs(hopfield.growth(75, 1.0, 1.0, 0.001) - 1.3718) < 1e-4
    for width, beta, radius in ((20, 1.0, 3.0), (75, 0.01, 1.0)):
        c = hopfield.growth(width, beta, radius)
        a = 2 / (width - 1) * (1 + np.log(2 * beta * radius**2 * 0.001 * (width - 1)))
        b = 2 * radius**2 * beta / 5
        np.testing.assert_allclose(b / c * np.exp(b / c), np.exp(a) * b, rtol=1e-9)
        expected = np.sqrt(0.001) * c ** ((width - 1) / 4)
        np.testing.assert_allclose(hopfield.capacity(width, beta=beta, radius=radius), expected)
    assert hopfield.capacity(10_000, radius=3.0) == np.inf
    # W(x) is x for small x, and c then e^-a, though e^a is below all numbers.
    small = hopfield.capacity(3, beta=1e-8, radius=1e-3, failure=1e-300)
    np.testing.assert_allclose(small, 1 / np.sqrt(4 * np.e * 1e-14), rtol=1e-9)
    assert hebbian.hebbian_capacity(500) == pytest.approx(69)


def test_hebbian_weights_store_patterns(x64):
    patterns, rng = store(count=3, width=53)
    weights = np.asarray(jax.jit(hebbian.hebbian_weights)(patterns))
    close(weights, patterns.T @ patterns / 53 * ~np.eye(53, dtype=bool))
    flipped = patterns * np.where(rng.random(patterns.shape) < 0.1, -1.0, 1.0)
    assert (flipped != patterns).any()
    found = recall(flipped, weights)
    np.testing.assert_array_equal(found.state, patterns)
    assert np.all(found.converged)


def test_the_sweep_is_one_feature_at_a_time_and_lowers_the_energy(x64):
    rng = np.random.default_rng(4)
    weights, states = rng.normal(size=(13, 13)), np.sign(rng.normal(size=(2, 3, 13)))
    weights = (weights + weights.T) * ~np.eye(13, dtype=bool)
    swept, ising_energy = sweep(states, weights), jax.jit(hebbian.ising_energy)
    energies = ising_energy(swept, weights)
    for index in np.ndindex(2, 3):
        state = states[index].copy()
        for feature in range(13):
            before = -state @ weights @ state / 2
            state[feature] = np.sign(weights[feature] @ state)
            assert -state @ weights @ state / 2 <= before + 1e-12
        np.testing.assert_array_equal(swept[index], state)
        close(energies[index], -state @ weights @ state / 2)
    np.testing.assert_array_equal(sweep(states, np.zeros((13, 13))), states)  # a field of 0 turns nothing


def test_all_at_once_would_swap_for_ever(x64):
    weights, state = np.array([[0.0, -1.0], [-1.0, 0.0]]), np.ones(2)
    np.testing.assert_array_equal(np.sign(weights @ np.sign(weights @ state)), state)
    found = recall(state, weights)
    assert found.converged
    assert found.state.tolist() == [-1.0, 1.0]
    assert jax.jit(lambda *given: hebbian.recall(*given, max_sweeps=0))(state, weights).sweeps == 0


def test_errors_are_explained():
    ones = lambda *shape: np.ones(shape, np.float32)
    wrong = {
        r"weights: expected \(..., 3, 3\), got shape \(2, 2\)": lambda: sweep(ones(3), ones(2, 2)),
        "max_steps: expected at least 0": lambda: hopfield.retrieve(ones(1, 2), ones(1, 2), max_steps=-1),
        "max_sweeps": lambda: hebbian.recall(ones(2), ones(2, 2), max_sweeps=-1),
        "capacity: expected width of at least 2": lambda: hopfield.capacity(float("nan")),
        r"capacity: expected width .* got width=1": lambda: hopfield.growth(1),
        r"state: expected \(..., count, width\), got .* \(2,\)": lambda: update(ones(2), ones(1, 2)),
        r"beta: expected one number, got .* \(2,\)": lambda: update(*[ones(2, 2)] * 2, beta=ones(2)),
        r"patterns: .* got \(2,\), \(3,\)": lambda: hopfield.retrieve(ones(2, 1, 2), ones(3, 1, 2)),
        "width: expected an integer known before": lambda: hebbian.hebbian_capacity("a"),
        "width: expected a number known": lambda: hopfield.capacity("a"),
    }
    assert_refused(*((call, message) for message, call in wrong.items()), error=(TypeError, ValueError))
