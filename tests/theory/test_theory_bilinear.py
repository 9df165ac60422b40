"""Metrics measure; their checks say why a matrix is none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oracle import close
from refusals import assert_refused
from regard.theory import bilinear


def test_metrics_are_those_computed_by_hand(x64):
    np.testing.assert_array_equal(bilinear.euclidean_metric(3), np.eye(3))
    np.testing.assert_array_equal(bilinear.scaled_metric(16), np.eye(16) / 4)
    np.testing.assert_array_equal(bilinear.scaled_metric(3, 2.0), 2 * np.eye(3))
    diagonal = bilinear.diagonal_metric(np.array([[1.0, 2.0], [3.0, 5.0]]))
    np.testing.assert_array_equal(diagonal, [np.diag([1, 2]), np.diag([3, 5])])
    assert bilinear.scaled_metric(3, dtype=jnp.float32).dtype == jnp.float32


def test_raising_undoes_lowering(x64):
    """Also where a matrix is not symmetric, which side an index is of matters."""
    rng = np.random.default_rng(3)
    weight, metric = rng.normal(size=(2, 7, 5)), rng.normal(size=(2, 5, 5))
    vectors, others = rng.normal(size=(2, 5)), rng.normal(size=(3, 1, 5))

    @jax.jit
    def compute(weight, metric, vectors, others):
        lowered = bilinear.lower_index(vectors, metric)
        pairs = bilinear.bilinear_form(others, vectors, metric)
        inverse = bilinear.inverse_metric(metric)
        return bilinear.learned_metric(weight), lowered, bilinear.raise_index(lowered, metric), pairs, inverse

    learned, lowered, raised, pairs, inverse = compute(weight, metric, vectors, others)
    close(learned, weight.transpose(0, 2, 1) @ weight)
    close(lowered, np.einsum("nab,nb->na", metric, vectors))
    close(raised, vectors, 1e-9)
    close(pairs, np.einsum("ca,nab,nb->cn", others[:, 0], metric, vectors))
    close(inverse, np.linalg.inv(metric), 1e-9)


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
    report = jax.jit(bilinear.check_metric)(np.asarray(matrix))
    assert verdict in str(report)
    assert bool(report.is_metric) == (verdict == "a metric")


def test_a_map_that_loses_a_direction_is_no_metric():
    # A smallest eigenvalue of exactly 0 comes out as rounding of either sign.
    weights = np.random.default_rng(0).normal(size=(7, 2, 5)).astype(np.float32)
    report = jax.jit(lambda weights: bilinear.check_metric(bilinear.learned_metric(weights)))(weights)
    assert not np.any(report.positive_definite)
    assert str(report) == "0 of 7 are metrics"


def test_errors_are_explained():
    x = (ones := lambda *shape: np.ones(shape, np.float32))(2, 2)
    wrong = {
        r"metric: expected a square matrix .* got shape \(2, 3\)": lambda: bilinear.check_metric(ones(2, 3)),
        r"metric: expected \(3, 3\).*got shape \(2, 2\)": lambda: bilinear.raise_index(ones(3), ones(2, 2)),
        "vector: expected a floating-point array": lambda: bilinear.raise_index(np.arange(2), ones(2, 2)),
        r"metric: .* that broadcast, got \(2,\), \(3,\)": lambda: bilinear.raise_index(x, ones(3, 2, 2)),
        "width: expected an integer of at least 1": lambda: bilinear.scaled_metric(0),
        "dtype: expected a floating-point dtype": lambda: bilinear.scaled_metric(2, dtype=np.int32),
        r"scale: expected one number, got shape \(2,\)": lambda: bilinear.scaled_metric(2, ones(2)),
        "tolerance: expected a number known": lambda: bilinear.check_metric(ones(2, 2), tolerance="a"),
    }
    assert_refused(*((call, message) for message, call in wrong.items()), error=(TypeError, ValueError))
