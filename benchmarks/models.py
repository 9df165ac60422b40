"""Comparisons of whole models: writing beside transformers, training beside Flax's attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.comparisons import Calls, Comparison
from benchmarks.peers import UnavailableError, demand_package
from regard.layers import MultiHeadAttention
from regard.models import PRESETS, Decoder, TransformerConfig, generate

CONFIG = dataclasses.replace(
    PRESETS["llama-7b"].config,
    d_model=256,
    num_heads=8,
    num_key_heads=4,
    d_ff=1024,
    num_layers=8,
    vocab_size=8192,
    tied_output=True,
)


def compare_generation(*, max_tokens: int = 128, config: TransformerConfig = CONFIG) -> Iterator[Comparison]:
    """Compare greedy writing of one row, prompt included, by ten million parameters in Llama's shape."""
    model = Decoder(config, rngs=nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, config.vocab_size or 1, (1, 16))
    calls: Calls = {"regard": lambda: generate(model, prompt, max_tokens=max_tokens).tokens}
    note = ""
    try:
        calls["transformers"] = _build_transformers(config, prompt, max_tokens)
    except UnavailableError as error:
        note = f"transformers: {error}"
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    title = f"writing with {count / 1e6:.1f} million parameters"
    yield Comparison(title, calls, work=max_tokens, unit="tokens", note=note)


def _build_transformers(config: TransformerConfig, prompt: Any, max_tokens: int) -> Callable[[], Any]:
    """Return a call of the same architecture, with weights of its own, for as many tokens."""
    for package in ("torch", "transformers"):
        demand_package(package)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.d_model,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_key_heads,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.num_layers,
            vocab_size=config.vocab_size,
            tie_word_embeddings=True,
        )
    ).eval()
    tokens = torch.from_numpy(prompt)
    lengths = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}

    def run() -> Any:
        with torch.no_grad():
            mask = torch.ones_like(tokens)
            return model.generate(tokens, attention_mask=mask, do_sample=False, pad_token_id=0, **lengths)

    return run


class FlaxAttention(nnx.Module):
    """`nnx.MultiHeadAttention` with the parameters of a layer of Regard, causal."""

    def __init__(self, layer: MultiHeadAttention):
        d_model, heads = layer.d_model, (layer.num_heads, layer.head_dim)
        self.d_model = d_model
        self.inner = nnx.MultiHeadAttention(
            layer.num_heads,
            in_features=d_model,
            qkv_features=layer.num_heads * layer.head_dim,
            decode=False,
            rngs=nnx.Rngs(0),
        )
        for mine, its, kernel, bias in (
            (layer.query_projection, self.inner.query, (d_model, *heads), heads),
            (layer.key_projection, self.inner.key, (d_model, *heads), heads),
            (layer.value_projection, self.inner.value, (d_model, *heads), heads),
            (layer.output_projection, self.inner.out, (*heads, d_model), (d_model,)),
        ):
            its.kernel[...] = mine.kernel[...].reshape(kernel)
            its.bias[...] = mine.bias[...].reshape(bias)

    def __call__(self, x: Any, **options: Any) -> Any:
        """Attend to the positions before, whatever mask is passed."""
        return self.inner(x, mask=nnx.make_causal_mask(x[..., 0]))


def compare_training(
    *, length: int = 1024, batch: int = 4, num_layers: int = 4, d_model: int = 256, num_heads: int = 8
) -> Iterator[Comparison]:
    """Compare one AdamW step of a language model with the same with Flax's attention in place of Regard's."""
    config = TransformerConfig(
        d_model=d_model, num_heads=num_heads, d_ff=4 * d_model, num_layers=num_layers, vocab_size=256
    )
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, 256)
    calls: Calls = {}
    for way in ("regard", "flax"):
        model = Decoder(config, rngs=nnx.Rngs(0))
        if way == "flax":
            for block in model.trunk.stack.blocks:
                block.attention = FlaxAttention(block.attention)
        step, state = _build_step(model, tokens)
        calls[way] = lambda step=step, state=state: step(state)
    # The same model, or the comparison says nothing.
    losses = [float(call()[1]) for call in calls.values()]
    np.testing.assert_allclose(*losses, atol=1e-3, err_msg="losses of the two models")
    title = f"training a language model, {length} tokens, {num_heads} heads"
    yield Comparison(title, calls, work=batch * length, unit="tokens")


def _build_step(model: Decoder, tokens: Any) -> tuple[Any, Any]:
    """Return a compiled update on fixed tokens, and the state it starts from."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.adamw(1e-3)

    def compute_loss(params: Any) -> Any:
        logits = nnx.merge(graph, params, rest)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def update(state: Any) -> Any:
        params, memory = state
        loss, gradients = jax.value_and_grad(compute_loss)(params)
        change, memory = optimizer.update(gradients, memory, params)
        return (optax.apply_updates(params, change), memory), loss

    with jax.numpy_dtype_promotion("standard"):  # optax mixes counts with floats
        state = (params, optimizer.init(params))
        return jax.jit(update).lower(state).compile(), state
