"""What `jax.jit` buys for one attention call: `python benchmarks/jit_speed.py [ROUNDS]`.

Four ways to run the same causal self-attention:

    formula            the definition in `jax.numpy`, every operation dispatched on its own
    formula, jit       the same function inside `jax.jit`
    attend             `regard.attend` as called: arguments are checked in Python, the kernel is compiled
    attend, jit        `regard.attend` inside `jax.jit`: the checks ran once, while tracing

Each is called once before the clock starts, so compilation is left out; each timed call waits for its result,
so dispatch alone does not count; the ways take turns, so that a busy moment of the machine hits all of them.
Printed are medians, and what jit gains: the first of a pair over the second.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from regard import attend, masks

Ways = dict[str, Callable[[], jax.Array]]

SHAPES = {  # (batch, heads, length, width); the first is the size of document 001
    "3 tokens": (1, 2, 3, 2),
    "256 tokens": (2, 4, 256, 32),
}


def evaluate_formula(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention as one would first write it."""
    scores = query @ key.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    keep = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(keep, scores, -jnp.inf), axis=-1) @ value


def attend_causally(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """The same through Regard."""
    return attend(query, key, value, mask=masks.causal())


def make_ways(shape: tuple[int, ...]) -> Ways:
    """Both functions, with and without jit, on the same arrays."""
    arrays = [jax.random.normal(rng, shape) for rng in jax.random.split(jax.random.key(0), 3)]
    ways: Ways = {}
    for name, function in (("formula", evaluate_formula), ("attend", attend_causally)):
        compiled = jax.jit(function)
        ways[name] = lambda function=function: function(*arrays)
        ways[f"{name}, jit"] = lambda compiled=compiled: compiled(*arrays)
    return ways


def time_call(call: Callable[[], jax.Array]) -> float:
    """Seconds until the result is there."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def measure(ways: Ways, rounds: int) -> dict[str, float]:
    """Median seconds of each way, which take turns after a warm-up."""
    for call in ways.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, call in ways.items():
            times[name].append(time_call(call))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or not all(argument.isdigit() and int(argument) > 0 for argument in arguments):
        print("usage: python benchmarks/jit_speed.py [ROUNDS]", file=sys.stderr)
        return 2
    rounds = int(arguments[0]) if arguments else 200
    device = jax.devices()[0]
    print(f"jax {jax.__version__} on {device.platform} ({device.device_kind}), {rounds} rounds, medians")
    for label, shape in SHAPES.items():
        ways = make_ways(shape)
        first, *others = (call() for call in ways.values())
        if not all(jnp.allclose(first, other, atol=1e-5) for other in others):
            print(f"{label}: the ways disagree", file=sys.stderr)
            return 1
        medians = measure(ways, rounds)
        print(f"\n{label}, (batch, heads, length, width) = {shape}")
        for name, seconds in medians.items():
            gain = f"{seconds / medians[f'{name}, jit']:.1f} x" if f"{name}, jit" in medians else ""
            print(f"  {name:<13} {seconds * 1e6:>8.1f} us  {gain:>7}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
