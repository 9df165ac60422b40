"""Who is measured: Regard's backends and other libraries, each as a compiled call on the same numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from regard.attention import attend, explain
from regard.benchmarking.cases import Case, Inputs, window_width
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem

Results = tuple[np.ndarray, ...]  # output; where there is a backward pass, gradients of query, key, value
KEEP_FREE = 1 << 30  # bytes of memory that no call may take


class UnavailableError(Exception):
    """Why a peer cannot serve a case."""


@dataclass(frozen=True)
class Call:
    """A peer's call on one case, compiled and run once."""

    run: Callable[[], Any]  # returns when the result is there
    read: Callable[[Any], Results]  # that result in float32, (batch, heads, length, width)
    first_seconds: float  # until the first result, compilation included
    temporary_bytes: int | None = None  # what the compiled program needs besides arguments and results
    note: str = ""


@dataclass(frozen=True)
class Peer:
    """A way to compute attention; `prepare` raises UnavailableError where it cannot."""

    name: str
    prepare: Callable[[Case, Inputs], Call]


def canonicalize_plain(query: Any, key: Any, value: Any, mask: Any) -> Problem:
    """A call without options; the last query stands beside the last key."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    offset = None if num_queries == num_keys else num_keys - num_queries
    return canonicalize(query, key, value, mask=mask, query_offset=offset)


def available_bytes() -> int | None:
    """Memory that can be had without swapping, where the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def demand_package(name: str) -> None:
    """Refuse where a package is not installed."""
    if find_spec(name) is None:
        raise UnavailableError(f"{name} is not installed")


def swap_lengths(array: np.ndarray) -> np.ndarray:
    """(batch, heads, length, width) as (batch, length, heads, width), and back."""
    return np.ascontiguousarray(np.swapaxes(array, 1, 2))


def compile_call(
    attention: Callable[..., Any],
    case: Case,
    inputs: Inputs,
    extra: Any,
    *,
    swapped: bool = False,
    note: str = "",
) -> Call:
    """`attention(query, key, value, extra)` under jit, with its vjp in one program for a backward pass."""
    rearrange = swap_lengths if swapped else np.asarray
    arrays = [inputs.query, inputs.key, inputs.value]
    arrays += [] if inputs.cotangent is None else [inputs.cotangent]
    arguments = [jnp.asarray(rearrange(array), case.dtype) for array in arrays]

    def forward(query: Any, key: Any, value: Any, extra: Any) -> Any:
        return (attention(query, key, value, extra),)

    def both(query: Any, key: Any, value: Any, cotangent: Any, extra: Any) -> Any:
        output, vjp = jax.vjp(lambda *arrays: attention(*arrays, extra), query, key, value)
        return (output, *vjp(cotangent))

    start = time.perf_counter()
    compiled = jax.jit(both if case.is_backward else forward).lower(*arguments, extra).compile()
    seconds = time.perf_counter() - start
    needed = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    _demand_memory(needed)

    def run() -> Any:
        return jax.block_until_ready(compiled(*arguments, extra))

    def read(results: Any) -> Results:
        return tuple(rearrange(np.asarray(result.astype(jnp.float32))) for result in results)

    start = time.perf_counter()
    run()
    return Call(run, read, seconds + time.perf_counter() - start, needed, note)


def _demand_memory(needed: int | None) -> None:
    """Refuse a program that would push the machine into swapping."""
    free = available_bytes() if jax.default_backend() == "cpu" else None
    if needed is not None and free is not None and needed + KEEP_FREE > free:
        raise UnavailableError(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


def _prepare_regard(case: Case, inputs: Inputs, *, backend: str | None) -> Call:
    """`attend`, with its own choice of backend or a given one."""
    num_queries, num_keys = case.lengths
    options: dict[str, Any] = {"backend": backend}
    if num_queries != num_keys:
        options["query_offset"] = num_keys - num_queries
    mask = case.make_mask()
    query, key = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in (case.query, case.key))
    try:
        note = explain(query, key, key, mask=mask, **options).backend if backend is None else ""
    except NotImplementedError as error:
        raise UnavailableError(str(error)) from error
    attention = lambda query, key, value, mask: attend(query, key, value, mask=mask, **options)  # noqa: E731
    return compile_call(attention, case, inputs, mask, note=note)


def _dense_argument(case: Case) -> Any:
    """The mask as an array for (batch, heads, queries, keys)."""
    keep = case.make_dense_mask()
    return None if keep is None else jnp.asarray(keep)[None, None]


def _prepare_jax_nn(case: Case, inputs: Inputs) -> Call:
    """`jax.nn.dot_product_attention`, with its own arguments for causal masks and windows."""
    options: dict[str, Any] = {}
    if case.mask in ("causal", "window"):
        options["is_causal"] = True
    if case.mask == "window":
        options["local_window_size"] = (window_width(case.lengths[1]), 0)
    keep = None if options else _dense_argument(case)
    attention = lambda query, key, value, mask: jax.nn.dot_product_attention(  # noqa: E731
        query, key, value, mask=mask, **options
    )
    return compile_call(attention, case, inputs, keep, swapped=True)


def _prepare_flax(case: Case, inputs: Inputs) -> Call:
    """`flax.nnx.dot_product_attention`, which has an argument for causal masks."""
    demand_package("flax")
    from flax import nnx

    if case.query[1] != case.key[1]:
        raise UnavailableError("takes as many key heads as query heads")
    causal = case.mask == "causal"
    attention = lambda query, key, value, mask: nnx.dot_product_attention(  # noqa: E731
        query, key, value, mask=mask, is_causal=causal
    )
    return compile_call(attention, case, inputs, None if causal else _dense_argument(case), swapped=True)


def _prepare_tokamax(case: Case, inputs: Inputs) -> Call:
    """`tokamax.dot_product_attention`, which has an argument for causal masks."""
    demand_package("tokamax")
    import tokamax  # pyright: ignore[reportMissingImports]

    causal = case.mask == "causal"
    attention = lambda query, key, value, mask: tokamax.dot_product_attention(  # noqa: E731
        query, key, value, mask=mask, is_causal=causal
    )
    return compile_call(attention, case, inputs, None if causal else _dense_argument(case), swapped=True)


OWN = "regard"  # what ratios are to
JAX_PEERS: Sequence[Peer] = (
    Peer(OWN, partial(_prepare_regard, backend=None)),
    Peer("regard-dense", partial(_prepare_regard, backend="dense")),
    Peer("regard-tiled", partial(_prepare_regard, backend="tiled")),
    Peer("jax.nn", _prepare_jax_nn),
    Peer("flax.nnx", _prepare_flax),
    Peer("tokamax", _prepare_tokamax),
)
