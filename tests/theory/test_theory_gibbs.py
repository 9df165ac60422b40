"""Softmax as equilibrium: the laws of thermodynamics hold, at every scale of scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.theory import gibbs

# Compiled whole: a shape costs one program, not one per operation.
equilibrium = jax.jit(gibbs.equilibrium)


def slope(name, scores, *rest):
    """The gradient of the sum of one quantity, over rows where it is finite, with respect to the scores."""

    def total(scores):
        found = getattr(gibbs.equilibrium(scores, *rest), name)
        return jnp.sum(jnp.where(jnp.isfinite(found), found, 0))

    return jax.jit(jax.grad(total))(scores)


def truth(scores, temperature=1.0, keep=None):
    """One row, by the definitions."""
    scores = np.asarray(scores, np.float64)
    kept = scores[np.ones(scores.shape, bool) if keep is None else keep]
    factors = np.exp((kept - kept.max()) / temperature)
    weights = factors / factors.sum()
    energy = -kept
    mean = weights @ energy
    positive = weights[weights > 0]
    return {
        "log_partition": kept.max() / temperature + np.log(factors.sum()),
        "free_energy": -kept.max() - temperature * np.log(factors.sum()),
        "mean_energy": mean,
        "energy_variance": weights @ (energy - mean) ** 2,
        "entropy_nats": -(positive * np.log(positive)).sum(),
    }


def close(actual, expected, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(1, 13), st.sampled_from([(), (3,), (2, 5)]), st.floats(0.1, 20.0), st.integers(0, 99))
def test_every_quantity_is_its_definition(count, leading, temperature, seed):
    rng = np.random.default_rng(seed)
    scores = 3 * rng.normal(size=(*leading, count))
    keep = rng.random(scores.shape) < 0.7
    keep[..., rng.integers(count)] = True
    with jax.enable_x64(True):
        found = equilibrium(scores, temperature, keep)
        for index in np.ndindex(*leading):
            for name, expected in truth(scores[index], temperature, keep[index]).items():
                close(getattr(found, name)[index], expected)
        close(found.weights.sum(-1), np.ones(leading))
        assert not np.asarray(found.weights)[~keep].any()
        close(found.log_partition, jax.jit(gibbs.log_partition)(scores, temperature, keep))
        close(found.weights, jax.jit(gibbs.gibbs_weights)(scores, temperature, keep))
        close(found.entropy_nats, jax.jit(gibbs.entropy_nats)(found.weights))
        # H = log Z + <E> / T,  F = U - T H
        close(found.entropy_nats, found.log_partition + found.mean_energy / temperature)
        close(found.free_energy, found.mean_energy - temperature * found.entropy_nats)
        close(found.effective_states, np.exp(found.entropy_nats))
        close(found.heat_capacity, found.energy_variance / temperature**2)


@pytest.mark.slow
def test_derivatives_are_thermodynamic(x64):
    scores = jnp.asarray(np.random.default_rng(0).normal(size=7)) * 3
    state = equilibrium(scores, 1.7)
    of = lambda name: lambda temperature: getattr(equilibrium(scores, temperature), name)
    close(jax.grad(of("mean_energy"))(1.7), state.heat_capacity)
    close(jax.grad(of("free_energy"))(1.7), -state.entropy_nats)
    close(jax.grad(of("entropy_nats"))(1.7), state.heat_capacity / 1.7)
    close(jax.grad(lambda beta: gibbs.log_partition(scores, 1 / beta))(1 / 1.7), -state.mean_energy)
    close(jax.grad(gibbs.log_partition)(scores, 1.7), state.weights / 1.7)
    close(jax.hessian(gibbs.log_partition)(scores, 1.7), gibbs.softmax_jacobian(state.weights, 1.7) / 1.7)
    entropy = lambda scores: equilibrium(scores).entropy_nats
    p = gibbs.gibbs_weights(scores)
    close(jax.grad(entropy)(scores), -p * (np.log(p) + entropy(scores)))


@pytest.mark.slow
def test_the_jacobian_and_its_product_are_autodiffs(x64):
    rng = np.random.default_rng(5)
    scores, vector = rng.normal(size=(2, 3, 7))
    temperature = jnp.asarray([0.5, 1.0, 3.0])
    for row in range(3):
        weigh = lambda scores, row=row: gibbs.gibbs_weights(scores, temperature[row])
        jacobian = jax.jacobian(weigh)(jnp.asarray(scores[row]))
        weights = gibbs.gibbs_weights(scores, temperature)
        close(gibbs.softmax_jacobian(weights, temperature)[row], jacobian)
        close(gibbs.softmax_product(weights, vector, temperature)[row], jacobian @ vector[row])
        close(jacobian, jacobian.T)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_extreme_scores_and_temperatures_do_not_overflow(dtype, x64):
    scores = jnp.asarray([1e4, 1e4, -1e4, 0.0], dtype)
    state = equilibrium(scores)
    close(state.weights, [0.5, 0.5, 0, 0])
    close(state.log_partition, 1e4 + np.log(2), 1e-6)
    close(state.entropy_nats, np.log(2), 1e-6)
    close([state.energy_variance, state.heat_capacity], 0)
    for factor, temperature in ((1e30, 1.0), (1.0, 1e-15), (1e30, 1e30), (-1e30, 1e-5), (1e30, 1e-15)):
        state = equilibrium(scores * dtype(factor / 1e4), temperature)
        for name, value in state._asdict().items():
            assert not np.isnan(value).any(), name
        assert np.isfinite(state.weights).all()
        assert np.isfinite(state.free_energy)
        assert np.isfinite(state.entropy_nats)
    for name in gibbs.Equilibrium._fields:
        assert np.isfinite(slope(name, scores)).all(), name


@pytest.mark.parametrize("name", [*gibbs.Equilibrium._fields, "product"])
def test_slopes_towards_the_coldest_temperatures_are_numbers(name):
    """The square of 1e-37 is 0 in float32, and by the definition every slope at a peak of 0 is nearly 0."""

    def measure(temperature):
        if name == "product":
            return gibbs.softmax_product(jnp.float32([1, 0]), jnp.float32([1, 1]), temperature).sum()
        return getattr(gibbs.equilibrium(jnp.float32([0, -1, -1e4]), temperature), name).sum()

    for derive in (jax.grad, jax.jacfwd):
        assert derive(measure)(jnp.float32(1e-37)) == 0


def test_a_sweep_goes_from_ground_state_to_chaos(x64):
    scores = jnp.asarray(np.random.default_rng(1).normal(size=(3, 11)))
    temperatures = np.asarray([1e-9, 0.5, 1.0, 2.0, 1e9])
    sweep = jax.jit(gibbs.temperature_sweep)(scores, temperatures)
    assert sweep.weights.shape == (5, 3, 11)
    for index, temperature in enumerate(temperatures):
        close(sweep.entropy_nats[index], equilibrium(scores, temperature).entropy_nats)
    close(sweep.weights[0], np.eye(11)[np.argmax(scores, -1)])
    close(sweep.effective_states[-1], 11, 1e-6)
    assert (np.diff(sweep.entropy_nats, axis=0) > 0).all(), "heating spreads"


def test_empty_rows_are_consistent(x64):
    scores = jnp.asarray([[1.0, jnp.nan, 2.0], [jnp.nan, 3.0, 4.0], [-jnp.inf, -jnp.inf, -jnp.inf]])
    keep = np.asarray([[True, False, True], [False, False, False], [True, True, True]])
    state = equilibrium(scores, 2.0, keep)
    close(state.weights[0].sum(), 1)
    for name, expected in {
        "weights": 0,
        "log_partition": -np.inf,
        "free_energy": np.inf,
        "mean_energy": 0,
        "energy_variance": 0,
        "entropy_nats": 0,
        "heat_capacity": 0,
        "effective_states": 0,
    }.items():
        np.testing.assert_array_equal(getattr(state, name)[1:], expected, err_msg=name)
        d_scores = slope(name, scores, 2.0, keep)
        assert np.isfinite(d_scores).all(), name
        assert not np.asarray(d_scores)[~keep].any(), name
        assert not np.asarray(d_scores)[1:].any(), name
        if name != "weights":
            assert np.asarray(d_scores)[0, 0] != 0, name
    cooled = jax.grad(lambda temperature: equilibrium(scores, temperature, keep).mean_energy.sum())(2.0)
    assert np.isfinite(cooled)
    assert cooled > 0
    nothing = gibbs.equilibrium(jnp.ones((3, 0)))
    np.testing.assert_array_equal(nothing.log_partition, [-np.inf] * 3)


def test_jit_vmap_and_narrow_dtypes_serve():
    scores = jnp.ones((3, 5), jnp.bfloat16)
    assert jax.jit(gibbs.equilibrium)(scores).weights.dtype == jnp.float32
    many = jax.vmap(gibbs.equilibrium)(jnp.ones((3, 5)), jnp.asarray([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(
        many.log_partition, gibbs.log_partition(jnp.ones((3, 5)), jnp.asarray([1.0, 2.0, 3.0]))
    )


def test_errors_are_explained():
    with pytest.raises(TypeError, match="scores: expected a floating-point array, got int32"):
        gibbs.equilibrium(jnp.ones(3, jnp.int32))
    with pytest.raises(TypeError, match="keep: expected booleans, True = may attend, got float32"):
        gibbs.equilibrium(jnp.ones(3), keep=jnp.ones(3))
    with pytest.raises(
        ValueError, match=r"keep: expected an array that broadcasts to \(3,\), got shape \(2,\)"
    ):
        gibbs.equilibrium(jnp.ones(3), keep=jnp.ones(2, bool))
    with pytest.raises(ValueError, match=r"temperature: expected an array that broadcasts to \(2,\)"):
        gibbs.equilibrium(jnp.ones((2, 3)), jnp.ones(3))
    with pytest.raises(ValueError, match=r"temperatures: expected one axis"):
        gibbs.temperature_sweep(jnp.ones(3), 1.0)
    with pytest.raises(ValueError, match=r"scores: expected scores \(..., S\), got an array of shape \(\)"):
        gibbs.equilibrium(jnp.float32(1.0))
