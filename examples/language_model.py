"""A decoder-only language model from blocks: rotary positions, a window, and a cache of bounded memory.

    python examples/language_model.py

It learns the letters of a small made-up language in seconds, and then writes 400 of them, one at a time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from regard import KVCache, masks
from regard.layers import EncoderBlock
from regard.positions import Rotary

WIDTH, HEADS, KEY_HEADS, LAYERS, WINDOW, LETTERS = 64, 4, 2, 2, 31, " .abcdefghijklmnopqrstuvwxyz"
NOUNS, VERBS = ("cat", "dog", "bird", "queen", "robot", "whale"), ("sees", "helps", "follows", "forgets")
MASK = masks.causal() & masks.sliding_window(WINDOW)  # the letter itself and 31 before it


def write(rng):
    return f"the {rng.choice(NOUNS)} {rng.choice(VERBS)} the {rng.choice(NOUNS)}. "


class LanguageModel(nnx.Module):
    def __init__(self, rngs):
        attention = {"num_key_heads": KEY_HEADS, "rotary": Rotary(), "use_bias": False}
        options = {"attention": attention, "feed_forward": {"activation": "silu", "gated": True}}
        self.embed = nnx.Embed(len(LETTERS), WIDTH, rngs=rngs)
        self.blocks = nnx.List(
            EncoderBlock(WIDTH, HEADS, 96, norm_kind="rms", **options, rngs=rngs) for _ in range(LAYERS)
        )
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, letters, caches=(None,) * LAYERS):
        x, longer = self.embed(letters), []
        for block, cache in zip(self.blocks, caches, strict=True):
            if cache is None:
                x = block(x, mask=MASK)
            else:
                x, seen = block(x, mask=MASK, cache=cache)
                longer.append(seen["cache"])
        return self.embed.attend(self.norm(x)), longer


@nnx.jit
def step(model, optimizer, letters):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(
            model(letters[:, :-1])[0], letters[:, 1:]
        ).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


@nnx.jit(static_argnums=2)
def continue_text(model, letter, count, rng):
    def choose(carry, rng):
        letter, caches = carry
        logits, caches = model(letter[:, None], caches)
        letter = jax.random.categorical(rng, logits[:, -1])
        return (letter, caches), (letter, logits[:, -1])

    caches = [KVCache.create(1, KEY_HEADS, None, WIDTH // HEADS, window=WINDOW) for _ in range(LAYERS)]
    (_, caches), (letters, logits) = jax.lax.scan(choose, (letter, caches), jax.random.split(rng, count))
    return letters[:, 0], logits[:, 0], caches


def main() -> None:
    rng, model = np.random.default_rng(0), LanguageModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    text = np.array([LETTERS.index(letter) for _ in range(3000) for letter in write(rng)])
    for number in range(301):
        starts = rng.integers(len(text) - 97, size=(16, 1))
        value = step(model, optimizer, jnp.asarray(text[starts + np.arange(97)]))
        if number % 100 == 0:
            print(f"step {number:3}  loss {value:.3f} nats a letter")
    start = jnp.array([LETTERS.index(" ")])
    letters, logits, caches = continue_text(model, start, 400, jax.random.key(1))
    written = "".join(LETTERS[letter] for letter in letters)
    print(written)
    whole, _ = model(jnp.concatenate([start, letters[:-1]])[None])
    print(f"largest difference from the whole text at once: {jnp.abs(whole[0] - logits).max():.1e}")
    print(caches[0])


if __name__ == "__main__":
    main()
