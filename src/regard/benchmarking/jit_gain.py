"""What `jax.jit` buys for one attention call: the formula, `attend` and a Flax module, each with and without.

    formula            the definition in `jax.numpy`, every operation dispatched on its own
    attend             `regard.attend` as called: arguments are checked in Python, the kernel is compiled
    module             `regard.layers.MultiHeadAttention`, with its projections; with jit, `flax.nnx.jit`

Each is called once before the clock starts, so compilation is left out; each timed call waits for its result,
so dispatch alone does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp

from regard import masks
from regard.attention import attend
from regard.benchmarking.measuring import interleave

Ways = dict[str, Callable[[], Any]]

SHAPES = {  # (batch, heads, length, width); the first is the size of the tutorial module_and_jit
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
    """Every function, with and without jit, on the same arrays."""
    arrays = [jax.random.normal(rng, shape) for rng in jax.random.split(jax.random.key(0), 3)]
    ways: Ways = {}
    for name, function in (("formula", evaluate_formula), ("attend", attend_causally)):
        compiled = jax.jit(function)
        ways[name] = lambda function=function: function(*arrays)
        ways[f"{name}, jit"] = lambda compiled=compiled: compiled(*arrays)
    return ways | (_make_module_ways(shape) if find_spec("flax") else {})


def _make_module_ways(shape: tuple[int, ...]) -> Ways:
    from flax import nnx

    from regard.layers import MultiHeadAttention

    batch, heads, length, width = shape
    module = MultiHeadAttention(heads * width, heads, rngs=nnx.Rngs(0))
    inputs = jax.random.normal(jax.random.key(1), (batch, length, heads * width))

    def apply(module: Any, inputs: jax.Array) -> jax.Array:
        return module(inputs, mask=masks.causal())

    compiled = nnx.jit(apply)
    return {"module": lambda: apply(module, inputs), "module, jit": lambda: compiled(module, inputs)}


def ways_agree(ways: Ways) -> bool:
    """Whether jit changes nothing, and `attend` is the formula."""
    results = {name: call() for name, call in ways.items()}
    pairs = [(name, name.removesuffix(", jit")) for name in ways] + [("attend", "formula")]
    return all(bool(jnp.allclose(results[one], results[other], atol=1e-5)) for one, other in pairs)


def measure(ways: Ways, rounds: int) -> dict[str, float]:
    """Median seconds of each way, which take turns after a warm-up."""
    waiting = {name: lambda call=call: jax.block_until_ready(call()) for name, call in ways.items()}
    for call in waiting.values():
        call()
    return {name: statistics.median(seconds) for name, seconds in interleave(waiting, rounds).items()}


def compute_gains(medians: dict[str, float]) -> dict[str, float]:
    """Time without jit over time with it."""
    return {
        name: seconds / medians[f"{name}, jit"]
        for name, seconds in medians.items()
        if f"{name}, jit" in medians
    }


def measure_jit_gain(rounds: int) -> dict[str, Any]:
    """Medians and gains at both sizes."""
    found: dict[str, Any] = {}
    for label, shape in SHAPES.items():
        ways = make_ways(shape)
        agree = ways_agree(ways)
        medians = measure(ways, rounds) if agree else {}
        found[label] = {
            "shape": shape,
            "agree": agree,
            "median_seconds": medians,
            "gain": compute_gains(medians),
        }
    return found


def describe_jit_gain(found: dict[str, Any]) -> Iterator[str]:
    """A line for each size."""
    for label, entry in found.items():
        gains = ", ".join(f"{name} {gain:.3g} times" for name, gain in entry["gain"].items())
        yield f"what jit gains at {label}: {gains if entry['agree'] else 'not timed, the ways disagree'}"
