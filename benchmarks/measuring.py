"""Measurements of all peers on a case, which take turns."""

from __future__ import annotations

import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import agreement
from benchmarks.cases import Case
from benchmarks.peers import OWN, Call, Peer, UnavailableError
from regard.tuning import interleave

PRODUCT_SIDE = 2048  # of the square matrices whose product is the yardstick
Status = Literal["measured", "refused", "failed", "disagrees"]


@dataclass(frozen=True)
class Measurement:
    """One peer on one case."""

    peer: str
    status: Status
    reason: str = ""  # why there are no times
    note: str = ""
    median_seconds: float | None = None
    least_seconds: float | None = None
    first_seconds: float | None = None
    temporary_bytes: int | None = None


@dataclass(frozen=True)
class Outcome:
    """All peers on one case."""

    case: Case
    kept_pairs: int
    flops: int
    product_gflops: float  # rate of one large product in the case's dtype, measured in the same rounds
    measurements: tuple[Measurement, ...]
    process_peak_bytes: int  # of the whole process so far

    def find(self, peer: str) -> Measurement | None:
        """Return a peer's measurement, where it has times."""
        return next((m for m in self.measurements if m.peer == peer and m.median_seconds is not None), None)

    def ratio_to_own(self, one: Measurement) -> float | None:
        """Return time over that of Regard's own choice."""
        own = self.find(OWN)
        return _divide(one.median_seconds, own and own.median_seconds)

    def ratio_to_best(self, one: Measurement) -> float | None:
        """Return time over that of the fastest other library."""
        others = [
            m.median_seconds
            for m in self.measurements
            if m.median_seconds is not None and not m.peer.startswith(OWN)
        ]
        return _divide(one.median_seconds, min(others, default=None))

    def gflops(self, one: Measurement) -> float | None:
        """Return operations of products over kept pairs per second, in 10^9."""
        return _divide(self.flops / 1e9, one.median_seconds)


def _divide(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def prepare_calls(
    case: Case, peers: Sequence[Peer], *, check: bool = True
) -> tuple[dict[str, Call], dict[str, Measurement]]:
    """Compile every peer and compare its result with the definition; return calls, and why some have none."""
    inputs = case.make_inputs()
    reference = agreement.compute_reference(case, inputs) if check else None
    calls: dict[str, Call] = {}
    absent: dict[str, Measurement] = {}
    for peer in peers:
        try:
            call = peer.prepare(case, inputs)
            problem = None
            if reference is not None:
                problem = agreement.describe_disagreement(case, call.read(call.run()), reference)
        except UnavailableError as error:
            absent[peer.name] = Measurement(peer.name, "refused", str(error))
        except Exception as error:  # one library's trouble is a result, not the end
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            absent[peer.name] = Measurement(peer.name, "failed", reason)
        else:
            if problem is None:
                calls[peer.name] = call
            else:
                absent[peer.name] = Measurement(peer.name, "disagrees", problem)
    return calls, absent


def measure_case(case: Case, peers: Sequence[Peer], rounds: int, product_side: int = PRODUCT_SIDE) -> Outcome:
    """Time the peers that agree with the definition, and one large product, in turns."""
    calls, absent = prepare_calls(case, peers)
    product = _make_product(case.dtype, product_side)
    times = interleave({name: call.run for name, call in calls.items()} | {"": product}, rounds, settle=True)
    rate = 2 * product_side**3 / statistics.median(times.pop("")) / 1e9
    measured = {
        name: Measurement(
            name,
            "measured",
            note=calls[name].note,
            median_seconds=statistics.median(seconds),
            least_seconds=min(seconds),
            first_seconds=calls[name].first_seconds,
            temporary_bytes=calls[name].temporary_bytes,
        )
        for name, seconds in times.items()
    }
    ordered = tuple((measured | absent)[peer.name] for peer in peers)
    return Outcome(case, case.count_pairs(), case.count_flops(), rate, ordered, process_peak_bytes())


def _make_product(dtype: str, side: int) -> Callable[[], Any]:
    """Return a call of one square product, warm."""
    one, other = (jax.random.normal(rng, (side, side), dtype) for rng in jax.random.split(jax.random.key(0)))
    multiply = jax.jit(jnp.matmul)

    def run() -> Any:
        return jax.block_until_ready(multiply(one, other))

    run()
    return run


def process_peak_bytes() -> int:
    """Return the most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
