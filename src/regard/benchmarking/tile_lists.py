"""The time to build the tile lists of a long call: what a new mask costs before any attention."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from regard import masks
from regard.benchmarking.cases import document_ids
from regard.benchmarking.measuring import interleave
from regard.benchmarking.peers import canonicalize_plain
from regard.engine.flash.sparsity import classify_tiles, list_tiles
from regard.engine.flash.tuning import load_tuning

LENGTH, WINDOW = 131_072, 4096


def measure_tile_lists(rounds: int, length: int = LENGTH, window: int = WINDOW) -> dict[str, Any]:
    """Lists by query and by key for `causal() & sliding_window(window) & segments(ids)`, under jit."""
    shape = jax.ShapeDtypeStruct((1, 1, length, 64), "float32")
    mask = masks.causal() & masks.sliding_window(window) & masks.segments(document_ids(length)[None])

    def build(mask: Any) -> Any:
        problem = canonicalize_plain(shape, shape, shape, mask)
        forward, backward = load_tuning().blocking(problem)
        by_query = classify_tiles(problem, forward.queries, forward.keys)
        by_key = classify_tiles(problem, backward.queries, backward.keys).swapaxes(-1, -2)
        return list_tiles(by_query, forward.keys, length), list_tiles(by_key, backward.queries, length)

    compiled = jax.jit(build).lower(mask).compile()
    lists = jax.block_until_ready(compiled(mask))
    seconds = interleave({"": lambda: jax.block_until_ready(compiled(mask))}, rounds)[""]
    lines, tiles = lists[0].starts.shape[-2:]
    documents = document_ids(length).max() + 1
    return {
        "length": length,
        "mask": f"causal() & sliding_window({window}) & segments of {documents} documents",
        "tiles": lines * tiles,
        "kept_tiles": int(np.asarray(lists[0].kept).sum()),
        "median_seconds": statistics.median(seconds),
        "least_seconds": min(seconds),
        "temporary_bytes": getattr(compiled.memory_analysis(), "temp_size_in_bytes", None),
    }


def describe_tile_lists(found: dict[str, Any]) -> Iterator[str]:
    """One line."""
    mebibytes = (found["temporary_bytes"] or 0) / 2**20
    yield (
        f"tile lists of {found['mask']} at {found['length']:,} x {found['length']:,}: "
        f"{found['median_seconds'] * 1e3:.3g} ms, {mebibytes:.2g} MiB temporary, "
        f"{found['kept_tiles']:,} of {found['tiles']:,} tiles kept"
    )
