"""Decoders whose layers are attention and the delta rule in turn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from regard import inspection, masks
from regard.models import Decoder, Encoder, EncoderDecoder, TransformerConfig, generate

CONFIG = TransformerConfig(
    d_model=12, num_heads=3, d_ff=17, num_layers=3, vocab_size=31, positions="rotary", output_gate=True,
    norm_kind="rms", mixers=("gated_delta", "kimi_delta", "attention"),
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 31, (2, 19))


@functools.cache
def build(**options):
    model = Decoder(dataclasses.replace(CONFIG, **options), rngs=nnx.Rngs(1))
    table = model.trunk.embedding.entry.table.embedding
    table[...] = 4 * table[...]
    return model


read = nnx.jit(lambda model, tokens, **options: model(tokens, **options))


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_texts_are_those_of_a_model_that_reads_all_again():
    model, prompts = build(), [[3, 1, 4, 1, 5, 9], [2, 6]]
    texts = [[*prompt] for prompt in prompts]
    for text in texts:
        for _ in range(5):
            padded = np.array([text + [0] * (11 - len(text))])  # what comes later is not read
            text.append(int(read(model, padded)[0, len(text) - 1].argmax()))
    found = generate(model, prompts, max_tokens=5, chunk=4)
    assert found.tokens.tolist() == [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    part = generate(model, prompts, max_tokens=2, return_cache=True, capacity=11)
    rest = generate(model, [[], []], max_tokens=3, cache=part.cache)
    assert np.concatenate([part.tokens, rest.tokens], 1).tolist() == found.tokens.tolist()


def test_packed_documents_are_read_apart():
    model, ids = build(), np.array([5] * 8 + [2] * 11)
    places = np.concatenate([np.arange(8), np.arange(11)])
    apart = np.concatenate([read(model, TOKENS[:, :8]), read(model, TOKENS[:, 8:])], axis=1)
    close(read(model, TOKENS, mask=masks.segments(ids, ids), positions=places), apart)
    # Rotary positions are relative.
    close(read(model, TOKENS, mask=masks.segments(ids) & masks.causal()), apart)


@pytest.mark.slow
def test_a_loop_over_blocks_gives_the_same_gradients():
    loss = nnx.jit(nnx.value_and_grad(lambda model, tokens: jnp.mean(model(tokens) ** 2)))
    plain, looped = (
        loss(build(num_layers=6, scan_layers=scan, remat="full" if scan else None), TOKENS)
        for scan in (False, True)
    )
    for one, other in zip(*map(jax.tree.leaves, (looped, plain)), strict=True):
        close(one, other)


def test_what_layers_have_to_show_is_their_own():
    model = build()
    seen = nnx.eval_shape(lambda model: model(TOKENS, aux=("lse", "hidden"))[1]["blocks"], model)
    assert [sorted(block) for block in seen] == [["hidden"], ["hidden"], ["hidden", "lse"]]
    with inspection.capture(model) as trace:
        model(TOKENS[:1, :3])
    assert [call.name for call in trace.calls] == ["trunk.stack.blocks.2.attention"]


def test_what_cannot_be_is_explained():
    change, packed = functools.partial(dataclasses.replace, CONFIG), masks.segments([1] * 19, [2] * 19)
    for call, message in (
        (lambda: Encoder(CONFIG, rngs=nnx.Rngs(0)), "mixers: expected attention alone but in a Decoder"),
        (lambda: EncoderDecoder(CONFIG, target_vocab_size=7, rngs=nnx.Rngs(0)), "mixers: expected attention"),
        (lambda: change(mixers=()), "mixers: expected a tuple"),
        (lambda: change(mixers=("mamba",)), "mixers: expected one of attention, gated_delta"),
        (lambda: change(delta_heads=4, delta_key_heads=3), "delta_key_heads: expected a divisor"),
        (lambda: change(delta_value_dim=3), "delta_value_dim: expected None with kimi_delta"),
        (
            lambda: build()(TOKENS, mask=masks.sliding_window(3)),
            r"mask: expected None or masks.segments\(ids\)",
        ),
        (lambda: build()(TOKENS, mask=packed), "mask: expected None or masks.segments"),
        (lambda: generate(build(), [[1, 2]], max_tokens=5, draft=build()), "rewind: .* without a draft"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
