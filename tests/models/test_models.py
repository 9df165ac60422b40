import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

from layer_oracle import assert_close, build_drawn, count_parameters, draw, linear, multi_head, program_of
from regard.models import Classifier, Decoder, Encoder, EncoderDecoder, TransformerConfig
from regard.models.classifier import MeanPooling, build_pooling

B, T, S, M, H, F, V, W, C = 2, 5, 7, 12, 3, 13, 17, 11, 4
SIZES = {"d_model": M, "num_heads": H, "d_ff": F, "num_layers": 1}
TOKENS = np.array([[3, 16, 0, 0, 1], [5, 5, 2, 9, 11]], np.int32)


def configure(**options):
    return TransformerConfig(**{**SIZES, "vocab_size": None if "input_width" in options else V, **options})


run = nnx.jit(lambda model, *inputs, **options: model(*inputs, **options))
look = nnx.jit(lambda model, *inputs, **options: model(*inputs, **options, aux=("weights",)))


def test_an_encoder_without_positions_is_equivariant_not_invariant():
    order = np.array([2, 4, 1, 0, 3])
    for positions in ("none", "sinusoidal"):
        encoder = build_drawn(Encoder, configure(positions=positions))
        found, whole = np.asarray(run(encoder, TOKENS[:, order])), np.asarray(run(encoder, TOKENS))
        assert np.allclose(found, whole[:, order], atol=1e-5) == (positions == "none")
        assert not np.allclose(found, whole)


def build_classifier(pooling, **options):
    return build_drawn(Classifier, configure(**options), C, pooling=pooling)


def test_the_classifier_of_the_tired_cat_has_15842_parameters():
    options = {"d_model": 32, "num_heads": 4, "d_ff": 128, "num_layers": 1, "vocab_size": 100}
    config = TransformerConfig(**options, norm="post", attention_bias=False)
    assert count_parameters(build_drawn(Classifier, config, 2)) == 15_842


def test_poolings_are_their_definitions():
    """Rows of length 0 give zeros, or the bias of the attention; inputs of no length are finite, too."""
    hidden, lengths = draw(0, 3, T, M), np.array([3, 5, 0])
    hidden[2] = np.nan
    valid = np.arange(T) < lengths[:, None]
    clean = np.where(valid[..., None], hidden, 0)
    attention = build_drawn(build_pooling, "attention", configure())
    poolings = [MeanPooling(), build_pooling("first", configure(), nnx.Rngs(0)), attention]
    pool = nnx.jit(lambda poolings, hidden, lengths: [one(hidden, lengths, ("weights",)) for one in poolings])
    (mean, _), (first, _), (found, seen) = pool(poolings, hidden, lengths)
    assert_close(mean, clean.sum(1) / np.maximum(lengths, 1)[:, None])
    assert_close(first, clean[:, 0])
    query = np.broadcast_to(np.float64(attention.query[...]) * np.sqrt(M), (3, 1, M))
    expected, weights = multi_head(attention.attention, query, clean, keep=valid[:, None, None])
    assert_close(found, expected[:, 0])
    assert_close(seen["weights"], weights)
    assert all(np.isfinite(out).all() for out, _ in pool(poolings, hidden[:, :0], None))
    # A mean in half precision does not overflow.
    for counts in (None, np.array([601])):
        assert MeanPooling()(jnp.full((1, 701, 3), 211, jnp.float16), counts, ())[0].tolist() == [[211] * 3]


@pytest.mark.parametrize("pooling", ["attention", None])
def test_a_classifier_is_a_head_on_what_is_pooled(pooling):
    model, lengths = build_classifier(pooling), np.array([3, 5])
    hidden = np.float64(run(model.encoder, TOKENS, lengths=lengths))
    logits, aux = look(model, TOKENS, lengths=lengths)
    assert len(aux["blocks"]) == 1
    if pooling is not None:
        assert aux["pooling"]["weights"].shape == (B, H, 1, T)
        hidden = np.float64(model.pooling(jnp.float32(hidden), lengths, ())[0])
    assert_close(logits, linear(model.head, hidden))


def test_encoder_decoder_padding_changes_neither_logits_nor_gradients():
    model = build_drawn(EncoderDecoder, configure(input_width=W), target_vocab_size=V)
    deep = nnx.eval_shape(lambda: EncoderDecoder(configure(num_decoder_layers=2), rngs=nnx.Rngs(0)))
    assert len(deep.decoder.blocks) == 2
    source, lengths = draw(1, B, S, W), np.array([0, 4])
    target, target_lengths = TOKENS.copy(), np.array([2, 0])
    other_source, other_target = source.copy(), target.copy()
    other_source[0], other_source[1, 4:] = np.nan, np.inf
    other_target[0, 2:], other_target[1] = -1, 999

    def loss(model, source, target):
        logits = model(source, target, source_lengths=lengths, target_lengths=target_lengths)
        return jnp.sum(jnp.sin(logits)), logits

    measure = nnx.jit(nnx.value_and_grad(loss, has_aux=True))
    plain, changed = measure(model, source, target), measure(model, other_source, other_target)
    jax.tree.map(np.testing.assert_array_equal, plain, changed)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(plain))


def test_models_drop_in_training_and_not_in_evaluation():
    options = {"dropout_rate": 0.2, "attention_dropout_rate": 0.3}
    model = build_drawn(Classifier, configure(num_layers=2, **options), C, pooling="attention")
    rates = [module.rate for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Dropout)]
    # Embedding; per block attention weights, two residuals and the hidden layer; the pooling's weights.
    assert sorted(rates) == sorted([0.2] + 2 * [0.3, 0.2, 0.2, 0.2] + [0.3])
    assert "random_" in program_of(model, TOKENS)
    model.eval()
    assert "random_" not in program_of(model, TOKENS)


VECTORS = configure(input_width=W, class_token=True, positions="none")


def test_a_class_token_is_pooled_beside_all_inputs():
    model, x = build_drawn(Classifier, VECTORS, 5, pooling="attention"), draw(0, 2, 4, W)
    given = np.array([4, 4], np.uint8), None, np.array([3, 0])
    call = nnx.jit(lambda model, x: [*(model(x, lengths=some) for some in given), model(x[:1, :3])])
    whole, plain, cut, short = call(model, x)
    np.testing.assert_allclose(whole, plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(cut[:1], short, rtol=1e-5, atol=1e-6)
    assert model.encoder.hidden_lengths(np.array([255], np.uint8)).tolist() == [256]


def test_a_decoder_reads_the_class_token_and_all_of_the_source():
    model, x = build_drawn(EncoderDecoder, VECTORS, target_vocab_size=13), draw(0, 2, 4, W)
    target, lengths = np.array([[1, 2], [3, 4]]), np.array([4, 4])
    found = run(model, x, target, source_lengths=lengths)
    np.testing.assert_allclose(found, run(model, x, target), rtol=1e-5, atol=1e-6)
    start = nnx.jit(lambda model: model.start_cache(jnp.ones((2, 5, M)), 3, source_lengths=lengths))
    assert start(model).memory_lengths.tolist() == [5, 5]


EXPORTED = {
    "rotary": {"num_key_heads": 1, "windows": (3, None), "num_layers": 2},
    "learned, with experts": {"num_experts": 3, "experts_per_token": 2, "max_length": 200},
    "relative, in a scan": {"num_layers": 2, "scan_layers": True},
    "sinusoidal": {"attention_softcap": 5.0, "sinks": True},
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_a_decoder_is_exported_once_for_every_batch_and_length(kind):
    config = configure(**EXPORTED[kind], positions=kind.partition(",")[0])
    graph, state = nnx.split(build_drawn(Decoder, config))

    loss = lambda state, tokens, lengths: jnp.sin(nnx.merge(graph, state)(tokens, lengths=lengths)).mean()
    differentiate = jax.jit(jax.value_and_grad(loss))
    batch, length = export.symbolic_shape("batch, length")
    shapes = jax.tree.map(jax.typeof, state), jax.ShapeDtypeStruct((batch, length), np.int32)
    program = export.export(differentiate)(*shapes, jax.ShapeDtypeStruct((batch,), np.int32))
    tokens, lengths = np.arange(3 * 141, dtype=np.int32).reshape(3, -1) % V, np.array([141, 7, 130], np.int32)
    answers, expected = program.call(state, tokens, lengths), differentiate(state, tokens, lengths)
    jax.tree.map(assert_close, answers, expected)
