import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from economy import mostly_slow
from layer_oracle import (
    assert_close,
    compiled,
    count_parameters,
    draw,
    feed_forward,
    float64,
    layer_norm,
    linear,
    multi_head,
    randomize,
)
from regard import masks
from regard.models import Classifier, Decoder, Encoder, EncoderDecoder, TransformerConfig, generate
from regard.models.pooling import MeanPooling

B, T, S, M, H, F, V, W, C = 2, 5, 7, 12, 3, 13, 17, 11, 4
SIZES = {"d_model": M, "num_heads": H, "d_ff": F, "num_layers": 2}
TOKENS = np.array([[3, 16, 0, 0, 1], [5, 5, 2, 9, 11]], np.int32)
SOURCE = np.array([[1, 2, 3, 4, 5, 6, 7], [16, 15, 14, 13, 12, 11, 10]], np.int32)


def configure(**options):
    if "input_width" not in options:
        options = {"vocab_size": V, **options}
    return TransformerConfig(**{**SIZES, **options})


def run_encoder(encoder, hidden, keep=True):
    """The stack in float64, from the embedding on."""
    y = float64(hidden)
    for block in encoder.stack.blocks:
        attend_norm, branch_norm = block.attention_residual.norm, block.feed_forward_residual.norm
        if encoder.config.norm == "pre":
            y = y + multi_head(block.attention, layer_norm(attend_norm, y), keep=keep)[0]
            y = y + feed_forward(block.feed_forward, layer_norm(branch_norm, y))
        else:
            y = layer_norm(attend_norm, y + multi_head(block.attention, y, keep=keep)[0])
            y = layer_norm(branch_norm, y + feed_forward(block.feed_forward, y))
    return y if encoder.stack.final_norm is None else layer_norm(encoder.stack.final_norm, y)


# Encoder.


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_encoder_is_the_definition(norm):
    encoder = randomize(Encoder(configure(norm=norm, num_key_heads=1, head_dim=7), rngs=nnx.Rngs(0)))
    assert (encoder.stack.final_norm is None) == (norm == "post")
    expected = run_encoder(encoder, encoder.embedding(TOKENS))
    if norm == "post":
        assert_close(encoder(TOKENS), expected)
    assert_close(nnx.jit(lambda encoder, tokens: encoder(tokens))(encoder, TOKENS), expected)


def test_encoder_masks_padding_and_what_the_caller_masks():
    encoder = randomize(Encoder(configure(), rngs=nnx.Rngs(0)))
    lengths = np.array([3, 5])
    valid = np.arange(T) < lengths[:, None]
    keep = valid[:, None, None] & np.tri(T, dtype=bool)
    hidden, aux = encoder(TOKENS, lengths=lengths, mask=masks.causal(), aux=("weights", "entropy"))
    expected = run_encoder(encoder, encoder.embedding(TOKENS, lengths=lengths), keep)
    assert_close(hidden, np.where(valid[..., None], expected, 0))
    assert len(aux["blocks"]) == 2
    for seen in aux["blocks"]:
        assert seen["weights"].shape == (B, H, T, T)
        assert seen["entropy"].shape == (B, H, T)
        assert not np.any(np.where(keep, 0, seen["weights"]))
    np.testing.assert_array_equal(encoder(TOKENS, lengths=lengths, mask=np.tri(T, dtype=bool)), hidden)


def test_encoder_takes_a_mask_per_example():
    encoder = randomize(Encoder(configure(), rngs=nnx.Rngs(0)))
    keep = np.random.default_rng(0).random((H, T, T)) < 0.5
    tokens = np.concatenate([TOKENS, TOKENS[:1]])  # as many examples as heads
    expected = run_encoder(encoder, encoder.embedding(tokens), keep[:, None])
    assert_close(encoder(tokens, mask=keep), expected)
    with pytest.raises(ValueError, match=r"mask: shape \(5, 5\) may mean"):
        encoder(np.zeros((T, T), np.int32), mask=np.tri(T, dtype=bool))


@pytest.mark.parametrize("num_layers", [0, 1, 3])
def test_depth_is_an_argument_and_blocks_are_their_own(num_layers):
    encoder = Encoder(configure(num_layers=num_layers), rngs=nnx.Rngs(0))
    hidden, aux = encoder(TOKENS, aux=("lse",))
    assert hidden.shape == (B, T, M)
    assert len(aux["blocks"]) == len(encoder.stack.blocks) == num_layers
    kernels = [np.asarray(block.attention.query_projection.kernel[...]) for block in encoder.stack.blocks]
    assert len({kernel.tobytes() for kernel in kernels}) == num_layers


def test_an_encoder_without_positions_is_equivariant_not_invariant():
    order = np.array([2, 4, 1, 0, 3])
    encoder = Encoder(configure(positions="none"), rngs=nnx.Rngs(0))
    assert_close(encoder(TOKENS[:, order]), np.asarray(encoder(TOKENS))[:, order])
    assert not np.allclose(encoder(TOKENS[:, order]), encoder(TOKENS))
    placed = Encoder(configure(), rngs=nnx.Rngs(0))
    assert not np.allclose(placed(TOKENS[:, order]), np.asarray(placed(TOKENS))[:, order], atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_one_example_and_vmap_agree_with_the_batch(position):
    encoder = Encoder(configure(positions=position), rngs=nnx.Rngs(0))
    lengths = jnp.array([3, 5])
    batched = encoder(TOKENS, lengths=lengths)
    assert_close(encoder(TOKENS[0], lengths=lengths[0]), batched[0])
    one_by_one = jax.jit(jax.vmap(lambda tokens, length: encoder(tokens, lengths=length)))
    assert_close(one_by_one(jnp.asarray(TOKENS), lengths), batched)


# Padding.


@settings(max_examples=8)
@given(seed=st.integers(0, 999), lengths=st.lists(st.integers(0, T), min_size=B, max_size=B))
@pytest.mark.parametrize(
    ("kind", "pooling"),
    mostly_slow(
        itertools.product(["tokens", "vectors"], ["mean", "first", "attention"]),
        ("tokens", "attention"),
        ("tokens", "first"),
        ("vectors", "mean"),
    ),
)
def test_padding_changes_neither_logits_nor_gradients(pooling, kind, seed, lengths):
    lengths = np.array(lengths)
    rng = np.random.default_rng(seed)
    padding = np.arange(T) >= lengths[:, None]
    if kind == "tokens":
        model = build_classifier(pooling)
        inputs = rng.integers(0, V, (B, T), np.int32)
        other = np.where(padding, rng.integers(-99, 99, (B, T), np.int32), inputs)
    else:
        model = build_classifier(pooling, input_width=W)
        inputs = rng.normal(size=(B, T, W)).astype(np.float32)
        other = np.where(padding[..., None], np.float32(rng.choice([np.nan, np.inf, 1e30])), inputs)
    plain, changed = (
        measure_classifier(model, jnp.asarray(x), jnp.asarray(lengths)) for x in (inputs, other)
    )
    jax.tree.map(np.testing.assert_array_equal, plain, changed)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(plain))


MODELS = {}


def build_classifier(pooling, **options):
    """One model per kind, so that its compiled step is found again."""
    key = (pooling, *sorted(options.items()))
    if key not in MODELS:
        config = configure(num_layers=1, **options)
        MODELS[key] = randomize(Classifier(config, C, pooling=pooling, rngs=nnx.Rngs(0)))
    return MODELS[key]


@nnx.jit
def measure_classifier(model, inputs, lengths):
    def loss(model):
        logits = model(inputs, lengths=lengths)
        return jnp.sum(jnp.sin(logits)), logits

    (_, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    return logits, grads


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("pooling", ["mean", "first", "attention"])
def test_a_padded_row_is_the_short_row(pooling, length):
    model = build_classifier(pooling)
    padded = model(TOKENS, lengths=np.full(B, length))
    assert_close(padded, model(TOKENS[:, :length]))


# Classifier.


def test_the_classifier_of_the_tired_cat_has_15842_parameters():
    config = TransformerConfig(
        d_model=32, num_heads=4, d_ff=128, num_layers=1, vocab_size=100, norm="post", attention_bias=False
    )
    assert count_parameters(Classifier(config, 2, rngs=nnx.Rngs(0))) == 15_842


@pytest.mark.slow
def test_poolings_are_their_definitions():
    lengths = np.array([3, 5])
    valid = np.arange(T) < lengths[:, None]
    for pooling in ("mean", "first", "attention", None):
        model = randomize(Classifier(configure(), C, pooling=pooling, rngs=nnx.Rngs(0)))
        hidden = float64(model.encoder(TOKENS, lengths=lengths))
        if pooling == "mean":
            hidden = hidden.sum(1) / lengths[:, None]
        elif pooling == "first":
            hidden = hidden[:, 0]
        elif pooling == "attention":
            query = np.broadcast_to(float64(model.pooling.query[...]) * np.sqrt(M), (B, 1, M))
            keep = valid[:, None, None]
            hidden, weights = multi_head(model.pooling.attention, query, hidden, keep=keep)
            hidden = hidden[:, 0]
        logits, aux = model(TOKENS, lengths=lengths, aux=("weights",))
        assert_close(logits, linear(model.head, hidden))
        assert len(aux["blocks"]) == 2
        assert ("pooling" in aux) == (pooling == "attention")
        if pooling == "attention":
            assert aux["pooling"]["weights"].shape == (B, H, 1, T)
            assert_close(aux["pooling"]["weights"], weights)


@pytest.mark.parametrize("lengths", [None, np.array([601])])
def test_a_mean_in_half_precision_does_not_overflow(lengths):
    hidden = jnp.full((1, 701, 3), 211, jnp.float16)
    assert MeanPooling()(hidden, lengths, ())[0].tolist() == [[211] * 3]


@pytest.mark.parametrize("pooling", ["mean", "first", "attention", None])
def test_examples_of_length_0_are_finite_and_all_alike(pooling):
    model = randomize(Classifier(configure(), C, pooling=pooling, rngs=nnx.Rngs(0)))
    logits = model(TOKENS, lengths=np.zeros(B, int))
    assert np.all(np.isfinite(logits))
    np.testing.assert_array_equal(logits[0], logits[1])
    if pooling in ("mean", "first"):
        np.testing.assert_array_equal(logits[0], model.head.bias[...])


def test_inputs_of_no_length_give_finite_logits():
    for pooling in ("mean", "first", "attention"):
        model = Classifier(configure(), C, pooling=pooling, rngs=nnx.Rngs(0))
        assert np.all(np.isfinite(model(np.zeros((B, 0), np.int32))))


@pytest.mark.slow
def test_a_classifier_takes_one_example():
    for pooling in ("mean", "first", "attention", None):
        model = Classifier(configure(), C, pooling=pooling, rngs=nnx.Rngs(0))
        logits, aux = model(TOKENS[0], lengths=jnp.array(3), aux=("weights",))
        assert_close(logits, model(TOKENS, lengths=jnp.array([3, 3]))[0])
        assert aux["blocks"][0]["weights"].shape == (H, T, T)


def test_a_classifier_takes_real_inputs_under_jit():
    model = Classifier(configure(input_width=W), C, pooling="attention", rngs=nnx.Rngs(0))
    x = draw(0, B, T, W)
    assert_close(nnx.jit(lambda model, x: model(x))(model, x), model(x))


def test_unknown_poolings_are_refused():
    with pytest.raises(ValueError, match=r"mean, attention, first; got 'man' \(nearest: mean\)"):
        Classifier(configure(), C, pooling="man", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_classes: expected an integer of at least 1, got 0"):
        Classifier(configure(), 0, rngs=nnx.Rngs(0))


# Wrong tokens through whole models.


def test_a_wrong_token_stops_every_model():
    wrong = np.array([[1, V, 2]], np.int32)
    model = EncoderDecoder(configure(), rngs=nnx.Rngs(0))
    calls = [
        lambda: Classifier(configure(), C, rngs=nnx.Rngs(0))(wrong),
        lambda: Decoder(configure(), rngs=nnx.Rngs(0))(wrong),
        lambda: model(wrong, wrong[:, :1]),
        lambda: model(wrong[:, :1], wrong),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"vocab_size=17\), got 1\.\.17"):
            call()


@pytest.mark.parametrize("wrong", [V, -1])
def test_a_wrong_token_makes_the_loss_nan_under_jit(wrong):
    tokens = jnp.asarray(TOKENS).at[1, 2].set(wrong)
    for pooling in ("mean", "first", "attention"):
        logits, grads = measure_classifier(build_classifier(pooling), tokens, jnp.array([T, T]))
        assert np.all(np.isfinite(logits[0]))
        assert np.all(np.isnan(logits[1]))
        assert any(np.any(np.isnan(leaf)) for leaf in jax.tree.leaves(grads))


# Decoder.


def test_decoder_is_the_encoder_under_a_causal_mask():
    model = randomize(Decoder(configure(), rngs=nnx.Rngs(0)))
    logits, aux = model(TOKENS, aux=("weights",))
    expected = run_encoder(model.trunk, model.trunk.embedding(TOKENS), np.tri(T, dtype=bool))
    assert_close(logits, linear(model.head, expected))
    assert len(aux["blocks"]) == 2
    assert not np.any(np.triu(aux["blocks"][0]["weights"], 1))


def test_decoder_never_sees_the_future():
    model = Decoder(configure(), rngs=nnx.Rngs(0))
    logits = nnx.jit(lambda model, tokens: model(tokens))
    plain = logits(model, TOKENS)
    for t in range(T):
        changed = TOKENS.copy()
        changed[:, t:] = (changed[:, t:] + 1) % V
        np.testing.assert_array_equal(logits(model, changed)[:, :t], plain[:, :t])
        assert not np.allclose(logits(model, changed)[:, t], plain[:, t])


def test_decoder_joins_masks_with_its_own():
    model = randomize(Decoder(configure(), rngs=nnx.Rngs(0)))
    lengths = np.array([2, 5])
    window = model(TOKENS, lengths=lengths, mask=masks.sliding_window(1), aux=("weights",))
    stored = np.tri(T, dtype=bool) & ~np.tri(T, k=-2, dtype=bool)
    other = model(TOKENS, lengths=lengths, mask=stored, aux=("weights",))
    jax.tree.map(np.testing.assert_array_equal, window, other)
    weights = np.asarray(window[1]["blocks"][0]["weights"])
    assert not np.any(weights[0, :, :, 2:])
    assert not np.any(weights[:, :, ~stored])


def test_decoder_padding_changes_nothing():
    model, lengths = Decoder(configure(), rngs=nnx.Rngs(0)), np.array([2, 0])
    other = TOKENS.copy()
    other[0, 2:], other[1] = -7, 99
    np.testing.assert_array_equal(model(TOKENS, lengths=lengths), model(other, lengths=lengths))
    assert_close(model(TOKENS, lengths=lengths)[0, :2], model(TOKENS[:, :2])[0])


def test_decoder_needs_a_vocabulary():
    with pytest.raises(ValueError, match="config: expected vocab_size"):
        Decoder(configure(input_width=W), rngs=nnx.Rngs(0))


# EncoderDecoder.


def run_decoder(model, hidden, memory, keep_memory=True):
    """The decoder's stack in float64, from the embedding on, to the logits."""
    y, causal = float64(hidden), np.tri(hidden.shape[1], dtype=bool)
    for block in model.decoder.blocks:
        y = y + multi_head(block.self_attention, layer_norm(block.self_residual.norm, y), keep=causal)[0]
        normed = layer_norm(block.cross_residual.norm, y)
        y = y + multi_head(block.cross_attention, normed, memory, keep=keep_memory)[0]
        y = y + feed_forward(block.feed_forward, layer_norm(block.feed_forward_residual.norm, y))
    return linear(model.head, layer_norm(model.decoder.final_norm, y))


def test_encoder_decoder_is_the_definition():
    config = configure(num_layers=1)
    model = EncoderDecoder(config, target_vocab_size=19, num_decoder_layers=2, rngs=nnx.Rngs(0))
    randomize(model)
    lengths = np.array([4, 7])
    logits, aux = compiled(model, SOURCE, TOKENS, source_lengths=lengths, aux=("weights",))
    assert logits.shape == (B, T, 19)
    keep = (np.arange(S) < lengths[:, None])[:, None, None]
    memory = run_encoder(model.encoder, model.encoder.embedding(SOURCE, lengths=lengths), keep)
    expected = run_decoder(model, model.target_embedding(TOKENS), memory, keep)
    assert_close(logits, expected)
    assert len(aux["encoder"]) == 1
    assert len(aux["decoder"]) == 2
    for seen in aux["decoder"]:
        assert set(seen) == {"self", "cross"}
        assert seen["self"]["weights"].shape == (B, H, T, T)
        assert seen["cross"]["weights"].shape == (B, H, T, S)
        assert not np.any(np.where(keep, 0, seen["cross"]["weights"]))
        assert not np.any(np.triu(seen["self"]["weights"], 1))
    np.testing.assert_array_equal(compiled(model, SOURCE, TOKENS, source_lengths=lengths), logits)


def test_encoder_decoder_padding_changes_neither_logits_nor_gradients():
    model = EncoderDecoder(configure(num_layers=1, input_width=W), target_vocab_size=V, rngs=nnx.Rngs(0))
    source, lengths = draw(1, B, S, W), jnp.array([0, 4])
    target, target_lengths = TOKENS.copy(), jnp.array([2, 0])
    other_source, other_target = source.copy(), target.copy()
    other_source[0], other_source[1, 4:] = np.nan, np.inf
    other_target[0, 2:], other_target[1] = -1, 999

    @nnx.jit
    def measure(model, source, target):
        def loss(model):
            logits = model(source, target, source_lengths=lengths, target_lengths=target_lengths)
            return jnp.sum(jnp.sin(logits)), logits

        return nnx.value_and_grad(loss, has_aux=True)(model)

    plain = measure(model, jnp.asarray(source), jnp.asarray(target))
    changed = measure(model, jnp.asarray(other_source), jnp.asarray(other_target))
    jax.tree.map(np.testing.assert_array_equal, plain, changed)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(plain))


def test_encoder_decoder_never_sees_the_targets_future():
    model = EncoderDecoder(configure(num_layers=1), rngs=nnx.Rngs(0))
    logits = nnx.jit(lambda model, target: model(SOURCE, target))
    changed = TOKENS.copy()
    changed[:, 3:] = (changed[:, 3:] + 1) % V
    plain = logits(model, TOKENS)
    np.testing.assert_array_equal(logits(model, changed)[:, :3], plain[:, :3])
    assert not np.allclose(model(SOURCE[:, ::-1], TOKENS)[:, 0], plain[:, 0])


def test_a_target_belongs_to_a_source():
    model = EncoderDecoder(configure(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"target: expected the batch of source, \(2,\); got \(1,\)"):
        model(SOURCE, TOKENS[:1])
    memory = jnp.ones((B, S, M))
    with pytest.raises(ValueError, match=r"source_lengths: expected one length per row, shape \(2,\)"):
        model.start_cache(memory, 3, source_lengths=[S])
    with pytest.raises(ValueError, match=r"source_lengths: expected lengths in 0\.\.7"):
        model.start_cache(memory, 3, source_lengths=[S, S + 1])


def test_what_is_read_has_a_position_and_a_row_of_the_cache():
    model = Decoder(configure(positions="learned", max_length=T), rngs=nnx.Rngs(0))
    _, cache = model.read(TOKENS[:, :4], model.start_cache(B, 8))
    with pytest.raises(ValueError, match=r"tokens: expected positions in 0\.\.5 \(max_length=5\), got 6"):
        model.read(TOKENS[:, :2], cache)
    hidden, _ = model.read(TOKENS[:, :2], cache, counts=[1, 0])  # the rest is padding
    assert np.isfinite(hidden[0, 0]).all()
    with pytest.raises(ValueError, match=r"tokens: expected shape \(2, n\), as in the cache; got \(5,\)"):
        model.read(TOKENS[0], cache)


def test_a_source_of_vectors_needs_a_target_vocabulary():
    with pytest.raises(ValueError, match="target_vocab_size: expected a size"):
        EncoderDecoder(configure(input_width=W), rngs=nnx.Rngs(0))


# Dropout and modes.


@pytest.mark.slow
def test_models_drop_in_training_and_not_in_evaluation():
    model = Classifier(
        configure(dropout_rate=0.2, attention_dropout_rate=0.3), C, pooling="attention", rngs=nnx.Rngs(0)
    )
    rates = [module.rate for _, module in nnx.iter_modules(model) if isinstance(module, nnx.Dropout)]
    # Embedding; per block attention weights, two residuals and the hidden layer; the pooling's weights.
    assert sorted(rates) == sorted([0.2] + 2 * [0.3, 0.2, 0.2, 0.2] + [0.3])
    run = nnx.jit(lambda model, tokens: model(tokens))
    assert not np.array_equal(run(model, TOKENS), run(model, TOKENS))
    model.eval()
    np.testing.assert_array_equal(run(model, TOKENS), run(model, TOKENS))
    model.train()
    assert not np.array_equal(run(model, TOKENS), run(model, TOKENS))


def test_models_repeat_with_their_seed():
    def train_once(seed):
        model = Decoder(configure(dropout_rate=0.2), rngs=nnx.Rngs(seed))
        return np.asarray(model(TOKENS))

    np.testing.assert_array_equal(train_once(3), train_once(3))
    assert not np.array_equal(train_once(3), train_once(4))


def test_unknown_names_are_refused_by_the_package():
    import regard.models

    assert {"Encoder", "Decoder", "EncoderDecoder", "Classifier"} <= set(dir(regard.models))
    with pytest.raises(AttributeError, match="Perceiver"):
        _ = regard.models.Perceiver


# Class tokens stand before what lengths count.

VECTORS = TransformerConfig(
    d_model=6, num_heads=3, d_ff=11, num_layers=1, input_width=7, class_token=True, positions="none"
)


@pytest.mark.parametrize("pooling", ["mean", "attention", "first"])
def test_a_class_token_is_pooled_beside_all_inputs(pooling):
    model, x = Classifier(VECTORS, 5, pooling=pooling, rngs=nnx.Rngs(0)), draw(0, 2, 4, 7)
    np.testing.assert_allclose(model(x, lengths=np.array([4, 4], np.uint8)), model(x), rtol=1e-5, atol=1e-6)
    alone = model(x[:1, :3])
    np.testing.assert_allclose(model(x, lengths=jnp.array([3, 0]))[:1], alone, rtol=1e-5, atol=1e-6)


def test_a_decoder_reads_the_class_token_and_all_of_the_source():
    model, x = EncoderDecoder(VECTORS, target_vocab_size=13, rngs=nnx.Rngs(0)), draw(0, 2, 4, 7)
    target = jnp.array([[1, 2], [3, 4]])
    found = model(x, target, source_lengths=jnp.array([4, 4]))
    np.testing.assert_allclose(found, model(x, target), rtol=1e-5, atol=1e-6)
    options = {"max_tokens": 3, "start_token": 0}
    one, other = generate(model, x, lengths=[4, 4], **options), generate(model, x, **options)
    np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, rtol=1e-5, atol=1e-6)


def test_lengths_of_small_integers_do_not_wrap():
    hidden = Encoder(VECTORS, rngs=nnx.Rngs(0))(jnp.ones((1, 255, 7)), lengths=np.array([255], np.uint8))
    assert np.abs(hidden[0, -1]).max() > 0
