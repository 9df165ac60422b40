"""The machine this runs on as a chip: measured, as nobody publishes what is left of a shared one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from regard.planning.chips import Chip

_SIDE, _NUMBERS, _REPEATS = 1024, 1 << 25, 5


def measure_host() -> Chip:
    """Measure what this machine's processor multiplies and reads per second; its JAX devices share that.

    Returns:
        A chip called "cpu", whose figures are those of the whole machine, until `plan` divides them.

    Example:
        >>> from regard import planning
        >>> planning.measure_host().flops["float32"] > 1e6
        True
    """
    device = jax.devices("cpu")[0]
    with jax.default_device(device):
        flops = {name: _multiply(name) for name in ("float32", "bfloat16")}
        numbers = jnp.ones(_NUMBERS, jnp.float32)
        size = numbers.nbytes
        # In place: pages that are new would be most of the time.
        seconds = _time(jax.jit(lambda x: x + 1, donate_argnums=0), numbers)
    bandwidth = 2 * size / seconds
    return Chip(
        name="cpu",
        flops=flops,
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        memory_bandwidth=bandwidth,
        devices_per_host=1 << 30,
        near_devices=1 << 30,
        near_bandwidth=bandwidth / 2,
        far_bandwidth=bandwidth / 2,
        sources={
            "compute": f"Measured now: products of {_SIDE} x {_SIDE}, best of {_REPEATS}",
            "memory": f"Measured now: {size >> 20} MiB read and written; size from the system",
            "links": "Copies in memory, each read and written",
            "network": "None: all devices are on this machine",
        },
        shared=True,
    )


def _multiply(dtype: str) -> float:
    matrix = jnp.ones((_SIDE, _SIDE), dtype)
    # Divided by the side, a matrix of ones stays one.
    product = jax.jit(lambda a: (jnp.matmul(a, a, preferred_element_type=jnp.float32) / _SIDE).astype(dtype))
    return 2 * _SIDE**3 / _time(product, matrix)


def _time(function: Callable[[Any], Any], array: Any) -> float:
    """Of the fastest of a few calls, each on what the one before gave: others run here, too."""
    array = jax.block_until_ready(function(array))
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        array = jax.block_until_ready(function(array))
        best = min(best, time.perf_counter() - start)
    return best
