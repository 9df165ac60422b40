"""regard.interop.flax inside Flax's own layers: the same parameters, with and without it."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import oracle
from layer_oracle import build_drawn
from regard import masks
from regard.interop.flax import attention_fn

pytestmark = pytest.mark.usefixtures("loose")

B, T, S, H, D, M = 2, 5, 11, 3, 7, 21
OURS = {"attention_fn": attention_fn}


def draw(*shapes, dtype=np.float32, seed=4):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def nnx_pair(**settings):
    """Flax's layer as it is, and the same with the one argument switched."""
    settings = {"num_heads": H, "in_features": M, "decode": False, **settings}
    return [build_drawn(nnx.MultiHeadAttention, **settings, **own) for own in ({}, OURS)]


def linen_pair(x, **settings):
    """Such a pair, and variables for both."""
    pair = [linen.MultiHeadAttention(num_heads=H, **settings, **own) for own in ({}, OURS)]
    shapes, rng = jax.eval_shape(pair[0].init, jax.random.key(1), x), np.random.default_rng(2)
    fill = lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), leaf.dtype)
    return pair, {**jax.tree.map(jnp.zeros_like, shapes), "params": jax.tree.map(fill, shapes["params"])}


def call_both(call, pair):
    """What a call gives for each layer of a pair, as one program."""
    return nnx.jit(lambda theirs, ours: (call(theirs), call(ours)))(*pair)


def close(ours, theirs, atol=3e-6):
    def compare(one, other):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (one, other)), rtol=1e-5, atol=atol)

    jax.tree.map(compare, ours, theirs)


TOKENS = np.array([[4, 2, 9, 0, 0], [1, 2, 3, 4, 5]])
CAUSAL = nnx.make_causal_mask(TOKENS)
PADDING = nnx.make_attention_mask(TOKENS >= 0, TOKENS > 0)
COMBINED = nnx.combine_masks(CAUSAL, PADDING)
KINDS = COMBINED, PADDING.astype(bool), linen.make_causal_mask(TOKENS, dtype=jnp.int32)
OWN = masks.causal() & masks.valid_keys(TOKENS > 0)


def test_it_takes_all_that_flax_passes():
    ours = inspect.signature(attention_fn).parameters
    for theirs in (nnx.dot_product_attention, linen.dot_product_attention):
        expected = inspect.signature(theirs).parameters
        assert set(expected) <= set(ours)
        assert all(ours[name].default == expected[name].default for name in expected)
    assert list(inspect.signature(nnx.dot_product_attention).parameters) == list(ours)[:14]


def test_nnx_gives_the_same_under_the_masks_flax_makes():
    """Grouped heads, batches by vmap; and causal counts from the top left, where memories are longer."""
    x, memory = draw((B, T, M), (B, S, M))
    several = jnp.stack([COMBINED, COMBINED, jnp.ones_like(COMBINED)])

    def call(layer):
        one_by_one = jax.vmap(lambda mask: layer(x, mask=mask))(several)
        causal = layer(x, is_causal=True), layer(x, memory, is_causal=True)
        return [layer(x, mask=mask) for mask in KINDS], one_by_one, causal

    theirs, ours = call_both(call, nnx_pair(num_kv_heads=1))
    close(ours, theirs, atol=2e-5)


def test_masks_of_regard_and_padding_with_is_causal_serve():
    """Flax 0.12 raises a broadcasting error for its mask of padding with is_causal."""
    (x,) = draw((B, T, M))
    theirs, ours = nnx_pair()
    keys = (PADDING[:, :, :1] > 0).astype(jnp.float32)  # one row per example
    with pytest.raises(ValueError, match="broadcast"):
        nnx.eval_shape(lambda layer: layer(x, mask=keys, is_causal=True, sow_weights=True), theirs)

    @nnx.jit
    def call(ours):
        given = ({"mask": OWN}, {"mask": PADDING, "is_causal": True}, {"mask": keys, "is_causal": True})
        # Row data of one example is not data per head.
        one = ours(x[:1], mask=masks.causal() & masks.lengths(np.array([3])))
        return [ours(x, **options) for options in given], one

    whole, one = call(ours)
    expected = nnx.jit(lambda layer: layer(x, mask=COMBINED))(theirs)
    close(whole, [expected] * 3, atol=2e-5)
    close(one, expected[:1], atol=2e-5)


def test_direct_calls_promote_and_take_a_bias_and_a_precision():
    """Values may be wider, though Flax's fast path fails there; strict promotion is no hindrance."""
    query, key, value, bias = draw((B, T, H, D), (B, S, H, D), (B, S, H, 2 * D), (1, H, T, S))
    found = jax.jit(attention_fn)(query, key, value, bias)
    swap = lambda x: np.swapaxes(np.asarray(x, np.float64), -3, -2)
    truth = oracle.batched(swap(query), swap(key), swap(value), bias=bias).output
    np.testing.assert_allclose(swap(found), truth, atol=1e-6)
    one = jax.jit(attention_fn)(query[0], key[0], value[0], bias[0])
    np.testing.assert_allclose(swap(one), truth[0], atol=1e-6)
    promote = lambda: attention_fn(query, jnp.asarray(key, jnp.bfloat16), value, precision="highest")
    assert jax.eval_shape(promote).dtype == jnp.float32
    assert jax.eval_shape(lambda: attention_fn(query, key, value, dtype=jnp.bfloat16)).dtype == jnp.bfloat16
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        arrays = [jnp.asarray(array, jnp.bfloat16) for array in (query, key, value)]
        run = lambda mask: attention_fn(*arrays, None, mask, dropout_rng=jax.random.key(0), dropout_rate=0.5)
        keep = np.ones((B, 1, T, S), np.float32)
        assert jax.eval_shape(run, keep).dtype == jax.eval_shape(run, keep > 0).dtype == jnp.bfloat16


def test_nnx_decodes_a_token_at_a_time_as_in_one_pass():
    (x,) = draw((B, T, M))
    theirs, ours = nnx_pair(decode=True, num_kv_heads=1)
    whole = nnx.jit(lambda layer: layer(x, mask=CAUSAL, decode=False))(ours)
    step = nnx.jit(lambda layer, token: layer(token))
    for layer in (theirs, ours):
        layer.init_cache(x.shape)
    for t in range(T):
        out = step(ours, x[:, t : t + 1])
        close(out, step(theirs, x[:, t : t + 1]), atol=2e-5)
        close(out[:, 0], whole[:, t], atol=2e-5)


@nnx.jit
def look(layer, x, mask):
    """The output and the weights that were sown, once."""
    out, sown = nnx.capture(lambda layer: layer(x, sow_weights=True, mask=mask), nnx.Intermediate)(layer)
    (weights,) = sown["attention_weights"].get_value()
    return out, weights


@pytest.mark.slow
def test_nnx_sows_the_weights_of_flax():
    """Of one example, too; those of empty rows are zero, and dropout comes after."""
    (x,), mask = draw((B, T, M)), np.asarray(COMBINED)
    theirs, ours = (look(layer, x, mask) for layer in nnx_pair())
    assert ours[1].shape == (B, H, T, T)
    close(ours, theirs, atol=2e-5)
    # A row of dropped weights would not add up to 1.
    empty, single = np.arange(T)[:, None] != np.full(T, 1), {"deterministic": False, "use_bias": False}
    out, weights = look(nnx_pair(dropout_rate=0.5, **single)[1], x[0], empty[None])
    assert weights.shape == (H, T, T)
    assert not np.asarray(out[1]).any()
    np.testing.assert_allclose(weights.sum(-1), np.broadcast_to(np.arange(T) != 1, (H, T)), atol=1e-6)


def test_linen_sows_the_weights_of_flax():
    """In the dtype of the layer, or in float32 where that is asked for."""
    (x,) = draw((B, T, M))
    options = {"mask": COMBINED, "sow_weights": True, "mutable": ["intermediates"]}
    for force, run in ((False, jax.eval_shape), (True, lambda sow, variables: jax.jit(sow)(variables))):
        pair, variables = linen_pair(x, dtype=jnp.bfloat16, force_fp32_for_softmax=force)
        sow = lambda variables: [layer.apply(variables, x, **options) for layer in pair]  # noqa: B023
        (_, theirs), (out, ours) = run(sow, variables)
        (found,), (expected,) = (sown["intermediates"]["attention_weights"] for sown in (ours, theirs))
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert out.dtype == jnp.bfloat16
    close(found, expected, atol=0.02)


def test_dropout_follows_the_stream_of_the_layer_and_is_off_in_evaluation():
    (x,), run = draw((B, T, M)), nnx.jit(lambda layer: layer(x))
    layer, again = (nnx_pair(dropout_rate=0.4, deterministic=False)[1] for _ in range(2))
    out = run(layer)
    np.testing.assert_array_equal(out, run(again))
    assert not np.array_equal(out, run(again)), "the stream goes on"
    quiet = nnx.jit(lambda layer: layer(x, deterministic=True))
    np.testing.assert_array_equal(quiet(layer), quiet(nnx_pair(dropout_rate=0.4, deterministic=False)[1]))


def test_an_additive_mask_is_not_read_as_a_mask():
    """Flax reads -inf as True and 0 as False: the inverse of what was meant."""
    query, key, value = draw((B, T, H, D), (B, S, H, D), (B, S, H, D))
    additive = np.where(np.arange(S) < 4, 0.0, -1e9).astype(np.float32)[None, None, None]
    with pytest.raises(ValueError, match=r"mask: expected 0 and 1.*additive == 0"):
        jax.eval_shape(lambda q: attention_fn(q, key, value, mask=additive), query)

    @jax.jit
    def traced(mask):
        grad = jax.grad(lambda mask: attention_fn(query, key, value, mask=mask).sum())(mask)
        return attention_fn(query, key, value, mask=mask), grad

    assert np.isnan(traced(additive)[0]).all()
    out, grad = traced((additive == 0).astype(np.float32))
    np.testing.assert_allclose(out, attention_fn(query, key, value, bias=additive), atol=1e-6)
    assert not np.asarray(grad).any()


def test_an_einsum_of_the_layers_own_is_refused():
    """Flax drops, without a word, what an attention_fn does not name."""
    make = lambda: jnp.einsum
    options = {"qk_attn_weights_einsum_cls": make, "attn_weights_value_einsum_cls": make}
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum: expected None"):
        linen_pair(*draw((B, T, M)), **options)[0][1].init(jax.random.key(0), *draw((B, T, M)))
