"""What score functions, sinks and rotary positions cost over the same call without them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from regard import masks, scores
from regard.attention import attend
from regard.benchmarking.measuring import interleave
from regard.positions import rotary

SHAPE = (1, 8, 4096, 64)
PLAIN = "plain"


def make_options(num_heads: int) -> dict[str, Callable[..., Any]]:
    """Causal attention with each option, of query, key and value."""
    table = jax.random.normal(jax.random.key(1), (32, num_heads))

    def call(**options: Any) -> Callable[..., Any]:
        return lambda *arrays: attend(*arrays, mask=masks.causal(), **options)

    return {
        PLAIN: call(),
        "softcap": call(score=scores.softcap(50.0)),
        "alibi": call(score=scores.alibi(num_heads)),
        "relative bias": call(score=scores.relative_bias(table, bidirectional=False)),
        "sinks": call(sinks=jnp.zeros(num_heads)),
        "rotary": lambda query, key, value: call()(rotary(query), rotary(key), value),
    }


def measure_option_costs(rounds: int, shape: tuple[int, ...] = SHAPE) -> dict[str, Any]:
    """Seconds of each option, forward alone and with the backward pass, and over those of none."""
    arrays = [jax.random.normal(rng, shape) for rng in jax.random.split(jax.random.key(0), 4)]
    found: dict[str, Any] = {"shape": shape}
    for passes in ("forward", "forward and backward"):
        calls = {
            name: _compile(function, arrays, backward=passes != "forward")
            for name, function in make_options(shape[1]).items()
        }
        seconds = interleave(calls, rounds, settle=True)
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        # Of each round apart: a busy moment then hits both sides of a ratio.
        ratios = {
            name: statistics.median(a / b for a, b in zip(times, seconds[PLAIN], strict=True))
            for name, times in seconds.items()
        }
        found[passes] = {"median_seconds": medians, "over_plain": ratios}
    return found


def _compile(function: Callable[..., Any], arrays: list[Any], *, backward: bool) -> Callable[[], Any]:
    def both(*arrays: Any) -> Any:
        return jax.vjp(function, *arrays[:-1])[1](arrays[-1])

    given = arrays if backward else arrays[:-1]
    compiled = jax.jit(both if backward else function).lower(*given).compile()

    def run() -> None:
        jax.block_until_ready(compiled(*given))

    run()
    return run


def describe_option_costs(found: dict[str, Any]) -> Iterator[str]:
    """A line for each pass."""
    for passes in ("forward", "forward and backward"):
        ratios = {name: ratio for name, ratio in found[passes]["over_plain"].items() if name != PLAIN}
        listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        yield f"over a plain causal call at {tuple(found['shape'])}, {passes}: {listed}"
