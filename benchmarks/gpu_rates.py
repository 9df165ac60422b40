"""Attention on an NVIDIA GPU: Regard's backends beside cuDNN through jax.nn and, where it is, FlexAttention.

Run by `python -m benchmarks --cases gpu`; with jax and numpy only, by `python -m benchmarks.gpu_rates`, which
keeps what it measured in a file and goes on from there when it is started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from benchmarks import machine
from benchmarks.cases import Case, select
from benchmarks.measuring import prepare_calls
from benchmarks.peers import (
    OWN,
    Call,
    Inputs,
    Peer,
    UnavailableError,
    prepare_attend,
    prepare_jax_nn,
    prepare_tokamax_kernel,
)
from benchmarks.torch_peers import prepare_flex
from regard.engine.dispatch.registry import BACKENDS

HEADS, GROUP, WIDTH = 64, 8, 128
LONG, LONG_HEADS = 32_768, 16  # fewer heads fill the device as well, and inputs are drawn in less time
ROUNDS = 7
BURST_SECONDS = 0.05  # of calls that are not waited for one by one: a launch costs as much as a short call
LONG_SECONDS = 0.5  # calls that take longer are timed twice, whatever the rounds
CHECKED = 2048  # up to this length results are compared with the definition, which is slow
SECONDS = 480.0  # after which no further case is begun
HANGING_SECONDS = 240, 90  # in which a case must end, compiling included; and what is still being tried
LEFT, AGAIN = 2, 3  # how a process ends that leaves cases
CUDNN, FLEX, XLA = "jax.nn cudnn", "torch.flex", "jax.nn xla"


def _case(name: str, length: int, mask: str = "causal", width: int = WIDTH, **more: Any) -> Case:
    heads = LONG_HEADS if length >= LONG else HEADS
    query, key = ((1, count, length, width) for count in (heads, heads // GROUP))
    return Case(f"{name} {length}", query, key, mask, "forward", "bfloat16", **more)


CASES = (
    *(_case("causal", length) for length in (8192, 2048, LONG)),
    *(_case("softcap window", length, "window", cap=50.0) for length in (2048, LONG)),
    *(_case("sinks window", length, "narrow window", 64, sinks=True) for length in (2048, LONG)),
    *(_case("sinks", length, width=64, sinks=True) for length in (2048, 8192)),
    *(_case("lse", length, aux=("lse",)) for length in (2048, 8192)),
    *(_case(mask, length, mask) for mask in ("window", "documents", "prefix") for length in (2048, LONG)),
    Case(
        "decode 32768",
        (16, HEADS, 1, WIDTH),
        (16, HEADS // GROUP, LONG, WIDTH),
        passes="decode",
        dtype="bfloat16",
    ),
    *(
        dataclasses.replace(_case("float32 lse, entropy", length, aux=("lse", "entropy")), dtype="float32")
        for length in (2048, 4096)
    ),
)


def split_passes(cases: Sequence[Case]) -> list[Case]:
    """Return each case forward and with backward; decoding forward alone."""
    both = ("forward", "forward and backward")
    return [
        one
        for case in cases
        for one in (
            [case] if case.passes == "decode" else [dataclasses.replace(case, passes=p) for p in both]
        )
    ]


def measure_gpu_rates(
    rounds: int, cases: Sequence[Case] | None = None, peers: Sequence[Peer] | None = None
) -> dict[str, Any]:
    """Measure seconds and TFLOP/s of every case and peer; nothing without an NVIDIA GPU."""
    device = jax.devices()[0]
    if jax.default_backend() != "gpu":
        return {"device": device.device_kind, "missing": "no NVIDIA GPU", "cases": []}
    chosen = split_passes(CASES) if cases is None else cases
    found = [measure_case(case, rounds, PEERS if peers is None else peers) for case in chosen]
    return {"device": device.device_kind, "machine": machine.describe_machine(), "cases": found}


def measure_case(case: Case, rounds: int, peers: Sequence[Peer]) -> dict[str, Any]:
    """Measure one case; whatever goes wrong is what it says."""
    entry = {"case": case.name, "passes": case.passes, "flops": case.count_flops()}
    try:
        calls, absent = prepare_calls(case, peers, check=case.lengths[0] <= CHECKED)
        seconds, failed = _time_bursts(calls, rounds)
    except Exception as error:  # the other cases stand
        reasons = dict.fromkeys((peer.name for peer in peers), describe_error(error))
        return {**entry, "median_seconds": {}, "refused": reasons}
    return {
        **entry,
        "backend": calls[OWN].note if OWN in calls else "",
        "key_bytes": 2
        * jax.ShapeDtypeStruct(case.key, case.dtype).size
        * jax.numpy.dtype(case.dtype).itemsize,
        "median_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "temporary_bytes": {name: one.temporary_bytes for name, one in calls.items() if one.temporary_bytes},
        "refused": failed
        | {
            name: f"{one.status}: {one.reason}" if one.status != "refused" else one.reason
            for name, one in absent.items()
        },
    }


def describe_error(error: Exception) -> str:
    """Return an error's kind and first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _time_bursts(calls: dict[str, Call], rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return seconds per call, in bursts that take turns, and why some have none."""
    bursts: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    failed: dict[str, str] = {}

    def run(name: str, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count - 1):
            calls[name].start()
        calls[name].run()
        return (time.perf_counter() - start) / count

    for turn in range(-1, rounds):
        for name in calls:
            if name in failed or (turn > 1 and seconds[name][0] > LONG_SECONDS):
                continue
            try:
                if turn < 0:  # once more than when it was compiled
                    run(name, 1)
                    bursts[name] = max(1, round(BURST_SECONDS / run(name, 1)))
                else:
                    seconds.setdefault(name, []).append(run(name, bursts[name]))
            except Exception as error:
                failed[name] = describe_error(error)
                seconds.pop(name, None)
    return seconds, failed


def _prepare_own(case: Case, inputs: Inputs, backend: str | None = None) -> Call:
    return prepare_attend(case, inputs, case.make_mask(), backend=backend, constant=True)


def _prepare_xla(case: Case, inputs: Inputs) -> Call:
    """JAX's own, which holds all scores; where statistics are asked for, the output alone."""
    if case.dtype != "float32" or case.lengths[0] <= CHECKED:
        raise UnavailableError("is measured beside float32, longer than what is checked")
    return prepare_jax_nn(dataclasses.replace(case, aux=()), inputs, implementation="xla")


PEERS = (
    Peer(OWN, _prepare_own),
    *(
        Peer(name, partial(_prepare_own, backend=name))
        for name in BACKENDS
        if name in ("cudnn", "mosaic_gpu", "tiled")
    ),
    Peer(CUDNN, partial(prepare_jax_nn, implementation="cudnn")),
    Peer(XLA, _prepare_xla),
    Peer("tokamax", prepare_tokamax_kernel),
    # With its block mask in every call, as Regard's lists of tiles are.
    Peer(FLEX, partial(prepare_flex, masks_in_call=True)),
)


def describe_gpu_rates(found: dict[str, Any]) -> Iterator[str]:
    """Yield a table of Markdown: a row for every case and peer, with a rate or a reason."""
    if "missing" in found:
        yield f"gpu: {found['missing']}, {found['device']} here; not measured"
        return
    versions = ", ".join(f"{name} {version}" for name, version in found["machine"]["versions"].items())
    yield f"{found['device']}, {versions}; medians."
    yield ""
    yield f"| case | by | ms | rate | time over {OWN}'s | |"
    yield "|---|---|---|---|---|---|"
    for entry in found["cases"]:
        yield from _rows(entry)


def _rows(entry: dict[str, Any]) -> Iterator[str]:
    case = f"{entry['case']}, {entry['passes']}"
    own = entry["median_seconds"].get(OWN)
    for name, taken in entry["median_seconds"].items():
        rate = f"{entry['flops'] / 1e12 / taken:.0f} TFLOP/s"
        if entry["passes"] == "decode":  # bound by the memory that keys and values are read from
            rate = f"{entry['key_bytes'] / 1e9 / taken:.0f} GB/s"
        by = f"{name} ({entry['backend']})" if name == OWN else name
        yield f"| {case} | {by} | {1e3 * taken:.3f} | {rate} | {f'{taken / own:.2f}' if own else ''} | |"
    for name, why in entry["refused"].items():
        yield f"| {case} | {name} | | | | {why.replace('|', '/')} |"


def main(arguments: Sequence[str]) -> int:
    """Measure what the file lacks, and print all that there is as a table.

    A process of its own does it: what crashes or hangs there is written down as that, and another goes on.
    """
    options, begun = read_options(arguments), time.monotonic()
    while True:
        rest = options.seconds - (time.monotonic() - begun)
        command = [sys.executable, "-m", "benchmarks.gpu_rates", *arguments, f"--seconds={rest}", "--worker"]
        code = subprocess.run(command, check=False).returncode
        if not options.out.exists():
            return code
        found = json.loads(options.out.read_text(encoding="utf-8"))
        pending = found.pop("pending")
        if pending:
            name, passes, peers = pending
            reason = "failed: it did not come to an end, or ended the process"
            new = {
                "case": name,
                "passes": passes,
                "median_seconds": {},
                "refused": dict.fromkeys(peers, reason),
            }
            _keep(found, new)
        _write(options.out, found)
        if not pending and code != AGAIN:
            break
    sys.stdout.write("\n" + "\n".join(describe_gpu_rates(found)) + "\n")
    return int(code or any(OWN not in entry["median_seconds"] for entry in found["cases"]))


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read what to measure, and where it is kept."""
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_rates", description=__doc__)
    parser.add_argument("--cases", default="", help="those that hold one of these words, divided by commas")
    parser.add_argument("--peers", default="", help="these alone, divided by commas")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="begin no case after so many")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=Path("build/gpu_rates.json"), help="goes on from there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    words, names = ([one for one in text.split(",") if one] for text in (options.cases, options.peers))
    try:
        chosen = select("case", [case.name for case in CASES], words)
        asked = select("peer", [peer.name for peer in PEERS], names, exact=True)
    except ValueError as error:
        parser.error(str(error))
    options.cases = split_passes([case for case in CASES if case.name in chosen])
    options.peers = [peer for peer in PEERS if peer.name in asked]
    return options


def work(options: argparse.Namespace) -> int:
    """Measure what the file lacks until the time is over; AGAIN asks for a new process."""
    begun, found = time.monotonic(), measure_gpu_rates(options.rounds, ())
    if "missing" in found:
        sys.stdout.write("\n".join(describe_gpu_rates(found)) + "\n")
        return 1
    before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    if before.get("device") == found["device"]:
        found["cases"] = before["cases"]
    # The kernel of our own, which takes longest to compile, comes last, and alone.
    for new in (False, True):
        group = [peer for peer in options.peers if (peer.name == "mosaic_gpu") == new]
        for case in options.cases:
            known = {name for entry in found["cases"] if _is_of(entry, case) for name in _peers(entry)}
            peers = [peer for peer in group if peer.name not in known]
            if not peers:
                continue
            if time.monotonic() - begun > options.seconds:
                sys.stdout.write("the time is over: the same command goes on with the cases that are left\n")
                return LEFT
            _write(options.out, found, (case.name, case.passes, [peer.name for peer in peers]))
            faulthandler.dump_traceback_later(
                HANGING_SECONDS[new], exit=True, file=2
            )  # as sys.stderr may be no file
            entry = measure_case(case, options.rounds, peers)
            faulthandler.cancel_dump_traceback_later()
            sys.stdout.write("\n".join(_rows(entry)) + "\n")
            sys.stdout.flush()
            _keep(found, entry)
            _write(options.out, found)
            if any("CUDA" in reason for reason in entry["refused"].values()):
                return AGAIN  # after such an error everything fails in this process
    return 0


def _peers(entry: dict[str, Any]) -> set[str]:
    return {*entry["median_seconds"], *entry["refused"]}


def _is_of(entry: dict[str, Any], case: Case) -> bool:
    return (entry["case"], entry["passes"]) == (case.name, case.passes)


def _keep(found: dict[str, Any], new: dict[str, Any]) -> None:
    """Add what was found of some peers to what is known of the case."""
    for entry in found["cases"]:
        if (entry["case"], entry["passes"]) == (new["case"], new["passes"]):
            for name, value in new.items():
                entry[name] = (
                    entry.get(name, {}) | value if isinstance(value, dict) else value or entry.get(name)
                )
            return
    found["cases"].append(new)


def _write(path: Path, found: dict[str, Any], pending: tuple[str, str, list[str]] | None = None) -> None:
    """Write what is known, and what begins now, so that an interruption loses one case at most."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**found, "pending": pending}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(work(read_options(given)) if "--worker" in given else main(given))
