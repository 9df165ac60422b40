"""Regard beside other libraries and beside itself: measure, say what was found, write it down."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from benchmarks import (
    cases,
    comparisons,
    gpu_rates,
    machine,
    measuring,
    models,
    peers,
    report,
    torch_peers,
)
from regard.cli.console import Console, UsageError, expected_errors
from regard.inspection.figures import canvas
from regard.training import metrics

RESULTS = "results.json"
KIND = "regard bench"  # says that a results.json is ours to replace
ROUNDS, QUICK_ROUNDS = 7, 3
# Measured besides the cases.
COMPARISONS: dict[str, Callable[[], Iterator[comparisons.Comparison]]] = {
    "tile-lists": comparisons.compare_tile_lists,
    "jit": comparisons.compare_jit,
    "dropout": comparisons.compare_dropout,
    "options": comparisons.compare_options,
    "cache": comparisons.compare_cache,
    "readouts": comparisons.compare_readouts,
    "linear": comparisons.compare_linear,
    "generate": models.compare_generation,
    "train": models.compare_training,
}
GPU = "gpu"
PEERS = {peer.name: peer for peer in (*peers.JAX_PEERS, *torch_peers.TORCH_PEERS)}


def _option(metavar: str, default: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class Bench:
    """Time Regard beside other attention libraries that are installed, and some of its calls beside others.

    Example: python -m benchmarks --quick --cases window decode
    """

    cases: Annotated[tuple[str, ...], _option("WORD ...", "all")] = ()
    """Cases whose name holds one of these words."""
    dtypes: Annotated[
        tuple[Literal["float32", "bfloat16"], ...], _option("{float32,bfloat16} ...", "both")
    ] = ()
    """Types of query, key and value."""
    peers: Annotated[tuple[str, ...], _option("NAME ...", "all that are installed")] = ()
    """Whom to measure; Regard's own choice of backend always is."""
    rounds: Annotated[int | None, _option("N", "7, with --quick 3")] = None
    """How often each is timed; the median counts."""
    quick: bool = False
    """A first look: a quarter of the lengths, three rounds."""
    out: Annotated[Path | None, _option("DIR", "out/bench, or out/bench-quick")] = None
    """Output directory."""
    force: bool = False
    """Replace the results in the output directory."""
    quiet: bool = False
    """Print errors only."""
    json: bool = False
    """JSON lines on standard output, text for people on standard error."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, 1 where Regard fails or disagrees, 2 for a mistake, 130 interrupted."""
    command = tyro.cli(
        Bench, prog="python -m benchmarks", args=arguments, config=(tyro.conf.FlagCreatePairsOff,)
    )
    console = Console(json_lines=command.json, quiet=command.quiet)
    try:
        return run_benchmark(command, console)
    except UsageError as error:
        console.fail(str(error))
        return 2
    except KeyboardInterrupt:
        console.fail("interrupted")
        return 130


def run_benchmark(command: Bench, console: Console) -> int:
    """Measure what was asked for; return 1 when Regard itself fails or disagrees with the definition."""
    if command.rounds is not None and command.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {command.rounds}")
    out = command.out or Path("out") / ("bench-quick" if command.quick else "bench")
    with expected_errors():
        known = [*(case.name for case in cases.CASES), *COMPARISONS, GPU]
        names = cases.select("case", known, command.cases)
        chosen = cases.select("peer", list(PEERS), command.peers, exact=True)
        _claim(out, force=command.force)
    asked = [PEERS[name] for name in PEERS if name in chosen or name == peers.OWN]
    outcomes, document = _measure(command, console, names, asked, out)
    for dtype, own in _by_dtype(outcomes).items():
        console.say()
        console.say(report.tabulate(own, dtype))
    console.say()
    if outcomes:
        console.say(report.LEGEND.format(side=measuring.PRODUCT_SIDE))
    for line in report.list_absent(outcomes):
        console.say(line)
    for found in document["comparisons"]:
        console.say(comparisons.describe(found))
    for line in gpu_rates.describe_gpu_rates(document[GPU]) if GPU in document else ():
        console.say(line)
    console.say(f"\nwritten: {', '.join(map(str, (out / RESULTS, *_draw(outcomes, out))))}")
    console.emit("end", results=str(out / RESULTS))
    return _verdict(outcomes, console)


def _measure(
    command: Bench, console: Console, names: list[str], asked: list[peers.Peer], out: Path
) -> tuple[list[measuring.Outcome], dict[str, Any]]:
    """Run every case and keep results.json up to date, so that an interruption loses one case at most."""
    rounds = command.rounds or (QUICK_ROUNDS if command.quick else ROUNDS)
    outcomes: list[measuring.Outcome] = []
    document: dict[str, Any] = {
        "kind": KIND,
        "complete": False,
        "machine": machine.describe_machine(),
        "settings": {"rounds": rounds, "quick": command.quick, "product_side": measuring.PRODUCT_SIDE},
        "cases": [],
        "comparisons": [],
    }

    def measure_case(case: cases.Case) -> None:
        outcomes.append(measuring.measure_case(case, asked, rounds, measuring.PRODUCT_SIDE))
        document["cases"].append(report.to_json(outcomes[-1]))
        console.emit("case", **document["cases"][-1])

    def compare(name: str) -> None:
        document["comparisons"] += [comparison.measure(rounds) for comparison in COMPARISONS[name]()]

    def measure_gpu() -> None:
        document[GPU] = gpu_rates.measure_gpu_rates(rounds)

    steps: list[tuple[str, Callable[[], None]]] = []
    for case in cases.CASES:
        for dtype in cases.DTYPES:
            if case.name in names and (dtype in command.dtypes or not command.dtypes):
                asked_case = dataclasses.replace(case.shrink() if command.quick else case, dtype=dtype)
                steps.append((f"{case.name} {dtype}", partial(measure_case, asked_case)))
    steps += [(name, partial(compare, name)) for name in COMPARISONS if name in names]
    steps += [(GPU, measure_gpu)] if GPU in names else []
    console.say(f"{document['machine']['cpu']}, {document['machine']['cores']} cores; results go to {out}")
    with console.show_steps() as begin:
        for index, (label, step) in enumerate(steps):
            begin(index, len(steps), label)
            step()
            document["complete"] = index == len(steps) - 1
            metrics.replace_text(out / RESULTS, json.dumps(document, indent=2) + "\n")
    return outcomes, document


def _claim(out: Path, *, force: bool) -> None:
    """Refuse a directory that holds something else, or results that nobody asked to replace."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; give another --out")
    if not out.exists() or not any(out.iterdir()):
        out.mkdir(parents=True, exist_ok=True)
        return
    try:
        ours = json.loads((out / RESULTS).read_text(encoding="utf-8")).get("kind") == KIND
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise ValueError(f"{out} holds other files and no results of ours; give another --out")
    if not force:
        raise ValueError(f"{out} holds results already; give another --out, or --force to replace them")
    for path in (out / RESULTS, *out.glob("ratios-*.png"), *out.glob("ratios-*.svg")):
        path.unlink(missing_ok=True)


def _by_dtype(outcomes: list[measuring.Outcome]) -> dict[str, list[measuring.Outcome]]:
    dtypes = dict.fromkeys(outcome.case.dtype for outcome in outcomes)
    return {dtype: [outcome for outcome in outcomes if outcome.case.dtype == dtype] for dtype in dtypes}


def _draw(outcomes: list[measuring.Outcome], out: Path) -> Iterator[Path]:
    """Draw one picture per dtype, as PNG and as SVG."""
    for dtype, own in _by_dtype(outcomes).items():
        figure = report.draw_ratios(own, f"Attention, {dtype}")
        for kind in ("png", "svg"):
            yield canvas.save(figure, out / f"ratios-{dtype}.{kind}")


def _verdict(outcomes: list[measuring.Outcome], console: Console) -> int:
    """Return 1 where Regard fails or disagrees; other libraries may."""
    wrong = [
        f"{one.peer} {one.status} on {outcome.case.name} {outcome.case.dtype}: {one.reason}"
        for outcome in outcomes
        for one in outcome.measurements
        if one.peer.startswith(peers.OWN) and one.status in ("failed", "disagrees")
    ]
    for line in wrong:
        console.fail(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
