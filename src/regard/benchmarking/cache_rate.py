"""How fast a step of decoding reads its cache, beside a plain copy of the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from regard import masks
from regard.attention import attend
from regard.benchmarking.measuring import interleave
from regard.cache import KVCache

SHAPES = {  # (batch, query heads, key heads, tokens, width)
    "32 heads": (1, 32, 32, 4096, 128),
    "32 heads on 8": (1, 32, 8, 4096, 128),
    "batch of 4, 32 heads on 8": (4, 32, 8, 4096, 128),
}


def measure_cache_rate(rounds: int, shapes: dict[str, tuple[int, ...]] | None = None) -> dict[str, Any]:
    """Seconds of appending one token and attending to the cache, and of copying keys and values."""
    return {name: _measure(shape, rounds) for name, shape in (shapes or SHAPES).items()}


def _measure(shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    batch, heads, key_heads, tokens, width = shape
    rngs = jax.random.split(jax.random.key(0), 3)
    stored = jax.random.normal(rngs[0], (batch, key_heads, tokens - 1, width))
    token = jax.random.normal(rngs[1], (batch, key_heads, 1, width))
    query = jax.random.normal(rngs[2], (batch, heads, 1, width))
    full = KVCache.create(batch, key_heads, tokens, width).append(stored, stored)
    step = jax.jit(_step, donate_argnums=0)
    caches = [full]

    def decode() -> None:
        # The newest token is taken back, so that every step sees as many.
        cache, output = step(caches.pop(), token, query)
        caches.append(cache)
        jax.block_until_ready(output)

    source = np.asarray(stored)
    sources, targets = (source, source.copy()), (np.empty_like(source), np.empty_like(source))

    def copy() -> None:
        for one, other in zip(sources, targets, strict=True):
            np.copyto(other, one)

    calls: dict[str, Callable[[], None]] = {"decode": decode, "copy": copy}
    for call in calls.values():
        call()
    seconds = interleave(calls, rounds, settle=True)
    shares = [a / b for a, b in zip(seconds["copy"], seconds["decode"], strict=True)]
    return {
        "cached_bytes": 2 * full.key.nbytes,
        "decode_seconds": statistics.median(seconds["decode"]),
        "copy_seconds": statistics.median(seconds["copy"]),
        "share_of_copy": statistics.median(shares),
    }


def _step(cache: KVCache, token: jax.Array, query: jax.Array) -> tuple[KVCache, jax.Array]:
    before = cache.lengths
    cache = cache.append(token, token)
    output = attend(
        query,
        cache.key,
        cache.value,
        mask=masks.causal(),
        query_offset=cache.query_offset(1),
        key_offset=cache.start,
    )
    return cache.rewind(before), output


def describe_cache_rate(found: dict[str, Any]) -> Iterator[str]:
    """A line for each shape."""
    for name, one in found.items():
        yield (
            f"decoding through a cache, {name}: {one['cached_bytes'] / 2**20:.0f} MiB in"
            f" {one['decode_seconds'] * 1e3:.3g} ms, at {one['share_of_copy']:.0%} of the rate of a copy"
        )
