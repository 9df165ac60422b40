"""What is read off the short cache of latent attention is what the whole gives; parity tests check that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from layer_oracle import build_drawn, compiled, draw, widen
from refusals import assert_refused
from regard import KVCache, masks
from regard.layers import EncoderBlock, LatentAttention
from regard.positions import Rotary


def build_small(**options):
    return build_drawn(LatentAttention, 24, 3, **{"latent_dim": 5, "head_dim": 4, "rotary_dim": 2, **options})


@pytest.mark.parametrize("indexer", [{}, {"index_count": 4, "index_heads": 19, "index_dim": 3}])
def test_it_is_the_same_whole_and_through_its_cache(indexer, wide):
    """The first piece of a cache ends in padding; as a whole, tokens are told their places."""
    layer = widen(build_small(query_latent_dim=7, value_dim=3, **indexer))
    x = jnp.asarray(draw(0, 2, 13, 24), jnp.float64)
    truth = compiled(layer, x, mask=masks.causal())
    exact = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12 * np.abs(truth).max())
    exact(compiled(layer, x, mask=masks.causal(), positions=jnp.arange(7, 20)), truth)
    cache = layer.start_cache(2, 13)
    assert cache.key.size + cache.value.size == 2 * 13 * (5 + 2 + indexer.get("index_dim", 0))
    step = nnx.jit(lambda layer, x, cache, counts: layer(x, mask=masks.causal(), cache=cache, counts=counts))
    out, seen = step(layer, x[:, :7], cache, jnp.array([7, 5]))
    exact(out[0], truth[0, :7])
    exact(out[1, :5], truth[1, :5])
    out, _ = step(layer, jnp.stack([x[0, 7:], x[1, 5:11]]), seen["cache"], None)
    exact(out, np.stack([truth[0, 7:], truth[1, 5:11]]))


def test_an_empty_cache_holds_what_the_layer_computes():
    """One example needs no batch."""
    layer = build_small(dtype=jnp.float32, param_dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        read = lambda: layer(jnp.ones((2, 1, 24)), cache=layer.start_cache(2, 3))[1]["cache"]
        assert jax.eval_shape(read).value.dtype == jnp.float32
        out, seen = jax.eval_shape(lambda: layer(jnp.ones((7, 24)), aux=("weights",)))
    assert (out.shape, seen["weights"].shape) == ((7, 24), (3, 7, 7))


def test_an_indexer_takes_symbolic_sizes():
    x = jax.ShapeDtypeStruct((*export.symbolic_shape("batch, length"), 24), np.float32)
    layer = build_small(index_count=4, index_heads=19, index_dim=3)
    assert jax.eval_shape(functools.partial(layer, mask=masks.causal()), x).shape == x.shape


def test_what_does_not_fit_is_refused():
    layer, x, ids = build_small(), jnp.ones((2, 1, 24)), jnp.zeros((3, 1), jnp.int32)
    cache, other = layer.start_cache(2, 3), build_small(latent_dim=7).start_cache(2, 3)
    chooser = build_small(index_count=4, index_heads=9, index_dim=3)
    windowed = KVCache.create(2, 1, 9, *chooser.cache_widths, window=3)
    sizes = {"latent_dim": 5, "head_dim": 4, "rotary_dim": 2}
    block = nnx.eval_shape(lambda: EncoderBlock(24, 3, 7, attention=sizes, rngs=nnx.Rngs(0)))
    assert_refused(
        (lambda: layer(x[..., :5]), r"x: expected shape \(\*B, length, 24\)"),
        (lambda: layer(x[:1], cache=cache), r"expected x \(2, T, 24\)"),
        (lambda: layer(x, cache=cache, positions=jnp.array([1])), "without positions, got .* with positions"),
        (lambda: layer(x, cache=other), "cache: expected one key head of width 2 with values of 5"),
        (lambda: build_small(rotary_dim=3), "rotary_dim: expected an even number, as pairs are .*; got 3"),
        (lambda: build_small(index_count=3), "index_count: .* all of index_count, index_heads, index_dim"),
        (lambda: build_small(rotary=Rotary(width=8)), r"rotary\.width: expected an even number in 2\.\.2,"),
        (lambda: chooser.start_cache(2, 9, window=3), "window: expected None with an indexer"),
        (lambda: chooser(x, cache=windowed), "window: expected None with an indexer"),
        (lambda: block(x, query_offset=3), "query_offset: expected None with latent_dim, got 3"),
        (lambda: layer(x, positions=ids), r"one integer per token, \(1,\) or \(2, 1\); got shape \(3, 1\)"),
    )
