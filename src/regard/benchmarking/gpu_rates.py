"""Attention on an NVIDIA GPU: Regard's choice beside cuDNN through jax.nn and, where it is, FlexAttention.

Run by `regard bench --cases gpu`; alone, and with jax and numpy only, as `python -m` with this module's name.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from regard.attention import attend, explain
from regard.benchmarking import agreement, machine
from regard.benchmarking.cases import Case, Inputs, window_width
from regard.benchmarking.peers import UnavailableError
from regard.benchmarking.torch_peers import prepare_flex

HEADS, KEY_HEADS, WIDTH = 64, 8, 128
ROUNDS = 7
BURST_SECONDS = 0.05  # of calls that are not waited for one by one: a launch costs as much as a short call
CHECKED = 2048  # up to this length results are compared with the definition, which is slow
OWN, CUDNN, FLEX = "regard", "jax.nn cudnn", "torch.flex"


def _case(name: str, length: int, mask: str) -> Case:
    return Case(
        f"{name} {length}",
        (1, HEADS, length, WIDTH),
        (1, KEY_HEADS, length, WIDTH),
        mask=mask,
        dtype="bfloat16",
    )


CASES = (
    *(_case("causal", length, "causal") for length in (2048, 8192, 32_768)),
    *(_case(mask, length, mask) for mask in ("window", "documents", "prefix") for length in (2048, 32_768)),
)


def measure_gpu_rates(rounds: int, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Seconds and TFLOP/s of every case, forward and with backward; nothing without an NVIDIA GPU."""
    device = jax.devices()[0]
    if jax.default_backend() != "gpu":
        return {"device": device.device_kind, "missing": "no NVIDIA GPU", "cases": []}
    found = []
    for case in cases:
        for passes in ("forward", "forward and backward"):
            found.append(_measure_case(dataclasses.replace(case, passes=passes), rounds))
    return {"device": device.device_kind, "machine": machine.describe_machine(), "cases": found}


def _measure_case(case: Case, rounds: int) -> dict[str, Any]:
    inputs = case.make_inputs()
    reference = agreement.compute_reference(case, inputs) if case.lengths[0] <= CHECKED else None
    calls: dict[str, Callable[[], Any]] = {}
    flops = case.count_flops()
    refused: dict[str, str] = {}
    temporary: dict[str, int] = {}
    for name, prepare in PEERS.items():
        try:
            run, read, needed = prepare(case, inputs)
            problem = None
            if reference is not None:
                problem = agreement.describe_disagreement(case, read(run()), reference)
        except UnavailableError as error:
            refused[name] = str(error)
        except Exception as error:  # one library's trouble is a result, not the end
            refused[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        else:
            if problem is not None:
                refused[name] = f"disagrees: {problem}"
                continue
            calls[name] = run
            temporary |= {} if needed is None else {name: needed}
    seconds = {name: statistics.median(times) for name, times in _interleave(calls, rounds).items()}
    query, key = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in (case.query, case.key))
    return {
        "case": case.name,
        "passes": case.passes,
        "flops": flops,
        "backend": explain(query, key, key, mask=case.make_mask()).backend,
        "median_seconds": seconds,
        "tflops": {name: flops / 1e12 / time_ for name, time_ in seconds.items()},
        "temporary_bytes": temporary,
        "refused": refused,
    }


def _interleave(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds per call, in bursts that take turns."""
    bursts = {}
    for name, call in calls.items():
        _finish(call())
        start = time.perf_counter()
        _finish(call())
        bursts[name] = max(1, round(BURST_SECONDS / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(bursts[name] - 1):
                call()
            _finish(call())
            seconds[name].append((time.perf_counter() - start) / bursts[name])
    return seconds


def _finish(results: Any) -> None:
    """Wait for a library's own stream of work."""
    first = results[0]
    if isinstance(first, jax.Array):
        jax.block_until_ready(results)
    else:
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.synchronize()


Prepared = tuple[Callable[[], Any], Callable[[Any], Any], int | None]


def _prepare_jax(case: Case, inputs: Inputs, attention: Callable[..., Any], swapped: bool) -> Prepared:
    """A compiled call on arrays that lie as the library wants them."""
    arrays = [inputs.query, inputs.key, inputs.value]
    arrays += [] if inputs.cotangent is None else [inputs.cotangent]
    placed = [jnp.asarray(array, case.dtype) for array in arrays]
    placed = [jnp.swapaxes(array, 1, 2) if swapped else array for array in placed]

    def both(query: Any, key: Any, value: Any, cotangent: Any) -> Any:
        output, vjp = jax.vjp(attention, query, key, value)
        return output, *vjp(cotangent)

    compiled = jax.jit(both if case.is_backward else lambda *a: (attention(*a),)).lower(*placed).compile()
    needed = getattr(compiled.memory_analysis(), "temp_size_in_bytes", None)

    def read(results: Any) -> Any:
        own = [jnp.swapaxes(result, 1, 2) if swapped else result for result in results]
        return tuple(jax.device_get(result.astype(jnp.float32)) for result in own)

    return lambda: compiled(*placed), read, needed


def _prepare_own(case: Case, inputs: Inputs) -> Prepared:
    mask = case.make_mask()
    return _prepare_jax(case, inputs, lambda *arrays: attend(*arrays, mask=mask), swapped=False)


def _prepare_cudnn(case: Case, inputs: Inputs) -> Prepared:
    if case.mask not in ("full", "causal", "window"):
        raise UnavailableError("has no argument for this mask but a dense one")
    options: dict[str, Any] = {"is_causal": case.mask != "full", "implementation": "cudnn"}
    if case.mask == "window":
        options["local_window_size"] = (window_width(case.lengths[1]), 0)
    attention = lambda *arrays: jax.nn.dot_product_attention(*arrays, **options)  # noqa: E731
    return _prepare_jax(case, inputs, attention, swapped=True)


def _prepare_flex(case: Case, inputs: Inputs) -> Prepared:
    """With its block mask in every call, as Regard's lists of tiles are."""
    call = prepare_flex(case, inputs, masks_in_call=True)
    return call.run, call.read, None


PEERS: dict[str, Callable[[Case, Inputs], Prepared]] = {
    OWN: _prepare_own,
    CUDNN: _prepare_cudnn,
    FLEX: _prepare_flex,
}


def _describe_case(entry: dict[str, Any]) -> Iterator[str]:
    rates = entry["tflops"]
    parts = [f"{name} {rate:.0f} TFLOP/s" for name, rate in rates.items()]
    parts += [
        f"{rates[OWN] / rates[other]:.2f}x {other}"
        for other in (CUDNN, FLEX)
        if OWN in rates and other in rates
    ]
    yield f"{entry['case']}, {entry['passes']} ({entry['backend']}): {', '.join(parts)}"
    yield from (f"  {name}: {why}" for name, why in entry["refused"].items())


def describe_gpu_rates(found: dict[str, Any]) -> Iterator[str]:
    """Two lines a case."""
    if "missing" in found:
        yield f"gpu: {found['missing']}, {found['device']} here; not measured"
    for entry in found["cases"]:
        yield from _describe_case(entry)


def main(arguments: Sequence[str]) -> int:
    """Measure and say what was found case by case; write it to the file that is named."""
    entries: list[dict[str, Any]] = []
    for case in CASES:
        found = measure_gpu_rates(ROUNDS, (case,))
        sys.stdout.write("\n".join(describe_gpu_rates(found)) + "\n")
        sys.stdout.flush()
        if "missing" in found:
            return 1
        entries += found["cases"]
        if arguments:  # an interruption loses one case at most
            text = json.dumps({**found, "cases": entries}, indent=2) + "\n"
            Path(arguments[0]).write_text(text, encoding="utf-8")
    return int(any(OWN not in entry["median_seconds"] for entry in entries))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
