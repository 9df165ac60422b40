"""Latent attention is DeepSeek's, and what is read off its short cache is what the whole text gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import drawn_weights
from economy import mostly_slow
from regard import masks
from regard.interop.weight_maps import parameter_paths
from regard.layers import LatentAttention
from regard.positions import Rotary

NAMES = {
    "query_latent": "q_a_proj",
    "query_norm": "q_a_layernorm",
    "latent": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "expansion": "kv_b_proj",
    "output_projection": "o_proj",
}


@functools.cache
def read():
    return drawn_weights.read_reference("latent")


def build(rank, dtype):
    """The layer of the reference, filled with its tensors."""
    facts, _ = read()
    sizes = facts["config"]
    layer = LatentAttention(
        sizes["hidden_size"],
        sizes["num_attention_heads"],
        latent_dim=sizes["kv_lora_rank"],
        head_dim=sizes["qk_nope_head_dim"],
        rotary_dim=sizes["qk_rope_head_dim"],
        value_dim=sizes["v_head_dim"],
        query_latent_dim=rank,
        rotary=Rotary(100.0, interleaved=True),
        use_bias=True,
        rngs=nnx.Rngs(0),
    )
    drawn = drawn_weights.draw_all(facts["shapes"], "deepseek_v3")
    names = NAMES | {"query_projection": "q_b_proj" if rank else "q_proj"}
    for path, leaf in parameter_paths(layer).items():
        part, kind = path.split(".")
        value = drawn[f"{rank}.{names[part]}.{'bias' if kind == 'bias' else 'weight'}"]
        leaf.set_value(jnp.asarray(value.T, dtype))
    return layer


@pytest.fixture
def wide(x64):
    with jax.numpy_dtype_promotion("standard"):
        yield


def run(layer, x, **options):
    return jax.jit(lambda x: layer(x, mask=masks.causal(), **options))(x)


@pytest.mark.parametrize("rank", mostly_slow([17, None], 17))
def test_it_is_that_of_torch_whole_and_through_its_cache(rank, wide):
    _, arrays = read()
    layer, truth = build(rank, jnp.float64), arrays[f"output {rank}"]
    x = jnp.asarray(arrays["input hidden"], jnp.float64)
    exact = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12 * np.abs(truth).max())
    exact(run(layer, x), truth)
    cache, found = layer.start_cache(2, 13), []
    assert cache.key.size + cache.value.size == 2 * 13 * (11 + 4)
    step = jax.jit(lambda x, cache: layer(x, mask=masks.causal(), cache=cache))
    for piece in (x[:, :11], x[:, 11:12], x[:, 12:]):
        out, seen = step(piece, cache)
        cache = seen["cache"]
        found.append(out)
    exact(jnp.concatenate(found, axis=1), truth)


@pytest.mark.slow
def test_float32_is_as_exact_as_torch():
    facts, arrays = read()
    out, truth = run(build(17, jnp.float32), arrays["input hidden"]), arrays["output 17"]
    assert out.dtype == jnp.float32
    rounding = np.finfo(np.float32).eps * np.abs(truth).max()
    assert np.sqrt(np.mean((out - truth) ** 2)) < 2 * max(facts["errors"]["output 17"], rounding)


@pytest.mark.slow
def test_padding_in_a_cache_and_positions_are_those_of_each_row(wide):
    """Gradients too: through the cache they are those of keys and values that were made."""
    _, arrays = read()
    layer = build(17, jnp.float64)
    x = jnp.asarray(arrays["input hidden"], jnp.float64)[:, :5]
    counts, places = jnp.array([5, 3]), jnp.array([7, 8, 9, 10, 11])

    @jax.jit
    def differentiate(x):
        def through_cache(x):
            cache = layer.start_cache(2, 5)
            return layer(x, mask=masks.causal(), cache=cache, counts=counts)[0] * keep

        keep = (jnp.arange(5)[None] < counts[:, None])[..., None]
        whole = lambda x: layer(x, mask=masks.causal(), positions=places) * keep
        return [jax.value_and_grad(lambda x, f=f: jnp.sin(f(x)).sum())(x) for f in (through_cache, whole)]

    (one, one_slope), (other, other_slope) = differentiate(x)
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    np.testing.assert_allclose(one_slope, other_slope, rtol=0, atol=1e-12)


def test_an_empty_cache_holds_what_the_layer_computes():
    shared = {"dtype": jnp.float32, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    layer = LatentAttention(6, 3, latent_dim=5, head_dim=4, rotary_dim=2, **shared)
    with jax.numpy_dtype_promotion("standard"):
        _, seen = layer(jnp.ones((2, 1, 6)), cache=layer.start_cache(2, 3))
    assert seen["cache"].value.dtype == jnp.float32


@pytest.mark.slow
def test_one_example_and_its_statistics():
    layer = LatentAttention(6, 3, latent_dim=5, head_dim=4, rotary_dim=2, rngs=nnx.Rngs(0))
    x = drawn_weights.uniform("one", (7, 6))
    out, seen = run(layer, x, aux=("weights",))
    assert (out.shape, seen["weights"].shape) == ((7, 6), (3, 7, 7))
    np.testing.assert_allclose(seen["weights"].sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda layer: layer(jnp.ones((2, 3, 5))), r"x: expected shape \(\*B, length, 24\)"),
        (
            lambda layer: layer(jnp.ones((3, 1, 24)), cache=layer.start_cache(2, 3)),
            r"expected x \(2, T, 24\)",
        ),
        (
            lambda layer: layer(
                jnp.ones((2, 1, 24)), cache=layer.start_cache(2, 3), positions=jnp.array([1])
            ),
            "without positions, got .* with positions",
        ),
        (
            lambda layer: layer(jnp.ones((2, 1, 24)), cache=build(17, jnp.float32).start_cache(2, 3)),
            "cache: expected one key head of width 2 with values of 5",
        ),
        (
            lambda layer: LatentAttention(6, 3, latent_dim=5, head_dim=4, rotary_dim=3, rngs=nnx.Rngs(0)),
            "rotary_dim: expected an even number, as pairs are turned; got 3",
        ),
        (
            lambda layer: LatentAttention(
                6, 3, latent_dim=5, head_dim=8, rotary_dim=4, rotary=Rotary(width=8), rngs=nnx.Rngs(0)
            ),
            r"rotary\.width: expected an even number in 2\.\.4, the features there are; got 8",
        ),
        (
            lambda layer: layer(jnp.ones((2, 3, 24)), positions=jnp.zeros((3, 3), jnp.int32)),
            r"positions: expected one integer per token, \(3,\) or \(2, 3\); got shape \(3, 3\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    layer = LatentAttention(24, 3, latent_dim=5, head_dim=4, rotary_dim=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        call(layer)
