import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import assert_close, draw, float64, linear
from regard import positions
from regard.models import TransformerConfig
from regard.models.embedding import TokenEmbedding

B, T, M, V, W = 2, 5, 12, 17, 7
SIZES = {"d_model": M, "num_heads": 3, "d_ff": 13, "num_layers": 1}
TOKENS = np.array([[3, 16, 0, 0, 1], [5, 5, 2, 9, 11]])


def build(seed=0, **options):
    if "input_width" not in options:
        options = {"vocab_size": V, **options}
    return TokenEmbedding(TransformerConfig(**SIZES, **options), rngs=nnx.Rngs(seed))


# The definition.


def test_tokens_are_scaled_rows_plus_sinusoids():
    embedding = build()
    table = float64(embedding.entry.table.embedding[...])
    expected = np.sqrt(M) * table[TOKENS] + float64(positions.sinusoidal(T, M))
    assert_close(embedding(TOKENS), expected)
    assert_close(embedding(TOKENS[0]), expected[0])


def test_learned_positions_are_scaled_rows_too():
    embedding = build(positions="learned", max_length=T)
    table = float64(embedding.entry.table.embedding[...])
    places = float64(embedding.position_table.embedding[...])
    assert places.shape == (T, M)
    assert_close(embedding(TOKENS), np.sqrt(M) * (table[TOKENS] + places))


def test_without_positions_only_the_token_counts():
    out = np.asarray(build(positions="none")(TOKENS))
    np.testing.assert_array_equal(out[1, 0], out[1, 1])
    assert not np.allclose(build()(TOKENS)[1, 0], build()(TOKENS)[1, 1])


def test_real_vectors_pass_a_linear_map():
    embedding, x = build(input_width=W), draw(0, B, T, W)
    expected = linear(embedding.entry.linear, x) + float64(positions.sinusoidal(T, M))
    assert_close(embedding(x), expected)
    assert_close(embedding(x[0]), expected[0])


@pytest.mark.parametrize("d_model", [12, 384])
def test_tokens_and_positions_are_of_comparable_size_at_any_width(d_model):
    config = TransformerConfig(**{**SIZES, "d_model": d_model}, vocab_size=199, positions="none")
    tokens = TokenEmbedding(config, rngs=nnx.Rngs(0))(np.arange(199))
    assert np.asarray(tokens).std() == pytest.approx(1.0, rel=0.05)
    vectors = TransformerConfig(**{**SIZES, "d_model": d_model}, input_width=61, positions="none")
    hidden = TokenEmbedding(vectors, rngs=nnx.Rngs(0))(draw(1, 211, 61))
    assert np.asarray(hidden).std() == pytest.approx(1.0, rel=0.2)
    assert np.mean(np.square(positions.sinusoidal(T, d_model))) == pytest.approx(0.5)


def test_learned_positions_have_a_limit_and_sinusoids_have_none():
    long = np.zeros((1, 11), np.int32)
    assert build(max_length=3)(long).shape == (1, 11, M)
    with pytest.raises(ValueError, match=r"at most max_length = 3 positions, got 11.*sinusoidal"):
        build(positions="learned", max_length=3)(long)


def test_dropout_zeroes_embeddings_in_training_alone():
    embedding = build(dropout_rate=0.5)
    out = np.asarray(embedding(TOKENS))
    assert 0.3 < (out == 0).mean() < 0.7
    embedding.eval()
    np.testing.assert_allclose(out[out != 0], 2 * np.asarray(embedding(TOKENS))[out != 0], rtol=1e-6)


# Tokens out of range.


@pytest.mark.parametrize("wrong", [V, V + 1, 10**6, -1, -V])
def test_out_of_range_token_is_an_error(wrong):
    tokens = TOKENS.copy()
    tokens[1, 3] = wrong
    low, high = min(0, wrong), max(16, wrong)
    with pytest.raises(ValueError, match=rf"0\.\.16 \(vocab_size=17\), got {low}\.\.{high}$"):
        build()(tokens)


@pytest.mark.parametrize("wrong", [V, 10**6, -1, -V])
def test_out_of_range_token_is_nan_under_jit(wrong):
    embedding = build()
    tokens = jnp.asarray(TOKENS).at[1, 3].set(wrong)
    out = np.array(nnx.jit(lambda embedding, tokens: embedding(tokens))(embedding, tokens))
    assert np.all(np.isnan(out[1, 3]))
    out[1, 3] = 0.0
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint32, np.int64])
def test_tokens_may_have_any_integer_dtype(dtype):
    tokens = TOKENS.astype(dtype)
    np.testing.assert_array_equal(build()(tokens), build()(TOKENS))
    tokens[0, 0] = 127
    with pytest.raises(ValueError, match=r"got 0\.\.127"):
        build()(tokens)
    if dtype is not np.int64:
        run = jax.jit(build())
        assert np.all(np.isnan(run(jnp.asarray(tokens))[0, 0]))


def test_a_large_vocabulary_takes_tokens_of_small_integers():
    config = TransformerConfig(**SIZES, vocab_size=1009)
    embedding = TokenEmbedding(config, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(embedding(TOKENS.astype(np.uint8)), embedding(TOKENS))


def test_large_64_bit_tokens_do_not_wrap_into_range(x64):
    tokens = jnp.asarray(TOKENS, jnp.int64).at[0, 0].set(2**32)
    with pytest.raises(ValueError, match="4294967296"):
        build()(tokens)
    assert np.all(np.isnan(jax.jit(build())(tokens)[0, 0]))


def test_a_vocabulary_of_one_word_serves():
    embedding = TokenEmbedding(TransformerConfig(**SIZES, vocab_size=1), rngs=nnx.Rngs(0))
    assert np.all(np.isfinite(embedding(np.zeros((B, T), np.int32))))
    with pytest.raises(ValueError, match=r"0\.\.0 \(vocab_size=1\), got 0\.\.1"):
        embedding(np.array([[0, 1]]))


def test_no_gradient_reaches_the_table_from_a_wrong_token():
    embedding = build(positions="none")

    def loss(embedding, tokens):
        return jnp.nansum(embedding(tokens))

    grad = nnx.jit(nnx.grad(loss))(embedding, jnp.array([[4, -1, V]])).entry.table.embedding[...]
    assert np.flatnonzero(np.any(grad != 0, axis=1)).tolist() == [4]


# Padding.


def test_padding_may_hold_anything():
    embedding, lengths = build(), np.array([2, 5])
    wild = TOKENS.copy()
    wild[0, 2:] = [-1, 10**6, V]
    np.testing.assert_array_equal(embedding(wild, lengths=lengths), embedding(TOKENS, lengths=lengths))
    run = nnx.jit(lambda embedding, tokens, lengths: embedding(tokens, lengths=lengths))
    assert np.all(np.isfinite(run(embedding, jnp.asarray(wild), jnp.asarray(lengths))))
    with pytest.raises(ValueError, match=r"got -1\.\.16"):
        embedding(wild, lengths=np.array([3, 5]))


def test_nan_in_the_padding_of_real_vectors_reaches_no_gradient():
    embedding, x, lengths = build(input_width=W), draw(2, B, T, W), jnp.array([0, 3])
    x[0], x[1, 3:] = np.nan, np.inf
    clean = np.nan_to_num(x, nan=0.0, posinf=0.0)

    def loss(embedding, x):
        return jnp.sum(embedding(x, lengths=lengths) ** 2)

    grads = nnx.grad(loss, argnums=(0, 1))(embedding, jnp.asarray(x))
    expected = nnx.grad(loss, argnums=(0, 1))(embedding, jnp.asarray(clean))
    jax.tree.map(np.testing.assert_array_equal, grads, expected)


# Errors.


def test_tokens_must_be_integers():
    for bad in (TOKENS.astype(np.float32), TOKENS > 3):
        with pytest.raises(TypeError, match=r"tokens: expected integers \(vocab_size=17\), got"):
            build()(bad)


def test_real_inputs_must_be_floating_point_and_of_the_width():
    with pytest.raises(TypeError, match=r"inputs: expected floating point vectors \(input_width=7\), got"):
        build(input_width=W)(np.zeros((B, T, W), np.int32))
    with pytest.raises(ValueError, match=r"\(batch, T, 7\) or \(T, 7\), got shape \(2, 5\)"):
        build(input_width=W)(TOKENS)


def test_tokens_of_three_axes_are_refused():
    with pytest.raises(ValueError, match=r"tokens: expected shape \(batch, T\) or \(T,\), got \(2, 5, 1\)"):
        build()(TOKENS[..., None])


@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        (np.array([2]), ValueError, r"one length per row, shape \(2,\), got \(1,\)"),
        (np.array([2, 6]), ValueError, r"lengths in 0\.\.5 \(the length of the input\), got 2\.\.6"),
        (np.array([-1, 5]), ValueError, r"got -1\.\.5"),
        (np.array([2.0, 5.0]), TypeError, "lengths: expected integers, got float64"),
    ],
)
def test_lengths_are_checked(lengths, error, message):
    with pytest.raises(error, match=message):
        build()(TOKENS, lengths=lengths)
