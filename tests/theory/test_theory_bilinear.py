"""Metrics measure; their checks say why a matrix is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.theory import bilinear


def close(actual, expected, tolerance=1e-10):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=tolerance, atol=tolerance)


def test_metrics_are_those_computed_by_hand(x64):
    np.testing.assert_array_equal(bilinear.euclidean_metric(3), np.eye(3))
    np.testing.assert_array_equal(bilinear.scaled_metric(16), np.eye(16) / 4)
    np.testing.assert_array_equal(bilinear.scaled_metric(3, 2.0), 2 * np.eye(3))
    weight = np.random.default_rng(0).normal(size=(5, 2, 3))
    close(bilinear.learned_metric(weight), weight.transpose(0, 2, 1) @ weight)
    diagonal = bilinear.diagonal_metric(jnp.asarray([[1.0, 2.0], [3.0, 5.0]]))
    np.testing.assert_array_equal(diagonal, [np.diag([1, 2]), np.diag([3, 5])])
    assert bilinear.scaled_metric(3, dtype=jnp.float32).dtype == jnp.float32


@pytest.mark.slow
@settings(max_examples=6)
@given(st.integers(1, 7), st.integers(0, 3), st.integers(0, 99))
def test_raising_undoes_lowering(width, batch, seed):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        weight = rng.normal(size=(width + 2, width))
        vectors = rng.normal(size=(batch, width))
        metric = bilinear.learned_metric(weight)
        lowered = bilinear.lower_index(vectors, metric)
        close(lowered, vectors @ (weight.T @ weight))
        close(bilinear.raise_index(lowered, metric), vectors, 1e-6)
        others = rng.normal(size=(3, width))
        pairs = bilinear.bilinear_form(vectors[:, None], others[None], metric)
        close(pairs, vectors @ weight.T @ weight @ others.T)
        close(pairs, np.asarray(lowered) @ others.T)
        own = bilinear.bilinear_form(vectors, vectors, metric)
        close(own, ((vectors @ weight.T) ** 2).sum(-1))


def test_the_inverse_metric_undoes_the_metric(x64):
    metric = bilinear.learned_metric(np.random.default_rng(3).normal(size=(2, 7, 5)))
    close(metric @ bilinear.inverse_metric(metric), np.broadcast_to(np.eye(5), (2, 5, 5)), 1e-9)
    vectors = np.random.default_rng(4).normal(size=(2, 5))
    by_inverse = np.einsum("nab,nb->na", bilinear.inverse_metric(metric), vectors)
    close(bilinear.raise_index(vectors, metric), by_inverse, 1e-9)


@pytest.mark.parametrize(
    ("matrix", "verdict"),
    [
        (np.eye(3), "a metric"),
        ([[2.0, 1.0], [1.0, 2.0]], "a metric"),
        ([[1.0, 1e-3], [0.0, 1.0]], "no metric; not symmetric: g_ab and g_ba differ by 0.001 of the largest"),
        ([[1.0, 2.0], [2.0, 1.0]], "eigenvalue -1 beside 3, so a squared length is negative"),
        ([[1.0, 0.0], [0.0, 0.0]], "eigenvalue 0 beside 1, so a vector other than 0 has length 0"),
        (np.zeros((2, 2)), "not positive definite"),
    ],
    ids=str,
)
def test_the_check_gives_reasons(matrix, verdict, x64):
    report = jax.jit(bilinear.check_metric)(jnp.asarray(matrix))
    assert verdict in str(report)
    assert bool(report.is_metric) == (verdict == "a metric")


def test_a_map_that_loses_a_direction_is_no_metric():
    # A smallest eigenvalue of exactly 0 comes out as rounding of either sign.
    for seed in range(7):
        weight = np.random.default_rng(seed).normal(size=(2, 5)).astype(np.float32)
        assert not bilinear.check_metric(bilinear.learned_metric(weight)).positive_definite
    report = bilinear.check_metric(bilinear.learned_metric(jnp.ones((3, 2, 5))))
    assert str(report) == "0 of 3 are metrics"


def test_errors_are_explained():
    with pytest.raises(ValueError, match=r"metric: expected a square matrix .* got shape \(2, 3\)"):
        bilinear.check_metric(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"metric: expected \(3, 3\).*got shape \(2, 2\)"):
        bilinear.raise_index(jnp.ones(3), jnp.eye(2))
    with pytest.raises(ValueError, match=r"operand 2: expected size 2 for index 'b'"):
        bilinear.bilinear_form(jnp.ones(2), jnp.ones(3), jnp.eye(2))
    with pytest.raises(TypeError, match="vector: expected a floating-point array, got int32"):
        bilinear.raise_index(jnp.ones(2, jnp.int32), jnp.eye(2))
    with pytest.raises(ValueError, match="width: expected at least 1"):
        bilinear.scaled_metric(0)
