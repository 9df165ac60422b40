"""A router that learns which blocks of keys to read, and exact attention within them.

    python examples/top_k_blocks.py

Blocks of tokens tell a record each; later blocks ask about one. Means of queries and of keys rate all blocks
before a block: the best two are read, and the own. To choose has no gradient; the router learns because its
means are of the queries and keys that attention trains, in blocks that were chosen. With weights of its own,
it would learn only if its ratings entered attention as well, say through a score function.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from regard import attend, explain, masks

SIZE, BLOCKS, TOLD, WIDTH, KINDS = 128, 16, 8, 32, 16  # KINDS of names, of traits and of values


def draw(rng):
    about = np.concatenate([np.arange(TOLD), rng.integers(TOLD, size=BLOCKS - TOLD)])  # a record per block
    names, traits = rng.permutation(KINDS)[about].repeat(SIZE), rng.integers(KINDS, size=BLOCKS * SIZE)
    return about, names, traits, rng.integers(KINDS, size=(KINDS, KINDS))[names, traits]


def evaluate(weights, about, names, traits, values):
    asked = slice(TOLD * SIZE, None)  # tokens whose values are hidden, and wanted
    x = weights["value"][values].at[asked].set(0) + weights["name"][names] + weights["trait"][traits]
    query, key, value = (x @ weights[name] for name in ("queries", "keys", "values"))
    means = [x.reshape((BLOCKS, SIZE, WIDTH)).mean(1) for x in (query, key)]
    ratings = jnp.where(jnp.tri(BLOCKS, k=-1, dtype=bool), means[0] @ means[1].T, -jnp.inf)  # of those before
    chosen = jnp.concatenate([jnp.arange(BLOCKS)[:, None], jax.lax.top_k(ratings, 2)[1]], 1)
    mask = masks.chosen_blocks(chosen, SIZE, BLOCKS) & masks.causal()
    logits = attend(query, key, value, mask=mask)[asked] @ weights["value"].T
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, values[asked]).mean()
    right, found = logits.argmax(-1) == values[asked], (chosen == about[:, None])[TOLD:].any(1)
    return loss, (right.mean(), found.mean(), mask)


def main() -> None:
    rng, optimizer = np.random.default_rng(0), optax.adam(0.02)
    weights = {name: 0.5 * rng.normal(size=(KINDS, WIDTH)) for name in ("name", "trait", "value")}
    near = 0.5 * np.eye(WIDTH) + 0.15 * rng.normal(size=(3, WIDTH, WIDTH))  # equals begin near one another
    state = optimizer.init(weights := weights | dict(zip(("queries", "keys", "values"), near, strict=True)))
    differentiate = jax.jit(jax.value_and_grad(evaluate, has_aux=True))
    update, add = jax.jit(optimizer.update), jax.jit(optax.apply_updates)
    for number in range(181):
        (loss, (right, found, mask)), gradients = differentiate(weights, *draw(rng))
        change, state = update(gradients, state)
        weights = add(weights, change)
        if number % 30 == 0:
            print(f"step {number:3}  loss {loss:.2f}  right answers {right:4.0%}  blocks found {found:4.0%}")
    print(explain(*[jnp.zeros((BLOCKS * SIZE, WIDTH))] * 3, mask=mask).computes)


if __name__ == "__main__":
    main()
