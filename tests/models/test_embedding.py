import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import assert_close, build_drawn, draw, float64, layer_norm, linear
from regard import positions
from regard.models.embedding import TokenEmbedding
from test_models import TOKENS, B, M, T, V, configure

W = 7


def build(**options):
    return build_drawn(TokenEmbedding, configure(**options))


@nnx.jit
def run(embedding, inputs, **options):
    return embedding(inputs, **options)


def test_tokens_are_scaled_rows_plus_sinusoids():
    embedding = build()
    table = float64(embedding.entry.table.embedding[...])
    assert_close(run(embedding, TOKENS), np.sqrt(M) * table[TOKENS] + float64(positions.sinusoidal(T, M)))


def test_gradients_of_half_precision_are_added_up_in_float32():
    """Of a token that stands 600 times in a batch; a sum of ones in bfloat16 stops growing at 256."""
    embedding = build(scale_embedding=False, positions="none")
    graph, state = nnx.split(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), embedding))
    total = lambda state: nnx.merge(graph, state)(np.zeros((1, 600), int)).astype("float32").sum()
    assert (jax.tree.leaves(jax.grad(total)(state))[0][0] == 600).all()


def test_learned_positions_are_scaled_rows_too():
    embedding = build(positions="learned", max_length=T)
    table = float64(embedding.entry.table.embedding[...])
    places = float64(embedding.position_table.embedding[...])
    assert places.shape == (T, M)
    assert_close(run(embedding, TOKENS), np.sqrt(M) * (table[TOKENS] + places))
    order = np.array([4, 0, 2, 2, 1], np.int32)
    assert_close(run(embedding, TOKENS, positions=order), np.sqrt(M) * (table[TOKENS] + places[order]))
    # What the table does not have is refused, or NaN where it is traced.
    with pytest.raises(ValueError, match=r"positions: .* values in 0..4 \(max_length=5\), got -1 at \[1\]"):
        embedding(TOKENS, positions=order - 1)
    unknown = np.isnan(run(embedding, TOKENS, positions=order - 1)).all(-1)
    np.testing.assert_array_equal(unknown, [[False, True, False, False, False]] * 2)
    # They have a limit, and sinusoids have none.
    long = np.zeros((1, 11), np.int32)
    assert jax.eval_shape(lambda: build(max_length=3)(long)).shape == (1, 11, M)
    with pytest.raises(ValueError, match=r"at most max_length = 5 positions, got 11.*sinusoidal"):
        jax.eval_shape(lambda: embedding(long))


def test_types_and_a_norm_are_the_definition():
    options = {"num_token_types": 3, "embedding_norm": True, "scale_embedding": False, "positions": "none"}
    embedding, types = build(**options), np.array([[0, 2, 1, 0, 1]] * 2)
    rows = float64(embedding.entry.table.embedding[...])[TOKENS]
    rows = rows + float64(embedding.type_table.embedding[...])[types]
    assert_close(run(embedding, TOKENS, token_types=types), layer_norm(embedding.norm, rows))
    with pytest.raises(ValueError, match=r"token_types: .* 0..2 .*, got 3 at \[0, 1\] and 1 more"):
        embedding(TOKENS, token_types=types + 1)
    with pytest.raises(ValueError, match="token_types: expected None"):
        jax.eval_shape(lambda: build()(TOKENS, token_types=types))


def test_real_vectors_pass_a_linear_map():
    embedding, x = build(input_width=W, class_token=True), draw(0, B, T, W)
    front = np.broadcast_to(float64(embedding.class_token[...]), (B, 1, M))
    expected = np.concatenate([front, linear(embedding.entry.linear, x)], 1)
    assert_close(run(embedding, x), expected + float64(positions.sinusoidal(T + 1, M)))


def test_tokens_and_vectors_have_a_size_comparable_to_positions():
    sizes = {"d_model": 384, "positions": "none"}
    tables = [configure(**sizes, vocab_size=199), configure(**sizes, input_width=61)]
    tokens, vectors = nnx.jit(lambda: [TokenEmbedding(table, rngs=nnx.Rngs(0)) for table in tables])()
    assert np.asarray(run(tokens, np.arange(199))).std() == pytest.approx(1.0, rel=0.05)
    assert np.asarray(run(vectors, draw(1, 211, 61))).std() == pytest.approx(1.0, rel=0.2)


def test_out_of_range_token_is_an_error():
    for wrong in (V, 10**6, -1):
        with pytest.raises(ValueError, match=rf"0\.\.16 \(.*=17\), got {wrong} at \[1, 0\] and 1 more$"):
            build()(np.where(TOKENS == 5, np.int32(wrong), TOKENS))


def test_out_of_range_token_is_nan_under_jit():
    @nnx.jit
    def measure(embedding, tokens):
        loss = lambda embedding: jnp.nansum(embedding(tokens))
        return embedding(tokens), nnx.grad(loss)(embedding).entry.table.embedding[...]

    for wrong in (V, 10**6, -1, -V):
        tokens = np.full_like(TOKENS, 4)
        tokens[1, 3] = wrong
        out, grad = (np.array(found) for found in measure(build(), tokens))
        assert np.all(np.isnan(out[1, 3]))
        out[1, 3] = 0.0
        assert np.all(np.isfinite(out))
        assert np.flatnonzero(np.any(grad != 0, axis=1)).tolist() == [4]


def test_tokens_may_have_any_integer_dtype(x64):
    for dtype, wrong in ((np.uint8, 127), (np.int64, 2**32)):
        tokens, embedding = TOKENS.astype(dtype), build(vocab_size=1009)
        np.testing.assert_array_equal(run(embedding, tokens), run(embedding, TOKENS))
        tokens[0, 0] = wrong
        with pytest.raises(ValueError, match=rf"got {wrong} at \[0, 0\]"):
            build()(tokens)
        assert np.all(np.isnan(run(build(), tokens)[0, 0]))


def test_padding_may_hold_anything():
    embedding, lengths = build(), np.array([2, 5])
    wild = TOKENS.copy()
    wild[0, 2:] = [-1, 10**6, V]
    found, expected = (run(embedding, tokens, lengths=lengths) for tokens in (wild, TOKENS))
    np.testing.assert_array_equal(found, expected)
    assert np.all(np.isfinite(found))
    with pytest.raises(ValueError, match=r"got -1 at \[0, 2\]$"):
        embedding(wild, lengths=np.array([3, 5]))


def test_what_does_not_fit_is_refused():
    real = {"input_width": W}
    for options, inputs, lengths, error, message in (
        ({}, TOKENS > 3, None, TypeError, r"tokens: expected integers \(vocab_size=17\), got"),
        ({}, TOKENS[..., None], None, ValueError, r"tokens: expected shape \(batch, T\) or \(T,\), got"),
        (real, np.zeros((B, T, W), int), None, TypeError, r"floating point vectors \(input_width=7\), got"),
        (real, TOKENS, None, ValueError, r"\(batch, T, 7\) or \(T, 7\), got shape \(2, 5\)"),
        ({}, TOKENS, np.array([2]), ValueError, r"one length per row, shape \(2,\), got \(1,\)"),
        ({}, TOKENS, np.array([-1, 6]), ValueError, r"in 0\.\.5 \(the length of .* -1 at \[0\] and 1 more"),
        ({}, TOKENS, np.array([2.0, 5.0]), TypeError, "lengths: expected integers, got float64"),
    ):
        embedding = build(**options)
        with pytest.raises(error, match=message):
            jax.eval_shape(lambda: embedding(inputs, lengths=lengths))  # noqa: B023
