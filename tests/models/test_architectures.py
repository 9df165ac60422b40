"""Architectures as data: what each choice of a config means, published sizes, decoding through caches."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from economy import mostly_slow
from layer_oracle import ACTIVATIONS, float64, linear, rms_norm, softmax_rows
from regard import KVCache, masks, positions
from regard.layers import FeedForward, MultiHeadAttention
from regard.layers.residual import Residual
from regard.models import PRESETS, Decoder, Encoder, EncoderDecoder, TransformerConfig, preset

B, T, M, F, V = 2, 11, 26, 29, 31
SIZES = {"d_model": M, "num_heads": 3, "head_dim": 10, "d_ff": F, "num_layers": 3, "vocab_size": V}

# Millions of parameters. Published are, rounded: GPT-2 and T5 in their repositories, Llama 6.7 and 13.0 in
# its paper, ViT 86 and 307 with a head, Mistral 7.24, Llama 3.1 8.03, Gemma 2 2.61, Qwen3 0.596 and 30.5,
# gpt-oss 20.9, ModernBERT 149 in their model cards; BERT here is without its pooler.
MILLIONS = {
    "bert-base": 108.891648,
    "bert-large": 334.092288,
    "minilm-l6": 22.565376,
    "modernbert-base": 149.014272,
    "gpt2": 124.439808,
    "gpt2-medium": 354.823168,
    "gpt2-large": 774.03008,
    "gpt2-xl": 1557.6112,
    "llama-7b": 6738.415616,
    "llama-13b": 13015.86432,
    "llama-3.1-8b": 8030.261248,
    "mistral-7b": 7241.732096,
    "qwen3-0.6b": 596.04992,
    "qwen3-30b-a3b": 30532.122624,
    "gpt-oss-20b": 20914.757184,
    "gemma-2-2b": 2614.341888,
    "gemma-3-1b": 999.885952,
    "t5-small": 60.506624,
    "t5-base": 222.903552,
    "vit-base-16": 85.798656,
    "vit-large-16": 303.301632,
}


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def randomize(module, seed=0):
    """Every parameter drawn anew, so that no zero bias or unit scale hides a mistake."""
    rng = np.random.default_rng(seed)
    state = nnx.state(module, nnx.Param)

    def fresh(leaf):
        # Decoding is compared with a second evaluation: scores of moderate size.
        return jnp.asarray(rng.normal(size=leaf.shape) / math.sqrt(max(leaf.shape[0], 4)), leaf.dtype)

    nnx.update(module, jax.tree.map(fresh, state))
    return module


def shrink(config):
    """The same choices, small."""
    sizes = {"d_model": M, "num_heads": 6, "head_dim": 10, "d_ff": F, "num_layers": 2, "max_length": 64}
    sizes |= {"vocab_size": V} if config.vocab_size else {"input_width": 7}
    sizes["num_key_heads"] = 2 if config.num_key_heads else None
    sizes["windows"] = tuple(dict.fromkeys(None if window is None else 3 for window in config.windows))
    sizes["relative_max_distance"] = 20
    return dataclasses.replace(config, **sizes, dropout_rate=0.0, attention_dropout_rate=0.0)


def small(name, seed=0):
    chosen = preset(name)
    return randomize(
        dataclasses.replace(chosen, config=shrink(chosen.config)).build(rngs=nnx.Rngs(seed)), seed
    )


# Presets.


@pytest.mark.parametrize(
    "name", mostly_slow(PRESETS, *{preset(name).kind: name for name in PRESETS}.values())
)
def test_presets_have_the_published_size(name):
    chosen = PRESETS[name]

    def count(layers):
        shallow = dataclasses.replace(chosen, config=dataclasses.replace(chosen.config, num_layers=layers))
        shapes = nnx.eval_shape(lambda: shallow.build(rngs=nnx.Rngs(0)))
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param)))

    # Blocks but the first are alike, and building 48 of them takes long.
    one, two = count(1), count(2)
    assert one + (chosen.config.num_layers - 1) * (two - one) == round(MILLIONS[name] * 1e6)
    assert PRESETS[name].source


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(KeyError, match="nearest: gemma-2-2b"):
        preset("gemma2-2b")


# Decoding.


def compare(model, tokens, read, predict, parts, full):
    """Logits part by part against those of one call, to a few roundings of the largest."""
    found, first = [], 0
    for size in parts:
        hidden = read(tokens[:, first : first + size])
        found.append(predict(hidden))
        first += size
    found = np.concatenate(found, axis=1)
    np.testing.assert_allclose(found, full, rtol=0, atol=2e-5 * np.abs(full).max())


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        ["gpt2", "llama-3.1-8b", "mistral-7b", "qwen3-0.6b", "gemma-2-2b", "gemma-3-1b"],
        "gemma-3-1b",
    ),
)
def test_decoding_with_a_cache_equals_the_full_pass(name):
    model = small(name)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)))
    full = np.asarray(jax.jit(lambda tokens: model(tokens))(tokens))
    read = jax.jit(lambda tokens, cache: model.read(tokens, cache))
    cache = [model.start_cache(B, T, chunk=4)]

    def step(tokens):
        hidden, cache[0] = read(tokens, cache[0])
        return hidden

    compare(model, tokens, step, model.predict, (4, 3, 1, 1, 1, 1), full)
    assert cache[0].lengths.tolist() == [T, T]
    windowed = [window is not None for window in model.config.windows]
    for number, layer in enumerate(cache[0].layers):
        assert layer.capacity == (7 if windowed[number % len(windowed)] else T)


@pytest.mark.slow
def test_decoding_against_a_memory_equals_the_full_pass():
    model = small("t5-small")
    rng = np.random.default_rng(2)
    source, tokens = jnp.asarray(rng.integers(0, V, (B, 7))), jnp.asarray(rng.integers(0, V, (B, T)))
    lengths = jnp.array([7, 4])
    full = np.asarray(jax.jit(lambda *both: model(*both, source_lengths=lengths))(source, tokens))
    memory = model.encoder(source, lengths=lengths)
    cache = [model.start_cache(memory, T, source_lengths=lengths)]
    read = jax.jit(lambda tokens, cache: model.read(tokens, cache))

    def step(tokens):
        hidden, cache[0] = read(tokens, cache[0])
        return hidden

    compare(model, tokens, step, model.predict, (5, 1, 1, 1, 1, 1, 1), full)


@pytest.mark.slow
def test_rows_of_unequal_length_decode_as_each_alone():
    config = dataclasses.replace(shrink(preset("mistral-7b").config), num_layers=1, positions="learned")
    model = randomize(Decoder(config, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, V, (B, T)))
    full = np.asarray(model(tokens))
    counts = jnp.array([7, 3])
    hidden, cache = model.read(tokens[:, :7], model.start_cache(B, T), counts)
    first = np.asarray(model.predict(hidden))
    np.testing.assert_allclose(first[1, :3], full[1, :3], rtol=0, atol=2e-5 * np.abs(full).max())
    following = jnp.stack([tokens[0, 7:9], tokens[1, 3:5]])
    hidden, cache = model.read(following, cache)
    found = np.asarray(model.predict(hidden))
    expected = np.stack([full[0, 7:9], full[1, 3:5]])
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(full).max())
    assert cache.lengths.tolist() == [9, 5]
    swapped = jax.tree.map(lambda leaf: leaf[jnp.array([1, 0])], cache)
    assert swapped.lengths.tolist() == [5, 9]


def test_windowed_blocks_keep_no_more_than_they_need():
    model = small("gemma-2-2b")
    capacities = [layer.capacity for layer in model.start_cache(1, 1_000, chunk=5).layers]
    assert capacities == [3 + 5, 1_000]
    assert not model.start_cache(1, 1_000, chunk=5).overflowed.any()


def test_a_model_without_blocks_still_reads():
    config = TransformerConfig(**{**SIZES, "num_layers": 0}, positions="learned")
    model, tokens = Decoder(config, rngs=nnx.Rngs(0)), jnp.array([[3, 5, 7]])
    hidden, cache = model.read(tokens[:, :2], model.start_cache(1, 3))
    hidden, cache = model.read(tokens[:, 2:], cache)
    np.testing.assert_allclose(model.predict(hidden), model(tokens)[:, 2:], rtol=1e-6, atol=1e-6)


# What the choices mean.


def test_a_gated_branch_is_the_definition():
    layer = randomize(FeedForward(M, F, activation="silu", gated=True, rngs=nnx.Rngs(0)))
    x = draw(4, B, T, M)
    hidden = ACTIVATIONS["silu"](linear(layer.gate, x)) * linear(layer.widen, x)
    np.testing.assert_allclose(layer(x), linear(layer.narrow, hidden), rtol=0, atol=1e-5)


def test_norms_before_and_at_the_end_of_a_branch_are_the_definition():
    residual = randomize(Residual(M, place="both", kind="rms", epsilon=1e-3, rngs=nnx.Rngs(0)))
    x, branch = draw(5, B, T, M), draw(6, B, T, M)
    np.testing.assert_allclose(
        residual.enter(jnp.asarray(x)), rms_norm(residual.norm, float64(x), 1e-3), rtol=0, atol=1e-5
    )
    expected = x + rms_norm(residual.branch_norm, float64(branch), 1e-3)
    np.testing.assert_allclose(
        residual.leave(jnp.asarray(x), jnp.asarray(branch)), expected, rtol=0, atol=1e-5
    )
    assert not hasattr(residual.norm, "bias") or residual.norm.bias is None


def test_dropout_falls_on_a_branch_after_its_norm():
    options = {"place": "both", "kind": "rms", "dropout_rate": 0.5, "rngs": nnx.Rngs(0)}
    residual, branch = randomize(Residual(M, **options)), draw(6, B, T, M)
    added = np.asarray(residual.leave(jnp.zeros((B, T, M)), jnp.asarray(branch)))
    expected = np.where(added == 0, 0, 2 * rms_norm(residual.branch_norm, float64(branch)))
    np.testing.assert_allclose(added, expected, rtol=0, atol=1e-5)
    assert 0.3 < (added == 0).mean() < 0.7


def test_heads_normalised_turned_scaled_and_with_sinks_are_the_definition():
    layer = MultiHeadAttention(
        M,
        3,
        num_key_heads=1,
        head_dim=10,
        use_bias=False,
        output_bias=True,
        scale=0.3,
        rotary=positions.Rotary(base=50.0, width=6),
        query_key_norm=True,
        norm_epsilon=1e-4,
        sinks=True,
        rngs=nnx.Rngs(0),
    )
    randomize(layer)
    assert layer.query_projection.bias is None
    assert layer.output_projection.bias is not None
    x = draw(7, B, T, M)
    q, k, v = (
        linear(projection, x).reshape(B, T, -1, 10).swapaxes(1, 2)
        for projection in (layer.query_projection, layer.key_projection, layer.value_projection)
    )

    def turn(heads):
        out = heads.copy()
        for t in range(T):
            for i in range(3):
                angle = t * 50.0 ** (-2 * i / 6)
                a, b = heads[..., t, i], heads[..., t, i + 3]
                out[..., t, i] = a * np.cos(angle) - b * np.sin(angle)
                out[..., t, i + 3] = a * np.sin(angle) + b * np.cos(angle)
        return out

    q, k = turn(rms_norm(layer.query_norm, q, 1e-4)), turn(rms_norm(layer.key_norm, k, 1e-4))
    logits = np.einsum("bhtd,bsd->bhts", q, k[:, 0]) * 0.3
    sinks = np.broadcast_to(float64(layer.sinks[...])[:, None, None], (B, 3, T, 1))
    keep = np.concatenate([np.tril(np.ones((T, T), bool)), np.ones((T, 1), bool)], -1)
    weights = softmax_rows(np.concatenate([logits, sinks], -1), keep)[..., :T]
    heads = np.einsum("bhts,bse->bthe", weights, v[:, 0]).reshape(B, T, 30)
    out, aux = layer(x, mask=masks.causal(), aux=("weights",))
    np.testing.assert_allclose(aux["weights"], weights, rtol=0, atol=1e-5)
    np.testing.assert_allclose(out, linear(layer.output_projection, heads), rtol=0, atol=2e-5)


def test_windows_go_layer_by_layer_and_over_again():
    config = TransformerConfig(**SIZES, windows=(2, None))
    _, seen = Decoder(config, rngs=nnx.Rngs(0))(jnp.zeros((1, T), jnp.int32), aux=("weights",))
    past = np.arange(T)[:, None] - np.arange(T)[None]
    for number, block in enumerate(seen["blocks"]):
        expected = (past >= 0) & (past <= (2 if number % 2 == 0 else T))
        assert ((np.asarray(block["weights"]) > 0) == expected).all()
    _, seen = Encoder(config, rngs=nnx.Rngs(0))(jnp.zeros((1, T), jnp.int32), aux=("weights",))
    assert ((np.asarray(seen["blocks"][0]["weights"]) > 0) == (abs(past) <= 2)).all()


def test_layers_with_a_window_may_have_a_rotary_base_of_their_own():
    config = TransformerConfig(**SIZES, windows=(2, None), positions="rotary", rotary_width=4)
    config = dataclasses.replace(config, rotary_base=50.0, rotary_scaling=positions.Linear(3.0))
    full = positions.Rotary(50.0, 4, scaling=positions.Linear(3.0))
    assert [config.rotary(layer) for layer in range(3)] == [full] * 3
    config = dataclasses.replace(config, rotary_window_base=7.0)
    expected = [positions.Rotary(7.0, 4), full, positions.Rotary(7.0, 4)]
    assert [config.rotary(layer) for layer in range(3)] == expected
    model = Decoder(config, rngs=nnx.Rngs(0))
    assert [block.attention.rotary for block in model.trunk.stack.blocks] == expected
    assert dataclasses.replace(config, positions="none").rotary(0) is None
    with pytest.raises(ValueError, match="rotary_window_base: expected a number above 0, got 0"):
        dataclasses.replace(config, rotary_window_base=0.0)


def test_outputs_tied_scaled_and_capped_are_the_definition():
    config = TransformerConfig(**SIZES, tied_output=True, output_scale=0.5, output_softcap=2.0)
    model = randomize(Decoder(config, rngs=nnx.Rngs(0)))
    assert model.head is None
    tokens = jnp.array([[3, 5, 7]])
    hidden = float64(model.trunk(tokens))
    logits = hidden * 0.5 @ float64(model.trunk.embedding.entry.table.embedding[...]).T
    np.testing.assert_allclose(model(tokens), 2 * np.tanh(logits / 2), rtol=0, atol=2e-6)


@pytest.mark.slow
def test_embeddings_with_types_norm_and_a_vector_in_front_are_the_definition():
    config = TransformerConfig(**SIZES, positions="learned", num_token_types=3, embedding_norm=True)
    config = dataclasses.replace(config, scale_embedding=False)
    embedding = randomize(Encoder(config, rngs=nnx.Rngs(0)).embedding)
    tokens, types = np.array([[4, 9, 2]]), np.array([[0, 2, 1]])
    rows = float64(embedding.entry.table.embedding[...])[tokens]
    rows = rows + float64(embedding.type_table.embedding[...])[types]
    rows = rows + float64(embedding.position_table.embedding[...])[:3]
    centred = rows - rows.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    expected = expected * float64(embedding.norm.scale[...]) + float64(embedding.norm.bias[...])
    np.testing.assert_allclose(embedding(tokens, token_types=types), expected, rtol=0, atol=1e-5)

    config = TransformerConfig(
        d_model=M, num_heads=2, d_ff=F, num_layers=1, input_width=7, class_token=True, positions="none"
    )
    encoder = randomize(Encoder(config, rngs=nnx.Rngs(0)))
    x = draw(8, B, T, 7)
    found = encoder.embedding(x)
    np.testing.assert_array_equal(found[:, 0], np.broadcast_to(encoder.embedding.class_token[...], (B, M)))
    np.testing.assert_allclose(found[:, 1:], linear(encoder.embedding.entry.linear, x), rtol=0, atol=1e-5)
    padded = x.copy()
    padded[1, 5:] = np.nan
    hidden = encoder(padded, lengths=jnp.array([T, 5]))
    assert hidden.shape == (B, T + 1, M)
    np.testing.assert_allclose(hidden[1, :6], encoder(x[1:, :5])[0], rtol=0, atol=1e-5)
    assert not np.any(hidden[1, 6:])


def test_source_and_target_share_one_table():
    config = TransformerConfig(**SIZES, shared_embedding=True, tied_output=True)
    model = EncoderDecoder(config, rngs=nnx.Rngs(0))
    names = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert [name for name in names if name.endswith("embedding")] == [
        "encoder.embedding.entry.table.embedding"
    ]
    assert not any(name.startswith("head") for name in names)
    own = EncoderDecoder(dataclasses.replace(config, shared_embedding=False), rngs=nnx.Rngs(0))
    assert own.target_embedding is not None


def test_hidden_states_are_those_between_the_blocks():
    model = Decoder(TransformerConfig(**SIZES), rngs=nnx.Rngs(0))
    tokens = jnp.array([[3, 5, 7]])
    logits, seen = model(tokens, aux=("hidden",))
    x = seen["embedding"]
    for block, here in zip(model.trunk.stack.blocks, seen["blocks"], strict=True):
        assert set(here) == {"hidden"}
        x = block(x, mask=masks.causal())
        np.testing.assert_allclose(here["hidden"], x, rtol=0, atol=1e-5)
    np.testing.assert_allclose(logits, model.predict(model.trunk.stack.final_norm(x)), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma-2-2b", "gpt2"])
def test_models_train(name):
    model = small(name)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)))

    @nnx.jit
    def gradients(model):
        return nnx.grad(lambda model: jnp.mean(model(tokens) ** 2))(model)

    for path, leaf in nnx.to_flat_state(gradients(model)):
        # Only the first T rows of a table of positions were read; a key's bias moves all scores alike.
        assert np.isfinite(leaf[...]).all(), path
        assert np.any(leaf[...]) or path[-2:] == ("key_projection", "bias"), path


# Bad input.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 7, "positions": "rotary"}, "'rotary' turns pairs of features, got a head width of 7"),
        ({"rotary_width": 3, "positions": "rotary"}, "'rotary' turns pairs"),
        ({"windows": ()}, r"windows: expected a tuple such as \(None,\)"),
        ({"windows": (-1,)}, "windows: expected None or numbers"),
        ({"norm_epsilon": 0.0}, "norm_epsilon: expected a number above 0, got 0.0"),
        ({"output_softcap": -1.0}, "output_softcap: expected a number above 0"),
        ({"class_token": True}, "class_token: expected real vectors"),
        ({"vocab_size": None, "input_width": 3, "num_token_types": 2}, "num_token_types: expected 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SIZES, **change})


def test_caches_and_queries_that_do_not_fit_are_refused():
    layer = MultiHeadAttention(M, 2, rotary=positions.Rotary(), head_dim=10, rngs=nnx.Rngs(0))
    x = jnp.ones((B, 3, M))
    cache = KVCache.create(B, 2, 5, 10)
    with pytest.raises(ValueError, match=r"cache: expected query \(2, T, 26\) alone.* and more"):
        layer(x, x, cache=cache)
    with pytest.raises(
        ValueError, match=r"value, query_offset or positions; got query \(2, 3, 26\) and more$"
    ):
        layer(x, cache=cache, mask=masks.causal(), query_offset=1)
    with pytest.raises(ValueError, match="query_offset: expected where the queries sit"):
        layer(x, jnp.ones((B, 5, M)))
    with pytest.raises(ValueError, match=r"got query \(1, 3, 26\)$"):
        layer(x[:1], cache=cache, mask=masks.causal())


def test_token_types_that_do_not_fit_are_refused():
    plain = Encoder(TransformerConfig(**SIZES), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="token_types: expected None"):
        plain(jnp.array([[1, 2]]), token_types=jnp.array([[0, 1]]))
    typed = Encoder(TransformerConfig(**SIZES, num_token_types=2), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"token_types: expected values in 0..1 .*, got 0..2"):
        typed(jnp.array([[1, 2]]), token_types=jnp.array([[0, 2]]))
    with pytest.raises(ValueError, match="one per token"):
        typed(jnp.array([[1, 2]]), token_types=jnp.array([0, 1]))
