"""What looking costs: the statistics of every row, key and block, over the plain forward pass."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax

from regard import masks, readouts
from regard.attention import attend
from regard.benchmarking.measuring import interleave

SHAPE = (1, 1, 16_384, 64)
FORWARD = "forward"


def measure_readout_costs(rounds: int, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """Seconds of a causal call, and of its readout with the call's own lse and without."""
    query, key, value = (jax.random.normal(rng, shape) for rng in jax.random.split(jax.random.key(0), 3))
    mask = masks.causal()
    forward = jax.jit(lambda: attend(query, key, value, mask=mask, aux=("lse",)))
    lse = forward()[1]["lse"]
    calls: dict[str, Callable[[], Any]] = {
        FORWARD: forward,
        "readout": lambda: readouts.read(query, key, mask=mask, lse=lse),
        "readout that finds lse": lambda: readouts.read(query, key, mask=mask),
    }
    calls = {name: _wait(call) for name, call in calls.items()}
    seconds = interleave(calls, rounds, settle=True)
    return {
        "shape": shape,
        "median_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        # Of each round apart: a busy moment then hits both sides of a ratio.
        "over_forward": {
            name: statistics.median(a / b for a, b in zip(times, seconds[FORWARD], strict=True))
            for name, times in seconds.items()
        },
    }


def _wait(call: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        jax.block_until_ready(call())

    run()
    return run


def describe_readout_costs(found: dict[str, Any]) -> Iterator[str]:
    """A line."""
    ratios = ", ".join(
        f"{name} {ratio:.2f}" for name, ratio in found["over_forward"].items() if name != FORWARD
    )
    yield f"over the forward pass of a causal call at {tuple(found['shape'])}: {ratios}"
