import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import assert_close, build_drawn, compiled, draw, multi_head, precisions, program_of
from refusals import assert_refused
from regard import KVCache, masks, positions
from regard.layers import FeedForward, MultiHeadAttention

B, T, S, M, W, H, D = 2, 5, 7, 11, 13, 3, 17


def build(num_heads=H, **options):
    return build_drawn(MultiHeadAttention, M, num_heads, **{"head_dim": D, **options})


@nnx.jit
def look(layer, *arrays, **options):
    """The output and the weights of a call."""
    out, aux = layer(*arrays, aux=("weights",), **options)
    return out, aux["weights"]


def trace(layer, *arrays, **options):
    """The shapes that a call gives, or its refusal, without a program."""
    return jax.eval_shape(lambda: layer(*arrays, **options))


def assert_is(found, expected):
    """Output and weights, both."""
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


# The definition.


def test_self_attention_is_the_definition():
    options = ({}, {"use_bias": False}, {"project_output": False}, {"num_heads": 6, "num_key_heads": 2})
    layers, x = [build(**choice) for choice in (*options, {"num_key_heads": 1})], draw(0, B, T, M)
    found = nnx.jit(lambda layers, x: [layer(x, aux=("weights",)) for layer in layers])(layers, x)
    for layer, (out, aux) in zip(layers, found, strict=True):
        assert out.shape == (B, T, M if layer.output_projection is not None else H * D)
        assert_is((out, aux["weights"]), multi_head(layer, x))


def test_cross_attention_takes_another_length_and_width():
    layer = build(memory_width=W)
    arrays = draw(2, B, T, M), draw(3, B, S, W), draw(4, B, S, W)
    found = look(layer, *arrays)
    assert found[1].shape == (B, H, T, S)
    assert_is(found, multi_head(layer, *arrays))
    assert_is(look(layer, *arrays[:2]), multi_head(layer, *arrays[:2]))


def test_heads_are_their_index_form():
    layer, x = build(use_bias=False), draw(8, 1, T, M)
    # W[h, m, d] of the document are the column blocks of the layer's kernels.
    projections = layer.query_projection, layer.key_projection, layer.value_projection
    q, k, v = (np.float64(p.kernel[...]).reshape(M, H, D).transpose(1, 0, 2) for p in projections)
    o = np.float64(layer.output_projection.kernel[...]).reshape(H, D, M)
    Q, K, V = (np.einsum("ib,hba->hia", np.float64(x[0]), w) for w in (q, k, v))
    scores = np.einsum("hia,hja->hij", Q, K) / np.sqrt(D)
    A = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert_close(compiled(layer, x)[0], np.einsum("hib,hbc->ic", np.einsum("hij,hjb->hib", A, V), o))


# Initial parameters.


@functools.cache
def start():
    """Layers as they are built: as they come, a feed-forward branch, and one of constants."""
    constants = {"kernel_init": nnx.initializers.constant(2.0), "bias_init": nnx.initializers.constant(3.0)}
    parts = (MultiHeadAttention, 64, 8), (FeedForward, 64, 256), (MultiHeadAttention, M, H)
    options = {}, {}, {"head_dim": D, **constants}
    build = lambda part, more: part[0](*part[1:], **more, rngs=nnx.Rngs(0))
    return nnx.jit(lambda: tuple(map(build, parts, options)))()


def test_glorot_has_the_textbook_scale():
    layer, branch, constant = start()
    for projection in (layer.query_projection, layer.key_projection, layer.output_projection):
        kernel = np.asarray(projection.kernel[...])
        # Uniform on +-limit: the largest of 4096 numbers nearly reaches it; the deviation is limit/sqrt(3).
        limit = np.sqrt(6 / (64 + 64))
        assert 0.99 * limit < np.abs(kernel).max() <= limit
        assert kernel.std() == pytest.approx(0.125, rel=0.03)
        assert not np.any(projection.bias[...])
    for part in (branch.widen, branch.narrow):
        assert np.asarray(part.kernel[...]).std() == pytest.approx(np.sqrt(2 / 320), rel=0.03)
        assert not np.any(part.bias[...])
    # Initializers of the caller's are taken.
    assert np.all(np.asarray(constant.key_projection.kernel[...]) == 2.0)
    assert np.all(np.asarray(constant.value_projection.bias[...]) == 3.0)


def test_no_two_parameters_share_random_numbers():
    kernels = [np.ravel(x) for x in jax.tree.leaves(nnx.state(start()[0], nnx.Param)) if x.ndim == 2]
    assert len(kernels) == 4
    assert np.abs(np.corrcoef(np.stack(kernels)) - np.eye(4)).max() < 0.06


def test_bfloat16_stays_near_the_definition():
    layer, x = build(dtype=jnp.bfloat16), draw(9, B, T, M)
    assert layer.query_projection.kernel[...].dtype == jnp.float32
    out, expected = compiled(layer, x), multi_head(layer, x)[0]
    assert out.dtype == jnp.bfloat16
    assert np.abs(np.float64(out) - expected).max() < 16 * 2.0**-8 * np.abs(expected).max()


# Heads.


def test_heads_divide_the_width_unless_told_otherwise():
    make = lambda **options: build_drawn(MultiHeadAttention, 12, **{"num_heads": 3, **options})
    assert make().head_dim == 4
    for name in ("num_heads", "num_key_heads", "head_dim", "memory_width"):
        with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 1, got 0"):
            make(**{name: 0})
    with pytest.raises(ValueError, match=r"num_key_heads: expected a divisor of num_heads = 6, got 4"):
        make(num_heads=6, num_key_heads=4)


def test_num_heads_belongs_to_the_layer_not_to_the_call():
    layer = build()
    with pytest.raises(TypeError, match="num_heads"):
        layer(jnp.ones((B, T, M)), num_heads=7)
    with pytest.raises(ValueError, match=r"num_heads: expected a divisor of d_model = 11, got 3.*head_dim"):
        build(head_dim=None)


# Masks and biases.


def test_true_in_a_mask_means_may_attend():
    layer, x = build(), draw(11, B, T, M)
    keep = np.tril(np.ones((T, T), bool))
    out, weights = look(layer, x, mask=keep)
    assert not np.any(np.asarray(weights)[..., ~keep])
    assert_is((out, weights), multi_head(layer, x, keep=keep))
    np.testing.assert_array_equal(look(layer, x, mask=masks.causal())[0], out)
    # One per head lands on its head.
    keep = np.random.default_rng(1).random((B, H, T, T)) < 0.5
    expected, weights = multi_head(layer, x, keep=keep)
    assert_is(look(layer, x, mask=keep), (expected, weights))
    assert_is(look(layer, x[0], mask=keep[0]), (expected[0], weights[0]))


def call_under(make_masks):
    """The layer's output under several masks of one array, as one program."""
    return nnx.jit(lambda layer, x, array: [layer(x, mask=mask) for mask in make_masks(array)])


@pytest.mark.parametrize("examples", [H, T])
def test_a_mask_per_example_lands_on_its_example(examples):
    """Also where the batch equals the number of heads, or the length."""
    layer, x = build(), draw(12, examples, T, M)
    keep = np.random.default_rng(0).random((examples, T, T)) < 0.5
    of_heads = lambda keep: masks.from_array(keep[:, None])
    made = lambda keep: (keep.astype(jnp.int32), of_heads(keep), masks.from_array(keep) & masks.causal())
    expected, _ = multi_head(layer, x, keep=keep[:, None])
    causal, _ = multi_head(layer, x, keep=keep[:, None] & np.tri(T, dtype=bool))
    assert_is(call_under(made)(layer, x, keep), (expected, expected, causal))


def test_padding_fits_whatever_the_batch():
    layer, x = build(), draw(13, H, T, M)
    lengths = np.arange(H) % (T + 1)
    valid = np.arange(T) < lengths[:, None]
    made = lambda valid: (masks.lengths(lengths), masks.valid_keys(valid), valid[:, None, None])
    expected, _ = multi_head(layer, x, keep=valid[:, None, None])
    assert_is(call_under(made)(layer, x, valid), [expected] * 3)


def test_a_square_padding_array_is_refused_rather_than_guessed():
    layer, x = build(), draw(14, T, T, M)
    with pytest.raises(ValueError, match=r"mask: shape \(5, 5\) may mean .*valid_keys"):
        trace(layer, x, mask=np.tri(T, dtype=bool))
    made = lambda tri: (masks.from_array(tri), masks.causal())
    np.testing.assert_array_equal(*call_under(made)(layer, x, np.tri(T, dtype=bool)))


def test_bias_is_added_to_the_scores():
    layer, x = build(), draw(17, B, T, M)
    biases = [draw(18, *shape) for shape in ((T, T), (1, H, T, T), (B, 1, T, T), (B, H, T, T))]
    found = nnx.jit(lambda layer, x, biases: [layer(x, bias=bias) for bias in biases])(layer, x, biases)
    assert_is(found, [multi_head(layer, x, bias=bias)[0] for bias in biases])
    for count in (B, H):
        with pytest.raises(ValueError, match=r"bias: expected shape \(T, S\) or \(\*B, H, T, S\)"):
            trace(layer, x, bias=draw(18, count, T, T))


def test_query_offset_turns_queries_and_not_the_keys():
    layer, x = build(rotary=positions.Rotary(base=50.0, width=6)), draw(41, B, S, M)
    last = nnx.jit(lambda layer, x: layer(x[:, 4:], x, mask=masks.causal(), query_offset=4))
    assert_close(last(layer, x), look(layer, x, mask=masks.causal())[0][:, 4:])
    with pytest.raises(ValueError, match="query_offset"):
        trace(layer, x[:, 4:], x, mask=masks.causal())


def test_precision_is_that_of_every_product():
    x = draw(42, B, T, M)
    assert precisions(build(precision="highest"), x) == {"HIGHEST"}
    assert precisions(build(), x) == {"None"}


# Leading axes.


def test_one_example_needs_no_batch():
    """And more axes are a batch."""
    layer, x = build(), draw(21, 3, B, T, M)
    keep = np.random.default_rng(2).random((3, B, T, T)) < 0.5

    call = nnx.jit(lambda layer, x, keep: (layer(x, mask=keep), layer(x[2, 1], mask=keep[2, 1])))
    expected, _ = multi_head(layer, x.reshape(3 * B, T, M), keep=keep.reshape(3 * B, 1, T, T))
    assert_is(call(layer, x, keep), (expected.reshape(3, B, T, M), expected[5]))
    _, aux = trace(layer, x[0, 0], aux=("weights", "entropy"))
    assert (aux["weights"].shape, aux["entropy"].shape) == ((H, T, T), (H, T))


def test_batches_equal_examples_also_where_all_sizes_agree():
    layer, x = build_drawn(MultiHeadAttention, 2, 1), draw(24, 2, 2, 2)
    found, expected = nnx.jit(lambda layer, x: (layer(x), [layer(example) for example in x]))(layer, x)
    assert_close(found, np.stack(expected))


# Errors.


def test_wrong_shapes_name_the_argument():
    x, memory, wide = (np.zeros(shape, np.float32) for shape in ((B, T, M), (B, S, M), (B, S, W)))
    call, added = functools.partial(trace, build()), np.zeros((T, T), np.float32)
    assert_refused(
        (lambda: call(x[0, 0]), r"query: expected shape \(\*B, length, 11\), got \(11,\)"),
        (lambda: call(x, wide), r"key: expected shape \(\*B, length, 11\), got \(2, 7, 13\)"),
        (lambda: call(x, memory, wide), r"value: expected shape \(\*B, length, 11\), got \(2, 7, 13\)"),
        (lambda: call(x, memory, x), "value"),
        (lambda: call(x, None, memory), "key: expected an array where value is given"),
        (lambda: call(x.astype("int32")), "query: expected a floating-point array, got int32", TypeError),
        (lambda: call(x, mask=np.ones((1, B, H, T, T), bool)), r"mask: expected shape \(T, S\), \(\*B,"),
        (lambda: call(x, mask=added), "bias=", TypeError),
    )


def test_caches_and_queries_that_do_not_fit_are_refused():
    layer, x = build(rotary=positions.Rotary(), head_dim=10), np.ones((B, 3, M), np.float32)
    cache, call = KVCache.create(B, H, 5, 10), functools.partial(trace, layer)
    placed = {"cache": cache, "mask": masks.causal()}
    assert_refused(
        (lambda: call(x, x, cache=cache), r"cache: expected query \(2, T, 11\) alone.* and more"),
        (lambda: call(x, **placed, query_offset=1), "query_offset or positions; got .* and more"),
        (lambda: call(x, np.ones((B, 5, M))), "query_offset: expected where the queries sit"),
        (lambda: call(x[:1], **placed), r"got query \(1, 3, 11\)"),
    )


# Dropout.


def test_attention_dropout_really_drops_and_keeps_the_mean():
    """By the key of the caller; the weights that are returned are those before it."""
    layer, x = build(dropout_rate=0.4), draw(26, B, T, M)
    # The output is linear in the dropped weights, so its mean over patterns is the quiet output.
    keys = jax.random.split(jax.random.key(0), 300)[np.arange(301) % 300]
    out, aux = jax.jit(jax.vmap(lambda key: layer(x, rngs=key, aux=("weights",))))(keys)
    samples, (expected, weights) = np.float64(out), multi_head(layer, x)
    error = samples.std(0) / np.sqrt(len(keys))
    assert np.all(error > 1e-3)
    assert np.all(np.abs(samples.mean(0) - expected) < 6 * error)
    assert_close(aux["weights"][7], weights)
    np.testing.assert_array_equal(out[0], out[-1])


def test_dropout_without_a_random_stream_is_an_error():
    layer, x = build(dropout_rate=0.5), draw(28, B, T, M)
    layer.dropout.rngs = None
    with pytest.raises(ValueError, match=r"rngs: dropout is on and needs a random stream 'dropout'"):
        trace(layer, x)
    assert jax.eval_shape(lambda: layer(x, rngs=nnx.Rngs(dropout=1))).shape == (B, T, M)
    layer.eval()
    assert trace(layer, x).shape == (B, T, M)


def test_rates_outside_0_1_are_refused():
    for rate in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match=r"dropout_rate: expected a rate in \[0, 1\)"):
            build(dropout_rate=rate)


def test_dropout_follows_train_and_eval():
    layer, x = build(dropout_rate=0.5), draw(29, B, T, M)
    drops = lambda layer, **options: "random_" in program_of(layer, x, **options)
    assert drops(layer)
    assert not drops(layer, deterministic=True)
    layer.eval()
    assert not drops(layer)
    assert drops(layer, deterministic=False)
    assert not drops(build())
    assert not jax.tree.leaves(nnx.state(build(), nnx.RngState))


def test_a_traced_mode_is_explained():
    layer, x = build(dropout_rate=0.5), draw(31, B, T, M)
    with pytest.raises(TypeError, match=r"deterministic: expected True, False or None.*static_argnames"):
        jax.jit(lambda x, off: layer(x, deterministic=off))(x, True)


# Transforms.


def test_another_number_of_heads_is_another_layer_under_jit():
    x = draw(33, B, T, M)
    for layer in (build(1), build(3)):
        assert_close(jax.jit(layer)(x), multi_head(layer, x)[0])


def test_empty_rows_and_nan_in_masked_memory_stay_out():
    layer, x, lengths = build(memory_width=W, query_key_norm=True), draw(37, B, T, M), np.array([0, 4])
    memory = draw(38, B, S, W)
    memory[0], memory[1, 4:] = np.nan, np.inf

    def loss(layer, x, memory):
        out = layer(x, memory, mask=masks.lengths(lengths))
        return jnp.sum(out**2), out

    measure = nnx.jit(nnx.grad(loss, argnums=(0, 1, 2), has_aux=True))
    (grads, out), clean = (measure(layer, x, one) for one in (memory, np.nan_to_num(memory, posinf=0.0)))
    jax.tree.map(np.testing.assert_array_equal, (grads, out), clean)
    # An empty row attends to nothing: only the bias of the output projection is left.
    assert_close(out[0], np.broadcast_to(layer.output_projection.bias[...], (T, M)))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    assert not np.any(grads[1][0])


def test_what_is_remembered_is_the_memory_whatever_the_ranks():
    layer = build_drawn(MultiHeadAttention, 6, 3)
    queries, memory = draw(0, 2, 4, 2, 6), draw(3, 2, 4, 5, 6)
    pairs = [(queries, memory[0, 0]), (queries[0, 0], memory)]
    both = lambda layer, query, key: (layer(query, layer.remember(key)), layer(query, key))
    for one, other in nnx.jit(lambda layer, pairs: [both(layer, *pair) for pair in pairs])(layer, pairs):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="value: expected None, as what `remember` made holds the values"):
        jax.eval_shape(lambda: layer(queries, layer.remember(memory), value=memory))
