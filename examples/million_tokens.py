"""Attention over a million tokens with its gradient, on a CPU: a causal window of 1024, one head of width 64.

    python examples/million_tokens.py [tokens]

The score matrix would take 4 TiB; what the window keeps of it is computed tile by tile.
"""

import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from regard import attend, explain, masks


def main(tokens: int) -> None:
    mask = masks.causal() & masks.sliding_window(1024)
    rng = np.random.default_rng(0)
    query, key, value, pull = (
        jnp.asarray(rng.standard_normal((1, tokens, 64), np.float32)) for _ in range(4)
    )
    print(explain(query, key, value, mask=mask))

    @jax.jit
    def forward_and_backward(query, key, value, pull):
        output, gradients = jax.vjp(lambda *inputs: attend(*inputs, mask=mask), query, key, value)
        return output, gradients(pull)

    start = time.perf_counter()
    output, gradients = jax.block_until_ready(forward_and_backward(query, key, value, pull))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    sizes = ", ".join(f"{float(jnp.linalg.norm(array)):.1f}" for array in (output, *gradients))
    print(f"{tokens:,} tokens, forward and backward: {seconds:.1f} s with compiling, peak {peak:.2f} GiB")
    print(f"norms of the output and of the gradients of query, key and value: {sizes}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_048_576)
