"""Decoders whose layers are attention and the delta rule in turn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layer_oracle import build_drawn
from refusals import assert_refused
from regard import inspection, masks
from regard.engine.call.hooks import watch
from regard.models import Decoder, Encoder, EncoderDecoder, TransformerConfig, generate
from test_speculation import disturb

CONFIG = TransformerConfig(
    d_model=12, num_heads=3, d_ff=17, num_layers=3, vocab_size=31, positions="rotary", output_gate=True,
    norm_kind="rms", mixers=("gated_delta", "kimi_delta", "attention"),
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 12))


@functools.cache
def build(**options):
    return build_drawn(Decoder, dataclasses.replace(CONFIG, **options))


read = nnx.jit(lambda model, tokens, **options: model(tokens, **options))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_texts_are_those_of_a_model_that_reads_all_again():
    model, prompts = build(), [[3, 1, 4, 1, 5, 9], [2, 6]]
    texts = [[*prompt] for prompt in prompts]
    for _ in range(6):
        logits = read(model, np.array([text + [0] * (12 - len(text)) for text in texts]))  # later: not read
        for row, text in enumerate(texts):
            text.append(int(logits[row, len(text) - 1].argmax()))
    part = generate(model, prompts, max_tokens=3, chunk=4, return_cache=True, capacity=12)
    rest = generate(model, [[], []], max_tokens=3, return_cache=True, cache=part.cache)
    found = np.concatenate([part.tokens, rest.tokens], 1).tolist()
    assert found == [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


@pytest.mark.slow
def test_a_draft_changes_neither_tokens_nor_states():
    """States of both are those of the tokens kept; nothing is refused where it is the model itself."""
    model = build(windows=(2,), num_layers=2, mixers=("gated_delta", "attention"))
    prompts, options = [[3, 1, 4, 1, 5, 9], [2, 6]], {"max_tokens": 11, "capacity": 16, "return_cache": True}
    alone = generate(model, prompts, **options)
    texts = [prompt + row[:-1] for prompt, row in zip(prompts, alone.rows(), strict=True)]
    padded = np.array([text + [0] * (16 - len(text)) for text in texts])
    read_all = nnx.jit(lambda model: model.read(padded, model.start_cache(2, 16), jnp.array([16, 12]))[1])
    for helper in (disturb(model, 0.05), model):
        written = generate(model, prompts, **options, draft=helper, draft_tokens=3)
        assert written.rows() == alone.rows()
        assert (max(written.reads) == 4) == (helper is model)
        for reader, cache in ((model, written.cache.model), (helper, written.cache.draft)):
            assert cache.lengths.tolist() == [16, 12]
            close(cache.layers[0].memory, read_all(reader).layers[0].memory)


def test_packed_documents_are_read_apart():
    model, ids = build(), np.array([5] * 5 + [2] * 7)
    apart = np.concatenate([read(model, TOKENS)[:, :5], read(model, np.roll(TOKENS, -5, 1))[:, :7]], axis=1)
    places = np.concatenate([np.arange(5), np.arange(7)])
    close(read(model, TOKENS, mask=masks.segments(ids, ids), positions=places), apart)
    # Rotary positions are relative.
    close(read(model, TOKENS, mask=masks.segments(ids) & masks.causal()), apart)


@pytest.mark.slow
def test_a_loop_over_blocks_gives_the_same_gradients():
    sizes = {"num_layers": 5, "mixers": ("attention", "gated_delta"), "num_experts": 3, "dense_layers": (0,)}
    loss = nnx.jit(nnx.value_and_grad(lambda model, tokens: jnp.mean(model(tokens) ** 2)))
    plain = loss(build(**sizes, scan_layers=False, remat=None), TOKENS)
    looped = loss(build(**sizes, scan_layers=True, remat="full"), TOKENS)
    jax.tree.map(close, looped, plain)


def test_what_layers_have_to_show_is_their_own():
    model, calls = build(), []
    with watch(calls.append):
        seen = nnx.eval_shape(lambda model: model(TOKENS, aux=("lse", "hidden"))[1]["blocks"], model)
    assert [sorted(block) for block in seen] == [["hidden"], ["hidden"], ["hidden", "lse"]]
    assert len(calls) == 1
    shapes = nnx.eval_shape(lambda: build(num_layers=5, mixers=("attention", "gated_delta")))
    kinds = [type(block).__name__ == "DeltaBlock" for block in shapes.trunk.stack.blocks]
    assert kinds == [False, True, False, True, False]
    with inspection.capture(model) as trace:
        model.trunk.stack.blocks[2].attention(jnp.ones((1, 1, 12)))
    assert [call.name for call in trace.calls] == ["trunk.stack.blocks.2.attention"]


def test_what_cannot_be_is_explained():
    change, packed = functools.partial(dataclasses.replace, CONFIG), masks.segments([1] * 12, [2] * 12)
    assert_refused(
        (lambda: Encoder(CONFIG, rngs=nnx.Rngs(0)), "mixers: expected attention alone but in a Decoder"),
        (lambda: EncoderDecoder(CONFIG, target_vocab_size=7, rngs=nnx.Rngs(0)), "mixers: expected attention"),
        (lambda: change(mixers=()), "mixers: expected a tuple"),
        (lambda: change(mixers=("mamba",)), "mixers: expected one of attention, gated_delta"),
        (lambda: change(delta_heads=4, delta_key_heads=3), "delta_key_heads: expected a divisor"),
        (lambda: change(delta_value_dim=3), "delta_value_dim: expected None with kimi_delta"),
        (lambda: build()(TOKENS, mask=masks.sliding_window(3)), r"mask: .* None or masks.segments\(ids\)"),
        (lambda: build()(TOKENS, mask=packed), "mask: expected None or masks.segments"),
        (lambda: change(latent_dim=5, output_gate=False), "latent_rotary_dim: expected an even number"),
        (lambda: change(latent_dim=5), "output_gate: expected none with latent_dim, got True"),
        (lambda: build().start_cache(2, 5).rewind(0), "rewind: expected caches of keys and values"),
        run=jax.eval_shape,
    )
