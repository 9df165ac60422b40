"""How the documents retold in docs/tutorials draw their inputs, so that their numbers can be had again.

Random numbers are JAX's own; every draw below follows a document's order of splits, at the default width:
float32, or float64 inside `jax.enable_x64(True)`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.layers import EncoderBlock

PROJECTIONS = ("query_projection", "key_projection", "value_projection", "output_projection")


def default_float():
    return jnp.zeros(()).dtype


def draw(seed, *shape):
    """Numbers of no document."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def draw_uniform(rng, shape):
    """Glorot's uniform numbers."""
    limit = math.sqrt(6 / sum(shape))
    return jax.random.uniform(rng, shape, minval=-limit, maxval=limit)


def build_from_scratch_block(rng, d_model, num_heads, d_ff):
    """Post-norm, whatever the document calls it, with the tanh GELU; no biases in its attention."""
    options = {"norm": "post", "attention": {"use_bias": False}, "param_dtype": default_float()}
    block = EncoderBlock(d_model, num_heads, d_ff, rngs=nnx.Rngs(0), **options)
    attention, branch = jax.random.split(rng)
    for name, key in zip(PROJECTIONS, jax.random.split(attention, 4), strict=True):
        getattr(block.attention, name).kernel[...] = draw_uniform(key, (d_model, d_model))
    widen, narrow = jax.random.split(branch)
    block.feed_forward.widen.kernel[...] = draw_uniform(widen, (d_model, d_ff))
    block.feed_forward.narrow.kernel[...] = draw_uniform(narrow, (d_ff, d_model))
    return block


def assert_golden(actual, golden, tolerance=2e-6):
    """Equal to printed digits, relative to the largest of them or 1."""
    golden = np.asarray(golden, np.float64)
    scale = max(1.0, float(np.abs(golden).max()))
    np.testing.assert_allclose(np.asarray(actual, np.float64), golden, rtol=0, atol=tolerance * scale)
