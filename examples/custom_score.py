"""A score of your own: a few lines of Python about one query and one key, with parameters that learn.

    python examples/custom_score.py

Keys lose by the logarithm of their distance, at a rate that each head learns. The function is evaluated tile
by tile, and what it closes over has gradients. Here rates are found again from what attention with them gave.
"""

import jax
import jax.numpy as jnp

import regard
from regard import attend, masks, scores


def fade(rates):
    def fading(score, batch, head, query_position, key_position):
        distance = jnp.abs(query_position - key_position).astype(score.dtype)
        return score - rates[head] * jnp.log1p(distance)

    return scores.modifier(fading)


def main() -> None:
    heads, tokens, width = 4, 128, 16
    query, key, value = jax.random.normal(jax.random.key(0), (3, heads, tokens, width))
    true_rates = jnp.asarray([0.0, 0.5, 1.0, 2.0])

    def run(rates):
        return attend(query, key, value, mask=masks.causal(), score=[scores.softcap(20.0), fade(rates)])

    wanted = run(true_rates)

    @jax.jit
    def step(rates):
        loss, gradient = jax.value_and_grad(lambda rates: jnp.mean((run(rates) - wanted) ** 2))(rates)
        return rates - 10.0 * gradient, loss

    rates = jnp.full(heads, 0.8)
    for number in range(31):
        rates, loss = step(rates)
        if number % 10 == 0:
            print(
                f"step {number:2}  loss {float(loss):.1e}  rates {[f'{float(rate):.2f}' for rate in rates]}"
            )

    # The last query of the last head, step by step.
    chosen = {"mask": masks.causal(), "score": fade(rates), "rows": [tokens - 1], "heads": [heads - 1]}
    derivation = regard.derive(query, key, value, **chosen)
    for name in ("products", "scaled", "modifier", "weights", "output"):
        print(f"{name:<10}{derivation[name].expression}")


if __name__ == "__main__":
    main()
