"""Attention on an NVIDIA GPU: Regard's choice beside cuDNN through jax.nn and, where it is, FlexAttention.

Run by `python -m benchmarks --cases gpu`; with jax and numpy only, by `python -m benchmarks.gpu_rates`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine
from benchmarks.cases import Case
from benchmarks.measuring import prepare_calls
from benchmarks.peers import OWN, Call, Peer, prepare_attend, prepare_jax_nn
from benchmarks.torch_peers import prepare_flex
from regard.attention import explain

HEADS, KEY_HEADS, WIDTH = 64, 8, 128
ROUNDS = 7
BURST_SECONDS = 0.05  # of calls that are not waited for one by one: a launch costs as much as a short call
CHECKED = 2048  # up to this length results are compared with the definition, which is slow
CUDNN, FLEX = "jax.nn cudnn", "torch.flex"


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
    """Measure seconds and TFLOP/s of every case, forward and with backward; nothing without an NVIDIA GPU."""
    device = jax.devices()[0]
    if jax.default_backend() != "gpu":
        return {"device": device.device_kind, "missing": "no NVIDIA GPU", "cases": []}
    found = []
    for case in cases:
        for passes in ("forward", "forward and backward"):
            found.append(_measure_case(dataclasses.replace(case, passes=passes), rounds))
    return {"device": device.device_kind, "machine": machine.describe_machine(), "cases": found}


def _measure_case(case: Case, rounds: int) -> dict[str, Any]:
    calls, absent = prepare_calls(case, PEERS, check=case.lengths[0] <= CHECKED)
    flops = case.count_flops()
    seconds = {name: statistics.median(times) for name, times in _time_bursts(calls, rounds).items()}
    query, key = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in (case.query, case.key))
    return {
        "case": case.name,
        "passes": case.passes,
        "flops": flops,
        "backend": explain(query, key, key, mask=case.make_mask()).backend,
        "median_seconds": seconds,
        "tflops": {name: flops / 1e12 / taken for name, taken in seconds.items()},
        "temporary_bytes": {
            name: call.temporary_bytes for name, call in calls.items() if call.temporary_bytes
        },
        "refused": {
            name: f"disagrees: {one.reason}" if one.status == "disagrees" else one.reason
            for name, one in absent.items()
        },
    }


def _time_bursts(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Return seconds per call, in bursts that take turns."""
    bursts = {}
    for name, call in calls.items():
        call.run()
        start = time.perf_counter()
        call.run()
        bursts[name] = max(1, round(BURST_SECONDS / (time.perf_counter() - start)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(bursts[name] - 1):
                call.start()
            call.run()
            seconds[name].append((time.perf_counter() - start) / bursts[name])
    return seconds


PEERS = (
    Peer(OWN, lambda case, inputs: prepare_attend(case, inputs, case.make_mask(), constant=True)),
    Peer(CUDNN, partial(prepare_jax_nn, implementation="cudnn")),
    # With its block mask in every call, as Regard's lists of tiles are.
    Peer(FLEX, partial(prepare_flex, masks_in_call=True)),
)


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
    """Yield lines about every case."""
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
