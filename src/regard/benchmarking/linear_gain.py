"""Linear attention beside exact causal attention, as the sequence grows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import jax

from regard import linear, masks
from regard.attention import attend
from regard.benchmarking.measuring import interleave

LENGTHS = (8192, 16_384)
WAYS = ("softmax", "linear")


def measure_linear_gain(rounds: int, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Seconds of both at every length: 8 heads of width 64, forward."""
    softmax = jax.jit(lambda *arrays: attend(*arrays, mask=masks.causal()))
    kernel = jax.jit(lambda *arrays: linear.attend(*arrays, feature_map="elu1", normalise=True))
    calls = {}
    for length in lengths:
        arrays = [
            jax.random.normal(rng, (1, 8, length, 64)) for rng in jax.random.split(jax.random.key(0), 3)
        ]
        for name, function in zip(WAYS, (softmax, kernel), strict=True):
            compiled = function.lower(*arrays).compile()
            calls[name, length] = lambda run=compiled, arrays=arrays: jax.block_until_ready(run(*arrays))
            calls[name, length]()
    names = {f"{name} {length}": (name, length) for name, length in calls}
    seconds = interleave({name: calls[key] for name, key in names.items()}, rounds, settle=True)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    longest = lengths[-1]
    return {
        "lengths": list(lengths),
        "median_seconds": medians,
        "gain": medians[f"softmax {longest}"] / medians[f"linear {longest}"],
        "growth": medians[f"linear {longest}"] / medians[f"linear {lengths[0]}"],
    }


def describe_linear_gain(found: dict[str, Any]) -> Iterator[str]:
    """One line."""
    first, *_, last = found["lengths"]
    yield (
        f"linear attention at {last:,} tokens: {found['median_seconds'][f'linear {last}'] * 1e3:.3g} ms,"
        f" {found['gain']:.3g} times as fast as causal softmax; {found['growth']:.3g} times its own time"
        f" at {first:,}"
    )
