import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from layer_oracle import assert_close, count_parameters, draw, float64, multi_head, precisions, randomize
from regard import masks, positions
from regard.attention import attend
from regard.layers import MultiHeadAttention

B, T, S, M, W, H, D = 2, 5, 7, 11, 13, 3, 17


def build(num_heads=H, seed=0, **options):
    options = {"head_dim": D, **options}
    return randomize(MultiHeadAttention(M, num_heads, rngs=nnx.Rngs(seed), **options), seed)


# The definition.


def test_self_attention_is_the_definition():
    layer, x = build(), draw(0, B, T, M)
    out, aux = layer(x, aux=("weights",))
    expected, weights = multi_head(layer, x)
    assert out.shape == (B, T, M)
    assert_close(out, expected)
    assert_close(aux["weights"], weights)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("project_output", [True, False])
def test_biases_and_output_projection_are_optional(use_bias, project_output):
    layer = build(use_bias=use_bias, project_output=project_output)
    x = draw(1, B, T, M)
    out = layer(x)
    assert out.shape == (B, T, M if project_output else H * D)
    assert_close(out, multi_head(layer, x)[0])


def test_cross_attention_takes_another_length_and_width():
    layer = build(memory_width=W)
    query, key, value = draw(2, B, T, M), draw(3, B, S, W), draw(4, B, S, W)
    out, aux = layer(query, key, value, aux=("weights",))
    expected, weights = multi_head(layer, query, key, value)
    assert aux["weights"].shape == (B, H, T, S)
    assert_close(out, expected)
    assert_close(aux["weights"], weights)
    assert_close(layer(query, key), multi_head(layer, query, key, key)[0])


@pytest.mark.parametrize("num_key_heads", [1, 2, 3, 6])
def test_grouped_heads_equal_repeated_heads(num_key_heads):
    grouped = build(num_heads=6, num_key_heads=num_key_heads)
    full = build(num_heads=6)
    for name in ("query_projection", "output_projection"):
        nnx.update(getattr(full, name), nnx.state(getattr(grouped, name)))
    for name in ("key_projection", "value_projection"):
        few, many = getattr(grouped, name), getattr(full, name)
        many.kernel[...] = _repeat_heads(few.kernel[...], num_key_heads)
        many.bias[...] = _repeat_heads(few.bias[...], num_key_heads)
    x = draw(5, B, T, M)
    assert_close(grouped(x), full(x))
    assert_close(grouped(x), multi_head(grouped, x)[0])


def _repeat_heads(array, num_key_heads):
    heads = array.reshape(*array.shape[:-1], num_key_heads, D)
    return jnp.repeat(heads, 6 // num_key_heads, axis=-2).reshape(*array.shape[:-1], 6 * D)


@settings(max_examples=10)
@given(st.data())
def test_random_layers_are_the_definition(data):
    num_key_heads = data.draw(st.integers(1, 3), "num_key_heads")
    num_heads = num_key_heads * data.draw(st.integers(1, 3), "group")
    head_dim, queries, keys = (data.draw(st.integers(1, 4), name) for name in ("head_dim", "T", "S"))
    cross = data.draw(st.booleans(), "cross")
    layer = build(
        num_heads, num_key_heads=num_key_heads, head_dim=head_dim, memory_width=W if cross else None
    )
    keys = keys if cross else queries
    x, memory = draw(6, B, queries, M), draw(7, B, keys, W) if cross else None
    shape = data.draw(st.sampled_from([(1, 1), (B, 1), (B, num_heads)]), "mask axes")
    keep = np.random.default_rng(data.draw(st.integers(0, 9), "seed")).random((*shape, queries, keys)) < 0.6
    expected, _ = multi_head(layer, x, memory, keep=keep)
    run = jax.jit(lambda x, memory, keep: layer(x, memory, mask=keep))
    assert_close(run(x, memory, keep), expected)


def test_heads_are_their_index_form():
    layer, x = build(use_bias=False), draw(8, 1, T, M)
    # W[h, m, d] of the document are the column blocks of the layer's kernels.
    q, k, v = (
        float64(p.kernel[...]).reshape(M, H, D).transpose(1, 0, 2)
        for p in (layer.query_projection, layer.key_projection, layer.value_projection)
    )
    o = float64(layer.output_projection.kernel[...]).reshape(H, D, M)
    Q, K, V = (np.einsum("ib,hba->hia", float64(x[0]), w) for w in (q, k, v))
    scores = np.einsum("hia,hja->hij", Q, K) / np.sqrt(D)
    A = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    expected = np.einsum("hib,hbc->ic", np.einsum("hij,hjb->hib", A, V), o)
    assert_close(layer(x)[0], expected)


# The golden numbers of the documents.

ENCODINGS = np.array([[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]], np.float32)
# Rows are inputs, as in a Dense kernel; query, key, value.
SINGLE = [
    [[0.16799835860729218, -0.14157924056053162], [0.06251400709152222, 0.34933483600616455]],
    [[1.4500553607940674, 0.6741709113121033], [-1.0946553945541382, -0.6631792187690735]],
    [[0.4084714353084564, 0.9364572763442993], [-0.5269327759742737, 0.10758424550294876]],
]
HEAD_0 = [
    [[-0.22552983462810516, 0.09116347879171371], [-0.3211265504360199, -0.45957643]],
    [[-0.06257609277963638, -1.0579791069030762], [0.5816468000411987, 0.42186620831489563]],
    [[-0.2892284393310547, -0.25448253750801086], [0.12662892043590546, -0.7091702222824097]],
]
HEAD_1 = [
    [[0.017914535477757454, -0.34276488423347473], [0.4387269616127014, -0.09799633920192719]],
    [[-1.2273125648498535, -0.45715847611427307], [0.7659676671028137, 1.0907953977584839]],
    [[0.49743637442588806, -0.7417848706245422], [-0.8006012439727783, -0.05906589329242706]],
]
PRINTED_SINGLE = [[1.668201, 2.6169908], [2.433429, 3.3817132], [0.51508707, 1.4933776]]
PRINTED_TWO_HEADS = [
    [-0.7741511, -0.24243875, 2.0704143, -2.0301726],
    [-1.3947037, 0.28557885, 0.04033631, -0.86105233],
    [-0.08808593, -0.9197984, 3.9204044, -3.142049],
]
PRINTED_ONE_HEAD = [row[:2] for row in PRINTED_TWO_HEADS]


def full_width_heads(*heads):
    """The layer of the tutorial module_and_jit: heads at full width, concatenated, no output projection."""
    layer = MultiHeadAttention(
        2, len(heads), head_dim=2, use_bias=False, project_output=False, rngs=nnx.Rngs(0)
    )
    for i, name in enumerate(("query_projection", "key_projection", "value_projection")):
        getattr(layer, name).kernel[...] = jnp.concatenate([jnp.array(head[i]) for head in heads], axis=1)
    return layer


@pytest.mark.parametrize(
    ("heads", "printed"),
    [([SINGLE], PRINTED_SINGLE), ([HEAD_0], PRINTED_ONE_HEAD), ([HEAD_0, HEAD_1], PRINTED_TWO_HEADS)],
    ids=["single", "one head", "two heads"],
)
def test_full_width_heads_give_the_printed_numbers(heads, printed):
    out = full_width_heads(*heads)(ENCODINGS)
    np.testing.assert_allclose(out, np.array(printed), rtol=0, atol=1e-6)


def test_a_flax_module_gives_the_printed_numbers_from_their_seed():
    from flax import linen

    class Attention(linen.Module):
        @linen.compact
        def __call__(self, x):
            query, key, value = (
                linen.Dense(2, use_bias=False, name=name)(x) for name in ("W_q", "W_k", "W_v")
            )
            return attend(query, key, value)

    class TwoHeads(linen.Module):
        def setup(self):
            self.heads = [Attention() for _ in range(2)]

        def __call__(self, x):
            return jnp.concatenate([head(x) for head in self.heads], axis=-1)

    # The default random bits changed after the document was printed.
    with jax.threefry_partitionable(False):
        single, _ = Attention().init_with_output(jax.random.PRNGKey(42), ENCODINGS)
        two, variables = TwoHeads().init_with_output(jax.random.PRNGKey(42), ENCODINGS)
    np.testing.assert_allclose(single, np.array(PRINTED_SINGLE), rtol=0, atol=1e-6)
    np.testing.assert_allclose(two, np.array(PRINTED_TWO_HEADS), rtol=0, atol=1e-6)
    kernels = [
        [variables["params"][head][name]["kernel"] for name in ("W_q", "W_k", "W_v")]
        for head in ("heads_0", "heads_1")
    ]
    np.testing.assert_allclose(full_width_heads(*kernels)(ENCODINGS), two, rtol=0, atol=1e-6)


def with_kernels(layer, kernels):
    names = ("query_projection", "key_projection", "value_projection", "output_projection")
    for name, kernel in zip(names, kernels, strict=True):
        getattr(layer, name).kernel[...] = kernel
    return layer


def test_several_heads_give_the_numbers_of_the_tired_cat():
    _, init, data = jax.random.split(jax.random.key(0), 3)
    # The document's scale, sqrt(2 / (d_model + head_dim)), which is not Glorot's.
    scale = np.float32(np.sqrt(2 / (64 + 8)))
    kernels = [jax.random.normal(k, (64, 64)) * scale for k in jax.random.split(init, 4)]
    layer = with_kernels(MultiHeadAttention(64, 8, use_bias=False, rngs=nnx.Rngs(0)), kernels)
    out, aux = layer(jax.random.normal(data, (2, 6, 64)), aux=("weights",))
    np.testing.assert_allclose(out[0, 0, :4], [0.3018999, -0.8047270, -1.7096915, -0.5529833], atol=2e-6)
    golden = [0.0111504, 0.0268954, 0.3809325, 0.3636997, 0.1558406, 0.0614815]
    np.testing.assert_allclose(aux["weights"][0, 0, 0], golden, atol=1e-6)


def test_several_heads_give_the_numbers_of_from_scratch():
    key = jax.random.PRNGKey(456)
    limit = np.float32(np.sqrt(6 / 256))
    kernels = [
        jax.random.uniform(k, (128, 128), minval=-limit, maxval=limit) for k in jax.random.split(key, 4)
    ]
    layer = with_kernels(MultiHeadAttention(128, 8, use_bias=False, rngs=nnx.Rngs(0)), kernels)
    out = layer(jax.random.normal(jax.random.split(key)[1], (2, 10, 128)))
    # In the document inputs and W_k share random numbers; only the arithmetic is taken from it.
    np.testing.assert_allclose(out[0, 0, :4], [-0.0532126, -0.9727029, -0.6531023, 0.2920589], atol=5e-6)


# Parameters.


def test_attention_without_biases_has_four_square_kernels():
    layer = MultiHeadAttention(256, 8, use_bias=False, rngs=nnx.Rngs(0))
    assert count_parameters(layer) == 262_144
    assert layer.head_dim == 32


def test_glorot_has_the_textbook_scale():
    layer = MultiHeadAttention(64, 8, rngs=nnx.Rngs(0))
    for projection in (layer.query_projection, layer.key_projection, layer.output_projection):
        kernel = np.asarray(projection.kernel[...])
        # Uniform on +-limit: the largest of 4096 numbers nearly reaches it; the deviation is limit/sqrt(3).
        limit = np.sqrt(6 / (64 + 64))
        assert 0.99 * limit < np.abs(kernel).max() <= limit
        assert kernel.std() == pytest.approx(0.125, rel=0.03)
        assert not np.any(projection.bias[...])


def test_no_two_parameters_share_random_numbers():
    layer = MultiHeadAttention(64, 8, rngs=nnx.Rngs(0))
    kernels = [np.ravel(x) for x in jax.tree.leaves(nnx.state(layer, nnx.Param)) if x.ndim == 2]
    assert len(kernels) == 4
    correlation = np.corrcoef(np.stack(kernels)) - np.eye(4)
    assert np.abs(correlation).max() < 0.06


def test_initializers_and_dtypes_are_the_callers():
    layer = MultiHeadAttention(
        M,
        H,
        head_dim=D,
        kernel_init=nnx.initializers.constant(2.0),
        bias_init=nnx.initializers.constant(3.0),
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    assert np.all(layer.key_projection.kernel[...] == 2.0)
    assert np.all(layer.value_projection.bias[...] == 3.0)
    assert layer.query_projection.kernel[...].dtype == jnp.float32
    assert layer(draw(0, B, T, M)).dtype == jnp.bfloat16


def test_bfloat16_stays_near_the_definition():
    layer = MultiHeadAttention(M, H, head_dim=D, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = draw(9, B, T, M)
    expected, _ = multi_head(layer, x)
    assert float(np.abs(float64(layer(x)) - expected).max()) < 16 * 2.0**-8 * np.abs(expected).max()


# Heads.


def test_heads_divide_the_width_unless_told_otherwise():
    layer = MultiHeadAttention(12, 3, rngs=nnx.Rngs(0))
    assert layer.head_dim == 4
    assert layer(jnp.ones((B, T, 12))).shape == (B, T, 12)
    with pytest.raises(ValueError, match=r"num_heads: expected an integer of at least 1, got 0"):
        MultiHeadAttention(12, 0, rngs=nnx.Rngs(0))
    for name in ("num_key_heads", "head_dim", "memory_width"):
        with pytest.raises(ValueError, match=f"{name}: expected an integer of at least 1, got 0"):
            MultiHeadAttention(12, 3, **{name: 0}, rngs=nnx.Rngs(0))


def test_one_head_is_single_attention_with_the_same_parameters():
    layer = full_width_heads(SINGLE)
    query, key, value = (ENCODINGS @ np.array(kernel, np.float32) for kernel in SINGLE)
    assert_close(layer(ENCODINGS), attend(query, key, value))


def test_num_heads_belongs_to_the_layer_not_to_the_call():
    layer = build()
    with pytest.raises(TypeError, match="num_heads"):
        layer(jnp.ones((B, T, M)), num_heads=7)
    with pytest.raises(ValueError, match=r"num_heads: expected a divisor of d_model = 11, got 3.*head_dim"):
        MultiHeadAttention(M, 3, rngs=nnx.Rngs(0))


def test_key_heads_must_divide_heads():
    with pytest.raises(ValueError, match=r"num_key_heads: expected a divisor of num_heads = 6, got 4"):
        MultiHeadAttention(M, 6, num_key_heads=4, head_dim=D, rngs=nnx.Rngs(0))


def test_heads_are_a_vmap_over_one_head():
    layer, x = build(use_bias=False, project_output=False), jnp.asarray(draw(10, T, M))

    def one_head(query, key, value):
        return attend(x @ query, x @ key, x @ value)

    kernels = [
        p.kernel[...].reshape(M, H, D).swapaxes(0, 1)
        for p in (layer.query_projection, layer.key_projection, layer.value_projection)
    ]
    heads = jax.vmap(one_head)(*kernels)
    assert_close(layer(x), heads.swapaxes(0, 1).reshape(T, H * D))


# Masks and biases.


def test_true_in_a_mask_means_may_attend():
    layer, x = build(), draw(11, B, T, M)
    keep = np.tril(np.ones((T, T), bool))
    out, aux = layer(x, mask=keep, aux=("weights",))
    assert not np.any(aux["weights"][..., ~keep])
    assert_close(out, multi_head(layer, x, keep=keep)[0])
    np.testing.assert_array_equal(layer(x, mask=masks.causal()), out)


@pytest.mark.parametrize("examples", [B, H, T])
def test_a_mask_per_example_lands_on_its_example(examples):
    # Also where the batch equals the number of heads (3) or the length (5).
    layer, x = build(), draw(12, examples, T, M)
    keep = np.random.default_rng(0).random((examples, T, T)) < 0.5
    expected, weights = multi_head(layer, x, keep=keep[:, None])
    for mask in (keep, keep.astype(np.int32), masks.from_array(keep), masks.from_array(keep[:, None])):
        out, aux = layer(x, mask=mask, aux=("weights",))
        assert_close(out, expected)
        assert_close(aux["weights"], weights)
    out = layer(x, mask=masks.from_array(keep) & masks.causal())
    assert_close(out, multi_head(layer, x, keep=keep[:, None] & np.tri(T, dtype=bool))[0])


@pytest.mark.parametrize("examples", [B, H, T])
def test_padding_fits_whatever_the_batch(examples):
    layer, x = build(), draw(13, examples, T, M)
    lengths = np.arange(examples) % (T + 1)
    valid = np.arange(T) < lengths[:, None]
    expected, _ = multi_head(layer, x, keep=valid[:, None, None])
    for mask in (masks.lengths(lengths), masks.valid_keys(valid), valid[:, None], valid[:, None, None]):
        mask = np.broadcast_to(mask, (examples, T, T)) if getattr(mask, "ndim", 0) == 3 else mask
        assert_close(layer(x, mask=mask), expected)


def test_a_square_padding_array_is_refused_rather_than_guessed():
    layer, x = build(), draw(14, T, T, M)
    with pytest.raises(ValueError, match=r"mask: shape \(5, 5\) may mean .*valid_keys"):
        layer(x, mask=np.tri(T, dtype=bool))
    causal = masks.from_array(np.tri(T, dtype=bool))
    np.testing.assert_array_equal(layer(x, mask=causal), layer(x, mask=masks.causal()))


def test_a_mask_per_head_lands_on_its_head():
    layer, x = build(), draw(15, B, T, M)
    keep = np.random.default_rng(1).random((B, H, T, T)) < 0.5
    assert_close(layer(x, mask=keep), multi_head(layer, x, keep=keep)[0])
    one = layer(x[0], mask=keep[0])
    assert_close(one, multi_head(layer, x, keep=keep)[0][0])


def test_masks_of_other_ranks_are_refused():
    layer, x = build(), draw(16, B, T, M)
    with pytest.raises(ValueError, match=r"mask: expected shape \(T, S\), \(\*B, T, S\) or \(\*B, H, T, S\)"):
        layer(x, mask=np.ones((1, B, H, T, T), bool))
    with pytest.raises(TypeError, match="bias="):
        layer(x, mask=np.zeros((T, T), np.float32))


def test_bias_is_added_to_the_scores():
    layer, x = build(), draw(17, B, T, M)
    for shape in ((T, T), (1, H, T, T), (B, 1, T, T), (B, H, T, T)):
        bias = draw(18, *shape)
        assert_close(layer(x, bias=bias), multi_head(layer, x, bias=bias)[0])
    for count in (B, H):
        with pytest.raises(ValueError, match=r"bias: expected shape \(T, S\) or \(\*B, H, T, S\)"):
            layer(x, bias=draw(18, count, T, T))
    square = draw(19, T, T, M)
    assert_close(layer(square, bias=draw(18, T, T)), multi_head(layer, square, bias=draw(18, T, T))[0])


def test_query_offset_places_the_queries():
    layer, x = build(), draw(20, B, S, M)
    full = layer(x, mask=masks.causal())
    last = layer(x[:, 4:], x, mask=masks.causal(), query_offset=4)
    assert_close(last, full[:, 4:])
    with pytest.raises(ValueError, match="query_offset"):
        layer(x[:, 4:], x, mask=masks.causal())


def test_query_offset_turns_queries_and_not_the_keys():
    layer, x = build(rotary=positions.Rotary(base=50.0, width=6)), draw(41, B, S, M)
    last = layer(x[:, 4:], x, mask=masks.causal(), query_offset=4)
    assert_close(last, layer(x, mask=masks.causal())[:, 4:])


def test_precision_is_that_of_every_product():
    layer, x = build(precision="highest"), draw(42, B, T, M)
    assert precisions(layer, x) == {"HIGHEST"}
    assert precisions(build(), x) == {"None"}


# Leading axes.


def test_one_example_needs_no_batch():
    layer, x = build(), draw(21, B, T, M)
    out, aux = layer(x[0], aux=("weights", "entropy"))
    assert out.shape == (T, M)
    assert aux["weights"].shape == (H, T, T)
    assert aux["entropy"].shape == (H, T)
    assert_close(out, layer(x)[0])


def test_vmap_over_examples_equals_the_batch():
    layer, x = build(memory_width=W), jnp.asarray(draw(22, B, T, M))
    memory, lengths = jnp.asarray(draw(23, B, S, W)), jnp.array([3, 6])

    def one(query, memory, length):
        return layer(query, memory, mask=masks.lengths(length[None]))

    expected = layer(x, memory, mask=masks.lengths(lengths))
    assert_close(jax.vmap(one)(x, memory, lengths), expected)


@pytest.mark.parametrize("size", [2, 3])
def test_batches_equal_examples_also_where_all_sizes_agree(size):
    layer = full_width_heads(SINGLE)
    x = draw(24, size, size, 2)
    assert_close(layer(x), np.stack([layer(example) for example in x]))


def test_more_leading_axes_equal_a_flat_batch():
    layer, x = build(), draw(25, 3, B, T, M)
    keep = np.random.default_rng(2).random((3, B, T, T)) < 0.5
    flat = layer(x.reshape(3 * B, T, M), mask=keep.reshape(3 * B, T, T))
    assert_close(layer(x, mask=keep), flat.reshape(3, B, T, M))
    one_memory = layer(x, x[0, 0])
    assert_close(one_memory[2, 1], layer(x[2, 1], x[0, 0]))


# Errors.


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((M,),), r"query: expected shape \(\*B, length, 11\), got \(11,\)"),
        (((B, T, W),), r"query: expected shape \(\*B, length, 11\), got \(2, 5, 13\)"),
        (((B, T, M), (B, S, W)), r"key: expected shape \(\*B, length, 11\), got \(2, 7, 13\)"),
        (((B, T, M), (B, S, M), (B, S, W)), r"value: expected shape \(\*B, length, 11\), got \(2, 7, 13\)"),
        (((B, T, M), (B, S, M), (B, T, M)), "value"),
        (((B, T, M), None, (B, S, M)), r"key: expected an array where value is given"),
    ],
)
def test_wrong_shapes_name_the_argument(shapes, message):
    layer = build()
    with pytest.raises(ValueError, match=message):
        layer(*(None if shape is None else jnp.zeros(shape) for shape in shapes))


def test_integer_inputs_are_refused():
    with pytest.raises(TypeError, match=r"query: expected a floating-point array, got int32"):
        build()(jnp.zeros((B, T, M), jnp.int32))


# Dropout.


def test_attention_dropout_really_drops_and_keeps_the_mean():
    layer, x = build(dropout_rate=0.4), jnp.asarray(draw(26, B, T, M))
    quiet = layer(x, deterministic=True)
    assert_close(quiet, multi_head(layer, x)[0])
    first, second = layer(x), layer(x)
    assert not np.allclose(first, quiet)
    assert not np.allclose(first, second)
    # The output is linear in the dropped weights, so its mean over patterns is the quiet output.
    keys = jax.random.split(jax.random.key(0), 4000)
    samples = float64(jax.jit(jax.vmap(lambda key: layer(x, rngs=key)))(keys))
    error = samples.std(0) / np.sqrt(len(keys))
    assert np.all(np.abs(samples.mean(0) - float64(quiet)) < 6 * error)


def test_returned_weights_are_those_before_dropout():
    layer, x = build(dropout_rate=0.5), draw(27, B, T, M)
    out, aux = layer(x, aux=("weights",))
    expected, weights = multi_head(layer, x)
    assert_close(aux["weights"], weights)
    assert not np.allclose(out, expected)


def test_dropout_without_a_random_stream_is_an_error():
    layer = MultiHeadAttention(M, H, head_dim=D, dropout_rate=0.5, rngs=nnx.Rngs(params=0))
    x = draw(28, B, T, M)
    with pytest.raises(ValueError, match=r"rngs: dropout is on and needs a random stream 'dropout'"):
        layer(x)
    assert np.all(np.isfinite(layer(x, rngs=nnx.Rngs(dropout=1))))
    layer.eval()
    assert np.all(np.isfinite(layer(x)))


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5])
def test_rates_outside_0_1_are_refused(rate):
    with pytest.raises(ValueError, match=r"dropout_rate: expected a rate in \[0, 1\)"):
        MultiHeadAttention(M, H, head_dim=D, dropout_rate=rate, rngs=nnx.Rngs(0))


def test_dropout_follows_train_and_eval():
    layer, x = build(dropout_rate=0.5), draw(29, B, T, M)
    layer.eval()
    np.testing.assert_array_equal(layer(x), layer(x))
    assert not np.array_equal(layer(x, deterministic=False), layer(x))
    layer.train()
    assert not np.array_equal(layer(x), layer(x))
    np.testing.assert_array_equal(layer(x, deterministic=True), layer(x, deterministic=True))


def test_dropout_repeats_with_its_seed():
    x = draw(30, B, T, M)
    first, again, other = (build(dropout_rate=0.5, seed=0) for _ in range(3))
    np.testing.assert_array_equal(first(x), again(x))
    key = jax.random.key(1)
    np.testing.assert_array_equal(first(x, rngs=key), other(x, rngs=key))
    np.testing.assert_array_equal(first(x, rngs=nnx.Rngs(2)), other(x, rngs=nnx.Rngs(2)))


def test_a_layer_that_drops_nothing_holds_no_random_state():
    assert not jax.tree.leaves(nnx.state(build(), nnx.RngState))


def test_a_traced_mode_is_explained():
    layer, x = build(dropout_rate=0.5), jnp.asarray(draw(31, B, T, M))
    with pytest.raises(TypeError, match=r"deterministic: expected True, False or None.*static_argnames"):
        jax.jit(lambda x, off: layer(x, deterministic=off))(x, True)
    quiet = jax.jit(lambda x, off: layer(x, deterministic=off), static_argnames="off")(x, off=True)
    assert_close(quiet, multi_head(layer, x)[0])


# Transforms.


def test_jit_needs_no_static_arguments():
    layer, x = build(), jnp.asarray(draw(32, B, T, M))
    expected = layer(x, mask=masks.causal())
    assert_close(nnx.jit(lambda layer, x: layer(x, mask=masks.causal()))(layer, x), expected)
    assert_close(jax.jit(lambda x: layer(x, mask=masks.causal()))(x), expected)
    graph, state = nnx.split(layer)
    assert_close(
        jax.jit(lambda state, x: nnx.merge(graph, state)(x, mask=masks.causal()))(state, x), expected
    )


def test_another_number_of_heads_is_another_layer_under_jit():
    run = nnx.jit(lambda layer, x: layer(x))
    x = jnp.asarray(draw(33, B, T, M))
    for num_heads in (1, 2, 3):
        layer = build(num_heads)
        assert_close(run(layer, x), multi_head(layer, x)[0])


def test_jit_draws_fresh_dropout_from_the_layers_stream():
    layer, x = build(dropout_rate=0.5), jnp.asarray(draw(34, B, T, M))
    run = nnx.jit(lambda layer, x: layer(x))
    first, second = run(layer, x), run(layer, x)
    assert not np.array_equal(first, second)


def test_gradients_are_those_of_the_definition():
    layer, x = build(num_heads=6, num_key_heads=2, head_dim=3), jnp.asarray(draw(35, B, T, M))
    kernel = layer.key_projection.kernel[...]
    direction = jnp.asarray(draw(36, *kernel.shape))

    def loss(layer):
        return jnp.sum(jnp.sin(layer(x, mask=masks.causal())))

    slope = jnp.vdot(nnx.jit(nnx.grad(loss))(layer).key_projection.kernel[...], direction)

    def shifted(step):
        layer.key_projection.kernel[...] = kernel
        moved = float64(kernel) + step * float64(direction)
        probe = _Shifted(layer, moved)
        return np.sin(multi_head(probe, x, keep=np.tri(T, dtype=bool))[0]).sum()

    expected = (shifted(1e-6) - shifted(-1e-6)) / 2e-6
    assert float(slope) == pytest.approx(expected, rel=1e-4)


class _Shifted:
    """A layer with a float64 key kernel in place of its own."""

    def __init__(self, layer, kernel):
        self.__dict__.update(vars(layer))
        self.key_projection = _Linear(kernel, layer.key_projection.bias)


class _Linear:
    def __init__(self, kernel, bias):
        self.kernel, self.bias = kernel, bias


def test_empty_rows_and_nan_in_masked_memory_stay_out():
    layer, x = build(memory_width=W), jnp.asarray(draw(37, B, T, M))
    lengths = np.array([0, 4])
    memory = draw(38, B, S, W)
    memory[0], memory[1, 4:] = np.nan, np.inf
    clean = np.nan_to_num(memory, nan=0.0, posinf=0.0)

    def run(layer, x, memory):
        return layer(x, memory, mask=masks.lengths(lengths))

    out = run(layer, x, jnp.asarray(memory))
    np.testing.assert_array_equal(out, run(layer, x, jnp.asarray(clean)))
    # An empty row attends to nothing: only the bias of the output projection is left.
    assert_close(out[0], np.broadcast_to(layer.output_projection.bias[...], (T, M)))

    def loss(layer, x, memory):
        return jnp.sum(run(layer, x, memory) ** 2)

    measure = nnx.jit(nnx.grad(loss, argnums=(0, 1, 2)))
    grads = measure(layer, x, jnp.asarray(memory))
    jax.tree.map(np.testing.assert_array_equal, grads, measure(layer, x, jnp.asarray(clean)))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))
    assert not np.any(grads[1][0])


def test_nan_in_memory_that_is_attended_to_shows():
    layer, x, memory = build(memory_width=W), draw(39, B, T, M), draw(40, B, S, W)
    memory[1, 2, 3] = np.inf
    out = np.asarray(layer(x, memory))
    assert np.all(np.isfinite(out[0]))
    assert np.all(np.isnan(out[1]))


def test_what_is_remembered_is_the_memory_whatever_the_ranks():
    layer = MultiHeadAttention(6, 3, rngs=nnx.Rngs(0))
    queries, memory = draw(0, 2, 4, 2, 6), draw(3, 2, 4, 5, 6)
    for query in (queries, queries[0], queries[0, 0]):
        for key in (memory, memory[0], memory[0, 0]):
            found, expected = layer(query, layer.remember(key)), layer(query, key)
            np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="value: expected None, as what `remember` made holds the values"):
        layer(queries, layer.remember(memory), value=memory)
