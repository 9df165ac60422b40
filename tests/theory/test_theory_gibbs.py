"""Softmax as equilibrium: the laws of thermodynamics hold, at every scale of scores."""

import jax
import jax.numpy as jnp
import numpy as np

from oracle import close
from refusals import assert_refused
from regard.theory import gibbs

FIELDS = gibbs.Equilibrium._fields
# Compiled whole: a shape costs one program, not one per operation.
equilibrium = jax.jit(gibbs.equilibrium)


def totals(scores, temperature=1.0, keep=None):
    """The sum of each quantity over rows where it is finite."""
    state = gibbs.equilibrium(scores, temperature, keep)
    return jnp.stack([jnp.where(jnp.isfinite(field), field, 0).sum() for field in state])


def truth(scores, temperature, keep):
    """One row, by the definitions."""
    kept = scores[keep]
    factors = np.exp((kept - kept.max()) / temperature)
    weights = factors / factors.sum()
    mean, entropy = weights @ -kept, -(weights * np.log(weights)).sum()
    variance = weights @ (-kept - mean) ** 2
    log_partition = kept.max() / temperature + np.log(factors.sum())
    full = np.zeros(scores.shape)
    full[keep] = weights
    energies = log_partition, -temperature * log_partition, mean, variance
    return gibbs.Equilibrium(full, *energies, entropy, variance / temperature**2, np.exp(entropy))


def test_every_quantity_is_its_definition(x64):
    rng = np.random.default_rng(0)
    scores, temperature = 3 * rng.normal(size=(2, 5, 13)), rng.uniform(0.3, 20, (2, 5))
    keep = rng.random(scores.shape) < 0.7

    @jax.jit
    def compute(*arrays):
        state = gibbs.equilibrium(*arrays)
        alone = gibbs.gibbs_weights(*arrays), gibbs.log_partition(*arrays), gibbs.entropy_nats(state.weights)
        return state, alone

    found, alone = compute(scores, temperature, keep)
    for index in np.ndindex(2, 5):
        for name, expected in truth(scores[index], temperature[index], keep[index])._asdict().items():
            close(getattr(found, name)[index], expected, name=name)
    for name, value in zip(("weights", "log_partition", "entropy_nats"), alone, strict=True):
        close(value, getattr(found, name), name=name)


def test_derivatives_are_thermodynamic(x64):
    scores, vector = np.random.default_rng(0).normal(size=(2, 7)) * 3

    @jax.jit
    def compute(scores, temperature, vector):
        state = gibbs.equilibrium(scores, temperature)
        weigh = lambda scores: gibbs.gibbs_weights(scores, temperature)
        jacobian = gibbs.softmax_jacobian(state.weights, temperature)
        return (
            state,
            jax.jacfwd(gibbs.equilibrium, 1)(scores, temperature),
            jax.grad(lambda beta: gibbs.log_partition(scores, 1 / beta))(1 / temperature),
            jax.grad(gibbs.log_partition)(scores, temperature),
            jax.grad(lambda scores: gibbs.equilibrium(scores).entropy_nats)(scores),
            (jacobian, jax.jacrev(weigh)(scores), gibbs.softmax_product(state.weights, vector, temperature)),
            gibbs.softmax_jacobian(jnp.stack([state.weights] * 2), jnp.asarray([1.0, 3.0])),
        )

    state, heated, by_beta, by_scores, entropy_slope, jacobians, several = compute(scores, 1.7, vector)
    close(heated.mean_energy, state.heat_capacity)
    close(heated.free_energy, -state.entropy_nats)
    close(heated.entropy_nats, state.heat_capacity / 1.7)
    close(by_beta, -state.mean_energy)
    close(by_scores, state.weights / 1.7)
    p = truth(scores, 1.0, np.ones(7, bool)).weights
    close(entropy_slope, -p * (np.log(p) - p @ np.log(p)))
    jacobian, expected, product = jacobians
    close(jacobian, expected)
    close(jacobian, np.asarray(jacobian).T)
    close(product, expected @ vector)
    close(several, [1.7 * expected, 1.7 / 3 * expected])


def test_extreme_scores_and_temperatures_do_not_overflow():
    scores = np.float32([1e4, 1e4, -1e4, 0.0])
    state = equilibrium(scores, np.float32(1))
    close(state.weights, [0.5, 0.5, 0, 0])
    close(state.log_partition, 1e4 + np.log(2), 1e-6)
    close(state.entropy_nats, np.log(2), 1e-6)
    close([state.energy_variance, state.heat_capacity], 0)
    for factor, temperature in ((1e26, 1.0), (1e-4, 1e-15), (1e26, 1e30), (-1e26, 1e-5), (1e26, 1e-15)):
        state = equilibrium(scores * np.float32(factor), np.float32(temperature))
        for name, value in state._asdict().items():
            assert not np.isnan(value).any(), name
            assert np.isfinite(value).all() or name not in ("weights", "free_energy", "entropy_nats"), name
    assert np.isfinite(jax.jit(jax.jacrev(totals))(scores)).all()
    hot = equilibrium(scores, np.float32(np.inf))
    close([hot.mean_energy, hot.energy_variance], [-0.25e4, 0.6875e8], 1e-6)


def test_slopes_towards_the_coldest_temperatures_are_numbers():
    """The square of 1e-37 is 0 in float32, and by the definition every slope at a peak of 0 is nearly 0."""

    def measure(temperature):
        product = gibbs.softmax_product(jnp.float32([1, 0]), jnp.float32([1, 1]), temperature)
        scores = jnp.float32([0, -1, -1e4])
        return jnp.stack([*(field.sum() for field in gibbs.equilibrium(scores, temperature)), product.sum()])

    # Not compiled: XLA joins two divisions by the temperature into one by its square.
    assert not np.any(jax.jacfwd(measure)(np.float32(1e-37)))


def test_a_sweep_goes_from_ground_state_to_chaos(x64):
    scores = np.random.default_rng(1).normal(size=(3, 11))
    sweep = jax.jit(gibbs.temperature_sweep)(scores, np.asarray([1e-9, 0.5, 1.0, 2.0, 1e9]))
    assert sweep.weights.shape == (5, 3, 11)
    for index, temperature in ((1, 0.5), (3, 2.0)):
        for row in range(3):
            expected = truth(scores[row], temperature, np.ones(11, bool))
            close(sweep.entropy_nats[index, row], expected.entropy_nats)
    close(sweep.weights[0], np.eye(11)[np.argmax(scores, -1)])
    close(sweep.effective_states[-1], 11, 1e-6)
    assert (np.diff(sweep.entropy_nats, axis=0) > 0).all(), "heating spreads"


def test_empty_rows_are_consistent(x64):
    nan, inf = np.nan, np.inf
    scores = np.asarray([[1.0, nan, 2.0], [nan, 3.0, 4.0], [-inf, -inf, -inf]])
    keep = np.asarray([[True, False, True], [False, False, False], [True, True, True]])
    state = equilibrium(scores, 2.0, keep)
    close(np.sum(state.weights[0]), 1)
    empty = (0, -inf, inf, 0, 0, 0, 0, 0)
    slopes, cooled = jax.jit(jax.jacrev(totals, (0, 1)))(scores, 2.0, keep)
    for name, field, expected, d_scores in zip(FIELDS, state, empty, np.asarray(slopes), strict=True):
        np.testing.assert_array_equal(np.asarray(field)[1:], expected, err_msg=name)
        assert np.isfinite(d_scores).all(), name
        assert not d_scores[~keep].any(), name
        assert not d_scores[1:].any(), name
        assert name == "weights" or d_scores[0, 0] != 0, name
    assert np.isfinite(cooled).all()
    assert cooled[FIELDS.index("mean_energy")] > 0
    assert jax.eval_shape(gibbs.equilibrium, np.ones((3, 0))).log_partition.shape == (3,)
    assert jax.eval_shape(gibbs.equilibrium, jnp.ones(3, jnp.bfloat16)).weights.dtype == jnp.float32


def test_errors_are_explained():
    x, call = np.ones(3, np.float32), gibbs.equilibrium
    wrong = {
        "scores: expected a floating-point array, got int32": lambda: call(x.astype(np.int32)),
        "keep: expected booleans, True = may attend, got float32": lambda: call(x, keep=x),
        r"keep: expected .* broadcasts to \(3,\), got shape \(2,\)": lambda: call(x, keep=x[:2] > 0),
        r"temperature: expected .* broadcasts to \(2,\)": lambda: call(np.stack([x, x]), x),
        r"temperatures: expected one axis": lambda: gibbs.temperature_sweep(x, 1.0),
        r"scores: expected scores \(..., S\), got an array of shape \(\)": lambda: call(x[0]),
    }
    assert_refused(*((call, message) for message, call in wrong.items()), error=(TypeError, ValueError))
