"""An indexer learns from attention which keys matter; a trained decoder then reads an eighth of them.

    python examples/distilled_indexer.py

A decoder of bytes is trained on the source of this package. For each layer, four small heads that share their
keys are then trained on how far their scores are from the attention of that layer, by `index_divergence`: the
decoder stays as it is. With `chosen_keys` every query reads the 32 keys of 256 that are ranked highest.
"""

import functools
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import regard
from regard import inspection, masks, positions, readouts
from regard.layers import EncoderBlock

CONTEXT, CHOSEN, WIDTH, HEADS, LAYERS, ROWS = 256, 32, 64, 4, 2, 8


class Indexer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.maps = nnx.List(nnx.Linear(WIDTH, size, use_bias=False, rngs=rngs) for size in (4 * 16, 16, 4))

    def __call__(self, x):  # query (batch, 4, T, 16), key (batch, T, 16), weights (batch, 4, T)
        query, key, weights = (linear(self.norm(x)) for linear in self.maps)
        query = query.reshape((*query.shape[:2], 4, 16)).swapaxes(1, 2)
        return positions.rotary(query), positions.rotary(key), weights.swapaxes(1, 2)


class Model(nnx.Module):
    def __init__(self, rngs):
        options = {"norm_kind": "rms", "attention": {"rotary": positions.Rotary(), "use_bias": False}}
        self.embed = nnx.Embed(128, WIDTH, rngs=rngs)
        self.blocks = nnx.List(EncoderBlock(WIDTH, HEADS, 128, **options, rngs=rngs) for _ in range(LAYERS))
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, letters, masks_of):
        x, streams = self.embed(letters), []
        for layer, block in enumerate(self.blocks):
            streams.append(x)
            x = block(x, mask=masks_of(layer, x))
        return self.embed.attend(self.norm(x)), streams


def measure_loss(model, letters, masks_of=lambda *_: masks.causal()):
    logits, _ = model(letters[:, :-1], masks_of)
    return optax.softmax_cross_entropy_with_integer_labels(logits, letters[:, 1:]).mean()


def measure_divergence(indexers, streams, attention):
    parts = zip(indexers, streams, attention, strict=True)
    each = [
        readouts.index_divergence(*indexer(x), attention=pair, mask=masks.causal())
        for indexer, x, pair in parts
    ]
    return jnp.stack(each).mean()


def train(name, steps, draw, optimizer, module, evaluate):
    optimizer = nnx.Optimizer(module, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, *inputs):
        value, gradients = nnx.value_and_grad(evaluate)(module, *inputs)
        optimizer.update(module, gradients)
        return value

    for number in range(steps):
        value = step(module, optimizer, *draw())
        if number % (steps // 4) == steps // 4 - 1:
            print(f"{name} step {number + 1:4}  {value:.3f} nats", flush=True)


def main(steps) -> None:
    rng, rngs = np.random.default_rng(0), nnx.Rngs(0)
    source = sorted(Path(regard.__file__).parent.rglob("*.py"))
    text = np.frombuffer("".join(path.read_text() for path in source).encode("ascii", "replace"), np.uint8)
    cut = len(text) * 9 // 10  # the rest is held out

    def draw(first=0, last=cut):
        return jnp.asarray(
            text[rng.integers(first, last - CONTEXT - 1, size=(ROWS, 1)) + np.arange(CONTEXT + 1)], int
        )

    model, indexers = Model(rngs), nnx.List(Indexer(rngs) for _ in range(LAYERS))
    train("decoder", steps, lambda: (draw(),), optax.adamw(3e-3), model, measure_loss)
    dense = functools.partial(model, masks_of=lambda *_: masks.causal())
    observed = inspection.observe(dense, lambda problem, output: (problem.query, problem.key))

    @nnx.jit
    def watch(letters):
        (_, streams), attention = observed(letters[:, :-1])
        return streams, attention

    train(
        "indexer",
        steps,
        lambda: watch(draw()),
        optax.adam(optax.cosine_decay_schedule(1e-2, steps)),
        indexers,
        measure_divergence,
    )

    def choose(layer, x):
        chosen = readouts.choose_keys(*indexers[layer](x), count=CHOSEN, mask=masks.causal())
        return masks.chosen_keys(chosen[:, None])

    latest = masks.causal() & masks.sliding_window(CHOSEN - 1)
    ways = {
        "all keys": lambda *_: masks.causal(),
        "chosen keys": choose,
        "the latest keys": lambda *_: latest,
    }
    held_out = [draw(cut, len(text)) for _ in range(6)]
    for name, masks_of in ways.items():
        evaluate = nnx.jit(functools.partial(measure_loss, masks_of=masks_of))
        print(f"{name:16} {np.mean([evaluate(model, letters) for letters in held_out]):.3f} nats")


if __name__ == "__main__":
    main(steps=int(sys.argv[1]) if sys.argv[1:] else 800)
