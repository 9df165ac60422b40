"""`regard bench`: measure, say what was found, write it down; `regard bench tune`: measure this machine."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from regard.benchmarking import (
    cache_rate,
    cases,
    generation_rate,
    gpu_rates,
    jit_gain,
    linear_gain,
    machine,
    measuring,
    option_costs,
    peers,
    readout_costs,
    report,
    tile_lists,
    torch_peers,
    training_gain,
    tuning,
)
from regard.cli.commands import Bench, Tune
from regard.cli.console import Console, UsageError
from regard.cli.training import expected_errors
from regard.inspection.figures import canvas
from regard.training import metrics

RESULTS = "results.json"
KIND = "regard bench"  # says that a results.json is ours to replace
ROUNDS, QUICK_ROUNDS = 7, 3
JIT_ROUNDS = 30  # per round of the others: these calls take microseconds
# What is measured besides the cases: how, for a number of rounds, and how it is said.
EXTRA: dict[str, tuple[Callable[[int], dict[str, Any]], Callable[[dict[str, Any]], Iterator[str]]]] = {
    "tile-lists": (tile_lists.measure_tile_lists, tile_lists.describe_tile_lists),
    "jit": (lambda rounds: jit_gain.measure_jit_gain(rounds * JIT_ROUNDS), jit_gain.describe_jit_gain),
    "options": (option_costs.measure_option_costs, option_costs.describe_option_costs),
    "cache": (cache_rate.measure_cache_rate, cache_rate.describe_cache_rate),
    "readouts": (readout_costs.measure_readout_costs, readout_costs.describe_readout_costs),
    "linear": (linear_gain.measure_linear_gain, linear_gain.describe_linear_gain),
    "generate": (generation_rate.measure_generation_rate, generation_rate.describe_generation_rate),
    "gpu": (gpu_rates.measure_gpu_rates, gpu_rates.describe_gpu_rates),
    "train": (training_gain.measure_training_gain, training_gain.describe_training_gain),
}
PEERS = {peer.name: peer for peer in (*peers.JAX_PEERS, *torch_peers.TORCH_PEERS)}
Begin = Callable[[int, int, str], None]


def run_benchmark(command: Bench, console: Console) -> int:
    """Measures what was asked for; 1 when Regard itself fails or disagrees with the definition."""
    rounds = command.rounds or (QUICK_ROUNDS if command.quick else ROUNDS)
    if command.rounds is not None and command.rounds < 1:
        raise UsageError(f"--rounds must be at least 1, got {command.rounds}")
    if isinstance(command.action, Tune):
        return _tune(command, command.action, rounds, console)
    out = command.out or Path("out") / ("bench-quick" if command.quick else "bench")
    with expected_errors():
        names = cases.select("case", [*(case.name for case in cases.CASES), *EXTRA], command.cases)
        chosen = cases.select("peer", list(PEERS), command.peers, exact=True)
        _claim(out, force=command.force)
    asked = [PEERS[name] for name in PEERS if name in chosen or name == peers.OWN]
    found = _measure(command, console, names, asked, rounds, out)
    outcomes: list[measuring.Outcome] = found["outcomes"]
    for dtype, own in _by_dtype(outcomes).items():
        console.say()
        console.say(report.tabulate(own, dtype))
    console.say()
    if outcomes:
        console.say(report.LEGEND.format(side=measuring.PRODUCT_SIDE))
    for line in (*report.list_absent(outcomes), *_describe_extra(found["document"])):
        console.say(line)
    written = [out / RESULTS, *_draw(outcomes, out)]
    console.say(f"\nwritten: {', '.join(map(str, written))}")
    console.emit("end", results=str(out / RESULTS))
    return _verdict(outcomes, console)


def _measure(
    command: Bench, console: Console, names: list[str], asked: list[peers.Peer], rounds: int, out: Path
) -> dict[str, Any]:
    """Runs every case and keeps results.json up to date, so that an interruption loses one case at most."""
    dtypes = [dtype for dtype in cases.DTYPES if dtype in command.dtypes or not command.dtypes]
    calls = [case for case in cases.CASES if case.name in names]
    calls = [case.shrink() for case in calls] if command.quick else calls
    calls = [dataclasses.replace(case, dtype=dtype) for case in calls for dtype in dtypes]
    extra = [name for name in EXTRA if name in names]
    document: dict[str, Any] = {
        "kind": KIND,
        "complete": False,
        "machine": machine.describe_machine(),
        "settings": {"rounds": rounds, "quick": command.quick, "product_side": measuring.PRODUCT_SIDE},
        "cases": [],
    }
    console.say(f"{document['machine']['cpu']}, {document['machine']['cores']} cores; results go to {out}")
    outcomes = []
    total = len(calls) + len(extra)
    with _show_progress(console) as begin:
        for index, case in enumerate(calls):
            begin(index, total, f"{case.name} {case.dtype}")
            outcome = measuring.measure_case(case, asked, rounds, measuring.PRODUCT_SIDE)
            outcomes.append(outcome)
            document["cases"].append(report.to_json(outcome))
            console.emit("case", **document["cases"][-1])
            _write(out, document)
        for index, name in enumerate(extra, len(calls)):
            begin(index, total, name)
            document[name.replace("-", "_")] = EXTRA[name][0](rounds)
            _write(out, document)
    document["complete"] = True
    _write(out, document)
    return {"outcomes": outcomes, "document": document}


def _claim(out: Path, *, force: bool) -> None:
    """Refuses a directory that holds something else, or results that nobody asked to replace."""
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
        raise ValueError(f"{out} holds other files and no results of regard bench; give another --out")
    if not force:
        raise ValueError(f"{out} holds results already; give another --out, or --force to replace them")
    for path in (out / RESULTS, *out.glob("ratios-*.png"), *out.glob("ratios-*.svg")):
        path.unlink(missing_ok=True)


def _write(out: Path, document: dict[str, Any]) -> None:
    """Writes results.json in one move."""
    metrics.replace_text(out / RESULTS, json.dumps(document, indent=2) + "\n")


def _by_dtype(outcomes: list[measuring.Outcome]) -> dict[str, list[measuring.Outcome]]:
    dtypes = dict.fromkeys(outcome.case.dtype for outcome in outcomes)
    return {dtype: [outcome for outcome in outcomes if outcome.case.dtype == dtype] for dtype in dtypes}


def _draw(outcomes: list[measuring.Outcome], out: Path) -> list[Path]:
    """One picture per dtype, as PNG and as SVG."""
    written = []
    for dtype, own in _by_dtype(outcomes).items():
        figure = report.draw_ratios(own, f"Attention, {dtype}")
        written += [canvas.save(figure, out / f"ratios-{dtype}.{kind}") for kind in ("png", "svg")]
    return written


def _describe_extra(document: dict[str, Any]) -> Iterator[str]:
    """What was measured besides the cases, in a line or more each."""
    for name, (_, describe) in EXTRA.items():
        if name.replace("-", "_") in document:
            yield from describe(document[name.replace("-", "_")])


def _verdict(outcomes: list[measuring.Outcome], console: Console) -> int:
    """Other libraries may fail or disagree; Regard may not."""
    wrong = [
        f"{one.peer} {one.status} on {outcome.case.name} {outcome.case.dtype}: {one.reason}"
        for outcome in outcomes
        for one in outcome.measurements
        if one.peer.startswith(peers.OWN) and one.status in ("failed", "disagrees")
    ]
    for line in wrong:
        console.fail(line)
    return 1 if wrong else 0


@contextmanager
def _show_progress(console: Console) -> Iterator[Begin]:
    """A bar where it can be redrawn, else a line per step."""
    if not console.is_live:
        yield lambda done, total, label: console.say(f"{done + 1}/{total} {label}")
        return
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console.human, transient=True) as shown:
        bar = shown.add_task("", total=None)
        yield lambda done, total, label: shown.update(bar, completed=done, total=total, description=label)


def _tune(command: Bench, action: Tune, rounds: int, console: Console) -> int:
    """Finds the tuning, shows what it was chosen from, and writes it unless asked not to."""
    if command.cases or command.peers or command.dtypes or command.out or command.force:
        raise UsageError("tune has a grid and a file of its own: only --rounds, --quick and --dry-run apply")
    from regard.engine.flash import tuning as engine_tuning

    grid = tuning.QUICK_GRID if command.quick else tuning.FULL_GRID
    console.say(f"{machine.read_cpu_model()}: measuring for {engine_tuning.device_key()}")
    with _show_progress(console) as begin:
        findings = tuning.measure_tuning(
            grid, rounds, lambda begun, total, label: begin(begun - 1, total, label)
        )
    for table in _tabulate_findings(findings):
        console.say()
        console.say(table)
    console.say()
    console.emit("tuning", **dataclasses.asdict(findings.tuning))
    path = engine_tuning.cache_file()
    if action.dry_run or command.quick:
        kind = "a dry run" if action.dry_run else "a quick look"
        console.say(f"{kind}: {path} is left as it is")
        return 0
    with expected_errors():
        engine_tuning.write_tuning(path, findings.tuning)
    engine_tuning.load_tuning.cache_clear()
    console.say(f"written: {path}")
    return 0


def _tabulate_findings(findings: tuning.Findings) -> Iterator[Table]:
    """Tiles, thresholds, and the choice beside the defaults."""
    tiles = _new_table("tile side", "cells", "forward", "with backward")
    for (side, cells), mean in findings.forward.items():
        tiles.add_row(str(side), f"{cells:,}", f"{mean:.3f}", f"{findings.backward[side, cells]:.3f}")
    yield tiles
    points = _new_table("threshold", "size", "dense / tiled")
    for name, measured in findings.thresholds.items():
        for point in measured:
            points.add_row(name, f"{point.size:,}", f"{point.dense_seconds / point.tiled_seconds:.3f}")
    yield points
    default = type(findings.tuning)()
    choice = _new_table("setting", "chosen", "default")
    for name, value in dataclasses.asdict(findings.tuning).items():
        choice.add_row(name, f"{value:,}", f"{getattr(default, name):,}")
    yield choice


def _new_table(*headers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left")
    return table
