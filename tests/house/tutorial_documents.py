"""How the documents retold in docs/tutorials draw their inputs, so that their numbers can be had again.

Random numbers are JAX's own; every draw below follows a document's order of splits, at the default width:
float32, or float64 inside `jax.enable_x64(True)`.
"""

import math

import jax
import numpy as np

PROJECTIONS = ("query_projection", "key_projection", "value_projection", "output_projection")


def draw(seed, *shape):
    """Numbers of no document."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def draw_uniform(rng, shape):
    """Glorot's uniform numbers."""
    limit = math.sqrt(6 / sum(shape))
    return jax.random.uniform(rng, shape, minval=-limit, maxval=limit)


def assert_golden(actual, golden, tolerance=2e-6):
    """Equal to printed digits, relative to the largest of them or 1."""
    golden = np.asarray(golden, np.float64)
    scale = max(1.0, float(np.abs(golden).max()))
    np.testing.assert_allclose(np.asarray(actual, np.float64), golden, rtol=0, atol=tolerance * scale)
