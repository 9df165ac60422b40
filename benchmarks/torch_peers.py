"""PyTorch's attention, where PyTorch is installed; it is not loaded before a case needs it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.cases import (
    NARROW,
    Case,
    Inputs,
    block_side,
    document_ids,
    kept_blocks,
    prefix_length,
    window_width,
)
from benchmarks.peers import Call, Peer, Results, UnavailableError, demand_package, demand_plain


def _load_torch() -> tuple[Any, str]:
    """Return the package and the device that stands beside JAX's."""
    demand_package("torch")
    # OpenMP threads that spin between calls lose up to 4x beside the threads of another library.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    kind = jax.default_backend()
    if kind == "cpu":
        return torch, "cpu"
    if kind != "gpu" or not torch.cuda.is_available():
        raise UnavailableError(f"torch has no device of the kind jax runs on ({kind})")
    return torch, "cuda"


def _time_first(attention: Callable[..., Any], case: Case, inputs: Inputs) -> Call:
    """Time `attention(query, key, value)`, with a backward pass where the case has one."""
    torch, device = _load_torch()
    dtype = getattr(torch, case.dtype)

    def place(array: np.ndarray) -> Any:
        return torch.from_numpy(array).to(device, dtype)

    *arrays, cotangent = map(place, inputs.arrays) if case.is_backward else (*map(place, inputs.arrays), None)
    for array in arrays:
        array.requires_grad_(cotangent is not None)

    def begin() -> Any:
        if cotangent is None:
            with torch.no_grad():
                results = (attention(*arrays),)
        else:
            for array in arrays:
                array.grad = None
            output = attention(*arrays)
            output.backward(cotangent)
            results = (output.detach(), *(array.grad for array in arrays))
        return results

    def wait(results: Any) -> Any:
        if device == "cuda":
            torch.cuda.synchronize()
        return results

    def read(results: Any) -> Results:
        return tuple(result.float().cpu().numpy() for result in results)

    start = time.perf_counter()
    wait(begin())
    return Call(begin, wait, read, time.perf_counter() - start)


def _prepare_sdpa(case: Case, inputs: Inputs) -> Call:
    """`scaled_dot_product_attention`, which has an argument for causal masks."""
    demand_plain(case)
    torch, device = _load_torch()
    causal = case.mask == "causal"
    keep = None if causal else case.make_dense_mask()
    mask = None if keep is None else torch.tensor(keep, device=device)
    grouped = case.query[1] != case.key[1]

    def attention(query: Any, key: Any, value: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )

    return _time_first(attention, case, inputs)


def prepare_flex(case: Case, inputs: Inputs, *, masks_in_call: bool = False) -> Call:
    """`flex_attention`, compiled; its block mask is built before, or compiled too and built in every call."""
    torch, device = _load_torch()
    if device == "cpu" and case.is_backward:
        raise UnavailableError("FlexAttention has no backward pass on the CPU")
    demand_package("torch.nn.attention.flex_attention")
    from torch.nn.attention import flex_attention as flex

    modifier, cap = _mask_modifier(case, torch, device), case.cap
    sinks: Any = None if not case.sinks else torch.tensor(case.make_sinks(), device=device)[:, None]
    if "entropy" in case.aux:
        raise UnavailableError("returns lse alone")
    softcap = None if cap is None else lambda score, b, h, query, key: cap * torch.tanh(score / cap)
    num_queries, num_keys = case.lengths
    torch.compiler.reset()  # a function compiled for many shapes would fall back to eager
    build = torch.compile(flex.create_block_mask) if masks_in_call else flex.create_block_mask
    make_mask = lambda: modifier and build(modifier, None, None, num_queries, num_keys, device=device)  # noqa: E731
    mask = None if masks_in_call else make_mask()
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    grouped = case.query[1] != case.key[1]

    def attention(query: Any, key: Any, value: Any) -> Any:
        blocks = make_mask() if masks_in_call else mask
        options = {"score_mod": softcap, "block_mask": blocks, "enable_gqa": grouped}
        if sinks is None and not case.aux:
            return compiled(query, key, value, **options)
        output, lse = compiled(query, key, value, return_lse=True, **options)
        if sinks is not None:
            output = output * torch.sigmoid(lse - sinks)[..., None].to(output.dtype)
            lse = torch.logaddexp(lse, sinks)
        return output + lse[..., None].to(output.dtype) if case.aux else output

    try:
        return _time_first(attention, case, inputs)
    except torch._dynamo.exc.TorchDynamoException as error:
        summary = str(error).strip().partition("\n")[0][:200]
        raise UnavailableError(f"torch.compile failed: {summary}") from error


def _mask_modifier(case: Case, torch: Any, device: str) -> Any:
    """Return the case's mask as FlexAttention takes it, or None for all to all."""
    num_queries, num_keys = case.lengths
    width, prefix = window_width(num_keys), prefix_length(num_keys)
    ids: Any = torch.tensor(document_ids(num_keys), device=device) if case.mask == "documents" else None
    kept: Any = (
        torch.tensor(kept_blocks(num_queries, num_keys), device=device) if case.mask == "blocks" else None
    )
    rows, columns = block_side(num_queries), block_side(num_keys)
    modifiers: dict[str, Any] = {
        "full": None,
        "causal": lambda b, h, query, key: query >= key,
        "window": lambda b, h, query, key: (query >= key) & (query - key <= width),
        "narrow window": lambda b, h, query, key: (query >= key) & (query - key < NARROW),
        "documents": lambda b, h, query, key: (query >= key) & (ids[query] == ids[key]),
        "prefix": lambda b, h, query, key: (query >= key) | (key < prefix),
        "blocks": lambda b, h, query, key: kept[query // rows, key // columns],
    }
    return modifiers[case.mask]


TORCH_PEERS = (Peer("torch.sdpa", _prepare_sdpa), Peer("torch.flex", prepare_flex))
