"""Latent attention is DeepSeek's, and what is read off its short cache is what the whole text gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import drawn_weights
from layer_oracle import assert_refused, build_drawn, compiled
from regard import masks
from regard.interop.weight_maps import parameter_paths
from regard.layers import LatentAttention
from regard.positions import Rotary

NAMES = {
    "query_latent": "q_a_proj", "query_norm": "q_a_layernorm", "latent": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm", "expansion": "kv_b_proj", "output_projection": "o_proj",
}  # fmt: skip

SIZES = {
    "latent_dim": "kv_lora_rank", "head_dim": "qk_nope_head_dim", "rotary_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}  # fmt: skip


@functools.cache
def read():
    return drawn_weights.read_reference("latent")


def build(rank, dtype):
    """The layer of the reference, filled with its tensors."""
    facts, _ = read()
    sizes = [facts["config"][name] for name in ("hidden_size", "num_attention_heads")]
    options = {ours: facts["config"][name] for ours, name in SIZES.items()}
    options |= {"query_latent_dim": rank, "rotary": Rotary(100.0, interleaved=True), "use_bias": True}
    layer = build_drawn(LatentAttention, *sizes, **options)
    drawn = drawn_weights.draw_all(facts["shapes"], "deepseek_v3")
    names = NAMES | {"query_projection": "q_b_proj" if rank else "q_proj"}
    for path, leaf in parameter_paths(layer).items():
        part, kind = path.split(".")
        value = drawn[f"{rank}.{names[part]}.{'bias' if kind == 'bias' else 'weight'}"]
        leaf.set_value(jnp.asarray(value.T, dtype))
    return layer


def build_small(**options):
    return build_drawn(LatentAttention, 24, 3, **{"latent_dim": 5, "head_dim": 4, "rotary_dim": 2, **options})


def test_it_is_that_of_torch_whole_and_through_its_cache(wide):
    """The first piece of a cache ends in padding; as a whole, tokens are told their places."""
    _, arrays = read()
    layer, truth = build(17, jnp.float64), arrays["output 17"]
    x = jnp.asarray(arrays["input hidden"], jnp.float64)
    exact = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12 * np.abs(truth).max())
    exact(compiled(layer, x, mask=masks.causal(), positions=jnp.arange(7, 20)), truth)
    cache = layer.start_cache(2, 13)
    assert cache.key.size + cache.value.size == 2 * 13 * (11 + 4)
    step = nnx.jit(lambda layer, x, cache, counts: layer(x, mask=masks.causal(), cache=cache, counts=counts))
    out, seen = step(layer, x[:, :7], cache, jnp.array([7, 5]))
    exact(out[0], truth[0, :7])
    exact(out[1, :5], truth[1, :5])
    out, _ = step(layer, jnp.stack([x[0, 7:], x[1, 5:11]]), seen["cache"], None)
    exact(out, np.stack([truth[0, 7:], truth[1, 5:11]]))


def test_queries_without_a_latent_vector_are_as_exact_as_those_of_torch():
    facts, arrays = read()
    out = compiled(build(None, jnp.float32), arrays["input hidden"], mask=masks.causal())
    truth = arrays["output None"]
    assert out.dtype == jnp.float32
    rounding = np.finfo(np.float32).eps * np.abs(truth).max()
    assert np.sqrt(np.mean((out - truth) ** 2)) < 2 * max(facts["errors"]["output None"], rounding)


def test_an_empty_cache_holds_what_the_layer_computes():
    """One example needs no batch."""
    layer = build_small(dtype=jnp.float32, param_dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):
        read = lambda: layer(jnp.ones((2, 1, 24)), cache=layer.start_cache(2, 3))[1]["cache"]
        assert jax.eval_shape(read).value.dtype == jnp.float32
        out, seen = jax.eval_shape(lambda: layer(jnp.ones((7, 24)), aux=("weights",)))
    assert (out.shape, seen["weights"].shape) == ((7, 24), (3, 7, 7))


def test_what_does_not_fit_is_refused():
    layer, x, ids = build_small(), jnp.ones((2, 1, 24)), jnp.zeros((3, 1), jnp.int32)
    cache, other = layer.start_cache(2, 3), build(17, jnp.float32).start_cache(2, 3)
    assert_refused(
        (lambda: layer(x[..., :5]), r"x: expected shape \(\*B, length, 24\)"),
        (lambda: layer(x[:1], cache=cache), r"expected x \(2, T, 24\)"),
        (lambda: layer(x, cache=cache, positions=jnp.array([1])), "without positions, got .* with positions"),
        (lambda: layer(x, cache=other), "cache: expected one key head of width 2 with values of 5"),
        (lambda: build_small(rotary_dim=3), "rotary_dim: expected an even number, as pairs are .*; got 3"),
        (lambda: build_small(rotary=Rotary(width=8)), r"rotary\.width: expected an even number in 2\.\.2,"),
        (lambda: layer(x, positions=ids), r"one integer per token, \(1,\) or \(2, 1\); got shape \(3, 1\)"),
    )
