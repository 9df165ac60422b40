"""A shared prefix, read once for a whole batch.

    python examples/shared_prefix.py

Many answers continue one prompt. Row by row, its keys are read once per row; with the queries of all rows
folded together, once for all, in one large matrix product. `merge` joins the result with what each row
attends to among its own keys: the same numbers as with the prompt copied into every row.
"""

import time

import jax
import jax.numpy as jnp

from regard import attend, masks, merge

ROWS, HEADS, WIDTH = 32, 8, 64
PREFIX, OWN = 4096, 64  # keys of the prompt, keys of each row; each row has one new query


@jax.jit
def attend_shared(query, prefix, own):
    """Attend to one prefix, keys and values (2, HEADS, PREFIX, WIDTH), and to those of each row."""
    folded = query.reshape((ROWS, HEADS, WIDTH)).swapaxes(0, 1)
    output, aux = attend(folded, *prefix, aux=("lse",))
    output = output.swapaxes(0, 1).reshape(query.shape)
    lse = aux["lse"].swapaxes(0, 1).reshape(query.shape[:-1])
    after, aux = attend(query, *own, mask=masks.causal(), query_offset=OWN - 1, aux=("lse",))
    return merge([(output, lse), (after, aux["lse"])])[0]


@jax.jit
def attend_copied(query, prefix, own):
    """Do the same with the prefix copied into every row."""
    copies = jnp.broadcast_to(prefix[:, None], (2, ROWS, *prefix.shape[1:]))
    both = jnp.concatenate([copies, own], -2)
    return attend(query, *both, mask=masks.causal(), query_offset=PREFIX + OWN - 1)


def main() -> None:
    rng = jax.random.split(jax.random.key(0), 3)
    query = jax.random.normal(rng[0], (ROWS, HEADS, 1, WIDTH))
    prefix = jax.random.normal(rng[1], (2, HEADS, PREFIX, WIDTH))
    own = jax.random.normal(rng[2], (2, ROWS, HEADS, OWN, WIDTH))

    shared, copied = (run(query, prefix, own) for run in (attend_shared, attend_copied))
    print(f"{ROWS} rows, {PREFIX} shared keys and {OWN} of their own each")
    print(f"largest difference from copied keys: {float(jnp.abs(shared - copied).max()):.0e}")
    once, copies = PREFIX + ROWS * OWN, ROWS * (PREFIX + OWN)
    for name, run, count in (("read once", attend_shared, once), ("copied", attend_copied, copies)):
        start = time.perf_counter()
        run(query, prefix, own).block_until_ready()
        milliseconds = 1e3 * (time.perf_counter() - start)
        size = 2 * 4 * count * HEADS * WIDTH / 2**20
        print(f"{name}: {count:,} keys and values, {size:.0f} MiB, {milliseconds:.0f} ms")


if __name__ == "__main__":
    main()
