"""Small models, and tokens for them."""

import functools

import jax.numpy as jnp
from flax import nnx

from regard.models import Decoder, TransformerConfig

SIZES = {"d_model": 12, "num_heads": 3, "d_ff": 11, "num_layers": 2, "vocab_size": 13}
X = jnp.array([[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]])


@functools.cache
def build(kind=Decoder, **options):
    """One model, in evaluation mode, for all tests that ask alike and leave it as it is."""
    model = kind(TransformerConfig(**{**SIZES, **options}), rngs=nnx.Rngs(0))
    model.eval()
    return model
