"""Drop-in for jax.nn: the same call and the same numbers, then what Regard adds to it.

    python examples/drop_in.py

The first lines are the switch: change the import and keep the call. After it come a query that may attend to
nothing, masks that need no array, and a look at the weights.
"""

import jax
import jax.numpy as jnp

import regard
from regard import attend, masks
from regard.interop.jax_nn import dot_product_attention  # was: from jax.nn import dot_product_attention


def main() -> None:
    # jax.nn's layout: batch, length, heads, width; 2 key heads serve 8 query heads.
    query = jax.random.normal(jax.random.key(0), (2, 64, 8, 32))
    key, value = jax.random.normal(jax.random.key(1), (2, 2, 64, 2, 32))
    ours = dot_product_attention(query, key, value, is_causal=True)
    theirs = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    print(f"largest difference from jax.nn: {float(jnp.abs(ours - theirs).max()):.0e}")

    # A query without a key: jax.nn hands it the mean of values that it must not see.
    nobody = jnp.arange(64)[:, None] > 0  # may attend: all queries but the first
    first = [
        float(jnp.abs(call(query, key, value, mask=nobody)[:, 0]).max())
        for call in (jax.nn.dot_product_attention, dot_product_attention)
    ]
    print(f"output of a query that may attend to nothing: jax.nn {first[0]:.2f}, Regard {first[1]:.2f}")

    # Regard's own call has heads before the length, and masks that are composed, not stored.
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    window = masks.causal() & masks.sliding_window(7) & masks.lengths([64, 50])
    output, aux = attend(query, key, value, mask=window, aux=("weights", "entropy"))
    print(f"output {output.shape}, a query reads {float(jnp.exp(aux['entropy']).mean()):.1f} of its 8 keys")
    print(regard.explain(query, key, value, mask=window))


if __name__ == "__main__":
    main()
