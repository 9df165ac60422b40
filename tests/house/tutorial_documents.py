"""How the five documents retold in docs/tutorials draw their inputs, so that their numbers can be had again.

Random numbers are JAX's own; every draw below follows a document's order of splits, at the default width:
float32, or float64 inside `jax.enable_x64(True)`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from regard.layers import EncoderBlock, FeedForward, MultiHeadAttention

PROJECTIONS = ("query_projection", "key_projection", "value_projection", "output_projection")


def default_float():
    return jnp.zeros(()).dtype


def draw(seed, *shape):
    """Numbers of no document."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def draw_normal(rng, shape, fan):
    """Deviation sqrt(2 / fan): Glorot's where fan = fan_in + fan_out; the tired cat has its own idea."""
    return jax.random.normal(rng, shape) * math.sqrt(2 / fan)


def draw_uniform(rng, shape):
    """Glorot's uniform numbers."""
    limit = math.sqrt(6 / sum(shape))
    return jax.random.uniform(rng, shape, minval=-limit, maxval=limit)


def load_attention(layer, kernels):
    for name, kernel in zip(PROJECTIONS, kernels, strict=True):
        getattr(layer, name).kernel[...] = kernel
    return layer


def load_feed_forward(layer, widen, narrow):
    layer.widen.kernel[...], layer.narrow.kernel[...] = widen, narrow
    return layer


def load_block(kernels, widen, narrow, **settings):
    """A post-norm block; no biases in its attention."""
    (d_model, d_ff), more = widen.shape, {"norm": "post", "attention": {"use_bias": False}}
    block = EncoderBlock(d_model, d_ff=d_ff, rngs=nnx.Rngs(0), **more, **settings)
    load_attention(block.attention, kernels)
    load_feed_forward(block.feed_forward, widen, narrow)
    return block


def build_tired_cat_block(rng, d_model, num_heads, d_ff):
    """Post-norm, relu; attention kernels from a fan of d_model + head_dim, which is not Glorot's."""
    attention, widen, narrow = jax.random.split(rng, 3)
    shape, fan = (d_model, d_model), d_model + d_model // num_heads
    return load_block(
        [draw_normal(rng, shape, fan) for rng in jax.random.split(attention, 4)],
        draw_normal(widen, (d_model, d_ff), d_model + d_ff),
        draw_normal(narrow, (d_ff, d_model), d_model + d_ff),
        num_heads=num_heads,
        feed_forward={"activation": "relu"},
    )


def draw_from_scratch_kernels(rng, d_model):
    return [draw_uniform(rng, (d_model, d_model)) for rng in jax.random.split(rng, 4)]


def draw_from_scratch_branch(rng, d_model, d_ff):
    widen, narrow = jax.random.split(rng)
    return draw_uniform(widen, (d_model, d_ff)), draw_uniform(narrow, (d_ff, d_model))


def build_from_scratch_attention(rng, d_model, num_heads):
    settings = {"use_bias": False, "param_dtype": default_float()}
    layer = MultiHeadAttention(d_model, num_heads, rngs=nnx.Rngs(0), **settings)
    return load_attention(layer, draw_from_scratch_kernels(rng, d_model))


def build_from_scratch_feed_forward(rng, d_model, d_ff):
    layer = FeedForward(d_model, d_ff, param_dtype=default_float(), rngs=nnx.Rngs(0))
    return load_feed_forward(layer, *draw_from_scratch_branch(rng, d_model, d_ff))


def build_from_scratch_block(rng, d_model, num_heads, d_ff):
    """Post-norm, whatever the document calls it, with the tanh GELU."""
    attention, branch = jax.random.split(rng)
    return load_block(
        draw_from_scratch_kernels(attention, d_model),
        *draw_from_scratch_branch(branch, d_model, d_ff),
        num_heads=num_heads,
        param_dtype=default_float(),
    )


def assert_golden(actual, golden, tolerance=2e-6):
    """Equal to printed digits, relative to the largest of them or 1."""
    golden = np.asarray(golden, np.float64)
    scale = max(1.0, float(np.abs(golden).max()))
    np.testing.assert_allclose(np.asarray(actual, np.float64), golden, rtol=0, atol=tolerance * scale)
