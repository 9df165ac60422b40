"""regard.interop.flax inside Flax's own layers: the same parameters, with and without it."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import oracle
from regard import masks
from regard.interop.flax import attention_fn


@pytest.fixture(autouse=True)
def _loose():
    """Flax itself promotes ranks and dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


B, T, S, H, D, M = 2, 5, 11, 3, 7, 21
SETTINGS = {"num_heads": H, "in_features": M, "decode": False}


def draw(*shapes, dtype=jnp.float32, seed=4):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape)).astype(dtype) for shape in shapes]


def nnx_pair(**settings):
    """Flax's layer as it is, and the same with the one argument switched."""
    settings = {**SETTINGS, **settings}
    return (
        nnx.MultiHeadAttention(**settings, rngs=nnx.Rngs(0)),
        nnx.MultiHeadAttention(**settings, attention_fn=attention_fn, rngs=nnx.Rngs(0)),
    )


def linen_pair(kind=linen.MultiHeadDotProductAttention, **settings):
    return kind(num_heads=H, **settings), kind(num_heads=H, attention_fn=attention_fn, **settings)


def look(layer, x, **kwargs):
    """The output and the weights that were sown, once."""
    run = nnx.capture(lambda layer: layer(x, sow_weights=True, **kwargs), nnx.Intermediate)
    out, sown = run(layer)
    (weights,) = sown["attention_weights"].get_value()
    return out, weights


def close(ours, theirs, atol=3e-6):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (ours, theirs)), atol=atol)


def test_it_takes_all_that_flax_passes():
    ours = inspect.signature(attention_fn).parameters
    for theirs in (nnx.dot_product_attention, linen.dot_product_attention):
        expected = inspect.signature(theirs).parameters
        assert set(expected) <= set(ours)
        assert all(ours[name].default == expected[name].default for name in expected)
    assert list(inspect.signature(nnx.dot_product_attention).parameters) == list(ours)[:14]


@pytest.mark.slow
def test_the_example_of_nnx_gives_the_same_with_attention_fn():
    """From the docstring of nnx.MultiHeadAttention, with attention_fn."""
    layer = nnx.MultiHeadAttention(
        num_heads=8,
        in_features=5,
        qkv_features=16,
        decode=False,
        rngs=nnx.Rngs(0),
        attention_fn=attention_fn,
    )
    theirs = nnx.MultiHeadAttention(
        num_heads=8, in_features=5, qkv_features=16, decode=False, rngs=nnx.Rngs(0)
    )
    key1, key2, key3 = jax.random.split(jax.random.key(0), 3)
    shape = (4, 3, 2, 5)
    q, k, v = (jax.random.uniform(key, shape) for key in (key1, key2, key3))
    close(layer(q, k, v), theirs(q, k, v))
    assert (layer(q, k) == layer(q, k, k)).all()
    assert (layer(q) == layer(q, q)).all()
    assert (layer(q) == layer(q, q, q)).all()


def test_the_example_of_nnx_init_cache_gives_the_same_with_attention_fn():
    x = jnp.ones((5, 1, 3))
    settings = {"num_heads": 2, "in_features": 3, "qkv_features": 6, "out_features": 6, "decode": True}
    theirs, ours = nnx_pair(**settings)
    for layer in (theirs, ours):
        layer.init_cache(x.shape)
    close(ours(x), theirs(x))


@pytest.mark.slow
def test_the_example_of_linen_gives_the_same_with_attention_fn():
    """From the docstring of linen.MultiHeadDotProductAttention, with attention_fn."""
    layer = linen.MultiHeadDotProductAttention(num_heads=8, qkv_features=16, attention_fn=attention_fn)
    theirs = linen.MultiHeadDotProductAttention(num_heads=8, qkv_features=16)
    key1, key2, key3, key4, key5, key6 = jax.random.split(jax.random.key(0), 6)
    shape = (4, 3, 2, 5)
    q, k, v = (jax.random.uniform(key, shape) for key in (key1, key2, key3))
    variables = layer.init(jax.random.key(0), q)
    close(layer.apply(variables, q, k, v), theirs.apply(variables, q, k, v))
    close(layer.apply(variables, q, k), theirs.apply(variables, q, k))
    close(layer.apply(variables, q), theirs.apply(variables, q))

    attention_kwargs = {
        "num_heads": 8,
        "qkv_features": 16,
        "kernel_init": linen.initializers.ones,
        "bias_init": linen.initializers.zeros,
        "dropout_rate": 0.5,
        "deterministic": False,
        "attention_fn": attention_fn,
    }

    class Module(linen.Module):
        attention_kwargs: dict

        @linen.compact
        def __call__(self, x, dropout_rng=None):
            return tuple(
                linen.MultiHeadDotProductAttention(**self.attention_kwargs)(x, dropout_rng=dropout_rng)
                for _ in range(2)
            )

    module = Module(attention_kwargs)
    variables = module.init({"params": key1, "dropout": key2}, q)
    same = lambda a, b: np.array_equal(a, b)
    out1, out2 = module.apply(variables, q, rngs={"dropout": key3})
    assert not same(out1, out2)
    out3, out4 = module.apply(variables, q, rngs={"dropout": key4})
    assert not same(out3, out4)
    assert not same(out1, out3)
    assert not same(out2, out4)
    out1, out2 = module.apply(variables, q, dropout_rng=key5)
    assert same(out1, out2)
    out3, out4 = module.apply(variables, q, rngs={"dropout": key6}, dropout_rng=key5)
    assert same(out1, out3)
    assert same(out2, out4)


def masks_of(kind, length=T):
    tokens = jnp.array([[4, 2, 9, 0, 0], [1, 2, 3, 4, 5]])[:, :length]
    causal = nnx.make_causal_mask(tokens)
    padding = nnx.make_attention_mask(tokens >= 0, tokens > 0)
    return {
        "none": None,
        "causal": causal,
        "padding": padding,
        "combined": nnx.combine_masks(causal, padding),
        "boolean": padding.astype(bool),
        "integer": linen.make_causal_mask(tokens, dtype=jnp.int32),
    }[kind]


KINDS = ("none", "causal", "padding", "combined", "boolean", "integer")


@pytest.mark.parametrize("kind", KINDS)
def test_nnx_gives_the_same_under_the_masks_flax_makes(kind):
    theirs, ours = nnx_pair(num_kv_heads=1 if kind == "padding" else H)
    (x,) = draw((B, T, M))
    mask = masks_of(kind)
    close(ours(x, mask=mask), theirs(x, mask=mask))
    close(nnx.jit(lambda layer, x, mask: layer(x, mask=mask))(ours, x, mask), theirs(x, mask=mask))


@pytest.mark.parametrize("kind", KINDS)
def test_linen_gives_the_same_under_the_masks_flax_makes(kind):
    theirs, ours = linen_pair(
        linen.MultiHeadAttention if kind == "causal" else linen.MultiHeadDotProductAttention
    )
    (x,) = draw((B, T, M))
    mask = masks_of(kind)
    variables = theirs.init(jax.random.key(1), x)
    close(ours.apply(variables, x, mask=mask), theirs.apply(variables, x, mask=mask))
    close(
        jax.jit(functools.partial(ours.apply))(variables, x, mask=mask), theirs.apply(variables, x, mask=mask)
    )


@pytest.mark.slow
def test_gradients_of_parameters_and_inputs_are_those_of_flax():
    pair, (x,) = nnx_pair(), draw((B, T, M))
    mask = masks_of("combined")
    loss = lambda layer, x: jnp.sum(jnp.sin(layer(x, mask=mask)))
    theirs, ours = (nnx.grad(loss, argnums=(0, 1))(layer, x) for layer in pair)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        close(a, b, atol=2e-5)


def test_vmap_over_a_layer_gives_the_same():
    theirs, ours = nnx_pair()
    x = draw((3, B, T, M))[0]
    mask = masks_of("combined")
    mask = jnp.stack([mask, mask, jnp.ones_like(mask)])
    run = lambda layer: jax.vmap(lambda x, mask: layer(x, mask=mask))(x, mask)
    close(run(ours), run(theirs))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_dtype_of_the_layer_is_followed(dtype):
    (x,) = draw((B, T, M))
    theirs, ours = nnx_pair(dtype=dtype)
    close(ours(x), theirs(x), atol=0.03)
    theirs, ours = linen_pair(dtype=dtype, force_fp32_for_softmax=True)
    variables = theirs.init(jax.random.key(1), x)
    close(ours.apply(variables, x), theirs.apply(variables, x), atol=0.03)


def test_direct_calls_promote_and_take_a_bias_and_a_precision():
    query, key, value, bias = draw((B, T, H, D), (B, S, H, D), (B, S, H, D), (1, H, T, S))
    close(attention_fn(query, key, value, bias), nnx.dot_product_attention(query, key, value, bias))
    narrow = key.astype(jnp.bfloat16)
    close(
        attention_fn(query, narrow, value, precision="highest"),
        nnx.dot_product_attention(query, narrow, value, precision="highest"),
    )
    assert attention_fn(query, key, value, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    swap = lambda x: np.swapaxes(np.asarray(x, np.float64), -3, -2)
    truth = oracle.batched(swap(query), swap(key), swap(value), bias=bias).output
    np.testing.assert_allclose(swap(attention_fn(query, key, value, bias)), truth, atol=1e-6)
    wide = jnp.concatenate([value, value], -1)  # Flax's fast path fails there, though documented
    np.testing.assert_allclose(attention_fn(query, key, wide, bias)[..., D:], swap(truth), atol=1e-6)
    one = attention_fn(query[0], key[0], value[0], bias[0])
    np.testing.assert_allclose(one, swap(truth)[0], atol=1e-6)


def test_padding_and_is_causal_combine():
    """Flax 0.12 raises a broadcasting error for its mask of padding with is_causal."""
    _, ours = nnx_pair()
    (x,) = draw((B, T, M))
    close(ours(x, mask=masks_of("padding"), is_causal=True), ours(x, mask=masks_of("combined")))
    theirs, _ = nnx_pair()
    close(ours(x, is_causal=True), theirs(x, is_causal=True))
    # A padding mask of one row per example, which nnx cannot combine with is_causal.
    keys = (masks_of("padding")[:, :, :1] > 0).astype(jnp.float32)
    with pytest.raises(ValueError, match="broadcast"):
        look(theirs, x, mask=keys, is_causal=True)
    close(ours(x, mask=keys, is_causal=True), theirs(x, mask=masks_of("combined")))


def test_cross_attention_counts_from_the_top_left():
    theirs, ours = nnx_pair()
    x, memory = draw((B, T, M), (B, S, M))
    close(ours(x, memory, is_causal=True), theirs(x, memory, is_causal=True))


def test_flax_layers_take_a_mask_of_regard():
    (x,) = draw((B, T, M))
    mask = masks.causal() & masks.valid_keys(jnp.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]))
    theirs, ours = nnx_pair()
    expected = theirs(x, mask=masks_of("combined"))
    close(ours(x, mask=mask), expected)
    # Row data of one example is not data per head.
    close(ours(x[0], mask=masks.causal() & masks.lengths(jnp.array([3]))), expected[0])
    theirs, ours = linen_pair()
    variables = theirs.init(jax.random.key(1), x)
    close(ours.apply(variables, x, mask=mask), theirs.apply(variables, x, mask=masks_of("combined")))


def test_nnx_decodes_a_token_at_a_time_as_in_one_pass():
    theirs, ours = nnx_pair(decode=True, num_kv_heads=1)
    (x,) = draw((B, T, M))
    whole = ours(x, mask=masks_of("causal"), decode=False)
    step = nnx.jit(lambda layer, token: layer(token))
    for layer in (theirs, ours):
        layer.init_cache(x.shape)
    for t in range(T):
        out = step(ours, x[:, t : t + 1])
        close(out, theirs(x[:, t : t + 1]))
        close(out[:, 0], whole[:, t])


def test_linen_decodes_a_token_at_a_time_as_in_one_pass():
    theirs, ours = linen_pair(decode=True)
    (x,) = draw((B, T, M))
    variables = theirs.init(jax.random.key(1), x)
    whole = linen_pair()[1].apply({"params": variables["params"]}, x, mask=masks_of("causal"))
    for t in range(T):
        token = x[:, t : t + 1]
        expected, _ = theirs.apply(variables, token, mutable=["cache"])
        out, cache = ours.apply(variables, token, mutable=["cache"])
        variables = {**variables, **cache}
        close(out, expected)
        close(out[:, 0], whole[:, t])


def test_a_cache_with_is_causal_is_not_answered_wrongly():
    """Flax 0.12.8 passes is_causal on, which leaves a cache its first key; later ones take it away."""
    _, ours = nnx_pair(decode=True)
    (x,) = draw((B, T, M))
    ours.init_cache(x.shape)
    ours(x[:, :1])
    try:
        out = ours(x[:, 1:2], is_causal=True)
    except ValueError as error:
        assert "is_causal: expected False for one query" in str(error)
    else:
        whole = ours(x[:, :2], is_causal=True, decode=False)
        close(out[:, 0], whole[:, 1])


def test_it_serves_under_strict_promotion():
    query, key, value = draw((B, T, H, D), (B, T, H, D), (B, T, H, D), dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for mask in (masks_of("combined"), masks_of("boolean")):
            run = lambda mask: attention_fn(
                query, key, value, None, mask, dropout_rng=jax.random.key(0), dropout_rate=0.5
            )
            np.testing.assert_array_equal(
                jax.jit(run)(mask).astype(jnp.float32), run(mask).astype(jnp.float32)
            )


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_nnx_sows_the_weights_of_flax(dtype):
    pair, (x,) = nnx_pair(dtype=dtype), draw((B, T, M))
    mask = masks_of("combined")
    plain = pair[1](x, mask=mask)
    (theirs, their_weights), (ours, our_weights) = (look(layer, x, mask=mask) for layer in pair)
    np.testing.assert_array_equal(ours, plain)
    close(ours, theirs, atol=3e-6 if dtype is None else 0.03)
    assert our_weights.shape == (B, H, T, T)
    close(our_weights, their_weights, atol=1e-6 if dtype is None else 0.01)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_linen_sows_the_weights_of_flax(dtype, force):
    pair, (x,) = linen_pair(dtype=dtype, force_fp32_for_softmax=force), draw((B, T, M))
    mask = masks_of("combined")
    variables = pair[0].init(jax.random.key(1), x)
    (theirs, their_sown), (ours, our_sown) = (
        layer.apply(variables, x, mask=mask, sow_weights=True, mutable=["intermediates"]) for layer in pair
    )
    np.testing.assert_array_equal(ours, pair[1].apply(variables, x, mask=mask))
    close(ours, theirs, atol=3e-6 if dtype is None else 0.03)
    (a,), (b,) = (sown["intermediates"]["attention_weights"] for sown in (our_sown, their_sown))
    close(a, b, atol=1e-6 if dtype is None else 0.01)


def test_sown_weights_of_one_example_and_before_dropout():
    pair, (x,) = nnx_pair(), draw((T, M))
    (_, theirs), (_, ours) = (look(layer, x) for layer in pair)
    assert ours.shape == (H, T, T)
    close(ours, theirs)
    _, dropping = nnx_pair(dropout_rate=0.5, deterministic=False)
    close(look(dropping, x)[1], ours)


@pytest.mark.parametrize("broadcast", [False, True])
def test_dropout_is_reproducible_and_right_on_average(broadcast):
    query, key, value = draw((1, 3, 2, D), (1, S, 2, D), (1, S, 2, D))
    call = jax.jit(
        lambda rng: attention_fn(
            query, key, value, None, None, broadcast, rng, 0.3, False, module=None, dtype=None
        )
    )
    np.testing.assert_array_equal(call(jax.random.key(3)), call(jax.random.key(3)))
    assert not np.array_equal(call(jax.random.key(3)), call(jax.random.key(4)))
    draws = np.asarray(jax.vmap(call)(jax.random.split(jax.random.key(0), 4096)))
    exact = np.asarray(attention_fn(query, key, value))
    error = draws.std(0) / np.sqrt(len(draws))
    assert (np.abs(draws.mean(0) - exact) < 5 * error).all()
    still = attention_fn(query, key, value, dropout_rate=0.3, deterministic=True)
    np.testing.assert_array_equal(still, exact)


def test_layers_drop_by_their_stream_and_not_in_evaluation():
    (x,) = draw((B, T, M))
    settings = {"dropout_rate": 0.4, "deterministic": False}
    run = lambda: nnx.MultiHeadAttention(
        **SETTINGS, **settings, attention_fn=attention_fn, rngs=nnx.Rngs(0, dropout=7)
    )
    first, second = run(), run()
    out = first(x)
    np.testing.assert_array_equal(out, second(x))
    assert not np.array_equal(out, second(x))  # the stream goes on
    close(first(x, deterministic=True), nnx_pair()[0](x))


def test_empty_rows_are_zero():
    _, ours = nnx_pair(use_bias=False)
    (x,) = draw((B, T, M))
    mask = jnp.ones((B, 1, T, T)).at[0, :, 1].set(0)
    out, weights = look(ours, x, mask=mask)
    assert not np.asarray(out[0, 1]).any()
    assert not np.asarray(weights[0, :, 1]).any()


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_an_additive_mask_is_not_read_as_a_mask(jit):
    """Flax reads -inf as True and 0 as False: the inverse of what was meant."""
    query, key, value = draw((B, T, H, D), (B, S, H, D), (B, S, H, D))
    additive = jnp.where(jnp.arange(S) < 4, 0.0, -1e9)[None, None, None]
    with pytest.raises(ValueError, match=r"mask: expected 0 and 1.*additive == 0"):
        jit(lambda q, k, v: attention_fn(q, k, v, mask=additive))(query, key, value)
    traced = jax.jit(lambda mask: attention_fn(query, key, value, mask=mask))
    assert np.isnan(traced(additive)).all()
    expected = attention_fn(query, key, value, bias=additive)
    np.testing.assert_allclose(traced((additive == 0).astype(jnp.float32)), expected, atol=1e-6)
    grad = jax.grad(lambda mask: attention_fn(query, key, value, mask=mask).sum())(jnp.ones_like(additive))
    assert not np.asarray(grad).any()


x, y = jnp.ones((2, 5, 6, 7)), jnp.ones((2, 11, 3, 7))
EINSUM = {"qk_attn_weights_einsum": jnp.einsum}
WRONG = [
    (lambda: attention_fn(x[0, 0], y, y), ValueError, r"query: expected \(\.\.\., length, heads, width\) or"),
    (lambda: attention_fn(x, y[0], y[0]), ValueError, "key: expected the batch axes of query"),
    (lambda: attention_fn(x, jnp.swapaxes(y, 1, 2), y), ValueError, r"value: .*length and the heads of key"),
    (lambda: attention_fn(x, y, y, mask=jnp.ones((5, 7), bool)), ValueError, r"mask: .*\(2, 6, 5, 11\)"),
    (lambda: attention_fn(x, y, y, bias=jnp.ones((7,))), ValueError, r"bias: expected .*\(2, 6, 5, 11\)"),
    (lambda: attention_fn(x, y, y, dropout_rate=0.1), ValueError, "dropout_rng: expected a random key"),
    (lambda: attention_fn(x, y, y, dropout_rng=jax.random.key(0), dropout_rate=1.0), ValueError, r"\[0, 1\)"),
    (
        lambda: attention_fn(x[:, :1], y, y, mask=y[:, :1, :1, :1] > 0, is_causal=True),
        ValueError,
        "is_causal",
    ),
    (lambda: attention_fn(x, y, y, **EINSUM), NotImplementedError, "qk_attn_weights_einsum: expected None"),
    (lambda: attention_fn(x, y, y, einsum_dot_general=1), NotImplementedError, "einsum_dot_general"),
    (lambda: attention_fn(x, y, y, input_positions=x), NotImplementedError, "rotate query and key"),
]


@pytest.mark.parametrize("case", range(len(WRONG)))
def test_a_wrong_call_is_told_what_to_do(case):
    call, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        call()


def test_an_einsum_of_the_layers_own_is_refused():
    """Flax drops, without a word, what an attention_fn does not name."""
    make = lambda: jnp.einsum
    _, ours = linen_pair(qk_attn_weights_einsum_cls=make, attn_weights_value_einsum_cls=make)
    (x,) = draw((B, T, M))
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum: expected None"):
        ours.init(jax.random.key(0), x)
    partial = functools.partial(attention_fn, precision=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = linen.MultiHeadAttention(num_heads=H, attention_fn=partial)
        layer.init(jax.random.key(0), x)
