"""Time the dropout pattern of one attention call against `jax.random.bernoulli` of the same shape.

Interleaved medians in one process:  python benchmarks/dropout_pattern.py
"""

import statistics
import time

import jax
import jax.numpy as jnp

from regard.engine.softmax import dropout
from regard.masks.grid import Grid

SHAPE, RATE, ROUNDS = (2, 3, 512, 512), 0.5, 21


@jax.jit
def ours(rng):
    """The pattern that every backend sees."""
    grid = Grid.cover(SHAPE[2], SHAPE[3], 0, 2)
    seeds = dropout.head_seeds(rng, SHAPE[:2])
    queries = dropout.query_words(seeds, grid.query_position)
    return dropout.survivors(queries, dropout.key_words(seeds, grid.key_index), RATE)


@jax.jit
def theirs(rng):
    """Independent Threefry bits per weight."""
    return jax.random.bernoulli(rng, 1 - RATE, SHAPE)


def main() -> None:
    """Print medians and their ratio."""
    rng = jax.random.key(0)
    seconds = {ours: [], theirs: []}
    for repetition in range(ROUNDS + 1):
        for draw, record in seconds.items():
            start = time.perf_counter()
            jax.block_until_ready(draw(rng))
            if repetition:  # the first one compiles
                record.append(time.perf_counter() - start)
    mine, other = (statistics.median(record) for record in seconds.values())
    print(f"jax {jax.__version__}, {jnp.zeros(0).device.platform}, weights {SHAPE}")
    print(f"pattern {1e3 * mine:.2f} ms, bernoulli {1e3 * other:.2f} ms, ratio {other / mine:.1f}")


if __name__ == "__main__":
    main()
