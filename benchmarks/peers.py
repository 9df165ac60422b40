"""Regard's backends and other libraries, each as a compiled call on the same numbers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import NARROW, Case, Inputs, window_width
from regard import scores
from regard.attention import attend, explain
from regard.engine.call.canonicalization import canonicalize
from regard.engine.call.problem import Problem
from regard.tuning import lower_passes

Results = tuple[np.ndarray, ...]  # output; where there is a backward pass, gradients of query, key, value
KEEP_FREE = 1 << 30  # bytes of memory that no call may take


class UnavailableError(Exception):
    """A peer cannot serve a case, for the reason given."""


@dataclass(frozen=True)
class Call:
    """A peer's call on one case, compiled and run once."""

    start: Callable[[], Any]
    wait: Callable[[Any], Any]  # for what `start` returned
    read: Callable[[Any], Results]  # that in float32, (batch, heads, length, width)
    first_seconds: float  # until the first result, compilation included
    temporary_bytes: int | None = None  # what the compiled program needs besides arguments and results
    note: str = ""

    def run(self) -> Any:
        """Return the result when it is there."""
        return self.wait(self.start())


@dataclass(frozen=True)
class Peer:
    """A way to compute attention; `prepare` raises UnavailableError where it cannot."""

    name: str
    prepare: Callable[[Case, Inputs], Call]


def canonicalize_plain(query: Any, key: Any, value: Any, mask: Any) -> Problem:
    """Check a call without options; the last query stands beside the last key."""
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    offset = None if num_queries == num_keys else num_keys - num_queries
    return canonicalize(query, key, value, mask=mask, query_offset=offset)


def available_bytes() -> int | None:
    """Return the memory that can be had without swapping, where the system tells."""
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


def demand_plain(case: Case) -> None:
    """Refuse what other libraries have no argument for."""
    if case.cap is not None or case.sinks or case.aux:
        raise UnavailableError("has no argument for a softcap, sinks or statistics")


def swap_lengths(array: np.ndarray) -> np.ndarray:
    """Turn (batch, heads, length, width) into (batch, length, heads, width), and back."""
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
    """Compile `attention(query, key, value, extra)`, with its vjp in one program for a backward pass."""
    rearrange = swap_lengths if swapped else np.asarray
    arguments = [jnp.asarray(rearrange(array)).astype(case.dtype) for array in inputs.arrays]
    begun = time.perf_counter()
    compiled = lower_passes(attention, arguments, extra).compile()
    seconds = time.perf_counter() - begun
    needed = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)
    _demand_memory(needed)

    def read(results: Any) -> Results:
        return tuple(rearrange(np.asarray(result.astype(jnp.float32))) for result in results)

    begun = time.perf_counter()
    jax.block_until_ready(compiled(arguments, extra))
    seconds += time.perf_counter() - begun
    return Call(lambda: compiled(arguments, extra), jax.block_until_ready, read, seconds, needed, note)


def _demand_memory(needed: int | None) -> None:
    """Refuse a program that would push the machine into swapping."""
    free = available_bytes() if jax.default_backend() == "cpu" else None
    if needed is not None and free is not None and needed + KEEP_FREE > free:
        raise UnavailableError(f"needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free")


def _prepare_regard(case: Case, inputs: Inputs, *, backend: str | None) -> Call:
    """`attend`, with its own choice of backend or a given one; a stored mask is looked at before."""
    mask = case.make_mask()
    mask = mask.prepare(*case.lengths) if mask is not None and mask.reads_cells else mask
    return prepare_attend(case, inputs, mask, backend=backend)


def prepare_attend(
    case: Case, inputs: Inputs, mask: Any, *, backend: str | None = None, constant: bool = False
) -> Call:
    """`attend` with a mask that is an argument of the compiled program, or constant in it."""
    num_queries, num_keys = case.lengths
    options: dict[str, Any] = {"backend": backend, "aux": case.aux, "sinks": case.make_sinks()}
    options["score"] = None if case.cap is None else scores.softcap(case.cap)
    if num_queries != num_keys:
        options["query_offset"] = num_keys - num_queries
    query, key = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in (case.query, case.key))
    try:
        note = explain(query, key, key, mask=mask, **options).backend
    except NotImplementedError as error:
        raise UnavailableError(str(error)) from error
    extra = None if constant else mask

    def attention(query: Any, key: Any, value: Any, extra: Any) -> Any:
        found = attend(query, key, value, mask=mask if constant else extra, **options)
        if not case.aux:
            return found
        output, statistics = found
        return output + reduce(jnp.add, statistics.values())[..., None].astype(output.dtype)

    return compile_call(attention, case, inputs, extra, note="" if backend else note)


def prepare_jax_nn(case: Case, inputs: Inputs, *, implementation: Any = None) -> Call:
    """`jax.nn.dot_product_attention`, with its own arguments for causal masks and windows."""
    demand_plain(case)
    options: dict[str, Any] = {"implementation": implementation}
    if case.mask in ("causal", "window", "narrow window"):
        options["is_causal"] = True
    if case.mask == "window":
        options["local_window_size"] = (window_width(case.lengths[1]), 0)
    if case.mask == "narrow window":
        options["local_window_size"] = (NARROW - 1, 0)
    if implementation == "cudnn" and not options.get("is_causal") and case.mask != "full":
        raise UnavailableError("has no argument for this mask but a dense one")
    return _prepare_swapped(jax.nn.dot_product_attention, case, inputs, options)


def _prepare_swapped(function: Callable[..., Any], case: Case, inputs: Inputs, options: Any) -> Call:
    """A function of (batch, length, heads, width) that takes a dense mask where no option says it."""
    keep = None if options.get("is_causal") else case.make_dense_mask()
    mask = None if keep is None else jnp.asarray(keep)[None, None]
    attention = lambda query, key, value, mask: function(query, key, value, mask=mask, **options)  # noqa: E731
    return compile_call(attention, case, inputs, mask, swapped=True)


def _prepare_flax(case: Case, inputs: Inputs) -> Call:
    """`flax.nnx.dot_product_attention`, which has an argument for causal masks."""
    demand_package("flax")
    from flax import nnx

    if case.query[1] != case.key[1]:
        raise UnavailableError("takes as many key heads as query heads")
    options = {"is_causal": case.mask == "causal"}
    return _prepare_swapped(nnx.dot_product_attention, case, inputs, options)


def _prepare_tokamax(case: Case, inputs: Inputs) -> Call:
    """`tokamax.dot_product_attention`, which has an argument for causal masks."""
    demand_package("tokamax")
    import tokamax

    options = {"is_causal": case.mask == "causal"}
    return _prepare_swapped(tokamax.dot_product_attention, case, inputs, options)


def prepare_tokamax_kernel(case: Case, inputs: Inputs) -> Call:
    """Tokamax's Mosaic GPU kernel, told by ranges of keys what a row sees, as its own windows are."""
    demand_package("tokamax")
    if case.sinks or case.aux:
        raise UnavailableError("has no argument for sinks or statistics")
    from tokamax._src.ops.attention import api, base

    mask = base.Mask(is_causal=case.mask != "full")
    if case.mask not in ("full", "causal"):
        first, end = (jnp.asarray(bound, jnp.int32)[None, None] for bound in case.find_ranges())
        mask = base.Mask(k_start=first, k_end=end)
    kernel = partial(api.IMPLEMENTATIONS["mosaic_gpu"], logits_soft_cap=case.cap, mask=mask)
    return compile_call(lambda q, k, v, _: kernel(q, k, v), case, inputs, None, swapped=True)


OWN = "regard"  # what ratios are to
JAX_PEERS: Sequence[Peer] = (
    Peer(OWN, partial(_prepare_regard, backend=None)),
    Peer("regard-dense", partial(_prepare_regard, backend="dense")),
    Peer("regard-tiled", partial(_prepare_regard, backend="tiled")),
    Peer("jax.nn", prepare_jax_nn),
    Peer("flax.nnx", _prepare_flax),
    Peer("tokamax", _prepare_tokamax),
)
