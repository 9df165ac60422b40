"""A training step of a language model, with Regard's attention and with that of Flax in its place."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import optax
from flax import nnx

from regard.benchmarking.measuring import interleave
from regard.layers import MultiHeadAttention
from regard.models import Decoder, TransformerConfig

WAYS = ("regard", "flax")
VOCABULARY = 256


class FlaxAttention(nnx.Module):
    """`nnx.MultiHeadAttention` with the parameters of a layer of Regard, causal."""

    def __init__(self, layer: MultiHeadAttention):
        self.d_model, heads = layer.d_model, (layer.num_heads, layer.head_dim)
        inner: Any = nnx.MultiHeadAttention(
            layer.num_heads,
            in_features=layer.d_model,
            qkv_features=layer.num_heads * layer.head_dim,
            decode=False,
            rngs=nnx.Rngs(0),
        )
        pairs: Any = (
            (layer.query_projection, inner.query),
            (layer.key_projection, inner.key),
            (layer.value_projection, inner.value),
        )
        for mine, its in pairs:
            its.kernel[...] = mine.kernel[...].reshape(layer.d_model, *heads)
            its.bias[...] = mine.bias[...].reshape(heads)
        output: Any = layer.output_projection
        inner.out.kernel[...] = output.kernel[...].reshape(*heads, layer.d_model)
        inner.out.bias[...] = output.bias[...]
        self.inner = inner

    def __call__(self, x: Any, **options: Any) -> Any:
        """Attend to the positions before, whatever mask is passed."""
        return self.inner(x, mask=nnx.make_causal_mask(x[..., 0]))


def measure_training_gain(
    rounds: int,
    *,
    length: int = 1024,
    batch: int = 4,
    num_layers: int = 4,
    d_model: int = 256,
    num_heads: int = 8,
) -> dict[str, Any]:
    """Seconds of one AdamW step of each, and how far their first losses are apart."""
    config = TransformerConfig(
        d_model=d_model, num_heads=num_heads, d_ff=4 * d_model, num_layers=num_layers, vocab_size=VOCABULARY
    )
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, VOCABULARY)
    calls, losses = {}, {}
    for way in WAYS:
        model = Decoder(config, rngs=nnx.Rngs(0))
        if way == "flax":
            blocks: Any = model.trunk.stack.blocks
            for block in blocks:
                block.attention = FlaxAttention(block.attention)
        step, state = _build_step(model, tokens)
        calls[way] = lambda step=step, state=state: jax.block_until_ready(step(state))
        losses[way] = float(calls[way]()[1])
    seconds = interleave(calls, rounds, settle=True)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "length": length,
        "heads": num_heads,
        "median_seconds": medians,
        "tokens_per_second": {way: batch * length / taken for way, taken in medians.items()},
        "gain": medians["flax"] / medians["regard"],
        "loss_difference": abs(losses["regard"] - losses["flax"]),
    }


def _build_step(model: Decoder, tokens: Any) -> tuple[Any, Any]:
    """A compiled update on fixed tokens, and the state it starts from."""
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


def describe_training_gain(found: dict[str, Any]) -> Iterator[str]:
    """One line."""
    yield (
        f"training a language model, {found['length']} tokens, {found['heads']} heads:"
        f" {found['tokens_per_second']['regard']:,.0f} tokens per second,"
        f" {found['gain']:.3g} times those of the same model with nnx.MultiHeadAttention"
    )
