"""A hybrid recalls what a linear layer alone cannot: its state is too small for all that was told.

    python examples/hybrid_recall.py

A row tells pairs of a name and a value, each name once, and then asks for all of them in another order. The
delta rule writes value under name, in two heads of 4 x 4 numbers: six pairs do not fit. Attention looks the
name up among all keys. It needs the layer before it, whose short convolution lays name and value together.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from regard.models import Decoder, TransformerConfig

PAIRS, WORDS, ROWS = 6, 8, 64  # WORDS names, and as many values


def draw(rng):
    names, values, order = jax.random.split(rng, 3)
    shuffle = jax.vmap(lambda rng: jax.random.permutation(rng, WORDS)[:PAIRS])
    names = shuffle(jax.random.split(names, ROWS))
    values = WORDS + jax.random.randint(values, (ROWS, PAIRS), 0, WORDS)
    order = jnp.argsort(jax.random.uniform(order, (ROWS, PAIRS)), axis=1)
    told = jnp.stack([names, values], axis=-1).reshape((ROWS, 2 * PAIRS))
    asked, answers = (jnp.take_along_axis(words, order, axis=1) for words in (names, values))
    return jnp.concatenate([told, asked], axis=1), answers


def train(mixers, steps):
    sizes = {"d_model": 48, "num_heads": 2, "d_ff": 96, "num_layers": 2, "vocab_size": 2 * WORDS}
    choices = {"positions": "none", "norm_kind": "rms", "activation": "silu", "gated": True}
    config = TransformerConfig(**sizes, **choices, mixers=mixers, delta_head_dim=4, scale_embedding=False)
    graph, weights = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    optimizer = optax.adamw(optax.linear_schedule(4e-3, 0.0, steps - steps // 5, steps // 5))

    def evaluate(weights, rng):
        tokens, answers = draw(rng)
        logits = nnx.merge(graph, weights)(tokens)[:, 2 * PAIRS :]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean()
        return loss, (logits.argmax(-1) == answers).mean()

    @jax.jit
    def step(carry, rng):
        weights, state = carry
        (loss, right), gradients = jax.value_and_grad(evaluate, has_aux=True)(weights, rng)
        change, state = optimizer.update(gradients, state, weights)
        return (optax.apply_updates(weights, change), state), (loss, right)

    carry = weights, optimizer.init(weights)
    for number in range(steps):
        carry, (loss, right) = step(carry, jax.random.fold_in(jax.random.key(1), number))
        if number % (steps // 5) == steps // 5 - 1:
            print(
                f"{' + '.join(mixers):28} step {number + 1:4}  loss {loss:.2f}  right {right:4.0%}",
                flush=True,
            )


if __name__ == "__main__":
    for mixers in (("gated_delta", "gated_delta"), ("gated_delta", "attention")):
        train(mixers, steps=int(sys.argv[1]) if sys.argv[1:] else 600)
