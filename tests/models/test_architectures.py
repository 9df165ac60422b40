"""Architectures as data: what each choice of a config means, and published sizes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import assert_close, build_drawn, compiled, float64, widen
from regard.models import PRESETS, Decoder, Encoder, EncoderDecoder, TransformerConfig, preset
from regard.planning import count_parameters

T = 11
SIZES = {"d_model": 26, "num_heads": 3, "head_dim": 10, "d_ff": 29, "num_layers": 3, "vocab_size": 31}

# Millions of parameters. Published are, rounded: GPT-2 and T5 in their repositories, Llama 6.7 and 13.0 in
# its paper, ViT 86 and 307 with a head, Mistral 7.24, Llama 3.1 8.03, Gemma 2 2.61, Qwen3 0.596 and 30.5,
# gpt-oss 20.9, ModernBERT 149 in their model cards; BERT here is without its pooler.
MILLIONS = {
    "bert-base": 108.891648, "bert-large": 334.092288, "minilm-l6": 22.565376,
    "modernbert-base": 149.014272, "gpt2": 124.439808, "gpt2-medium": 354.823168, "gpt2-large": 774.03008,
    "gpt2-xl": 1557.6112, "llama-7b": 6738.415616, "llama-13b": 13015.86432, "llama-3.1-8b": 8030.261248,
    "mistral-7b": 7241.732096, "qwen3-0.6b": 596.04992, "qwen3-30b-a3b": 30532.122624,
    "qwen3-next-80b-a3b": 79674.391296, "deepseek-v3": 671026.4192, "gpt-oss-20b": 20914.757184,
    "gemma-2-2b": 2614.341888, "gemma-3-1b": 999.885952, "t5-small": 60.506624, "t5-base": 222.903552,
    "vit-base-16": 85.798656, "vit-large-16": 303.301632,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_size(name):
    chosen = PRESETS[name]
    if chosen.kind == "decoder":
        assert sum(count_parameters(chosen.config).values()) == round(MILLIONS[name] * 1e6)
        return
    shallow = dataclasses.replace(chosen, config=dataclasses.replace(chosen.config, num_layers=2))
    state = nnx.state(nnx.eval_shape(lambda: shallow.build(rngs=nnx.Rngs(0))), nnx.Param)
    # Blocks but the first are alike, and building 48 of them takes long.
    alike = [leaf.size for path, leaf in nnx.to_flat_state(state) if "blocks" in path and 1 in path]
    size = sum(leaf.size for leaf in jax.tree.leaves(state)) + (chosen.config.num_layers - 2) * sum(alike)
    assert size == round(MILLIONS[name] * 1e6)
    assert chosen.source


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(KeyError, match="nearest: gemma-2-2b"):
        preset("gemma2-2b")


def test_windows_go_layer_by_layer_and_over_again():
    config = TransformerConfig(**SIZES, windows=(2, None))
    model, past = build_drawn(Decoder, config), np.arange(T)[:, None] - np.arange(T)[None]
    _, seen = compiled(model, np.zeros((1, T), np.int32), aux=("weights",))
    for number, block in enumerate(seen["blocks"]):
        expected = (past >= 0) & (past <= (2 if number % 2 == 0 else T))
        assert ((np.asarray(block["weights"]) > 0) == expected).all()
    encoder = build_drawn(Encoder, dataclasses.replace(config, num_layers=1))
    _, seen = compiled(encoder, np.zeros((1, T), np.int32), aux=("weights",))
    assert ((np.asarray(seen["blocks"][0]["weights"]) > 0) == (abs(past) <= 2)).all()
    # A cache of theirs keeps no more than they need.
    capacities = [layer.capacity for layer in model.start_cache(1, 1_000, chunk=5).layers]
    assert capacities == [2 + 5, 1_000, 2 + 5]


def test_outputs_tied_scaled_and_capped_are_the_definition():
    options = {"tied_output": True, "output_scale": 0.5, "output_softcap": 2.0, "num_layers": 1}
    model = build_drawn(Decoder, TransformerConfig(**{**SIZES, **options}))
    assert model.head is None
    tokens = np.array([[3, 5, 7]])
    found, hidden = nnx.jit(lambda model: (model(tokens), model.trunk(tokens)))(model)
    logits = float64(hidden) * 0.5 @ float64(model.trunk.embedding.entry.table.embedding[...]).T
    assert_close(found, 2 * np.tanh(logits / 2))


def test_source_and_target_share_one_table():
    config = TransformerConfig(**{**SIZES, "num_layers": 1}, tied_output=True)
    assert build_drawn(EncoderDecoder, config).target_embedding is not None
    model = build_drawn(EncoderDecoder, dataclasses.replace(config, shared_embedding=True))
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    assert [name for name in names if "embedding" in name] == ["encoder.embedding.entry.table.embedding"]
    assert not any(name.startswith("head") for name in names)


@pytest.mark.parametrize(
    ("kind", "layers"), [("learned", 0), ("sinusoidal", 0), ("rotary", 1), ("relative", 1)]
)
def test_a_model_reads_in_parts_as_at_once(kind, layers, wide):
    model = widen(build_drawn(Decoder, TransformerConfig(**{**SIZES, "num_layers": layers}, positions=kind)))

    @nnx.jit
    def read(model, tokens):
        _, cache = model.read(tokens[:, :2], model.start_cache(1, 3))
        return model.predict(model.read(tokens[:, 2:], cache)[0]), model(tokens)[:, 2:]

    np.testing.assert_allclose(*read(model, jnp.array([[3, 5, 7]])), rtol=1e-12, atol=1e-12)
