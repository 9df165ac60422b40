"""Packed documents: several texts in one row, none of which sees another.

    python examples/packed_documents.py

Padding every document to the longest wastes work. Packed into one row, they need a mask that keeps them
apart, and positions that begin again in each; the mask is data, so that a new layout does not
compile again.
"""

import jax
import jax.numpy as jnp
import numpy as np

from regard import attend, explain, masks
from regard.positions import rotary


@jax.jit
def attend_packed(query, key, value, document, position):
    query, key = rotary(query, position), rotary(key, position)
    return attend(query, key, value, mask=masks.segments(document) & masks.causal())


def main() -> None:
    lengths = [300, 120, 500, 104]
    total, width = sum(lengths), 32
    query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, total, width))  # batch, heads, tokens

    document = jnp.asarray(np.repeat(np.arange(len(lengths)), lengths))[None]
    position = jnp.asarray(np.concatenate([np.arange(length) for length in lengths]))[None]
    packed = attend_packed(query, key, value, document, position)

    start, worst = 0, 0.0
    for length in lengths:  # each document alone
        part = slice(start, start + length)
        q, k, v = (x[:, :, part] for x in (query, key, value))
        alone = attend(rotary(q), rotary(k), v, mask=masks.causal())
        worst = max(worst, float(jnp.abs(packed[:, :, part] - alone).max()))
        start += length
    print(f"{len(lengths)} documents in {total} tokens, largest difference from each alone: {worst:.0e}")

    again = jnp.sort(jax.random.randint(jax.random.key(1), (1, total), 0, 9))
    attend_packed(query, key, value, again, position)
    print(f"programs compiled for two layouts: {attend_packed._cache_size()}")

    mask = masks.segments(document) & masks.causal()
    print(explain(query, key, value, mask=mask))
    print((masks.segments([0, 0, 0, 1, 1, 2, 2, 2]) & masks.causal()).picture(8))


if __name__ == "__main__":
    main()
